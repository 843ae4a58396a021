"""Shows by a worker's beacon whose step is under way, which runs it has, and how it advances. Judges nothing.

The device computes steps in the order in which they were launched. So the step under way is the oldest that
was launched and is not known to be done, whichever model the host waits for: if the worker dies or hangs, it
is in that one.
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
        """`beacon` None: nobody looks. `launches` is told when each step is launched."""
        self.beacon = beacon or Beacon()
        self.launches = launches or StepLaunches()
        self._num_begun = 0
        #: By number, one for each step that is not known to be done, oldest first.
        self._under_way: dict[int, _BegunStep] = {}
        self._shown: int | None = None  #: the number of the step that the beacon shows; None: it shows none

    def of(self, model: ModelId) -> ModelMarks:
        """Return what the engine of a model tells."""
        return ModelMarks(model, self)

    def begun(self, marks: ModelMarks, request_ids: Sequence[RequestId]) -> int:
        """Note a step that is launched now; return its number."""
        number = self._num_begun
        self._num_begun += 1
        self._under_way[number] = _BegunStep(marks, request_ids)
        self._show()
        self.launches.begun()
        return number

    def launched(self) -> None:
        self.launches.ended()

    def done(self, number: int) -> None:
        """Note that a step is done, and so are those that were launched before it, whoever waits for them."""
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
    """A step that was launched."""

    marks: ModelMarks
    request_ids: Sequence[RequestId]  #: of its rows, which are numbers of runs


class ModelMarks:
    """The `StepMarks` of one model's engine. Mutable; written by the step thread alone."""

    def __init__(self, model: ModelId, worker: WorkerMarks) -> None:
        self.model = model
        self.longest_s = 0.0  #: between two marks of a step so far
        self._worker = worker
        self._numbers: deque[int] = deque()  #: of its steps that were not waited for, oldest first
        self._since_s: float | None = None  #: when the last mark of a step was passed; None: no step is made

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
        if self._since_s is not None:  # else graphs are captured between steps
            now_s = time.perf_counter()
            self.longest_s = max(self.longest_s, now_s - self._since_s)
            self._since_s = now_s
