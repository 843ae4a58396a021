"""A model's tensors as views of memory that the pool owns. Copies and allocates nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from hearth.kernels.four_bits import FourBitWeight
from hearth.models.arch import Arch, Residual
from hearth.models.dtypes import STORED_DTYPES
from hearth.models.layout import Layout, TensorSpec, is_needed

#: The widest load of a kernel, and the alignment of tensors.
VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class TensorPlace:
    base: torch.Tensor
    offset: int


@dataclass(frozen=True, slots=True)
class Linear:
    weight: torch.Tensor
    scale: torch.Tensor | None  #: of a quantised weight
    bias: torch.Tensor | None
    four_bits: FourBitWeight | None = None  #: weight and scale, if the weight has 4 bits


@dataclass(frozen=True, slots=True)
class NormWeights:
    weight: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attn_norm: NormWeights | None  #: None: attention reads the residual
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    attn_out_norm: torch.Tensor | None
    mlp_norm: NormWeights | None  #: None: the MLP reads the attention's norm, or the residual
    up: Linear
    down: Linear
    mlp_out_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a range of layers; embedding and head are None if the range does not include them."""

    embed: torch.Tensor | None
    embed_scale: torch.Tensor | None  #: per row, of a quantised embedding
    positions: torch.Tensor | None
    embed_in: Linear | None
    layers: tuple[LayerWeights, ...]
    final_norm: NormWeights | None
    embed_out: Linear | None
    head: Linear | None


class WeightGate(Protocol):
    """Weights that are being loaded: a call makes the current stream wait for some, or raises."""

    def is_open(self) -> bool: ...

    def embed(self) -> None: ...

    def layer(self, layer: int) -> None: ...

    def head(self) -> None: ...


def contiguous_places(layout: Layout, base: torch.Tensor) -> dict[str, TensorPlace]:
    return {spec.name: TensorPlace(base, spec.offset) for spec in layout.tensors}


def bind(
    arch: Arch, layout: Layout, places: Mapping[str, TensorPlace], layers: range | None = None
) -> Weights:
    """View the tensors of `layers`, or of all layers; others need no place."""
    layers = range(arch.num_layers) if layers is None else layers
    is_first, is_last = layers.start == 0, layers.stop == arch.num_layers
    has_projections = arch.embed_size != arch.hidden_size
    views = {
        spec.name: _view(spec, places[spec.name])
        for spec in layout.tensors
        if is_needed(spec.name, arch, layers)
    }
    return Weights(
        embed=views.get("embed.weight") if is_first else None,
        embed_scale=views.get("embed.scale") if is_first else None,
        positions=views.get("positions.weight"),
        embed_in=_linear(views, "embed_in") if has_projections and is_first else None,
        layers=tuple(_layer(arch, views, f"layers.{i}.") for i in layers),
        final_norm=_norm(views, "final_norm") if arch.has_final_norm and is_last else None,
        embed_out=_linear(views, "embed_out") if has_projections and is_last else None,
        head=_linear(views, "embed" if arch.tied_head else "head") if is_last else None,
    )


def _layer(arch: Arch, views: Mapping[str, torch.Tensor], prefix: str) -> LayerWeights:
    has_in_norms = arch.residual is not Residual.OUTPUT
    return LayerWeights(
        attn_norm=_norm(views, f"{prefix}attn_norm") if has_in_norms else None,
        qkv=_linear(views, f"{prefix}qkv"),
        q_norm=views.get(f"{prefix}q_norm.weight"),
        k_norm=views.get(f"{prefix}k_norm.weight"),
        o=_linear(views, f"{prefix}o"),
        attn_out_norm=views.get(f"{prefix}attn_out_norm.weight"),
        mlp_norm=_norm(views, f"{prefix}mlp_norm") if has_in_norms and not arch.shares_norm else None,
        up=_linear(views, f"{prefix}up"),
        down=_linear(views, f"{prefix}down"),
        mlp_out_norm=views.get(f"{prefix}mlp_out_norm.weight"),
    )


def _linear(views: Mapping[str, torch.Tensor], name: str) -> Linear:
    weight, scale, bias = views[f"{name}.weight"], views.get(f"{name}.scale"), views.get(f"{name}.bias")
    four_bits = None
    if weight.dtype == torch.int32 and scale is not None:
        four_bits = FourBitWeight(weight, scale, views.get(f"{name}.min"), views.get(f"{name}.codebook"))
    return Linear(weight, scale, bias, four_bits)


def _norm(views: Mapping[str, torch.Tensor], name: str) -> NormWeights:
    return NormWeights(views.get(f"{name}.weight"), views.get(f"{name}.bias"))


def _view(spec: TensorSpec, place: TensorPlace) -> torch.Tensor:
    base, begin, end = place.base, place.offset, place.offset + spec.nbytes
    assert (base.dtype, base.dim()) == (torch.uint8, 1), f"{spec.name}: {base.dtype=} {base.shape=}"
    assert 0 <= begin <= end <= len(base), f"{spec.name}: bytes {begin}:{end} of a base of {len(base)}"
    address = base.data_ptr() + begin
    assert address % VECTOR_BYTES == 0, f"{spec.name}: {address=} is not a multiple of {VECTOR_BYTES}"
    return base[begin:end].view(STORED_DTYPES[spec.dtype]).view(spec.shape)
