"""The second product of adapters, added to the output of a projection."""

from __future__ import annotations

import torch

from hearth.core.sizes import ADAPTER_PROJECTIONS
from hearth.kernels.adapter_blocks import AdapterBlocks
from hearth.kernels.adapter_rows import (
    FACTOR_ALIGNMENT,
    FIELDS,
    FIRST_B,
    FIRST_BEGIN,
    FIRST_RANK,
    FIRST_SIZE,
    MAX_RANKS,
    TOTAL_RANK,
    AdapterRows,
    load_share,
)
from hearth.kernels.jit import launch, tl, triton
from hearth.kernels.overlap import wait_for_inputs


def expand_triton(
    shrunk: torch.Tensor,
    rows: AdapterRows,
    target: int,
    blocks: AdapterBlocks,
    *,
    out: torch.Tensor,
) -> None:
    _, n = out.shape
    assert out.is_contiguous(), f"{out.stride()=}"
    shares = rows.shares[target % ADAPTER_PROJECTIONS]
    launch(
        _expand_kernel,
        (len(shares),),
        out,
        shrunk,
        rows.order,
        shares,
        target,
        n,
        SPLITS=blocks.num_splits,
        ROOM=blocks.shrunk_room,
        BLOCK_M=rows.tile_rows,
        BLOCK_N=blocks.outputs,
        LOW_RANK=blocks.low_rank,
        LOW_R=blocks.low_ranks,
        LOW_N=blocks.low_outputs,
        ROW_R=blocks.expand_ranks,
        ROW_N=blocks.expand_outputs,
        STAGES=blocks.num_stages,
        num_warps=blocks.num_warps,
        num_stages=1,  # unless a loop sets more
        maxnreg=blocks.max_registers,
    )


@triton.jit(do_not_specialize=["target"])
def _expand_kernel(
    out,
    scratch,
    order,
    shares,
    target,
    n,
    SPLITS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LOW_RANK: tl.constexpr,
    LOW_R: tl.constexpr,
    LOW_N: tl.constexpr,
    ROW_R: tl.constexpr,
    ROW_N: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # Before the wait: lists and tables do not change during a step (`overlap.py`).
    table, begin, num, part, parts = load_share(shares)
    has_table = table != 0
    fields = table.to(tl.pointer_type(tl.int64)) + target * FIELDS
    total = 0
    for at in tl.static_range(3):
        rank = tl.load(fields + FIRST_RANK + at, has_table, other=0).to(tl.int32)
        size = tl.load(fields + FIRST_SIZE + at, has_table, other=0).to(tl.int32)
        total += _numbers_of_output(rank, num) * size
    apart = tl.load(fields + TOTAL_RANK, has_table, other=0).to(tl.int32)
    wait_for_inputs(OVERLAPS)
    if has_table:
        # This program has so many numbers of all slices, concatenated, from `first` on.
        own = tl.cdiv(total, parts)
        first = own * part
        left = scratch + begin * ROOM
        for number in range(3):
            rank = tl.load(fields + FIRST_RANK + number).to(tl.int32)
            size = tl.load(fields + FIRST_SIZE + number).to(tl.int32)
            numbers = _numbers_of_output(rank, num)
            own_first = _outputs_before(first, numbers, size)
            own_last = _outputs_before(first + own, numbers, size)
            first -= numbers * size
            if own_first < own_last:
                to = tl.load(fields + FIRST_BEGIN + number)
                b = tl.load(fields + FIRST_B + number).to(tl.pointer_type(out.dtype.element_ty))
                b = tl.multiple_of(b, 16)
                stride = tl.cdiv(size, FACTOR_ALIGNMENT) * FACTOR_ALIGNMENT
                row = out + tl.load(order + begin) * n + to
                if (num == 1) & (rank <= LOW_RANK):
                    _expand_low_row(
                        row,
                        b,
                        stride,
                        left,
                        apart,
                        rank,
                        size,
                        own_first,
                        own_last,
                        SPLITS,
                        ROOM,
                        LOW_R,
                        LOW_N,
                    )
                elif (num == 1) & (rank <= ROW_R):
                    _expand_row(
                        row,
                        b,
                        stride,
                        left,
                        apart,
                        rank,
                        size,
                        own_first,
                        own_last,
                        SPLITS,
                        ROOM,
                        ROW_R,
                        ROW_N,
                        STAGES,
                    )
                elif num == 1:
                    _expand_wide_row(
                        row,
                        b,
                        stride,
                        left,
                        apart,
                        rank,
                        size,
                        own_first,
                        own_last,
                        SPLITS,
                        ROOM,
                        ROW_R,
                        ROW_N,
                        STAGES,
                    )
                else:
                    member = tl.arange(0, BLOCK_M)
                    in_rows = member < num
                    rows = out + tl.load(order + begin + member, in_rows, other=0)[:, None] * n
                    rows_left = left + member[:, None] * ROOM
                    if (to % FACTOR_ALIGNMENT == 0) & (size % FACTOR_ALIGNMENT == 0):
                        # Multiples that the compiler can see, so that a thread moves 16 bytes at a time.
                        rows += to // FACTOR_ALIGNMENT * FACTOR_ALIGNMENT
                        for first_rank in range(0, rank, ROW_R):
                            _expand_rows(
                                rows,
                                b + first_rank * stride,
                                stride,
                                rows_left + first_rank,
                                apart,
                                rank - first_rank,
                                own_first,
                                own_last,
                                in_rows,
                                SPLITS,
                                ROOM,
                                ROW_R,
                                BLOCK_N,
                                STAGES,
                            )
                            tl.debug_barrier()  # other threads may read what this one has written
                    else:
                        _expand_odd_rows(
                            rows + to,
                            b,
                            stride,
                            rows_left,
                            apart,
                            rank,
                            size,
                            own_first,
                            own_last,
                            in_rows,
                            SPLITS,
                            ROOM,
                        )
            left += rank


@triton.jit
def _numbers_of_output(rank, num_rows):
    """Numbers that are moved per output of a slice: its factors, and each row but the first twice."""
    return tl.where(rank > 0, rank + 2 * (num_rows - 1), 0)


@triton.jit
def _outputs_before(numbers, numbers_of_output, size):
    """Outputs of a slice before so many numbers, in groups of 32: a program starts at an aligned address.

    The last program of a slice also gets its padding.
    """
    outputs = tl.cdiv(tl.maximum(numbers, 0), 32 * tl.maximum(numbers_of_output, 1)) * 32
    end = tl.cdiv(size, FACTOR_ALIGNMENT) * FACTOR_ALIGNMENT
    return tl.where(numbers_of_output > 0, tl.minimum(outputs, end), 0)


@triton.jit
def _load_shrunk(left, apart, ranks, in_rank, SPLITS: tl.constexpr, ROOM: tl.constexpr):
    """The sum of the first product's parts of some ranks, which are `apart` from each other."""
    shrunk = tl.load(left + ranks, in_rank, other=0.0)
    are_parts = in_rank
    if ROOM < SPLITS * MAX_RANKS:
        are_parts = in_rank & (ranks < tl.where(SPLITS * apart <= ROOM, apart, 0))
    for split in tl.static_range(1, SPLITS):
        shrunk += tl.load(left + split * apart + ranks, are_parts, other=0.0)
    return shrunk


@triton.jit
def _expand_low_row(
    out,
    b,
    stride,
    left,
    apart,
    rank,
    size,
    first,
    last,
    SPLITS: tl.constexpr,
    ROOM: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    for at in range(first, last, OUTPUTS):
        output = at + tl.arange(0, OUTPUTS)
        is_stored = output < tl.minimum(last, size)
        before = tl.load(out + output, is_stored, other=0.0)
        acc = before.to(tl.float32)
        for first_rank in range(0, rank, RANKS):
            ranks = first_rank + tl.arange(0, RANKS)
            in_rank = ranks < rank
            factor = tl.load(
                b + ranks[:, None] * stride + output[None, :],
                in_rank[:, None] & (output < last)[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            # Without a barrier the compiler waits for each load in turn, to save registers. After one it
            # cannot read the other factor before all loads are in flight.
            tl.debug_barrier()
            shrunk = _load_shrunk(left, apart, ranks, in_rank, SPLITS, ROOM).to(factor.dtype).to(tl.float32)
            acc += tl.sum(factor.to(tl.float32) * shrunk[:, None], 0)
        tl.store(out + output, acc.to(before.dtype), is_stored)


@triton.jit
def _expand_row(
    out,
    b,
    stride,
    left,
    apart,
    rank,
    size,
    first,
    last,
    SPLITS: tl.constexpr,
    ROOM: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add outputs from `first` to `last` of a slice of at most RANKS ranks to one row.

    Factors of the next outputs are loaded meanwhile. Tensor cores take half the instructions, although they
    multiply 15 more rows of zeros.
    """
    ranks = tl.arange(0, RANKS)
    in_rank = ranks < rank
    shrunk = _load_shrunk(left, apart, ranks, in_rank, SPLITS, ROOM)
    rows = tl.where(tl.arange(0, 16)[:, None] == 0, shrunk[None, :], 0.0).to(b.dtype.element_ty)
    at_b = b + ranks[:, None] * stride
    for at in tl.range(first, last, OUTPUTS, num_stages=STAGES):
        output = at + tl.arange(0, OUTPUTS)
        is_stored = output < tl.minimum(last, size)
        before = tl.load(out + output, is_stored, other=0.0)
        factor = tl.load(at_b + output[None, :], in_rank[:, None] & (output < last)[None, :], other=0.0)
        added = tl.sum(tl.dot(rows, factor, input_precision="ieee"), 0)
        tl.store(out + output, (before.to(tl.float32) + added).to(before.dtype), is_stored)


@triton.jit
def _expand_wide_row(
    out,
    b,
    stride,
    left,
    apart,
    rank,
    size,
    first,
    last,
    SPLITS: tl.constexpr,
    ROOM: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add outputs from `first` to `last` of a slice of any rank to one row, as `_expand_row`.

    RANKS of it are multiplied at a time, and outputs are stored after the last.
    """
    rounds = tl.cdiv(rank, RANKS)
    acc = tl.zeros([OUTPUTS], tl.float32)
    for at in tl.range(0, tl.cdiv(last - first, OUTPUTS) * rounds, num_stages=STAGES):
        turn = at % rounds
        output = first + at // rounds * OUTPUTS + tl.arange(0, OUTPUTS)
        ranks = turn * RANKS + tl.arange(0, RANKS)
        in_rank = ranks < rank
        at_b = b + ranks[:, None] * stride + output[None, :]
        factor = tl.load(at_b, in_rank[:, None] & (output < last)[None, :], other=0.0)
        shrunk = _load_shrunk(left, apart, ranks, in_rank, SPLITS, ROOM)
        rows = tl.where(tl.arange(0, 16)[:, None] == 0, shrunk[None, :], 0.0).to(b.dtype.element_ty)
        added = tl.sum(tl.dot(rows, factor, input_precision="ieee"), 0)
        acc = tl.where(turn == 0, 0.0, acc) + added
        is_stored = output < tl.where(turn == rounds - 1, tl.minimum(last, size), 0)
        before = tl.load(out + output, is_stored, other=0.0)
        tl.store(out + output, (before.to(tl.float32) + acc).to(before.dtype), is_stored)


@triton.jit
def _expand_rows(
    out,
    b,
    stride,
    left,
    apart,
    rank,
    first,
    last,
    in_rows,
    SPLITS: tl.constexpr,
    ROOM: tl.constexpr,
    RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add outputs from `first` to `last` of a slice, of its first RANKS ranks, to the rows of a tile.

    These and the outputs' addresses are multiples of FACTOR_ALIGNMENT numbers. Factors of the next outputs
    are loaded meanwhile.
    """
    ranks = tl.arange(0, RANKS)
    in_rank = ranks < rank
    is_shrunk = in_rows[:, None] & in_rank[None, :]
    shrunk = _load_shrunk(left, apart, ranks[None, :], is_shrunk, SPLITS, ROOM).to(b.dtype.element_ty)
    at_b = b + ranks[:, None] * stride
    for at in tl.range(first, last, OUTPUTS, num_stages=STAGES):
        output = at + tl.arange(0, OUTPUTS)
        inside = in_rows[:, None] & (output < last)[None, :]
        before = tl.load(out + output[None, :], inside, other=0.0)
        factor = tl.load(at_b + output[None, :], in_rank[:, None] & (output < last)[None, :], other=0.0)
        acc = tl.dot(shrunk, factor, before.to(tl.float32), input_precision="ieee")
        tl.store(out + output[None, :], acc.to(before.dtype), inside)


@triton.jit
def _expand_odd_rows(
    out,
    b,
    stride,
    left,
    apart,
    rank,
    size,
    first,
    last,
    in_rows,
    SPLITS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Add outputs from `first` to `last` of a slice, without alignment, to the rows of a tile.

    Few models need it. Blocks are small, to leave registers to the other code paths.
    """
    BLOCK_R: tl.constexpr = 16
    BLOCK_N: tl.constexpr = 16
    for at in range(first, last, BLOCK_N):
        output = at + tl.arange(0, BLOCK_N)
        inside = in_rows[:, None] & (output < tl.minimum(last, size))[None, :]
        before = tl.load(out + output[None, :], inside, other=0.0)
        acc = before.to(tl.float32)
        for first_rank in range(0, rank, BLOCK_R):
            ranks = first_rank + tl.arange(0, BLOCK_R)
            in_rank = ranks < rank
            factor = tl.load(
                b + ranks[:, None] * stride + output[None, :],
                in_rank[:, None] & (output < last)[None, :],
                other=0.0,
            )
            is_shrunk = in_rows[:, None] & in_rank[None, :]
            shrunk = _load_shrunk(left, apart, ranks[None, :], is_shrunk, SPLITS, ROOM)
            acc = tl.dot(shrunk.to(factor.dtype), factor, acc, input_precision="ieee")
        tl.store(out + output[None, :], acc.to(before.dtype), inside)
