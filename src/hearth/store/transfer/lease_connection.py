"""A worker's connection to the keeper, and the chunks that the keeper has granted over it.

One thread reads from a connection. Threads that send take turns by a lock of their own.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from hearth.core.errors import HearthError, KeeperGone, LoadCancelled, error_of
from hearth.store.tiers.segment import Segment
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.lease_messages import (
    CancelLease,
    ChunkLeased,
    LeaseGranted,
    Message,
    Refused,
    ReleaseChunks,
    parse,
    send,
)

RECEIVED_BYTES = 1 << 16


class LeaseConnection:
    """An open connection. Closing it releases everything leased over it."""

    def __init__(self, connection: socket.socket, segment: Segment) -> None:
        self.segment = segment
        self._connection = connection
        self._unread = bytearray()  #: received, not returned yet
        self._receiving = threading.Lock()  #: held while the descriptor must stay open: others may close it

    def send(self, *messages: Message) -> None:
        """Raises OSError if the keeper is gone."""
        send(self._connection, *messages)

    def read(self) -> Message | None:
        """Return the next message, or None if the keeper is gone or the connection closed."""
        while (end := self._unread.find(b"\n") + 1) == 0:
            if not self._receive(0):
                return None
        line = bytes(self._unread[:end])
        del self._unread[:end]
        return parse(line)

    @property
    def has_received(self) -> bool:
        """True if `read` needs no system call, which would release the interpreter lock."""
        return b"\n" in self._unread

    def has_next(self) -> bool:
        try:
            while b"\n" not in self._unread:
                if not self._receive(socket.MSG_DONTWAIT):
                    break
        except BlockingIOError:
            return False
        return True

    def stop_reading(self) -> None:
        """Wake the reading thread: `read` returns None from now on."""
        with suppress(OSError):  # the keeper may be gone
            self._connection.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        with suppress(OSError):  # the keeper may be gone, or the connection closed already
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._receiving:
            self._connection.close()

    def _receive(self, flags: int) -> bool:
        """Append received bytes; False at the end of the stream. Raises BlockingIOError as `flags` ask."""
        try:
            with self._receiving:
                more = self._connection.recv(RECEIVED_BYTES, flags)
        except BlockingIOError:
            raise
        except OSError:  # the keeper is gone, or another thread closed the connection
            return False
        self._unread += more
        return bool(more)


class Grant:
    """Chunks that one keeper leases over one connection. One thread takes, one releases, any cancels.

    However the grant ends, taken chunks stay leased until released: copies may still read them.
    """

    def __init__(
        self,
        connection: LeaseConnection,
        name: str,
        num_chunks: int,
        keep: Callable[[LeaseConnection], None],
        granted: LeaseGranted,
    ) -> None:
        self.is_in_host = granted.is_in_host  #: all chunks were in host memory at the beginning
        self.num_chunks = num_chunks
        self.connection = connection
        self._name, self._keep = name, keep
        #: Guards the fields below and sending: one thread takes, others release and cancel.
        self._lock = threading.Lock()
        self._num_taken = 0
        self._num_released = 0
        self._is_over = num_chunks == 0  #: no more chunks will be taken
        self._is_cancelled = False
        self._has_hung_up = False
        #: Messages behind the chunks taken so far. Used only by the thread that takes.
        self._unread: deque[Message] = deque(granted.leased)
        self.segment.load_began()
        self._hang_up_if_done()

    @property
    def segment(self) -> Segment:
        return self.connection.segment

    @property
    def is_finished(self) -> bool:
        """True if no more chunks come and all taken ones were released."""
        # Read without the lock, which callers of the client's lock may hold: once over, no chunk is taken.
        return self._is_over and self._num_released == self._num_taken

    @property
    def num_to_come(self) -> int:
        return self.num_chunks - self._num_taken

    def __iter__(self) -> Iterator[HostChunk]:
        for _ in range(self.num_chunks):
            yield from self.take_pinned(1)

    def take_pinned(self, most: int) -> list[HostChunk]:
        """Wait for the next chunk, pin it, and return it with later ones that are here and pinned.

        Raises what the keeper met, LoadCancelled after `cancel`, KeeperGone if the keeper is gone.
        """
        leased: list[ChunkLeased] = []
        can_copy = self.segment.can_copy
        message = self._next_message()
        while isinstance(message, ChunkLeased) and (not leased or can_copy(message.cell)):
            leased.append(message)
            message = None
            if len(leased) == most or not (self._unread or self.connection.has_received):
                break
            message = self._next_message()
        if message is not None:
            self._unread.appendleft(message)
        chunks = self._taken(leased, message)
        self.segment.pin(chunks[0].cell)
        return chunks

    def has_next(self) -> bool:
        """True if `take` would not block. For the thread that takes."""
        return bool(self._unread) or self.connection.has_next()

    def take(self) -> HostChunk:
        """Wait for the next chunk, which may not be pinned. Raises as `take_pinned`."""
        message = self._next_message()
        (chunk,) = self._taken([message] if isinstance(message, ChunkLeased) else [], message)
        return chunk

    def release(self, *chunks: HostChunk) -> None:
        with self._lock:
            with suppress(OSError):  # the keeper is gone, and its leases with it
                self.connection.send(ReleaseChunks(tuple(chunk.index for chunk in chunks)))
            self._num_released += len(chunks)
            self._hang_up_if_done()

    def cancel(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = self._is_cancelled = True
            with suppress(OSError):  # the keeper may be gone
                self.connection.send(CancelLease())
            self.connection.stop_reading()
            self._hang_up_if_done()

    def _taken(self, leased: Sequence[ChunkLeased], message: Message | None) -> list[HostChunk]:
        """Count and return leased chunks. Raises if there are none, or the grant is over."""
        with self._lock:
            if self._is_over or not leased:
                self._is_over = True
                self._hang_up_if_done()
                raise self._failure(message)
            self._num_taken += len(leased)
            self._is_over = self._num_taken == self.num_chunks
        memory = self.segment.memory
        return [
            HostChunk(one.index, memory(one.cell, one.num_bytes), one.cell, one.delivery, one.is_shared)
            for one in leased
        ]

    def _next_message(self) -> Message | None:
        return self._unread.popleft() if self._unread else self.connection.read()

    def _failure(self, message: Message | None) -> HearthError:
        if self._is_cancelled:
            return LoadCancelled(f"the load of `{self._name}` was cancelled")
        if isinstance(message, Refused):
            return error_of(message.error, message.reason)
        return KeeperGone(f"the keeper that leased chunks of `{self._name}` is gone; load the model again")

    def _hang_up_if_done(self) -> None:
        if self._has_hung_up or not self.is_finished:
            return
        self._has_hung_up = True
        self.segment.load_ended()
        if self._num_taken == self.num_chunks:
            self._keep(self.connection)
        else:
            self.connection.close()
