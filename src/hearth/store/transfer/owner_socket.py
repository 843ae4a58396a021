"""The Unix socket of a keeper or a worker. Of all processes at one path, one listens. Knows no messages."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hearth.core.errors import StoreError

LOCK = "lending"


class OwnerSocket:
    """Listens until `stop`, in the place of a process that is gone. Only the user who owns it may connect."""

    def __init__(self, path: Path) -> None:
        """Raises StoreError if another process listens at `path`, or the file there is no socket."""
        self.path = path
        with _alone_at(path):
            _make_way(path)
            self._listener = _bind(path)
            self._file = path.lstat()

    def accept(self) -> socket.socket:
        """Wait for a connection. Raises OSError, also once stopped."""
        return self._listener.accept()[0]

    def stop(self) -> None:
        """Remove the socket, unless another process has replaced it, and end `accept`."""
        with suppress(FileNotFoundError):
            # Checked while we listen: until then no other file can get our inode's number.
            if os.path.samestat(self.path.lstat(), self._file):
                self.path.unlink()
        self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@contextmanager
def _alone_at(path: Path) -> Iterator[None]:
    """Keep other servers from making a socket in this directory. The lock file stays."""
    try:
        lock = os.open(path.with_name(LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"cannot listen at `{path}`: {error}; use another path") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held for milliseconds
        yield
    finally:
        os.close(lock)


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen()
    except OSError as error:
        listener.close()
        raise StoreError(f"cannot listen at `{path}`: {error}; use another path") from error
    finally:
        os.umask(mask)
    return listener


def _make_way(path: Path) -> None:
    """Remove the socket of a server that is gone, and nothing else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StoreError(f"`{path}` is not a socket; use another path, or move it away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)  # a busy server counts as well
        try:
            caller.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass
        except OSError as error:
            raise StoreError(
                f"the socket `{path}` belongs to another user: {error}; use another path"
            ) from error
    raise StoreError(f"another process listens at `{path}`; use another path, or stop it")
