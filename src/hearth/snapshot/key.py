"""The key of an installation, which authenticates its snapshots. It never leaves the machine."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from hearth.core.atomic_file import write_file
from hearth.core.errors import SnapshotError
from hearth.snapshot.file import KEY_BYTES


def installation_key(path: Path) -> bytes:
    """Return the key in a file, which is created if missing; several processes may do so at once. Raises
    SnapshotError if the file cannot be used, is damaged, or other users can read it.
    """
    known = known_key(path)
    if known is None:
        try:
            with suppress(FileExistsError):  # created by another process meanwhile: that one counts
                write_file(path, [secrets.token_bytes(KEY_BYTES)], place=os.link)
        except OSError as error:
            raise _unusable(path, f"cannot be created: {error}") from error
        known = known_key(path)
    assert known is not None, f"`{path}` was created"
    return known


def known_key(path: Path) -> bytes | None:
    try:
        # Without blocking, as on a pipe; and not through a symlink.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, f"cannot be opened: {error.strerror}") from error
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise _unusable(path, "is not a regular file")
        key = os.read(file, KEY_BYTES + 1)
    finally:
        os.close(file)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise _unusable(
            path,
            f"must be readable by user {os.geteuid()} alone, and is of user {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):o}",
        )
    if len(key) != KEY_BYTES:
        raise _unusable(path, f"must have {KEY_BYTES} bytes, given: {len(key)}")
    return key


def _unusable(path: Path, reason: str) -> SnapshotError:
    return SnapshotError(
        f"the key of snapshots `{path}` {reason}; delete it and restart the service: snapshots are made anew"
    )
