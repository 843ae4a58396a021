"""The first product of adapters, `a @ x`, of all rows that have one."""

from __future__ import annotations

import torch

from hearth.core.sizes import ADAPTER_PROJECTIONS
from hearth.kernels.adapter_blocks import AdapterBlocks
from hearth.kernels.adapter_rows import FIELDS, MAX_RANKS, TOTAL_RANK, AdapterRows, load_share
from hearth.kernels.jit import cdiv, launch, tl, triton
from hearth.kernels.overlap import wait_for_inputs


def shrink_triton(
    x: torch.Tensor,
    rows: AdapterRows,
    target: int,
    blocks: AdapterBlocks,
    *,
    out: torch.Tensor,
    is_beside: bool = False,
) -> None:
    """Write `a @ x` to `out`, [rows of the order, `AdapterBlocks.shrunk_room`].

    A row has partial sums one after the other, if there is room for them.

    `is_beside`: the model's own product runs at the same time. Then programs do not start early: while they
    wait, they would occupy multiprocessors that it needs.
    """
    _, k = x.shape
    assert x.is_contiguous(), f"{x.stride()=}"
    shares = rows.shares[target % ADAPTER_PROJECTIONS]
    launch(
        _shrink_kernel,
        (len(shares),),
        out,
        x,
        rows.order,
        shares,
        target,
        k,
        # In whole blocks, so that each split begins at an aligned address.
        cdiv(cdiv(k, blocks.num_splits), blocks.inputs) * blocks.inputs,
        SPLITS=blocks.num_splits,
        ROOM=blocks.shrunk_room,
        BLOCK_M=rows.tile_rows,
        BLOCK_R=blocks.ranks,
        BLOCK_K=blocks.inputs,
        ROW_R=blocks.shrink_ranks,
        ROW_K=blocks.shrink_inputs,
        EVEN_K=k % blocks.inputs == 0,
        STAGES=blocks.num_stages,
        **({"OVERLAPS": False} if is_beside else {}),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        maxnreg=blocks.max_registers,
    )


@triton.jit(do_not_specialize=["target"])
def _shrink_kernel(
    scratch,
    x,
    order,
    shares,
    target,
    k,
    split_size,
    SPLITS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_R: tl.constexpr,
    ROW_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    table, begin, num, part, parts = load_share(shares)
    if table != 0:
        fields = table.to(tl.pointer_type(tl.int64)) + target * FIELDS
        a = tl.load(fields).to(tl.pointer_type(x.dtype.element_ty))
        a = tl.multiple_of(a, 16)
        rank = tl.load(fields + TOTAL_RANK).to(tl.int32)
        left = scratch + begin * ROOM
        splits = SPLITS
        if ROOM < SPLITS * MAX_RANKS:
            has_parts = SPLITS * rank <= ROOM
            splits = tl.where(has_parts, SPLITS, 1)
            split_size = tl.where(has_parts, split_size, k)
        if num == 1:
            row = x + tl.load(order + begin) * k
            first, last = _part_of(rank * splits, part, parts)
            _shrink_row(left, row, a, rank, first, last, k, split_size, ROW_R, ROW_K)
        else:
            member = tl.arange(0, BLOCK_M)
            in_rows = member < num
            rows = x + tl.load(order + begin + member, in_rows, other=0)[:, None] * k
            first, last = _part_of(tl.cdiv(rank, BLOCK_R) * splits, part, parts)
            for at in range(first, last):
                split = at % splits
                _shrink_tile(
                    left + split * rank + member[:, None] * ROOM,
                    rows,
                    a,
                    at // splits,
                    rank,
                    split * split_size,
                    tl.minimum((split + 1) * split_size, k),
                    k,
                    in_rows,
                    BLOCK_M,
                    BLOCK_R,
                    BLOCK_K,
                    EVEN_K,
                    STAGES,
                )


@triton.jit
def _part_of(count, part, parts):
    """Begin and end of a part of `count` items. Sizes of parts differ by at most one."""
    return count * part // parts, count * (part + 1) // parts


@triton.jit
def _shrink_row(
    left,
    x,
    a,
    rank,
    first,
    last,
    k,
    split_size,
    ROW_R: tl.constexpr,
    ROW_K: tl.constexpr,
):
    """Write sums of one row, from `first` to `last` of the ranks of the first split, the second and so on."""
    while first < last:
        split = first // rank
        ranks = first - split * rank + tl.arange(0, ROW_R)
        num = tl.minimum(tl.minimum((split + 1) * rank, last) - first, ROW_R)
        in_rank = tl.arange(0, ROW_R) < num
        begin = split * split_size
        end = tl.minimum(begin + split_size, k)
        acc = tl.zeros([ROW_R, ROW_K], tl.float32)
        for at in range(begin, end, ROW_K):
            inputs = at + tl.arange(0, ROW_K)
            in_k = inputs < end
            at_a = a + ranks[:, None] * k + inputs[None, :]
            factor = tl.load(at_a, in_rank[:, None] & in_k[None, :], other=0.0, eviction_policy="evict_first")
            row = tl.load(x + inputs, in_k, other=0.0)
            acc += factor.to(tl.float32) * row.to(tl.float32)[None, :]
        tl.store(left + split * rank + ranks, tl.sum(acc, 1), in_rank)
        first += num


@triton.jit
def _shrink_tile(
    left,
    x,
    a,
    block,
    rank,
    first,
    end,
    k,
    in_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    ranks = block * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rank = ranks < rank
    inputs = tl.arange(0, BLOCK_K)
    at_a = a + ranks[:, None] * k + inputs[None, :]
    at_x = x + inputs[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for at in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            factor = tl.load(at_a + at, in_rank[:, None], other=0.0)
            part = tl.load(at_x + at, in_rows[:, None], other=0.0)
        else:
            in_k = (inputs < end - at)[None, :]
            factor = tl.load(at_a + at, in_rank[:, None] & in_k, other=0.0)
            part = tl.load(at_x + at, in_rows[:, None] & in_k, other=0.0)
        acc = tl.dot(part, tl.trans(factor), acc, input_precision="ieee")
    tl.store(left + ranks[None, :], acc, in_rows[:, None] & in_rank[None, :])
