"""Brings a data directory of an older format up to date, and back. Nobody else may use it meanwhile.

Format 1 named chunks by xxh3-128, format 2 by BLAKE3 and length, so every model has another digest.

    upgrade/notes/             what was found so far of models that are being read (`store/upgrade.py`)
    upgrade/before/            everything that is about to be replaced, and index.json: where it belongs
    upgrade/before/replacing   from here on `before/` is what there was, and is only added to
    VERSION                    changes last of all, and first of all on the way back

    read all models  ->  save what they were  ->  replace descriptions, then rows  ->  VERSION
    (takes minutes)      (from here on the way back is open)

Interrupted anywhere, the next run goes on; what was done already is found done. The way back stays open until
the registry is written for the first time: then `upgrade/` is deleted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import sqlite3
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from xxhash import xxh3_128_hexdigest

from hearth.control.datadir import VERSION, DataDir, write_private
from hearth.control.deploy import opened_lock
from hearth.control.deployed import Deployed
from hearth.control.registry import Registry
from hearth.errors import DataDirError, HearthError, StoreError
from hearth.store.file_stamp import FileStamp, stamp_of
from hearth.store.local_hashes import write_hashes
from hearth.store.manifest import MANIFEST, WEIGHTS, Manifest, chunk_of, read_manifest
from hearth.store.remote import RemoteModel
from hearth.store.upgrade import ReadChunk, read_old, upgraded
from hearth.store.upstream import (
    RemoteAddress,
    Upstream,
    description_directory,
    parse_address,
    write_upstream,
)
from hearth.store.writer import Progress

OLD_VERSION = 1

#: Told of the name of a model, bytes that were read of it, and all its bytes.
OnProgress = Callable[[str, int, int], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Upgraded:
    """The outcome for one model."""

    name: str
    old: str  #: its digest before
    new: str | None  #: its digest now; None: it stays as it was, and cannot be served
    reason: str = ""


def upgrade(data_dir: DataDir, on_progress: OnProgress = lambda *_: None) -> list[Upgraded]:
    """Bring the directory to this format, and return what became of each model. Does nothing if it is.

    A model whose bytes are damaged or gone, or whose directory cannot be written, stays as it was: it has to
    be deployed again.

    Raises:
        DataDirError: the directory cannot be written, or models are being deployed.
    """
    if data_dir.version >= VERSION:
        return []
    outcomes: list[Upgraded] = []
    changes: list[_Change] = []
    with _alone(data_dir), _translated(data_dir), Registry.open(data_dir) as registry:
        models = registry.all()
        shared_xxh3 = _shared_xxh3(models)
        for model in models:
            try:
                change = _read(data_dir, model, shared_xxh3, on_progress)
            except HearthError as error:
                log.error("model_not_upgraded model=%s reason=%s", model.name, error)
                outcomes.append(Upgraded(model.name, model.digest, None, str(error)))
                continue
            changes.append(change)
            outcomes.append(Upgraded(model.name, model.digest, change.new.digest))
        _save(data_dir, registry, changes)
        for change in changes:
            _write(data_dir, change)
        registry.upgrade(change.new for change in changes)
        for change in changes:
            if change.is_remote:  # nobody could read it, and so nobody would know which chunks are in use
                shutil.rmtree(change.old.directory, ignore_errors=True)
        data_dir.set_version(VERSION)
    shutil.rmtree(_notes(data_dir), ignore_errors=True)
    log.info("data_dir_upgraded path=%s models=%d of=%d", data_dir.path, len(changes), len(outcomes))
    return outcomes


def roll_back(data_dir: DataDir) -> None:
    """Undo an upgrade, for the Hearth before; interrupted, it is to be done again.

    Raises:
        DataDirError: nothing is left to go back to, the directory cannot be written, or models are deployed.
    """
    before = _before(data_dir)
    if not (before / "replacing").is_file():
        raise DataDirError(
            f"`{data_dir.path}` cannot be rolled back: it was not upgraded, or models were deployed or "
            "removed since, which the older Hearth could not read"
        )
    with _alone(data_dir), _translated(data_dir):
        data_dir.set_version(OLD_VERSION)
        for entry in _read_index(before):
            Path(entry.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in (before / entry.saved).iterdir():
                _put(path, Path(entry.directory) / path.name)
            if entry.replaced_by is not None:
                shutil.rmtree(entry.replaced_by, ignore_errors=True)
        with (
            closing(sqlite3.connect(before / "registry.db")) as saved_registry,
            closing(sqlite3.connect(data_dir.registry_path)) as registry,
        ):
            saved_registry.backup(registry)
        for path in data_dir.path.glob("chunks/??/*-*-*"):
            old_name = path.name.rpartition("-")[2]
            _rename(path, data_dir.path / "chunks" / old_name[:2] / old_name)
        (before / "replacing").unlink()
        shutil.rmtree(data_dir.upgrade_path)
    log.info("data_dir_rolled_back path=%s version=%d", data_dir.path, OLD_VERSION)


def upgrade_directory(directory: Path, on_progress: OnProgress = lambda *_: None) -> Upgraded | None:
    """Bring one converted model, which need not be deployed, to this format; None if it is already.

    Raises:
        HearthError: its bytes are damaged or gone; then nothing has changed.
    """
    directory = directory.resolve()
    old = read_old(directory)
    if old is None:
        return None
    notes = directory.with_name(f".{directory.name}.upgrading")
    manifest = upgraded(old, notes, on_progress=_reporter(directory.name, on_progress))
    _write_manifest(directory, manifest)
    notes.unlink(missing_ok=True)
    return Upgraded(directory.name, old.digest, manifest.digest)


@dataclass(frozen=True, slots=True)
class _Change:
    """One model before and after."""

    old: Deployed
    new: Deployed
    manifest: Manifest
    stamp: FileStamp | None  #: of its weights.bin when they were read; None: it has none, or they were not

    @property
    def is_remote(self) -> bool:
        return "://" in self.old.where


@dataclass(frozen=True, slots=True)
class _Saved:
    """Where what was saved belongs. Becomes JSON."""

    directory: str
    saved: str  #: folder in `before/`
    replaced_by: str | None  #: the directory that has come in its place


def _shared_xxh3(models: Sequence[Deployed]) -> set[str]:
    """Return the names of chunks that several models have: a cached file of that name may be any one's."""
    counts: Counter[str] = Counter()
    for directory in {model.directory for model in models}:
        with suppress(HearthError):
            old = read_old(Path(directory))
            counts.update(set(old.xxh3) if old is not None else ())
    return {xxh3 for xxh3, count in counts.items() if count > 1}


def _read(
    data_dir: DataDir, model: Deployed, shared_xxh3: Collection[str], on_progress: OnProgress
) -> _Change:
    """Find the new description of a model. Raises HearthError if it cannot be had, or not be written."""
    directory = Path(model.directory)
    is_remote = "://" in model.where
    if not is_remote and not os.access(directory, os.W_OK):
        raise StoreError(f"`{directory}` may not be written; run `hearth upgrade {directory}` as its owner")
    stamp = stamp_of(directory / WEIGHTS)
    old = read_old(directory)
    if old is None:  # a run before this one has come so far
        manifest, stamp = read_manifest(directory), None
    else:
        read_chunk = None
        if is_remote:
            read_chunk = _chunk_reader(data_dir, parse_address(model.where).url, shared_xxh3)
        notes = _notes(data_dir) / f"{directory.name}-{old.digest}"
        manifest = upgraded(old, notes, read_chunk, _reporter(model.name, on_progress))
    new = replace(model, digest=manifest.digest)
    if is_remote:
        version = RemoteAddress(parse_address(model.where).url, manifest.digest)
        new = replace(new, where=str(version), directory=str(description_directory(data_dir.path, version)))
    return _Change(model, new, manifest, stamp)


def _chunk_reader(data_dir: DataDir, url: str, shared_xxh3: Collection[str]) -> ReadChunk:
    """Return a reader of chunks that lie in files of their own, or else at the URL.

    A cached file was checked by xxh3 alone when it came: what another model may have brought is not believed.
    """
    remote = RemoteModel(url)

    def read(index: int, offset: int, num_bytes: int, xxh3: str) -> bytes:
        cached = data_dir.path / "chunks" / xxh3[:2] / xxh3
        with suppress(OSError):
            if xxh3 not in shared_xxh3 and cached.stat().st_size == num_bytes:
                data = cached.read_bytes()
                if xxh3_128_hexdigest(data) == xxh3:
                    return data
        buffer = bytearray(num_bytes)
        remote.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    return read


def _reporter(name: str, on_progress: OnProgress) -> Callable[[Progress], None]:
    return lambda progress: on_progress(name, progress.done_bytes, progress.total_bytes)


def _save(data_dir: DataDir, registry: Registry, changes: Sequence[_Change]) -> None:
    """Keep what is about to be replaced.

    A run before this one may have replaced some of it: that is saved already, and what is new is added.
    """
    before = _before(data_dir)
    if not (before / "replacing").is_file():
        shutil.rmtree(before, ignore_errors=True)
        before.mkdir(mode=0o700, parents=True)
        registry.back_up(before / "registry.db")
        write_private(before / "index.json", "[]")
    index = _read_index(before)
    known = {entry.directory for entry in index}
    for change in changes:
        directory = Path(change.old.directory)
        if str(directory) in known:
            continue
        known.add(str(directory))
        saved = before / str(len(index))
        shutil.rmtree(saved, ignore_errors=True)
        saved.mkdir(mode=0o700)
        for path in directory.iterdir() if change.is_remote else [directory / MANIFEST]:
            if path.is_file():
                shutil.copy(path, saved)
        index.append(_Saved(str(directory), saved.name, change.new.directory if change.is_remote else None))
        write_private(before / "index.json", msgspec.json.encode(index).decode())
    write_private(before / "replacing", "")


def _read_index(before: Path) -> list[_Saved]:
    return msgspec.json.decode((before / "index.json").read_bytes(), type=list[_Saved])


def _write(data_dir: DataDir, change: _Change) -> None:
    """Put a model's new description where it belongs, and name its cached chunks anew. May be done again."""
    directory = Path(change.old.directory)
    old = read_old(directory)
    if old is None:
        return
    if not change.is_remote:
        _write_manifest(directory, change.manifest)
        if change.stamp is not None and stamp_of(directory / WEIGHTS) == change.stamp:
            write_hashes(data_dir.path, directory.resolve(), change.manifest, change.stamp, old.xxh3)
        return
    target = Path(change.new.directory)
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in change.manifest.files:
        _put(directory / file.name, target / file.name)
    for chunk, xxh3 in zip(change.manifest.chunks, old.xxh3, strict=True):
        cached = data_dir.path / "chunks" / xxh3[:2] / xxh3
        if cached.is_file() and chunk_of(cached.read_bytes()) == chunk:
            _rename(cached, data_dir.path / "chunks" / chunk.id[:2] / f"{chunk.id}-{xxh3}")
    write_upstream(target, Upstream(change.manifest.digest))
    write_private(target / MANIFEST, change.manifest.to_json())


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace a manifest at once; whoever could read it still can."""
    path = directory / MANIFEST
    mode = stat.S_IMODE(path.stat().st_mode)
    write_private(path, manifest.to_json())
    path.chmod(mode)


def _put(source: Path, dest: Path) -> None:
    """Copy a file with its mode, at once or not at all."""
    temporary = dest.with_name(f".{dest.name}.{secrets.token_hex(8)}")
    try:
        shutil.copy(source, temporary)
        temporary.replace(dest)
    finally:
        temporary.unlink(missing_ok=True)


def _rename(path: Path, dest: Path) -> None:
    dest.parent.mkdir(mode=0o700, exist_ok=True)
    path.replace(dest)


@contextmanager
def _alone(data_dir: DataDir) -> Iterator[None]:
    """Keep deployments out, which need no service and could register what is of the other format.

    Raises:
        DataDirError: one is under way.
    """
    with opened_lock(data_dir) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataDirError(
                f"models are being deployed in `{data_dir.path}`; wait until that has ended, and try again"
            ) from None
        yield


@contextmanager
def _translated(data_dir: DataDir) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataDirError(
            f"`{data_dir.path}` cannot be upgraded or rolled back: {error}; mend that and try again, what "
            "was done stays done"
        ) from error


def _notes(data_dir: DataDir) -> Path:
    return data_dir.upgrade_path / "notes"


def _before(data_dir: DataDir) -> Path:
    return data_dir.upgrade_path / "before"
