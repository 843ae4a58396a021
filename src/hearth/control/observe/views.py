"""The views that the service shows of itself: plain frozen values that become JSON.

Times are in seconds and count from the arrival of their request; only `created_at_s`, `noticed_at_s` and
`arrived_at_s` count since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hearth.control.deploy.preset import Preset
from hearth.core.forecast_messages import RequestForecast
from hearth.core.types import LOCAL, Rung, Transport
from hearth.policy.fleet.events import Option


@dataclass(frozen=True, slots=True)
class UpstreamView:
    state: str  #: unchanged, changed, unknown: not asked, or no answer
    deployed_version: str  #: digest of a manifest, or commit of a repository
    current_version: str | None = None  #: where it has changed
    noticed_at_s: float | None = None  #: when the change was seen first
    reason: str | None = None  #: why upstream gave no answer just now
    remedy: str | None = None  #: the command that takes the new version


@dataclass(frozen=True, slots=True)
class ModelView:
    """A deployed model, adapter or preset. An adapter or preset has its base's context and keep-alive."""

    name: str
    aliases: tuple[str, ...]
    source: str  #: what it was deployed from
    where: str  #: the directory or URL that it is loaded from
    digest: str
    created_at_s: float
    num_bytes: int
    num_parameters: int
    dtype: str
    quant: str
    max_context: int
    has_chat_template: bool
    keep_alive_s: float | None  #: None: for ever
    is_pinned: bool
    upstream: UpstreamView | None = None  #: None: it was deployed from a path, or is only listed
    family: str | None = None  #: such as `llama`; None: it was deployed when that was not kept
    base: str | None = None  #: what it is an adapter or a preset of; None: it is a model itself
    max_rank: int | None = None  #: this and the next of an adapter alone
    targets: tuple[str, ...] = ()  #: the projections that it changes: qkv, o, up, down
    labels: tuple[str, ...] = ()  #: that the machines have on which it runs
    min_replicas: int = 0
    max_replicas: int | None = None  #: None: no limit
    #: Layers of each stage. Empty: a worker holds the whole model, stages do not help, or it is only listed.
    stages: tuple[int, ...] = ()
    warning: str | None = None  #: why it cannot run, or is outdated; None: nothing, or it is only listed
    preset: Preset | None = None  #: its defaults, if it is a preset of `base`

    @property
    def is_adapter(self) -> bool:
        return self.base is not None and self.preset is None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *(alias for alias in self.aliases if alias != self.name))


@dataclass(frozen=True, slots=True)
class PartView:
    kind: str  #: weights, kv, tables, adapters, workspace, lost, free
    state: str  #: active, retained, spare
    model: str | None  #: the base of adapters; None: of no model, or of several
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PoolView:
    age_s: float  #: since the worker's report
    parts: tuple[PartView, ...]  #: disjoint; together they are the budget
    moved_bytes: int  #: so far, to make place
    fallbacks: dict[str, int]  #: what it had to do otherwise than wished, by name
    torch_limit_bytes: int | None = None  #: that torch may take besides; None: any number
    is_torch_limit_measured: bool = False  #: False: it is a guess


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker, or its seat while none is ready."""

    worker: str
    pid: int
    kind: str
    device: str
    state: str  #: starting, ready, failing: it has ended before it was ready, and is started again
    budget_bytes: int
    used_bytes: int  #: not free; until the worker has reported, what models are promised
    num_restarts: int
    pool: PoolView | None = None  #: None: the worker has not reported yet
    reason: str | None = None  #: why the one before has ended, and when the next is tried; None: it is ready
    node: str = LOCAL


@dataclass(frozen=True, slots=True)
class ResidentAdapterView:
    """An adapter with memory on a worker, or with requests that wait for it there."""

    name: str
    num_bytes: int  #: of device memory; 0: it is not there
    num_running: int
    num_waiting: int
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class ResidentView:
    model: str
    worker: str
    state: str  #: loading, waiting, paused, busy, warm, retained, pinned
    num_bytes: int  #: of device memory, KV and tables included
    loaded_bytes: int  #: of its weights, on the device
    total_bytes: int
    num_running: int
    expires_in_s: float | None  #: until it is only retained; None: busy, pinned or retained
    is_hosted: bool = True  #: False: it is promised nothing, and others take of it what they need
    shared_bytes: int = 0  #: of the loaded ones, those that another model has as well
    kv_bytes: int = 0
    kv_used_blocks: int = 0  #: of running requests
    kv_cached_blocks: int = 0  #: prefixes not in use
    kv_blocks: int = 0  #: that it has now
    is_in_turn: bool = False  #: where models that do not fit together take turns
    due_in_s: float | None = None  #: until its next token is due; negative: overdue; None: no requests
    is_pin_refused: bool = False  #: it should be pinned, and others would have no room then
    kv_demand_tokens: int = 0  #: of KV that it will need in a second; of a pipeline, the first stage tells
    kv_room_tokens: int = 0  #: of KV that it can have; 0: unknown
    is_dropped: bool = False  #: a stage of replicas that gave up layers for KV
    max_seqs: int | None = None  #: requests that it runs at a time; None: it is not hosted
    adapters: tuple[ResidentAdapterView, ...] = ()  #: whose base it is
    layers: tuple[int, int] | None = None  #: of a stage: the first, and the first behind it; None: all
    transport: Transport | None = (
        None  #: of hidden states to this stage; None: it is the first, or the model whole
    )
    #: Of the first stage: what a decode step takes in each stage, and besides, on its way; empty: not known.
    stage_s: tuple[float, ...] = ()
    hops_s: float = 0.0
    num_flights: int | None = None  #: steps under way at the same time; None: it is not the first stage


@dataclass(frozen=True, slots=True)
class HostMemoryView:
    """Host memory for chunks of models. For GPUs, chunks stay there after a load."""

    used_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class LinkView:
    source: str  #: the node that chunks come from
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class NodeView:
    """A machine of the cluster; `local` is the one of the service."""

    name: str
    state: str  #: up, draining, down
    node: str = ""  #: of its present life
    host: str = ""  #: its address, as the head sees it
    devices: tuple[str, ...] = ()  #: one per worker
    num_ready_workers: int = 0
    budget_bytes: int = 0  #: device memory of all its workers that are ready
    host_used_bytes: int = 0
    host_bytes: int = 0
    links: tuple[LinkView, ...] = ()  #: from other nodes, as measured
    #: Models that come to several nodes at once, and from which nodes they come to this one.
    receives: dict[str, tuple[str, ...]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    reason: str | None = None  #: why workers are not up that should be


@dataclass(frozen=True, slots=True)
class ProcessView:
    workers: tuple[WorkerView, ...]
    models: tuple[ResidentView, ...]
    num_waiting: int  #: requests that wait for a slot, for room or for the first turn of their model
    num_running: int
    host: HostMemoryView | None = None  #: None: its keeper is starting
    notes: tuple[str, ...] = ()  #: what the service has to do without, and why


@dataclass(frozen=True, slots=True)
class UnloadView:
    """A model that a user has stopped, and what it had then, without bytes that it shares."""

    unloaded: str
    free: bool
    was_loaded: bool  #: bytes of it were in device memory, or on their way there
    num_requests: int  #: that it has to finish first
    device_bytes: int  #: its own, on all workers; with `free` they are given back
    host_bytes: int  #: of its chunks in host memory, where they stay until others need the room


@dataclass(frozen=True, slots=True)
class SnapshotView:
    model: str
    num_bytes: int
    unbooked_bytes: int  #: of device memory that the worker took besides its pool
    seconds: float  #: that it took


@dataclass(frozen=True, slots=True)
class TimelineMark:
    at_s: float  #: since the arrival of the request
    what: str  #: queued, placed, first_layer, layers_ready, loaded, started, first_token, preempted, ...
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RungView:
    rung: Rung
    num_bytes: int
    seconds: float
    source: str = ""  #: the node that sent them; empty: the worker's own, or object storage
    transport: Transport | None = None  #: None: no other node has sent them


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    what: str  #: queue, turn, load, prefill, decode, paused, ...
    begin_s: float
    end_s: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    request_id: str
    model: str  #: that was asked for, be it an adapter
    arrived_at_s: float
    outcome: str  #: running, stop, length, cancelled, or the label of an error
    error: str | None
    worker: str | None  #: the last one
    why: str | None  #: why it was placed there
    options: tuple[Option, ...]  #: what the alternatives would have cost
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_s: float
    load_s: float | None  #: None: the model was there
    first_token_s: float | None
    total_s: float | None
    tokens_per_s: float | None  #: after the first
    reused_bytes: int  #: that were on the device already
    shared_bytes: int  #: that another load was reading
    rungs: tuple[RungView, ...]  #: where the other bytes of the load came from
    num_preemptions: int
    num_resumes: int
    spans: tuple[TimelineSpan, ...]
    marks: tuple[TimelineMark, ...]
    num_pauses: int = 0  #: while other models had their turn
    paused_s: float = 0.0
    num_late_tokens: int = 0  #: by its pace
    client_request_id: str | None = None  #: that the client has sent; others may have sent the same
    traceparent: str | None = None  #: of the trace that the request is part of, as W3C spells it
    base: str | None = None  #: of the adapter that was asked for, as are the rest; None: it was a model
    adapter_tier: str | None = None  #: where the adapter was, `device` if it was there; None: it did not come
    adapter_wait_s: float = 0.0  #: until it had room
    adapter_load_s: float = 0.0  #: then until its bytes were there


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request in a list; `Explanation` has the details."""

    request_id: str
    client_request_id: str | None
    model: str  #: that was asked for, be it an adapter
    worker: str | None  #: the last one
    phase: str  #: queued, loading, prefill, decode, paused; in the end its outcome
    is_ended: bool
    arrived_at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    queue_s: float | None  #: None: it is not over
    tier: str | None  #: the slowest that its load read; None: it did not wait for a load
    first_token_s: float | None
    total_s: float | None


@dataclass(frozen=True, slots=True)
class Health:
    status: str  #: ok, starting, failing: no worker comes up, draining
    num_workers: int
    num_ready_workers: int
    version: str
    instance_id: str  #: of this life of the service; commands recognise it by that
    reason: str | None = None  #: why workers are not up that should be


@dataclass(frozen=True, slots=True)
class ForecastView:
    """Requests for a model, as they came and as they are expected."""

    model: str
    prewarm: str  #: advise or on
    recent_step_s: float
    recent_counts: tuple[float | None, ...]  #: in each of the last steps, the newest last; None: not recorded
    step_s: float
    counts: tuple[float | None, ...]  #: the same in longer steps, over days
    begin_at_s: float  #: when the first step of the forecast begins, since the epoch
    forecast: RequestForecast | None  #: None: there is no new one, for `reason`
    reason: str | None
    num_loaded: int  #: replicas, also those that are being loaded
    num_wanted: int | None  #: replicas worth having in `lead_s`; these three: None: the brain has no forecast
    lead_s: float | None  #: how long a load may take
    expected_per_s: float | None  #: requests after `lead_s`
    budget_s: float  #: time of devices that wrong forecasts may still cost
    last_prewarm: str | None  #: what the service did last for a forecast, or would have done
    last_prewarm_at_s: float | None  #: since the epoch
