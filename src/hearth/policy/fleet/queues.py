"""Accepted requests, and the two queues of waiting models. `serving.py` decides.

Both queues are in order of arrival: models that wait for *room*, because no worker serves them, and models
that wait for a *slot*, because all their replicas are full. A batch request is queued as if it came
`BATCH_PATIENCE_S` later: it yields to interactive ones that come until then.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from hearth.core.types import BATCH_PATIENCE_S, ModelId, RequestId
from hearth.policy.fleet.capacity import FleetCapacity
from hearth.policy.fleet.events import RequestArrived
from hearth.policy.fleet.ranking import Ranking, SizedRanking
from hearth.policy.fleet.records import Drain, Model, Place, Request


class RequestQueues:
    """All requests that have not ended. Mutable; written only by the fleet."""

    def __init__(self, patience_s: float, capacity: FleetCapacity) -> None:
        self._patience_s, self._capacity = patience_s, capacity
        self.requests: dict[RequestId, Request] = {}
        self.num_waiting = 0
        self.num_awaiting_turn = 0
        #: By the place of the first request: models without a usable replica, and those with full ones only.
        self.for_room: Ranking[ModelId, Place] = Ranking()
        self.for_slot: Ranking[ModelId, Place] = Ranking()
        #: Models of `for_room` by the least bytes that they need on any kind of device.
        self.for_room_by_size: SizedRanking[ModelId, Place] = SizedRanking()
        #: Models of `for_room` without a drain; of these, those that may still reserve room.
        self.undrained: Ranking[ModelId, Place] = Ranking()
        self.reserving: Ranking[ModelId, Place] = Ranking()
        self._unranked: dict[
            ModelId, Model
        ] = {}  #: whose place among those for room is updated when it matters
        #: Models of `for_slot` that have a free slot: it is kept for interactive requests.
        self.for_kept_slot: Ranking[ModelId, Place] = Ranking()
        #: By the model that waits, in the order in which they began; at most one per worker.
        self.drains: dict[ModelId, Drain] = {}
        #: Drains by each model whose queue may end them: that which waits, and the victims.
        self._drains_by_model: dict[ModelId, dict[ModelId, Drain]] = {}
        #: Drains that may have become needless or given room since they were looked at.
        self.changed_drains: dict[ModelId, Drain] = {}
        #: Drains whose worker has room for the waiting model, or whose victims have all ended.
        self.done_drains: dict[ModelId, Drain] = {}
        #: Something happened that may let a waiting request run, or make one wait.
        self.must_serve = False
        #: A replica was pinned, which may leave no room for waiting models.
        self.must_refuse = False
        #: Requests that were queued since `next_overdue_s` was asked.
        self._newly_queued: list[Request] = []
        #: (when their patience ends, number, request), as a heap. Some may wait no more.
        self.patient: list[tuple[float, int, Request]] = []
        self.next_number = 0

    @property
    def num_running(self) -> int:
        return len(self.requests) - self.num_waiting

    def accept(self, event: RequestArrived, model: Model, now_s: float) -> Request:
        assert event.request_id not in self.requests, f"arrived twice: request `{event.request_id}`"
        assert model.profile is not None, f"removed: `{model.name}`"
        digest = model.profile.digest
        line_s = now_s + (BATCH_PATIENCE_S if event.is_batch else 0.0)
        request = Request(
            event.request_id,
            model,
            self.next_number,
            event.keep_alive_s,
            digest,
            line_s,
            event.is_batch,
            adapter=event.adapter,
            prefixes=event.prefixes,
            num_prompt_tokens=event.num_prompt_tokens,
            key=event.key,
        )
        self.next_number += 1
        self.requests[request.request_id] = request
        return request

    def remove(self, request: Request) -> None:
        del self.requests[request.request_id]

    def enqueue(self, request: Request, now_s: float, step_number: int) -> None:
        """Add a request to its model's queue; `line_up` must follow."""
        waiting = request.model.waiting
        is_last = not waiting or next(reversed(waiting.values())).place < request.place
        waiting[request.number] = request
        if not is_last:
            request.model.waiting = dict(sorted(waiting.items(), key=lambda item: item[1].place))
        self.num_waiting += 1
        request.queued_s, request.queued_step = now_s, step_number
        self._newly_queued.append(request)

    def dequeue(self, request: Request) -> None:
        """Remove a request from its model's queue; `line_up` must follow."""
        del request.model.waiting[request.number]
        self.num_waiting -= 1

    def await_turn(self, request: Request, *, is_waiting: bool) -> None:
        self.num_awaiting_turn += is_waiting - request.awaits_turn
        request.awaits_turn = is_waiting

    def line_up(self, model: Model) -> None:
        if model.waiting or model.queue is not None:
            self._put_in_queue(model)
        if model.name in self._drains_by_model:
            self.changed_drains.update(self._drains_by_model[model.name])

    def _put_in_queue(self, model: Model) -> None:
        first = model.first_waiting
        queue = None if first is None else (self.for_slot if model.usable else self.for_room)
        if model.queue is not None and model.queue is not queue:
            model.queue.drop(model.name)
            if model.queue is self.for_room:
                self._unranked[model.name] = model
        model.queue = queue
        if queue is not None and first is not None:
            queue.put(model.name, first.place)
            if queue is self.for_room:
                self._unranked[model.name] = model
        if queue is self.for_slot and first is not None and len(model.with_free_slot):
            self.for_kept_slot.put(model.name, first.place)
        elif len(self.for_kept_slot):
            self.for_kept_slot.drop(model.name)

    def rerank(self, models: Mapping[ModelId, Model]) -> None:
        """Note that workers came or went: whether a model fits one of them may have changed."""
        self._unranked.update((name, models[name]) for name in self.for_room if name in models)

    def rank_waiting(self) -> None:
        """Rank the models that wait for room. Call it before `undrained`, `reserving` and sizes are read."""
        while self._unranked:
            _, model = self._unranked.popitem()
            if model.queue is self.for_room and (first := model.first_waiting) is not None:
                self._rank_for_room(model, first.place)
            else:
                self.for_room_by_size.drop(model.name)
                self.undrained.drop(model.name)
                self.reserving.drop(model.name)

    def _rank_for_room(self, model: Model, place: Place) -> None:
        least_bytes = 0 if model.profile is None else self._capacity.least_bytes(model.profile)
        self.for_room_by_size.put(model.name, place, least_bytes)
        if model.name in self.drains:
            self.undrained.drop(model.name)
            self.reserving.drop(model.name)
        elif self.undrained.rank(model.name) != place:
            self.undrained.put(model.name, place)
            self.reserving.put(model.name, place)

    def begin_drain(self, drain: Drain) -> None:
        self.drains[drain.model.name] = self.changed_drains[drain.model.name] = drain
        for model in (drain.model, *(victim.model for victim in drain.victims)):
            self._drains_by_model.setdefault(model.name, {})[drain.model.name] = drain
        self.line_up(drain.model)

    def end_drain(self, drain: Drain) -> None:
        name = drain.model.name
        del self.drains[name]
        self.changed_drains.pop(name, None)
        self.done_drains.pop(name, None)
        for model in {drain.model.name, *(victim.model.name for victim in drain.victims)}:
            del self._drains_by_model[model][name]
            if not self._drains_by_model[model]:
                del self._drains_by_model[model]
        self.line_up(drain.model)

    def next_overdue_s(self, now_s: float, until_s: float) -> float | None:
        """Return when the patience of the next waiting request ends; None: later than `until_s`."""
        for request in self._newly_queued:
            if request.number in request.model.waiting:
                heapq.heappush(self.patient, (request.overdue_s(self._patience_s), request.number, request))
        self._newly_queued.clear()
        while self.patient and self.patient[0][0] <= until_s:
            overdue_s, number, request = self.patient[0]
            is_current = number in request.model.waiting and request.overdue_s(self._patience_s) == overdue_s
            if is_current and overdue_s > now_s:
                return overdue_s
            heapq.heappop(self.patient)
        return None
