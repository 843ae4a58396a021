"""Memory, descriptors, threads and tasks of a service over time, and whether they grow. Changes nothing."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: What may come on top between the first and the last quarter of a life: caches fill, allocators keep pages.
SLACK = {"private_bytes": 48 << 20, "num_fds": 24, "num_threads": 8, "num_tasks": 48}
SHARE = 0.15  #: of what it was, likewise
#: Lives that are shorter say nothing; and while a process starts it grows.
MIN_SAMPLES = 12
SETTLE_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Sample:
    private_bytes: int  #: of memory that no other process sees
    num_fds: int
    num_threads: int
    num_tasks: int | None = None  #: of the event loop, where the service tells


class Watch:
    """Samples of processes over time. Mutable; written by whoever samples."""

    def __init__(self) -> None:
        #: By process; a worker that was replaced is another one.
        self.samples: defaultdict[str, list[Sample]] = defaultdict(list)

    def look(self, pids: Mapping[str, int], num_tasks: int | None) -> None:
        for name, pid in pids.items():
            sample = sampled(pid, num_tasks if name == "gateway" else None)
            if sample is not None:
                self.samples[f"{name}:{pid}"].append(sample)

    def report(self) -> dict[str, object]:
        """Return the first and the last quarter of every life that is long enough."""
        return {name: quarters(samples) for name, samples in self.samples.items() if is_long(samples)}

    def leaks(self) -> list[str]:
        found = []
        for name, samples in self.samples.items():
            if not is_long(samples):
                continue
            for what, (first, last) in quarters(samples).items():
                limit = first * (1 + SHARE) + SLACK[what]
                if last > limit:
                    found.append(f"{what} of {name} grew from {first:.0f} to {last:.0f}, limit: {limit:.0f}")
        return found


def sampled(pid: int, num_tasks: int | None) -> Sample | None:
    """Return a sample of a process; None if it is gone, or going."""
    process = Path(f"/proc/{pid}")
    try:
        resident_pages, shared_pages = map(int, (process / "statm").read_text().split()[1:3])
        num_fds, num_threads = (len(os.listdir(process / kind)) for kind in ("fd", "task"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    if not resident_pages:  # a zombie
        return None
    return Sample((resident_pages - shared_pages) * _PAGE_BYTES, num_fds, num_threads, num_tasks)


def is_long(samples: list[Sample]) -> bool:
    return len(samples) >= MIN_SAMPLES


def quarters(samples: list[Sample]) -> dict[str, tuple[float, float]]:
    """Return medians of the first and the last quarter of a life."""
    settled = [asdict(sample) for sample in samples[SETTLE_SAMPLES:]]
    size = max(1, len(settled) // 4)
    known = [what for what in SLACK if settled[0][what] is not None]
    return {
        what: (
            median(sample[what] for sample in settled[:size]),
            median(sample[what] for sample in settled[-size:]),
        )
        for what in known
    }
