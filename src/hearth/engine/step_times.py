"""How long the device takes for a step. Waits for nothing that has not been waited for.

How long steps of an engine took, a few of every kind. Plans and measures nothing.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import median_low

import torch

from hearth.policy.batch.plan import StepPlan


class StepTimer:
    """Measures one step: from when the device has done all before it until it has done all of the step.

    A CPU computes a step while it is launched. On a CUDA device steps queue up, those of other models too, so
    the host's clock would tell the time of several.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin; the step is launched next, on the current stream."""
        self._began_s = self._ended_s = time.perf_counter()
        self._began: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # untyped
            self._began.record()

    def stop(self, end: torch.cuda.Event | None) -> None:
        """End, once all of the step is launched; `end` is the event behind it on a CUDA device."""
        self._ended_s, self._ended = time.perf_counter(), end

    def seconds(self) -> float:
        """Return how long the step took, which the device has done."""
        if self._began is None or self._ended is None:
            return self._ended_s - self._began_s
        return float(self._began.elapsed_time(self._ended)) / 1000


#: Kinds of steps that are kept, and the last steps of each: what any traffic needs, and a few kilobytes.
MAX_KINDS, NUM_KEPT = 128, 5


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step, and how long the device took for it."""

    num_tokens: int  #: over all rows
    num_rows: int
    context_tokens: int  #: that the rows look back on, their own included, summed over rows
    seconds: float


class StepSamples:
    """The last steps of every kind. Mutable; whoever steps the engine writes it.

    Steps are of one kind if their tokens, rows and context have the same number of binary digits each.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], deque[TimedStep]] = {}
        self.last: TimedStep | None = None  #: of any kind

    def add(self, plan: StepPlan, seconds: float) -> None:
        """Keep a step that was measured; one of a new kind is left out where there are too many."""
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
        """Return of every kind the step that took the median time, in no order."""
        return [_median(kept) for kept in self._kept.values()]


def _median(steps: deque[TimedStep]) -> TimedStep:
    seconds = median_low(step.seconds for step in steps)
    return next(step for step in steps if step.seconds == seconds)
