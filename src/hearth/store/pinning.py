"""Pins host memory for a CUDA device, region by region, so that nobody who uses the device waits for it.

    touch       threads have the kernel find the pages, a little per call: nobody can map memory meanwhile
    register    the driver is told of them, one region at a time, for others queue behind it

A load has the region that it copies from next pinned by its own thread. All others are pinned by a thread of
their own while no load is under way: `policy/memory/pin_order.py`. Until a region is pinned, copies from it
are slow, not wrong. Whose memory it is and what lies there is nothing to this file.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType

from hearth.cpus import num_usable_cores
from hearth.policy.memory.pin_order import PinOrder

#: Bytes that are registered at once: a few milliseconds of the driver's lock. More are no faster.
REGION_BYTES = 64 << 20
#: Bytes that are touched by one call, for as long as which this process can map no memory.
TOUCH_BYTES = 1 << 20
#: Threads that touch: the first touch of fresh memory is bound by the kernel clearing pages, on all cores.
MAX_TOUCH_THREADS = 16
#: Between two regions that nobody waits for, so that whoever queues for the driver comes next.
PAUSE_S = 0.001

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in every Python's mmap module
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device

log = logging.getLogger(__name__)


class Touching:
    """Threads that have the kernel find the pages of a mapping, whose bytes stay as they are."""

    def __init__(self, memory: memoryview, address: int, regions: Sequence[range]) -> None:
        """Start with the first region. `memory` is mapped at `address`; regions are ranges of its bytes."""
        self._memory, self._address, self._regions = memory, address, regions
        self._is_touched = bytearray(len(regions))  #: single operations are atomic, so it needs no lock
        self._todo = iter(range(len(regions)))
        self._lock = threading.Lock()  #: guards it
        self._is_stopped = False
        num_threads = min(MAX_TOUCH_THREADS, num_usable_cores(), len(regions))
        self._threads = [
            threading.Thread(target=self._run, name="hearth-touch", daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def touch(self, region: int) -> None:
        """Touch a region now, unless that is done; one of the threads may be about to do the same."""
        if self._is_touched[region]:
            return
        part = self._regions[region]
        for begin in range(part.start, part.stop, TOUCH_BYTES):
            if self._is_stopped:
                return
            end = min(begin + TOUCH_BYTES, part.stop)
            address = ctypes.c_void_p(self._address + begin)
            if _LIBC.madvise(address, ctypes.c_size_t(end - begin), _MADV_POPULATE_WRITE) != 0:
                max(self._memory[begin : end : mmap.PAGESIZE])  # shared memory is made by reading
        self._is_touched[region] = True

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Leave the rest, and wait until no thread touches a page any more."""
        self._is_stopped = True
        self.wait()

    def _run(self) -> None:
        while (region := self._take()) is not None:
            self.touch(region)

    def _take(self) -> int | None:
        with self._lock:
            return next(self._todo, None)


class Pinning:
    """The pinned regions of a mapping, of which there are more and more. Any thread may have one pinned."""

    def __init__(
        self,
        address: int,
        regions: Sequence[range],
        touching: Touching,
        register: Callable[[int, int], int],
        unregister: Callable[[int], int],
    ) -> None:
        """Start with the first region. `touching` has the same ones.

        `register` takes an address and a number of bytes, `unregister` the address; they return CUDA's code.
        """
        self._address, self._regions, self._touching = address, regions, touching
        self._register, self._unregister = register, unregister
        self._order = PinOrder(len(regions))
        self._codes: dict[int, int] = {}  #: CUDA's code by region: 0 of those that are pinned
        self._is_closed = False
        self._changed = threading.Condition()  #: guards these three
        self._one_at_a_time = threading.Lock()  #: held by whoever registers
        self._thread = threading.Thread(target=self._pin_all, name="hearth-pin", daemon=True)
        self._thread.start()

    @property
    def pinned_bytes(self) -> int:
        with self._changed:
            return sum(len(self._regions[at]) for at, code in self._codes.items() if code == 0)

    def pin(self, region: int) -> None:
        """Return when a region is pinned, or cannot be: copies from it are slow then."""
        if region in self._codes:  # as almost always; single operations of a dict are atomic
            return
        with self._changed:
            is_ours = self._order.take(region)
            while not is_ours and region not in self._codes and not self._is_closed:
                self._changed.wait()
        if is_ours:
            self._pin(region)

    def load_began(self) -> None:
        """Have nothing pinned that nobody waits for, until as many loads have ended."""
        with self._changed:
            self._order.load_began()

    def load_ended(self) -> None:
        with self._changed:
            self._order.load_ended()
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when everything is pinned that can be."""
        self._thread.join()

    def close(self) -> None:
        """Pin no more, and unpin what is pinned."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        with self._one_at_a_time:  # a load may be about to have a region pinned
            pinned = [at for at, code in self._codes.items() if code == 0]
            for at in pinned:
                self._unregister(self._address + self._regions[at].start)

    def _pin_all(self) -> None:
        while (region := self._next()) is not None:
            self._pin(region)
            time.sleep(PAUSE_S)

    def _next(self) -> int | None:
        """Return the next region that nobody waits for, once no load is under way; None: there is none."""
        with self._changed:
            while not self._is_closed and not self._order.is_complete:
                if (region := self._order.take_next()) is not None:
                    return region
                self._changed.wait()
        return None

    def _pin(self, region: int) -> None:
        self._touching.touch(region)
        part = self._regions[region]
        with self._one_at_a_time:
            if self._is_closed:
                return
            code = self._register(self._address + part.start, len(part))
            with self._changed:
                is_first_failure = code != 0 and not any(self._codes.values())
                self._codes[region] = code
                self._changed.notify_all()
        if is_first_failure:
            log.warning(
                "fallback copies=pageable reason=pin_failed pinned=%d of=%d cuda_error=%d "
                "remedy=`raise the limit of locked memory (ulimit -l) or lower store.host_bytes`",
                *(len(self._codes) - 1, len(self._regions), code),
            )


def cuda_registration() -> tuple[Callable[[int, int], int], Callable[[int], int]]:
    """Return the calls that register and unregister memory, for the device of the calling thread."""
    cuda = _cuda()
    device = cuda.current_device()

    def register(address: int, num_bytes: int) -> int:
        cuda.set_device(device)  # or a thread of its own would bring up the first one
        return int(cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))

    def unregister(address: int) -> int:
        cuda.set_device(device)
        return int(cuda.cudart().cudaHostUnregister(address))

    return register, unregister


def has_cuda() -> bool:
    return bool(_cuda().is_available())


def _cuda() -> ModuleType:
    """Return torch's CUDA module, imported here because a process that only lends does without torch."""
    import torch

    return torch.cuda


_LIBC = ctypes.CDLL(None, use_errno=True)
