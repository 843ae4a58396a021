"""The directory of snapshots: where they are, how many bytes they may take, which are removed first.

    key                               of the installation
    MODEL/FINGERPRINT.snapshot        digests of the model's manifest and of the fingerprint
    MODEL/FINGERPRINT.*.trial         while a process tries the snapshot (`trial_mark.py`)

A file's modification time is the time of its last use. When all together exceed the quota, the least recently
used are removed. Processes may share the directory: any file can disappear at any time.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
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
)
from hearth.snapshot.file import KEY_BYTES, OpenSnapshot, open_snapshot, write_snapshot
from hearth.snapshot.fingerprint import FieldDifference, Fingerprint
from hearth.snapshot.key import installation_key, known_key
from hearth.snapshot.trial_mark import abandoned_marks

SUFFIX = ".snapshot"
_KEY = "key"
#: Temporary names of snapshots, marks of trials and the key.
_UNFINISHED = re.compile(r"\..+\.(snapshot\.[0-9a-f]+|trial)|\.key\.[0-9a-f]+")

#: Errors of files that can never be used.
_UNREADABLE = (SnapshotTruncated, SnapshotCorrupt, SnapshotForeign, SnapshotUnauthenticated)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    path: Path
    model: str  #: digest of the model's manifest
    num_bytes: int
    used_at_s: float


@dataclass(frozen=True, slots=True)
class SnapshotDirectory:
    path: Path
    quota_bytes: int
    key: bytes

    @staticmethod
    def open(path: Path, quota_bytes: int) -> SnapshotDirectory:
        """Open the directory; it and its key are created for their owner alone. Raises SnapshotError."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SnapshotError(f"the directory of snapshots `{path}` cannot be used: {error}") from error
        return SnapshotDirectory(path, quota_bytes, installation_key(path / _KEY))

    @staticmethod
    def find(path: Path) -> SnapshotDirectory | None:
        """Open the directory for reading, without creating it; None: there is none. Raises SnapshotError."""
        if not path.is_dir():
            return None
        # Without the key no file is authentic: a random one refuses them all.
        key = known_key(path / _KEY) or secrets.token_bytes(KEY_BYTES)
        return SnapshotDirectory(path, quota_bytes=0, key=key)

    def path_of(self, fingerprint: Fingerprint) -> Path:
        return self.path / fingerprint.manifest / f"{fingerprint.digest}{SUFFIX}"

    def save(self, fingerprint: Fingerprint, sections: Mapping[str, bytes]) -> Path:
        """Write a snapshot, and remove old ones beyond the quota. Raises StoreFull or SnapshotError."""
        path = self.path_of(fingerprint)
        if path.parent.is_symlink():  # what is behind it does not count towards the quota
            raise SnapshotError(f"the snapshot `{path}` cannot be written through a link; delete that")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            for mark in abandoned_marks(path):  # they belong to the snapshot that is replaced
                mark.unlink(missing_ok=True)
        except OSError as error:
            raise SnapshotError(f"the snapshot `{path}` cannot be written: {error}") from error
        write_snapshot(path, fingerprint, sections, self.key, max_bytes=self.quota_bytes)
        self._remove_unreadable(fingerprint.manifest)
        keep_quota(self.path, self.quota_bytes, path)
        return path

    def _remove_unreadable(self, model: str) -> None:
        for entry in self.entries(model):
            try:
                open_snapshot(entry.path, self.key).close()
            except OSError:  # such as too many open files
                continue
            except _UNREADABLE as error:
                with suppress(OSError):  # another process removes it as well, or it is a directory
                    entry.path.unlink()
                    log.info("snapshot_removed path=%s reason=`%s`", entry.path, str(error).replace("`", ""))

    def load(self, fingerprint: Fingerprint) -> OpenSnapshot | None:
        """Return the snapshot of a fingerprint and note its use; None: there is none. Raises SnapshotFatal if
        a process died while it tried the snapshot, which is removed, and SnapshotError if it must not be
        used.
        """
        path = self.path_of(fingerprint)
        try:
            self._remove_fatal(path)
            opened = open_snapshot(path, self.key)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SnapshotError(f"the snapshot `{path}` cannot be read: {error}") from error
        if differences := fingerprint.differences(opened.fingerprint):
            opened.close()
            raise SnapshotForeign(f"`{path}` was made for another start: {'; '.join(map(str, differences))}")
        with suppress(OSError):  # it is used all the same
            os.utime(path)
        return opened

    def _remove_fatal(self, path: Path) -> None:
        if not (marks := abandoned_marks(path)):
            return
        was_there = path.exists()
        path.unlink(missing_ok=True)
        for mark in marks:  # after the snapshot: if this process dies in between, a mark remains
            mark.unlink(missing_ok=True)
        if was_there:
            raise SnapshotFatal(f"a worker died while it tried the graphs of `{path}`, which is removed")

    def discard(self, fingerprint: Fingerprint) -> None:
        self.path_of(fingerprint).unlink(missing_ok=True)

    def open_file(self, path: Path) -> OpenSnapshot:
        try:
            return open_snapshot(path, self.key)
        except OSError as error:
            raise SnapshotError(f"the snapshot `{path}` cannot be read: {error}") from error

    def newest(
        self, model: str, is_wanted: Callable[[OpenSnapshot], bool] = lambda opened: True
    ) -> OpenSnapshot | None:
        """Return the most recently used readable snapshot that is wanted; None: the model has none.

        Raises SnapshotError.
        """
        refusal: SnapshotError | None = None
        for entry in sorted(self.entries(model), key=lambda one: one.used_at_s, reverse=True):
            try:
                opened = self.open_file(entry.path)
                if is_wanted(opened):
                    return opened
                opened.close()
            except SnapshotError as error:
                if not isinstance(error.__cause__, FileNotFoundError):  # else it was just removed
                    refusal = refusal or error
        if refusal is not None:
            raise refusal
        return None

    def slot_of(self, model: str) -> int | None:
        try:
            opened = self.newest(model)
        except SnapshotError:  # reported when a start tries to use it
            return None
        if opened is None:
            return None
        with opened:
            return opened.fingerprint.slot

    def differences(self, fingerprint: Fingerprint) -> list[FieldDifference]:
        """Return how the newest snapshot of the same layers differs."""
        layers = fingerprint.layers
        opened = self.newest(fingerprint.manifest, lambda one: one.fingerprint.layers == layers)
        if opened is None:
            return []
        with opened:
            return fingerprint.differences(opened.fingerprint)

    def entries(self, model: str | None = None) -> list[SnapshotEntry]:
        return sorted(_entries(self.path, model), key=lambda one: one.path)

    def remove(self, model: str) -> int:
        return _remove_model(self.path / model)


def remove_others(path: Path, models: Collection[str]) -> int:
    return sum(_remove_model(one) for one in _model_directories(path) if one.name not in models)


def remove_unfinished(path: Path) -> None:
    """Remove temporary files. No process may write to the directory now."""
    for directory in (path, *_model_directories(path)):
        for file in directory.glob(".*"):
            if _UNFINISHED.fullmatch(file.name):
                with suppress(FileNotFoundError, IsADirectoryError):
                    file.unlink()


def keep_quota(path: Path, quota_bytes: int, kept: Path | None = None) -> int:
    """Remove the least recently used snapshots, except `kept`, until the rest fits; return how many."""
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
        except OSError as error:  # the next one is removed instead
            log.warning("snapshot_left path=%s reason=`%s`", entry.path, error)
            continue
        else:
            log.info("snapshot_removed path=%s reason=quota", entry.path)
            num_removed += 1
        excess_bytes -= entry.num_bytes
    return num_removed


def _entries(path: Path, model: str | None = None) -> Iterator[SnapshotEntry]:
    for directory in _model_directories(path):
        for file in _files(directory) if model in (None, directory.name) else ():
            with suppress(FileNotFoundError):  # it was just removed
                found = file.lstat()
                yield SnapshotEntry(file, directory.name, found.st_size, found.st_mtime)


def _files(directory: Path) -> list[Path]:
    try:
        return [file for file in directory.glob(f"*{SUFFIX}") if not file.name.startswith(".")]
    except FileNotFoundError:
        return []


def _model_directories(path: Path) -> list[Path]:
    """Return the directories of models. Symlinks are ignored: what is behind them is not ours to remove."""
    found = path.iterdir() if path.is_dir() else ()
    return sorted(one for one in found if one.is_dir() and not one.is_symlink())


def _remove_model(directory: Path) -> int:
    """Remove a model's directory, or a symlink of its name; return its snapshots' number."""
    if directory.is_symlink():
        directory.unlink()
        return 0
    num_removed = len(_files(directory))
    # Renamed first, so that a worker that is writing a snapshot there fails instead of adding a file.
    renamed = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}")
    with suppress(FileNotFoundError):  # another process removes it as well
        directory.rename(renamed)
        shutil.rmtree(renamed)
    return num_removed
