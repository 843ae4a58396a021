"""Driver calls for many pages or chunks at once, made by `system/cuda/batches.c`.

A thread that makes them one by one either holds the interpreter, which the step thread needs, or releases it
each time and waits to get it back. Here it releases it once for many megabytes. Without a C compiler callers
make the calls one by one.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from hearth.system.cuda.driver import CudaDriver
from hearth.system.native_code import native_library, remedy_for

#: In the order of `driver_calls` in `system/cuda/batches.c`.
_CALLS = (
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyHtoDAsync_v2",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuStreamSynchronize",
    "cuEventDestroy_v2",
)
_NUM_ARGUMENTS = (5, 4, 2, 4, 2, 2, 1, 1, 1)
_ERROR_NOT_READY = 600  # as `cuda.h` has it

log = logging.getLogger(__name__)


class _Outcome(ctypes.Structure):
    _fields_ = (("call", ctypes.c_int), ("code", ctypes.c_int), ("num_done", ctypes.c_int64))


@dataclass(frozen=True, slots=True)
class ByteCopy:
    destination: int
    source: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class HandleRun:
    """Consecutive pages, and the handles to map there; without any, the pages are unmapped."""

    address: int
    num_pages: int
    handles: Sequence[int] = ()


class CudaBatches:
    """The batched calls of one device's driver. Any thread may call them."""

    def __init__(self, driver: CudaDriver, library: ctypes.CDLL) -> None:
        self.driver = driver
        self._library = library
        self._calls = (ctypes.c_void_p * len(_CALLS))(*map(driver.address, _CALLS))

    def remap(self, page_bytes: int, runs: Sequence[HandleRun]) -> Iterator[int]:
        """Unmap and map runs in order, and yield the index of each that was done. Raises DeviceError at a run
        that is refused: nothing of it is mapped, and the rest is not tried.
        """
        fields = [field for run in runs for field in (run.address, run.num_pages, len(run.handles))]
        handles = [handle for run in runs for handle in run.handles]
        outcome = _Outcome()
        self.driver.enter_context()
        self._library.hearth_remap(
            self._calls,
            ctypes.c_size_t(page_bytes),
            (ctypes.c_uint64 * len(fields))(*fields),
            ctypes.c_int64(len(runs)),
            (ctypes.c_uint64 * len(handles))(*handles),
            ctypes.byref(self.driver.access()),
            ctypes.byref(outcome),
        )
        yield from range(outcome.num_done)
        self.check(outcome)

    def copy_chunks(
        self,
        chunks: Sequence[Sequence[ByteCopy]],
        stream: int,
        events: ctypes.Array[ctypes.c_void_p],
        num_before: int,
        max_queued: int,
        is_stopped: ctypes.c_int,
    ) -> _Outcome:
        """Queue the copies of chunks, each followed by an event, with at most `max_queued` chunks in flight.

        `events` has room for all chunks of a load, of which `num_before` were queued before.
        """
        fields = [
            value
            for copies in chunks
            for copy in copies
            for value in (copy.destination, copy.source, copy.num_bytes)
        ]
        ends = list(accumulate(map(len, chunks)))
        outcome = _Outcome()
        self.driver.enter_context()
        self._library.hearth_copy_chunks(
            self._calls,
            ctypes.c_void_p(stream),
            (ctypes.c_uint64 * len(fields))(*fields),
            (ctypes.c_int64 * len(ends))(*ends),
            events,
            ctypes.c_int64(num_before),
            ctypes.c_int64(len(chunks)),
            ctypes.c_int64(max_queued),
            ctypes.byref(is_stopped),
            ctypes.byref(outcome),
        )
        return outcome

    def destroy_events(self, events: ctypes.Array[ctypes.c_void_p]) -> None:
        """No thread may wait for the events any more."""
        self.driver.enter_context()
        self._library.hearth_destroy_events(self._calls, events, ctypes.c_int64(len(events)))

    def check(self, outcome: _Outcome) -> None:
        if outcome.code:
            self.driver.refused(_CALLS[outcome.call], _NUM_ARGUMENTS[outcome.call], outcome.code)


class BatchedCopies:
    """The copies of a load's chunks to the device, in order, on one stream, each chunk followed by an event.

    Mutable: one thread queues; any may stop it, or wait for queued chunks until it is closed.
    """

    max_batch = 8  #: chunks per call; waiting threads are notified after the last

    def __init__(
        self,
        batches: CudaBatches,
        stream: int,
        current_stream: Callable[[], int],
        num_chunks: int,
        max_queued: int,
    ) -> None:
        self._batches, self._driver = batches, batches.driver
        self._stream, self._current_stream, self._max_queued = stream, current_stream, max_queued
        self._events = (ctypes.c_void_p * num_chunks)()
        self._is_stopped = ctypes.c_int(0)
        self.num_queued = 0

    def queue(self, chunks: Sequence[Sequence[ByteCopy]]) -> None:
        """Queue the next chunks; fewer once stopped. Raises DeviceError: only `num_queued` are in flight."""
        outcome = self._batches.copy_chunks(
            chunks,
            self._stream,
            events=self._events,
            num_before=self.num_queued,
            max_queued=self._max_queued,
            is_stopped=self._is_stopped,
        )
        self.num_queued += outcome.num_done
        self._batches.check(outcome)

    def stop(self) -> None:
        self._is_stopped.value = 1

    def wait(self, position: int) -> None:
        self._driver.call("cuEventSynchronize", ctypes.c_void_p(self._events[position]))

    def has_passed(self, position: int) -> bool:
        event = ctypes.c_void_p(self._events[position])
        code = self._driver.code_of("cuEventQuery", event)
        if code not in (0, _ERROR_NOT_READY):
            self._driver.refused("cuEventQuery", 1, code)
        return code == 0

    def have_stream_wait(self, position: int) -> None:
        stream, event = ctypes.c_void_p(self._current_stream()), ctypes.c_void_p(self._events[position])
        self._driver.call_briefly("cuStreamWaitEvent", stream, event, ctypes.c_uint(0))

    def close(self) -> None:
        self._batches.destroy_events(self._events)
        self._events = (ctypes.c_void_p * 0)()


def native_calls(cache: Path | None = None) -> ctypes.CDLL | None:
    """Return `batches.c` as a library, as the first call of the process; None, logged once: it cannot be
    compiled.
    """
    with _COMPILING:
        if not _FOUND:
            _FOUND.append(_compiled(cache))
        return _FOUND[0]


def batches_of(driver: CudaDriver) -> CudaBatches | None:
    library = native_calls()
    return None if library is None else CudaBatches(driver, library)


def _compiled(cache: Path | None) -> ctypes.CDLL | None:
    try:
        library = native_library(Path(__file__).with_suffix(".c"), cache)
        for call in (library.hearth_remap, library.hearth_copy_chunks, library.hearth_destroy_events):
            call.restype = None
        return library
    except (OSError, AttributeError) as error:
        log.warning(
            "fallback driver_calls=interpreted reason=`%s` remedy=`%s`",
            str(error).partition("\n")[0],
            remedy_for(error),
        )
        return None


_COMPILING = threading.Lock()  #: models load on several threads, and the compiler runs once
_FOUND: list[ctypes.CDLL | None] = []  #: empty until the first call
