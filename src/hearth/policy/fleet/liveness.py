"""Whether a silent worker is slow or hangs.

A step may take minutes on few cores. So a worker is silent only while it neither sends anything nor passes a
mark: at each layer on a CPU, at the end of each step elsewhere (`engine/engine.py`).

Prompts of a next step are at most `GROWTH` times those of a measured one
(`policy/batch/prompt_allowance.py`), so the time between marks stays below
`TIMES_LONGEST` times the longest so far.
"""

from __future__ import annotations

from dataclasses import dataclass

TIMES_LONGEST = 10.0
#: A first step may take this many times the usual: kernels may have to be compiled.
TIMES_FIRST = 10.0
#: Limit between two marks, unless more is usual.
MAX_SILENCE_S = 600.0


def max_silence_s(usual_s: float, longest_s: float | None) -> float:
    """Return how long a worker may be silent in a step.

    `usual_s`: between steps. `longest_s`: between two marks so far; None: not measured.
    """
    derived_s = TIMES_FIRST * usual_s if longest_s is None else TIMES_LONGEST * longest_s
    return max(usual_s, min(derived_s, MAX_SILENCE_S))


@dataclass(slots=True)
class Silence:
    """For how many heartbeats a worker has been silent. Mutable; written by the task that watches it.

    A heartbeat counts less by the time that the worker waited for a core. The kernel tells of a wait at its
    end, so that one of several heartbeats takes back what earlier ones have counted.
    """

    heartbeat_s: float
    queued_s: float  #: how long the worker has waited for a core in its life
    num_missed: float = 0.0

    @property
    def seconds(self) -> float:
        return self.num_missed * self.heartbeat_s

    def beat(self, queued_s: float, *, was_heard: bool) -> None:
        """Count a heartbeat; `was_heard`: a message came or a mark was passed."""
        waited_s, self.queued_s = queued_s - self.queued_s, queued_s
        self.num_missed = 0.0 if was_heard else max(0.0, self.num_missed + 1.0 - waited_s / self.heartbeat_s)
