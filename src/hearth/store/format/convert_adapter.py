"""Converts an adapter of PEFT to a directory that loads by copying, as `convert.py` does a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hearth.models.adapter_pack import AdapterSource
from hearth.models.arch import Arch
from hearth.models.pack import checkpoint_dtype
from hearth.store.format.adapter_manifest import AdapterManifest, stored_bytes
from hearth.store.format.convert import open_source
from hearth.store.format.file_stamp import stamp_of
from hearth.store.format.local_hashes import write_hashes
from hearth.store.format.manifest import CHUNK_BYTES, MANIFEST, WEIGHTS, read_manifest
from hearth.store.format.peft import PeftAdapter
from hearth.store.format.writer import OnProgress, staged


@dataclass(frozen=True, slots=True)
class AdapterBase:
    arch: Arch
    dtype: str  #: that it is computed in


def read_base(path: Path) -> AdapterBase:
    """Return what an adapter needs to know of a model, converted or not. Raises ModelError."""
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        return AdapterBase(manifest.arch, manifest.dtype)
    with open_source(path) as source:
        return AdapterBase(source.arch, checkpoint_dtype(source.checkpoint))


def convert_adapter(
    adapter: PeftAdapter,
    dest: Path,
    base: AdapterBase,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
    store: Path | None = None,
) -> AdapterManifest:
    """Write an adapter for a base to `dest`, whole or not at all. `store` is as in `convert`."""
    arch = base.arch
    source = AdapterSource.of(arch, adapter.checkpoint, adapter.modules, base.dtype)
    num_bytes = stored_bytes(source.layout)
    with staged(dest, num_bytes, overwrite=overwrite) as staging:
        written = staging.write_pieces(_padded(source, num_bytes), num_bytes, chunk_bytes, on_progress)
        manifest = AdapterManifest.of(
            arch.family, arch.dimensions, source.layout, written.chunks, chunk_bytes
        )
        staging.write_file(MANIFEST, manifest.to_json().encode())
    dest = dest.resolve()
    if store is not None and (stamp := stamp_of(dest / WEIGHTS)) is not None:
        write_hashes(store.resolve(), dest, manifest, stamp, written.xxh3)
    return manifest


def _padded(source: AdapterSource, num_bytes: int) -> Iterator[memoryview]:
    yield from source.pieces()
    yield memoryview(bytes(num_bytes - source.layout.num_bytes))
