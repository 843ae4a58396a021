"""The state of a file, by which a later look tells whether it is still the same. Reads no content."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Differs once a file is replaced or written to: its owner can set back `mtime_ns`, not `ctime_ns`."""

    inode: int
    ctime_ns: int
    mtime_ns: int
    num_bytes: int
    is_ours: bool  #: only this user and root may write it


def is_private(directory: Path) -> bool:
    """True if only this user and root may add or rename files in a directory."""
    stamp = stamp_of(directory)
    return stamp is not None and stamp.is_ours


def stamp_of(file: Path | int) -> FileStamp | None:
    """Return the state of a file, given by its path or a descriptor; None if there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    is_ours = found.st_uid in (0, os.geteuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return FileStamp(found.st_ino, found.st_ctime_ns, found.st_mtime_ns, found.st_size, is_ours)
