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
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hearth.control.datadir import VERSION, DataDir, write_private
from hearth.control.registry import Deployed, Registry
from hearth.errors import DataDirError, HearthError

if TYPE_CHECKING:  # loads torch, which takes seconds
    from hearth.store.manifest import Manifest
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
    with Registry.open(data_dir) as registry:
        models = registry.all()
        manifests, failures = _read_all(data_dir, models, on_progress)
        _save(data_dir, registry, manifests)
        _replace(registry, models, manifests)
    data_dir.set_version(VERSION)
    shutil.rmtree(_notes(data_dir), ignore_errors=True)
    log.info("data_dir_upgraded path=%s models=%d failed=%d", data_dir.path, len(manifests), len(failures))
    return [
        Upgraded(model.name, model.digest, manifests[model.directory].digest)
        if model.directory in manifests
        else Upgraded(model.name, model.digest, None, failures[model.directory])
        for model in models
    ]


def roll_back(data_dir: DataDir) -> None:
    """Undo an upgrade, for the Hearth before. Raises DataDirError where nothing is left to go back to."""
    index = _before(data_dir) / "index.json"
    if not index.is_file():
        raise DataDirError(
            f"`{data_dir.path}` cannot be rolled back: it was not upgraded, or models were deployed or "
            "removed since, which the older Hearth could not read"
        )
    for directory, saved in json.loads(index.read_text(encoding="utf-8")).items():
        _write_manifest(Path(directory), (_before(data_dir) / saved).read_text(encoding="utf-8"))
    with (
        closing(sqlite3.connect(_before(data_dir) / "registry.db")) as saved_registry,
        closing(sqlite3.connect(data_dir.registry_path)) as registry,
    ):
        saved_registry.backup(registry)
    data_dir.set_version(OLD_VERSION)
    data_dir.forget_upgrade()
    log.info("data_dir_rolled_back path=%s version=%d", data_dir.path, OLD_VERSION)


def upgrade_directory(directory: Path, on_progress: OnProgress = lambda *_: None) -> Upgraded | None:
    """Bring one converted model, which need not be deployed, to this format; None if it is already.

    Raises:
        HearthError: its bytes are damaged or gone; then nothing has changed.
    """
    from hearth.store.upgrade import read_old, upgraded

    directory = directory.resolve()
    old = read_old(directory)
    if old is None:
        return None
    notes = directory.with_name(f".{directory.name}.upgrading")
    manifest = upgraded(old, notes, on_progress=_reporter(directory.name, on_progress))
    _write_manifest(directory, manifest.to_json())
    notes.unlink(missing_ok=True)
    return Upgraded(directory.name, old.digest, manifest.digest)


def _read_all(
    data_dir: DataDir, models: list[Deployed], on_progress: OnProgress
) -> tuple[dict[str, Manifest], dict[str, str]]:
    """Return the new manifest of each directory, and why there is none for others."""
    from hearth.store.manifest import digest_of, read_manifest
    from hearth.store.upgrade import read_old, upgraded

    manifests: dict[str, Manifest] = {}
    failures: dict[str, str] = {}
    for model in models:
        directory = Path(model.directory)
        try:
            old = read_old(directory)
            notes = _notes(data_dir) / digest_of(model.directory.encode())[:32]
            manifests[model.directory] = (
                read_manifest(directory)
                if old is None
                else upgraded(old, notes, on_progress=_reporter(model.name, on_progress))
            )
        except HearthError as error:
            log.error("model_not_upgraded model=%s reason=%s", model.name, error)
            failures[model.directory] = str(error)
    return manifests, failures


def _reporter(name: str, on_progress: OnProgress) -> Callable[[Progress], None]:
    return lambda progress: on_progress(name, progress.done_bytes, progress.total_bytes)


def _save(data_dir: DataDir, registry: Registry, manifests: Mapping[str, Manifest]) -> None:
    """Keep what is about to be replaced; once that is done, another run leaves it alone."""
    before = _before(data_dir)
    if (before / "index.json").is_file():
        return
    shutil.rmtree(before, ignore_errors=True)
    before.mkdir(mode=0o700, parents=True)
    index = {}
    for number, directory in enumerate(manifests):
        index[directory] = f"manifest-{number}.json"
        write_private(
            before / index[directory], (Path(directory) / "manifest.json").read_text(encoding="utf-8")
        )
    registry.back_up(before / "registry.db")
    write_private(before / "index.json", json.dumps(index))


def _replace(registry: Registry, models: list[Deployed], manifests: Mapping[str, Manifest]) -> None:
    from hearth.store.upgrade import read_old

    for directory, manifest in manifests.items():
        if read_old(Path(directory)) is not None:
            _write_manifest(Path(directory), manifest.to_json())
    registry.rename_digests(
        {model.digest: manifests[model.directory].digest for model in models if model.directory in manifests}
    )


def _write_manifest(directory: Path, text: str) -> None:
    """Replace a manifest at once; whoever could read it still can."""
    path = directory / "manifest.json"
    mode = path.stat().st_mode
    write_private(path, text)
    path.chmod(stat.S_IMODE(mode))


def _notes(data_dir: DataDir) -> Path:
    return data_dir.upgrade_path / "notes"


def _before(data_dir: DataDir) -> Path:
    return data_dir.upgrade_path / "before"
