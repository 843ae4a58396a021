"""Tensors for the buffers that `core/sizes.py` describes."""

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
    return str(dtype).removeprefix("torch.")


def zeros(buffer: Buffer, device: torch.device) -> torch.Tensor:
    return torch.zeros(buffer.shape, dtype=_DTYPES[buffer.dtype], device=device)


def zeroed(
    buffers: Mapping[str, Buffer], device: torch.device, memory: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return zero tensors for buffers, consecutive in `memory` (uint8), or newly allocated."""
    if memory is None:
        return {name: zeros(buffer, device) for name, buffer in buffers.items()}
    memory.zero_()
    found, offset = {}, 0
    for name, buffer in buffers.items():
        found[name] = view(buffer, memory, offset)
        offset += buffer.num_bytes
    return found


def views(buffers: Mapping[str, Buffer], base: torch.Tensor) -> dict[str, torch.Tensor]:
    """View `base` (uint8) as consecutive buffers, each aligned."""
    found, offset = {}, 0
    for name, buffer in buffers.items():
        found[name] = view(buffer, base, offset)
        offset += padded_bytes(buffer)
    return found


def view(buffer: Buffer, base: torch.Tensor, offset: int) -> torch.Tensor:
    dtype = _DTYPES[buffer.dtype]
    return base[offset : offset + prod(buffer.shape) * dtype.itemsize].view(dtype).view(buffer.shape)
