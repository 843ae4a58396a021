"""Packs a checkpoint into canonical tensors: fused, converted, quantised, one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Protocol, TypeAlias, TypeGuard

import torch

from hearth.core.errors import BadCheckpoint
from hearth.models.arch import Arch
from hearth.models.dtypes import DTYPES, STORED_DTYPES
from hearth.models.formats import EIGHT_BITS, LINEARS, Format, FourBits, QuantPlan
from hearth.models.layout import QUANT_KINDS, Layout, Shape, TensorSpec, canonical_shapes
from hearth.models.quantize import (
    FourBitRows,
    Quantized,
    QuantizedTensor,
    Rows,
    quantize,
    quantize_to_four_bits,
)
from hearth.models.tensor_names import NAMES, CheckpointTensor, TensorSource, head_copy, sources_of

#: Rows that are converted at a time: a whole vocabulary in float32 would be large.
SLAB_ROWS = 4096
#: Rows that are quantised to 4 bits at a time, which takes several temporaries.
_FOUR_BIT_ROWS = 1024


class StoredTensor(Protocol):
    @property
    def dtype(self) -> str:
        """One of `DTYPES` to store it as, bfloat16 if it is quantised; else why it cannot be read."""

    @property
    def shape(self) -> Shape: ...

    def read(self) -> torch.Tensor: ...


#: Tensors by transformers' parameter names.
Checkpoint: TypeAlias = Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    spec: TensorSpec
    tensor: torch.Tensor

    def memory(self) -> memoryview:
        return self.tensor.view(torch.uint8).flatten().numpy().data


def pack(checkpoint: Checkpoint, arch: Arch, layout: Layout, out: torch.Tensor) -> None:
    """Write every canonical tensor to its offset in `out`; padding is not written."""
    assert out.dtype == torch.uint8, f"{out.dtype=}"
    assert out.shape == (layout.num_bytes,), f"{out.shape=} {layout.num_bytes=}"
    for packed in iter_tensors(checkpoint, arch, layout):
        begin, nbytes = packed.spec.offset, packed.spec.nbytes
        out[begin : begin + nbytes].copy_(packed.tensor.view(torch.uint8).flatten())


def iter_tensors(checkpoint: Checkpoint, arch: Arch, layout: Layout) -> Iterator[PackedTensor]:
    """Return canonical tensors in the layout's order, made on demand; checks all names and shapes first."""
    shapes = {name: stored.shape for name, stored in checkpoint.items()}
    sources = sources_of(arch, shapes)
    _check_head_copy(checkpoint, head_copy(arch, shapes), sources["embed.weight"].parts[0])
    return _packed(checkpoint, arch, layout, sources)


def _packed(
    checkpoint: Checkpoint, arch: Arch, layout: Layout, sources: Mapping[str, TensorSource]
) -> Iterator[PackedTensor]:
    by_name = {spec.name: spec for spec in layout.tensors}
    for spec in layout.tensors:
        if spec.name.endswith(QUANT_KINDS):
            continue  # follows its weight
        source = sources[spec.name]
        if spec.dtype in DTYPES:
            yield PackedTensor(spec, _stack(spec, _pieces(arch, spec, source, checkpoint)))
            continue
        prefix = spec.name.removesuffix("weight")
        kinds = {kind: by_name[f"{prefix}{kind}"] for kind in QUANT_KINDS if f"{prefix}{kind}" in by_name}
        try:
            if spec.dtype == "int32":
                form = _form_of(kinds, source.shape[1])
                tensors = _four_bit_rows(arch, spec, source, checkpoint, form).stored(form)
            else:
                eight = _eight_bit_rows(arch, spec, source, checkpoint)
                tensors = {"weight": eight.values, "scale": eight.scale}
        except BadCheckpoint as error:
            raise BadCheckpoint(f"`{spec.name}`: {error}") from error
        yield PackedTensor(spec, tensors["weight"])
        for kind, one in kinds.items():
            yield PackedTensor(one, tensors[kind])


def checkpoint_quant(checkpoint: Checkpoint, arch: Arch) -> str:
    """Return the plan by which all weights stay as they are quantised, "none" if none is.

    A fused weight has the format of its parts if that is the same, or else 8 bits.
    """
    if not any(isinstance(stored, QuantizedTensor) for stored in checkpoint.values()):
        return "none"
    sources = sources_of(arch, {name: stored.shape for name, stored in checkpoint.items()})
    formats: dict[tuple[str, int | None], Format] = {}
    for name, _ in canonical_shapes(arch):
        *path, module, kind = name.split(".")
        if kind == "weight" and module in LINEARS | {"embed"}:
            form = _common([checkpoint[part.name] for part in sources[name].parts])
            # The codes of these cannot stay as they are: see `layout_of` and `_row_pieces`.
            is_remade = module == "embed" or sources[name].is_transposed
            form = "int8" if is_remade and form is not None else form
            formats[module, int(path[1]) if path else None] = form
    return QuantPlan.text_of(formats)


def _common(parts: Sequence[StoredTensor]) -> Format:
    forms = [part.form if isinstance(part, QuantizedTensor) else None for part in parts]
    if all(form == forms[0] for form in forms):
        return forms[0]
    return None if None in forms else "int8"


def _form_of(kinds: Mapping[str, TensorSpec], num_inputs: int) -> FourBits:
    scale, minimum = kinds["scale"], kinds.get("min")
    group = num_inputs // scale.shape[0]
    return FourBits(group, scale.dtype, None if minimum is None else minimum.dtype, "codebook" in kinds)


def _has_form(stored: StoredTensor, form: Format, num_inputs: int) -> TypeGuard[QuantizedTensor]:
    if not isinstance(stored, QuantizedTensor):
        return False
    own = stored.form
    if isinstance(own, FourBits) and own.group is None:
        own = replace(own, group=num_inputs)
    return own == form


def _four_bit_rows(
    arch: Arch, spec: TensorSpec, source: TensorSource, checkpoint: Checkpoint, form: FourBits
) -> FourBitRows:
    """Return rows as they are stored where they have this format, others quantised."""
    parts = []
    for rows in _row_pieces(arch, spec, source, checkpoint, form):
        if isinstance(rows, FourBitRows):
            parts.append(rows)
        else:
            slabs = torch.split(rows.wide() if isinstance(rows, Quantized) else rows, _FOUR_BIT_ROWS)
            parts += [quantize_to_four_bits(slab.float(), form) for slab in slabs]
    return FourBitRows.stacked(parts)


def _row_pieces(
    arch: Arch, spec: TensorSpec, source: TensorSource, checkpoint: Checkpoint, form: Format
) -> Iterator[Rows]:
    """Yield the rows of a weight, in order; of parts in another format, as floats."""
    module = spec.name.split(".")[-2]
    for index, part in enumerate(source.parts):
        stored = checkpoint[part.name]
        if not source.is_transposed and _has_form(stored, form, source.shape[1]):
            yield stored.reordered(partial(_reordered, arch, module, index)).load()
        else:
            yield from _part(arch, spec, source, index, checkpoint)


def _reordered(arch: Arch, module: str, index: int, rows: torch.Tensor) -> torch.Tensor:
    pieces = list(in_order(arch, module, index, rows))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def checkpoint_dtype(checkpoint: Checkpoint) -> str:
    counts: Counter[str] = Counter()
    for stored in checkpoint.values():
        counts[stored.dtype] += prod(stored.shape)
    if not counts:
        raise BadCheckpoint("the checkpoint holds no tensors")
    most = counts.most_common(1)[0][0]
    if most not in DTYPES:
        raise BadCheckpoint(f"the checkpoint is stored as {most}; supported: {', '.join(DTYPES)}")
    return most


def _pieces(
    arch: Arch, spec: TensorSpec, source: TensorSource, checkpoint: Checkpoint
) -> Iterator[torch.Tensor]:
    for index in range(len(source.parts)):
        yield from _part(arch, spec, source, index, checkpoint)


def _part(
    arch: Arch, spec: TensorSpec, source: TensorSource, index: int, checkpoint: Checkpoint
) -> Iterator[torch.Tensor]:
    module, kind = spec.name.split(".")[-2:]
    piece = read_tensor(source.parts[index].name, checkpoint)
    if source.is_transposed:
        piece = piece.t()
    if module.endswith("norm") and kind == "weight" and NAMES[arch.family].norm_shift:
        piece = piece.float() + NAMES[arch.family].norm_shift
    yield from in_order(arch, module, index, piece)


def in_order(arch: Arch, module: str, index: int, rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield rows of part `index` of a module, or of a factor that is added to it, in the canonical order."""
    names = NAMES[arch.family]
    if module == "qkv" and names.interleaved_qkv:
        groups = rows.reshape(arch.num_kv_heads, -1, arch.head_dim, *rows.shape[1:])
        for begin, end in ((0, -2), (-2, -1), (-1, None)):
            yield groups[:, begin:end].flatten(0, 2)
    elif module == "qkv" and names.rotates_pairs and index < 2 and arch.ropes:
        dim = arch.ropes[0].dim
        order = torch.arange(arch.head_dim)
        order[:dim] = order[:dim].view(-1, 2).t().flatten()
        yield rows.view(-1, arch.head_dim, *rows.shape[1:])[:, order].flatten(0, 1)
    else:
        yield rows


def _stack(spec: TensorSpec, pieces: Iterator[torch.Tensor]) -> torch.Tensor:
    tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
    begin = 0
    for slab in _slabs(pieces):
        end = begin + len(slab)
        stored = tensor[begin:end].copy_(slab)
        if stored.dtype == torch.float16 and (stored.isinf() & slab.isfinite()).any():
            raise BadCheckpoint(
                f"`{spec.name}` from row {begin} on: float16 holds values up to 65504, found: "
                f"{slab[slab.isfinite()].abs().max():g}; convert to bfloat16 or float32"
            )
        begin = end
    return tensor


def _eight_bit_rows(arch: Arch, spec: TensorSpec, source: TensorSource, checkpoint: Checkpoint) -> Quantized:
    quant = next(quant for quant, stored in EIGHT_BITS.items() if stored == spec.dtype)
    values = torch.empty(spec.shape, dtype=STORED_DTYPES[spec.dtype])
    scale = torch.empty(spec.shape[0])
    begin = 0
    for rows in _row_pieces(arch, spec, source, checkpoint, quant):
        wide = rows.wide() if isinstance(rows, FourBitRows) else rows
        for slab in _slabs(iter([wide])) if isinstance(wide, torch.Tensor) else [wide]:
            try:
                quantized = slab if isinstance(slab, Quantized) else quantize(slab.float(), quant)
            except BadCheckpoint as error:
                raise BadCheckpoint(f"from row {begin} on: {error}") from error
            end = begin + len(quantized.scale)
            values[begin:end], scale[begin:end] = quantized.values, quantized.scale
            begin = end
    return Quantized(values, scale)


def _slabs(pieces: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (slab for piece in pieces for slab in torch.split(piece, SLAB_ROWS))


def read_tensor(name: str, checkpoint: Checkpoint) -> torch.Tensor:
    stored = checkpoint[name]
    if stored.dtype not in DTYPES:
        raise BadCheckpoint(f"`{name}` is stored as {stored.dtype}; supported: {', '.join(DTYPES)}")
    return stored.read()


def find_tensor(checkpoint: Checkpoint, name: str, shape: Shape, *dtypes: str) -> StoredTensor:
    """Return a tensor. Raises BadCheckpoint unless it has this shape and one of these dtypes."""
    stored = checkpoint.get(name)
    if stored is None:
        raise BadCheckpoint(f"the checkpoint has no `{name}`; fetch it again")
    if stored.shape != shape or stored.dtype not in dtypes:
        raise BadCheckpoint(
            f"`{name}` must be {list(shape)} of {' or '.join(dtypes)}, "
            f"given: {list(stored.shape)} of {stored.dtype}"
        )
    return stored


def find_matrix(checkpoint: Checkpoint, name: str, dtype: str) -> StoredTensor:
    """Return a matrix of any shape. Raises as `find_tensor`."""
    stored = checkpoint[name]
    if len(stored.shape) != 2:
        raise BadCheckpoint(f"`{name}` must be a matrix, given: {list(stored.shape)}")
    return find_tensor(checkpoint, name, stored.shape, dtype)


def _check_head_copy(checkpoint: Checkpoint, head: str | None, embed: CheckpointTensor) -> None:
    if head is not None and not torch.equal(
        read_tensor(head, checkpoint), read_tensor(embed.name, checkpoint)
    ):
        raise BadCheckpoint(
            f"`{head}` differs from `{embed.name}`, but config.json ties them; "
            "set `tie_word_embeddings` to false in config.json"
        )
