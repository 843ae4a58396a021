"""The table of rotary cosines and sines that a model's heads are turned by. Turns nothing itself."""

from __future__ import annotations

import math

import torch

from hearth.models.arch import Llama3Scaling, Rope


def cos_sin_table(rope: Rope, num_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [positions, 2, rope.dim / 2]: cosines, then sines."""
    steps = torch.arange(0, rope.dim, 2, dtype=torch.int64).float()
    frequencies = 1.0 / rope.theta ** (steps / rope.dim)
    if rope.llama3 is not None:
        frequencies = _stretch(frequencies, rope.llama3)
    steps_per_token = (frequencies / rope.linear_factor).to(device)
    angles = torch.arange(num_positions, device=device).float()[:, None] * steps_per_token
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def _stretch(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """High frequencies stay, low ones are divided by the factor, those between are blended."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return share * frequencies + (1.0 - share) * frequencies / scaling.factor
