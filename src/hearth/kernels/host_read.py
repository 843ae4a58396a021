"""Reads pinned host memory by a kernel, for numbers that a step needs at once. Not for bulk.

All copies from the host share one engine of the device and wait there for each other, so a copy of a few
bytes may stand behind megabytes of another model's weights. A kernel reads the host's memory by itself.
"""

from __future__ import annotations

import torch

from hearth.kernels.jit import cdiv, launch, runs_triton, tl, triton
from hearth.kernels.overlap import wait_for_inputs

#: False: small numbers travel as copies, like everything else.
READS_HOST = True


def read_host(out: torch.Tensor, pinned: torch.Tensor, count: int | None = None) -> None:
    """Set `out = pinned` in stream order, without waiting; both contiguous, of numbers of 4 or 8 bytes.

    `count`: only so many of the first numbers. What lies in `pinned` must stay until the device has read it.
    Torch does not know of this read: it would give the memory of a tensor that is let go to the next one at
    once.
    """
    impl = read_host_triton if READS_HOST and runs_triton(out) else read_host_reference
    impl(out, pinned, count)


def read_host_reference(out: torch.Tensor, pinned: torch.Tensor, count: int | None = None) -> None:
    out.view(-1)[:count].copy_(pinned.view(-1)[:count], non_blocking=True)


def read_host_triton(out: torch.Tensor, pinned: torch.Tensor, count: int | None = None) -> None:
    assert out.dtype == pinned.dtype, f"{out.dtype=} {pinned.dtype=}"
    assert out.numel() == pinned.numel(), f"{out.shape=} {pinned.shape=}"
    # As words, so that one compiled kernel does for every dtype and length.
    num_words = (out.numel() if count is None else count) * (out.itemsize // 4)
    target, source = (one if one.dtype == torch.int32 else one.view(torch.int32) for one in (out, pinned))
    block = 1024
    if num_words:
        launch(
            _read_host_kernel,
            (cdiv(num_words, block),),
            target,
            source,
            num_words,
            BLOCK=block,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["num_words"])
def _read_host_kernel(out, pinned, num_words, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    wait_for_inputs(OVERLAPS)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_words
    tl.store(out + at, tl.load(pinned + at, inside, other=0), inside)
