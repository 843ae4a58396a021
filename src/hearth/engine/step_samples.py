"""How long steps of an engine took, a few of every kind. Plans and measures nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median_low

from hearth.policy.batch.plan import StepPlan

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
