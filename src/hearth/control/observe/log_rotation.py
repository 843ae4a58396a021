"""Limits the size of a log that several processes append to.

Processes keep the log open and would go on writing to a renamed file. So the newest part is copied to
`service.log.1` and the log is truncated: writers continue at its new end. Lines written between the end of
the copy and the truncation, some microseconds, are lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

#: A log that has grown beyond this is rotated; as much of it is kept.
MAX_LOG_BYTES = 16 << 20
#: Time between two looks at its size.
LOOK_S = 10.0
_MAX_LINE_BYTES = 64 << 10

log = logging.getLogger(__name__)


class LogRotation:
    """A task that checks the size of a log and rotates it. Mutable; used on the event loop alone."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES, look_s: float = LOOK_S) -> None:
        self._path, self._max_bytes, self._look_s = path, max_bytes, look_s
        self._has_failed = False
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            try:
                await asyncio.to_thread(rotate, self._path, self._max_bytes)
                self._has_failed = False
            except OSError as error:  # a full disk, say, which many such lines would not empty
                if not self._has_failed:
                    log.warning("log_not_rotated path=%s reason=%s", self._path, error)
                self._has_failed = True
            await asyncio.sleep(self._look_s)


def rotate(path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return
    with file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes <= max_bytes:
            return
        file.seek(num_bytes - max_bytes - 1)
        file.readline(_MAX_LINE_BYTES)  # the rest of a line that is cut, or the end of the one before
        with rotated_path(path).open("wb") as rotated:
            shutil.copyfileobj(file, rotated)
        file.truncate(0)


def rotated_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
