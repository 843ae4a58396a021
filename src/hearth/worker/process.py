"""Has the heaps of this process's threads grow by large pieces. Allocates nothing itself.

glibc gives threads heaps of their own, and lets one grow page by page: a call of mprotect each time, which
waits for the lock of the process's map of addresses. Threads that have the kernel find the pages of host
memory hold that lock most of the time (`store/tiers/pinning.py`). A thread that had CUDA load kernels
beside them took 8 s instead of 0.7, nearly all of it in mprotect.

The descriptors that a process has open. Opens none.

The process whose place a worker takes, and which has the memory until it is gone. Ends no process.
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Container
from contextlib import suppress

# From malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
#: A heap is at most this large, and so all of it can be used from the beginning. Pages still come when they
#: are touched, so that it costs addresses, no memory.
_PIECE_BYTES = 64 << 20
#: From here on memory has a mapping of its own, and from there on the end of a heap is given back. Both are
#: what glibc comes to by itself in a process that uses large blocks, unless one of these was set.
_MAPPED_BYTES, _TRIMMED_BYTES = 32 << 20, 64 << 20


def grow_by_pieces() -> None:
    """Have all heaps that threads get from now on grow by pieces; other C libraries have no such heaps."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TOP_PAD, _PIECE_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIMMED_BYTES)


def close_all_but(kept: Container[int | None]) -> None:
    """Close all descriptors but some, however this process came to have them. None is none of them."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # that of the list itself
                os.close(int(name))


class Predecessor:
    """A process that is ending, by a descriptor of it; one that was gone before, or was none, is gone."""

    def __init__(self, pid: int | None) -> None:
        self._descriptor: int | None = None  #: None: it is gone
        if pid is not None:
            with suppress(ProcessLookupError):
                self._descriptor = os.pidfd_open(pid)

    @property
    def is_gone(self) -> bool:
        return self._is_gone(0)

    def wait(self) -> None:
        """Return when the process is gone."""
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
