"""The description of a stored adapter: which projections it changes, and the digest of every chunk.

An adapter is a directory, or a prefix in object storage, as a model is (`store/format/manifest.py`):

    manifest.json    this description, of the format "hearth-adapter"
    weights.bin      the factors as `AdapterLayout` lays them out, then zeros up to a multiple of 4 KiB

It knows the dimensions it was made for, not the model, which its deployment names. Reads no bytes of
factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import msgspec

from hearth.core.errors import BadCheckpoint
from hearth.core.model_files import MAX_JSON_BYTES, brief, parse_json, read_text
from hearth.core.sizes import Dimensions
from hearth.models.adapter import (
    MAX_RANK,
    MAX_SLICES,
    AdapterLayout,
    AdapterTarget,
    Projection,
    projection_shape,
)
from hearth.models.arch import MAX_LAYERS
from hearth.models.config_fields import MAX_INTEGER
from hearth.models.layout import ALIGNMENT_BYTES, COMPUTED_DTYPES, ByteRange
from hearth.store.format.dataclass_json import decode
from hearth.store.format.manifest import MANIFEST, Chunk, StoredManifest, check_chunks, take_digest

FORMAT = "hearth-adapter"
VERSION = 2
#: How many layouts are kept. A service has a thousand adapters, most of them made alike.
MAX_PATTERNS = 64


@dataclass(frozen=True)  # no slots: what is derived is kept
class AdapterManifest(StoredManifest):
    family: str  #: of the base that it was made for, as in `Arch`
    dimensions: Dimensions  #: of that base
    targets: tuple[AdapterTarget, ...]  #: in forward order

    @staticmethod
    def of(
        family: str, dimensions: Dimensions, layout: AdapterLayout, chunks: Sequence[Chunk], chunk_bytes: int
    ) -> AdapterManifest:
        return AdapterManifest(
            format=FORMAT,
            version=VERSION,
            dtype=layout.dtype,
            num_bytes=stored_bytes(layout),
            chunk_bytes=chunk_bytes,
            chunks=tuple(chunks),
            files=(),
            family=family,
            dimensions=dimensions,
            targets=tuple(place.target for place in layout.places),
        )

    @cached_property
    def layout(self) -> AdapterLayout:
        return AdapterLayout.of(self.targets, self.dtype)

    @property
    def first_layer(self) -> ByteRange:
        return self.layout.layers[0][1]

    def tensors_in(self, chunk: int) -> list[str]:
        part = self.chunk_range(chunk)
        places = self.layout.places
        ends = [*(place.a for place in places[1:]), self.layout.num_bytes]
        return [
            f"layers.{place.target.layer}.{place.target.projection}"
            for place, end in zip(places, ends, strict=True)
            if place.a < part.end and end > part.begin
        ]


def stored_bytes(layout: AdapterLayout) -> int:
    """Return the bytes of a weights.bin: those of the layout, up to what can be read past the page cache."""
    return -(-layout.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def read_adapter_manifest(directory: Path) -> AdapterManifest:
    path = directory / MANIFEST
    try:
        text = read_text(path, MAX_JSON_BYTES, BadCheckpoint)
    except FileNotFoundError:
        raise BadCheckpoint(
            f"no {MANIFEST} in `{directory}`; deploy an adapter with `hearth deploy SOURCE --base NAME`"
        ) from None
    return adapter_manifest_of(parse_json(text, f"`{path}`", BadCheckpoint), str(path))


def adapter_manifest_of(raw: object, where: str) -> AdapterManifest:
    """Raises BadCheckpoint for a description that is changed, of another version, or contradicts itself."""
    digest = take_digest(raw, FORMAT, VERSION, where)
    manifest = decode(AdapterManifest, raw, where)
    if manifest.dtype not in COMPUTED_DTYPES:
        raise BadCheckpoint(
            f"{where}: `dtype` must be one of {', '.join(COMPUTED_DTYPES)}, given: {brief(manifest.dtype)}"
        )
    _take_layout(manifest, where)
    if manifest.files:
        raise BadCheckpoint(f"{where}: an adapter has no `files`, given: {len(manifest.files)}")
    if manifest.num_bytes != stored_bytes(manifest.layout):
        raise BadCheckpoint(
            f"{where}: `targets` take {stored_bytes(manifest.layout)} bytes, `num_bytes` is "
            f"{brief(manifest.num_bytes)}; deploy the adapter again"
        )
    check_chunks(manifest, where)
    vars(manifest)["digest"] = digest  # where the cached property would put it
    return manifest


def of_adapter(stored: StoredManifest, where: str) -> AdapterManifest:
    """Return the description of what must be an adapter. Raises BadCheckpoint: it is a model."""
    if not isinstance(stored, AdapterManifest):
        raise BadCheckpoint(f"`{where}` is a model and no adapter; deploy it without `--base`")
    return stored


@dataclass(frozen=True, slots=True)
class _Pattern:
    targets: tuple[AdapterTarget, ...]
    layout: AdapterLayout


#: By their description. Single operations of a dict are atomic, so it needs no lock.
_PATTERNS: dict[bytes, _Pattern] = {}


def _take_layout(manifest: AdapterManifest, where: str) -> None:
    """Have a manifest know its layout, once its targets fit its base.

    Adapters made alike share one: checking and laying out takes most of the time of looking one up.
    """
    key = msgspec.json.encode((manifest.dtype, manifest.dimensions, manifest.targets))
    pattern = _PATTERNS.get(key)
    if pattern is None:
        _check_dimensions(manifest.dimensions, where)
        _check_targets(manifest, where)
        if len(_PATTERNS) >= MAX_PATTERNS:
            _PATTERNS.clear()
        pattern = _PATTERNS[key] = _Pattern(manifest.targets, manifest.layout)
    vars(manifest).update(targets=pattern.targets, layout=pattern.layout)  # equal to what it has, or would


# The checks below raise at the first contradiction: nothing behind them asks again.


def _check_dimensions(dimensions: Dimensions, where: str) -> None:
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "intermediate_size"):
        size, most = getattr(dimensions, name), MAX_LAYERS if name == "num_layers" else MAX_INTEGER
        if not 1 <= size <= most:
            raise BadCheckpoint(
                f"{where}: `dimensions.{name}` must be from 1 to {most}, given: {brief(size)}"
            )


def _check_targets(manifest: AdapterManifest, where: str) -> None:
    order = list(Projection)
    places = [(target.layer, order.index(target.projection)) for target in manifest.targets]
    if not places or any(before >= after for before, after in pairwise(places)):
        raise BadCheckpoint(f"{where}: `targets` must be some, each once and in forward order")
    for target in manifest.targets:
        what = f"{where}: the target {target.projection} of layer {brief(target.layer)}"
        if not 0 <= target.layer < manifest.dimensions.num_layers:
            raise BadCheckpoint(f"{what} is of none of {manifest.dimensions.num_layers} layers")
        num_outputs, num_inputs = projection_shape(manifest.dimensions, target.projection)
        if target.num_inputs != num_inputs:
            raise BadCheckpoint(f"{what} must have {num_inputs} inputs, given: {brief(target.num_inputs)}")
        if not 1 <= len(target.slices) <= MAX_SLICES:
            raise BadCheckpoint(f"{what} must have 1 to {MAX_SLICES} slices, given: {len(target.slices)}")
        end = 0
        for part in target.slices:
            if part.begin < end or part.size < 1 or part.begin + part.size > num_outputs:
                raise BadCheckpoint(f"{what} has slices that overlap, or end behind {num_outputs} outputs")
            if not 1 <= part.rank <= MAX_RANK:
                raise BadCheckpoint(f"{what} must have ranks from 1 to {MAX_RANK}, given: {brief(part.rank)}")
            end = part.begin + part.size
