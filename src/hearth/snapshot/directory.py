"""The directory of snapshots: whose lie where, how many bytes they may take, which go first. Makes none.

    key                               of the installation
    MODEL/FINGERPRINT.snapshot        by the digest of the model's manifest and that of the fingerprint
    MODEL/FINGERPRINT.*.trial         while a process tries what is in it (`trial_mark.py`)

When a file was last used is its time of modification, which every use sets. Those that were used longest ago
go first where all together would take more than the quota. Processes may share the directory: files come and
go as wholes, so that one that is gone is simply not there.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hearth.errors import SnapshotError, SnapshotFatal, StoreFull
from hearth.snapshot.file import OpenSnapshot, open_any, open_snapshot, write_snapshot
from hearth.snapshot.fingerprint import FieldDifference, Fingerprint
from hearth.snapshot.key import installation_key
from hearth.snapshot.trial_mark import abandoned_marks

SUFFIX = ".snapshot"
_KEY = "key"
#: Files under temporary names that are older were left by a process that was killed.
_STALE_S = 3600.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """A file of the directory."""

    path: Path
    model: str  #: digest of the model's manifest
    num_bytes: int
    used_at_s: float


@dataclass(frozen=True, slots=True)
class SnapshotDirectory:
    """Snapshots of one installation on disk."""

    path: Path
    quota_bytes: int
    key: bytes

    @staticmethod
    def open(path: Path, quota_bytes: int) -> SnapshotDirectory:
        """Open the directory, which is made where there is none, with its key, for its owner alone.

        Raises:
            SnapshotError: it cannot be used.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SnapshotError(f"the directory of snapshots `{path}` cannot be used: {error}") from error
        return SnapshotDirectory(path, quota_bytes, installation_key(path / _KEY))

    def path_of(self, fingerprint: Fingerprint) -> Path:
        return self.path / fingerprint.manifest / f"{fingerprint.digest}{SUFFIX}"

    def save(self, fingerprint: Fingerprint, sections: Mapping[str, bytes]) -> Path:
        """Write a snapshot. Others go for it, those first that were used longest ago.

        Raises:
            StoreFull: it is larger than the quota, or the disk is full.
            SnapshotError: it cannot be written.
        """
        path = self.path_of(fingerprint)
        num_bytes = sum(map(len, sections.values()))
        if num_bytes > self.quota_bytes:
            raise StoreFull(
                f"a snapshot takes {num_bytes} bytes, limit of all of them, `store.snapshot_bytes`: "
                f"{self.quota_bytes}; raise it"
            )
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            for mark in abandoned_marks(path):  # of the one before
                mark.unlink(missing_ok=True)
        except OSError as error:
            raise SnapshotError(f"the snapshot `{path}` cannot be written: {error}") from error
        write_snapshot(path, fingerprint, sections, self.key)
        keep_quota(self.path, self.quota_bytes, path)
        return path

    def load(self, fingerprint: Fingerprint) -> OpenSnapshot | None:
        """Return the snapshot of a fingerprint, used from now on; None: there is none.

        Raises:
            SnapshotFatal: a process died while it tried the snapshot, which is removed.
            SnapshotError: there is one that must not be used.
        """
        path = self.path_of(fingerprint)
        try:
            self._remove_fatal(path)
            opened = open_snapshot(path, fingerprint, self.key)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SnapshotError(f"the snapshot `{path}` cannot be read: {error}") from error
        with suppress(OSError):  # it is used all the same
            os.utime(path)
        return opened

    def _remove_fatal(self, path: Path) -> None:
        """Remove a snapshot that a process died of, and raise SnapshotFatal. Raises OSError."""
        if not (marks := abandoned_marks(path)):
            return
        was_there = path.exists()
        path.unlink(missing_ok=True)
        for mark in marks:  # not before: whoever dies in between leaves one
            mark.unlink(missing_ok=True)
        if was_there:
            raise SnapshotFatal(f"a worker ended while it tried the graphs of `{path}`, which is removed")

    def discard(self, fingerprint: Fingerprint) -> None:
        """Remove the snapshot of a fingerprint, if there is one. Raises OSError."""
        self.path_of(fingerprint).unlink(missing_ok=True)

    def open_file(self, path: Path) -> OpenSnapshot:
        """Return what a file holds, whatever it was made for. Raises SnapshotError."""
        try:
            return open_any(path, self.key)
        except OSError as error:
            raise SnapshotError(f"the snapshot `{path}` cannot be read: {error}") from error

    def newest(self, model: str) -> OpenSnapshot | None:
        """Return the snapshot of a model that was used last; None: there is none that may be read."""
        for entry in sorted(self.entries(model), key=lambda one: one.used_at_s, reverse=True):
            with suppress(SnapshotError):
                return self.open_file(entry.path)
        return None

    def slot_of(self, model: str) -> int | None:
        """Return the slot of addresses that the snapshot of a model which was used last was made for.

        None: it was made for none, or there is none that may be read.
        """
        try:
            opened = self.newest(model)
            if opened is None:
                return None
            with opened:
                return opened.fingerprint.slot
        except SnapshotError:  # another version's
            return None

    def differences(self, fingerprint: Fingerprint) -> list[FieldDifference]:
        """Return why none of a model's snapshots is that of a fingerprint; []: the model has none.

        That is, by which fields the one that was used last is another.
        """
        try:
            opened = self.newest(fingerprint.manifest)
            if opened is None:
                return []
            with opened:
                return fingerprint.differences(opened.fingerprint)
        except SnapshotError:  # another version's: it cannot even be compared
            return []

    def entries(self, model: str | None = None) -> list[SnapshotEntry]:
        """Return all files, or those of one model, in the order of their paths."""
        return sorted(_entries(self.path, model or "*"), key=lambda one: one.path)

    def remove(self, model: str) -> int:
        """Remove all snapshots of a model, and return how many there were. Raises OSError."""
        return _remove_model(self.path / model)


def remove_others(path: Path, models: Collection[str]) -> int:
    """Remove from a directory, which need not be there, all that is of none of these models.

    Also what was never finished. Returns how many snapshots went. Raises OSError.
    """
    num_removed = 0
    for directory in path.iterdir() if path.is_dir() else ():
        if directory.is_dir() and not directory.is_symlink() and directory.name not in models:
            num_removed += _remove_model(directory)
    for unfinished in (*path.glob(".*"), *path.glob("*/.*")):
        with suppress(OSError):  # another process finishes or removes it
            if unfinished.lstat().st_mtime < time.time() - _STALE_S:
                unfinished.unlink()
    return num_removed


def keep_quota(path: Path, quota_bytes: int, kept: Path | None = None) -> int:
    """Remove the snapshots that were used longest ago, until the others fit, and return how many.

    `kept` stays in any case.
    """
    entries = sorted(_entries(path), key=lambda one: one.used_at_s)
    excess_bytes = sum(one.num_bytes for one in entries) - quota_bytes
    num_removed = 0
    for entry in entries:
        if excess_bytes <= 0:
            break
        if entry.path != kept:
            with suppress(OSError):  # another process removes it as well
                entry.path.unlink()
                log.info("snapshot_removed path=%s reason=quota", entry.path)
                num_removed += 1
            excess_bytes -= entry.num_bytes
    return num_removed


def _entries(path: Path, model: str = "*") -> Iterator[SnapshotEntry]:
    for file in path.glob(f"{model}/*{SUFFIX}"):
        with suppress(FileNotFoundError):  # it has just gone
            found = file.lstat()
            if not file.name.startswith("."):
                yield SnapshotEntry(file, file.parent.name, found.st_size, found.st_mtime)


def _remove_model(directory: Path) -> int:
    num_removed = len(list(directory.glob(f"*{SUFFIX}")))
    with suppress(FileNotFoundError):
        shutil.rmtree(directory)
    return num_removed
