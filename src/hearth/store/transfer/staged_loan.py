"""Chunks of a lease where a device can copy from them at once. Copies nothing to a device itself.

A chunk whose memory is pinned stays where it is. Others are read into slots of pinned memory, those to come
already while the first is being copied, as far as the lender has lent them and there are slots.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace

from hearth.core.errors import LoadCancelled, StoreError
from hearth.store.format.manifest import StoredManifest
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.lease import Grant
from hearth.store.transfer.lease_client import LeaseClient, LeaseRequest, Opened
from hearth.store.transfer.staging_buffers import StagingBuffers

#: Slots that are given back together: as many are filled meanwhile (`staging_buffers.NUM_SLOTS`).
RELEASE_BATCH = 4
#: How long a load waits for a slot. Other loads may have them all, and wait for memory of a device.
SLOT_PATIENCE_S = 0.05


class StagedLease:
    """A lease by slots: a `ChunkSource`. One thread iterates, one releases, any cancels.

    However it ends, a slot that was yielded stays as it is until released, for it may still be copied from.
    """

    def __init__(self, lease: Grant, staging: StagingBuffers) -> None:
        """`staging` has slots that any chunk of the lease fits into."""
        self._lease, self._staging = lease, staging
        #: For a slot, after one was there; of the thread that iterates.
        self._patience_s = SLOT_PATIENCE_S
        #: Chunks that were lent and not yielded yet, each with its slot; None: it stays where it is.
        self._ahead: deque[tuple[HostChunk, int | None]] = deque()
        self._slots: dict[int, int] = {}  #: of chunks that were yielded, by their index
        self._is_cancelled = False
        self._lock = threading.Lock()  #: guards these three: one thread yields, others release and cancel

    @property
    def is_in_host(self) -> bool:
        return self._lease.is_in_host

    @property
    def release_batch(self) -> int:
        return RELEASE_BATCH

    def batches(self, most: int) -> Generator[list[HostChunk]]:
        """Yield the chunks in order, those together that can be copied from, at most so many.

        Raises as `Grant.batches`, and StoreError if a chunk cannot be read.
        """
        num_left = self._lease.num_chunks
        while num_left:
            self._look_ahead()
            batch = self._take_ahead(most)
            num_left -= len(batch)
            yield batch

    def release(self, *chunks: HostChunk) -> None:
        with self._lock:
            slots = [self._slots.pop(chunk.index) for chunk in chunks if chunk.index in self._slots]
        for slot in slots:
            self._staging.give_back(slot)
        self._lease.release(*chunks)

    def cancel(self) -> None:
        """Ask for no more chunks, and wake the thread that iterates."""
        with self._lock:
            self._is_cancelled = True
        self._lease.cancel()
        self._drop_ahead()

    def _look_ahead(self) -> None:
        """Take all chunks that are there, while there are slots. Wait only for one that is to be yielded."""
        while self._lease.num_to_come and (not self._ahead or self._lease.has_next()):
            slot = self._staging.take(0.0)
            if slot is None and self._ahead:
                return
            try:
                chunk = self._lease.take()
            except BaseException:
                if slot is not None:
                    self._staging.give_back(slot)
                self._drop_ahead()  # what comes behind it is not wanted, or lent again by another lender
                raise
            slot = self._stage(chunk, slot)
            with self._lock:
                self._ahead.append((chunk, slot))
                is_cancelled = self._is_cancelled
            if is_cancelled:  # after it was lent, and what came before it was dropped
                self._drop_ahead()
                return

    def _stage(self, chunk: HostChunk, slot: int | None) -> int | None:
        """Return the slot that a chunk is on its way to; None: it can be copied from where it lies."""
        segment = self._lease.segment
        if segment.is_pinned(chunk.cell):
            if slot is not None:
                self._staging.give_back(slot)
            return None
        if slot is None:
            slot = self._staging.take(self._patience_s)
        self._patience_s = 0.0 if slot is None else SLOT_PATIENCE_S
        if slot is None:
            segment.pin(chunk.cell)
            return None
        self._staging.fill(slot, segment, chunk.cell, len(chunk.data))
        return slot

    def _take_ahead(self, most: int) -> list[HostChunk]:
        """Return the next chunk, when it can be copied from, and those behind it that can already."""
        batch = [self._next()]
        try:
            while len(batch) < most and self._is_next_ready():
                batch.append(self._next())
        except BaseException:
            self.release(*batch)
            raise
        return batch

    def _next(self) -> HostChunk:
        with self._lock:
            if not self._ahead:  # another thread has dropped it
                raise LoadCancelled("the load was called off")
            chunk, slot = self._ahead.popleft()
            if slot is None:
                return chunk
            self._slots[chunk.index] = slot
        try:
            return replace(chunk, data=self._staging.filled(slot, len(chunk.data)))
        except StoreError:
            self.release(chunk)
            raise

    def _is_next_ready(self) -> bool:
        with self._lock:
            if not self._ahead:
                return False
            _, slot = self._ahead[0]
        return slot is None or self._staging.is_filled(slot)

    def _drop_ahead(self) -> None:
        """Give back all chunks that nobody will be given."""
        with self._lock:
            dropped = list(self._ahead)
            self._ahead.clear()
        for chunk, slot in dropped:
            if slot is not None:
                self._staging.give_back(slot)
            self._lease.release(chunk)


LeasedChunks = Grant | StagedLease


def borrow_chunks(
    lease_client: LeaseClient,
    model: Opened[StoredManifest],
    chunks: Sequence[int],
    asked: LeaseRequest | None = None,
) -> LeasedChunks:
    """Begin a load, by slots unless all of the lender's memory is pinned. See `LeaseClient.fetch`."""
    lease = lease_client.fetch(model, chunks, asked)
    staging, segment = lease_client.staging, lease.segment
    if staging is None or segment.cell_bytes > staging.slot_bytes or segment.is_all_pinned:
        return lease
    return StagedLease(lease, staging)
