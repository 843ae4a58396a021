"""The records of the fleet: requests, models, workers, and replicas, which are models on workers.

Mutable records that refer to each other. Only `step` and what it calls writes them, and every change of a
replica is followed by `Fleet.reindex`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from hearth.core.types import LOCAL, AdapterId, Hold, ModelId, NodeId, RequestId, Rung, WorkerId, model_of
from hearth.policy.fleet.capacity import BUSY, PAUSED, PINNED, RETAINED, WARM, Promises
from hearth.policy.fleet.drop_group import ParameterDrop
from hearth.policy.fleet.events import DemandForecast, WantedAdapter
from hearth.policy.fleet.prefixes import KnownPrefixes, PrefixDigest
from hearth.policy.fleet.profile import ModelProfile, Promise
from hearth.policy.fleet.ranking import Ranking

#: How long further replicas of a pinned model stay warm.
SPARE_KEEP_ALIVE_S = 300.0
#: One in so many slots of a replica, and places in the queue, is kept for interactive requests.
INTERACTIVE_SHARE = 4
#: Adapters remembered per worker: more than most devices have room for.
MAX_KNOWN = 1024


def share_for_batch(most: int) -> int:
    return most - most // INTERACTIVE_SHARE


class Place(NamedTuple):
    line_s: float  #: when it came; a batch request `BATCH_PATIENCE_S` later
    number: int


@dataclass(slots=True, eq=False)
class Request:
    request_id: RequestId
    model: Model
    number: int  #: in order of arrival; never used again
    keep_alive_s: float | None
    digest: str  #: of the version that it was accepted for; no other continues it
    line_s: float = 0.0  #: as in its `Place`
    is_batch: bool = False
    adapter: WantedAdapter | None = None  #: None: the bare model
    prefixes: tuple[PrefixDigest, ...] = ()
    num_prompt_tokens: int = 0
    key: str | None = None
    num_losses: int = 0  #: replicas lost in a step that it was in, as far as known
    queued_s: float = 0.0
    queued_step: int = 0
    replica: Replica | None = None
    #: When it was dispatched, or its replica had its first turn since.
    started_s: float = 0.0
    awaits_turn: bool = False

    @property
    def place(self) -> Place:
        return Place(self.line_s, self.number)

    def gives_way(self, now_s: float) -> bool:
        """True while an interactive request that came now would go before this one."""
        return self.is_batch and now_s < self.line_s

    def overdue_s(self, patience_s: float) -> float:
        """Return when the request is overdue, by the patience of an interactive one."""
        return max(self.line_s, self.queued_s + patience_s)


@dataclass(frozen=True, slots=True)
class LoadFailure:
    message: str
    delay_s: float
    until_s: float  #: until then it is not loaded where it failed
    is_deadly: bool = False  #: it kills workers: until then it is loaded nowhere


@dataclass(frozen=True, slots=True)
class PrewarmHold:
    """Device time that is reserved for a model which a forecast expects to be asked for."""

    until_s: float
    cost_s: float  #: given back if a request comes by then


@dataclass(slots=True, eq=False)
class Model:
    name: ModelId
    #: None: removed; what still runs may finish.
    profile: ModelProfile | None = None
    #: Of the last dispatched request that set one; None once no replica is left.
    named_keep_alive_s: float | None = None
    #: A user stopped it, and no request came since: it is not loaded unasked.
    is_stopped: bool = False
    num_deadly_loads: int = 0
    #: The last failure without another place; None: none, or it has served since.
    failure: LoadFailure | None = None
    #: Bytes in host memory and on disk, of the nodes that have reported.
    residency: dict[NodeId, Mapping[Rung, int]] = field(default_factory=dict)
    #: The two nodes that have most bytes of it, most first.
    largest_holders: tuple[NodeId, ...] = ()
    #: Weights in the device memory of workers. Written only by `device_bytes.py`.
    resident_bytes: dict[WorkerId, int] = field(default_factory=dict)
    #: Workers of `resident_bytes` without a replica, by bytes.
    retired: Ranking[WorkerId, int] = field(default_factory=Ranking)
    replicas: dict[WorkerId, Replica] = field(default_factory=dict)
    #: Replicas that take new requests; of these, those still loading.
    usable: dict[WorkerId, Replica] = field(default_factory=dict)
    loading: dict[WorkerId, Replica] = field(default_factory=dict)
    #: Workers of `usable` replicas that have a free slot, by how many requests run there.
    with_free_slot: Ranking[WorkerId, int] = field(default_factory=Ranking)
    #: Workers on which it failed and has not served since. They are tried again only if it has no
    #: replica and no other worker has room: one broken device must not fail all requests of a model.
    failed_on: dict[WorkerId, Worker] = field(default_factory=dict)
    #: By number, in the order of their places. Empty while any replica has a slot for the first.
    waiting: dict[int, Request] = field(default_factory=dict)
    drop: ParameterDrop = field(default_factory=ParameterDrop)
    forecast: DemandForecast | None = None
    forecast_due_s: float = math.inf  #: when the forecast is looked at next
    advised: PrewarmHold | None = None  #: as if it had been loaded for its forecast
    host_prewarmed_s: float = -math.inf  #: when it was last ordered to host memory
    #: None exactly if nothing waits.
    queue: Ranking[ModelId, Place] | None = None

    def report(self, node: NodeId, bytes_by_rung: Mapping[Rung, int] | None) -> None:
        """Note what a node has; None: the node is gone."""
        if bytes_by_rung is None:
            self.residency.pop(node, None)
        else:
            self.residency[node] = bytes_by_rung
        ranked = sorted(self.residency, key=lambda one: (-_most(self.residency[one]), one))
        self.largest_holders = tuple(ranked[:2])

    def source_for(self, node: NodeId) -> NodeId | None:
        """Return the other node that has most of it; None: none has any."""
        others = (one for one in self.largest_holders if one != node)
        return next((one for one in others if _most(self.residency[one])), None)

    def bytes_by_rung(self, node: NodeId) -> Mapping[Rung, int] | None:
        """Return where a load on a node finds its bytes; None: nothing is known."""
        own, source = self.residency.get(node), self.source_for(node)
        if source is None:
            return own if node == LOCAL or own is not None else {}
        return {**(own or {}), Rung.PEER: _most(self.residency[source])}

    @property
    def keep_alive_s(self) -> float:
        if self.named_keep_alive_s is not None:
            return self.named_keep_alive_s
        return 0.0 if self.profile is None else self.profile.keep_alive_s

    @property
    def unpinned_s(self) -> float:
        """How long an idle replica without a pin stays warm at most."""
        keep_alive_s = self.keep_alive_s
        return SPARE_KEEP_ALIVE_S if keep_alive_s == math.inf else keep_alive_s

    @property
    def is_pinned(self) -> bool:
        return self.profile is not None and (self.profile.is_pinned or math.isinf(self.keep_alive_s))

    @property
    def num_pinned(self) -> int:
        """How many replicas should be pinned."""
        return max(1, self.profile.min_replicas) if self.profile is not None and self.is_pinned else 0

    @property
    def pinned_replicas(self) -> list[Replica]:
        """The oldest wanted replicas of a pinned model; the others come and go with the load."""
        staying = (replica for replica in self.replicas.values() if not replica.is_on_draining_node)
        return list(islice((one for one in staying if not one.is_unwanted), self.num_pinned))

    @property
    def has_all_replicas(self) -> bool:
        """True if it may have no further one. Those that take no new requests do not count."""
        most = None if self.profile is None else self.profile.max_replicas
        return most is not None and sum(one.num_replaced for one in self.usable.values()) >= most

    @property
    def num_held(self) -> int:
        """How many replicas take new requests and are not retained, as a user would count them."""
        return sum(one.num_replaced for one in self.usable.values() if one.hold is not RETAINED)

    @property
    def is_resident(self) -> bool:
        return bool(self.replicas or self.resident_bytes)

    @property
    def num_requests(self) -> int:
        return len(self.waiting) + sum(len(replica.running) for replica in self.replicas.values())

    @property
    def first_waiting(self) -> Request | None:
        for request in self.waiting.values():
            return request
        return None

    def record_failure(self, worker: Worker) -> None:
        self.failed_on[worker.name], worker.failed[self.name] = worker, self

    def clear_failure(self, worker: Worker) -> None:
        self.failure, self.num_deadly_loads = None, 0
        self.failed_on.pop(worker.name, None)
        worker.failed.pop(self.name, None)

    def clear_failures(self) -> None:
        self.failure, self.num_deadly_loads = None, 0
        for worker in list(self.failed_on.values()):
            self.clear_failure(worker)


@dataclass(frozen=True, slots=True)
class Stop:
    """A user's request that a replica be idle; later requests undo it."""

    number: int  #: of the next request at that time
    is_freed: bool


@dataclass(frozen=True, slots=True)
class Spare:
    """An idle replica beside others of its model, by what was known when it became one."""

    need: float  #: how probable it is that the model uses it, from 0 to 1
    warm_s: float  #: how long it stays warm


@dataclass(slots=True, eq=False)
class ReplicaStage:
    """The part of a replica on one member of its pipeline."""

    worker: Worker
    promise: Promise
    begin: int  #: its first layer
    end: int  #: the first layer behind it
    total_bytes: int  #: of its weights
    loaded_bytes: int = 0  #: of `total_bytes`
    is_ready: bool = False


@dataclass(slots=True, eq=False)
class Replica:
    model: Model
    worker: Worker  #: that runs its requests: of a pipeline, the first member
    promise: Promise  #: of that worker
    total_bytes: int  #: of its weights
    digest: str  #: of its weights
    max_seqs: int = 1  #: its slots: requests that it runs at a time
    number: int = 0  #: in the order in which replicas were added; never used again
    reused_bytes: int = 0  #: of `total_bytes`, those assumed to be there already
    loaded_bytes: int = 0  #: of `total_bytes`, those on the device
    is_ready: bool = False
    ready_s: float = 0.0
    has_served: bool = False  #: a request has run to its end on it
    #: Its worker steps it; always True without turns.
    is_in_turn: bool = True
    has_had_turn: bool = False
    turn_changed_s: float = 0.0
    running: dict[RequestId, Request] = field(default_factory=dict)
    idle_since_s: float = 0.0
    #: Its version is no longer deployed: it takes no new requests, and leaves when idle.
    is_stale: bool = False
    stop: Stop | None = None
    #: It makes room for another model and takes no new requests.
    drain: Drain | None = None
    #: It is a pinned replica of its model, and its worker can keep it for ever.
    has_pin: bool = False
    #: It should be pinned and is not, which was reported.
    is_pin_refused: bool = False
    #: As the books have it. None: not entered yet, or removed.
    hold: Hold | None = None
    #: As its worker has it without requests. After a step it is `hold`, unless that is busy or paused.
    notified_hold: Hold = WARM
    #: The time of the earliest entry for it in `Expiries`; infinite: none.
    expiry_entry_s: float = math.inf
    #: Of a pipeline, in order; empty: its worker has the whole model.
    stages: tuple[ReplicaStage, ...] = ()
    #: It is a pipeline in place of as many whole replicas: see `drop_group.py`.
    is_dropped: bool = False
    kv_share: float = 1.0  #: its room for KV, over that of a whole replica
    whole_tokens: int = 0  #: KV that the replicas in whose place it is had room for
    prefixes: KnownPrefixes = field(default_factory=KnownPrefixes)
    num_prompt_tokens: int = 0  #: of the requests that run
    max_kv_tokens: int = 0  #: that it has room for; 0: unknown
    #: KV that it will need in a second, and that it can have, as it reported last; 0: it has not.
    demand_tokens: int = 0
    room_tokens: int = 0
    prompts_until_s: float = -math.inf  #: by then its load and all prompts that it got should be over
    #: None: it has requests, or of its model's idle replicas it was used last.
    spare: Spare | None = None
    prewarmed: PrewarmHold | None = None  #: while no request has used it since it was loaded or kept for one
    #: Its workers send KV of requests that have left it until then. It takes no others, and goes.
    dissolves_s: float | None = None

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple([stage.worker for stage in self.stages]) if self.stages else (self.worker,)

    @property
    def num_replaced(self) -> int:
        """How many replicas a user would count."""
        return len(self.stages) if self.is_dropped else 1

    @property
    def is_temporary(self) -> bool:
        """True for a pipeline of workers that load the whole model: see `loading_pipelines.py`."""
        return bool(self.stages) and model_of(self.model.name) != self.model.name

    def stage_on(self, worker: Worker) -> ReplicaStage | None:
        return next((stage for stage in self.stages if stage.worker is worker), None)

    def promise_on(self, worker: Worker) -> Promise:
        if not self.stages:  # the common case
            return self.promise
        stage = self.stage_on(worker)
        return self.promise if stage is None else stage.promise

    @property
    def is_on_draining_node(self) -> bool:
        if self.stages:
            return any(stage.worker.is_draining for stage in self.stages)
        return self.worker.is_draining

    @property
    def takes_requests(self) -> bool:
        if self.is_stale or self.drain is not None or self.worker.is_draining:
            return False
        if self.dissolves_s is not None:
            return False
        return not self.stages or not self.is_on_draining_node

    @property
    def load(self) -> int:
        """How many requests run there for the KV of a whole replica. New ones go where they are fewest."""
        return int(len(self.running) / self.kv_share)

    @property
    def has_free_slot(self) -> bool:
        return len(self.running) < self.max_seqs

    def has_slot_for(self, request: Request, now_s: float) -> bool:
        """True if a request may run on the replica: one that yields leaves some slots to others."""
        most = share_for_batch(self.max_seqs) if request.gives_way(now_s) else self.max_seqs
        return len(self.running) < most

    @property
    def booked_hold(self) -> Hold:
        assert self.hold is not None, f"in no books: `{self.model.name}` on worker `{self.worker.name}`"
        return self.hold

    @property
    def is_leaving(self) -> bool:
        """True if it is evicted as soon as it is idle: a pipeline keeps nothing on a node that is drained."""
        is_freed = self.stop is not None and self.stop.is_freed
        return self.is_stale or is_freed or (bool(self.stages) and self.is_on_draining_node)

    @property
    def is_outdated(self) -> bool:
        """True if other bytes are deployed under the model's name; a stale replica may have the same."""
        profile = self.model.profile
        return profile is None or (profile.digest, profile.num_bytes) != (self.digest, self.total_bytes)

    @property
    def must_free_bytes(self) -> bool:
        return self.is_outdated or (self.stop is not None and self.stop.is_freed)

    @property
    def is_unwanted(self) -> bool:
        return self.is_stale or self.stop is not None

    @property
    def expires_s(self) -> float:
        if self.prewarmed is not None:
            return self.prewarmed.until_s
        unpinned_s = self.model.unpinned_s
        return self.idle_since_s + (unpinned_s if self.spare is None else min(unpinned_s, self.spare.warm_s))

    def hold_at(self, now_s: float) -> Hold:
        if self.has_pin:
            return PINNED
        if self.running:
            return BUSY if self.is_in_turn else PAUSED
        return RETAINED if self.is_unwanted or self.expires_s <= now_s else WARM


@dataclass(slots=True)
class KnownAdapters:
    """The adapters that requests brought to a worker last. Evictions are not reported."""

    #: The one that was used longest ago first.
    used: dict[AdapterId, None] = field(default_factory=dict)

    def __contains__(self, adapter: AdapterId) -> bool:
        return adapter in self.used

    def use(self, adapter: AdapterId) -> None:
        self.used.pop(adapter, None)
        self.used[adapter] = None
        if len(self.used) > MAX_KNOWN:
            del self.used[next(iter(self.used))]


@dataclass(slots=True, eq=False)
class Worker:
    name: WorkerId
    kind: str
    promises: Promises
    replicas: dict[ModelId, Replica] = field(default_factory=dict)
    busy: dict[ModelId, Replica] = field(default_factory=dict)
    drain: Drain | None = None
    failed: dict[ModelId, Model] = field(default_factory=dict)
    #: Models that have bytes here, with a replica or without. Written only by `device_bytes.py`.
    resident_models: dict[ModelId, Model] = field(default_factory=dict)
    adapters: KnownAdapters = field(default_factory=KnownAdapters)
    node: NodeId = LOCAL
    gpu: int | None = None
    runs_stages: bool = True
    is_draining: bool = False  #: its node is being emptied: nothing new is placed here
    used_s: float = -math.inf  #: when it joined, a load began there or a request ended
    device_share: float = 1.0

    @property
    def is_retained(self) -> bool:
        """True if it has replicas, which are all retained."""
        return bool(self.replicas) and all(one.hold is RETAINED for one in self.replicas.values())


def _most(bytes_by_rung: Mapping[Rung, int]) -> int:
    return max(bytes_by_rung.values(), default=0)


@dataclass(frozen=True, slots=True)
class Replacement:
    """A lost worker that its node replaces."""

    node: NodeId
    until_s: float  #: when requests no longer wait for it


@dataclass(frozen=True, slots=True, eq=False)
class Drain:
    model: Model  #: that waits for the room
    workers: tuple[Worker, ...]  #: several if the model waits for a pipeline
    victims: tuple[Replica, ...]
    began_s: float
