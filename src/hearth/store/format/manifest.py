"""The description of a stored model: what it is, where its tensors lie, and the digest of every chunk.

A model is a directory, or a prefix in object storage:

    manifest.json          this description; it is written last, so where it is, the model is whole
    weights.bin            the tensors in forward order, cut into chunks
    tokenizer.json ...     the files of its tokenizer, under the names that `text/` reads

    offset 0            16 MiB              32 MiB                 num_bytes, a multiple of 4 KiB
    | chunk 0            | chunk 1           | ...    | last chunk, shorter  |
    | embed    | layer 0        | layer 1    | ...        | final norm | head |

Chunks know nothing of tensors: a chunk is what is read, hashed and moved. A digest is BLAKE3, which cannot
be forged: bytes that have it are the bytes that were stored, wherever they come from. The last field,
`digest`, is that of all the others; it names the model. Reads no bytes of weights.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from blake3 import blake3

from hearth.core.errors import BadCheckpoint, ChunkCorrupt, DeviceError
from hearth.core.model_files import (
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    brief,
    parse_json,
    read_bytes,
    read_text,
)
from hearth.core.types import ChunkId, Digest
from hearth.models.arch import MAX_LAYERS, Arch, Llama3Scaling, LongRope, Rope, YarnScaling
from hearth.models.config_fields import MAX_INTEGER, MAX_NUMBER, MIN_NUMBER
from hearth.models.layout import ALIGNMENT_BYTES, ByteRange, Layout, TensorSpec, layout_of, num_parameters
from hearth.store.format.dataclass_json import decode

MANIFEST = "manifest.json"
WEIGHTS = "weights.bin"
FORMAT = "hearth-model"
VERSION = 3
CHUNK_BYTES = 16 << 20
TOKENIZER = "tokenizer.json"
TEXT_FILES = frozenset(
    {
        TOKENIZER,
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "chat_template.jinja",
    }
)
MAX_CHUNK_BYTES = 1 << 30


def digest_of(data: bytes | bytearray | memoryview, *, on_all_cores: bool = False) -> Digest:
    """Return what names the bytes. `on_all_cores`: for one who has no other work for them meanwhile."""
    return Digest(blake3(data, max_threads=blake3.AUTO if on_all_cores else 1).hexdigest())


def mismatch(data: bytes | bytearray, wanted: Digest) -> str | None:
    found = digest_of(data)
    return None if found == wanted else f"its hash is {found}, the manifest says {wanted}"


@dataclass(frozen=True, slots=True)
class Chunk:
    digest: Digest
    num_bytes: int

    @property
    def id(self) -> ChunkId:
        return ChunkId(f"{self.digest}-{self.num_bytes}")


def chunk_of(data: bytes | bytearray | memoryview, *, on_all_cores: bool = False) -> Chunk:
    return Chunk(digest_of(data, on_all_cores=on_all_cores), memoryview(data).nbytes)


@dataclass(frozen=True, slots=True)
class TextFile:
    name: str
    digest: Digest
    num_bytes: int


@dataclass(frozen=True)  # no slots: what is derived is kept
class StoredManifest(ABC):
    """The description of a model or an adapter as far as those need it who move chunks."""

    format: str
    version: int
    dtype: str  #: of weights that are not quantised, and of activations
    num_bytes: int
    chunk_bytes: int
    chunks: tuple[Chunk, ...]
    files: tuple[TextFile, ...]  #: of the tokenizer

    @property
    @abstractmethod
    def first_layer(self) -> ByteRange:
        """The byte range of the lowest-numbered layer."""

    @abstractmethod
    def tensors_in(self, chunk: int) -> list[str]:
        """Return the names of the tensors that have bytes in a chunk."""

    @cached_property
    def digest(self) -> Digest:
        """The identity of what is stored: a hash of all that its description says, chunk hashes included."""
        return _digest_of_fields(_fields(self))

    @cached_property
    def chunk_ids(self) -> tuple[ChunkId, ...]:
        return tuple(chunk.id for chunk in self.chunks)

    def to_json(self) -> str:
        return json.dumps({**_fields(self), "digest": self.digest}, default=_fields, indent=1)

    def chunk_range(self, index: int) -> ByteRange:
        begin = index * self.chunk_bytes
        return ByteRange(begin, begin + self.chunks[index].num_bytes)

    def chunks_of(self, wanted: ByteRange) -> range:
        return range(wanted.begin // self.chunk_bytes, -(-wanted.end // self.chunk_bytes))


@dataclass(frozen=True)
class Manifest(StoredManifest):
    arch: Arch
    quant: str  #: a plan of models/formats.py
    tensors: tuple[TensorSpec, ...]
    layers: tuple[ByteRange, ...]

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
            layers=_layer_ranges(layout),
            files=tuple(TextFile(name, digest_of(data), len(data)) for name, data in files.items()),
        )

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.tensors, self.num_bytes)

    @property
    def first_layer(self) -> ByteRange:
        return self.layers[0]

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.arch)

    def tensors_in(self, chunk: int) -> list[str]:
        part = self.chunk_range(chunk)
        return [s.name for s in self.tensors if s.offset < part.end and s.offset + s.nbytes > part.begin]


def read_manifest(directory: Path) -> Manifest:
    return parse_manifest(read_manifest_text(directory), str(directory / MANIFEST))


def read_manifest_text(directory: Path) -> str:
    """Return manifest.json as it is, of a model or an adapter. Raises BadCheckpoint where there is none."""
    try:
        return read_text(directory / MANIFEST, MAX_JSON_BYTES, BadCheckpoint)
    except FileNotFoundError:
        raise BadCheckpoint(
            f"no {MANIFEST} in `{directory}`; convert or deploy it again: `hearth convert`, `hearth deploy`"
        ) from None


def parse_manifest(text: str, where: str) -> Manifest:
    return manifest_of(parse_json(text, f"`{where}`", BadCheckpoint), where)


def manifest_of(raw: object, where: str) -> Manifest:
    """Raises BadCheckpoint for a description that is changed, of another version, or contradicts itself."""
    digest = take_digest(raw, FORMAT, VERSION, where)
    manifest = decode(Manifest, raw, where)
    _check_arch(manifest.arch, where)
    _check_layout(manifest, where)
    check_chunks(manifest, where)
    vars(manifest)["digest"] = digest  # where the cached property would put it, milliseconds later
    return manifest


def of_model(stored: StoredManifest, where: str) -> Manifest:
    """Return the description of what must be a model. Raises BadCheckpoint: it is an adapter."""
    if not isinstance(stored, Manifest):
        raise BadCheckpoint(
            f"`{where}` is an adapter and no model; serve it beside its base: "
            f"`hearth deploy {where} --base NAME`"
        )
    return stored


def damage_of(file: TextFile, directory: Path) -> str | None:
    try:
        data = read_bytes(directory / file.name, file.num_bytes, BadCheckpoint)
    except FileNotFoundError as error:
        return f"cannot be read: {error.strerror}"
    except BadCheckpoint as error:
        return f"cannot be read: {error}"
    return mismatch(data, file.digest)


def check_texts(manifest: StoredManifest, directory: Path) -> None:
    """Check all files that a tokenizer would be made of. Raises ChunkCorrupt for a changed or added one."""
    for file in manifest.files:
        if damage := damage_of(file, directory):
            raise ChunkCorrupt(f"`{directory / file.name}` {damage}; convert or fetch the model again")
    for name in sorted(TEXT_FILES - {file.name for file in manifest.files}):
        if (directory / name).exists():
            raise ChunkCorrupt(
                f"`{directory / name}` is not part of the model, which was stored without; move it away, or "
                "convert the model again"
            )


def _fields(item: object) -> dict[str, object]:
    """Return a dataclass's fields for JSON; unlike `asdict` this copies nothing, of which there is much."""
    assert is_dataclass(item), f"{item!r} has no place in a manifest"
    return {field.name: getattr(item, field.name) for field in fields(item)}


def _digest_of_fields(content: Mapping[str, object]) -> Digest:
    return digest_of(json.dumps(content, default=_fields, sort_keys=True, separators=(",", ":")).encode())


def _layer_ranges(layout: Layout) -> tuple[ByteRange, ...]:
    """Return the bytes of each layer with padding; successive ranges are adjacent."""
    inner = (spec for spec in layout.tensors if spec.name.startswith("layers."))
    groups = (list(specs) for _, specs in groupby(inner, lambda spec: spec.name.split(".")[1]))
    return tuple(ByteRange(specs[0].offset, specs[-1].end) for specs in groups)


def take_digest(raw: object, wanted: str, version: int, where: str) -> Digest:
    """Take `digest` out of the fields of a description of the wanted format, and compare it with them."""
    if not isinstance(raw, dict) or raw.get("format") != wanted:
        kind = wanted.replace("hearth-", "Hearth ")
        raise BadCheckpoint(f"`{where}` does not describe a {kind}: `format` is not {wanted!r}")
    if raw.get("version") != version:
        raise BadCheckpoint(
            f"`{where}` has format version {brief(raw.get('version'))}, this Hearth supports version "
            f"{version} only; convert or deploy the model again from its source"
        )
    stated, found = raw.pop("digest", None), _digest_of_fields(raw)
    if stated != found:
        raise BadCheckpoint(
            f"`{where}` is damaged or was changed by hand: it hashes to {found}, its `digest` is "
            f"{brief(stated)}; convert the model again"
        )
    return found


# The checks below raise at the first contradiction: nothing behind them asks again.


def _check_arch(arch: Arch, where: str) -> None:
    sizes = {
        "num_layers": arch.num_layers,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "embed_size": arch.embed_size,
        "num_heads": arch.num_heads,
        "num_kv_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.intermediate_size,
        "max_positions": arch.max_positions,
    }
    for name, size in sizes.items():
        most = MAX_LAYERS if name == "num_layers" else MAX_INTEGER
        if size < 1:
            raise BadCheckpoint(f"{where}: `arch.{name}` must be at least 1, given: {brief(size)}")
        if size > most:
            raise BadCheckpoint(f"{where}: `arch.{name}` must be at most {most}, given: {brief(size)}")
    _check_numbers(arch, f"{where}: `arch")
    if arch.num_heads % arch.num_kv_heads:
        raise BadCheckpoint(
            f"{where}: `arch.num_heads` must be a multiple of its {arch.num_kv_heads} `num_kv_heads`, "
            f"given: {arch.num_heads}"
        )
    if len(arch.windows) != arch.num_layers or any(w is not None and w < 1 for w in arch.windows):
        raise BadCheckpoint(
            f"{where}: `arch.windows` must be {arch.num_layers} numbers of at least 1 or null, one per layer"
        )
    if arch.position_offset is not None and arch.position_offset < 0:
        raise BadCheckpoint(
            f"{where}: `arch.position_offset` must be at least 0, given: {arch.position_offset}"
        )
    for rope in arch.ropes:
        if rope.dim % 2 or not 0 < rope.dim <= arch.head_dim or rope.dim != arch.ropes[0].dim:
            raise BadCheckpoint(
                f"{where}: `arch.ropes` must share one even `dim` of at most {arch.head_dim}, "
                f"given: {rope.dim}"
            )
        _check_scaling(rope, where)
    known = {None, *range(len(arch.ropes))}
    if len(arch.layer_ropes) != arch.num_layers or not known.issuperset(arch.layer_ropes):
        raise BadCheckpoint(
            f"{where}: `arch.layer_ropes` must be {arch.num_layers} indices of `arch.ropes` or null, one per "
            "layer"
        )


def _check_scaling(rope: Rope, where: str) -> None:
    scalings: tuple[Llama3Scaling | YarnScaling | LongRope | None, ...]
    scalings = (rope.llama3, rope.yarn, rope.longrope)
    for scaling in scalings:
        if scaling is not None and not 1 <= scaling.original_max_positions <= MAX_INTEGER:
            raise BadCheckpoint(
                f"{where}: `arch.ropes` must have `original_max_positions` from 1 to {MAX_INTEGER}, "
                f"given: {brief(scaling.original_max_positions)}"
            )
    if rope.yarn is not None and rope.theta <= 1.0:
        raise BadCheckpoint(
            f"{where}: `arch.ropes` with `yarn` must have a `theta` above 1.0, given: {rope.theta}"
        )
    if (long := rope.longrope) is not None and {len(long.short), len(long.long)} != {rope.dim // 2}:
        raise BadCheckpoint(
            f"{where}: `arch.ropes` must have {rope.dim // 2} divisors in `short` and in `long` of "
            f"`longrope`, given: {len(long.short)} and {len(long.long)}"
        )


def _check_numbers(item: object, where: str) -> None:
    """Check that all floats in a description are positive, and within float32."""
    if isinstance(item, float) and not MIN_NUMBER <= item <= MAX_NUMBER:
        raise BadCheckpoint(
            f"{where}` must be a number from {MIN_NUMBER:g} to {MAX_NUMBER:g}, given: {brief(item)}"
        )
    if isinstance(item, tuple):
        for index, part in enumerate(item):
            _check_numbers(part, f"{where}[{index}]")
    elif is_dataclass(item):
        for field in fields(item):
            _check_numbers(getattr(item, field.name), f"{where}.{field.name}")


def _check_layout(manifest: Manifest, where: str) -> None:
    try:
        wanted = layout_of(manifest.arch, manifest.dtype, manifest.quant)
    except DeviceError as error:
        raise BadCheckpoint(f"{where}: {error}") from error
    if (manifest.tensors, manifest.num_bytes) != (wanted.tensors, wanted.num_bytes):
        raise BadCheckpoint(f"{where}: `tensors` are not those of its `arch`; convert the model again")
    if manifest.layers != _layer_ranges(wanted):
        raise BadCheckpoint(f"{where}: `layers` do not fit its `tensors`; convert the model again")


def check_chunks(manifest: StoredManifest, where: str) -> None:
    if not 0 < manifest.chunk_bytes <= MAX_CHUNK_BYTES or manifest.chunk_bytes % ALIGNMENT_BYTES:
        raise BadCheckpoint(
            f"{where}: `chunk_bytes` must be a multiple of {ALIGNMENT_BYTES}, given: {manifest.chunk_bytes}, "
            f"and at most {MAX_CHUNK_BYTES}"
        )
    *full, last = [chunk.num_bytes for chunk in manifest.chunks] or [0]
    is_cut_evenly = all(num_bytes == manifest.chunk_bytes for num_bytes in full)
    if not is_cut_evenly or not 0 < last <= manifest.chunk_bytes or sum(full) + last != manifest.num_bytes:
        raise BadCheckpoint(f"{where}: `chunks` do not add up to {manifest.num_bytes} bytes")
    for digest in [*(chunk.digest for chunk in manifest.chunks), *(file.digest for file in manifest.files)]:
        if re.fullmatch("[0-9a-f]{64}", digest) is None:
            raise BadCheckpoint(f"{where}: a digest is 64 hexadecimal digits, given: {digest!r:.80}")
    taken = {"", ".", "..", MANIFEST, WEIGHTS}
    for file in manifest.files:
        if file.name in taken or "/" in file.name or not file.name.isprintable() or len(file.name) > 255:
            raise BadCheckpoint(
                f"{where}: `files` names {file.name!r:.80}, which cannot lie beside the weights, or twice"
            )
        taken.add(file.name)
        if not 0 <= file.num_bytes <= MAX_TOKENIZER_BYTES:
            raise BadCheckpoint(
                f"{where}: `{file.name}` must have up to {MAX_TOKENIZER_BYTES} bytes, "
                f"given: {brief(file.num_bytes)}"
            )
