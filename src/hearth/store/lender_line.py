"""A connection to the lender, with the segment that came along. Knows no load.

One thread reads; those that send take turns by a lock of their own.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from hearth.store.lending import Message, parse, send
from hearth.store.segment import Segment


class LenderLine:
    """An open connection. Closing it gives back whatever was lent over it."""

    def __init__(self, connection: socket.socket, segment: Segment) -> None:
        """`segment` is the lender's, mapped, and outlives the line."""
        self.segment = segment
        self._connection = connection
        self._lines = connection.makefile("rb")

    def send(self, *messages: Message) -> None:
        """Send messages. Raises OSError if the lender is gone."""
        send(self._connection, *messages)

    def read(self) -> Message | None:
        """Return the next message; None: the lender is gone, or the line closed. Raises as `parse`."""
        try:
            line = self._lines.readline()
        except (OSError, ValueError):  # ValueError: closed by another thread
            return None
        return parse(line) if line.endswith(b"\n") else None

    def stop_reading(self) -> None:
        """Wake the thread that reads: nothing comes any more."""
        with suppress(OSError):  # the lender may be gone
            self._connection.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        with suppress(OSError):  # the lender may be gone, or this said before
            self._connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._connection.close()
