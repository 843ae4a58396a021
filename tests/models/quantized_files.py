"""Writes random weights as GPTQ, AWQ and compressed-tensors checkpoints do, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

Tensors: TypeAlias = dict[str, torch.Tensor]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Codes:
    codes: torch.Tensor  #: [outputs, inputs], 0 to 15
    scale: torch.Tensor  #: [outputs, groups]
    zeros: torch.Tensor  #: the same

    @staticmethod
    def random(outputs: int, inputs: int, groups: int, dtype: torch.dtype, *, is_symmetric: bool) -> Codes:
        shape = (outputs, groups)
        # GPTQ stores one less than a zero, so it has none of 0; its 16 fits there, and nowhere else.
        zeros = torch.full(shape, 8) if is_symmetric else torch.randint(1, 16, shape)
        scale = (0.01 + 0.05 * torch.rand(shape)).to(dtype)
        return Codes(torch.randint(16, (outputs, inputs)), scale, zeros)

    def weight(self) -> torch.Tensor:
        group = self.codes.shape[1] // self.scale.shape[1]
        scale, zeros = (one.repeat_interleave(group, 1) for one in (self.scale.float(), self.zeros))
        return (self.codes - zeros).float() * scale


def words(values: torch.Tensor, axis: int, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Put eight values along the axis into a word, in this order from its lowest bits."""
    if axis == 0:
        return words(values.t(), 1, order).t().contiguous()
    rows = torch.nn.functional.pad(values, (0, -values.shape[1] % 8)).tolist()
    packed = [
        [sum(row[at + code] << 4 * place for place, code in enumerate(order)) for at in range(0, len(row), 8)]
        for row in rows
    ]
    return torch.tensor(packed).to(torch.int32)


def gptq(module: str, one: Codes, *, is_v2: bool = False) -> Tensors:
    group = one.codes.shape[1] // one.scale.shape[1]
    return {
        f"{module}.qweight": words(one.codes.t(), 0),
        f"{module}.qzeros": words(one.zeros.t() - (0 if is_v2 else 1), 1),
        f"{module}.scales": one.scale.t().contiguous(),
        f"{module}.g_idx": (torch.arange(one.codes.shape[1]) // group).int(),
    }


def awq(module: str, one: Codes) -> Tensors:
    return {
        f"{module}.qweight": words(one.codes.t(), 1, AWQ_ORDER),
        f"{module}.qzeros": words(one.zeros.t(), 1, AWQ_ORDER),
        f"{module}.scales": one.scale.t().contiguous(),
    }


def compressed(module: str, one: Codes, *, is_symmetric: bool) -> Tensors:
    zeros = {} if is_symmetric else {f"{module}.weight_zero_point": words(one.zeros, 0)}
    return {
        f"{module}.weight_packed": words(one.codes, 1),
        f"{module}.weight_scale": one.scale,
        f"{module}.weight_shape": torch.tensor(one.codes.shape),
        **zeros,
    }


def compressed_config(**weights: object) -> Mapping[str, object]:
    usual = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": usual | weights}},
        "ignore": ["lm_head"],
        "sparsity_config": {},
        "kv_cache_scheme": None,
    }
