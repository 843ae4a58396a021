"""The worker's own process: malloc heaps, open files, and the process that it replaces."""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Container
from contextlib import suppress

# From malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
#: The largest size of a heap: all of it is usable at once. This reserves addresses, not memory.
_PIECE_BYTES = 64 << 20
#: Larger blocks get their own mapping; more free memory at the end of a heap is given back. glibc arrives at
#: both values by itself in processes with large blocks, unless an option is set.
_MAPPED_BYTES, _TRIMMED_BYTES = 32 << 20, 64 << 20


def grow_by_pieces() -> None:
    """Let the heaps of new threads grow in large pieces. Only glibc has such heaps.

    Each growth takes the lock of the address space, which threads that pin host memory hold most of the time:
    loading CUDA kernels beside them took 8 s instead of 0.7.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TOP_PAD, _PIECE_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIMMED_BYTES)


def close_all_but(kept: Container[int | None]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # that of the list itself
                os.close(int(name))


class Predecessor:
    """The process that a worker replaces. Its memory is free once it has ended. Without a pid it has."""

    def __init__(self, pid: int | None) -> None:
        self._descriptor: int | None = None  #: None: it is gone
        if pid is not None:
            with suppress(ProcessLookupError):
                self._descriptor = os.pidfd_open(pid)

    @property
    def is_gone(self) -> bool:
        return self._is_gone(0)

    def wait(self) -> None:
        self._is_gone(None)

    def _is_gone(self, wait_ms: int | None) -> bool:
        if self._descriptor is None:
            return True
        ends = select.poll()
        ends.register(self._descriptor, select.POLLIN)
        if not ends.poll(wait_ms):
            return False
        os.close(self._descriptor)
        self._descriptor = None
        return True
