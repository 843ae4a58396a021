"""A load of few chunks, by the thread that asks for it: one that waits for nothing but the bus.

A load that goes from thread to thread waits for each of them to wake and to have the interpreter, which the
thread of the steps needs as well. An adapter passes the bus in less time than that. Larger loads are `Load`s:
of these any part can be waited for, and chunks are given back while others are on their way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing

from hearth.cuda_batches import BatchedCopies
from hearth.store.chunk_copies import ChunkCopies
from hearth.store.fetch import HostChunk
from hearth.store.loader import ChunkStream
from hearth.store.manifest import StoredManifest
from hearth.store.piece_copies import LoadPiece, PieceCopies
from hearth.store.record import LoadRecord, Tally

#: Loads of more chunks take several calls of the driver, and so a thread that gives back meanwhile.
MAX_SHORT_CHUNKS = BatchedCopies.max_batch


def load_here(
    name: str,
    manifest: StoredManifest,
    pieces: Sequence[LoadPiece],
    fetch: Callable[[Sequence[int]], ChunkStream],
    new_copies: Callable[[int], ChunkCopies],
    on_end: Callable[[LoadRecord], None],
) -> None:
    """Copy pieces to memory that the device is done with. `fetch` is as for `Loader.load`.

    `new_copies` is asked for the copies of so many chunks. `on_end` is called as soon as all bytes are there.
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
    try:
        asked_s = time.perf_counter()
        with closing(source.batches(copies.max_batch)) as batches:
            for chunks in batches:
                tally.waited(time.perf_counter() - asked_s)
                try:
                    _copy(chunks, copies, plan)
                    if copies.num_queued == len(plan.chunks):
                        on_end(tally.record(name, time.perf_counter()))
                finally:
                    source.release(*chunks)
                asked_s = time.perf_counter()
    except BaseException:
        source.cancel()
        raise
    finally:
        copies.close()


def _copy(chunks: Sequence[HostChunk], copies: ChunkCopies, plan: PieceCopies) -> None:
    """Copy chunks; however that ends, none of their copies is under way then."""
    num_before = copies.num_queued
    try:
        copies.queue([plan.of(chunk) for chunk in chunks])
    finally:
        if copies.num_queued > num_before:
            copies.wait(copies.num_queued - 1)
