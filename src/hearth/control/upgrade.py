"""Brings a data directory of an older format up to date, and back. Nobody else may use it meanwhile.

Format 1 named chunks by xxh3-128, format 2 by BLAKE3 and length, so every model has another digest.

    upgrade/notes/     what was found so far of models that are being read (`store/upgrade.py`)
    upgrade/before/    everything that is about to be replaced; its index.json is written last
    VERSION            changes last of all

    read all models  ->  save what they were  ->  replace manifests, then rows  ->  VERSION
    (takes minutes)      (from here on the way back is open)

Interrupted anywhere, the next run goes on; what was done already is found done. The way back stays open until
the registry is written for the first time: then `upgrade/` is deleted.
"""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
import stat
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from hearth.control.datadir import VERSION, DataDir, write_private
from hearth.control.registry import Deployed, Registry
from hearth.errors import DataDirError, HearthError
from hearth.store.manifest import Manifest, read_manifest
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

    A model whose bytes are damaged or gone stays as it was: it has to be deployed again.

    Raises:
        DataDirError: the directory cannot be written.
        StoreError: a disk is full.
    """
    if data_dir.version >= VERSION:
        return []
    outcomes: list[Upgraded] = []
    changes: list[_Change] = []
    with Registry.open(data_dir) as registry:
        for model in registry.all():
            try:
                change = _read(data_dir, model, on_progress)
            except HearthError as error:
                log.error("model_not_upgraded model=%s reason=%s", model.name, error)
                outcomes.append(Upgraded(model.name, model.digest, None, str(error)))
                continue
            changes.append(change)
            outcomes.append(Upgraded(model.name, model.digest, change.new.digest))
        _save(data_dir, registry, changes)
        for change in changes:
            _write(data_dir, change)
        registry.upgrade((change.old, change.new) for change in changes)
    data_dir.set_version(VERSION)
    shutil.rmtree(_notes(data_dir), ignore_errors=True)
    log.info("data_dir_upgraded path=%s models=%d of=%d", data_dir.path, len(changes), len(outcomes))
    return outcomes


def roll_back(data_dir: DataDir) -> None:
    """Undo an upgrade, for the Hearth before. Raises DataDirError where nothing is left to go back to."""
    before = _before(data_dir)
    if not (before / "index.json").is_file():
        raise DataDirError(
            f"`{data_dir.path}` cannot be rolled back: it was not upgraded, or models were deployed or "
            "removed since, which the older Hearth could not read"
        )
    for directory, saved in json.loads((before / "index.json").read_text(encoding="utf-8")).items():
        Path(directory).mkdir(parents=True, exist_ok=True)
        for path in (before / saved).iterdir():
            _put(path, Path(directory) / path.name)
    with (
        closing(sqlite3.connect(before / "registry.db")) as saved_registry,
        closing(sqlite3.connect(data_dir.registry_path)) as registry,
    ):
        saved_registry.backup(registry)
    for path in data_dir.path.glob("chunks/??/*-*-*"):
        path.unlink()
    data_dir.set_version(OLD_VERSION)
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

    @property
    def is_remote(self) -> bool:
        return "://" in self.old.where


def _read(data_dir: DataDir, model: Deployed, on_progress: OnProgress) -> _Change:
    """Find the new description of a model. Raises HearthError if its bytes are not what they were."""
    directory = Path(model.directory)
    old = read_old(directory)
    if old is None:  # a run before this one has come so far
        manifest = read_manifest(directory)
    else:
        address = parse_address(model.where)
        read_chunk = _chunk_reader(data_dir, address.url) if "://" in model.where else None
        notes = _notes(data_dir) / f"{directory.name}-{old.digest}"
        manifest = upgraded(old, notes, read_chunk, _reporter(model.name, on_progress))
    new = replace(model, digest=manifest.digest)
    if "://" in model.where:
        version = RemoteAddress(parse_address(model.where).url, manifest.digest)
        new = replace(new, where=str(version), directory=str(description_directory(data_dir.path, version)))
    return _Change(model, new, manifest)


def _chunk_reader(data_dir: DataDir, url: str) -> ReadChunk:
    """Return a reader of chunks that lie in files of their own, or else at the URL."""
    remote = RemoteModel(url)

    def read(index: int, offset: int, num_bytes: int, xxh3: str) -> bytes:
        with suppress(OSError):
            data = (data_dir.path / "chunks" / xxh3[:2] / xxh3).read_bytes()
            if xxh3_128_hexdigest(data) == xxh3:
                return data
        buffer = bytearray(num_bytes)
        remote.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    return read


def _reporter(name: str, on_progress: OnProgress) -> Callable[[Progress], None]:
    return lambda progress: on_progress(name, progress.done_bytes, progress.total_bytes)


def _save(data_dir: DataDir, registry: Registry, changes: Sequence[_Change]) -> None:
    """Keep what is about to be replaced; once that is done, another run leaves it alone."""
    before = _before(data_dir)
    if (before / "index.json").is_file():
        return
    shutil.rmtree(before, ignore_errors=True)
    before.mkdir(mode=0o700, parents=True)
    index = {}
    for number, change in enumerate(changes):
        directory = Path(change.old.directory)
        index[str(directory)] = str(number)
        (before / str(number)).mkdir(mode=0o700)
        for path in directory.iterdir() if change.is_remote else [directory / "manifest.json"]:
            shutil.copy(path, before / str(number))
    registry.back_up(before / "registry.db")
    write_private(before / "index.json", json.dumps(index))


def _write(data_dir: DataDir, change: _Change) -> None:
    """Put a model's new description where it belongs, and name its cached chunks anew. May be done again."""
    directory = Path(change.old.directory)
    old = read_old(directory)
    if old is None:
        return
    if not change.is_remote:
        _write_manifest(directory, change.manifest)
        return
    target = Path(change.new.directory)
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in change.manifest.files:
        _put(directory / file.name, target / file.name)
    for chunk_id, xxh3 in zip(change.manifest.chunk_ids, old.xxh3, strict=True):
        cached = data_dir.path / "chunks" / xxh3[:2] / xxh3
        link = data_dir.path / "chunks" / chunk_id[:2] / f"{chunk_id}-{xxh3}"
        if cached.is_file() and not link.exists():
            link.parent.mkdir(mode=0o700, exist_ok=True)
            link.hardlink_to(cached)  # the older format finds its own again, should it come back
    write_upstream(target, Upstream(change.manifest.digest))
    write_private(target / "manifest.json", change.manifest.to_json())


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace a manifest at once; whoever could read it still can."""
    path = directory / "manifest.json"
    mode = stat.S_IMODE(path.stat().st_mode)
    write_private(path, manifest.to_json())
    path.chmod(mode)


def _put(source: Path, dest: Path) -> None:
    """Copy a file with its mode, at once or not at all."""
    write_private(dest, source.read_text(encoding="utf-8"))
    dest.chmod(stat.S_IMODE(source.stat().st_mode))


def _notes(data_dir: DataDir) -> Path:
    return data_dir.upgrade_path / "notes"


def _before(data_dir: DataDir) -> Path:
    return data_dir.upgrade_path / "before"
