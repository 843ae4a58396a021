"""Reads small amounts of pinned host memory by a kernel.

All copies from the host share one copy engine, so a copy of a few bytes may queue behind megabytes of another
model's weights. A kernel reads host memory directly.
"""

from __future__ import annotations

import torch

from hearth.kernels.jit import cdiv, launch, runs_triton, tl, triton
from hearth.kernels.overlap import wait_for_inputs

#: False: by copies.
READS_HOST = True


def read_host(out: torch.Tensor, pinned: torch.Tensor, count: int | None = None) -> None:
    """Set `out = pinned` in stream order, without blocking; both contiguous, of 4 or 8 byte numbers.

    `count`: only the first numbers. `pinned` must stay alive and unchanged until the device has read it:
    torch does not know of this read, and would reuse the memory of a freed tensor at once.
    """
    impl = read_host_triton if READS_HOST and runs_triton(out) else read_host_reference
    impl(out, pinned, count)


def read_host_reference(out: torch.Tensor, pinned: torch.Tensor, count: int | None = None) -> None:
    out.view(-1)[:count].copy_(pinned.view(-1)[:count], non_blocking=True)


def read_host_triton(out: torch.Tensor, pinned: torch.Tensor, count: int | None = None) -> None:
    assert out.dtype == pinned.dtype, f"{out.dtype=} {pinned.dtype=}"
    assert out.numel() == pinned.numel(), f"{out.shape=} {pinned.shape=}"
    # As words, so that one compiled kernel serves every dtype and length.
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
