"""Events that the brain is told and actions that it orders. Events are facts and carry their time.

Decides nothing: that is `policy/fleet/brain.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hearth.core.types import AdapterId, Hold, ModelId, RequestId, Rung, TurnEnd, WorkerId
from hearth.policy.fleet.profile import NOTHING_PROMISED, ModelProfile, Promise
from hearth.policy.memory.reload_cost import PRIOR_BYTES_PER_S

# Events.


@dataclass(frozen=True, slots=True)
class ModelDeployed:
    """A model was deployed, or the profile of a known one has changed."""

    now_s: float
    profile: ModelProfile


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """A model is no longer deployed."""

    now_s: float
    model: ModelId


@dataclass(frozen=True, slots=True)
class ModelStopped:
    """A user wants a model idle: retained, or with `is_freed` out of memory. What runs may finish."""

    now_s: float
    model: ModelId
    is_freed: bool


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker is up, and its device is empty."""

    now_s: float
    worker: WorkerId
    kind: str
    budget_bytes: int
    shares_workspace: bool = True  #: its pool is sure to need one workspace for all models


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is gone; its requests go on elsewhere."""

    now_s: float
    worker: WorkerId
    culprit: ModelId | None = None  #: the model whose step was under way; None: none was, or nobody knows
    has_answered: bool = False  #: the culprit has made tokens on that worker
    reason: str = "died"  #: what the worker did, for people
    #: Requests with a row in that step, against which alone the loss counts; None: nobody knows.
    in_step: tuple[RequestId, ...] | None = None


@dataclass(frozen=True, slots=True)
class WantedAdapter:
    """The adapter that a request runs with."""

    adapter: AdapterId
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A client wants an answer from a model."""

    now_s: float
    request_id: RequestId
    model: ModelId
    num_prompt_tokens: int
    max_tokens: int | None
    keep_alive_s: float | None = None  #: of this request; infinite pins the model; None: the model's own
    digest: str | None = None  #: of the version that its tokens were made for; None: whatever is deployed
    is_batch: bool = False  #: nobody reads along, so it gives way to others
    adapter: WantedAdapter | None = None  #: None: the bare model


class End(StrEnum):
    """How a request ended."""

    DONE = "done"  #: its worker is through with it
    STOPPED = "stopped"  #: its answer is complete, but the worker does not know: a stop string
    FAILED = "failed"  #: on its worker, and nothing can be learnt from how long it ran


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request that was dispatched has ended."""

    now_s: float
    request_id: RequestId
    num_output_tokens: int
    how: End = End.DONE


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client of a request is gone."""

    now_s: float
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class LoadProgressed:
    """A load has brought some more bytes to a worker."""

    now_s: float
    worker: WorkerId
    model: ModelId
    num_bytes: int  #: so far


@dataclass(frozen=True, slots=True)
class RungUse:
    """The part of a load that one rung delivered."""

    rung: Rung
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ModelReady:
    """All bytes of a model are on a worker, at its first load or after others had taken some."""

    now_s: float
    worker: WorkerId
    model: ModelId
    rungs: tuple[RungUse, ...]
    total_s: float  #: of the load that ended now
    ahead_bytes: int = 0  #: of those of the rungs, that came before it, ahead of the model's turn
    shared_bytes: int = 0  #: besides those of the rungs: another load was reading them already

    @property
    def whole_s(self) -> float | None:
        """The time in which the bytes of the rungs came, and no others; None: it is not known."""
        return None if self.ahead_bytes or self.shared_bytes else self.total_s


@dataclass(frozen=True, slots=True)
class ModelFailed:
    """A model could not be loaded, or broke when it was ready. It has left the worker's memory."""

    now_s: float
    worker: WorkerId
    model: ModelId
    reason: str


@dataclass(frozen=True, slots=True)
class TurnBegan:
    """A model is promised its memory on a worker from now on, and steps as soon as all of it is there."""

    now_s: float
    worker: WorkerId
    model: ModelId


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A model is promised nothing on a worker any more; its requests, if it has any, wait there."""

    now_s: float
    worker: WorkerId
    model: ModelId
    why: TurnEnd


@dataclass(frozen=True, slots=True)
class ResidencyReported:
    """How much of a model lies on the rungs that all workers of a machine share."""

    now_s: float
    model: ModelId
    bytes_by_rung: Mapping[Rung, int]


@dataclass(frozen=True, slots=True)
class DeviceReported:
    """How much of the weights of each model lies in a worker's device memory, whether hosted or retired.

    A full report, which replaces the one before: of a model that it does not name, nothing is there.
    """

    now_s: float
    worker: WorkerId
    bytes_by_model: Mapping[ModelId, int]  #: as stored: of `ModelProfile.num_bytes`


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time of the last `SetTimer` has come."""

    now_s: float


Event = (
    ModelDeployed
    | ModelRemoved
    | ModelStopped
    | WorkerJoined
    | WorkerLost
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
    | TimerFired
)


# Actions.


@dataclass(frozen=True, slots=True)
class Option:
    """One worker for a request, with the parts of its routing cost."""

    worker: WorkerId
    queue_s: float
    load_s: float
    utilisation: float  #: from 0 to 1
    cost_s: float
    obstacle: str | None = None  #: why it is out of the question; then the numbers say nothing
    evict_s: float = 0.0  #: the reload costs of those that would have to go, summed
    missing_bytes: int = 0  #: of its weights, not in that worker's device memory: what `load_s` is for


class Why(StrEnum):
    """Why a request went where it did."""

    RESIDENT = "resident"  #: the model was there and had a free slot
    LOADING = "loading"  #: it was on its way there
    FREE_ROOM = "free_room"  #: loaded into free memory
    EVICTED = "evicted"  #: loaded where others had to go
    TURNS = "turns"  #: hosted beside busy models that leave no room for it: they take turns
    WAITED = "waited"  #: a slot or room came free


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Give a request to a worker; where the model is still loading there, it waits for it."""

    request_id: RequestId
    model: ModelId
    worker: WorkerId
    why: Why
    waited_s: float
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Host a model from now on, and load what is missing of it there, where turns are taken in its turn."""

    model: ModelId
    worker: WorkerId
    kv_floor_bytes: int  #: of KV that it is promised
    max_kv_bytes: int  #: it never gets more
    promise: Promise = NOTHING_PROMISED  #: all that it is owed, where turns are taken while it has one


@dataclass(frozen=True, slots=True)
class Evict:
    """Host an idle model no longer. Comes before what is promised its room.

    Its bytes stay until somebody needs their place, unless it `is_freed`; that may also come for what is left
    of a model that was evicted before.
    """

    model: ModelId
    worker: WorkerId
    cost_s: float  #: the reload cost of its weights
    is_freed: bool  #: its bytes have to go now: nobody wants them, or a user wants them gone


@dataclass(frozen=True, slots=True)
class SetHold:
    """Hold a hosted model so while it has no requests: retained, warm or pinned.

    A new model is warm, and so is a retained one that gets a request: nobody has to say so.
    """

    model: ModelId
    worker: WorkerId
    hold: Hold


@dataclass(frozen=True, slots=True)
class RefusePin:
    """Tell people that a model is not pinned though it should be: it may give way to others for now."""

    model: ModelId
    worker: WorkerId
    message: str  #: with the numbers


class RejectReason(StrEnum):
    """Why a request was refused."""

    UNKNOWN_MODEL = "unknown_model"
    QUEUE_FULL = "queue_full"
    NEVER_FITS = "never_fits"
    PINNED_OUT = "pinned_out"  #: it would fit, were it not for what is pinned
    LOAD_FAILED = "load_failed"
    WORKERS_LOST = "workers_lost"  #: because of it, or of its model, as far as can be told
    MODEL_REMOVED = "model_removed"  #: or another version took its place


@dataclass(frozen=True, slots=True)
class Reject:
    """End a request that was not served to its end, and tell its client why."""

    request_id: RequestId
    reason: RejectReason
    message: str  #: with the numbers, for the user
    retry_s: float | None = None


@dataclass(frozen=True, slots=True)
class CancelRun:
    """Stop a request that a worker has and nobody wants any more."""

    request_id: RequestId
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Have `TimerFired` posted at that time; a later order replaces this one."""

    at_s: float


Action = Dispatch | LoadModel | Evict | SetHold | RefusePin | Reject | CancelRun | SetTimer


@dataclass(frozen=True, slots=True)
class BrainConfig:
    """The constants of the brain's decisions."""

    max_queue: int = 512  #: requests that wait for a slot, for room or for the first turn of their model
    #: Waiting for longer, a request has a busy model drained for its own, unless they can take turns.
    patience_s: float = 2.0
    #: A drain that is not done after so long is given up, and its worker rests from drains for as long.
    max_drain_s: float = 30.0
    #: Workers have models that do not fit together take turns, and say whose turn it is.
    takes_turns: bool = False
    max_resumes: int = 3  #: workers that may be lost because of a request, as far as can be told
    queue_weight: float = 1.0  #: of `queue_s` in the routing cost
    load_weight: float = 1.0  #: of `load_s` in the routing cost
    packing_s: float = 0.05  #: what an idle worker costs against a full one, in the routing cost
    #: Bytes per second of each rung until it has shown its own speed.
    priors: Mapping[Rung, float] = field(default_factory=lambda: dict(PRIOR_BYTES_PER_S))
