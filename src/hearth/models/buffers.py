"""Tensors for the buffers that `hearth/sizes.py` describes. Decides no size."""

from __future__ import annotations

from math import prod

import torch

from hearth.sizes import Buffer

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


def filled(buffer: Buffer, value: int, device: torch.device) -> torch.Tensor:
    """Memory of its own, with one value everywhere."""
    return torch.full(buffer.shape, value, dtype=_DTYPES[buffer.dtype], device=device)


def view(buffer: Buffer, base: torch.Tensor, offset: int) -> torch.Tensor:
    """The bytes of `base` (uint8) from `offset` on."""
    dtype = _DTYPES[buffer.dtype]
    return base[offset : offset + prod(buffer.shape) * dtype.itemsize].view(dtype).view(buffer.shape)
