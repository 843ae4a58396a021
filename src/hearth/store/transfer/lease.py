"""The chunks that one load has opened from whoever owns host memory. Opens no model and copies nothing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress

from hearth.core.errors import HearthError, KeeperGone, LoadCancelled
from hearth.store.tiers.segment import Segment
from hearth.store.transfer.fetch import RELEASE_BATCH, HostChunk
from hearth.store.transfer.lease_messages import (
    CancelLease,
    ChunkLeased,
    LeaseGranted,
    Message,
    Refused,
    ReleaseChunks,
    error_of,
)
from hearth.store.transfer.lender_line import LeaseConnection


class Grant:
    """The opened chunks of one load: a `ChunkSource`. One thread iterates, one releases, any cancels.

    However the lease ends, what was yielded stays lent until released, for it may still be copied from.
    """

    def __init__(
        self,
        line: LeaseConnection,
        name: str,
        num_chunks: int,
        keep: Callable[[LeaseConnection], None],
        began: LeaseGranted,
    ) -> None:
        """`keep` takes the line of a lease of which all was lent and released; `began` is how it began."""
        self.is_in_host = began.is_in_host  #: all chunks were in host memory when it began
        self.num_chunks = num_chunks
        self._line, self._name, self._keep = line, name, keep
        #: Guards the fields below and the sending: one thread yields, others release and cancel.
        self._lock = threading.Lock()
        self._num_yielded = 0
        self._num_released = 0
        self._is_over = num_chunks == 0  #: nothing more will be yielded
        self._is_cancelled = False
        self._has_hung_up = False
        #: What came behind the chunks that were yielded; of the thread that iterates alone.
        self._unread: deque[Message] = deque(began.lent)
        self.segment.load_began()
        self._hang_up_if_done()

    @property
    def segment(self) -> Segment:
        return self._line.segment

    @property
    def is_finished(self) -> bool:
        """True if no more chunks come and all that came were given back."""
        # Without the lock, which is held when the lease_client takes its own: once over, no more is yielded.
        return self._is_over and self._num_released == self._num_yielded

    def __iter__(self) -> Iterator[HostChunk]:
        """Yield the chunks in order, as `batches`."""
        for batch in self.batches(1):
            yield from batch

    @property
    def release_batch(self) -> int:
        """See `ChunkSource`."""
        return RELEASE_BATCH

    def batches(self, most: int) -> Generator[list[HostChunk]]:
        """Yield the chunks in order, those together that have come and are pinned, at most so many.

        Raises what the lender met, LoadCancelled after `cancel`, KeeperGone if the lender is gone.
        """
        num_left = self.num_chunks
        while num_left:
            batch = self._accept(min(most, num_left))
            num_left -= len(batch)
            yield batch

    @property
    def num_to_come(self) -> int:
        """How many chunks have not been taken."""
        return self.num_chunks - self._num_yielded

    def has_next(self) -> bool:
        """True if `take` need not wait. Called by the thread that iterates, as that is."""
        return bool(self._unread) or self._line.has_next()

    def take(self) -> HostChunk:
        """Return the next chunk, which may not be pinned. Raises as iterating does."""
        message = self._next_message()
        (chunk,) = self._accepted([message] if isinstance(message, ChunkLeased) else [], message)
        return chunk

    def release(self, *chunks: HostChunk) -> None:
        with self._lock:
            with suppress(OSError):  # a lender that is gone wants nothing back
                self._line.send(ReleaseChunks(tuple(chunk.index for chunk in chunks)))
            self._num_released += len(chunks)
            self._hang_up_if_done()

    def cancel(self) -> None:
        """Ask for no more chunks, and wake the thread that iterates."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = self._is_cancelled = True
            with suppress(OSError):  # the lender may be gone
                self._line.send(CancelLease())
            self._line.stop_reading()
            self._hang_up_if_done()

    def _accept(self, most: int) -> list[HostChunk]:
        """Return the next chunk, pinned, and those behind it that have come and are."""
        lent: list[ChunkLeased] = []
        can_copy = self.segment.can_copy
        message = self._next_message()
        while isinstance(message, ChunkLeased) and (not lent or can_copy(message.cell)):
            lent.append(message)
            message = None
            if len(lent) == most or not (self._unread or self._line.has_received):
                break
            message = self._next_message()
        if message is not None:
            self._unread.appendleft(message)
        chunks = self._accepted(lent, message)
        self.segment.pin(chunks[0].cell)  # to be copied from next
        return chunks

    def _accepted(self, lent: Sequence[ChunkLeased], message: Message | None) -> list[HostChunk]:
        """Return the chunks that the lender has lent; raise if there are none, or the load is over."""
        with self._lock:
            if self._is_over or not lent:
                self._is_over = True
                self._hang_up_if_done()
                raise self._failure(message)
            self._num_yielded += len(lent)
            self._is_over = self._num_yielded == self.num_chunks
        memory = self.segment.memory
        return [
            HostChunk(one.index, memory(one.cell, one.num_bytes), one.cell, one.delivery, one.is_shared)
            for one in lent
        ]

    def _next_message(self) -> Message | None:
        return self._unread.popleft() if self._unread else self._line.read()

    def _failure(self, message: Message | None) -> HearthError:
        if self._is_cancelled:
            return LoadCancelled(f"the load of `{self._name}` was called off")
        if isinstance(message, Refused):
            return error_of(message)
        return KeeperGone(f"whoever lent the chunks of `{self._name}` is gone; load it again")

    def _hang_up_if_done(self) -> None:
        if self._has_hung_up or not self.is_finished:
            return
        self._has_hung_up = True
        self.segment.load_ended()
        if self._num_yielded == self.num_chunks:
            self._keep(self._line)
        else:
            self._line.close()
