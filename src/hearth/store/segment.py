"""A segment of memory in equal cells that several processes map and pin. Does not know what lies in a cell.

    fd (memfd)   | cell 0 | cell 1 | cell 2 | ...                      each process maps it for itself,
    pinned by    |<----- region 0 ----->|<----- region 1 ----->| ...   registers it with its own device,
                                                                       and may lose it without harm to others

A copy to the device must not cross the border of two registered regions, so regions hold whole cells.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

from hearth.cpus import num_usable_cores
from hearth.errors import DeviceError

#: Bytes that are registered at once: few, so that the first cells are pinned early; more are no faster.
REGION_BYTES = 256 << 20
#: Threads that pin: the first touch of fresh memory is bound by the kernel clearing pages, on all cores.
MAX_PIN_THREADS = 16

_PAGE_BYTES = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in every Python's mmap module
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device

log = logging.getLogger(__name__)


class Segment:
    """Shared memory in equal cells. Mutable only in how much is pinned; any thread may view cells."""

    def __init__(self, fd: int, num_cells: int, cell_bytes: int) -> None:
        """Map the file behind `fd`, which is closed with the segment."""
        self.fd = fd
        self.num_cells = num_cells
        self.cell_bytes = cell_bytes
        #: With no cells there still is a page, because an empty range cannot be mapped.
        self._map = mmap.mmap(fd, max(self.num_bytes, _PAGE_BYTES))
        self._bytes = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._pins: list[range] = []  #: byte ranges that are registered; guarded by the lock, threads append
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._pinner: threading.Thread | None = None

    @staticmethod
    def create(num_cells: int, cell_bytes: int) -> Segment:
        """Make a segment of new memory that nobody has touched, so it costs nothing yet.

        Raises:
            DeviceError: the machine has no such room.
        """
        fd = os.memfd_create("hearth-host", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, max(num_cells * cell_bytes, _PAGE_BYTES))
            return Segment(fd, num_cells, cell_bytes)
        except OSError as error:
            os.close(fd)
            raise DeviceError(
                f"{num_cells * cell_bytes} bytes of host memory cannot be had: {error.strerror}; "
                "lower `store.host_bytes`"
            ) from error

    @property
    def num_bytes(self) -> int:
        return self.num_cells * self.cell_bytes

    @property
    def pinned_bytes(self) -> int:
        with self._lock:
            return sum(len(pin) for pin in self._pins)

    def memory(self, cell: int, num_bytes: int) -> memoryview:
        """View the first bytes of a cell."""
        assert 0 <= cell < self.num_cells, f"{cell=} {self.num_cells=}"
        assert 0 <= num_bytes <= self.cell_bytes, f"{num_bytes=} {self.cell_bytes=}"
        begin = cell * self.cell_bytes
        return self._bytes[begin : begin + num_bytes]

    def give_back(self) -> None:
        """Give the system all pages, of all processes that map them; they come again, as zeros, when touched.

        Never for memory that is pinned: a device would go on reading the old pages.
        """
        self._map.madvise(mmap.MADV_REMOVE)

    def pin_in_background(self) -> None:
        """Pin region by region, the first cells first; until then copies from them are slow, not wrong."""
        if self._pinner is None and self.num_cells and _cuda().is_available():
            self._pinner = threading.Thread(target=self._pin_all, name="hearth-pin", daemon=True)
            self._pinner.start()

    def touch_in_background(self) -> None:
        """Have the kernel find all pages, which is the longer part of pinning, for other processes to pin."""
        if self._pinner is None and self.num_cells:
            self._pinner = threading.Thread(target=self._touch_all, name="hearth-touch", daemon=True)
            self._pinner.start()

    def wait_pinned(self) -> None:
        if self._pinner is not None:
            self._pinner.join()

    def close(self) -> None:
        """Unpin and unmap. The memory lives on while another process or a view of a cell holds it.

        Closing again is harmless.
        """
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self.wait_pinned()
        for pin in self._pins:
            _cuda().cudart().cudaHostUnregister(self._address + pin.start)
        self._pins.clear()
        del self._bytes, self._map
        os.close(self.fd)

    def _in_regions(self, work: Callable[[range], int]) -> list[int]:
        step = max(1, REGION_BYTES // self.cell_bytes) * self.cell_bytes
        regions = [range(at, min(at + step, self.num_bytes)) for at in range(0, self.num_bytes, step)]
        num_threads = min(MAX_PIN_THREADS, num_usable_cores())
        with ThreadPoolExecutor(num_threads, thread_name_prefix="hearth-pin") as pool:
            return list(pool.map(work, regions))

    def _touch_all(self) -> None:
        self._in_regions(self._touch)

    def _pin_all(self) -> None:
        results = self._in_regions(self._pin)
        if failed := [code for code in results if code]:
            log.warning(
                "fallback copies=pageable reason=pin_failed regions=%d of=%d cuda_error=%d "
                "remedy=`raise the limit of locked memory (ulimit -l) or lower store.host_bytes`",
                *(len(failed), len(results), failed[0]),
            )

    def _pin(self, region: range) -> int:
        """Pin a region and return CUDA's error code: 0 if it is pinned, or the segment is closed."""
        if self._touch(region):
            return 0
        code = int(_cuda().cudart().cudaHostRegister(self._address + region.start, len(region), _PORTABLE))
        if code == 0:
            with self._lock:
                self._pins.append(region)
        return code

    def _touch(self, region: range) -> bool:
        """Have the kernel find a region's pages, which keep their bytes. Returns True if already closed."""
        if self._is_closed.is_set():
            return True
        address = ctypes.c_void_p(self._address + region.start)
        if _LIBC.madvise(address, ctypes.c_size_t(len(region)), _MADV_POPULATE_WRITE) != 0:
            max(self._bytes[region.start : region.stop : _PAGE_BYTES])  # shared memory is made by reading
        return False


def _cuda() -> ModuleType:
    """Return torch's CUDA module, imported here because a process that only lends does without torch."""
    import torch

    return torch.cuda


_LIBC = ctypes.CDLL(None, use_errno=True)
