"""Has the heaps of this process's threads grow by large pieces. Allocates nothing itself.

glibc gives threads heaps of their own, and lets one grow page by page: a call of mprotect each time, which
waits for the lock of the process's map of addresses. Threads that have the kernel find the pages of host
memory hold that lock most of the time (`store/tiers/pinning.py`). A thread that had CUDA load kernels
beside them took 8 s instead of 0.7, nearly all of it in mprotect.
"""

from __future__ import annotations

import ctypes

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
