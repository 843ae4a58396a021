"""Memory, descriptors, threads and tasks of each role over a run: is the last third like the first?

They are looked at while nobody asks or attacks, so that whatever is there was left behind. A role outlives
its processes, which faults kill: what a gateway leaves to the next one shows here, too. Kills nothing.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench.chaos.service import started_ticks
from bench.soak.watch import SHARE, SLACK, Sample, sampled

#: A process that is younger is still starting, and says nothing.
SETTLE_S = 6.0
MIN_SAMPLES = 9  #: of a role


@dataclass(frozen=True, slots=True)
class Thirds:
    """Medians of the first and the last third of samples."""

    first: float
    last: float

    def limit(self, what: str) -> float:
        return self.first * (1 + SHARE) + SLACK[what]


class Flatness:
    """Samples of a run. Mutable; written by whoever samples."""

    def __init__(self, settle_s: float = SETTLE_S) -> None:
        self._settle_s = settle_s
        self.samples: defaultdict[str, list[Sample]] = defaultdict(list)  #: by role

    def look(self, processes: Mapping[str, Sequence[int]], num_tasks: int | None) -> None:
        """Sample all processes that have settled. `num_tasks`: of the gateway, where it tells."""
        for role, pids in processes.items():
            for pid in pids:
                sample = sampled(pid, num_tasks if role == "gateway" else None)
                if sample is not None and (age_s(pid) or 0.0) >= self._settle_s:
                    self.samples[role].append(sample)

    def thirds(self) -> dict[str, dict[str, Thirds]]:
        """Return, by role, what is known of both the first and the last third of its samples."""
        return {
            role: _thirds(samples) for role, samples in self.samples.items() if len(samples) >= MIN_SAMPLES
        }


def age_s(pid: int) -> float | None:
    """Return how long ago a process started; None if it has ended."""
    ticks = started_ticks(pid)
    if ticks is None:
        return None
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def _thirds(samples: Sequence[Sample]) -> dict[str, Thirds]:
    size = len(samples) // 3
    found = {}
    for what in SLACK:
        first, last = (_known(part, what) for part in (samples[:size], samples[-size:]))
        if first and last:
            found[what] = Thirds(median(first), median(last))
    return found


def growth(thirds: Mapping[str, Mapping[str, Thirds]]) -> list[str]:
    """Name what grew by more than caches and allocators may."""
    return [
        f"{what} of the {role} grew from {each.first:.0f} to {each.last:.0f}, limit: {each.limit(what):.0f}"
        for role, whats in thirds.items()
        for what, each in whats.items()
        if each.last > each.limit(what)
    ]


def _known(samples: Sequence[Sample], what: str) -> list[int]:
    return [value for sample in samples if (value := asdict(sample)[what]) is not None]
