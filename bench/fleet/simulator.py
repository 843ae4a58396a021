"""A service in virtual time: the next thing happens, the brain decides, and what follows happens later.

Only the brain's own policy over coarse workers, of which there may be thousands: requests take a drawn time.
What arrives is fed by whoever runs it. Measures nothing. To the last token, by all policies: `service.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from bench.fleet.cluster import Brain, SimulatedCluster
from bench.fleet.costs import CostModel
from bench.fleet.worker import SimulatedReplica
from hearth.core.types import ModelId, RequestId, Rung, WorkerId
from hearth.policy.fleet.events import (
    Action,
    DeviceReported,
    Dispatch,
    Event,
    LoadModel,
    LoadProgressed,
    ModelReady,
    RequestCancelled,
    RequestFinished,
    ResidencyReported,
    RungUse,
    SetTimer,
    TimerFired,
)

#: Tells, when its time has come, what happens; None if it has been overtaken.
Happening = Callable[[], Event | None]
#: Tokens of every answer: nothing depends on them yet.
NUM_OUTPUT_TOKENS = 100


class Simulator:
    """A virtual clock and what is to happen at which time. Mutable; one caller."""

    def __init__(self, brain: Brain, costs: CostModel) -> None:
        self.cluster = SimulatedCluster(brain)
        self.now_s = 0.0
        self._costs = costs
        #: (time, number, happening); equal times go by number.
        self._queue: list[tuple[float, int, Happening]] = []
        self._num_scheduled = 0
        #: Models that were loaded before: half of such a model is in host memory, all of it on disk.
        self._bytes_by_rung: dict[ModelId, dict[Rung, int]] = {}
        #: The number of the last load of a model on a worker whose end is scheduled.
        self._scheduled_loads: dict[tuple[WorkerId, ModelId], int] = {}
        #: The number of the last dispatch of a request whose end is scheduled.
        self._scheduled_ends: dict[RequestId, int] = {}

    def run(self, num_events: int) -> int:
        """Let up to so many events happen; return how many there were."""
        num_told = 0
        while num_told < num_events and self._queue:
            self.now_s, _, happening = heapq.heappop(self._queue)
            event = happening()
            if event is None:
                continue
            num_told += 1
            actions = self.cluster.tell(event)
            self._follow_event(event)
            for action in actions:
                self._follow_action(action)
        return num_told

    def feed(self, events: Iterator[Event]) -> None:
        """Let events happen at their times, which never go back; the next is asked for when one happens."""
        event = next(events, None)
        if event is None:
            return

        def happen() -> Event:
            self.feed(events)
            return event

        self._schedule(event.now_s, happen)

    def _schedule(self, at_s: float, happening: Happening) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._queue, (at_s, self._num_scheduled, happening))

    def _follow_event(self, event: Event) -> None:
        """Have requests that waited for a load begin, and have its worker report what it has now."""
        if not isinstance(event, ModelReady):
            return
        replica = self.cluster.replica(event.worker, event.model)
        if replica is not None:  # else it had to go at once
            for request_id in replica.running:
                self._schedule_end(request_id)
            num_bytes = replica.profile.num_bytes
            by_rung = self._bytes_by_rung[event.model] = {Rung.HOST: num_bytes // 2, Rung.DISK: num_bytes}
            residency = ResidencyReported(self.now_s, event.model, by_rung)
            self._schedule(self.now_s, lambda: residency)
        self._schedule(self.now_s, lambda: self._report(event.worker))

    def _follow_action(self, action: Action) -> None:
        match action:
            case LoadModel(model, worker):
                self._schedule_load(worker, model)
            case Dispatch(request_id, model, worker):
                replica = self.cluster.replica(worker, model)
                assert replica is not None, f"dispatched to nobody: {action}"
                if replica.is_loading:  # It may have to come back only now, because others took some of it.
                    self._schedule_load(worker, model)
                if self._costs.runs_from_dispatch or not replica.is_loading:
                    self._schedule_end(request_id)
            case SetTimer(at_s):
                self._schedule(at_s, lambda: TimerFired(at_s) if self.cluster.timer_s == at_s else None)
            case _:
                pass

    def _schedule_load(self, worker: WorkerId, model: ModelId) -> None:
        """Let a load that has begun progress once, and end; nothing if that is scheduled already."""
        replica = self.cluster.replica(worker, model)
        if replica is None or self._scheduled_loads.get((worker, model)) == replica.load_number:
            return
        number = self._scheduled_loads[worker, model] = replica.load_number
        host_bytes = self._bytes_by_rung.get(model, {}).get(Rung.HOST, 0)
        uses = self._costs.plan_load(replica.missing_bytes, host_bytes)
        load_s = sum(use.seconds for use in uses)
        half_bytes = replica.missing_bytes // 2
        middle_s, end_s = self.now_s + load_s / 2, self.now_s + load_s

        def progress() -> Event | None:
            if self._find_load(worker, model, number) is None:
                return None
            return LoadProgressed(middle_s, worker, model, half_bytes)

        def end() -> Event | None:
            return self._end_load(end_s, worker, model, number, uses)

        self._schedule(middle_s, progress)
        self._schedule(end_s, end)

    def _end_load(
        self, now_s: float, worker: WorkerId, model: ModelId, number: int, uses: tuple[RungUse, ...]
    ) -> Event | None:
        if self._find_load(worker, model, number) is None:
            return None
        return ModelReady(now_s, worker, model, uses, sum(use.seconds for use in uses))

    def _find_load(self, worker: WorkerId, model: ModelId, number: int) -> SimulatedReplica | None:
        """Return the replica of a load; None if it was evicted or loaded anew since."""
        replica = self.cluster.replica(worker, model)
        is_same = replica is not None and replica.is_loading and replica.load_number == number
        return replica if is_same else None

    def _schedule_end(self, request_id: RequestId) -> None:
        """Let a request run from now on until it finishes, or its client goes away; nothing if it runs."""
        number = self.cluster.requests[request_id].num_dispatches
        if self._scheduled_ends.get(request_id) == number:
            return
        self._scheduled_ends[request_id] = number
        at_s = self.now_s + self._costs.draw_run_s()
        is_cancelled = self._costs.draw_cancelled()

        def end() -> Event | None:
            request = self.cluster.requests.get(request_id)
            if request is None or request.worker is None or request.num_dispatches != number:
                return None
            del self._scheduled_ends[request_id]
            if is_cancelled:
                return RequestCancelled(at_s, request_id)
            return RequestFinished(at_s, request_id, NUM_OUTPUT_TOKENS)

        self._schedule(at_s, end)

    def _report(self, name: WorkerId) -> Event | None:
        worker = self.cluster.workers.get(name)
        if worker is None:
            return None
        return DeviceReported(self.now_s, name, worker.count_device_bytes())
