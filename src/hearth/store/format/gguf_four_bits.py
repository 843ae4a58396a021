"""Blocks of 4-bit codes in GGUF files: their scales and minimums as one of each for 32 inputs.

    Q4_0    scale | codes                      codes - 8, 32 to a block; scales in float16
    Q4_1    scale, minimum | codes             the same with minimums
    IQ4_NL  scale | codes                      values of a codebook
    MXFP4   exponent | codes                   values of a codebook
    Q4_K    scale, minimum | factors | codes   256 to a block, in runs of 32 with a factor of 6 bits for each
    IQ4_XS  scale | factors | codes            the same without minimums, values of a codebook

The low four bits of a run's bytes come before the high ones. Products of a scale and a factor have 17 bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import IQ4_NL, MXFP4, Q4_K

from hearth.models.formats import FourBits
from hearth.models.quantize import FourBitRows

#: The format that holds every value, by kind.
FORMS: Mapping[GGMLQuantizationType, FourBits] = {
    GGMLQuantizationType.Q4_0: FourBits(32, "float16", None),
    GGMLQuantizationType.Q4_1: FourBits(32, "float16", "float16"),
    GGMLQuantizationType.IQ4_NL: FourBits(32, "float16", None, has_codebook=True),
    GGMLQuantizationType.MXFP4: FourBits(32, "bfloat16", None, has_codebook=True),
    GGMLQuantizationType.Q4_K: FourBits(32, "float32", "float32"),
    GGMLQuantizationType.IQ4_XS: FourBits(32, "float32", None, has_codebook=True),
}
_CODEBOOKS: Mapping[GGMLQuantizationType, tuple[int, ...]] = {
    GGMLQuantizationType.IQ4_NL: IQ4_NL.kvalues,
    GGMLQuantizationType.IQ4_XS: IQ4_NL.kvalues,
    GGMLQuantizationType.MXFP4: MXFP4.kvalues,
}
#: Bytes of a run of codes; of other kinds they hold 32.
_RUN_BYTES = {GGMLQuantizationType.Q4_K: 32}


def four_bit_rows(data: npt.NDArray[np.generic], kind: GGMLQuantizationType) -> FourBitRows:
    """`data`: the bytes of each row."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = data.view(np.uint8).reshape(-1, block_bytes)
    head, codes = np.hsplit(blocks, [block_bytes - block_size // 2])
    scale, minimum = _scales(head, kind)
    run = codes.reshape(len(blocks), -1, 1, _RUN_BYTES.get(kind, 16))
    unpacked = run >> np.array([[0], [4]], np.uint8) & np.uint8(15)

    def rows(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values.reshape(len(data), -1)))

    codebook = torch.tensor(_CODEBOOKS[kind], dtype=torch.float32) if kind in _CODEBOOKS else None
    return FourBitRows(rows(unpacked), rows(scale), None if minimum is None else rows(minimum), codebook)


def _scales(
    head: npt.NDArray[np.uint8], kind: GGMLQuantizationType
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
    """Return the scale of each 32 inputs of a block, and its minimum."""
    if kind == GGMLQuantizationType.MXFP4:
        return MXFP4.e8m0_to_fp32_half(head), None
    has_minimum = FORMS[kind].minimum is not None
    halves, factors = np.hsplit(head, [4 if has_minimum else 2])
    pair = np.ascontiguousarray(halves).view(np.float16).astype(np.float32)
    scale, minimum = pair[:, :1], pair[:, 1:]
    if kind == GGMLQuantizationType.Q4_K:
        scales, minimums = Q4_K.get_scale_min(np.ascontiguousarray(factors))
        scale, minimum = scale * scales, -minimum * minimums
    elif kind == GGMLQuantizationType.IQ4_XS:
        scale = scale * _iq4_factors(factors)
    return scale, minimum if has_minimum else None


def _iq4_factors(stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return factors of 6 bits: the high two are in the first two bytes, the low four in the others."""
    pairs, nibbles = np.hsplit(stored, [2])
    high = np.ascontiguousarray(pairs).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (nibbles[:, :, None] >> np.array([0, 4], np.uint8) & 15).reshape(len(stored), -1)
    return (low | high << 4).astype(np.float32) - np.float32(32)
