"""Memory, descriptors, threads and tasks over a run: of each role, and of each process that lives so long.

They are looked at after each window, while nobody asks or attacks, so that whatever is there was left behind.
A role outlives its processes, which faults kill: what a gateway leaves to the next one shows there. What a
process itself keeps shows in its own life. Only windows of one kind are compared, as those with attackers may
leave caches and allocators fuller, and the first round not at all: caches fill in it. Kills nothing.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench.service.process import ProcessId, started_ticks
from bench.soak.watch import SHARE, SLACK, Sample, sampled
from hearth.store.transfer.fetch import NUM_FAR_READERS, NUM_READERS

#: A process that is younger is still starting, and says nothing.
SETTLE_S = 6.0
ROUND_WINDOWS = 2  #: of a round: one without attackers, one with them
#: Windows before which growth says nothing: in the first round caches fill.
WARM_UP_WINDOWS = ROUND_WINDOWS
MIN_SAMPLES = 6  #: of each part of a role
#: The pools of a keeper. Readers of other nodes and object storage start with the first such read, as do the
#: threads of the object storage client, one per core. All stay.
KEEPER_THREADS = NUM_READERS + NUM_FAR_READERS + (os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Look:
    """A process as it was after a window."""

    window: int
    process: ProcessId
    sample: Sample


@dataclass(frozen=True, slots=True)
class Change:
    """Medians early and late, of a role or of one life."""

    who: str
    what: str
    first: float
    last: float
    pools: int = 0  #: the size of pools that fill at any time and stay full

    @property
    def limit(self) -> float:
        return max(self.first, self.pools) * (1 + SHARE) + SLACK[self.what]


class Flatness:
    """Looks at a run. Mutable; written by whoever looks."""

    def __init__(self, settle_s: float = SETTLE_S) -> None:
        self._settle_s = settle_s
        self.looks: defaultdict[str, list[Look]] = defaultdict(list)  #: by role

    def look(self, window: int, processes: Mapping[str, Sequence[int]], num_tasks: int | None) -> None:
        """Look at all processes that have settled. `num_tasks`: of the gateway, where it tells."""
        for role, pids in processes.items():
            for pid in pids:
                sample, ticks = sampled(pid, num_tasks if role == "gateway" else None), started_ticks(pid)
                if sample is not None and ticks is not None and age_s(ticks) >= self._settle_s:
                    self.looks[role].append(Look(window, ProcessId(pid, ticks), sample))

    def changes(self) -> list[Change]:
        """Return how roles and lives have changed, as far as there were looks enough."""
        return [
            change
            for role, looks in self.looks.items()
            for change in (*_of_role(role, looks), *_of_lives(role, looks))
        ]


def age_s(ticks: int) -> float:
    """Return how long ago a process started that did after so many ticks of the machine."""
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def growth(changes: Sequence[Change]) -> list[str]:
    """Name what grew by more than caches and allocators may."""
    return [
        f"{each.what} of {each.who} grew from {each.first:.0f} to {each.last:.0f}, limit: {each.limit:.0f}"
        for each in changes
        if each.last > each.limit
    ]


def _of_role(role: str, looks: Sequence[Look]) -> list[Change]:
    """Compare the first and the last third of the rounds, which are whole ones: of both kinds of windows."""
    num_windows = max(look.window for look in looks) + 1
    num_rounds = (num_windows - WARM_UP_WINDOWS) // ROUND_WINDOWS
    size = max(1, num_rounds // 3) * ROUND_WINDOWS
    first = [look for look in looks if WARM_UP_WINDOWS <= look.window < WARM_UP_WINDOWS + size]
    last = [look for look in looks if num_windows - size <= look.window]
    if num_rounds < 2 or min(len(first), len(last)) < MIN_SAMPLES:
        return []
    return _changes(role, f"the {role}", first, last)


def _of_lives(role: str, looks: Sequence[Look]) -> list[Change]:
    """Compare the first and the last window of one kind that a process has seen, of each process."""
    found = []
    for process in dict.fromkeys(look.process for look in looks):
        for kind in range(ROUND_WINDOWS):
            own = [look for look in looks if look.process == process and look.window % ROUND_WINDOWS == kind]
            windows = sorted({look.window for look in own if look.window >= WARM_UP_WINDOWS})
            if len(windows) >= 2:
                first, last = (
                    [look for look in own if look.window == at] for at in (windows[0], windows[-1])
                )
                found += _changes(role, f"one {role} ({process.pid})", first, last)
    return found


def _changes(role: str, who: str, first: Sequence[Look], last: Sequence[Look]) -> list[Change]:
    found = []
    for what in SLACK:
        before, after = ([asdict(look.sample)[what] for look in looks] for looks in (first, last))
        if None not in (*before, *after):
            pools = KEEPER_THREADS if (role, what) == ("keeper", "num_threads") else 0
            found.append(Change(who, what, median(before), median(after), pools))
    return found
