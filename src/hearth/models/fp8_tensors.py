"""Weights that a Hugging Face directory holds in 8-bit floats (e4m3), with a scale for each output or one.

Scales of activations are passed over: activations are not quantised here.
"""

from __future__ import annotations

from functools import partial

from hearth.core.errors import BadCheckpoint
from hearth.models.dtypes import DTYPES
from hearth.models.pack import Checkpoint, StoredTensor
from hearth.models.quantize import Quantized, QuantizedTensor

#: The dtype in safetensors and PyTorch files.
_FP8 = ("F8_E4M3", "float8_e4m3fn")


def with_fp8(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its weights in e4m3 and their scales as one."""
    merged = dict(checkpoint)
    for name, stored in checkpoint.items():
        if not name.endswith(".weight") or stored.dtype not in _FP8:
            continue
        module = name.removesuffix(".weight")
        scale = checkpoint.get(f"{module}.weight_scale")
        outputs = stored.shape[0] if stored.shape else 0
        if len(stored.shape) != 2 or scale is None:
            raise BadCheckpoint(
                f"`{name}` must be a matrix with a `weight_scale`, given: {list(stored.shape)}"
            )
        if scale.shape not in ((), (1,), (1, 1), (outputs,), (outputs, 1)) or scale.dtype not in DTYPES:
            raise BadCheckpoint(
                f"`{module}.weight_scale` must be a number or one for each of {outputs} outputs, "
                f"given: {list(scale.shape)} of {scale.dtype}"
            )
        for kind in ("weight_scale", "input_scale"):
            merged.pop(f"{module}.{kind}", None)
        dtype = "bfloat16" if scale.dtype == "float32" else scale.dtype
        merged[name] = QuantizedTensor(stored.shape, dtype, "fp8", partial(_quantized, stored, scale, name))
    return merged


def _quantized(stored: StoredTensor, scale: StoredTensor, name: str) -> Quantized:
    values = stored.read()
    scales = scale.read().float().flatten().expand(len(values)).contiguous()
    if not scales.isfinite().all() or not values.float().isfinite().all():
        raise BadCheckpoint(f"`{name}` or its scale holds NaN or infinity; fetch the checkpoint again")
    return Quantized(values, scales)
