"""Memory of libraries at addresses that are the same in every process: one range per worker for all models.

cuBLAS computes with scratch memory, and captured steps contain its address. In a model's own space it could
be unmapped while another model steps, so it has a space of its own. Its pages are mapped and zeroed once,
because libraries keep semaphores there, and stay for the life of the process.

torch allocates while it holds the lock of its allocator, and the callback needs the interpreter lock; a
thread that frees a tensor holds the interpreter and wants the allocator's lock. So all of it is allocated at
start by the only thread that computes: see `use_library_memory` in `engine/graph_capture.py`.
"""

from __future__ import annotations

import ctypes
import logging

import torch

from hearth.memory.pages import Pages

_UNIT_BYTES = 2 << 20

_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

log = logging.getLogger(__name__)


class LibraryMemory:
    """Allocates from the first page on and never frees. Mutable; see the module for its threads."""

    def __init__(self, pages: Pages) -> None:
        """Map all of the pages, which this object owns from now on."""
        self._pages = pages
        wanted = pages.base_address - pages.space_bytes
        self.address = pages.reserve(wanted)
        self.num_fallbacks = int(self.address != wanted)
        if self.num_fallbacks:
            log.warning("fallback library_address=%#x wanted=%#x reason=refused", self.address, wanted)
        self.num_bytes = pages.num_pages * pages.page_bytes
        pages.map(self.address, *range(pages.num_pages))
        pages.bytes_at(self.address, self.num_bytes).zero_()
        self.used_bytes = 0

    def take(self, num_bytes: int) -> int | None:
        begin, padded_bytes = self.used_bytes, -(-num_bytes // _UNIT_BYTES) * _UNIT_BYTES
        if begin + padded_bytes > self.num_bytes:
            log.warning("library_memory_full wanted=%d used=%d of=%d", num_bytes, begin, self.num_bytes)
            return None
        self.used_bytes += padded_bytes
        return self.address + begin

    def torch_pool(self) -> torch.cuda.MemPool:
        """Return a pool for torch to allocate from on a CUDA device. Keeps this memory alive."""
        allocate = _Allocate(lambda num_bytes, _device, _stream: self.take(num_bytes))
        free = _Free(lambda *_: None)
        addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (allocate, free)]
        pool = torch.cuda.MemPool(torch._C._cuda_customAllocator(*addresses))
        _KEPT.append((self, allocate, free, pool))
        return pool


#: For as long as the process: torch may call them, and captured steps compute in the memory.
_KEPT: list[tuple[object, ...]] = []
