"""Pinned buffers through which chunks go to a device while the segment is not pinned yet.

    segment, in pages that another process made    | chunk 0 | chunk 1 | ...
                    read by many threads                v         v
    a few slots, pinned when the process starts       | slot |  | slot |  ---> device

To pin memory that another process made, the kernel has to find each of its pages first, one thread at a time:
7 GB/s. A read of the file behind it finds them by the thousand, and as many threads as there are cores read
40 GB/s. So a load goes through these slots, and the segment is pinned in the background.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue

from hearth.core.errors import StoreError
from hearth.store.tiers.segment import Segment
from hearth.system.cpus import num_usable_cores
from hearth.system.native_code import NativeCodeUnavailable, native_library

#: Slots of a worker, few enough for the processor's cache: 48 GB/s, 40 with twice as many (docs/log.md). Four
#: are released at a time, as many are filled meanwhile, and two copied from.
NUM_SLOTS = 10
PIECE_BYTES = 1 << 20
SPARE_CORES, MAX_THREADS = 2, 16

_STARTING = threading.Lock()


class _Slot(ctypes.Structure):
    _fields_ = (
        ("next", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("num_bytes", ctypes.c_int64),
        ("begun", ctypes.c_int64),
        ("missing", ctypes.c_int64),
        ("fd", ctypes.c_int32),
        ("error", ctypes.c_int32),
    )


class StagingBuffers:
    """Slots of pinned memory, each for one chunk at a time. Any thread may take one."""

    def __init__(self, slot_bytes: int, num_slots: int = NUM_SLOTS, libraries: Path | None = None) -> None:
        """`libraries`: see `native_library`. Raises OSError (no thread or library) and DeviceError."""
        with _STARTING:
            self._threads = _fill_threads(libraries)
        self._ring = Segment.create(num_slots, slot_bytes)
        self._slots = (_Slot * num_slots)()
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(num_slots):
            self._free.put(slot)

    @property
    def slot_bytes(self) -> int:
        return self._ring.cell_bytes

    def touch(self) -> None:
        """Have the kernel make the pages of all slots in the background."""
        self._ring.touch_in_background()

    def pin(self) -> None:
        """Pin the slots in the background, for the device that is current for the calling thread."""
        self._ring.pin_in_background()

    def take(self, most_s: float) -> int | None:
        """Return a free slot; None: none came free within that time."""
        try:
            return self._free.get(timeout=most_s) if most_s > 0.0 else self._free.get_nowait()
        except Empty:
            return None

    def fill(self, slot: int, source: Segment, cell: int, num_bytes: int) -> None:
        self._ring.pin(slot)
        self._threads.ask(
            ctypes.byref(self._slots[slot]), source.fd, source.offset(cell), self._address(slot), num_bytes
        )

    def is_filled(self, slot: int) -> bool:
        """True if `filled` need not wait."""
        return self._threads.is_done(ctypes.byref(self._slots[slot]))

    def filled(self, slot: int, num_bytes: int) -> memoryview:
        """Wait until a slot is filled, and return its bytes. Raises StoreError if they cannot be read."""
        if error := self._threads.wait(ctypes.byref(self._slots[slot])):
            raise StoreError(f"{num_bytes} bytes of host memory cannot be read: {os.strerror(error)}")
        return self._ring.memory(slot, num_bytes)

    def give_back(self, slot: int) -> None:
        """Free a slot. No copy reads it any more."""
        self._threads.wait(ctypes.byref(self._slots[slot]))
        self._free.put(slot)

    def close(self) -> None:
        for slot in self._slots:
            self._threads.wait(ctypes.byref(slot))
        self._ring.close()

    def _address(self, slot: int) -> int:
        return self._ring.address + self._ring.offset(slot)


class _FillThreads:
    def __init__(self, library: ctypes.CDLL) -> None:
        #: Calls of a few microseconds, made with the interpreter lock held: beside a thread that computes,
        #: getting it back would take longer than filling the slot.
        brief = ctypes.PyDLL(library._name, handle=library._handle)
        self.ask, self._state, self._wait = (
            brief.hearth_staging_ask,
            brief.hearth_staging_state,
            library.hearth_staging_wait,
        )
        self.ask.argtypes = (
            ctypes.POINTER(_Slot),
            ctypes.c_int,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int64,
        )
        self.ask.restype = None
        for call in (self._state, self._wait):
            call.argtypes, call.restype = (ctypes.POINTER(_Slot),), ctypes.c_int

    def is_done(self, slot: object) -> bool:
        return int(self._state(slot)) >= 0

    def wait(self, slot: object) -> int:
        """Wait until no thread fills a slot, and return the error of that, 0 for none."""
        state = int(self._state(slot))
        return state if state >= 0 else int(self._wait(slot))


@cache
def _fill_threads(libraries: Path | None) -> _FillThreads:
    library = native_library(Path(__file__).with_suffix(".c"), libraries)
    start = library.hearth_staging_start
    start.argtypes, start.restype = (ctypes.c_int, ctypes.c_int64), ctypes.c_int
    num_threads = max(1, min(MAX_THREADS, num_usable_cores() - SPARE_CORES))
    if not start(num_threads, PIECE_BYTES):
        reason = "no thread can be started to fill slots with"
        raise NativeCodeUnavailable(reason, "raise the limit of threads (ulimit -u)")
    return _FillThreads(library)
