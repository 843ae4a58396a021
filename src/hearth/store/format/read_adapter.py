"""Reads an adapter whole into memory, one of PEFT or a converted one, for the base that it is to change.

Writes nothing. A service has adapters converted when they are deployed, and loads them by chunks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from hearth.core.errors import BadCheckpoint, ChunkCorrupt
from hearth.core.types import AdapterId
from hearth.models.adapter import AdapterLayout
from hearth.models.adapter_pack import AdapterSource
from hearth.models.dtypes import DTYPES
from hearth.store.format.adapter_manifest import read_adapter_manifest
from hearth.store.format.convert_adapter import AdapterBase
from hearth.store.format.manifest import MANIFEST, WEIGHTS, digest_of, mismatch
from hearth.store.format.peft import open_peft


@dataclass(frozen=True, slots=True)
class AdapterBytes:
    adapter: AdapterId  #: another one for other bytes
    layout: AdapterLayout
    content: bytes


def read_adapter(directory: Path, base: AdapterBase) -> AdapterBytes:
    """Raises UnsupportedModel, BadCheckpoint, and ChunkCorrupt if it was changed since it was converted."""
    if (directory / MANIFEST).is_file():
        return _read_converted(directory, base)
    found = open_peft(directory)
    source = AdapterSource.of(base.arch, found.checkpoint, found.modules, base.dtype)
    content = b"".join(source.pieces())
    digest = digest_of(repr(source.layout).encode() + content)
    return AdapterBytes(AdapterId(digest), source.layout, content)


def _read_converted(directory: Path, base: AdapterBase) -> AdapterBytes:
    manifest = read_adapter_manifest(directory)
    if manifest.dimensions != base.arch.dimensions or base.dtype not in (manifest.dtype, "float32"):
        raise BadCheckpoint(
            f"`{directory}` was converted for a base of other dimensions or another dtype: {manifest.dtype}, "
            f"the model's: {base.dtype}; name the directory that PEFT wrote, or convert that again for this "
            f"model, with `--dtype {base.dtype}`"
        )
    path, parts = directory / WEIGHTS, []
    try:
        with path.open("rb") as file:
            # First, for as many bytes are taken of this machine's memory as the manifest says.
            if (num_bytes := os.fstat(file.fileno()).st_size) != manifest.num_bytes:
                raise BadCheckpoint(
                    f"`{path}` has {num_bytes} bytes, {MANIFEST} says {manifest.num_bytes}; convert it again"
                )
            for number, chunk in enumerate(manifest.chunks):
                parts.append(file.read(chunk.num_bytes))
                if (why := mismatch(parts[-1], chunk.digest)) is not None:
                    raise ChunkCorrupt(f"chunk {number} of `{path}`: {why}; convert it again")
    except OSError as error:
        raise BadCheckpoint(f"`{path}` cannot be read: {error.strerror}; convert it again") from error
    content = b"".join(parts)[: manifest.layout.num_bytes]
    stored = AdapterBytes(AdapterId(manifest.digest), manifest.layout, content)
    return stored if manifest.dtype == base.dtype else _widened(stored)


def _widened(stored: AdapterBytes) -> AdapterBytes:
    """Return an adapter in float32, the dtype that a CPU computes in. The conversion is exact."""
    layout = AdapterLayout.of((place.target for place in stored.layout.places), "float32")
    source, content = bytearray(stored.content), bytearray(layout.num_bytes)
    for narrow, wide in zip(stored.layout.places, layout.places, strict=True):
        begins = zip((narrow.a, *narrow.b), (wide.a, *wide.b), narrow.target.factor_sizes, strict=True)
        for begin, wide_begin, size in begins:
            factor = torch.frombuffer(source, dtype=DTYPES[stored.layout.dtype], count=size, offset=begin)
            torch.frombuffer(content, dtype=torch.float32, count=size, offset=wide_begin).copy_(factor)
    return AdapterBytes(stored.adapter, layout, bytes(content))
