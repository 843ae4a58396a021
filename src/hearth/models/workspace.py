"""Static buffers for everything a forward pass computes, cut from one run of bytes that someone else owns.

Sized once for the largest step, so captured graphs see stable addresses; models that take turns on a
device may share one such run. Only the counters of split attention mean anything between steps, so they
are not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import prod

import torch

from hearth.kernels.decode_attention import SplitScratch
from hearth.models.arch import Arch

_ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step that a workspace must hold."""

    max_tokens: int
    max_samples: int
    num_programs: int  #: of a decode attention launch; see SplitScratch


@dataclass(frozen=True, slots=True)
class Workspace:
    """The buffers of a forward pass."""

    embedded: torch.Tensor  #: [tokens, embed]
    residual: torch.Tensor  #: [tokens, hidden], as are the next three
    delta: torch.Tensor
    normed: torch.Tensor
    mlp_out: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor  #: [tokens, heads * head_dim]
    up: torch.Tensor
    activated: torch.Tensor  #: [tokens, intermediate]
    kept_residual: torch.Tensor  #: [samples, hidden]: rows kept behind the last attention
    kept_normed: torch.Tensor
    kept_attended: torch.Tensor
    head_in: torch.Tensor  #: [samples, embed]
    head_out: torch.Tensor  #: [samples, vocab] in the model's dtype
    logits: torch.Tensor  #: the same in float32
    scratch: SplitScratch

    def cut(self, rows: int) -> Workspace:
        """Return the same buffers, each cut to so many rows, or all that it has."""
        names = [f.name for f in fields(self) if f.name != "scratch"]
        return replace(self, **{name: getattr(self, name)[:rows] for name in names})

    @staticmethod
    def num_bytes(arch: Arch, dtype: torch.dtype, size: StepSize) -> int:
        return sum(_nbytes(shape, kind) for shape, kind in _buffers(arch, dtype, size).values())

    @staticmethod
    def bind(arch: Arch, dtype: torch.dtype, size: StepSize, base: torch.Tensor) -> Workspace:
        """View `base` (uint8, of `num_bytes`) as the buffers."""
        views: dict[str, torch.Tensor] = {}
        offset = 0
        for name, (shape, kind) in _buffers(arch, dtype, size).items():
            views[name] = base[offset : offset + prod(shape) * kind.itemsize].view(kind).view(shape)
            offset += _nbytes(shape, kind)
        counters = torch.zeros(size.max_samples * arch.num_kv_heads, dtype=torch.int32, device=base.device)
        scratch = SplitScratch(size.num_programs, views.pop("partial"), views.pop("stats"), counters)
        return Workspace(**views, scratch=scratch)


def _buffers(
    arch: Arch, dtype: torch.dtype, size: StepSize
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    tokens, samples, hidden = size.max_tokens, size.max_samples, arch.hidden_size
    # More than one split is used only while rows * kv heads * splits stay within num_programs.
    partials = size.num_programs * (arch.num_heads // arch.num_kv_heads)
    return {
        "embedded": ((tokens, arch.embed_size), dtype),
        "residual": ((tokens, hidden), dtype),
        "delta": ((tokens, hidden), dtype),
        "normed": ((tokens, hidden), dtype),
        "mlp_out": ((tokens, hidden), dtype),
        "qkv": ((tokens, arch.qkv_size), dtype),
        "attended": ((tokens, arch.q_size), dtype),
        "up": ((tokens, arch.up_size), dtype),
        "activated": ((tokens, arch.intermediate_size), dtype),
        "kept_residual": ((samples, hidden), dtype),
        "kept_normed": ((samples, hidden), dtype),
        "kept_attended": ((samples, arch.q_size), dtype),
        "head_in": ((samples, arch.embed_size), dtype),
        "head_out": ((samples, arch.vocab_size), dtype),
        "logits": ((samples, arch.vocab_size), torch.float32),
        "partial": ((partials * arch.head_dim,), torch.float32),
        "stats": ((partials * 2,), torch.float32),
    }


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
