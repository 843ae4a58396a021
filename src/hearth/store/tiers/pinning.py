"""Pins host memory for a CUDA device in the background, without delaying those who use the device.

    touch       threads have the kernel find the pages of a region, or make them
    register    the driver pins a region; other driver calls queue behind that

Regions are small, and registered one at a time while no load runs, or seldom beside one (`region_order.py`).
A load copies through staging buffers (`staging_buffers.py`), or pins the region that it copies from next.
Until a region is pinned, copies from it are slow, not wrong.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType

from hearth.core.errors import DeviceError
from hearth.policy.memory.region_order import RegionOrder
from hearth.system.cpus import num_usable_cores
from hearth.system.cuda.driver import CudaDriver

#: Bytes registered at once: a millisecond of the driver's lock. More are no faster.
REGION_BYTES = 16 << 20
#: Bytes touched by one call, during which this process can map no memory.
TOUCH_BYTES = 2 << 20
#: Threads that touch. More are no faster, and take cores from whatever else starts.
MAX_TOUCH_THREADS = 4
#: Between two regions that no load waits for, so that queued driver calls come next.
PAUSE_S = 0.001
LOOK_S = 0.025

#: CUDA's code of a region whose thread found no device, as `cuda.h` has it.
_NO_CONTEXT = 201
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in every Python's mmap module

log = logging.getLogger(__name__)


class RegionQueue:
    """The regions of a mapping that are still to be taken, each once, by threads that may have to wait."""

    def __init__(self, num_regions: int, num_loads: int) -> None:
        self.changed = threading.Condition()  #: guards the fields below, and the books of the owner
        self.is_closed = False
        self._order = RegionOrder(num_regions, num_loads, now_s=time.monotonic())

    def load_began(self) -> None:
        """Give out next to no unneeded regions until as many loads have ended."""
        with self.changed:
            self._order.load_began(time.monotonic())

    def load_ended(self) -> None:
        with self.changed:
            self._order.load_ended(time.monotonic())
            self.changed.notify_all()

    def take(self, region: int) -> bool:
        """Take a region that a load needs; False: it was taken before."""
        with self.changed:
            return self._order.take(region)

    def next(self, is_ready: Callable[[int], bool]) -> int | None:
        """Wait until an unneeded region may be taken, and take it; None: no more are given out."""
        with self.changed:
            while not self.is_closed and not self._order.is_complete:
                now_s = time.monotonic()
                region = self._order.peek(now_s)
                if region is not None and is_ready(region):
                    self._order.take_unasked(region, now_s)
                    return region
                self.changed.wait(LOOK_S if region is not None else self._order.wait_s(now_s))
        return None

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class Touching:
    """Threads that have the kernel find the pages of a mapping, whose bytes stay as they are."""

    def __init__(
        self,
        memory: memoryview,
        address: int,
        regions: Sequence[range],
        *,
        makes_pages: bool,
        num_loads: int = 0,
    ) -> None:
        """Start with the first region. `memory` is mapped at `address`; regions are ranges of its bytes.

        `makes_pages`: also make pages; otherwise another process makes them. `num_loads` are under way, and
        nothing is touched before they have ended.
        """
        self._memory, self._address, self._regions = memory, address, regions
        self._makes_pages = makes_pages
        self._is_touched = bytearray(len(regions))  #: single operations are atomic, so it needs no lock
        self.queue = RegionQueue(len(regions), num_loads)
        num_threads = min(MAX_TOUCH_THREADS, num_usable_cores(), len(regions))
        self._threads = [
            threading.Thread(target=self._run, name="hearth-touch", daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def has_touched(self, region: int) -> bool:
        return bool(self._is_touched[region])

    def needed(self, region: int) -> None:
        if self.queue.take(region):
            self._is_touched[region] = True

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        self.queue.close()
        self.wait()

    def _run(self) -> None:
        while (region := self.queue.next(lambda region: True)) is not None:
            while not (self.queue.is_closed or self._makes_pages or self._is_made(region)):
                time.sleep(LOOK_S)
            self._touch(region)

    def _touch(self, region: int) -> None:
        part = self._regions[region]
        for begin in range(part.start, part.stop, TOUCH_BYTES):
            if self.queue.is_closed:
                return
            end = min(begin + TOUCH_BYTES, part.stop)
            address = ctypes.c_void_p(self._address + begin)
            if _LIBC.madvise(address, ctypes.c_size_t(end - begin), _MADV_POPULATE_WRITE) != 0:
                max(self._memory[begin : end : mmap.PAGESIZE])  # shared memory is made by reading
        self._is_touched[region] = True

    def _is_made(self, region: int) -> bool:
        """True if the last page of a region exists: pages are made in order."""
        last = self._address + (self._regions[region].stop - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        state = ctypes.c_ubyte()
        code = _LIBC.mincore(ctypes.c_void_p(last), ctypes.c_size_t(mmap.PAGESIZE), ctypes.byref(state))
        return code != 0 or bool(state.value & 1)


class Pinning:
    """The regions of a mapping as they are pinned. Any thread may have one pinned."""

    def __init__(
        self,
        address: int,
        regions: Sequence[range],
        touching: Touching,
        register: Callable[[int, int], int],
        unregister: Callable[[int], int],
        *,
        num_loads: int = 0,
    ) -> None:
        """Start with the first region. `touching` has the same ones; `num_loads` are under way.

        `register` takes an address and a number of bytes, `unregister` the address; they return CUDA's code.
        """
        self._address, self._regions, self._touching = address, regions, touching
        self._register, self._unregister = register, unregister
        self.queue = RegionQueue(len(regions), num_loads)
        self._codes: dict[int, int] = {}  #: CUDA's code by region; 0: pinned. Guarded by `queue.changed`
        self._one_at_a_time = threading.Lock()  #: held while registering
        self._thread = threading.Thread(target=self._pin_all, name="hearth-pin", daemon=True)
        self._thread.start()

    @property
    def pinned_bytes(self) -> int:
        with self.queue.changed:
            return sum(len(self._regions[at]) for at, code in self._codes.items() if code == 0)

    @property
    def is_complete(self) -> bool:
        return len(self._codes) == len(self._regions) and not any(self._codes.values())

    def is_pinned(self, region: int) -> bool:
        return self._codes.get(region) == 0  # single operations of a dict are atomic

    def is_settled(self, region: int) -> bool:
        return region in self._codes  # as above

    def pin(self, region: int) -> None:
        """Wait until a region whose pages exist is pinned, or cannot be."""
        if self.is_settled(region):  # as almost always
            return
        self._touching.needed(region)
        with self.queue.changed:
            is_ours = self.queue.take(region)
            while not is_ours and region not in self._codes and not self.queue.is_closed:
                self.queue.changed.wait()
        if is_ours:
            self._pin(region)

    def wait(self) -> None:
        self._thread.join()

    def close(self) -> None:
        """Pin no more, and unpin what is pinned. Touching has stopped."""
        self.queue.close()
        self._thread.join()
        with self._one_at_a_time:  # a load may be about to have a region pinned
            pinned = [at for at, code in self._codes.items() if code == 0]
            for at in pinned:
                self._unregister(self._address + self._regions[at].start)

    def _pin_all(self) -> None:
        while (region := self.queue.next(self._touching.has_touched)) is not None:
            self._pin(region)
            time.sleep(PAUSE_S)

    def _pin(self, region: int) -> None:
        part = self._regions[region]
        with self._one_at_a_time:
            if self.queue.is_closed:
                return
            try:
                code = self._register(self._address + part.start, len(part))
            except DeviceError:  # logged below; threads that wait for the region must be woken
                code = _NO_CONTEXT
            with self.queue.changed:
                is_first_failure = code != 0 and not any(self._codes.values())
                self._codes[region] = code
                self.queue.changed.notify_all()
        if is_first_failure:
            log.warning(
                "fallback copies=pageable reason=pin_failed pinned=%d of=%d cuda_error=%d "
                "remedy=`raise the limit of locked memory (ulimit -l) or lower store.host_bytes`",
                len(self._codes) - 1,
                len(self._regions),
                code,
            )


def cuda_registration() -> tuple[Callable[[int, int], int], Callable[[int], int]]:
    """Return the calls that register and unregister memory, for the device of the calling thread."""
    driver = CudaDriver(_cuda().current_device())
    return driver.register_host, driver.unregister_host


def has_cuda() -> bool:
    return bool(_cuda().is_available())


def _cuda() -> ModuleType:
    """Return torch's CUDA module, imported here because the keeper does without torch."""
    import torch

    return torch.cuda


_LIBC = ctypes.CDLL(None, use_errno=True)
