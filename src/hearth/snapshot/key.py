"""The key of an installation, which its snapshots are authenticated by. It never leaves the machine."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from hearth.core.errors import SnapshotError
from hearth.snapshot.file import KEY_BYTES


def installation_key(path: Path) -> bytes:
    """Return the key in a file, which is made where there is none; of several who try at once one succeeds.

    Raises:
        SnapshotError: the file cannot be used, is broken, or others may read it.
    """
    try:
        if (known := known_key(path)) is not None:
            return known
        _make(path)
        return _read(path)
    except OSError as error:
        raise _useless(path, error) from error


def known_key(path: Path) -> bytes | None:
    """Return the key in a file; None: there is none. Raises SnapshotError as `installation_key` does."""
    try:
        return _read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _useless(path, error) from error


def _useless(path: Path, error: OSError) -> SnapshotError:
    return SnapshotError(f"the key of snapshots `{path}` cannot be used: {error}")


def _no_file(path: Path) -> SnapshotError:
    return SnapshotError(
        f"the key of snapshots `{path}` must be a file, and is something else; delete it and restart "
        "the service: snapshots are made anew"
    )


def _make(path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as opened:
            opened.write(secrets.token_bytes(KEY_BYTES))
            opened.flush()
            os.fsync(file)
        with suppress(FileExistsError):  # made by another process meanwhile: that one counts
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    # Whatever lies there is opened without waiting, and read only if it is a file: not a pipe, for one.
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link or a socket
            raise _no_file(path) from error
        raise
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise _no_file(path)
        key = os.read(file, KEY_BYTES + 1)
    finally:
        os.close(file)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise SnapshotError(
            f"the key of snapshots `{path}` must be readable by user {os.geteuid()} alone, and is of user "
            f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}; delete it and restart the service: "
            "snapshots are made anew"
        )
    if len(key) != KEY_BYTES:
        raise SnapshotError(
            f"the key of snapshots `{path}` must have {KEY_BYTES} bytes, given: {len(key)}; delete it and "
            "restart the service: snapshots are made anew"
        )
    return key
