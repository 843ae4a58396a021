"""Marks on disk that a process is trying graphs of a snapshot.

A graph that touches unmapped memory kills its process, and would kill each process that restores the snapshot
after it. So a locked file is beside the snapshot while a trial runs. A mark without a lock was left by a
process that died during its trial. Marks need not survive the machine, so they are not flushed to disk.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

SUFFIX = ".trial"

log = logging.getLogger(__name__)


class TrialMark:
    def __init__(self, snapshot: Path) -> None:
        self._path = snapshot.with_name(f"{snapshot.stem}.{secrets.token_hex(8)}{SUFFIX}")
        self._file: int | None = None  #: None: no trial runs
        self._is_refusal_logged = False

    def set(self) -> None:
        """Mark that a trial begins. If the mark cannot be written, the trial runs without it."""
        if self._file is not None:
            return
        hidden = self._path.with_name(f".{self._path.name}")  # until it is locked
        try:
            file = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                hidden.rename(self._path)
            except OSError:
                os.close(file)
                hidden.unlink(missing_ok=True)
                raise
        except OSError as error:
            if not self._is_refusal_logged:
                log.warning("fallback trials=unmarked path=%s reason=`%s`", self._path, error)
            self._is_refusal_logged = True
        else:
            self._file = file

    def clear(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._file)
            self._file = None


def abandoned_marks(snapshot: Path) -> list[Path]:
    marks = snapshot.parent.glob(f"{snapshot.stem}.*{SUFFIX}")
    return [mark for mark in marks if _is_abandoned(mark)]


def _is_abandoned(mark: Path) -> bool:
    try:
        file = os.open(mark, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # it was cleared just now
        return False
    try:
        # Shared: two processes that check at once must not take each other for one that tries.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return mark.exists()  # else it was cleared since it was opened
    except OSError:  # its process is alive
        return False
    finally:
        os.close(file)
