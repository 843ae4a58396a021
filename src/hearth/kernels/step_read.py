"""Reads the inputs of a step, and changes of the block table, from pinned host memory in one launch.

`host_read.py` says why by a kernel. A second launch would delay the first token of a prompt.
"""

from __future__ import annotations

import torch

from hearth.kernels import host_read
from hearth.kernels.jit import cdiv, launch, runs_triton, tl, triton
from hearth.kernels.overlap import wait_for_inputs


def read_step(
    out: torch.Tensor,
    pinned: torch.Tensor,
    count: int,
    *,
    table: torch.Tensor,
    writes: torch.Tensor | None,
) -> None:
    """Set `out[:count] = pinned[:count]` and write to `table`, all int32 and contiguous. `writes` [2, n]:
    unique indices of the flattened table, and values. Pinned tensors stay unchanged until they are read.
    """
    assert writes is None or writes.shape[0] == 2, f"{writes.shape=}"
    impl = read_step_triton if host_read.READS_HOST and runs_triton(out) else read_step_reference
    impl(out, pinned, count, table=table, writes=writes)


def read_step_reference(
    out: torch.Tensor,
    pinned: torch.Tensor,
    count: int,
    *,
    table: torch.Tensor,
    writes: torch.Tensor | None,
) -> None:
    host_read.read_host_reference(out, pinned, count)
    if writes is not None:
        places, values = writes.to(out.device)
        table.view(-1).index_copy_(0, places.long(), values)


def read_step_triton(
    out: torch.Tensor,
    pinned: torch.Tensor,
    count: int,
    *,
    table: torch.Tensor,
    writes: torch.Tensor | None,
) -> None:
    num_writes, block = 0 if writes is None else writes.shape[1], 1024
    launch(
        _read_step_kernel,
        (cdiv(count, block) + cdiv(num_writes, block),),
        out,
        pinned,
        count,
        table,
        pinned if writes is None else writes,
        num_writes,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["count", "num_writes"])
def _read_step_kernel(
    out, pinned, count, table, writes, num_writes, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    wait_for_inputs(OVERLAPS)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_input = at < count
    tl.store(out + at, tl.load(pinned + at, is_input, other=0), is_input)
    # The programs after those that read inputs write the table.
    write = at - tl.cdiv(count, BLOCK) * BLOCK
    is_write = (write >= 0) & (write < num_writes)
    place = tl.load(writes + write, is_write, other=0)
    tl.store(table + place, tl.load(writes + num_writes + write, is_write, other=0), is_write)
