"""The Unix socket of a keeper or a worker, at a path that no other process uses. Knows no messages."""

from __future__ import annotations

import socket
from pathlib import Path

from hearth.core.errors import StoreError


class OwnerSocket:
    """Listens until `stop`, in a directory that only its owner may enter."""

    def __init__(self, path: Path) -> None:
        """Take the place of a process that is gone. Raises StoreError."""
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if path.is_socket():
                path.unlink()
            self._listener.bind(str(path))
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise StoreError(f"cannot listen at `{path}`: {error}; use another path") from error

    def accept(self) -> socket.socket:
        """Wait for a connection. Raises OSError, also once stopped."""
        return self._listener.accept()[0]

    def stop(self) -> None:
        """Remove the socket, and end `accept`."""
        self.path.unlink(missing_ok=True)
        self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
