"""Adds adapters to the output of a projection, for rows of many adapters, or none, at once.

An adapter is two products, `a @ x` with few outputs and `b` times those, so a projection takes two launches:
the first shrinks the rows of each tile and writes the result to scratch, as partial sums where several
programs share one; the second adds up the parts, expands them and adds the result to the output. The first is
independent of the projection's own product. In steps of few rows, which are bound by memory, a captured graph
runs both in parallel: the library's kernels leave multiprocessors idle.

Lists of rows and shares are on the device at fixed addresses, and a share names the table of its adapter,
which has factors and ranks. So one captured launch serves adapters of any ranks, without padding. A program
has one share of one tile's factors, all of about the same size (`adapter_rows.py`). Tiles of one row, the
most frequent while requests decode, have their own code path, whose aim is to keep enough bytes in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hearth.core.sizes import ADAPTER_TILE_ROWS
from hearth.kernels.adapter_blocks import AdapterBlocks, adapter_blocks
from hearth.kernels.adapter_rows import AdapterRows
from hearth.kernels.branch import run_beside
from hearth.kernels.jit import runs_triton
from hearth.kernels.lora_expand import expand_triton
from hearth.kernels.lora_shrink import shrink_triton


def project_with_adapters(
    product: Callable[[], object],
    x: torch.Tensor,
    rows: AdapterRows,
    target: int,
    *,
    scratch: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Run `product`, which sets `out`, and add `b @ (a @ x)` to rows whose adapter has factors for `target`.

    x is [rows, inputs] and out [rows, outputs]. `scratch` (float32, flat) is for the CUDA path, and must not
    overlap memory of `product`: it has MAX_SHRUNK_RANK numbers per row, ADAPTER_SPLITS times as many for
    tiles of few rows.
    """
    if not runs_triton(x):
        product()
        add_adapters_reference(x, rows, target, out=out)
    elif rows.tile_rows > ADAPTER_TILE_ROWS:
        product()
        add_adapters_triton(x, rows, target, scratch=scratch, out=out)
    else:
        add_adapters_triton(x, rows, target, scratch=scratch, out=out, product=product)


def add_adapters_reference(x: torch.Tensor, rows: AdapterRows, target: int, *, out: torch.Tensor) -> None:
    for group in rows.groups:
        factors = group.factors.get(target)
        if factors is None:
            continue
        at = torch.from_numpy(group.rows).to(x.device)
        shrunk = x[at] @ factors.a.to(x.dtype).t()
        ranks = [len(one.b) for one in factors.slices]
        for one, part in zip(factors.slices, shrunk.split(ranks, 1), strict=True):
            outputs = slice(one.begin, one.begin + one.b.shape[1])
            out[at, outputs] += part @ one.b.to(x.dtype)


def add_adapters_triton(
    x: torch.Tensor,
    rows: AdapterRows,
    target: int,
    *,
    scratch: torch.Tensor,
    out: torch.Tensor,
    blocks: AdapterBlocks | None = None,
    product: Callable[[], object] | None = None,
) -> None:
    blocks = adapter_blocks(x.shape[1], rows.tile_rows, x.dtype) if blocks is None else blocks
    num_needed = len(x) * blocks.shrunk_room
    assert scratch.numel() >= num_needed, f"{scratch.numel()=} {num_needed=} for {x.shape=}"
    is_beside = product is not None
    shrink = partial(shrink_triton, x, rows, target, blocks, out=scratch, is_beside=is_beside)
    if product is None:
        shrink()
    else:
        run_beside(x.device, product, shrink)
    expand_triton(scratch, rows, target, blocks, out=out)
