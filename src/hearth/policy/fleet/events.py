"""Events for the brain and actions that it orders. Events are facts and carry their time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from hearth.core.types import (
    LOCAL,
    AdapterId,
    Hold,
    ModelId,
    NodeId,
    Pipeline,
    RequestId,
    Rung,
    TurnEnd,
    WorkerId,
)
from hearth.policy.fleet.prefixes import PrefixDigest
from hearth.policy.fleet.profile import NOTHING_PROMISED, ModelProfile, Promise
from hearth.policy.memory.reload_cost import PRIOR_BYTES_PER_S

# Events.


@dataclass(frozen=True, slots=True)
class ModelDeployed:
    now_s: float
    profile: ModelProfile


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    now_s: float
    model: ModelId


@dataclass(frozen=True, slots=True)
class ModelStopped:
    """A user wants a model idle: retained, or with `is_freed` out of memory."""

    now_s: float
    model: ModelId
    is_freed: bool


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker is up, and its device is empty."""

    now_s: float
    worker: WorkerId
    kind: str  #: of its device, with the labels of its node: see `pool_of`
    budget_bytes: int
    shares_workspace: bool = True  #: one workspace for all models always suffices
    node: NodeId = LOCAL
    gpu: int | None = None  #: the index of its device on the node; None: a CPU
    runs_stages: bool = True  #: False: its Hearth is older, and may not know all that stages are told
    device_share: float = 1.0  #: of its device, which several workers may share


@dataclass(frozen=True, slots=True)
class WorkerLost:
    now_s: float
    worker: WorkerId
    culprit: ModelId | None = None  #: the model whose step was running; None: none or unknown
    has_answered: bool = False  #: the culprit has produced tokens on that worker
    reason: str = "died"  #: what the worker did, in words
    #: Requests with a row in that step, the only ones that the loss counts against; None: unknown.
    in_step: tuple[RequestId, ...] | None = None
    is_with_node: bool = False  #: its machine or the way there was lost: no model is to blame


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone for good: it returns under another id. Its workers are lost by events of their own."""

    now_s: float
    node: NodeId


@dataclass(frozen=True, slots=True)
class WorkersExpected:
    """The workers of a node start, or those that are not up are given up."""

    now_s: float
    node: NodeId
    num_workers: int  #: 0: no more than are up


@dataclass(frozen=True, slots=True)
class NodeDraining:
    """A user empties a node, or has it back. What runs there may finish."""

    now_s: float
    node: NodeId
    is_draining: bool


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """How fast chunks have come to a node from another one."""

    now_s: float
    source: NodeId
    target: NodeId
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class StagesMeasured:
    """How long usual decode steps of a pipeline take in each of its stages, as its first worker reports."""

    now_s: float
    worker: WorkerId
    model: ModelId
    stage_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WantedAdapter:
    adapter: AdapterId
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RequestArrived:
    now_s: float
    request_id: RequestId
    model: ModelId
    num_prompt_tokens: int
    max_tokens: int | None
    keep_alive_s: float | None = None  #: infinite pins the model; None: the model's own
    digest: str | None = None  #: of the version that the prompt was tokenised for; None: any
    is_batch: bool = False  #: not interactive: lower priority
    adapter: WantedAdapter | None = None  #: None: the bare model
    prefixes: tuple[PrefixDigest, ...] = ()  #: of its prompt, for the choice among replicas
    key: str | None = None  #: the name of the API key that is charged


class End(StrEnum):
    DONE = "done"  #: its worker has finished it
    STOPPED = "stopped"  #: at a stop string, which the worker does not know
    FAILED = "failed"  #: on its worker: its run time says nothing


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    num_tokens: int  #: that were not cached
    seconds: float  #: from its first step to its first token


@dataclass(frozen=True, slots=True)
class RequestFinished:
    now_s: float
    request_id: RequestId
    num_output_tokens: int
    how: End = End.DONE
    prompt: ComputedPrompt | None = None  #: None: not measured, or by more than one worker


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    now_s: float
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class LoadProgressed:
    now_s: float
    worker: WorkerId
    model: ModelId
    num_bytes: int  #: so far


@dataclass(frozen=True, slots=True)
class RungUse:
    rung: Rung
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ModelReady:
    """All weights of a model are on a worker, at its first load or after some were evicted."""

    now_s: float
    worker: WorkerId
    model: ModelId
    rungs: tuple[RungUse, ...]
    total_s: float  #: of the load that ended now
    ahead_bytes: int = 0  #: of the rungs' bytes, those prefetched before it
    shared_bytes: int = 0  #: besides the rungs' bytes: read by another load

    @property
    def whole_s(self) -> float | None:
        return None if self.ahead_bytes or self.shared_bytes else self.total_s


@dataclass(frozen=True, slots=True)
class ModelFailed:
    """A model could not be loaded, or failed later. It has left the worker's memory."""

    now_s: float
    worker: WorkerId
    model: ModelId
    reason: str
    is_cut_off: bool = False  #: it has lost another member of its pipeline: no model is to blame


@dataclass(frozen=True, slots=True)
class TurnBegan:
    """A model is promised its memory on a worker, and steps as soon as its weights are loaded."""

    now_s: float
    worker: WorkerId
    model: ModelId


@dataclass(frozen=True, slots=True)
class TurnEnded:
    now_s: float
    worker: WorkerId
    model: ModelId
    why: TurnEnd


@dataclass(frozen=True, slots=True)
class ResidencyReported:
    now_s: float
    model: ModelId
    bytes_by_rung: Mapping[Rung, int]
    node: NodeId = LOCAL


@dataclass(frozen=True, slots=True)
class DeviceReported:
    """How much of each model's weights lies in a worker's device memory. Replaces the report before."""

    now_s: float
    worker: WorkerId
    bytes_by_model: Mapping[ModelId, int]  #: as stored: of `ModelProfile.num_bytes`


@dataclass(frozen=True, slots=True)
class PressureReported:
    """How much KV a replica will need in a second, and how much it can have. Sent as that changes."""

    now_s: float
    worker: WorkerId  #: of a pipeline, the first member
    model: ModelId
    demand_tokens: int
    room_tokens: int


@dataclass(frozen=True, slots=True)
class DemandForecast:
    """How many requests per second are expected for a model, in intervals that follow each other.

    Replaces the forecast before. None is expected beyond the last interval.
    """

    now_s: float
    model: ModelId
    step_s: float  #: the length of each interval
    mean_per_s: tuple[float, ...]
    high_per_s: tuple[float, ...]  #: requests come faster than that with a probability of 10%
    age_s: float = 0.0  #: how long ago the first interval began

    @property
    def begin_s(self) -> float:
        return self.now_s - self.age_s


@dataclass(frozen=True, slots=True)
class TimerFired:
    now_s: float


Event = (
    ModelDeployed
    | ModelRemoved
    | ModelStopped
    | WorkerJoined
    | WorkerLost
    | WorkersExpected
    | NodeLost
    | NodeDraining
    | LinkMeasured
    | StagesMeasured
    | RequestArrived
    | RequestFinished
    | RequestCancelled
    | LoadProgressed
    | ModelReady
    | ModelFailed
    | TurnBegan
    | TurnEnded
    | ResidencyReported
    | DeviceReported
    | PressureReported
    | DemandForecast
    | TimerFired
)


# Actions. Structs, because some are made for every event and dataclasses take ten times as long to make.


class Option(Struct, frozen=True, gc=False):
    worker: WorkerId
    queue_s: float
    load_s: float
    utilisation: float  #: from 0 to 1
    cost_s: float
    obstacle: str | None = None  #: why it was not considered; then the numbers mean nothing
    evict_s: float = 0.0  #: sum of the reload costs of evicted replicas
    missing_bytes: int = 0  #: of weights that are not on that worker's device
    prompt_s: float = 0.0  #: to compute the prompt, as far as it has digests and is not cached
    cached_tokens: int = 0  #: of the prompt, probably


class Why(StrEnum):
    RESIDENT = "resident"  #: the model was loaded and had a free slot
    LOADING = "loading"  #: the model was loading
    FREE_ROOM = "free_room"  #: loaded into free memory
    EVICTED = "evicted"  #: loaded after evicting others
    TURNS = "turns"  #: hosted beside busy models, which take turns with it
    WAITED = "waited"  #: a slot or room came free
    DEMAND = "demand"  #: loaded as a further replica, because those that the model has are full
    STAGED = "staged"  #: workers that load the whole model run it together meanwhile
    SWITCHED = "switched"  #: from these to one that has the whole model
    DROPPED = "dropped"  #: from whole replicas to a group of them that gave up layers for KV
    RESTORED = "restored"  #: from such a group to a whole replica


class Dispatch(Struct, frozen=True):
    request_id: RequestId
    model: ModelId  #: as its worker hosts it: see `pipeline_name`
    worker: WorkerId
    why: Why
    waited_s: float
    options: tuple[Option, ...]


class LoadModel(Struct, frozen=True):
    """Host a model and load what is missing, in its turn if models take turns."""

    model: ModelId
    worker: WorkerId
    kv_floor_bytes: int  #: of KV that it is promised
    max_kv_bytes: int  #: it never gets more
    promise: Promise = NOTHING_PROMISED  #: all that it is owed, in its turn if models take turns
    pipeline: Pipeline | None = None  #: that the worker is a member of; None: it runs the whole model
    is_ahead: bool = False  #: a turn begins for it as soon as there is room, though nobody asks for it yet


class Evict(Struct, frozen=True):
    """Stop hosting an idle model. Precedes the order that uses its room.

    Its bytes stay until their memory is needed, unless `is_freed`; that also applies to models evicted
    before.
    """

    model: ModelId
    worker: WorkerId
    cost_s: float  #: the reload cost of its weights
    is_freed: bool  #: its bytes go now: they are outdated, or a user freed them


class SetHold(Struct, frozen=True):
    """Set the hold of a hosted model while it has no requests: retained, warm or pinned.

    A new model is warm, and so is a retained one that gets a request, without an order.
    """

    model: ModelId
    worker: WorkerId
    hold: Hold


class RefusePin(Struct, frozen=True):
    model: ModelId
    worker: WorkerId
    message: str  #: with the numbers


class RejectReason(StrEnum):
    UNKNOWN_MODEL = "unknown_model"
    QUEUE_FULL = "queue_full"
    NEVER_FITS = "never_fits"
    PINNED_OUT = "pinned_out"  #: it would fit without what is pinned
    LOAD_FAILED = "load_failed"
    WORKERS_LOST = "workers_lost"  #: because of it or its model, as far as known
    MODEL_REMOVED = "model_removed"  #: or another version took its place


class Reject(Struct, frozen=True):
    """End a request that was not served to its end, and tell its client why."""

    request_id: RequestId
    reason: RejectReason
    message: str  #: with the numbers, for the user
    retry_s: float | None = None


class CancelRun(Struct, frozen=True):
    """End the run of a request on a worker. The request has ended, or is dispatched again."""

    request_id: RequestId
    worker: WorkerId


class MoveKv(Struct, frozen=True):
    """Whether the workers of a pipeline send the KV of a request to the worker that it moves to.

    Else it is computed again there. Precedes the order that ends its run.
    """

    request_id: RequestId
    model: ModelId  #: the pipeline, as its workers host it
    senders: tuple[WorkerId, ...]
    target: WorkerId
    num_bytes: int  #: of its prompt
    move_s: float | None  #: estimated; None: the speed of a link is not known
    prompt_s: float  #: to compute its prompt, estimated
    wait_s: float  #: how long the target waits for it
    is_moved: bool


class Prewarm(Struct, frozen=True):
    """A model is brought nearer to a worker's device ahead of the requests that a forecast expects.

    To the device, an order to load it follows, unless the model is there and is only kept.
    """

    model: ModelId
    worker: WorkerId
    to_host: bool  #: to the memory of its node; False: to the device
    lead_s: float  #: the requests are expected so long from now
    expected_per_s: float
    cost_s: float  #: seconds of the worker's device that are lost if no request comes
    is_advice: bool = False  #: nothing is done


class SetTimer(Struct, frozen=True):
    at_s: float


@dataclass(frozen=True, slots=True)
class AddWorkers:
    """Have one more machine. Repeated while requests wait, also if the last one has not come yet."""

    model: ModelId  #: whose request has waited longest


@dataclass(frozen=True, slots=True)
class ReleaseWorkers:
    """Give a machine back. It is idle, and the brain has begun to drain it."""

    node: NodeId


Action = (
    Dispatch
    | LoadModel
    | Evict
    | SetHold
    | RefusePin
    | Reject
    | CancelRun
    | MoveKv
    | Prewarm
    | SetTimer
    | AddWorkers
    | ReleaseWorkers
)


@dataclass(frozen=True, slots=True)
class Scaling:
    out_after_s: float = 5.0  #: a request has waited so long for room, a slot or a turn
    in_after_s: float = 300.0  #: a node has had no requests and no loads for so long
    min_nodes: int = 0  #: nodes that stay, without the head's own


@dataclass(frozen=True, slots=True)
class WhileLoading:
    gather_s: float = 0.05  #: how long further loads are awaited after the second one
    min_gain_s: float = 1.0  #: so much earlier than the first whole replica a pipeline must be ready


@dataclass(frozen=True, slots=True)
class Prewarming:
    """Models are loaded ahead of forecast requests."""

    budget: float = 0.05  #: the share of all devices' time that wrong forecasts may cost
    is_advice: bool = False  #: only say what would be done


@dataclass(frozen=True, slots=True)
class BrainConfig:
    max_queue: int = 512  #: requests that wait for a slot, room or their model's first turn
    #: After this, a busy model is drained for a waiting request, unless they can take turns.
    patience_s: float = 2.0
    #: A drain is given up after this, and its worker is not drained for as long.
    max_drain_s: float = 30.0
    #: Models that do not fit together take turns, which workers decide.
    takes_turns: bool = False
    max_resumes: int = 3  #: workers that may be lost because of a request
    queue_weight: float = 1.0  #: of `queue_s` in the routing cost
    load_weight: float = 1.0  #: of `load_s` in the routing cost
    packing_s: float = 0.05  #: what an idle worker costs against a full one, in the routing cost
    spread_s: float = 0.2  #: what a node costs that has a replica already, against one that has none
    scaling: Scaling | None = None  #: None: there are no machines to be had
    while_loading: WhileLoading | None = None  #: None: requests wait for whole replicas
    #: A first token should come so soon, if need be from a further replica; None: only slots count.
    first_token_s: float | None = None
    prewarming: Prewarming | None = None  #: None: forecasts are ignored
    #: Bytes per second of each rung until it has shown its own speed.
    priors: Mapping[Rung, float] = field(default_factory=lambda: dict(PRIOR_BYTES_PER_S))
