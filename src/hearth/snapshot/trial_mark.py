"""Marks on disk that graphs of a snapshot are being tried, for whoever starts after a process died of it.

A graph that touches memory which is not there takes its process along, and would do so with every one that
uses the snapshot after that. So a file lies beside the snapshot while a trial runs, locked by whoever tries.
One that nobody has locked was left by a process that died in the middle of it.

A mark has to outlive a process, not the machine: nothing is flushed to disk, so it takes microseconds.
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
    """The mark of one process beside a snapshot. Mutable; the thread that tries calls it."""

    def __init__(self, snapshot: Path) -> None:
        self._path = snapshot.with_name(f"{snapshot.stem}.{secrets.token_hex(8)}{SUFFIX}")
        self._file: int | None = None  #: None: no trial runs
        self._is_refusal_told = False

    def set(self) -> None:
        """Note that a trial begins. Where that cannot be written, it is tried all the same."""
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
            if not self._is_refusal_told:
                log.warning("fallback trials=unmarked path=%s reason=`%s`", self._path, error)
            self._is_refusal_told = True
        else:
            self._file = file

    def clear(self) -> None:
        """Note that the trial is over, and this process lives."""
        if self._file is not None:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._file)
            self._file = None


def abandoned_marks(snapshot: Path) -> list[Path]:
    """Return the marks beside a snapshot that processes have left which died while they tried it."""
    marks = snapshot.parent.glob(f"{snapshot.stem}.*{SUFFIX}")
    return [mark for mark in marks if _is_abandoned(mark)]


def _is_abandoned(mark: Path) -> bool:
    try:
        file = os.open(mark, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # it was cleared just now
        return False
    try:
        # Shared: two who look must not think the other tries.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return mark.exists()  # else it was cleared since it was opened
    except OSError:  # its process lives
        return False
    finally:
        os.close(file)
