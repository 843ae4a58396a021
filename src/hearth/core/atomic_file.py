"""Writes a file under a temporary name beside it and puts it in place: readers find all of it, or none."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path


def write_file(
    path: Path,
    parts: Iterable[bytes | memoryview],
    *,
    mode: int = 0o600,
    syncs: bool = True,
    place: Callable[[Path, Path], None] = os.replace,
) -> None:
    """Write a file, to the disk for certain if it `syncs`, and `place` it. Raises OSError.

    If that fails, the file that was there before remains. The umask applies to `mode`.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(file, "wb") as opened:
            opened.writelines(parts)
            if syncs:
                opened.flush()
                os.fsync(file)
        place(temporary, path)
    finally:
        with suppress(OSError):  # after a failure, that is the one to raise
            temporary.unlink()
