"""A connection to the lender, with the segment that came along. Knows no load.

One thread reads; those that send take turns by a lock of their own.
"""

from __future__ import annotations

import socket
from collections import deque
from contextlib import suppress

from hearth.store.lending import Message, parse, send
from hearth.store.segment import Segment

#: Most that is received at once: hundreds of messages.
READ_BYTES = 64 << 10


class LenderLine:
    """An open connection. Closing it gives back whatever was lent over it."""

    def __init__(self, connection: socket.socket, segment: Segment) -> None:
        """`segment` is the lender's, mapped, and outlives the line."""
        self.segment = segment
        self._connection = connection
        self._lines: deque[bytes] = deque()  #: whole ones that were not read yet
        self._rest = b""  #: the beginning of the next

    def send(self, *messages: Message) -> None:
        """Send messages. Raises OSError if the lender is gone."""
        send(self._connection, *messages)

    def read(self) -> Message | None:
        """Return the next message; None: the lender is gone, or the line closed. Raises as `parse`."""
        while not self._lines:
            try:
                received = self._connection.recv(READ_BYTES)
            except OSError:  # also if another thread has closed it
                return None
            if not received:
                return None
            *lines, self._rest = (self._rest + received).split(b"\n")
            self._lines.extend(lines)
        return parse(self._lines.popleft())

    @property
    def has_more(self) -> bool:
        """True if another message has come, and `read` will not wait."""
        return bool(self._lines)

    def stop_reading(self) -> None:
        """Wake the thread that reads: nothing comes any more."""
        with suppress(OSError):  # the lender may be gone
            self._connection.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        with suppress(OSError):  # the lender may be gone, or this said before
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
