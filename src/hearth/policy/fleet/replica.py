"""The nouns of the fleet: requests, models, workers, and replicas, which are models on workers.

Plain mutable records that refer to each other; they keep no books. Only `step` and what it calls writes them,
and whatever changes a replica is followed by `Fleet.settle`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hearth.policy.fleet.events import ModelProfile
from hearth.policy.fleet.ranking import Ranking
from hearth.types import Hold, ModelId, RequestId, Rung, WorkerId

#: How long further replicas of a model that is kept for ever stay warm: for ever means one.
SPARE_KEEP_ALIVE_S = 300.0


@dataclass(slots=True, eq=False)
class Request:
    """Accepted and not ended: it waits in its model's queue, or runs on a replica."""

    request_id: RequestId
    model: Model
    number: int  #: in order of arrival; never used again
    keep_alive_s: float | None
    digest: str  #: of the version that it was accepted for; no other continues it
    num_resumes: int = 0
    #: Since when it waits, or waited last, and in which turn of the brain that began.
    queued_s: float = 0.0
    queued_turn: int = 0
    #: None while it waits.
    replica: Replica | None = None
    started_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A load failed on every worker that could hold the model."""

    message: str
    delay_s: float
    until_s: float  #: before that it is not tried again


@dataclass(slots=True, eq=False)
class Model:
    name: ModelId
    #: None: removed; what still runs may finish.
    profile: ModelProfile | None = None
    #: Of the last dispatched request that named one; None once no replica is left.
    named_keep_alive_s: float | None = None
    #: A user stopped it, and nobody has asked for it since: it is not loaded unasked.
    is_stopped: bool = False
    #: Workers that were lost one after the other soon after it had begun to load on them.
    num_deadly_loads: int = 0
    #: None: its last load did not fail, or may do better elsewhere.
    failure: LoadFailure | None = None
    bytes_by_rung: Mapping[Rung, int] | None = None
    #: Of its weights, in the device memory of workers that have any. Written by `policy/fleet/affinity.py`.
    resident: dict[WorkerId, int] = field(default_factory=dict)
    #: Those of `resident` without a replica, by how many bytes: where it was evicted and something is left.
    retired: Ranking[WorkerId] = field(default_factory=Ranking)
    replicas: dict[WorkerId, Replica] = field(default_factory=dict)
    #: Those of `replicas` that new requests may go to; of these, those still loading.
    usable: dict[WorkerId, Replica] = field(default_factory=dict)
    loading: dict[WorkerId, Replica] = field(default_factory=dict)
    #: Those of `usable` with a free slot, by how many run there.
    open: Ranking[WorkerId] = field(default_factory=Ranking)
    #: Workers on which it failed and has not been ready since. They are tried again only where it has no
    #: replica and no other worker has room: one broken device must not use up the requests of a model.
    failed_on: dict[WorkerId, Worker] = field(default_factory=dict)
    #: By number, ascending. Empty while any replica is open.
    waiting: dict[int, Request] = field(default_factory=dict)
    #: The queue of the fleet that it stands in; None exactly if nothing waits.
    queue: Ranking[ModelId] | None = None

    @property
    def keep_alive_s(self) -> float:
        if self.named_keep_alive_s is not None:
            return self.named_keep_alive_s
        return 0.0 if self.profile is None else self.profile.keep_alive_s

    @property
    def is_pinned(self) -> bool:
        return self.profile is not None and (self.profile.is_pinned or math.isinf(self.keep_alive_s))

    @property
    def pinned_replica(self) -> Replica | None:
        """The oldest one that is wanted; the others come and go with the load."""
        if not self.is_pinned:
            return None
        return next((replica for replica in self.replicas.values() if not replica.is_unwanted), None)

    @property
    def num_running(self) -> int:
        """On replicas that new requests may go to."""
        return sum(len(replica.running) for replica in self.usable.values())

    @property
    def head(self) -> Request | None:
        """The request that has waited longest."""
        return next(iter(self.waiting.values()), None)


@dataclass(frozen=True, slots=True)
class Stop:
    """A user wants the replica idle; requests that came later undo it."""

    number: int  #: of the next request at that time
    is_freed: bool


@dataclass(slots=True, eq=False)
class Replica:
    model: Model
    worker: Worker
    num_bytes: int  #: of device memory that it is promised, KV included
    total_bytes: int  #: of its weights
    digest: str  #: of its weights
    reused_bytes: int = 0  #: of `total_bytes`, those that were taken to be there already
    loaded_bytes: int = 0  #: likewise, those that are there now
    is_ready: bool = False
    ready_s: float = 0.0
    running: dict[RequestId, Request] = field(default_factory=dict)
    idle_since_s: float = 0.0
    #: Its bytes are of a version that is no longer deployed: it serves nobody new, and leaves when idle.
    is_stale: bool = False
    stop: Stop | None = None
    #: It shall make room for another model, so it serves nobody new.
    drain: Drain | None = None
    #: As the books have it. None: in no books, because it was not entered yet or has left.
    hold: Hold | None = None
    #: As its worker has it while the replica has no requests. Once a turn is over it is `hold`, unless busy.
    told: Hold = Hold.WARM
    #: The earliest entry for it in `policy/fleet/expiry.py`; infinite: none.
    timed_s: float = math.inf

    @property
    def is_leaving(self) -> bool:
        return self.is_stale or (self.stop is not None and self.stop.is_freed)

    @property
    def is_outdated(self) -> bool:
        """Its bytes are of no use any more; those of one that is only stale may be."""
        profile = self.model.profile
        return profile is None or (profile.digest, profile.num_bytes) != (self.digest, self.total_bytes)

    @property
    def is_freed(self) -> bool:
        """Whether its bytes have to go with it."""
        return self.is_outdated or (self.stop is not None and self.stop.is_freed)

    @property
    def is_unwanted(self) -> bool:
        return self.is_stale or self.stop is not None

    @property
    def expires_s(self) -> float:
        """When an idle one is only retained."""
        keep_alive_s = self.model.keep_alive_s
        return self.idle_since_s + (SPARE_KEEP_ALIVE_S if math.isinf(keep_alive_s) else keep_alive_s)

    def hold_at(self, now_s: float) -> Hold:
        if self.model.pinned_replica is self:
            return Hold.PINNED
        if self.running:
            return Hold.BUSY
        return Hold.RETAINED if self.is_unwanted or self.expires_s <= now_s else Hold.WARM


@dataclass(slots=True, eq=False)
class Worker:
    name: WorkerId
    kind: str
    budget_bytes: int
    max_seqs: int
    replicas: dict[ModelId, Replica] = field(default_factory=dict)
    #: Those with requests.
    busy: dict[ModelId, Replica] = field(default_factory=dict)
    #: By `Hold`: what the replicas held so are promised, together at most the budget.
    held_bytes: list[int] = field(default_factory=lambda: [0] * len(Hold))
    drain: Drain | None = None
    #: Models that failed here and have not been ready since.
    failed: dict[ModelId, Model] = field(default_factory=dict)
    #: Models that have bytes here, with a replica or without.
    resident: dict[ModelId, Model] = field(default_factory=dict)

    @property
    def free_bytes(self) -> int:
        """Promised to nobody; others may use it all the same."""
        return self.budget_bytes - sum(self.held_bytes)

    @property
    def utilisation(self) -> float:
        """Share of the budget in use by busy, warm and pinned models."""
        used_bytes = sum(self.held_bytes) - self.held_bytes[Hold.RETAINED]
        return used_bytes / self.budget_bytes if self.budget_bytes else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Drain:
    """Replicas of one worker that take no new requests, so that a model which waits for room gets theirs.

    Idle ones are among them: a request that made one busy again would undo the plan.
    """

    model: Model  #: for which
    worker: Worker
    victims: tuple[Replica, ...]
