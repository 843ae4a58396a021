"""Quantisation of weights: to 8 bits with a scale for each output, to 4 with one for each group of inputs.

Rows of a weight may be reordered and stacked before they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from hearth.core.errors import BadCheckpoint
from hearth.kernels.four_bits import ZERO_CODE, pack_codes
from hearth.models.dtypes import DTYPES, STORED_DTYPES
from hearth.models.formats import EIGHT_BITS, Format, FourBits
from hearth.models.layout import Shape

#: The largest weight of a row becomes this number.
_LARGEST = {"int8": 127.0, "fp8": 448.0}

#: The smallest scale, also of rows of zeros; a subnormal one would be too coarse to divide by.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny

#: Shares of a group's range that are tried: values beyond it are cut off.
_RANGES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)

Rows: TypeAlias = "torch.Tensor | Quantized | FourBitRows"


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantised weight [n, k], which is about `values * scale[:, None]`."""

    values: torch.Tensor  #: [n, k] in int8 or float8_e4m3fn
    scale: torch.Tensor  #: [n] in float32

    def reordered(self, reorder: Callable[[torch.Tensor], torch.Tensor]) -> Quantized:
        return Quantized(reorder(self.values.view(torch.int8)).view(self.values.dtype), reorder(self.scale))

    def wide(self) -> torch.Tensor:
        return self.values.float() * self.scale[:, None]


@dataclass(frozen=True, slots=True)
class FourBitRows:
    """Rows of a 4-bit weight, before their codes are packed (`kernels/four_bits.py` has the formula)."""

    codes: torch.Tensor  #: [n, k], 0 to 15 in uint8
    scale: torch.Tensor  #: [n, groups] in float32
    minimum: torch.Tensor | None  #: the same
    codebook: torch.Tensor | None = None  #: [16] in float32

    def reordered(self, reorder: Callable[[torch.Tensor], torch.Tensor]) -> FourBitRows:
        minimum = None if self.minimum is None else reorder(self.minimum)
        return FourBitRows(reorder(self.codes), reorder(self.scale), minimum, self.codebook)

    def wide(self) -> torch.Tensor:
        """Return the weight in float32."""
        if self.codebook is not None:
            values = self.codebook[self.codes.int()]
        else:
            values = self.codes.float().sub_(ZERO_CODE if self.minimum is None else 0)
        values = values.view(*self.scale.shape, -1).mul_(self.scale.unsqueeze(2))
        if self.minimum is not None:
            values += self.minimum.unsqueeze(2)
        return values.view(self.codes.shape)

    def stored(self, form: FourBits) -> dict[str, torch.Tensor]:
        """Return the tensors of the layout by kind. Raises BadCheckpoint if they would lose something."""
        tensors = {"weight": pack_codes(self.codes), "scale": _exact(self.scale, form.scale)}
        if form.minimum is not None:
            assert self.minimum is not None, f"{form}"
            tensors["min"] = _exact(self.minimum, form.minimum)
        if form.has_codebook:
            assert self.codebook is not None, f"{form}"
            if not self.codebook.isfinite().all():
                raise BadCheckpoint("its codebook holds NaN or infinity; fetch the checkpoint again")
            tensors["codebook"] = self.codebook.float()
        return tensors

    @staticmethod
    def stacked(parts: Sequence[FourBitRows]) -> FourBitRows:
        first = parts[0]
        if first.codebook is not None and any(
            part.codebook is None or not torch.equal(part.codebook, first.codebook) for part in parts
        ):
            raise BadCheckpoint("its parts have different codebooks; convert with `--quant int8`")
        minimums = [part.minimum for part in parts if part.minimum is not None]
        return FourBitRows(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scale for part in parts]),
            torch.cat(minimums) if minimums else None,
            first.codebook,
        )


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A tensor of a checkpoint that is stored quantised; satisfies `StoredTensor`."""

    shape: Shape
    dtype: str  #: to store it as if it is dequantised
    form: Format  #: to store it as if it stays quantised
    load: Callable[[], Rows]  #: float rows have to be quantised, with a loss

    def read(self) -> torch.Tensor:
        rows = self.load()
        return rows if isinstance(rows, torch.Tensor) else rows.wide()

    def reordered(self, reorder: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
        def load() -> Rows:
            rows = self.load()
            return reorder(rows) if isinstance(rows, torch.Tensor) else rows.reordered(reorder)

        return QuantizedTensor(self.shape, self.dtype, self.form, load)


def quantize(weight: torch.Tensor, quant: str) -> Quantized:
    """Quantise a weight to "int8" or "fp8". Raises BadCheckpoint if it is not finite."""
    stored, largest = EIGHT_BITS[quant], _LARGEST[quant]
    peak = _peaks(weight, quant)
    scale = (peak / largest).clamp_(min=_SMALLEST_SCALE)
    values = weight / scale[:, None]
    if quant == "int8":
        values.round_()
    # Beyond the largest, a cast wraps around or gives NaN; division may round one step past it.
    return Quantized(values.clamp_(-largest, largest).to(STORED_DTYPES[stored]), scale)


def quantize_to_four_bits(weight: torch.Tensor, form: FourBits) -> FourBitRows:
    """Quantise a float32 weight to groups with a minimum each. Raises BadCheckpoint if it is not finite.

    Of several ranges, each group has the one with the least squared error.
    """
    assert form.minimum is not None, f"{form}"
    assert not form.has_codebook, f"{form}"
    _peaks(weight, "int4")
    groups = form.groups(weight.shape[1])
    assert groups is not None, f"{weight.shape=} {form}"
    grouped = weight.view(len(weight), groups, -1)
    low, high = torch.aminmax(grouped, dim=2)
    best = torch.full_like(low, torch.inf)
    codes = torch.empty(grouped.shape, dtype=torch.uint8)
    scale, minimum = torch.empty_like(low), torch.empty_like(low)
    middle, half = (low + high) / 2, (high - low) / 2
    for share in _RANGES:
        tried_scale = _rounded((2 * share * half / 15).clamp_(min=_SMALLEST_SCALE), form.scale)
        tried_minimum = _rounded(middle - share * half, form.minimum)
        tried = ((grouped - tried_minimum.unsqueeze(2)) / tried_scale.unsqueeze(2)).round_().clamp_(0, 15)
        wide = tried * tried_scale.unsqueeze(2) + tried_minimum.unsqueeze(2)
        error = (wide - grouped).square_().sum(2)
        is_better = error < best
        best = torch.where(is_better, error, best)
        scale = torch.where(is_better, tried_scale, scale)
        minimum = torch.where(is_better, tried_minimum, minimum)
        codes = torch.where(is_better.unsqueeze(2), tried.to(torch.uint8), codes)
    return FourBitRows(codes.view(weight.shape), scale, minimum)


def _peaks(weight: torch.Tensor, quant: str) -> torch.Tensor:
    low, high = torch.aminmax(weight, dim=1)
    peak = torch.maximum(high, -low).float()
    if not peak.isfinite().all():
        row = int(peak.isfinite().logical_not().nonzero()[0])
        raise BadCheckpoint(
            f"a weight of shape {list(weight.shape)} holds NaN or infinity in row {row}, "
            f"which {quant} cannot store; convert with `--quant none` or fix the checkpoint"
        )
    return peak


def _rounded(values: torch.Tensor, dtype: str) -> torch.Tensor:
    return values.to(DTYPES[dtype]).float()


def _exact(values: torch.Tensor, dtype: str) -> torch.Tensor:
    stored = values.to(DTYPES[dtype])
    if not values.isfinite().all():
        raise BadCheckpoint("a scale or minimum is NaN or infinite; fetch the checkpoint again")
    assert torch.equal(stored.float(), values), f"{dtype} does not hold the scales that were read"
    return stored.t().contiguous()
