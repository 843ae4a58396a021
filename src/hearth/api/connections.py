"""The open connections of the server, and which one is closed when there are too many.

A connection is unauthenticated until a request over it is authorised, and known from then on. Each kind has a
limit of its own, so that neither exhausts the descriptors of the other or of the service. New connections are
always accepted: the oldest unauthenticated one is closed instead, so `/health` always responds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger(__name__)

#: Descriptors for workers, keeper, files and deployments.
RESERVED_FILES = 128
MAX_STRANGERS = 1024
#: Between two log lines about closed connections.
LOG_EVERY_S = 60.0


class Closable(Protocol):
    def abort(self) -> None:
        """Close the connection without waiting for its client."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_strangers: int  #: unauthenticated connections
    max_known: int

    @classmethod
    def within(cls, max_open_files: int) -> ConnectionLimits:
        """Divide the descriptors of a process. `max_strangers` stay free for connections that arrive."""
        free = max_open_files - min(RESERVED_FILES, max_open_files // 2)
        max_strangers = max(1, min(MAX_STRANGERS, free // 4))
        return cls(max_strangers, max(1, free - 2 * max_strangers))


class Connections:
    """Mutable; used by the event loop of the server only."""

    def __init__(self, limits: ConnectionLimits, on_close: Callable[[], None] = lambda: None) -> None:
        self.limits = limits
        self._on_close = on_close  #: called for each connection that is closed for another
        self._strangers: dict[Closable, None] = {}  #: oldest first
        self._waiting: dict[Closable, None] = {}  #: known and idle, longest idle first
        self._answering: set[Closable] = set()  #: known, with a complete request
        self._logged_s = -LOG_EVERY_S

    def add(self, connection: Closable) -> None:
        if len(self._strangers) >= self.limits.max_strangers:
            self._close_first(self._strangers)
        self._strangers[connection] = None

    def let_in(self, connection: Closable) -> bool:
        """Mark a connection as known. False: the limit is reached, and none of them is idle."""
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
        if connection in self._waiting:
            del self._waiting[connection]
            self._answering.add(connection)

    def wait(self, connection: Closable) -> None:
        if connection in self._answering:
            self._answering.remove(connection)
            self._waiting[connection] = None

    def remove(self, connection: Closable) -> None:
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
                "connections_closed max_strangers=%d max_known=%d: too many connections, closed the oldest; "
                "raise the open file limit (`ulimit -n`)",
                self.limits.max_strangers,
                self.limits.max_known,
            )
