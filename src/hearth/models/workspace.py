"""Static buffers for all results of a forward pass, as views of one range of bytes.

`core/sizes.py` describes the buffers, sized for the largest step, so that captured graphs see stable
addresses. Models that do not step at the same time may share the bytes: only the counters of split attention
keep state between steps, and they are elsewhere.
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
    embedded: torch.Tensor  #: [tokens, embed]
    residual: torch.Tensor  #: [tokens, hidden], as are the next three
    delta: torch.Tensor
    normed: torch.Tensor
    mlp_out: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor  #: [tokens, heads * head_dim]
    up: torch.Tensor
    activated: torch.Tensor  #: [tokens, intermediate]
    kept_residual: torch.Tensor  #: [samples, hidden]: rows kept after the last attention
    kept_normed: torch.Tensor  #: only for a parallel residual that shares a norm
    kept_attended: torch.Tensor
    head_in: torch.Tensor  #: [samples, embed]
    head_out: torch.Tensor  #: [samples, vocab] in the model's dtype
    logits: torch.Tensor  #: the same in float32
    #: [rows of `add_adapters`, MAX_SHRUNK_RANK]; without rows, idle buffers of the MLP are used
    shrunk: torch.Tensor
    scratch: SplitScratch

    def cut(self, rows: int) -> Workspace:
        names = [f.name for f in fields(self) if f.name not in ("scratch", "shrunk")]
        return replace(self, **{name: getattr(self, name)[:rows] for name in names})

    def product_scratch(self, idle: torch.Tensor) -> ProductScratch:
        numbers = idle.view(-1)
        if numbers.dtype != torch.float32:
            numbers = numbers[: len(numbers) // 2 * 2].view(torch.float32)
        num_processors = max(1, self.scratch.num_programs // PROGRAMS_PER_PROCESSOR)
        return ProductScratch(num_processors, numbers, self.scratch.counters)

    @staticmethod
    def num_bytes(arch: Arch, dtype: torch.dtype, size: StepSize, layers: range | None = None) -> int:
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
        """View `base` (uint8, of `num_bytes`) as the buffers. `counters`: of `counter_buffer`."""
        found = views(workspace_buffers(arch.dimensions, _layers(arch, layers), name_of(dtype), size), base)
        scratch = SplitScratch(size.num_programs, found.pop("partial"), found.pop("stats"), counters)
        return Workspace(**found, scratch=scratch)


def _layers(arch: Arch, layers: range | None) -> range:
    return arch.dimensions.layers if layers is None else layers
