"""Weights whose 4-bit codes are looked up: those of bitsandbytes (NF4, FP4), MXFP4 and NVFP4.

bitsandbytes keeps 8-bit integers as well (LLM.int8()). Two codes share a byte.

    bitsandbytes  X.weight [outputs * inputs / 2, 1], the first code high; X.weight.absmax: scales, in 8 bits
                  perhaps, with scales of their own; X.weight.quant_map: the codebook
    MXFP4, NVFP4  X.weight_packed [outputs, inputs / 2], the first code low; X.weight_scale
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

import torch

from hearth.core.errors import BadCheckpoint
from hearth.models.config_fields import MAX_INTEGER, MAX_NUMBER
from hearth.models.formats import FourBits, is_group
from hearth.models.layout import Shape
from hearth.models.pack import Checkpoint, StoredTensor, find_matrix, find_tensor
from hearth.models.quantize import FourBitRows, Quantized, QuantizedTensor

#: Formats of compressed-tensors, and how many inputs share a scale.
FP4_FORMATS: Mapping[str, int] = {"mxfp4-pack-quantized": 32, "nvfp4-pack-quantized": 16}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

#: Marks the name of bitsandbytes' description of a weight.
_STATE = ".quant_state.bitsandbytes__"
#: The largest such description; real ones have some hundred bytes.
_MAX_STATE_BYTES = 1 << 16


def with_bitsandbytes(checkpoint: Checkpoint) -> Checkpoint:
    states = {name.partition(_STATE)[0]: name for name in checkpoint if _STATE in name}
    merged = dict(checkpoint)
    for name, stored in checkpoint.items():
        if name.endswith(".weight") and name in states:
            merged[name] = _looked_up(name, checkpoint, _state(states[name], checkpoint[states[name]]))
        elif name.endswith(".weight") and stored.dtype == "int8":
            merged[name] = _eight_bits(name, checkpoint)
    parts = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format")
    return {
        name: stored for name, stored in merged.items() if not name.endswith(parts) and _STATE not in name
    }


def _state(name: str, stored: StoredTensor) -> Mapping[str, object]:
    if stored.dtype != "uint8" or len(stored.shape) != 1 or stored.shape[0] > _MAX_STATE_BYTES:
        raise BadCheckpoint(
            f"`{name:.80}` must be bytes of JSON, given: {list(stored.shape)} of {stored.dtype}"
        )
    try:
        state = json.loads(bytes(stored.read().tolist()))
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"`{name:.80}` is no JSON: {error}; fetch the checkpoint again") from error
    if not isinstance(state, dict):
        raise BadCheckpoint(f"`{name:.80}` must be a JSON object")
    return state


def _looked_up(name: str, checkpoint: Checkpoint, state: Mapping[str, object]) -> QuantizedTensor:
    shape, block = state.get("shape"), state.get("blocksize")
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(isinstance(n, int) and 0 < n <= MAX_INTEGER for n in shape)
    ):
        raise BadCheckpoint(f"`{name}`: its quant_state must have a `shape` of a matrix")
    outputs, inputs = shape
    if not isinstance(block, int) or not is_group(block) or inputs % block:
        raise BadCheckpoint(
            f"`{name}`: groups must be 16, 32, 64 or a multiple of 128 inputs and divide a row of {inputs}, "
            f"given: {block!r:.80}"
        )
    num_scales = outputs * inputs // block
    wanted: dict[str, tuple[Shape, str]] = {
        "": ((outputs * inputs // 2, 1), "uint8"),
        ".absmax": ((num_scales,), "float32"),
        ".quant_map": ((16,), "float32"),
    }
    nested, offset = state.get("nested_blocksize"), state.get("nested_offset", 0.0)
    if not isinstance(offset, int | float) or not abs(offset) <= MAX_NUMBER:
        raise BadCheckpoint(f"`{name}`: `nested_offset` must be a number")
    if nested is not None:
        if not isinstance(nested, int) or nested < 1:
            raise BadCheckpoint(f"`{name}`: `nested_blocksize` must be an integer of at least 1")
        nested = min(nested, num_scales)
        wanted |= {
            ".absmax": ((num_scales,), "uint8"),
            ".nested_absmax": ((-(-num_scales // nested),), "float32"),
            ".nested_quant_map": ((256,), "float32"),
        }
    parts = {
        kind: find_tensor(checkpoint, f"{name}{kind}", shape, dtype)
        for kind, (shape, dtype) in wanted.items()
    }

    def load() -> FourBitRows:
        scale = parts[".absmax"].read()
        if nested is not None:
            scales = parts[".nested_absmax"].read().repeat_interleave(nested)[:num_scales]
            scale = parts[".nested_quant_map"].read()[scale.int()] * scales + float(offset)
        codes = _nibbles(parts[""].read().view(outputs, -1), first_shift=4)
        return FourBitRows(codes, scale.view(outputs, -1), None, parts[".quant_map"].read())

    dtype = state.get("dtype")
    form = FourBits(block, "float32", None, has_codebook=True)
    return QuantizedTensor((outputs, inputs), dtype if dtype == "float16" else "bfloat16", form, load)


def _eight_bits(name: str, checkpoint: Checkpoint) -> QuantizedTensor:
    stored = find_matrix(checkpoint, name, "int8")
    scale = find_tensor(checkpoint, f"{name.removesuffix('weight')}SCB", stored.shape[:1], "float32")
    return QuantizedTensor(stored.shape, "bfloat16", "int8", partial(_integers, stored, scale, name))


def _integers(stored: StoredTensor, scale: StoredTensor, name: str) -> Quantized:
    scales = scale.read() / 127
    if not scales.isfinite().all():
        raise BadCheckpoint(f"the scale of `{name}` holds NaN or infinity; fetch the checkpoint again")
    return Quantized(stored.read(), scales)


def with_fp4(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with weights of MXFP4 and NVFP4, whose scales have a scale, too."""
    merged = dict(checkpoint)
    for name in checkpoint:
        if not name.endswith(".weight_packed"):
            continue
        module, packed = name.removesuffix(".weight_packed"), find_matrix(checkpoint, name, "uint8")
        outputs, inputs = packed.shape[0], 2 * packed.shape[1]
        scale = checkpoint.get(f"{module}.weight_scale")
        is_mx = scale is not None and scale.dtype == "uint8"
        group = FP4_FORMATS["mxfp4-pack-quantized" if is_mx else "nvfp4-pack-quantized"]
        if inputs % group:
            raise BadCheckpoint(f"`{module}` has {inputs} inputs, which groups of {group} do not divide")
        by_group, scale_dtype = (outputs, inputs // group), "uint8" if is_mx else "float8_e4m3fn"
        scale = find_tensor(checkpoint, f"{module}.weight_scale", by_group, scale_dtype)
        whole = None
        if not is_mx:
            whole = find_tensor(checkpoint, f"{module}.weight_global_scale", (1,), "float32")
        form = FourBits(group, "bfloat16" if is_mx else "float32", None, has_codebook=True)
        load = partial(_fp4_rows, packed, scale, whole, module)
        for kind in ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"):
            merged.pop(f"{module}.{kind}", None)
        merged[f"{module}.weight"] = QuantizedTensor((outputs, inputs), "bfloat16", form, load)
    return merged


def _fp4_rows(
    packed: StoredTensor, scale: StoredTensor, whole: StoredTensor | None, module: str
) -> FourBitRows:
    stored = scale.read()
    # The exponent 255 stands for NaN.
    scales = torch.exp2(stored.float() - 127) if whole is None else stored.float() / whole.read()
    if (whole is None and (stored == 255).any()) or not scales.isfinite().all():
        raise BadCheckpoint(f"`{module}.weight_scale` holds NaN or infinity; fetch the checkpoint again")
    codebook = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    return FourBitRows(_nibbles(packed.read(), first_shift=0), scales, None, codebook)


def _nibbles(packed: torch.Tensor, *, first_shift: int) -> torch.Tensor:
    """Return the two codes of each byte, neighbours in a row."""
    first, second = packed >> first_shift & 15, packed >> (4 - first_shift) & 15
    return torch.stack([first, second], dim=2).flatten(1)
