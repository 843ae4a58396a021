"""Reads an adapter whole into memory, one of PEFT or a converted one, for the base that it is to change.

Writes nothing. A service has adapters converted when they are deployed, and loads them by chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hearth.errors import BadCheckpoint, ChunkCorrupt
from hearth.models.adapter import AdapterLayout
from hearth.models.adapter_pack import AdapterSource
from hearth.store.adapter_manifest import read_adapter_manifest
from hearth.store.convert_adapter import AdapterBase
from hearth.store.manifest import MANIFEST, WEIGHTS, digest_of, mismatch
from hearth.store.peft import open_peft
from hearth.types import AdapterId


@dataclass(frozen=True, slots=True)
class AdapterBytes:
    """An adapter in memory, as its base computes with it."""

    adapter: AdapterId  #: another one for other bytes
    layout: AdapterLayout
    content: bytes


def read_adapter(directory: Path, base: AdapterBase) -> AdapterBytes:
    """Read an adapter.

    Raises:
        UnsupportedModel: it is of a kind that cannot be served.
        BadCheckpoint: its files are missing or broken, or it does not fit the base.
        ChunkCorrupt: it was changed since it was converted.
    """
    if (directory / MANIFEST).is_file():
        return _read_converted(directory, base)
    found = open_peft(directory)
    source = AdapterSource.of(base.arch, found.checkpoint, found.modules, base.dtype)
    content = b"".join(source.pieces())
    digest = digest_of(repr(source.layout).encode() + content)
    return AdapterBytes(AdapterId(digest), source.layout, content)


def _read_converted(directory: Path, base: AdapterBase) -> AdapterBytes:
    manifest = read_adapter_manifest(directory)
    if (manifest.dimensions, manifest.dtype) != (base.arch.dimensions, base.dtype):
        raise BadCheckpoint(
            f"`{directory}` was converted for a base of other dimensions or another dtype: {manifest.dtype}, "
            f"the model's: {base.dtype}; name the directory that PEFT wrote, or convert that again for this "
            f"model, with `--dtype {base.dtype}`"
        )
    parts = []
    with (directory / WEIGHTS).open("rb") as file:
        for number, chunk in enumerate(manifest.chunks):
            parts.append(file.read(chunk.num_bytes))
            if (why := mismatch(parts[-1], chunk.digest)) is not None:
                raise ChunkCorrupt(f"chunk {number} of `{directory / WEIGHTS}`: {why}; convert it again")
    content = b"".join(parts)[: manifest.layout.num_bytes]
    return AdapterBytes(AdapterId(manifest.digest), manifest.layout, content)
