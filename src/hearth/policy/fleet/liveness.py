"""Whether a worker that says nothing is slow or hangs. Watches nothing: it is told what was seen.

A worker's step thread answers between two steps, and a step may take minutes: much of a large model on few
cores. So a worker is silent only while it neither says anything nor passes a mark, which it does at each
layer on a CPU and at the end of each step on other devices (`engine/engine.py`).

How long it may be silent follows from how long it took before: prompts of a next step are at most `GROWTH`
times those of one that was measured (`policy/batch/prompt_allowance.py`), so that from one mark to the next
it takes less than `TIMES_LONGEST` times the longest so far. A kernel that hangs is found after that at the
latest, or after what is usual, whichever is longer, and never later than `MAX_SILENCE_S`.
"""

from __future__ import annotations

from dataclasses import dataclass

#: A step hangs that takes so many times as long to its next mark as any of its model did before.
TIMES_LONGEST = 10.0
#: A first step of a model has so many times what is usual: kernels may have to be compiled for it.
TIMES_FIRST = 10.0
#: No step has longer than this from one mark to the next, unless that is usual.
MAX_SILENCE_S = 600.0


def max_silence_s(usual_s: float, longest_s: float | None) -> float:
    """Return how long a worker may be silent in a step.

    `usual_s`: how long between steps. `longest_s`: between two marks so far; None: nothing was measured.
    """
    derived_s = TIMES_FIRST * usual_s if longest_s is None else TIMES_LONGEST * longest_s
    return max(usual_s, min(derived_s, MAX_SILENCE_S))


@dataclass(slots=True)
class Silence:
    """How many heartbeats a worker has been silent for. Mutable; written by the task that watches it.

    A heartbeat counts less by the part of it that the worker waited for a core: where others keep the machine
    busy, a healthy worker is late. A heartbeat that came late itself, for want of a core, counts once.
    """

    heartbeat_s: float
    queued_s: float  #: how long the worker has waited for a core, in all of its life
    num_missed: float = 0.0

    @property
    def seconds(self) -> float:
        """How long the worker has been silent though it had a core."""
        return self.num_missed * self.heartbeat_s

    def beat(self, queued_s: float, *, was_heard: bool) -> None:
        """Count the heartbeat that has just ended; `was_heard`: or a mark was passed in it."""
        waited_s, self.queued_s = queued_s - self.queued_s, queued_s
        self.num_missed = 0.0 if was_heard else self.num_missed + max(0.0, 1.0 - waited_s / self.heartbeat_s)
