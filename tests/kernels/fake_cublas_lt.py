"""A library with the calls of cuBLASLt that computes on a CPU, and tensors for it. Has no tests."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from hearth.kernels.cublas_lt import CublasLt
from hearth.native_code import native_library

STREAM = 0x5EED


@cache
def fake_library() -> ctypes.CDLL:
    return native_library(Path(__file__).with_suffix(".c"))


def fake_lt() -> CublasLt:
    return CublasLt(fake_library(), lambda: STREAM)


def last_algorithm() -> int:
    """The number of the kernel that has computed last."""
    return ctypes.c_int.in_dll(fake_library(), "last_algorithm").value


def forget_algorithm() -> None:
    """Have no kernel be the last one."""
    ctypes.c_int.in_dll(fake_library(), "last_algorithm").value = 0


def algorithm(number: int) -> bytes:
    """Return the bytes of a kernel of the library."""
    return b"".join(word.to_bytes(8, "little") for word in (number, *[0] * 6, 77))


def aligned(*shape: int, seed: int) -> torch.Tensor:
    """Return random numbers at an address that kernels can work with."""
    count = torch.Size(shape).numel()
    memory = torch.empty(count + 128, dtype=torch.bfloat16)
    begin = -memory.data_ptr() % 256 // 2
    found = memory[begin : begin + count].view(shape)
    return found.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
