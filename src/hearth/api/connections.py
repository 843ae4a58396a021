"""The open connections of the API's server, and which one gives way when there are too many. Reads no bytes.

Every connection is a stranger's until a request over it is let in, and known from then on. Each kind has a
limit of its own, so that neither takes the descriptors of the other or those that the service itself needs. A
new connection is always taken: the stranger who has been there for longest gives way, so `/health` answers
however many clients hold a connection without ever coming to the point.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger(__name__)

#: Descriptors that the service needs for itself: workers, keeper, files, deployments.
RESERVED_FILES = 128
MAX_STRANGERS = 1024
#: Between two log lines about connections that had to give way.
LOG_EVERY_S = 60.0


class Closable(Protocol):
    """A connection as seen from here."""

    def abort(self) -> None:
        """Close the connection without waiting for its client."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections may be open at once."""

    max_strangers: int  #: of callers that have not been let in yet
    max_known: int  #: of callers that have been

    @classmethod
    def within(cls, max_open_files: int) -> ConnectionLimits:
        """Share out the descriptors that a process may have.

        As many as there may be strangers stay free: so many new ones can come before the first has closed.
        """
        free = max_open_files - min(RESERVED_FILES, max_open_files // 2)
        max_strangers = max(1, min(MAX_STRANGERS, free // 4))
        return cls(max_strangers, max(1, free - 2 * max_strangers))


class Connections:
    """Mutable; used by the event loop of the server only."""

    def __init__(self, limits: ConnectionLimits, on_close: Callable[[], None] = lambda: None) -> None:
        self.limits = limits
        self._on_close = on_close  #: told of each connection that had to give way
        self._strangers: dict[Closable, None] = {}  #: in the order in which they came
        self._waiting: dict[Closable, None] = {}  #: known; the client's turn to send, for longest first
        self._answering: set[Closable] = set()  #: known; a whole request is being answered
        self._logged_s = -LOG_EVERY_S

    def add(self, connection: Closable) -> None:
        """Take a new connection; too many strangers have the oldest of them closed."""
        if len(self._strangers) >= self.limits.max_strangers:
            self._close_first(self._strangers)
        self._strangers[connection] = None

    def let_in(self, connection: Closable) -> bool:
        """Make a connection a known one. False: all that may be known are being answered."""
        if connection not in self._strangers:
            return True
        if len(self._waiting) + len(self._answering) >= self.limits.max_known:
            if not self._waiting:
                return False
            self._close_first(self._waiting)
        del self._strangers[connection]
        self._waiting[connection] = None
        return True

    def answer(self, connection: Closable) -> None:
        """Note that a whole request has come; a known connection does not give way until it is answered."""
        if connection in self._waiting:
            del self._waiting[connection]
            self._answering.add(connection)

    def wait(self, connection: Closable) -> None:
        """Note that all that has come is answered."""
        if connection in self._answering:
            self._answering.remove(connection)
            self._waiting[connection] = None

    def remove(self, connection: Closable) -> None:
        """Forget a connection that has ended."""
        self._strangers.pop(connection, None)
        self._waiting.pop(connection, None)
        self._answering.discard(connection)

    def _close_first(self, connections: dict[Closable, None]) -> None:
        first = next(iter(connections))
        del connections[first]
        first.abort()
        self._on_close()
        if time.monotonic() - self._logged_s >= LOG_EVERY_S:
            self._logged_s = time.monotonic()
            log.warning(
                "connections_closed max_strangers=%d max_known=%d: too many were open, the oldest gave way; "
                "for more of them raise the limit of open files (`ulimit -n`)",
                *(self.limits.max_strangers, self.limits.max_known),
            )
