"""The directory of snapshots: whose lie where, how many bytes they may take, which go first. Makes none.

    key                               of the installation
    MODEL/FINGERPRINT.snapshot        by the digest of the model's manifest and that of the fingerprint
    MODEL/FINGERPRINT.*.trial         while a process tries what is in it (`trial_mark.py`)

When a file was last used is its time of modification, which every use sets. Those that were used longest ago
go first where all together would take more than the quota. Processes may share the directory: files come and
go as wholes, so that one that is gone is simply not there.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hearth.core.errors import (
    SnapshotCorrupt,
    SnapshotError,
    SnapshotFatal,
    SnapshotForeign,
    SnapshotTruncated,
    SnapshotUnauthenticated,
    StoreFull,
)
from hearth.snapshot.file import (
    KEY_BYTES,
    OpenSnapshot,
    open_any,
    open_snapshot,
    snapshot_bytes,
    write_snapshot,
)
from hearth.snapshot.fingerprint import FieldDifference, Fingerprint
from hearth.snapshot.key import installation_key, known_key
from hearth.snapshot.trial_mark import abandoned_marks

SUFFIX = ".snapshot"
_KEY = "key"
#: Names of what is being written: snapshots, marks of trials and the key.
_UNFINISHED = re.compile(r"\..+\.(snapshot\.[0-9a-f]+|trial)|\.key\.[0-9a-f]+")

#: Errors of removing a directory in which somebody writes a snapshot, and how often it is tried.
_CHANGED, _MAX_TRIES = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST), 16
#: Errors of files that will never be read, whoever tries.
_UNREADABLE = (SnapshotTruncated, SnapshotCorrupt, SnapshotForeign, SnapshotUnauthenticated)

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

    @staticmethod
    def find(path: Path) -> SnapshotDirectory | None:
        """Open the directory to look at it, which makes nothing; None: there is none.

        Raises:
            SnapshotError: it cannot be used.
        """
        if not path.is_dir():
            return None
        # Without its key no file in there is authentic, and so by one that nobody has.
        key = known_key(path / _KEY) or secrets.token_bytes(KEY_BYTES)
        return SnapshotDirectory(path, quota_bytes=0, key=key)

    def path_of(self, fingerprint: Fingerprint) -> Path:
        return self.path / fingerprint.manifest / f"{fingerprint.digest}{SUFFIX}"

    def save(self, fingerprint: Fingerprint, sections: Mapping[str, bytes]) -> Path:
        """Write a snapshot. Others go for it, those first that were used longest ago.

        Raises:
            StoreFull: it is larger than the quota, or the disk is full.
            SnapshotError: it cannot be written.
        """
        path = self.path_of(fingerprint)
        num_bytes = snapshot_bytes(fingerprint, sections)
        if num_bytes > self.quota_bytes:
            raise StoreFull(
                f"a snapshot takes {num_bytes} bytes, limit of all of them, `store.snapshot_bytes`: "
                f"{self.quota_bytes}; raise it"
            )
        if path.parent.is_symlink():  # whatever lies behind it is not looked at, and so no part of the quota
            raise SnapshotError(f"the snapshot `{path}` cannot be written through a link; delete that")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            for mark in abandoned_marks(path):  # of the one before
                mark.unlink(missing_ok=True)
        except OSError as error:
            raise SnapshotError(f"the snapshot `{path}` cannot be written: {error}") from error
        write_snapshot(path, fingerprint, sections, self.key)
        self._remove_unreadable(fingerprint.manifest)
        keep_quota(self.path, self.quota_bytes, path)
        return path

    def _remove_unreadable(self, model: str) -> None:
        """Remove files of a model that no start here can ever use, as of another key or an older Hearth."""
        for entry in self.entries(model):
            try:
                open_any(entry.path, self.key).close()
            except OSError:  # such as too many open files
                continue
            except _UNREADABLE as error:
                with suppress(OSError):  # another process removes it as well, or it is a directory
                    entry.path.unlink()
                    log.info("snapshot_removed path=%s reason=`%s`", entry.path, str(error).replace("`", ""))

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
        """Return the snapshot of a model that was used last, of those that may be read; None: it has none.

        Raises:
            SnapshotError: none of those that it has may be read, and this is what is wrong with the last.
        """
        refusal: SnapshotError | None = None
        for entry in sorted(self.entries(model), key=lambda one: one.used_at_s, reverse=True):
            try:
                return self.open_file(entry.path)
            except SnapshotError as error:
                if not isinstance(error.__cause__, FileNotFoundError):  # else it has just gone
                    refusal = refusal or error
        if refusal is not None:
            raise refusal
        return None

    def slot_of(self, model: str) -> int | None:
        """Return the slot of addresses that the snapshot of a model which was used last was made for.

        None: it was made for none, or there is none that may be read.
        """
        try:
            opened = self.newest(model)
        except SnapshotError:  # whoever would use it is told
            return None
        if opened is None:
            return None
        with opened:
            return opened.fingerprint.slot

    def differences(self, fingerprint: Fingerprint) -> list[FieldDifference]:
        """Return why none of a model's snapshots is that of a fingerprint; []: the model has none.

        That is, by which fields the one that was used last is another. Raises SnapshotError as `newest` does.
        """
        if (opened := self.newest(fingerprint.manifest)) is None:
            return []
        with opened:
            return fingerprint.differences(opened.fingerprint)

    def entries(self, model: str | None = None) -> list[SnapshotEntry]:
        """Return all files, or those of one model, in the order of their paths."""
        return sorted(_entries(self.path, model), key=lambda one: one.path)

    def remove(self, model: str) -> int:
        """Remove all snapshots of a model, and return how many there were. Raises OSError."""
        return _remove_model(self.path / model)


def remove_others(path: Path, models: Collection[str]) -> int:
    """Remove from a directory, which need not be there, all snapshots of other models than these.

    Returns how many went. Raises OSError.
    """
    return sum(_remove_model(one) for one in _model_directories(path) if one.name not in models)


def remove_unfinished(path: Path) -> None:
    """Remove from a directory, which need not be there, what was left under temporary names.

    Only who knows that nobody writes there may call it. Raises OSError.
    """
    for directory in (path, *_model_directories(path)):
        for unfinished in filter(_is_unfinished, directory.glob(".*")):
            with suppress(FileNotFoundError, IsADirectoryError):  # gone, or not ours
                unfinished.unlink()


def _is_unfinished(path: Path) -> bool:
    return _UNFINISHED.fullmatch(path.name) is not None


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
        if entry.path == kept:
            continue
        try:
            entry.path.unlink()
        except FileNotFoundError:  # another process removes it as well
            pass
        except OSError as error:  # the next one goes in its place
            log.warning("snapshot_left path=%s reason=`%s`", entry.path, error)
            continue
        else:
            log.info("snapshot_removed path=%s reason=quota", entry.path)
            num_removed += 1
        excess_bytes -= entry.num_bytes
    return num_removed


def _entries(path: Path, model: str | None = None) -> Iterator[SnapshotEntry]:
    """Yield the files of a model, or of all."""
    for directory in _model_directories(path):
        for file in _files(directory) if model in (None, directory.name) else ():
            with suppress(FileNotFoundError):  # it has just gone
                found = file.lstat()
                yield SnapshotEntry(file, directory.name, found.st_size, found.st_mtime)


def _files(directory: Path) -> list[Path]:
    """Return the snapshots in the directory of a model, or in one that has just gone."""
    try:
        return [file for file in directory.glob(f"*{SUFFIX}") if not file.name.startswith(".")]
    except FileNotFoundError:
        return []


def _model_directories(path: Path) -> list[Path]:
    """Return the directories of models. What lies behind a link is not ours to remove."""
    found = path.iterdir() if path.is_dir() else ()
    return sorted(one for one in found if one.is_dir() and not one.is_symlink())


def _remove_model(directory: Path) -> int:
    """Remove the directory of a model, or a link that has its name, and return how many snapshots went.

    Raises OSError.
    """
    if directory.is_symlink():
        directory.unlink()
        return 0
    num_removed = len(_files(directory))
    for num_left in reversed(range(_MAX_TRIES)):
        try:
            shutil.rmtree(directory)
        except OSError as error:
            if not directory.exists():  # another process removes it as well
                break
            if error.errno not in _CHANGED or not num_left:
                raise
        else:
            break
    return num_removed
