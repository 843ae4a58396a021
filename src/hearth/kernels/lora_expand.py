"""The second product of adapters, added to the output of a projection. Knows shapes and pointers only."""

from __future__ import annotations

import torch

from hearth.kernels.adapter_blocks import TILES_AT_ONCE, AdapterBlocks
from hearth.kernels.adapter_rows import (
    FIELDS,
    FIRST_B,
    FIRST_BEGIN,
    FIRST_RANK,
    FIRST_SIZE,
    TILE_FIELDS,
    AdapterRows,
)
from hearth.kernels.jit import launch, num_processors, tl, triton
from hearth.kernels.overlap import wait_for_inputs
from hearth.sizes import MAX_SHRUNK_RANK


def expand_triton(
    shrunk: torch.Tensor, rows: AdapterRows, target: int, blocks: AdapterBlocks, *, out: torch.Tensor
) -> None:
    """Add `b` times what `shrink_triton` has left to the rows of `out`."""
    num_rows, n = out.shape
    assert out.is_contiguous(), f"{out.stride()=}"
    launch(
        _expand_kernel,
        (blocks.programs_per_processor * num_processors(),),
        out,
        shrunk,
        rows.order,
        rows.tiles,
        rows.count,
        target,
        num_rows,
        n,
        SPLITS=blocks.num_splits,
        STRIDE=MAX_SHRUNK_RANK,
        BLOCK_T=TILES_AT_ONCE,
        BLOCK_M=rows.tile_rows,
        BLOCK_R=blocks.ranks,
        BLOCK_N=blocks.outputs,
        ROW_CHUNK=blocks.row_chunk,
        num_warps=blocks.num_warps,
        num_stages=1,  # there is little to loop over, and shared memory is better left to other programs
    )


@triton.jit(do_not_specialize=["target", "num_rows"])
def _expand_kernel(
    out,
    scratch,
    order,
    tiles,
    count,
    target,
    num_rows,
    n,
    SPLITS: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    num_tiles = tl.load(count).to(tl.int32)
    total = 0
    for at in range(0, num_tiles, BLOCK_T):
        total += tl.sum(_expand_chunks(tiles, at, num_tiles, target, BLOCK_T, BLOCK_N, ROW_CHUNK), 0)
    own = tl.cdiv(total, tl.num_programs(0))
    chunk = tl.program_id(0) * own
    last = tl.minimum(chunk + own, total)
    tile, before, passed = 0, 0, 0
    if (chunk < last) & (num_tiles > 1):
        for at in range(0, num_tiles, BLOCK_T):
            chunks = _expand_chunks(tiles, at, num_tiles, target, BLOCK_T, BLOCK_N, ROW_CHUNK)
            is_before = (at + tl.arange(0, BLOCK_T) < num_tiles) & (passed + tl.cumsum(chunks, 0) <= chunk)
            tile += tl.sum(is_before.to(tl.int32), 0)
            before += tl.sum(tl.where(is_before, chunks, 0), 0)
            passed += tl.sum(chunks, 0)

    apart = num_rows.to(tl.int64) * STRIDE
    while chunk < last:
        begin = tl.load(tiles + tile * TILE_FIELDS + 1)
        num = tl.load(tiles + tile * TILE_FIELDS + 2).to(tl.int32)
        fields = tl.load(tiles + tile * TILE_FIELDS).to(tl.pointer_type(tl.int64)) + target * FIELDS
        rank_0 = tl.load(fields + FIRST_RANK).to(tl.int32)
        rank_1 = tl.load(fields + FIRST_RANK + 1).to(tl.int32)
        rank_2 = tl.load(fields + FIRST_RANK + 2).to(tl.int32)
        size_0 = tl.load(fields + FIRST_SIZE).to(tl.int32)
        begin_0 = tl.load(fields + FIRST_BEGIN).to(tl.int32)
        chunks_0 = _slice_chunks(rank_0, begin_0, size_0, num, BLOCK_N, ROW_CHUNK)
        size_1 = tl.load(fields + FIRST_SIZE + 1).to(tl.int32)
        begin_1 = tl.load(fields + FIRST_BEGIN + 1).to(tl.int32)
        chunks_1 = _slice_chunks(rank_1, begin_1, size_1, num, BLOCK_N, ROW_CHUNK)
        size_2 = tl.load(fields + FIRST_SIZE + 2).to(tl.int32)
        begin_2 = tl.load(fields + FIRST_BEGIN + 2).to(tl.int32)
        chunks_2 = _slice_chunks(rank_2, begin_2, size_2, num, BLOCK_N, ROW_CHUNK)
        num_chunks = chunks_0 + chunks_1 + chunks_2
        stop = tl.minimum(before + num_chunks, last)
        for at in range(chunk - before, stop - before):
            is_behind_0 = at >= chunks_0
            is_behind_1 = at >= chunks_0 + chunks_1
            number = is_behind_0.to(tl.int32) + is_behind_1.to(tl.int32)
            block = at - tl.where(is_behind_0, chunks_0, 0) - tl.where(is_behind_1, chunks_1, 0)
            rank = tl.where(is_behind_1, rank_2, tl.where(is_behind_0, rank_1, rank_0))
            before_rank = tl.where(is_behind_0, rank_0, 0) + tl.where(is_behind_1, rank_1, 0)
            left = scratch + begin * STRIDE + before_rank
            b = tl.load(fields + FIRST_B + number).to(tl.pointer_type(out.dtype.element_ty))
            b = tl.multiple_of(b, 16)
            to = tl.where(is_behind_1, begin_2, tl.where(is_behind_0, begin_1, begin_0))
            size = tl.where(is_behind_1, size_2, tl.where(is_behind_0, size_1, size_0))
            # What is even is said so that the compiler can see it, which then loads eight numbers at a time.
            is_even = _is_even(rank, to, size)
            even_rank, even_to, even_size = rank // 8 * 8, to // 8 * 8, size // 8 * 8
            if num == 1:
                row = out + tl.load(order + begin) * n
                if not is_even:
                    _expand_row(row + to, b, left, apart, rank, size, block, SPLITS, ROW_CHUNK // 64, 16)
                elif rank <= 8:
                    _expand_row(
                        row + even_to, b, left, apart, even_rank, even_size, block, SPLITS, ROW_CHUNK // 8, 8
                    )
                elif rank <= 16:
                    _expand_row(
                        row + even_to,
                        b,
                        left,
                        apart,
                        even_rank,
                        even_size,
                        block,
                        SPLITS,
                        ROW_CHUNK // 16,
                        16,
                    )
                elif rank <= 32:
                    _expand_row(
                        row + even_to,
                        b,
                        left,
                        apart,
                        even_rank,
                        even_size,
                        block,
                        SPLITS,
                        ROW_CHUNK // 32,
                        32,
                    )
                else:
                    _expand_row(
                        row + even_to,
                        b,
                        left,
                        apart,
                        even_rank,
                        even_size,
                        block,
                        SPLITS,
                        ROW_CHUNK // 64,
                        64,
                    )
            else:
                member = tl.arange(0, BLOCK_M)
                in_rows = member < num
                rows = out + tl.load(order + begin + member, in_rows, other=0)[:, None] * n
                rows_left = left + member[:, None] * STRIDE
                if is_even:
                    _expand_tile(
                        rows + even_to,
                        b,
                        rows_left,
                        apart,
                        even_rank,
                        even_size,
                        block,
                        in_rows,
                        SPLITS,
                        BLOCK_R,
                        BLOCK_N,
                    )
                else:
                    _expand_tile(
                        rows + to, b, rows_left, apart, rank, size, block, in_rows, SPLITS, BLOCK_R, BLOCK_N
                    )
        chunk = stop
        before += num_chunks
        tile += 1


@triton.jit
def _expand_chunks(
    tiles,
    at,
    num_tiles,
    target,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_CHUNK: tl.constexpr,
):
    """How many chunks each of the tiles from `at` on has."""
    tile = at + tl.arange(0, BLOCK_T)
    is_tile = tile < num_tiles
    num = tl.load(tiles + tile * TILE_FIELDS + 2, is_tile, other=0).to(tl.int32)
    table = tl.load(tiles + tile * TILE_FIELDS, is_tile, other=0).to(tl.pointer_type(tl.int64))
    fields = table + target * FIELDS
    chunks = tl.zeros([BLOCK_T], tl.int32)
    for number in tl.static_range(3):
        rank = tl.load(fields + FIRST_RANK + number, is_tile, other=0).to(tl.int32)
        size = tl.load(fields + FIRST_SIZE + number, is_tile, other=0).to(tl.int32)
        begin = tl.load(fields + FIRST_BEGIN + number, is_tile, other=0).to(tl.int32)
        chunks += _slice_chunks(rank, begin, size, num, BLOCK_N, ROW_CHUNK)
    return chunks


@triton.jit
def _slice_chunks(rank, begin, size, num, BLOCK_N: tl.constexpr, ROW_CHUNK: tl.constexpr):
    """How many chunks a slice has. Those of a single row have as many outputs as its ranks leave room for."""
    width = tl.where(rank <= 8, 8, tl.where(rank <= 16, 16, tl.where(rank <= 32, 32, 64)))
    width = tl.where(_is_even(rank, begin, size), width, 64)
    return tl.where(num == 1, tl.cdiv(size, ROW_CHUNK // width), tl.cdiv(size, BLOCK_N))


@triton.jit
def _is_even(rank, begin, size):
    return (rank % 8 == 0) & (begin % 8 == 0) & (size % 8 == 0)


@triton.jit
def _expand_row(
    out,
    b,
    left,
    apart,
    rank,
    size,
    block,
    SPLITS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add a chunk of a slice to one row, by so many of its ranks at a time."""
    output = block * OUTPUTS + tl.arange(0, OUTPUTS)
    in_slice = output < size
    before = tl.load(out + output, in_slice, other=0.0)
    acc = tl.zeros([OUTPUTS, WIDTH], tl.float32)
    split = tl.arange(0, SPLITS)
    for first in range(0, rank, WIDTH):
        ranks = first + tl.arange(0, WIDTH)
        in_rank = ranks < rank
        at_b = b + output[:, None] * rank + ranks[None, :]
        factor = tl.load(at_b, in_slice[:, None] & in_rank[None, :], other=0.0, eviction_policy="evict_first")
        parts = tl.load(left + split[:, None] * apart + ranks[None, :], in_rank[None, :], other=0.0)
        shrunk = tl.sum(parts, 0).to(factor.dtype).to(tl.float32)
        acc += factor.to(tl.float32) * shrunk[None, :]
    after = before.to(tl.float32) + tl.sum(acc, 1)
    tl.store(out + output, after.to(before.dtype), in_slice)


@triton.jit
def _expand_tile(
    out,
    b,
    left,
    apart,
    rank,
    size,
    block,
    in_rows,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add a chunk of a slice to the rows of a tile."""
    output = block * BLOCK_N + tl.arange(0, BLOCK_N)
    in_slice = output < size
    inside = in_rows[:, None] & in_slice[None, :]
    before = tl.load(out + output[None, :], inside, other=0.0)
    acc = before.to(tl.float32)
    for first in range(0, rank, BLOCK_R):
        ranks = first + tl.arange(0, BLOCK_R)
        in_rank = ranks < rank
        factor = tl.load(
            b + output[:, None] * rank + ranks[None, :], in_slice[:, None] & in_rank[None, :], other=0.0
        )
        is_shrunk = in_rows[:, None] & in_rank[None, :]
        shrunk = tl.load(left + ranks[None, :], is_shrunk, other=0.0)
        for split in tl.static_range(1, SPLITS):
            shrunk += tl.load(left + split * apart + ranks[None, :], is_shrunk, other=0.0)
        acc = tl.dot(shrunk.to(factor.dtype), tl.trans(factor), acc, input_precision="ieee")
    tl.store(out + output[None, :], acc.to(before.dtype), inside)
