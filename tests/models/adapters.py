"""Random LoRA adapters of the zoo's models, as an engine takes them and as transformers has them.

Factors are drawn for modules of transformers, whose weights are then changed by plain addition: that is the
reference. For the engine the same factors are put behind each other as `AdapterLayout` says.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from hearth.core.sizes import target_fields
from hearth.core.types import AdapterId
from hearth.kernels.adapter_rows import TargetFactors
from hearth.models.adapter import AdapterLayout, AdapterSlice, AdapterTarget, Projection
from hearth.models.arch import Arch
from hearth.models.buffers import name_of
from hearth.models.families import read_arch
from hearth.models.pack import in_order
from hearth.models.tensor_names import NAMES
from tests.models.zoo import build

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Which modules an adapter has, by part of their names; their ranks go round.
KINDS: Mapping[str, tuple[Sequence[str], Sequence[int]]] = {
    "all": ([""], [4]),
    "attention": (["q_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "self_attn.o"], [3, 8, 1]),
    "mlp": (["mlp", "fc1", "fc2", "dense_h", "dense_4h"], [5, 16]),
}


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one module of transformers, with its scale in the second."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True)
class RandomAdapter:
    adapter: AdapterId
    arch: Arch
    factors: Mapping[str, Factors]  #: by module
    model: PreTrainedModel  #: as it is with the adapter

    def layout(self, dtype: torch.dtype = torch.float32) -> AdapterLayout:
        return AdapterLayout.of([target for target, *_ in self._targets()], name_of(dtype))

    def pieces(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> list[torch.Tensor]:
        """The bytes of each layer, each by itself, with garbage where no factor lies."""
        layout = self.layout(dtype)
        whole = torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8)
        for place, (_, a, parts) in zip(layout.places, self._targets(), strict=True):
            rows = [torch.full((one.rank, one.row_size), math.nan) for one in place.target.slices]
            for row, b in zip(rows, parts, strict=True):
                row[:, : len(b)] = b.t()
            for offset, factor in zip((place.a, *place.b), (a, *rows), strict=True):
                stored = factor.to(dtype).contiguous().view(-1).view(torch.uint8)
                whole[offset : offset + len(stored)] = stored
        return [whole[stored.begin : stored.end].clone().to(device) for _, stored in layout.layers]

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocab] of one uncached pass through transformers."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0]
        return logits

    def _targets(self) -> list[tuple[AdapterTarget, torch.Tensor, list[torch.Tensor]]]:
        found = []
        names, sizes = NAMES[self.arch.family], self.arch.dimensions
        for layer in range(self.arch.num_layers):
            for projection in Projection:
                modules = names.modules[projection.value]
                begins = {3: [0, sizes.q_size, sizes.q_size + sizes.kv_size], 2: [0, sizes.intermediate_size]}
                slices, firsts, seconds = [], [], []
                for i, (template, begin) in enumerate(
                    zip(modules, begins.get(len(modules), [0]), strict=True)
                ):
                    if (one := self._of(template.format(i=layer))) is not None:
                        b = torch.cat(list(in_order(self.arch, projection, i, one.b)))
                        slices.append(AdapterSlice(begin, len(b), b.shape[1]))
                        firsts.append(one.a)
                        seconds.append(b)
                if slices:
                    target = AdapterTarget(layer, projection, firsts[0].shape[1], tuple(slices))
                    found.append((target, torch.cat(firsts), seconds))
        return found

    def _of(self, module: str) -> Factors | None:
        return next((one for name, one in self.factors.items() if name.endswith(f".{module}")), None)


def fields_of(factors: TargetFactors) -> list[int]:
    """Return the numbers by which kernels find factors that are tensors."""
    slices = [(one.b.data_ptr(), len(one.b), one.begin, one.b.shape[1]) for one in factors.slices]
    return target_fields(factors.a.data_ptr(), slices)


@cache
def random_adapter(name: str, kind: str, seed: int = 0) -> RandomAdapter:
    """The same in every process. Do not change it."""
    from transformers.pytorch_utils import Conv1D

    base, directory = build(name)
    model = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(seed + sum(map(ord, kind)))
    wanted, ranks = KINDS[kind]
    factors: dict[str, Factors] = {}
    for path, module in model.named_modules():
        is_layer = any(part.isdigit() for part in path.split("."))
        kinds = (torch.nn.Linear, Conv1D)
        if isinstance(module, kinds) and is_layer and any(part in path for part in wanted):
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            rank, (outputs, inputs) = ranks[len(factors) % len(ranks)], weight.shape
            a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, rank, generator=generator) * 0.5
            factors[path] = Factors(a, b)
            with torch.no_grad():
                weight.add_(b @ a)
    return RandomAdapter(AdapterId(f"{name}/{kind}/{seed}"), read_arch(directory), factors, model)
