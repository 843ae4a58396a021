"""Pages of host memory that are really mapped and unmapped: `Pages` for machines without a GPU. No fallbacks.

They are parts of one anonymous file, so one page can be seen at several addresses. What is not mapped cannot
be touched: the process would end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from hearth.memory.pages import Mark, PageRun, remap_each

_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Done:
    """A `Mark` of a device that does everything at once."""

    def synchronize(self) -> None:
        pass

    def has_passed(self) -> bool:
        return True


class HostPages:
    """Pages of one anonymous file. Strict: what the driver of a GPU would refuse is refused here."""

    #: Far from where the system puts things by itself, on all the processors that tests run on.
    base_address = 0x18000000000
    fallbacks: Mapping[str, int] = {}

    def __init__(
        self, num_pages: int, page_bytes: int, *, num_spaces: int = 5, new_mark: Callable[[], Mark] = Done
    ) -> None:
        assert page_bytes % mmap.PAGESIZE == 0, f"{page_bytes=} {mmap.PAGESIZE=}"
        self.num_pages, self.page_bytes, self.num_spaces = num_pages, page_bytes, num_spaces
        self.space_bytes = 32 * 512 * page_bytes
        self.mapped: dict[int, int] = {}  #: pages by address
        self.reserved: set[int] = set()
        self.num_calls = 0  #: of map and unmap
        self._new_mark = new_mark
        self._fd = os.memfd_create("hearth-pages", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, num_pages * page_bytes)

    def reserve(self, wanted: int | None) -> int:
        got = _libc.mmap(wanted, self.space_bytes, _PROT_NONE, _ANONYMOUS, -1, 0)
        assert got != _FAILED, os.strerror(ctypes.get_errno())
        self.reserved.add(got)
        return int(got)

    def free(self, address: int) -> None:
        self.reserved.remove(address)
        assert not any(address <= place < address + self.space_bytes for place in self.mapped)
        assert _libc.munmap(address, self.space_bytes) == 0, os.strerror(ctypes.get_errno())

    def map(self, address: int, *pages: int) -> None:
        for number, page in enumerate(pages):
            self._map(address + number * self.page_bytes, page)

    def unmap(self, address: int, num_pages: int = 1) -> None:
        for place in range(address, address + num_pages * self.page_bytes, self.page_bytes):
            del self.mapped[place]
            self._replace(place, _PROT_NONE, _ANONYMOUS, -1, 0)

    def remap(self, runs: Sequence[PageRun]) -> Iterator[PageRun]:
        return remap_each(self, runs)

    def _map(self, address: int, page: int) -> None:
        assert address not in self.mapped, f"{address=:#x} has page {self.mapped[address]}"
        assert 0 <= page < self.num_pages, f"{page=}"
        assert any(start <= address < start + self.space_bytes for start in self.reserved), f"{address=:#x}"
        self._replace(
            address, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, self._fd, page * self.page_bytes
        )
        self.mapped[address] = page

    def mark(self) -> Mark:
        return self._new_mark()

    def bytes_at(self, address: int, num_bytes: int) -> torch.Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)

    def close(self) -> None:
        assert not self.mapped, f"{self.mapped=}"
        assert not self.reserved, f"{self.reserved=}"
        os.close(self._fd)

    def _replace(self, address: int, protection: int, flags: int, fd: int, offset: int) -> None:
        self.num_calls += 1
        got = _libc.mmap(address, self.page_bytes, protection, flags | _MAP_FIXED, fd, offset)
        assert got == address, os.strerror(ctypes.get_errno())
