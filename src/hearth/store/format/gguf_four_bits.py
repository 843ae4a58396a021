"""Blocks of 4-bit codes in GGUF files: their scales and minimums as one of each for 32 inputs.

    Q4_0    scale | codes                    codes - 8, 32 to a block; scales in float16
    Q4_1    scale, minimum | codes           the same with minimums
    Q4_K    scale, minimum | factors | codes   256 to a block, in runs of 32 with a factor of 6 bits for each

The low four bits of a run's bytes come before the high ones. Products of a scale and a factor have 17 bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K

from hearth.models.formats import FourBits
from hearth.models.quantize import FourBitRows

#: The format that holds every value, by kind.
FORMS: Mapping[GGMLQuantizationType, FourBits] = {
    GGMLQuantizationType.Q4_0: FourBits(32, "float16", None),
    GGMLQuantizationType.Q4_1: FourBits(32, "float16", "float16"),
    GGMLQuantizationType.Q4_K: FourBits(32, "float32", "float32"),
}


def four_bit_rows(data: npt.NDArray[np.generic], kind: GGMLQuantizationType) -> FourBitRows:
    """`data`: the bytes of each row."""
    has_minimum, has_factors = FORMS[kind].minimum is not None, kind == GGMLQuantizationType.Q4_K
    blocks = data.view(np.uint8).reshape(-1, GGML_QUANT_SIZES[kind][1])
    halves, factors, codes = np.hsplit(
        blocks, [4 if has_minimum else 2, 16 if has_factors else blocks.shape[1] - 16]
    )
    pair = np.ascontiguousarray(halves).view(np.float16).astype(np.float32)
    scale, minimum = pair[:, :1], pair[:, 1:]
    if has_factors:
        scales, minimums = Q4_K.get_scale_min(np.ascontiguousarray(factors))
        scale, minimum = scale * scales, -minimum * minimums
    run = codes.reshape(len(blocks), -1, 1, 32 if has_factors else 16)
    unpacked = run >> np.array([[0], [4]], np.uint8) & np.uint8(15)

    def rows(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values.reshape(len(data), -1)))

    return FourBitRows(rows(unpacked), rows(scale), rows(minimum) if has_minimum else None)
