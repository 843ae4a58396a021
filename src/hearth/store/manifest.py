"""The description of a stored model: what it is, where its tensors lie, and the hash of every chunk.

A model is a directory, or a prefix in object storage:

    manifest.json          this description; it is written last, so where it is, the model is whole
    weights.bin            the tensors in forward order, cut into chunks
    tokenizer.json ...     the files of its tokenizer, under the names that `text/` reads

    offset 0            16 MiB              32 MiB                 num_bytes, a multiple of 4 KiB
    | chunk 0            | chunk 1           | ...    | last chunk, shorter  |
    | embed    | layer 0        | layer 1    | ...        | final norm | head |

Chunks know nothing of tensors: a chunk is what is read, hashed and moved. Reads no bytes of weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NewType

import xxhash

from hearth.errors import BadCheckpoint, DeviceError
from hearth.models.arch import Arch
from hearth.models.layout import ALIGNMENT_BYTES, ByteRange, Layout, TensorSpec, layout_of
from hearth.store.schema import decode

MANIFEST = "manifest.json"
WEIGHTS = "weights.bin"
FORMAT = "hearth-model"
VERSION = 1
CHUNK_BYTES = 16 << 20

#: xxh3-128 in hexadecimal. It names the bytes, whoever holds them.
Digest = NewType("Digest", str)


def digest_of(data: bytes | bytearray | memoryview) -> Digest:
    return Digest(xxhash.xxh3_128_hexdigest(data))


@dataclass(frozen=True, slots=True)
class Chunk:
    digest: Digest
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file that lies beside the weights."""

    name: str
    digest: Digest
    num_bytes: int


@dataclass(frozen=True)  # no slots: what is derived is kept
class Manifest:
    format: str
    version: int
    arch: Arch
    dtype: str  #: of the weights that are not quantised, and of what is computed
    quant: str  #: one of models.layout.QUANTS
    num_bytes: int
    chunk_bytes: int
    tensors: tuple[TensorSpec, ...]
    chunks: tuple[Chunk, ...]
    layers: tuple[ByteRange, ...]
    files: tuple[TextFile, ...]  #: of the tokenizer

    @staticmethod
    def of(
        arch: Arch,
        dtype: str,
        quant: str,
        chunks: tuple[Chunk, ...],
        chunk_bytes: int,
        files: Mapping[str, bytes],
    ) -> Manifest:
        layout = layout_of(arch, dtype, quant)
        layers = tuple(layout.layer_range(layer) for layer in range(arch.num_layers))
        return Manifest(
            format=FORMAT,
            version=VERSION,
            arch=arch,
            dtype=dtype,
            quant=quant,
            num_bytes=layout.num_bytes,
            chunk_bytes=chunk_bytes,
            tensors=layout.tensors,
            chunks=chunks,
            layers=layers,
            files=tuple(TextFile(name, digest_of(data), len(data)) for name, data in files.items()),
        )

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.tensors, self.num_bytes)

    @cached_property
    def digest(self) -> Digest:
        """The identity of the model: of everything that this description says, chunk hashes included."""
        return digest_of(self.to_json().encode())

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def chunk_range(self, index: int) -> ByteRange:
        begin = index * self.chunk_bytes
        return ByteRange(begin, begin + self.chunks[index].num_bytes)

    def chunks_of(self, wanted: ByteRange) -> range:
        """Indices of the chunks that hold these bytes."""
        return range(wanted.begin // self.chunk_bytes, -(-wanted.end // self.chunk_bytes))

    def tensors_in(self, chunk: int) -> list[str]:
        """Names of the tensors that have bytes in a chunk."""
        part = self.chunk_range(chunk)
        return [s.name for s in self.tensors if s.offset < part.end and s.offset + s.nbytes > part.begin]


def read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise BadCheckpoint(
            f"no {MANIFEST} in `{directory}`; make a model with `hearth convert SOURCE DEST`"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"`{path}` cannot be read: {error}") from error
    return parse_manifest(text, str(path))


def parse_manifest(text: str, where: str) -> Manifest:
    """Raises BadCheckpoint for JSON that is broken, of another version, or in contradiction to itself."""
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise BadCheckpoint(f"`{where}` is not valid JSON: {error}; convert the model again") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise BadCheckpoint(f"`{where}` does not describe a Hearth model: `format` is not {FORMAT!r}")
    if raw.get("version") != VERSION:
        raise BadCheckpoint(
            f"`{where}` has version {raw.get('version')!r}, this Hearth reads version {VERSION}; "
            "convert the model again, or use the Hearth that wrote it"
        )
    manifest = decode(Manifest, raw, where)
    _check(manifest, where)
    return manifest


def _check(manifest: Manifest, where: str) -> None:
    """Raise at the first contradiction: nothing behind this function asks again."""
    try:
        wanted = layout_of(manifest.arch, manifest.dtype, manifest.quant)
    except DeviceError as error:
        raise BadCheckpoint(f"{where}: {error}") from error
    if (manifest.tensors, manifest.num_bytes) != (wanted.tensors, wanted.num_bytes):
        raise BadCheckpoint(f"{where}: `tensors` are not those of its `arch`; convert the model again")
    if manifest.layers != tuple(wanted.layer_range(i) for i in range(manifest.arch.num_layers)):
        raise BadCheckpoint(f"{where}: `layers` do not fit its `tensors`; convert the model again")
    if manifest.chunk_bytes < ALIGNMENT_BYTES or manifest.chunk_bytes % ALIGNMENT_BYTES:
        raise BadCheckpoint(
            f"{where}: `chunk_bytes` must be a multiple of {ALIGNMENT_BYTES}, given: {manifest.chunk_bytes}"
        )
    for file in manifest.files:
        if Path(file.name).name != file.name or file.name in (MANIFEST, WEIGHTS):
            raise BadCheckpoint(f"{where}: `files` names `{file.name}`, which cannot lie beside the weights")
    full, rest = divmod(manifest.num_bytes, manifest.chunk_bytes)
    sizes = [manifest.chunk_bytes] * full + [rest] * (rest > 0)
    if [chunk.num_bytes for chunk in manifest.chunks] != sizes:
        raise BadCheckpoint(f"{where}: `chunks` do not add up to {manifest.num_bytes} bytes")
