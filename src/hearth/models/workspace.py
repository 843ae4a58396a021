"""Static buffers for everything a forward pass computes, cut from one run of bytes that someone else owns.

`hearth/core/sizes.py` says which buffers there are, sized once for the largest step, so captured graphs see
stable addresses; models that step one after the other may share one such run. Only the counters of split
attention mean anything between steps, so they lie elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from hearth.core.sizes import PROGRAMS_PER_PROCESSOR, StepSize, workspace_buffers, workspace_bytes
from hearth.kernels.decode_attention import SplitScratch
from hearth.kernels.quantized import ProductScratch
from hearth.models.arch import Arch
from hearth.models.buffers import name_of, views


@dataclass(frozen=True, slots=True)
class Workspace:
    """The buffers of a forward pass; one that nothing is written to has no rows."""

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
    kept_normed: torch.Tensor  #: only where attention and MLP run in parallel, and may share a norm
    kept_attended: torch.Tensor
    head_in: torch.Tensor  #: [samples, embed]
    head_out: torch.Tensor  #: [samples, vocab] in the model's dtype
    logits: torch.Tensor  #: the same in float32
    shrunk: torch.Tensor  #: [rows of `add_adapters`, MAX_SHRUNK_RANK]: without rows the MLP's lie idle for it
    scratch: SplitScratch

    def cut(self, rows: int) -> Workspace:
        """Return the same buffers, each cut to so many rows, or all that it has."""
        names = [f.name for f in fields(self) if f.name not in ("scratch", "shrunk")]
        return replace(self, **{name: getattr(self, name)[:rows] for name in names})

    def product_scratch(self, idle: torch.Tensor) -> ProductScratch:
        """Return scratch for products of eight bits in one of the buffers, which nobody needs meanwhile.

        Counters are those of attention, which is not running then.
        """
        numbers = idle.view(-1)
        if numbers.dtype != torch.float32:
            numbers = numbers[: len(numbers) // 2 * 2].view(torch.float32)
        num_processors = max(1, self.scratch.num_programs // PROGRAMS_PER_PROCESSOR)
        return ProductScratch(num_processors, numbers, self.scratch.counters)

    @staticmethod
    def num_bytes(arch: Arch, dtype: torch.dtype, size: StepSize, layers: range | None = None) -> int:
        """The bytes that a workspace for these layers takes; None: for all layers."""
        return workspace_bytes(arch.dimensions, _layers(arch, layers), name_of(dtype), size)

    @staticmethod
    def bind(
        arch: Arch,
        dtype: torch.dtype,
        size: StepSize,
        base: torch.Tensor,
        counters: torch.Tensor,
        layers: range | None = None,
    ) -> Workspace:
        """View `base` (uint8, of `num_bytes`) as the buffers. `counters` are those of `counter_buffer`."""
        found = views(workspace_buffers(arch.dimensions, _layers(arch, layers), name_of(dtype), size), base)
        scratch = SplitScratch(size.num_programs, found.pop("partial"), found.pop("stats"), counters)
        return Workspace(**found, scratch=scratch)


def _layers(arch: Arch, layers: range | None) -> range:
    return arch.dimensions.layers if layers is None else layers
