"""The messages between the gateway and its workers. Opens no socket and knows no frame.

    worker                                    gateway
    (connects)                                Challenge
    WorkerHello, with a proof of the secret   Welcome, with the gateway's own proof; or the connection ends
    StepDone, one per step, ...               PrepareModel, HostModel, RetireModel, DropModel, HoldModel,
                                              ForgetAdapter, MakeSnapshot, StartRequest, SendKv,
                                              CancelRequest, Ping, Shutdown

Both directions are ordered, and a worker carries out orders one after the other: memory of a model that is
retired first is available to the model that is hosted next. The gateway never promises hosted models more
than the worker's budget (weights, workspace and `kv_floor_bytes` of each); the worker shares out the rest. A
`run` is one stay of a request on one worker. Its number is never reused, so late facts of a lost worker are
recognised.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from hearth.core.sizes import StepLimits
from hearth.core.types import (
    AdapterId,
    FinishReason,
    GuideSpec,
    Hold,
    ModelId,
    Pace,
    Pipeline,
    Pooling,
    PromptReading,
    Rung,
    SamplingParams,
    SnapshotOutcome,
    TokenLogprobs,
    TurnEnd,
    WorkerId,
)

#: The version that gateway and worker must share, and the members of a pipeline. Raise it with every change
#: of this file or of `engine/stage_messages.py`.
VERSION = 21


# What a process is told on its standard input, as one line of JSON, when it is started.


class WorkerSetup(Struct, frozen=True):
    """The first line that a worker reads from its standard input."""

    worker: WorkerId
    host: str  #: of the gateway, as is the port
    port: int
    secret: str  #: in hex
    kind: Literal["cpu", "cuda"]
    device_index: int
    num_sharing: int  #: workers on that device; on CPUs, all of them
    budget_bytes: int | None  #: None: derived from the device
    keeper_socket: str
    kernels_path: str  #: where compiled kernels are kept
    engine: dict[str, int | float | str | None]  #: the fields of EngineConfig
    num_threads: int | None  #: that torch may use; None: its own choice
    log_level: str
    stages_path: str  #: the directory of the sockets on which workers take connections: `stage_socket`
    turns: bool = False  #: models that do not fit together take turns
    beacon: int | None = None  #: the descriptor of its beacon's memory; None: no beacon
    snapshots_path: str | None = None  #: where snapshots are kept; None: none are made or used
    snapshot_bytes: int = 0  #: that all of them may take
    predecessor: int | None = None  #: the process that has the memory until it ends; None: no process has it
    agent_socket: str | None = None  #: where it asks for tickets to workers of other nodes; None: no cluster
    credentials: str | None = None  #: the directory of this node's certificate and key; None: no cluster

    def __repr__(self) -> str:
        """Leave out the secret: a repr may be logged."""
        return f"<WorkerSetup worker={self.worker} kind={self.kind} device_index={self.device_index}>"


#: The descriptor of the beacon in a worker that a template has forked: it follows the standard ones.
TEMPLATE_BEACON = 3


#: Requests to a template: fork a worker with the descriptors sent along, or log to the one sent along.
FORK_WORKER, LOG_HERE = b"fork", b"log"


class TemplateAnswer(Struct, frozen=True):
    """The template's answer when it is ready, and to each request for a worker."""

    pid: int  #: of the worker; 0: none was forked
    obstacle: str | None = None  #: why no worker can be forked
    import_s: float = 0.0  #: how long its imports took, if it says that it is ready


class WorkerFarewell(Struct, frozen=True):
    """The one line that a failing worker writes to its standard output."""

    error: str  #: the label of the error
    reason: str


class KeeperSetup(Struct, frozen=True):
    """The first line that the keeper of the store reads from its standard input."""

    socket: str
    kind: Literal["cpu", "cuda"]  #: of the devices that its memory is copied to
    path: str  #: these three as in StoreConfig
    disk_bytes: int | None
    host_bytes: int
    log_level: str
    agent_socket: str | None = None  #: where it asks for chunks of other nodes; None: there are none
    peers_socket: str | None = None  #: where it takes connections of other nodes from the agent
    credentials: str | None = None  #: the directory of this node's certificate and key; None: no cluster
    max_send_bytes: int | None = None  #: as in ClusterConfig


class ProcessAnswer(Struct, frozen=True):
    """The first line that the keeper, or the process for Ray or forecasts, writes to standard output."""

    error: str | None = None  #: the label of what keeps it from starting; None: it is ready
    reason: str = ""
    reads_natively: bool = True  #: False: without a C compiler the interpreter reads chunks


# The handshake.


class Challenge(Struct, frozen=True, tag=True):
    """The gateway's first message: a nonce whose proof shows that a worker knows the secret."""

    version: int
    nonce: bytes


class WorkerHello(Struct, frozen=True, tag=True):
    """A worker's first message, sent when its runtime is initialised and it can host models."""

    version: int
    worker: WorkerId
    nonce: bytes
    proof: bytes  #: of the gateway's nonce; see wire.py
    pid: int
    kind: Literal["cpu", "cuda"]
    device: str  #: for people, like "NVIDIA H200"
    budget_bytes: int  #: device memory for models: weights, workspace and KV
    shares_workspace: bool  #: its pool is sure to need one workspace for all models
    gpu: int | None = None  #: the index of its device on its node; None: a CPU


class Welcome(Struct, frozen=True, tag=True):
    """The gateway's own proof that it knows the secret; orders follow."""

    proof: bytes  #: of the worker's nonce


# Orders of the gateway.


class PrepareModel(Struct, frozen=True, tag=True):
    """Prepare kernels and description of a deployed model in the background, for a fast first start."""

    model: ModelId
    where: str  #: a directory, or `hearth://DIGEST` on another node
    limits: StepLimits  #: of the steps that it would have


class HostModel(Struct, frozen=True, tag=True):
    """Make room for a model, which is promised its memory, and load it. Requests may follow at once."""

    model: ModelId
    hosting: int  #: a number of this stay of the model, which every fact about the stay names
    where: str  #: a directory or a URL; on another node `hearth://DIGEST`
    digest: str  #: of the manifest; another one there means that the model was changed
    weight: float  #: how much a second of its start matters; see the reload cost
    max_context: int
    limits: StepLimits  #: that its memory was promised for
    kv_floor_bytes: int  #: of KV that it is promised, however much others want
    max_kv_bytes: int  #: it never gets more
    eos_ids: tuple[int, ...]
    own_bytes: int = 0  #: these three are its `Promise`, which binds while it is in turn
    workspace_bytes: int = 0
    standing_bytes: int = 0
    slot: int | None = None  #: of its addresses on the device; None: all are other models'
    pipeline: Pipeline | None = None  #: that runs the model; None: this worker alone
    member: int = 0  #: this worker's number in the pipeline
    is_ahead: bool = False  #: it is loaded for a forecast, before any request

    @property
    def layers(self) -> range | None:
        """The layers of this worker; None: all."""
        if self.pipeline is None:
            return None
        member = self.pipeline.members[self.member]
        return range(member.begin, member.end)


class RetireModel(Struct, frozen=True, tag=True):
    """End the promise of an idle model: its memory is evicted as others need it."""

    model: ModelId


class DropModel(Struct, frozen=True, tag=True):
    """Free all memory of a model, also of a retired one; its runs end without facts."""

    model: ModelId


class HoldModel(Struct, frozen=True, tag=True):
    """Hold a model without requests as retained, warm or pinned. A new one is warm."""

    model: ModelId
    hold: Hold


class MakeSnapshot(Struct, frozen=True, tag=True):
    """Make a snapshot when no model has requests. Answered by `SnapshotMade`, unless the stay ends first."""

    model: ModelId
    hosting: int
    #: Include steps with adapters, which have graphs of their own.
    has_adapters: bool = False


class AdapterOrder(Struct, frozen=True):
    """The adapter that a request runs with. The first request loads it, and it stays."""

    adapter: AdapterId  #: the digest of its manifest; another one there means that it was changed
    name: str  #: its deployed name, for people
    where: str  #: a directory or a URL on the head's node; workers of other nodes ask each other
    weight: float = 1.0  #: how much a second of its start matters; see the reload cost
    is_pinned: bool = False  #: once loaded, it is evicted only for memory promised to models


class ForgetAdapter(Struct, frozen=True, tag=True):
    """Free the memory of a removed adapter, pinned or not, when its last request has ended."""

    adapter: AdapterId


class KvMove(Struct, frozen=True):
    """KV of a request that the members of a pipeline send to the worker that goes on with the request."""

    run: int  #: of the request in the pipeline
    senders: tuple[WorkerId, ...]  #: which have all layers together
    wait_s: float  #: what has not come by then is computed again


class StartRequest(Struct, frozen=True, tag=True):
    """Run a request, from its prompt or from where a lost worker left it."""

    run: int
    model: ModelId
    prompt: tuple[int, ...]
    output: tuple[int, ...]  #: emitted before, on workers that are gone
    sampling: SamplingParams  #: its seed is drawn; without stop strings
    salt: bytes  #: of the group that shares cached prefixes; secret, never logged
    guide: GuideSpec | None = None
    pace: Pace = Pace()
    age_s: float = 0.0  #: how long ago the request arrived at the gateway
    pooling: Pooling | None = None  #: its embedding is wanted; None: it is not
    adapter: AdapterOrder | None = None  #: None: the bare model
    kv: KvMove | None = None  #: that comes from where it ran before; None: none does

    def __repr__(self) -> str:
        """Leave out the salt and the user's text: a repr may be logged."""
        num_prompt_tokens, num_output_tokens = len(self.prompt), len(self.output)
        return f"<StartRequest run={self.run} model={self.model} {num_prompt_tokens=} {num_output_tokens=}>"


class SendKv(Struct, frozen=True, tag=True):
    """Have all members of a pipeline send the KV of a request, which is cancelled next, to a worker."""

    model: ModelId
    run: int
    target: WorkerId


class CancelRequest(Struct, frozen=True, tag=True):
    run: int


class Ping(Struct, frozen=True, tag=True):
    """Ask for a `Pong`, which the step thread sends between two steps; during a step its beacon tells."""

    number: int


class Shutdown(Struct, frozen=True, tag=True):
    """End the worker's process."""


# Facts from a worker.


class Admitted(Struct, frozen=True, array_like=True):
    """A run got a slot, for the first time or again after a preemption."""

    run: int
    num_cached_tokens: int
    waited_s: float  #: since it came to the worker, or since it was preempted


class StepDone(Struct, frozen=True, tag=True):
    """All tokens of one step of one model. `runs`, `tokens` and `logprobs` are parallel."""

    model: ModelId
    runs: list[int]
    tokens: list[int]
    finished: dict[int, FinishReason] = {}  #: by run
    logprobs: list[TokenLogprobs | None] | None = None
    readings: dict[int, PromptReading] = {}  #: what was asked of prompts, by run whose first token is here
    admitted: list[Admitted] = []  #: since the message before
    preempted: list[int] = []  #: likewise; they will be admitted again
    step_s: float = 0.0
    busy_s: float = 0.0  #: of this step and of those of the model before it that had nothing to tell


class RunFailed(Struct, frozen=True, tag=True):
    """One request could not be taken or continued; others are not affected."""

    run: int
    label: str
    reason: str


class KvMoved(Struct, frozen=True, tag=True):
    """The KV of a run has come, or did not come in time. The run starts with what there is."""

    run: int
    num_tokens: int  #: that need not be computed again
    num_bytes: int
    seconds: float  #: since the run came to the worker
    is_on_node: bool  #: all senders are on the worker's node


class LoadProgress(Struct, frozen=True, tag=True):
    """A load has brought more of a model's weights to the device."""

    model: ModelId
    hosting: int
    num_bytes: int  #: of those that were missing
    num_layers: int  #: that can run


class RungBytes(Struct, frozen=True):
    rung: Rung
    num_bytes: int
    seconds: float
    source: str = ""  #: the node that sent them; empty: this one, or object storage


def sum_by_rung(uses: Iterable[RungBytes]) -> dict[Rung, RungBytes]:
    """Sum over the nodes that sent bytes of a rung."""
    sums: dict[Rung, RungBytes] = {}
    for use in uses:
        before = sums.get(use.rung, RungBytes(use.rung, 0, 0.0))
        sums[use.rung] = RungBytes(use.rung, before.num_bytes + use.num_bytes, before.seconds + use.seconds)
    return sums


class ModelLoaded(Struct, frozen=True, tag=True):
    """All weights of a model are on the device."""

    model: ModelId
    hosting: int
    rungs: tuple[RungBytes, ...]
    reused_bytes: int  #: that were on the device already
    shared_bytes: int  #: that another load was reading already
    open_s: float  #: from the order until the keeper had found the model
    assemble_s: float  #: from then until the engine was put together, beside the bytes
    first_layer_s: float  #: these two from when the bytes began to cross
    total_s: float
    is_widened: bool = False  #: to float32, because the device is slow in what was stored
    ahead_bytes: int = 0  #: of those of the rungs, that came before this load, ahead of the model's turn
    place_s: float = 0.0  #: of `assemble_s`: memory was taken, and the bytes were asked for
    kernels_s: float = 0.0  #: of `assemble_s`: kernels were brought to the device, beside the bytes

    @property
    def took_s(self) -> float:
        """The time from the order until engine and bytes were there."""
        return self.open_s + max(self.assemble_s, self.place_s + self.total_s)

    @property
    def whole_s(self) -> float | None:
        """The time in which exactly the bytes of the rungs came; None: unknown."""
        return None if self.ahead_bytes or self.shared_bytes else self.total_s


class AdapterLoaded(Struct, frozen=True, tag=True):
    """An adapter has come to the device."""

    adapter: AdapterId
    runs: tuple[int, ...]  #: that waited for it
    num_bytes: int
    rungs: tuple[RungBytes, ...]
    wait_s: float  #: from when it was first asked for until it had its memory
    total_s: float  #: then until its bytes were there


class HostingFailed(Struct, frozen=True, tag=True):
    """A model could not be loaded, or its engine broke. Its memory is free, and its runs have ended."""

    model: ModelId
    hosting: int
    label: str
    reason: str
    is_cut_off: bool = False  #: it has lost another member of its pipeline


class SnapshotLooked(Struct, frozen=True, tag=True):
    """The result of looking for a snapshot when an engine was assembled, or a snapshot found bad later."""

    model: ModelId
    hosting: int
    outcome: SnapshotOutcome
    reason: str | None = None  #: why none is used; None: one is, or there is none
    lacks_adapters: bool = False  #: the one that is used was made without steps that have adapters


class SnapshotProgress(Struct, frozen=True, tag=True):
    model: ModelId
    hosting: int
    num_done: int  #: of the steps that are run for it
    num_steps: int


class SnapshotMade(Struct, frozen=True, tag=True):
    """An ordered snapshot is on disk, or could not be made."""

    model: ModelId
    hosting: int
    num_bytes: int = 0
    unbooked_bytes: int = 0  #: of device memory that the worker took besides its pool
    seconds: float = 0.0  #: from its first step to the end
    failure: str | None = None  #: why there is none; None: there is
    lacks_adapters: bool = False  #: as in `SnapshotLooked`


class ModelTurn(Struct, frozen=True, tag=True):
    """The turn of a hosted model began or ended."""

    model: ModelId
    hosting: int
    ended: TurnEnd | None = None  #: None: it began
    num_requests: int = 0  #: that it has


class ModelPressure(Struct, frozen=True, tag=True):
    """The KV that a model will need in a second has passed its room, fallen below, or moved by a step of it.

    Of a pipeline the first member tells.
    """

    model: ModelId
    hosting: int
    demand_tokens: int
    room_tokens: int  #: that it has KV for, or could have


class WorkerEnded(Struct, frozen=True, tag=True):
    """The last fact about a worker of another node, from that node: its process has ended."""

    reason: str  #: what it did, in words
    model: ModelId | None = None  #: whose step was running; None: none or unknown
    runs: tuple[int, ...] | None = None  #: with a row in that step; None: unknown
    is_with_node: bool = False  #: the node has ended it, or is gone: no model is to blame


class DeviceResidency(Struct, frozen=True, tag=True):
    """The bytes of each model's weights on the device, retired models included. Sent when they change."""

    bytes_by_model: dict[ModelId, int]


class PipelineUse(Struct, frozen=True):
    """How fast a pipeline decodes, as its first member has measured it."""

    num_flights: int  #: steps under way at the same time
    stage_s: tuple[float, ...] = ()  #: that a usual step takes in each stage; empty: not known
    hops_s: float = 0.0  #: that it takes besides, on its way from stage to stage and back


class ModelUse(Struct, frozen=True):
    """A model's share of its worker's pool, and its use."""

    model: ModelId
    hold: Hold
    is_hosted: bool  #: False: retired, so it is promised nothing
    weights_bytes: int  #: on the device or with memory there, of `total_bytes`
    total_bytes: int
    shared_bytes: int  #: of `weights_bytes`, those that another model has as well
    kv_bytes: int
    num_running: int = 0
    num_waiting: int = 0
    kv_used_blocks: int = 0  #: of running requests
    kv_cached_blocks: int = 0  #: prefixes not in use
    kv_blocks: int = 0  #: that it has now
    block_bytes: int = 0  #: of KV
    coming_bytes: int = 0  #: of `weights_bytes`, those that are still on their way
    tables_bytes: int = 0  #: of its engine, and those of its sampler while requests need them
    is_in_turn: bool = False
    due_s: float | None = None  #: from now, when its next token is due; negative: overdue; None: no requests
    num_captured_graphs: int = 0  #: parts of steps that were captured since its engine is there
    num_restored_graphs: int = 0  #: and those of a snapshot that were tried, and serve
    pipeline: PipelineUse | None = None  #: None: the worker is not the first of one


class AdapterUsage(Struct, frozen=True):
    """An adapter with memory on a worker's device, or with requests that wait for it."""

    name: str
    base: ModelId
    num_bytes: int  #: of the device; 0: it is not there
    num_running: int
    num_waiting: int
    is_pinned: bool


class Pong(Struct, frozen=True, tag=True):
    """The answer to a `Ping`: the worker's pool between two steps."""

    number: int
    budget_bytes: int
    free_bytes: int
    workspace_bytes: int
    lost_bytes: int  #: to rounding and fragments
    moved_bytes: int  #: since the worker started, to make place
    fallbacks: dict[str, int]  #: of the pool and of kernels, by name
    models: tuple[ModelUse, ...]
    #: The most that torch may take of the device besides the pool; None: there is no limit.
    torch_limit_bytes: int | None = None
    is_torch_limit_measured: bool = False  #: False: it is a guess
    adapters: tuple[AdapterUsage, ...] = ()
    num_adapter_evictions: int = 0  #: since the worker started


Order = (
    Welcome
    | PrepareModel
    | HostModel
    | RetireModel
    | DropModel
    | HoldModel
    | ForgetAdapter
    | MakeSnapshot
    | StartRequest
    | SendKv
    | CancelRequest
    | Ping
    | Shutdown
)
Fact = (
    WorkerHello
    | StepDone
    | RunFailed
    | KvMoved
    | LoadProgress
    | ModelLoaded
    | AdapterLoaded
    | HostingFailed
    | SnapshotLooked
    | SnapshotProgress
    | SnapshotMade
    | ModelTurn
    | ModelPressure
    | DeviceResidency
    | Pong
    | WorkerEnded
)
