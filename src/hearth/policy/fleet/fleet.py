"""The state of the brain: who waits, what runs, which model holds how much of which worker.

Keeps the books and their indices; decides nothing.

Every lookup that a decision needs is an index, so that no event costs a walk over all workers or models:
workers of one kind are ranked by the room they have or could make, a model's replicas by the requests they
run, models that wait by their first request. `settle` is the one place that carries a change of a replica
into all of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

from hearth.policy.fleet.affinity import forget_worker, rank_retired
from hearth.policy.fleet.audit import audit
from hearth.policy.fleet.capacity import CapacityIndex
from hearth.policy.fleet.estimates import Estimates
from hearth.policy.fleet.events import BrainConfig, RequestArrived, Resident, State, WorkerJoined
from hearth.policy.fleet.expiry import Expiries
from hearth.policy.fleet.ranking import Ranking
from hearth.policy.fleet.replica import Drain, Model, Replica, Request, Worker
from hearth.types import Hold, ModelId, RequestId, WorkerId

Name = TypeVar("Name", ModelId, WorkerId)


class Fleet:
    """Mutable; written only by `step`."""

    def __init__(self, config: BrainConfig) -> None:
        self.config = config
        self.estimates = Estimates(config.priors)
        self.now_s = -math.inf
        #: Counts events.
        self.turn = 0
        self.models: dict[ModelId, Model] = {}
        self.workers: dict[WorkerId, Worker] = {}
        #: Accepted and not ended.
        self.requests: dict[RequestId, Request] = {}
        self.num_waiting = 0
        #: Models with waiting requests, by the number of the first: in one queue those without a usable
        #: replica, in the other those whose replicas are all full.
        self.room_queue: Ranking[ModelId] = Ranking()
        self.slot_queue: Ranking[ModelId] = Ranking()
        self.capacity_by_kind: dict[str, CapacityIndex] = {}
        #: Deployed as pinned, not stopped, and on no worker: to be loaded unasked where there is room.
        self.unplaced: dict[ModelId, Model] = {}
        #: By the model that waits; at most one per worker.
        self.drains: dict[ModelId, Drain] = {}
        #: The last time ordered that has not come yet.
        self.timer_s: float | None = None
        #: Something happened that may let a waiting request run, or makes one wait.
        self.is_changed = False
        #: A replica was pinned, which may make room impossible for those who wait for some.
        self.is_pin_new = False
        #: Who waits and whose patience may not be over, in the order in which it ends; by number.
        self.patient: dict[int, Request] = {}
        #: The most workers there have been at a time: a lost one is replaced.
        self._most_workers = 0
        self._next_number = 0
        self.expiries = Expiries()
        #: Replicas that their workers may have to regard otherwise when the turn is over.
        self._untold: dict[Replica, None] = {}

    @property
    def num_running(self) -> int:
        return len(self.requests) - self.num_waiting

    @property
    def is_complete(self) -> bool:
        """No worker is missing: what cannot be done now cannot be done by waiting for one either."""
        return 0 < self._most_workers == len(self.workers)

    @property
    def next_number(self) -> int:
        """Of the request that arrives next."""
        return self._next_number

    def advance(self, now_s: float) -> None:
        """A new turn. Time never goes back; warm replicas whose time is over become retained."""
        self.turn += 1
        self.now_s = max(self.now_s, now_s)
        while (replica := self.expiries.pop_due(self.now_s)) is not None:
            self.settle(replica)

    def take_untold(self) -> list[Replica]:
        """Those whose workers have to be told how they are held, which counts as done."""
        told = [r for r in self._untold if r.hold not in (None, Hold.BUSY, r.told)]
        self._untold.clear()
        for replica in told:
            assert replica.hold is not None, f"gone: `{replica.model.name}`"
            replica.told = replica.hold
        return told

    def residents(self, now_s: float) -> list[Resident]:
        """What `hearth ps` shows: every model on every worker, in the order of their names."""
        replicas = sorted(self.replicas(), key=lambda replica: (replica.worker.name, replica.model.name))
        return [_resident(replica, now_s) for replica in replicas]

    def check(self) -> None:
        """Raise if the books contradict each other. Walks over everything: for tests, and when idle."""
        audit(self)

    # Workers and replicas.

    def join(self, event: WorkerJoined) -> None:
        assert event.worker not in self.workers, f"joined twice: worker `{event.worker}`"
        worker = Worker(event.worker, event.kind, event.budget_bytes, event.max_seqs)
        self.workers[worker.name] = worker
        self._most_workers = max(self._most_workers, len(self.workers))
        self.capacity_by_kind.setdefault(worker.kind, CapacityIndex()).put(worker)
        self.is_changed = True

    def lose(self, worker: Worker) -> list[Request]:
        """Its books vanish. Returns the requests it had, in order of arrival; they wait again."""
        requests = [request for replica in worker.replicas.values() for request in replica.running.values()]
        requests.sort(key=lambda request: request.number)
        for request in requests:
            self.requeue(request)
        for replica in list(worker.replicas.values()):
            self.remove(replica)
        for model in worker.failed.values():
            del model.failed_on[worker.name]
        forget_worker(worker)
        if worker.drain is not None:
            del self.drains[worker.drain.model.name]
        del self.workers[worker.name]
        rooms = self.capacity_by_kind[worker.kind]
        rooms.drop(worker)
        if not len(rooms.budget):
            del self.capacity_by_kind[worker.kind]
        self.is_changed = True
        return requests

    def add(self, replica: Replica) -> None:
        model, worker = replica.model, replica.worker
        assert worker.name not in model.replicas, f"`{model.name}` is on worker `{worker.name}` already"
        replica.idle_since_s = self.now_s
        model.replicas[worker.name] = worker.replicas[model.name] = replica
        rank_retired(model, worker)
        self.settle(replica)

    def remove(self, replica: Replica) -> None:
        assert not replica.running, f"`{replica.model.name}` still runs {len(replica.running)} requests"
        model, worker = replica.model, replica.worker
        del model.replicas[worker.name], worker.replicas[model.name]
        rank_retired(model, worker)
        if not model.replicas:
            model.named_keep_alive_s = None
        self.settle(replica)
        if model.profile is None and not model.replicas:
            del self.models[model.name]

    def blame(self, model: Model, worker: Worker) -> None:
        """The model failed there."""
        model.failed_on[worker.name], worker.failed[model.name] = worker, model

    def forgive(self, model: Model, worker: Worker) -> None:
        """The model is ready there."""
        model.failure = None
        model.failed_on.pop(worker.name, None)
        worker.failed.pop(model.name, None)

    def forgive_all(self, model: Model) -> None:
        """It is another one now."""
        model.failure, model.num_deadly_loads = None, 0
        for worker in list(model.failed_on.values()):
            self.forgive(model, worker)

    def settle(self, replica: Replica) -> None:
        """Carry whatever has changed about a replica into the books."""
        self._settle(replica)
        model = replica.model
        if model.replicas and model.is_pinned:  # Another one may be the oldest now.
            for other in list(model.replicas.values()):
                if other.hold is not other.hold_at(self.now_s):
                    self._settle(other)
        self.place_pinned(model)

    def place_pinned(self, model: Model) -> None:
        """Note whether a model has to be loaded unasked."""
        is_wanted = model.profile is not None and model.profile.is_pinned and not model.is_stopped
        if is_wanted and not any(not replica.is_stale for replica in model.replicas.values()):
            self.unplaced[model.name] = model
        else:
            self.unplaced.pop(model.name, None)

    def _settle(self, replica: Replica) -> None:
        model, worker = replica.model, replica.worker
        is_there = worker.replicas.get(model.name) is replica
        hold = replica.hold_at(self.now_s) if is_there else None
        if hold is not replica.hold:
            if replica.hold is not None:
                worker.held_bytes[replica.hold] -= replica.num_bytes
            if hold is not None:
                worker.held_bytes[hold] += replica.num_bytes
            is_more_room = hold is None or (replica.hold is not None and hold < replica.hold)
            self.is_changed = self.is_changed or is_more_room
            self.is_pin_new = self.is_pin_new or hold is Hold.PINNED
            replica.hold = hold
            self.capacity_by_kind[worker.kind].put(worker)
        if hold not in (None, Hold.BUSY, replica.told):
            self._untold[replica] = None
        self.expiries.note(replica)
        is_usable = is_there and not replica.is_stale and replica.drain is None
        if model.waiting and is_usable is not (worker.name in model.usable):
            self.is_changed = True
        _enter(worker.busy, model.name, replica, is_in=is_there and bool(replica.running))
        _enter(model.usable, worker.name, replica, is_in=is_usable)
        _enter(model.loading, worker.name, replica, is_in=is_usable and not replica.is_ready)
        if is_usable and len(replica.running) < worker.max_seqs:
            model.open.put(worker.name, len(replica.running))
        else:
            model.open.drop(worker.name)
        self._line_up(model)

    def settle_all(self, model: Model) -> None:
        """After a change that concerns every replica of a model."""
        for replica in list(model.replicas.values()):
            self.settle(replica)

    # Requests.

    def accept(self, event: RequestArrived, model: Model) -> Request:
        """It waits, if only for a moment: whether anything follows from that is for the caller to say."""
        assert event.request_id not in self.requests, f"arrived twice: request `{event.request_id}`"
        assert model.profile is not None, f"removed: `{model.name}`"
        digest = model.profile.digest
        request = Request(event.request_id, model, self._next_number, event.keep_alive_s, digest)
        self._next_number += 1
        if model.is_stopped:
            model.is_stopped = False
            self.place_pinned(model)
        self.requests[request.request_id] = request
        self._wait(request)
        return request

    def start(self, request: Request, replica: Replica) -> None:
        """A waiting request gets a slot."""
        model = request.model
        assert len(replica.running) < replica.worker.max_seqs, f"no slot for `{request.request_id}`"
        self._stop_waiting(request)
        request.replica, request.started_s = replica, self.now_s
        if self.room_queue and request.queued_turn < self.turn:
            self.is_changed = True  # Who waits for room may have waited longer now than those behind it.
        if model.head is not None and model.head.queued_s < request.queued_s:
            self.is_changed = True  # Who came later, but has waited longer, is the first now.
        replica.running[request.request_id] = request
        if replica.stop is not None and request.number >= replica.stop.number:
            replica.stop = None
        if replica.told is Hold.RETAINED:
            replica.told = Hold.WARM  # Its worker concludes that from the request.
        if request.keep_alive_s is not None and request.keep_alive_s != model.named_keep_alive_s:
            model.named_keep_alive_s = request.keep_alive_s
            self.settle_all(model)
        else:
            self.settle(replica)

    def end(self, request: Request) -> None:
        """It has finished, or is gone, or was refused: its slot or its place in the queue is free."""
        del self.requests[request.request_id]
        if request.replica is not None:
            self._stop_running(request, request.replica)
        else:
            self._stop_waiting(request)
            self.is_changed = True
            self._line_up(request.model)

    def requeue(self, request: Request) -> None:
        """It lost its replica: back to its place in the order of arrival."""
        assert request.replica is not None, f"waits already: `{request.request_id}`"
        self._stop_running(request, request.replica)
        request.replica = None
        request.num_resumes += 1
        self._wait(request)
        self.is_changed = True

    def _stop_running(self, request: Request, replica: Replica) -> None:
        del replica.running[request.request_id]
        replica.idle_since_s = self.now_s
        self.settle(replica)

    def _wait(self, request: Request) -> None:
        waiting = request.model.waiting
        is_last = not waiting or next(reversed(waiting)) < request.number
        waiting[request.number] = request
        if not is_last:
            request.model.waiting = dict(sorted(waiting.items()))
        self.num_waiting += 1
        request.queued_s, request.queued_turn = self.now_s, self.turn
        self.patient[request.number] = request
        self._line_up(request.model)

    def _stop_waiting(self, request: Request) -> None:
        del request.model.waiting[request.number]
        self.num_waiting -= 1
        self.patient.pop(request.number, None)

    def _line_up(self, model: Model) -> None:
        """Put a model into the queue where it belongs, by its first request."""
        head = model.head
        queue = None if head is None else (self.slot_queue if model.usable else self.room_queue)
        if model.queue is not None and model.queue is not queue:
            model.queue.drop(model.name)
        model.queue = queue
        if queue is not None and head is not None:
            queue.put(model.name, head.number)

    def replicas(self) -> Iterator[Replica]:
        for worker in self.workers.values():
            yield from worker.replicas.values()


def _enter(books: dict[Name, Replica], name: Name, replica: Replica, *, is_in: bool) -> None:
    if is_in:
        books[name] = replica
    else:
        books.pop(name, None)


def _resident(replica: Replica, now_s: float) -> Resident:
    state = _state(replica, now_s)
    return Resident(
        model=replica.model.name,
        worker=replica.worker.name,
        state=state,
        num_bytes=replica.num_bytes,
        loaded_bytes=replica.loaded_bytes,
        total_bytes=replica.total_bytes,
        num_running=len(replica.running),
        expires_s=replica.expires_s if state is State.WARM else None,
    )


def _state(replica: Replica, now_s: float) -> State:
    if not replica.is_ready:
        return State.LOADING
    match replica.hold:
        case Hold.PINNED:
            return State.PINNED
        case Hold.BUSY:
            return State.BUSY
        case Hold.WARM if now_s < replica.expires_s:
            return State.WARM
        case _:
            return State.RETAINED
