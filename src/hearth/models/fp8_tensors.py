"""Weights that a Hugging Face directory holds in 8-bit floats (e4m3).

One scale for a weight or for each output is stored as it is. Weights with a scale for each block of outputs
and inputs get 8-bit integers with a scale for each output, with a small loss. Scales of activations are
passed over: activations are not quantised here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from hearth.core.errors import BadCheckpoint
from hearth.models.dtypes import DTYPES
from hearth.models.pack import Checkpoint, StoredTensor
from hearth.models.quantize import Quantized, QuantizedTensor


def with_fp8(checkpoint: Checkpoint, block: Sequence[int] | None = None) -> Checkpoint:
    """Return the checkpoint with its weights in e4m3 and their scales as one.

    `block`: the outputs and inputs that share a scale.
    """
    merged = dict(checkpoint)
    for name, stored in checkpoint.items():
        if not name.endswith(".weight") or stored.dtype != "float8_e4m3fn":
            continue
        module = name.removesuffix(".weight")
        kind = "weight_scale_inv" if f"{module}.weight_scale_inv" in checkpoint else "weight_scale"
        scale = checkpoint.get(f"{module}.{kind}")
        if len(stored.shape) != 2 or scale is None:
            raise BadCheckpoint(f"`{name}` must be a matrix with a `{kind}`, given: {list(stored.shape)}")
        outputs = stored.shape[0]
        if block is None:
            shapes = [(), (1,), (1, 1), (outputs,), (outputs, 1)]
        else:
            shapes = [tuple(-(-size // by) for size, by in zip(stored.shape, block, strict=True))]
        if scale.shape not in shapes or scale.dtype not in DTYPES:
            wanted = (
                f"a number or one for each of {outputs} outputs" if block is None else f"{list(shapes[0])}"
            )
            raise BadCheckpoint(
                f"`{module}.{kind}` must be {wanted}, given: {list(scale.shape)} of {scale.dtype}"
            )
        for other in (kind, "input_scale"):
            merged.pop(f"{module}.{other}", None)
        dtype = "bfloat16" if scale.dtype == "float32" else scale.dtype
        if block is None:
            load = partial(_quantized, stored, scale, name)
            merged[name] = QuantizedTensor(stored.shape, dtype, "fp8", load)
        else:
            blocks = partial(_widened_blocks, stored, scale, block, name)
            merged[name] = QuantizedTensor(stored.shape, dtype, "int8", blocks)
    return merged


def _quantized(stored: StoredTensor, scale: StoredTensor, name: str) -> Quantized:
    values = stored.read()
    scales = scale.read().float().flatten().expand(len(values)).contiguous()
    _check_finite(values, scales, name)
    return Quantized(values, scales)


def _widened_blocks(
    stored: StoredTensor, scale: StoredTensor, block: Sequence[int], name: str
) -> torch.Tensor:
    values, scales = stored.read(), scale.read().float()
    _check_finite(values, scales, name)
    for axis, (size, by) in enumerate(zip(values.shape, block, strict=True)):
        scales = scales.repeat_interleave(min(by, size), axis).narrow(axis, 0, size)
    return values.float() * scales


def _check_finite(values: torch.Tensor, scales: torch.Tensor, name: str) -> None:
    if not scales.isfinite().all() or not values.float().isfinite().all():
        raise BadCheckpoint(f"`{name}` or its scale holds NaN or infinity; fetch the checkpoint again")
