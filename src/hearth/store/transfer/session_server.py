"""Serves the Unix socket of a keeper or a worker, each session on a thread of its own. Knows no messages."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from hearth.core.errors import StoreError

#: Before the next attempt, when the system has no room for one more connection or thread.
RETRY_S = 0.1

log = logging.getLogger(__name__)


class Session(Protocol):
    """One connection."""

    def run(self) -> None:
        """Serve it to its end."""

    def hang_up(self) -> None:
        """End it: `run` returns soon. Any thread may call it."""

    def close(self) -> None:
        """Give up all that it holds. Called once, after `run` or in its place."""


S = TypeVar("S", bound=Session)


class SessionServer(Generic[S]):
    """Listens at a path that no other process uses, until it is closed. Any thread may call it."""

    def __init__(self, path: Path, name: str) -> None:
        """Listen in the place of a process that is gone. Raises StoreError.

        `path`: in a directory that only its owner may enter. `name`: of the sessions' threads.
        """
        self.path, self._name = path, name
        self._threads: dict[S, threading.Thread] = {}
        self._lock = threading.Lock()  #: guards the threads: sessions end on their own
        self._is_closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if path.is_socket():
                path.unlink()
            self._listener.bind(str(path))
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise StoreError(f"cannot listen at `{path}`: {error}; use another path") from error
        self._acceptor: threading.Thread | None = None

    def start(self, welcome: Callable[[socket.socket], S | None]) -> None:
        """Serve connections. `welcome` owns each and returns its session; None: there is nothing to run.

        It is called on one thread. Its OSError, RuntimeError or ValueError is logged.
        """
        self._acceptor = threading.Thread(
            target=self._accept, args=(welcome,), name=f"{self._name}-accept", daemon=True
        )
        self._acceptor.start()

    @property
    def sessions(self) -> list[S]:
        with self._lock:
            return list(self._threads)

    def close(self) -> None:
        """End all sessions. Closing again is harmless."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self.path.unlink(missing_ok=True)
        self._listener.shutdown(socket.SHUT_RDWR)
        if self._acceptor is not None:
            self._acceptor.join()
        self._listener.close()
        with self._lock:
            threads = dict(self._threads)
        for session in threads:
            session.hang_up()
        for thread in threads.values():
            thread.join()

    def _accept(self, welcome: Callable[[socket.socket], S | None]) -> None:
        is_failing = False  # one log line for a run of failures
        while True:
            try:
                if (session := welcome(self._listener.accept()[0])) is not None:
                    self._start(session)
                is_failing = False
            except (OSError, RuntimeError, ValueError) as error:
                if self._is_closing.is_set():
                    return
                if not is_failing:
                    log.error("connection_not_taken path=%s reason=%s", self.path, error)
                is_failing = True
                self._is_closing.wait(RETRY_S)

    def _start(self, session: S) -> None:
        """Raises RuntimeError if there can be no more threads."""
        thread = threading.Thread(target=self._run, args=(session,), name=self._name, daemon=True)
        with self._lock:
            self._threads[session] = thread
        try:
            thread.start()
        except RuntimeError:
            self._end(session)
            raise

    def _run(self, session: S) -> None:
        try:
            session.run()
        finally:
            self._end(session)

    def _end(self, session: S) -> None:
        try:
            session.close()
        finally:
            with self._lock:
                del self._threads[session]
