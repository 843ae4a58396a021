"""Rotary positions: their settings in a Hugging Face config, and the table of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from hearth.models.arch import Llama3Scaling, Rope
from hearth.models.config_fields import Fields

KINDS = ("default", "linear", "llama3")
#: Positions that are computed at a time, to bound temporary memory.
_POSITIONS_AT_ONCE = 32768


def read_rope(fields: Fields, head_dim: int) -> Rope:
    for place in (fields, _parameters(fields)):
        if place.has("partial_rotary_factor") and place.number("partial_rotary_factor") != 1.0:
            raise place.unsupported(
                "partial_rotary_factor", f"`{fields.family}` models rotate whole heads; supported: 1.0"
            )
    return _rope(fields, head_dim, theta="rope_theta")


def read_partial_rope(fields: Fields, head_dim: int) -> Rope:
    parameters = _parameters(fields)
    has_factor = parameters.has("partial_rotary_factor")
    name, place = ("partial_rotary_factor", parameters) if has_factor else ("rotary_pct", fields)
    share = place.number(name)
    if share > 1.0:
        raise place.unsupported(name, "no more than the whole of a head can be rotated; supported: up to 1.0")
    return _rope(fields, int(head_dim * share), theta="rotary_emb_base")


def _parameters(fields: Fields) -> Fields:
    return fields.section("rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters")


def _rope(fields: Fields, dim: int, theta: str) -> Rope:
    parameters = _parameters(fields)
    for name, value in parameters.values.items():
        if isinstance(value, Mapping):
            raise parameters.unsupported(name, "all layers must share one rotary setting")
    kind_name = "rope_type" if parameters.has("rope_type") else "type"
    kind = parameters.text(kind_name) if parameters.has(kind_name) else "default"
    if kind not in KINDS:
        raise parameters.unsupported(kind_name, f"supported: {', '.join(KINDS)}")
    if dim < 2 or dim % 2 != 0:
        raise fields.unsupported("head_dim", f"the rotated size of a head must be even, here: {dim}")
    base = parameters.number("rope_theta") if parameters.has("rope_theta") else fields.number(theta)
    return Rope(
        theta=base,
        dim=dim,
        linear_factor=parameters.number("factor") if kind == "linear" else 1.0,
        llama3=_llama3(fields, parameters) if kind == "llama3" else None,
    )


def _llama3(fields: Fields, parameters: Fields) -> Llama3Scaling:
    original = "original_max_position_embeddings"
    place = fields if fields.has(original) else parameters
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if low >= high:
        raise parameters.unsupported("low_freq_factor", f"it must be below `high_freq_factor`: {high}")
    return Llama3Scaling(
        factor=parameters.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=(
            place.integer(original) if place.has(original) else fields.integer("max_position_embeddings")
        ),
    )


def cos_sin_table(rope: Rope, num_positions: int, device: torch.device) -> torch.Tensor:
    table = torch.empty((num_positions, 2, rope.dim // 2), dtype=torch.float32, device=device)
    write_cos_sin(rope, table)
    return table


def write_cos_sin(rope: Rope, table: torch.Tensor) -> None:
    """Fill a table float32 [positions, 2, rope.dim / 2]: cosines, then sines."""
    steps = torch.arange(0, rope.dim, 2, dtype=torch.int64).float()
    frequencies = 1.0 / rope.theta ** (steps / rope.dim)
    if rope.llama3 is not None:
        frequencies = _stretch(frequencies, rope.llama3)
    steps_per_token = _sent(frequencies / rope.linear_factor, table.device)
    for begin in range(0, len(table), _POSITIONS_AT_ONCE):
        piece = table[begin : begin + _POSITIONS_AT_ONCE]
        positions = torch.arange(begin, begin + len(piece), device=table.device)
        angles = positions.float()[:, None] * steps_per_token
        torch.stack([angles.cos(), angles.sin()], dim=1, out=piece)


def _sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers to a device without blocking on queued steps or loads."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def _stretch(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Scale frequencies: high ones stay, low ones are divided by the factor, others are interpolated."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    rotations = scaling.original_max_positions * frequencies / (2 * math.pi)
    share = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return share * frequencies + (1.0 - share) * frequencies / scaling.factor
