"""Rotary positions: their settings in a Hugging Face config, and the table of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from hearth.models.arch import Llama3Scaling, LongRope, Rope, YarnScaling
from hearth.models.config_fields import Fields

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
#: Older names of kinds. Multimodal positions of text are all alike, and so ordinary ones.
_OLD_KINDS = {"su": "longrope", "mrope": "default"}
#: Positions that are computed at a time, to bound temporary memory.
_POSITIONS_AT_ONCE = 32768


def read_rope(fields: Fields, head_dim: int) -> Rope:
    parameters = _parameters(fields)
    _refuse_partial(fields, parameters)
    return _rope(fields, parameters, head_dim, theta="rope_theta")


def read_partial_rope(
    fields: Fields, head_dim: int, share: str = "partial_rotary_factor", theta: str = "rope_theta"
) -> Rope:
    parameters = _parameters(fields)
    has_factor = parameters.has("partial_rotary_factor")
    name, place = ("partial_rotary_factor", parameters) if has_factor else (share, fields)
    part = place.number(name)
    if part > 1.0:
        raise place.unsupported(name, "no more than the whole of a head can be rotated; supported: up to 1.0")
    return _rope(fields, parameters, int(head_dim * part), theta)


def read_window_ropes(fields: Fields, head_dim: int, theta: str) -> tuple[Rope, Rope]:
    """Return the rotary positions of layers without a window, and with one, whose base may be in `theta`."""
    parameters = _parameters(fields)
    if parameters.has("full_attention"):
        full, local = parameters.section("full_attention"), parameters.section("sliding_attention")
    else:  # scaled for contexts that windows do not reach
        full, local = parameters, Fields(fields.family, {}, fields.where)
    for one in (full, local):
        _refuse_partial(fields, one)
    return _rope(fields, full, head_dim, "rope_theta"), _rope(fields, local, head_dim, theta)


def _refuse_partial(fields: Fields, parameters: Fields) -> None:
    for place in (fields, parameters):
        if place.has("partial_rotary_factor") and place.number("partial_rotary_factor") != 1.0:
            raise place.unsupported(
                "partial_rotary_factor", f"`{fields.family}` models rotate whole heads; supported: 1.0"
            )


def _parameters(fields: Fields) -> Fields:
    return fields.section("rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters")


def _rope(fields: Fields, parameters: Fields, dim: int, theta: str) -> Rope:
    for name, value in parameters.values.items():
        if isinstance(value, Mapping):
            raise parameters.unsupported(name, "all layers must share one rotary setting")
    kind_name = "rope_type" if parameters.has("rope_type") else "type"
    kind = parameters.text(kind_name) if parameters.has(kind_name) else "default"
    kind = _OLD_KINDS.get(kind, kind)
    if kind not in KINDS:
        raise parameters.unsupported(kind_name, f"supported: {', '.join(KINDS)}")
    if dim < 2 or dim % 2 != 0:
        raise fields.unsupported("head_dim", f"the rotated size of a head must be even, here: {dim}")
    name, place = ("rope_theta", parameters) if parameters.has("rope_theta") else (theta, fields)
    rope = Rope(place.number(name), dim)
    if kind == "yarn" and rope.theta <= 1.0:
        raise place.unsupported(name, "it must be above 1.0 with `yarn`")
    match kind:
        case "linear":
            return replace(rope, linear_factor=parameters.number("factor"))
        case "llama3":
            return replace(rope, llama3=_llama3(fields, parameters))
        case "yarn":
            return _with_yarn(rope, fields, parameters)
        case "longrope":
            return _with_longrope(rope, fields, parameters)
    return rope


def _original_positions(fields: Fields, parameters: Fields, least: int = 1) -> int:
    name = "original_max_position_embeddings"
    place = fields if fields.has(name) or not parameters.has(name) else parameters
    return place.integer(name if place.has(name) else "max_position_embeddings", least=least)


def _with_yarn(rope: Rope, fields: Fields, parameters: Fields) -> Rope:
    original = _original_positions(fields, parameters)
    factor = _number(parameters, "factor", fields.integer("max_position_embeddings") / original)
    shares = [_number(parameters, name, 0.0) for name in ("mscale", "mscale_all_dim")]
    usual = _magnitude(factor, shares[0]) / _magnitude(factor, shares[1]) if all(shares) else None
    return replace(
        rope,
        yarn=YarnScaling(
            factor=factor,
            beta_fast=_number(parameters, "beta_fast", 32.0),
            beta_slow=_number(parameters, "beta_slow", 1.0),
            is_truncated=parameters.values.get("truncate") is None or parameters.flag("truncate"),
            original_max_positions=original,
        ),
        magnitude=_number(parameters, "attention_factor", usual or _magnitude(factor)),
    )


def _magnitude(factor: float, share: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * share * math.log(factor) + 1.0


def _with_longrope(rope: Rope, fields: Fields, parameters: Fields) -> Rope:
    original = _original_positions(fields, parameters, least=2)  # its logarithm is a divisor
    factor = _number(parameters, "factor", fields.integer("max_position_embeddings") / original)
    usual = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    return replace(
        rope,
        longrope=LongRope(
            short=tuple(parameters.numbers("short_factor", rope.dim // 2)),
            long=tuple(parameters.numbers("long_factor", rope.dim // 2)),
            original_max_positions=original,
        ),
        magnitude=_number(parameters, "attention_factor", usual),
    )


def _number(parameters: Fields, name: str, usual: float) -> float:
    return parameters.number(name) if parameters.has(name) else usual


def _llama3(fields: Fields, parameters: Fields) -> Llama3Scaling:
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if low >= high:
        raise parameters.unsupported("low_freq_factor", f"it must be below `high_freq_factor`: {high}")
    return Llama3Scaling(
        factor=parameters.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=_original_positions(fields, parameters),
    )


def cos_sin_table(rope: Rope, num_positions: int, device: torch.device) -> torch.Tensor:
    table = torch.empty((num_positions, 2, rope.dim // 2), dtype=torch.float32, device=device)
    write_cos_sin(rope, table)
    return table


def write_cos_sin(rope: Rope, table: torch.Tensor) -> None:
    """Fill a table float32 [positions, 2, rope.dim / 2]: cosines, then sines."""
    steps_per_token = _sent(frequencies(rope, len(table)), table.device)
    for begin in range(0, len(table), _POSITIONS_AT_ONCE):
        piece = table[begin : begin + _POSITIONS_AT_ONCE]
        positions = torch.arange(begin, begin + len(piece), device=table.device)
        angles = positions.float()[:, None] * steps_per_token
        torch.stack([angles.cos(), angles.sin()], dim=1, out=piece)
    if rope.magnitude != 1.0:
        table.mul_(rope.magnitude)


def frequencies(rope: Rope, num_positions: int) -> torch.Tensor:
    """Return the angles per position, for a context of `num_positions`."""
    steps = torch.arange(0, rope.dim, 2, dtype=torch.int64).float()
    plain = 1.0 / rope.theta ** (steps / rope.dim)
    if rope.llama3 is not None:
        return _stretch(plain, rope.llama3)
    if rope.yarn is not None:
        return _ramped(plain, rope, rope.yarn)
    if (long := rope.longrope) is not None:
        divisors = long.short if num_positions <= long.original_max_positions else long.long
        return 1.0 / (torch.tensor(divisors) * rope.theta ** (steps / rope.dim))
    return plain / rope.linear_factor


def _sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers to a device without blocking on queued steps or loads."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def _stretch(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Scale frequencies: high ones stay, low ones are divided by the factor, others are interpolated."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    rotations = scaling.original_max_positions * frequencies / (2 * math.pi)
    share = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return share * frequencies + (1.0 - share) * frequencies / scaling.factor


def _ramped(plain: torch.Tensor, rope: Rope, scaling: YarnScaling) -> torch.Tensor:
    """Scale frequencies by YaRN: between two dimensions, ever more is divided by the factor."""

    def dimension(num_turns: float) -> float:
        steps = math.log(scaling.original_max_positions / (num_turns * 2 * math.pi))
        return rope.dim * steps / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    share = ((torch.arange(rope.dim // 2).float() - low) / (high - low)).clamp(0.0, 1.0)
    return plain / scaling.factor * share + plain * (1.0 - share)
