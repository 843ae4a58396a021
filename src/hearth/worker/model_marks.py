"""Shows in a worker's beacon which step is under way, its runs, and how it advances.

The device computes steps in launch order. So the step under way is the oldest launched one that is not known
to be done: if the worker dies or hangs, it is in that one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hearth.core.beacon import Beacon
from hearth.core.types import ModelId, RequestId
from hearth.worker.background import StepLaunches


class WorkerMarks:
    """The steps of all models of a worker. Mutable; written by the step thread alone."""

    def __init__(self, beacon: Beacon | None = None, launches: StepLaunches | None = None) -> None:
        """`beacon` None: none is watched. `launches` is told of each launch."""
        self.beacon = beacon or Beacon()
        self.launches = launches or StepLaunches()
        self._num_begun = 0
        #: Steps that are not known to be done, by number, oldest first.
        self._under_way: dict[int, _BegunStep] = {}
        self._shown: int | None = None  #: number of the step in the beacon; None: it shows none

    def of(self, model: ModelId) -> ModelMarks:
        return ModelMarks(model, self)

    def begun(self, marks: ModelMarks, request_ids: Sequence[RequestId]) -> int:
        number = self._num_begun
        self._num_begun += 1
        self._under_way[number] = _BegunStep(marks, request_ids)
        self._show()
        self.launches.begun()
        return number

    def launched(self) -> None:
        self.launches.ended()

    def done(self, number: int) -> None:
        """Note that a step is done, and with it all that were launched before."""
        while self._under_way and (oldest := next(iter(self._under_way))) <= number:
            del self._under_way[oldest]
        self._show()

    def closed(self, marks: ModelMarks) -> None:
        self._under_way = {number: one for number, one in self._under_way.items() if one.marks is not marks}
        self._show()

    def advanced(self) -> None:
        self.beacon.mark()
        self._show()

    def _show(self) -> None:
        number, oldest = next(iter(self._under_way.items()), (None, None))
        if oldest is None:
            self.beacon.show(None, 0.0)
        elif number == self._shown:
            self.beacon.show_longest(oldest.marks.longest_s)
        else:
            self.beacon.show(oldest.marks.model, oldest.marks.longest_s, oldest.request_ids)
        self._shown = number


@dataclass(frozen=True, slots=True)
class _BegunStep:
    marks: ModelMarks
    request_ids: Sequence[RequestId]  #: run numbers


class ModelMarks:
    def __init__(self, model: ModelId, worker: WorkerMarks) -> None:
        self.model = model
        self.longest_s = 0.0  #: the longest time between two marks of a step
        self._worker = worker
        self._numbers: deque[int] = deque()  #: of steps that were not waited for, oldest first
        self._since_s: float | None = None  #: time of the last mark in a step; None: between steps

    def begun(self, request_ids: Sequence[RequestId]) -> None:
        self._since_s = time.perf_counter()
        self._numbers.append(self._worker.begun(self, request_ids))

    def launched(self) -> None:
        self._worker.launched()

    def layer_passed(self) -> None:
        self._measure()
        self._worker.advanced()

    def done(self) -> None:
        self._measure()
        self._since_s = None
        self._worker.done(self._numbers.popleft())
        self._worker.advanced()

    def closed(self) -> None:
        self._since_s = None
        self._numbers.clear()
        self._worker.closed(self)

    def _measure(self) -> None:
        if self._since_s is not None:  # else a capture between steps
            now_s = time.perf_counter()
            self.longest_s = max(self.longest_s, now_s - self._since_s)
            self._since_s = now_s
