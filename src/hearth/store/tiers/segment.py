"""A segment of memory in equal cells, which several processes map and pin. Knows no chunks.

    fd (memfd)   | cell 0 | cell 1 | cell 2 | ...                      each process maps it for itself,
    pinned by    |<----- region 0 ----->|<----- region 1 ----->| ...   registers it with its own device,
                                                                       and may lose it without harm to others

A copy to the device must not cross the border of two registered regions, so regions hold whole cells.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hearth.core.errors import DeviceError
from hearth.store.tiers.pinning import REGION_BYTES, Pinning, Touching, cuda_registration, has_cuda

_PAGE_BYTES = mmap.PAGESIZE


class Segment:
    """Shared memory in equal cells. Mutable only in how much is pinned; any thread may view cells."""

    def __init__(self, fd: int, num_cells: int, cell_bytes: int, *, is_new: bool = False) -> None:
        """Map the file behind `fd`, and own it. `is_new`: this process makes its pages."""
        self.fd, self._is_new = fd, is_new
        self.num_cells = num_cells
        self.cell_bytes = cell_bytes
        #: With no cells there still is a page, because an empty range cannot be mapped.
        self._map = mmap.mmap(fd, max(self.num_bytes, _PAGE_BYTES))
        self._bytes = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._region_cells = max(1, REGION_BYTES // cell_bytes)
        self._touching: Touching | None = None
        self._pinning: Pinning | None = None
        self._num_loads = 0  #: under way
        self._is_closed = False
        self._lock = threading.Lock()  #: guards these four: loads begin and end on many threads

    @staticmethod
    def create(num_cells: int, cell_bytes: int) -> Segment:
        """Make a segment of new memory, which costs nothing until it is touched. Raises DeviceError."""
        fd = os.memfd_create("hearth-host", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, max(num_cells * cell_bytes, _PAGE_BYTES))
            return Segment(fd, num_cells, cell_bytes, is_new=True)
        except OSError as error:
            os.close(fd)
            raise DeviceError(
                f"{num_cells * cell_bytes} bytes of host memory cannot be allocated: {error.strerror}; "
                "lower `store.host_bytes`"
            ) from error

    @property
    def num_bytes(self) -> int:
        return self.num_cells * self.cell_bytes

    @property
    def pinned_bytes(self) -> int:
        return 0 if self._pinning is None else self._pinning.pinned_bytes

    def memory(self, cell: int, num_bytes: int) -> memoryview:
        assert 0 <= cell < self.num_cells, f"{cell=} {self.num_cells=}"
        assert 0 <= num_bytes <= self.cell_bytes, f"{num_bytes=} {self.cell_bytes=}"
        begin = cell * self.cell_bytes
        return self._bytes[begin : begin + num_bytes]

    def offset(self, cell: int) -> int:
        """Return where a cell begins: in the file, and behind `address`."""
        return cell * self.cell_bytes

    def give_back(self) -> None:
        """Return all pages to the system, for all processes; they are zero when touched again.

        Never for pinned memory: a device would go on reading the old pages.
        """
        self._map.madvise(mmap.MADV_REMOVE)

    def touch_in_background(self) -> None:
        """Have the kernel make all pages, or find them: the longer part of pinning."""
        with self._lock:
            self._touch_in_background()

    def pin_in_background(self) -> None:
        """Pin region by region where there is a CUDA device; until then copies are slow, not wrong."""
        with self._lock:
            if self._pinning is None and self.num_cells and has_cuda():
                touching = self._touch_in_background()
                assert touching is not None, "there are cells"
                self._pinning = Pinning(
                    self.address,
                    self._regions(),
                    touching,
                    *cuda_registration(),
                    num_loads=self._num_loads,
                )

    def pin(self, cell: int) -> None:
        if (pinning := self._pinning) is not None:
            pinning.pin(cell // self._region_cells)

    @property
    def is_all_pinned(self) -> bool:
        return (pinning := self._pinning) is not None and pinning.is_complete

    def is_pinned(self, cell: int) -> bool:
        return (pinning := self._pinning) is not None and pinning.is_pinned(cell // self._region_cells)

    def can_copy(self, cell: int) -> bool:
        """True if `pin` would return at once."""
        return (pinning := self._pinning) is None or pinning.is_settled(cell // self._region_cells)

    def load_began(self) -> None:
        with self._lock:
            self._num_loads += 1
            for work in (self._touching, self._pinning):
                if work is not None:
                    work.queue.load_began()

    def load_ended(self) -> None:
        with self._lock:
            self._num_loads -= 1
            for work in (self._touching, self._pinning):
                if work is not None:
                    work.queue.load_ended()

    @contextmanager
    def loading(self) -> Iterator[None]:
        self.load_began()
        try:
            yield
        finally:
            self.load_ended()

    def wait_pinned(self) -> None:
        for work in (self._touching, self._pinning):
            if work is not None:
                work.wait()

    def close(self) -> None:
        """Unpin and unmap. The memory lives on while another process or a view of a cell holds it.

        Closing again is harmless.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            touching, self._touching = self._touching, None
            pinning, self._pinning = self._pinning, None
        if touching is not None:
            touching.stop()
        if pinning is not None:
            pinning.close()
        del touching, pinning  # which hold the memory
        del self._bytes, self._map
        os.close(self.fd)

    def _touch_in_background(self) -> Touching | None:
        if self._touching is None and self.num_cells:
            self._touching = Touching(
                self._bytes,
                self.address,
                self._regions(),
                makes_pages=self._is_new,
                num_loads=self._num_loads,
            )
        return self._touching

    def _regions(self) -> list[range]:
        step = self._region_cells * self.cell_bytes
        return [range(at, min(at + step, self.num_bytes)) for at in range(0, self.num_bytes, step)]
