"""A connection to the lender, with the segment that came along. Knows no load.

One thread reads; those that send take turns by a lock of their own.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from hearth.store.tiers.segment import Segment
from hearth.store.transfer.lease_messages import Message, parse, send

#: Bytes that are received at once: some hundred messages of one chunk each.
RECEIVED_BYTES = 1 << 16


class LeaseConnection:
    """An open connection. Closing it gives back whatever was lent over it."""

    def __init__(self, connection: socket.socket, segment: Segment) -> None:
        """`segment` is the lender's, mapped, and outlives the line."""
        self.segment = segment
        self._connection = connection
        self._unread = bytearray()  #: bytes that have come, and were not returned yet
        self._receiving = threading.Lock()  #: held while the descriptor must stay, for others may close it

    def send(self, *messages: Message) -> None:
        """Send messages. Raises OSError if the lender is gone."""
        send(self._connection, *messages)

    def send_line(self, line: bytes) -> None:
        """Send a message that was encoded before, as `send`."""
        self._connection.sendall(line)

    def read(self) -> Message | None:
        """Return the next message; None: the lender is gone, or the line closed. Raises as `parse`."""
        while (end := self._unread.find(b"\n") + 1) == 0:
            if not self._receive(0):
                return None
        line = bytes(self._unread[:end])
        del self._unread[:end]
        return parse(line)

    @property
    def has_received(self) -> bool:
        """True if `read` has a message without asking the system, which would let go of the interpreter."""
        return b"\n" in self._unread

    def has_next(self) -> bool:
        """True if `read` would return without waiting for the lender."""
        try:
            while b"\n" not in self._unread:
                if not self._receive(socket.MSG_DONTWAIT):
                    break
        except BlockingIOError:
            return False
        return True

    def stop_reading(self) -> None:
        """Wake the thread that reads: nothing comes any more."""
        with suppress(OSError):  # the lender may be gone
            self._connection.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        with suppress(OSError):  # the lender may be gone, or this said before
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._receiving:
            self._connection.close()

    def _receive(self, flags: int) -> bool:
        """Add to what has come; False: nothing more will. Raises BlockingIOError as `flags` have it."""
        try:
            with self._receiving:
                more = self._connection.recv(RECEIVED_BYTES, flags)
        except BlockingIOError:
            raise
        except OSError:  # the lender is gone, or the line closed by another thread
            return False
        self._unread += more
        return bool(more)
