"""A load of few chunks, by the thread that asks for it: one that waits for nothing but the bus.

A load that goes from thread to thread waits for each of them to wake and to have the interpreter, which the
thread of the steps needs as well. An adapter passes the bus in less time than that. Larger loads are `Transfer`s:
of these any part can be waited for, and chunks are given back while others are on their way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from hearth.store.format.manifest import StoredManifest
from hearth.store.transfer.copies import ChunkCopies
from hearth.store.transfer.destination import LoadPiece, PieceCopies
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.record import LoadRecord, Tally
from hearth.store.transfer.transfer import ChunkSource
from hearth.system.cuda.batches import BatchedCopies

#: Loads of more chunks take several calls of the driver, and so a thread that gives back meanwhile.
MAX_SHORT_CHUNKS = BatchedCopies.max_batch

#: Chunks that may be under way when whoever computes is told. They cross the bus in about the time in which a
#: thread is woken by their device, wakes that of the steps, and has a step queued.
NUM_LAST = 2


def load_here(
    name: str,
    manifest: StoredManifest,
    pieces: Sequence[LoadPiece],
    fetch: Callable[[Sequence[int]], ChunkSource],
    new_copies: Callable[[int], ChunkCopies],
    on_end: Callable[[LoadRecord], None],
    on_last: Callable[[LastCopies], None],
) -> None:
    """Copy pieces to memory that the device is done with. `fetch` is as for `Loader.load`.

    `new_copies` is asked for the copies of so many chunks. `on_end` is called as soon as all bytes are there,
    and `on_last` before that, once only the last chunks are under way, unless these are there at once.
    Chunks that do not come together are given back before the next one is waited for: the cells that they are
    in may be all there are.

    Raises:
        StoreError: a chunk cannot be had.
        DeviceError: the device refuses the copies. Nothing of them is under way any more.
    """
    tally = Tally(time.perf_counter())
    plan = PieceCopies(manifest, pieces, tally)
    copies = new_copies(len(plan.chunks))
    source = fetch(plan.chunks)
    last = LastCopies(copies)
    num_left = len(plan.chunks)
    try:
        asked_s = time.perf_counter()
        with closing(source.batches(copies.max_batch)) as batches:
            for chunks in batches:
                tally.waited(time.perf_counter() - asked_s)
                num_left -= len(chunks)
                try:
                    _copy(chunks, copies, plan, None if num_left else lambda: on_last(last))
                    if not num_left:
                        on_end(tally.record(name, time.perf_counter()))
                finally:
                    source.release(*chunks)
                asked_s = time.perf_counter()
    except BaseException:
        source.cancel()
        raise
    finally:
        last.have_passed()
        copies.close()


class LastCopies:
    """The last copies of a load, which may be under way. Any thread may have its stream wait for them."""

    def __init__(self, copies: ChunkCopies) -> None:
        """`copies` are all queued when the first thread asks."""
        self._copies = copies
        self._is_under_way = True
        self._lock = threading.Lock()  #: guards it: the copies are closed by the thread of the load

    def have_stream_wait(self) -> None:
        """Have what is queued on the current stream from now on find the bytes there."""
        with self._lock:
            if self._is_under_way:
                self._copies.have_stream_wait(self._copies.num_queued - 1)

    def have_passed(self) -> None:
        """Have nobody wait any more: the copies are about to be closed."""
        with self._lock:
            self._is_under_way = False


def _copy(
    chunks: Sequence[HostChunk], copies: ChunkCopies, plan: PieceCopies, on_last: Callable[[], None] | None
) -> None:
    """Copy chunks; however that ends, none of their copies is under way then. `on_last`: as above, if any.

    They are queued as three at most, for the bus rests behind each: the first, which crosses while others are
    made ready, those between, and the last.
    """
    num_before = copies.num_queued
    first, others = chunks[0], chunks[1:]
    try:
        copies.queue([plan.of(first)])
        if parts := [part for part in (others[:-NUM_LAST], others[-NUM_LAST:]) if part]:
            copies.queue([[copy for chunk in part for copy in plan.of(chunk)] for part in parts])
        if on_last is not None:
            if parts:
                copies.wait(copies.num_queued - 2)
            if not copies.has_passed(copies.num_queued - 1):
                on_last()
    finally:
        if copies.num_queued > num_before:
            copies.wait(copies.num_queued - 1)
