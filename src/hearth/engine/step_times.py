"""How long steps take on the device: a timer of one step, samples by kind, and the clock of a stage."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low

import torch

from hearth.policy.batch.plan import StepPlan


class StepTimer:
    """Measures one step: from the end of all work before it, also of other models, to the end of its own."""

    def __init__(self, device: torch.device) -> None:
        self._began_s = self._ended_s = time.perf_counter()
        self._began: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # untyped
            self._began.record()

    def stop(self, end: torch.cuda.Event | None) -> None:
        self._ended_s, self._ended = time.perf_counter(), end

    def seconds(self) -> float:
        if self._began is None or self._ended is None:
            return self._ended_s - self._began_s
        return float(self._began.elapsed_time(self._ended)) / 1000


#: Kinds that are kept, and steps of each: a few kilobytes.
MAX_KINDS, NUM_KEPT = 128, 5


@dataclass(frozen=True, slots=True)
class TimedStep:
    num_tokens: int  #: over all rows
    num_rows: int
    context_tokens: int  #: that rows attend to, their own tokens included, summed over rows
    seconds: float


class StepSamples:
    """The last steps of each kind. Mutable; written by the thread that steps the engine.

    Two steps are of one kind if the binary logarithms of their tokens, rows and context agree.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], deque[TimedStep]] = {}
        self.last: TimedStep | None = None  #: of any kind

    def add(self, plan: StepPlan, seconds: float) -> None:
        """Keep a measured step, unless it is of a new kind and there are too many kinds."""
        self.keep(TimedStep(plan.num_tokens, plan.num_rows, plan.context_tokens, seconds))

    def keep(self, step: TimedStep) -> None:
        self.last = step
        kind = (
            step.num_tokens.bit_length(),
            step.num_rows.bit_length(),
            step.context_tokens.bit_length(),
        )
        kept = self._kept.get(kind)
        if kept is None:
            if len(self._kept) >= MAX_KINDS:
                return
            kept = self._kept[kind] = deque(maxlen=NUM_KEPT)
        kept.append(step)

    def typical(self) -> list[TimedStep]:
        """Return the step with the median time of each kind, in no order."""
        return [_median(kept) for kept in self._kept.values()]


def _median(steps: deque[TimedStep]) -> TimedStep:
    seconds = median_low(step.seconds for step in steps)
    return next(step for step in steps if step.seconds == seconds)


class StageClock:
    """How long a stage of a pipeline computes for usual decode steps. Mutable; written by its step thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timers: deque[tuple[StepTimer, torch.cuda.Event | None]] = (
            deque()
        )  #: not read yet, oldest first
        self._kept: deque[float] = deque(maxlen=NUM_KEPT)
        self.seconds = 0.0  #: median of the last steps; 0: none was timed

    def start(self, plan: StepPlan, *, is_warm: bool) -> Callable[[torch.cuda.Event | None], None]:
        """Return what has to be called with the end of the step, once it is launched."""
        if plan.prompts or not is_warm:
            return lambda end: None
        timer = StepTimer(self._device)

        def stop(end: torch.cuda.Event | None) -> None:
            timer.stop(end)
            self._timers.append((timer, end))
            self._read()

        return stop

    def _read(self) -> None:
        while self._timers:
            timer, end = self._timers[0]
            if end is not None and not end.query():  # type: ignore[no-untyped-call] # untyped
                return
            self._timers.popleft()
            self._kept.append(timer.seconds())
            self.seconds = median_low(self._kept)
