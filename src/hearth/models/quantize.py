"""Symmetric quantisation of weights to 8 bits, with one scale per output channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hearth.core.errors import BadCheckpoint
from hearth.models.dtypes import STORED_DTYPES
from hearth.models.layout import QUANTS

#: The largest weight of a row becomes this number.
_LARGEST = {"int8": 127.0, "fp8": 448.0}

#: The smallest scale, also of rows of zeros; a subnormal one would be too coarse to divide by.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantised weight [n, k], which is about `values * scale[:, None]`."""

    values: torch.Tensor  #: [n, k] in int8 or float8_e4m3fn
    scale: torch.Tensor  #: [n] in float32


def quantize(weight: torch.Tensor, quant: str) -> Quantized:
    """Quantise a weight; `quant` is one of QUANTS but "none". Raises BadCheckpoint if it is not finite."""
    stored, largest = QUANTS[quant], _LARGEST[quant]
    assert stored is not None, f"{quant=}"
    low, high = torch.aminmax(weight, dim=1)
    peak = torch.maximum(high, -low).float()
    if not peak.isfinite().all():
        row = int(peak.isfinite().logical_not().nonzero()[0])
        raise BadCheckpoint(
            f"a weight of shape {list(weight.shape)} holds NaN or infinity in row {row}, "
            f"which {quant} cannot store; convert with `--quant none` or fix the checkpoint"
        )
    scale = (peak / largest).clamp_(min=_SMALLEST_SCALE)
    values = weight / scale[:, None]
    if quant == "int8":
        values.round_()
    # Beyond the largest, a cast wraps around or gives NaN; division may round one step past it.
    return Quantized(values.clamp_(-largest, largest).to(STORED_DTYPES[stored]), scale)
