"""How much of a process's memory lies in RAM, as the kernel counts it."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

#: Pages whose entries are read at once: 8 MiB of them.
_PIECE = 1 << 20
#: In an entry of a page: it is in RAM.
_IS_PRESENT = np.uint64(1 << 63)


def process_bytes(pid: int) -> int:
    """Return the bytes of a process in RAM that no file is behind: shared ones are others' as well."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def resident_bytes(address: int, num_bytes: int) -> int:
    """Return how many bytes of a range of this process's addresses are in RAM, by whole pages."""
    first, end = address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE)
    num_pages = 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as entries:
        for page in range(first, end, _PIECE):
            entries.seek(page * 8)
            found = np.frombuffer(entries.read(min(_PIECE, end - page) * 8), np.uint64)
            num_pages += int(np.count_nonzero(found & _IS_PRESENT))
    return num_pages * mmap.PAGESIZE
