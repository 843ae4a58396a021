"""How fast can bytes be had at all? Plain reads into pinned memory, and one large copy to the device.

These are bounds: no hashing, no books, no device at the end of a read. Measures nothing of Hearth.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from hearth.store.tiers.segment import Segment

REQUEST_BYTES = 4 << 20
THREADS = (1, 2, 4, 8, 16)
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True, slots=True)
class Reader:
    """A way to read a file."""

    num_threads: int
    is_direct: bool

    def __str__(self) -> str:
        kind = "O_DIRECT" if self.is_direct else "buffered"
        return f"{kind}, {self.num_threads} at once"

    def read_s(self, path: Path, target: memoryview, num_bytes: int) -> float:
        """Return the seconds to read the beginning of a file, round and round into `target`, by requests."""
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.is_direct else 0))
        num_cells = len(target) // REQUEST_BYTES
        requests = count()  # each number is given out once, whichever thread asks

        def read_some() -> None:
            while (at := (number := next(requests)) * REQUEST_BYTES) < num_bytes:
                cell = number % num_cells * REQUEST_BYTES
                wanted = min(REQUEST_BYTES, num_bytes - at)
                got = os.preadv(fd, [target[cell : cell + wanted]], at)
                assert got == wanted, f"{path}: {got=} {wanted=} {at=}"

        try:
            with ThreadPoolExecutor(self.num_threads) as pool:
                began_s = time.perf_counter()
                readers = [pool.submit(read_some) for _ in range(self.num_threads)]
                for reader in readers:
                    reader.result()
                return time.perf_counter() - began_s
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Caches:
    """Files of which the system may have kept something in memory."""

    paths: tuple[Path, ...]
    is_everything_dropped: bool  #: what others have cached, too; a surer way, where it is allowed

    @staticmethod
    def of(*paths: Path, is_machine_ours: bool) -> Caches:
        return Caches(paths, is_machine_ours and os.access(DROP_CACHES, os.W_OK))

    def drop(self) -> None:
        """Have the next reads of the files come from the disk."""
        os.sync()
        if self.is_everything_dropped:
            DROP_CACHES.write_text("3")
            return
        for path in self.paths:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def readers_for(path: Path) -> list[Reader]:
    kinds = [False, True] if _takes_direct_reads(path) else [False]
    return [Reader(threads, is_direct) for is_direct in kinds for threads in THREADS]


def _takes_direct_reads(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def fastest_readers(path: Path, target: memoryview, num_bytes: int, caches: Caches) -> dict[Reader, float]:
    """Return bytes per second of every way to read the beginning of a file, the fastest first."""
    rates: dict[Reader, float] = {}
    num_bytes = min(num_bytes, path.stat().st_size)
    for reader in readers_for(path):
        caches.drop()
        rates[reader] = num_bytes / reader.read_s(path, target, num_bytes)
    return dict(sorted(rates.items(), key=lambda item: -item[1]))


@contextmanager
def pinned(num_bytes: int) -> Iterator[Segment]:
    """Hold memory of the host tier's kind, in one cell, pinned where there is a CUDA device.

    Closed before it is unmapped: of memory that went while it was registered the driver goes on to say that
    it is mapped, to whoever next gets these addresses.
    """
    with closing(Segment.create(1, num_bytes)) as segment:
        segment.pin_in_background()
        segment.wait_pinned()
        is_pinned = segment.pinned_bytes == num_bytes
        assert is_pinned or not torch.cuda.is_available(), "the memory cannot be pinned"
        yield segment


def to_device_bytes_per_s(num_bytes: int, device: torch.device) -> float:
    """Return the best rate of a few copies of so many bytes at once, from pinned memory to the device."""
    with pinned(num_bytes) as segment:
        source = torch.frombuffer(segment.memory(0, num_bytes), dtype=torch.uint8)
        return _copied_bytes_per_s(source, device)


def _copied_bytes_per_s(source: torch.Tensor, device: torch.device, num_runs: int = 3) -> float:
    target = torch.empty(source.nbytes, dtype=torch.uint8, device=device)
    target.copy_(source)  # warms up
    times: list[float] = []
    for _ in range(num_runs):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call] # torch leaves it untyped
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            began_s = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - began_s)
    return source.nbytes / min(times)
