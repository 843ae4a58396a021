"""The layout of a model's bytes: each canonical tensor's offset, in forward order.

offset 0                  4 KiB aligned       4 KiB aligned
| embed.weight | padding | layers.0.attn_norm.weight | padding | layers.0.qkv.weight | ...

A weight of 8 bits is followed by its scales, one for each row: `layers.0.qkv.scale`; one of 4 bits by those
of its groups, and by minimums and a codebook if there are any (`kernels/four_bits.py`): `.min`, `.codebook`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hearth.core.errors import DeviceError
from hearth.core.sizes import CODE_CHUNK, CODE_WORDS
from hearth.models.arch import Arch, QkNorm, Residual
from hearth.models.formats import EIGHT_BITS, FourBits, QuantPlan

ALIGNMENT_BYTES = 4096

#: Dtypes of computation.
COMPUTED_DTYPES = ("float32", "float16", "bfloat16")

#: Bytes per element, by stored dtype. Words of 4-bit codes are int32.
STORED_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1, "int32": 4}

#: Kinds of tensors that belong to a quantised weight.
QUANT_KINDS = ("scale", "min", "codebook")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    dtype: str
    shape: Shape
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * STORED_ITEM_BYTES[self.dtype]

    @property
    def end(self) -> int:
        return -(-(self.offset + self.nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class ByteRange:
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    tensors: tuple[TensorSpec, ...]
    num_bytes: int  #: of the whole model
    is_part: bool = False  #: tensors of some layers only, at their offsets in the whole model

    @property
    def own_bytes(self) -> int:
        """Bytes of its tensors, with their padding."""
        return sum(spec.end - spec.offset for spec in self.tensors) if self.is_part else self.num_bytes

    def only(self, arch: Arch, layers: range) -> Layout:
        """Return the tensors that a stage of these layers needs."""
        if len(layers) == arch.num_layers:
            return self
        tensors = tuple(spec for spec in self.tensors if is_needed(spec.name, arch, layers))
        return Layout(tensors, self.num_bytes, is_part=True)


def is_needed(name: str, arch: Arch, layers: range) -> bool:
    """True if a stage of these layers needs the tensor. The first and the last need a tied embedding."""
    part, _, rest = name.partition(".")
    is_first, is_last = layers.start == 0, layers.stop == arch.num_layers
    match part:
        case "layers":
            return int(rest.partition(".")[0]) in layers
        case "embed":
            return is_first or (is_last and arch.tied_head)
        case "positions" | "embed_in":
            return is_first
        case _:
            return is_last


def layout_of(arch: Arch, dtype: str, quant: str = "none") -> Layout:
    if dtype not in COMPUTED_DTYPES:
        raise DeviceError(f"unknown dtype: `{dtype}`; supported: {', '.join(COMPUTED_DTYPES)}")
    specs: list[TensorSpec] = []
    offset = 0
    for name, stored, shape in _stored(arch, dtype, QuantPlan.parse(quant)):
        specs.append(TensorSpec(name, stored, shape, offset))
        offset = specs[-1].end
    return Layout(tuple(specs), num_bytes=offset)


def _stored(arch: Arch, dtype: str, plan: QuantPlan) -> Iterator[tuple[str, str, Shape]]:
    for name, shape in canonical_shapes(arch):
        *path, module, kind = name.split(".")
        layer = int(path[1]) if path else None
        form = plan.format_of(module, layer) if kind == "weight" else None
        prefix = name.removesuffix("weight")
        # Rows of an embedding are looked up, which 4-bit codes are not laid out for.
        groups = form.groups(shape[1]) if isinstance(form, FourBits) and module != "embed" else None
        if isinstance(form, FourBits) and groups is not None:
            yield name, "int32", (-(-shape[1] // CODE_CHUNK), shape[0], CODE_WORDS)
            yield f"{prefix}scale", form.scale, (groups, shape[0])
            if form.minimum is not None:
                yield f"{prefix}min", form.minimum, (groups, shape[0])
            if form.has_codebook:
                yield f"{prefix}codebook", "float32", (16,)
        elif form is not None:  # 8 bits also where 4 cannot be
            yield name, EIGHT_BITS["int8" if isinstance(form, FourBits) else form], shape
            yield f"{prefix}scale", "float32", shape[:1]
        else:
            yield name, "float32" if arch.wide_norms and module.endswith("norm") else dtype, shape


def num_parameters(arch: Arch) -> int:
    return sum(math.prod(shape) for _, shape in canonical_shapes(arch))


def canonical_shapes(arch: Arch) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors as they are without quantisation, in forward order."""
    hidden, embed = arch.hidden_size, arch.embed_size
    yield "embed.weight", (arch.vocab_size, embed)
    if arch.position_offset is not None:
        yield "positions.weight", (arch.max_positions + arch.position_offset, hidden)
    if embed != hidden:
        yield "embed_in.weight", (hidden, embed)
    inner = list(_layer_shapes(arch))
    for layer in range(arch.num_layers):
        for name, shape in inner:
            yield f"layers.{layer}.{name}", shape
    if arch.has_final_norm:
        yield from _norm_shapes(arch, "final_norm")
    if embed != hidden:
        yield "embed_out.weight", (embed, hidden)
    if not arch.tied_head:
        yield "head.weight", (arch.vocab_size, embed)


def _layer_shapes(arch: Arch) -> Iterator[tuple[str, Shape]]:
    sizes = arch.dimensions
    has_in_norms = arch.residual is not Residual.OUTPUT
    has_out_norms = arch.residual in (Residual.OUTPUT, Residual.SANDWICH)
    if has_in_norms:
        yield from _norm_shapes(arch, "attn_norm")
    yield from _linear_shapes("qkv", sizes.qkv_size, arch.hidden_size, has_bias=arch.qkv_bias)
    if arch.qk_norm is not None:
        is_whole = arch.qk_norm is QkNorm.ALL
        yield "q_norm.weight", (sizes.q_size if is_whole else arch.head_dim,)
        yield "k_norm.weight", (sizes.kv_size if is_whole else arch.head_dim,)
    yield from _linear_shapes("o", arch.hidden_size, sizes.q_size, has_bias=arch.o_bias)
    if has_out_norms:
        yield "attn_out_norm.weight", (arch.hidden_size,)
    if has_in_norms and not arch.shares_norm:
        yield from _norm_shapes(arch, "mlp_norm")
    yield from _linear_shapes("up", sizes.up_size, arch.hidden_size, has_bias=arch.mlp_bias)
    yield from _linear_shapes("down", arch.hidden_size, arch.intermediate_size, has_bias=arch.mlp_bias)
    if has_out_norms:
        yield "mlp_out_norm.weight", (arch.hidden_size,)


def _norm_shapes(arch: Arch, name: str) -> Iterator[tuple[str, Shape]]:
    if arch.norm_weight:
        yield f"{name}.weight", (arch.hidden_size,)
    if arch.norm_bias:
        yield f"{name}.bias", (arch.hidden_size,)


def _linear_shapes(name: str, rows: int, columns: int, *, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if has_bias:
        yield f"{name}.bias", (rows,)
