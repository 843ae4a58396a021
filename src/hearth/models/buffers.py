"""Tensors for the buffers that `hearth/core/sizes.py` describes. Decides no size."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from hearth.core.sizes import Buffer, padded_bytes

_DTYPES = {
    "bool": torch.bool,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
}


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype, as buffers have it."""
    return str(dtype).removeprefix("torch.")


def zeros(buffer: Buffer, device: torch.device) -> torch.Tensor:
    """Memory of its own, all zero."""
    return torch.zeros(buffer.shape, dtype=_DTYPES[buffer.dtype], device=device)


def zeroed(
    buffers: Mapping[str, Buffer], device: torch.device, memory: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Zero tensors for buffers: behind each other in `memory` (uint8), or each with memory of its own."""
    if memory is None:
        return {name: zeros(buffer, device) for name, buffer in buffers.items()}
    memory.zero_()
    found, offset = {}, 0
    for name, buffer in buffers.items():
        found[name] = view(buffer, memory, offset)
        offset += buffer.num_bytes
    return found


def views(buffers: Mapping[str, Buffer], base: torch.Tensor) -> dict[str, torch.Tensor]:
    """View `base` (uint8) as buffers behind each other, each at its aligned place."""
    found, offset = {}, 0
    for name, buffer in buffers.items():
        found[name] = view(buffer, base, offset)
        offset += padded_bytes(buffer)
    return found


def view(buffer: Buffer, base: torch.Tensor, offset: int) -> torch.Tensor:
    """The bytes of `base` (uint8) from `offset` on."""
    dtype = _DTYPES[buffer.dtype]
    return base[offset : offset + prod(buffer.shape) * dtype.itemsize].view(dtype).view(buffer.shape)
