"""Asks the kernel which pages of a tensor are in memory. Has no tests."""

from __future__ import annotations

import ctypes
import os

import torch

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_pages(memory: torch.Tensor) -> list[bool]:
    """Return for each page of memory, which begins at one, whether the kernel holds bytes for it."""
    num_pages = -(-len(memory) // PAGE_BYTES)
    found = (ctypes.c_ubyte * num_pages)()
    if _LIBC.mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(len(memory)), found):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return [bool(one & 1) for one in found]


_LIBC = ctypes.CDLL(None, use_errno=True)
