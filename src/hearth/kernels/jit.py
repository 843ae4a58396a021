"""Triton where it is installed, a placeholder where it is not, so that every kernel file imports everywhere.

All kernels are launched by `launch`. Over meta tensors a launch compiles its kernel and runs nothing, so a
dry run of the serving code finds every variant that it will launch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False
    if not TYPE_CHECKING:

        class triton:
            """Decorate kernels that cannot run here; only CUDA tensors ever reach a launcher."""

            @staticmethod
            def jit(kernel=None, **options):
                return (lambda kernel: kernel) if kernel is None else kernel

        tl = None

__all__ = [
    "HAS_TRITON",
    "capability",
    "cdiv",
    "has_large_memory",
    "hash_kernels",
    "launch",
    "next_power_of_2",
    "num_processors",
    "runs_triton",
    "tl",
    "triton",
]


def runs_triton(x: torch.Tensor) -> bool:
    """Return True for CUDA and meta tensors, which use Triton kernels; others use the torch references."""
    return (x.is_cuda or x.is_meta) and HAS_TRITON


def capability() -> int:
    """Return the compute capability that kernels are compiled for, as in 90 for 9.0; 0: no CUDA device."""
    try:
        return _capability_of(triton.runtime.driver.active)
    except (AttributeError, RuntimeError):  # no Triton, or no driver, as in its interpreter
        return 0


@cache
def _capability_of(driver: Any) -> int:
    target = driver.get_current_target()
    return int(target.arch) if target.backend == "cuda" else 0


#: Compute capabilities with less than 160 KiB of shared memory.
_SMALL_DEVICES = {70, 72, 75, 86, 89, 120, 121}


def has_large_memory() -> bool:
    """Return True where a program may have the 160 KiB of shared memory that large tiles take."""
    return capability() not in _SMALL_DEVICES


@cache
def num_processors() -> int:
    if not torch.cuda.is_available():
        return 1
    count: int = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return count


def cdiv(count: int, size: int) -> int:
    """Return `count / size`, rounded up. Triton's own takes 4 us."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the least power of 2 that is not below `count`. Triton's own takes 5 us."""
    return 1 << (count - 1).bit_length()


def launch(kernel: Any, grid: Sequence[int], *args: object, **options: object) -> None:
    """Queue a Triton kernel on the current stream. `options` are its constexprs and compiler options.

    A kernel that takes `OVERLAPS` may start while the one before it drains, where the device supports that
    (`overlap.py`), unless False is given for it; any other starts when the one before it has ended. The first
    argument is a tensor. If it is a meta tensor, the kernel is compiled and not run.
    """
    out = args[0]
    assert isinstance(out, torch.Tensor), f"{type(out)=}"
    hash_kernels(kernel.__module__)
    if "OVERLAPS" in kernel.arg_names and options.setdefault("OVERLAPS", can_overlap()):
        options["launch_pdl"] = True
    if out.is_meta:
        kernel.warmup(*args, grid=tuple(grid), **options)
    else:
        kernel[tuple(grid)](*args, **options)


@cache
def hash_kernels(module: str) -> None:
    """Have Triton hash all kernels of an imported module in the same order in every process.

    In Triton 3.6, not in 3.9, the hash of a kernel that calls another one depends on which of them is hashed
    first. The cache on disk and snapshots find kernels by hash.
    """
    if not HAS_TRITON:
        return
    for member in list(vars(sys.modules[module]).values()):
        if isinstance(member, triton.runtime.JITFunction):
            if member.__module__ != module:
                hash_kernels(member.__module__)
            _ = member.cache_key


def can_overlap() -> bool:
    """True where a kernel may start while the one before it drains: on Hopper and later."""
    return capability() >= 90 and not triton.knobs.runtime.interpret
