"""Memory, descriptors, threads and tasks of each role over a run: is the last third like the first?

A role outlives its processes, which faults kill: what a gateway leaves to the next one shows here, too.
Kills nothing and asks nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from bench.soak.watch import SHARE, SLACK, Sample, sampled

#: A process that is younger is still starting, and says nothing.
SETTLE_S = 6.0
MIN_SAMPLES = 9  #: of a role


@dataclass(frozen=True, slots=True)
class Seen:
    """A sample of a process of a role."""

    at_s: float
    sample: Sample


@dataclass(frozen=True, slots=True)
class Thirds:
    """Medians of the first and the last third of a run."""

    first: float
    last: float

    def limit(self, what: str) -> float:
        return self.first * (1 + SHARE) + SLACK[what]


class Flatness:
    """Samples by role. Mutable; written by whoever samples."""

    def __init__(self) -> None:
        self._first_seen_s: dict[int, float] = {}  #: by process
        self.seen: defaultdict[str, list[Seen]] = defaultdict(list)

    def look(self, now_s: float, processes: Mapping[str, Sequence[int]], num_tasks: int | None) -> None:
        """Sample all processes that have settled. `num_tasks`: of the gateway, where it tells."""
        for role, pids in processes.items():
            for pid in pids:
                if now_s - self._first_seen_s.setdefault(pid, now_s) < SETTLE_S:
                    continue
                sample = sampled(pid, num_tasks if role == "gateway" else None)
                if sample is not None:
                    self.seen[role].append(Seen(now_s, sample))

    def thirds(self, began_s: float, ended_s: float) -> dict[str, dict[str, Thirds]]:
        """Return, by role, what is known of both the first and the last third of a run."""
        third_s = (ended_s - began_s) / 3
        found: dict[str, dict[str, Thirds]] = {}
        for role, seen in self.seen.items():
            if len(seen) < MIN_SAMPLES:
                continue
            first = [asdict(each.sample) for each in seen if each.at_s < began_s + third_s]
            last = [asdict(each.sample) for each in seen if each.at_s >= ended_s - third_s]
            known = {what: (_known(first, what), _known(last, what)) for what in SLACK}
            found[role] = {
                what: Thirds(median(before), median(after))
                for what, (before, after) in known.items()
                if before and after
            }
        return found


def growth(thirds: Mapping[str, Mapping[str, Thirds]]) -> list[str]:
    """Name what grew by more than caches and allocators may."""
    return [
        f"{what} of the {role} grew from {each.first:.0f} to {each.last:.0f}, limit: {each.limit(what):.0f}"
        for role, whats in thirds.items()
        for what, each in whats.items()
        if each.last > each.limit(what)
    ]


def _known(samples: Sequence[Mapping[str, int | None]], what: str) -> list[int]:
    return [value for sample in samples if (value := sample[what]) is not None]
