"""The first product of adapters, `a @ x`, of all rows that have one. Knows shapes and pointers only."""

from __future__ import annotations

import torch

from hearth.kernels.adapter_blocks import TILES_AT_ONCE, AdapterBlocks
from hearth.kernels.adapter_rows import FIELDS, TILE_FIELDS, TOTAL_RANK, AdapterRows
from hearth.kernels.jit import cdiv, launch, num_processors, tl, triton
from hearth.kernels.overlap import wait_for_inputs
from hearth.sizes import MAX_SHRUNK_RANK


def shrink_triton(
    x: torch.Tensor, rows: AdapterRows, target: int, blocks: AdapterBlocks, *, out: torch.Tensor
) -> None:
    """Leave `a @ x` in `out`, in parts that add up to it: [splits, rows of the order, MAX_SHRUNK_RANK]."""
    num_rows, k = x.shape
    assert x.is_contiguous(), f"{x.stride()=}"
    # Parts of whole blocks, so that each begins where a row is aligned.
    share = cdiv(cdiv(k, blocks.num_splits), blocks.inputs) * blocks.inputs
    launch(
        _shrink_kernel,
        (blocks.programs_per_processor * num_processors(),),
        out,
        x,
        rows.order,
        rows.tiles,
        rows.count,
        target,
        num_rows,
        k,
        share,
        SPLITS=blocks.num_splits,
        STRIDE=MAX_SHRUNK_RANK,
        BLOCK_T=TILES_AT_ONCE,
        BLOCK_M=rows.tile_rows,
        BLOCK_R=blocks.ranks,
        BLOCK_K=blocks.inputs,
        ROW_R=blocks.row_chunk // blocks.row_inputs,
        ROW_K=blocks.row_inputs,
        EVEN_K=k % blocks.inputs == 0,
        STAGES=blocks.num_stages,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        maxnreg=blocks.max_registers,
    )


@triton.jit(do_not_specialize=["target", "num_rows"])
def _shrink_kernel(
    scratch,
    x,
    order,
    tiles,
    count,
    target,
    num_rows,
    k,
    share,
    SPLITS: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
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
    num_tiles = tl.load(count).to(tl.int32)
    total = 0
    for at in range(0, num_tiles, BLOCK_T):
        total += tl.sum(_shrink_chunks(tiles, at, num_tiles, target, SPLITS, BLOCK_T, BLOCK_R, ROW_R), 0)
    own = tl.cdiv(total, tl.num_programs(0))
    chunk = tl.program_id(0) * own
    last = tl.minimum(chunk + own, total)
    # The tile that the first chunk is of, and how many chunks lie before that tile.
    tile, before, passed = 0, 0, 0
    if (chunk < last) & (num_tiles > 1):
        for at in range(0, num_tiles, BLOCK_T):
            chunks = _shrink_chunks(tiles, at, num_tiles, target, SPLITS, BLOCK_T, BLOCK_R, ROW_R)
            is_before = (at + tl.arange(0, BLOCK_T) < num_tiles) & (passed + tl.cumsum(chunks, 0) <= chunk)
            tile += tl.sum(is_before.to(tl.int32), 0)
            before += tl.sum(tl.where(is_before, chunks, 0), 0)
            passed += tl.sum(chunks, 0)

    while chunk < last:
        begin = tl.load(tiles + tile * TILE_FIELDS + 1)
        num = tl.load(tiles + tile * TILE_FIELDS + 2).to(tl.int32)
        fields = tl.load(tiles + tile * TILE_FIELDS).to(tl.pointer_type(tl.int64)) + target * FIELDS
        a = tl.load(fields).to(tl.pointer_type(x.dtype.element_ty))
        a = tl.multiple_of(a, 16)
        rank = tl.load(fields + TOTAL_RANK).to(tl.int32)
        num_chunks = _num_blocks(rank, num, ROW_R, BLOCK_R) * SPLITS
        stop = tl.minimum(before + num_chunks, last)
        for at in range(chunk - before, stop - before):
            block, split = at // SPLITS, at % SPLITS
            first, end = split * share, tl.minimum((split + 1) * share, k)
            left = scratch + (split * num_rows + begin) * STRIDE
            if num == 1:
                row_x = x + tl.load(order + begin) * k
                _shrink_row(left, row_x, a, block, rank, first, end, k, ROW_R, ROW_K)
            else:
                member = tl.arange(0, BLOCK_M)
                in_rows = member < num
                rows_x = x + tl.load(order + begin + member, in_rows, other=0)[:, None] * k
                rows_left = left + member[:, None] * STRIDE
                _shrink_tile(
                    rows_left,
                    rows_x,
                    a,
                    block,
                    rank,
                    first,
                    end,
                    k,
                    in_rows,
                    BLOCK_M,
                    BLOCK_R,
                    BLOCK_K,
                    EVEN_K,
                    STAGES,
                )
        chunk = stop
        before += num_chunks
        tile += 1


@triton.jit
def _shrink_chunks(
    tiles,
    at,
    num_tiles,
    target,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROW_R: tl.constexpr,
):
    """How many chunks each of the tiles from `at` on has."""
    tile = at + tl.arange(0, BLOCK_T)
    is_tile = tile < num_tiles
    num = tl.load(tiles + tile * TILE_FIELDS + 2, is_tile, other=0).to(tl.int32)
    table = tl.load(tiles + tile * TILE_FIELDS, is_tile, other=0).to(tl.pointer_type(tl.int64))
    rank = tl.load(table + target * FIELDS + TOTAL_RANK, is_tile, other=0).to(tl.int32)
    return _num_blocks(rank, num, ROW_R, BLOCK_R) * SPLITS


@triton.jit
def _shrink_row(left, x, a, block, rank, first, end, k, ROW_R: tl.constexpr, ROW_K: tl.constexpr):
    """Leave some ranks of one row, of its inputs from `first` to `end`."""
    ranks = block * ROW_R + tl.arange(0, ROW_R)
    in_rank = ranks < rank
    acc = tl.zeros([ROW_R, ROW_K], tl.float32)
    for at in range(first, end, ROW_K):
        inputs = at + tl.arange(0, ROW_K)
        in_k = inputs < end
        at_a = a + ranks[:, None] * k + inputs[None, :]
        factor = tl.load(at_a, in_rank[:, None] & in_k[None, :], other=0.0, eviction_policy="evict_first")
        part = tl.load(x + inputs, in_k, other=0.0)
        acc += factor.to(tl.float32) * part.to(tl.float32)[None, :]
    tl.store(left + ranks, tl.sum(acc, 1), in_rank)


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
    """Leave some ranks of the rows of a tile, of their inputs from `first` to `end`."""
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


@triton.jit
def _num_blocks(size, num_rows, OF_ROW: tl.constexpr, OF_TILE: tl.constexpr):
    """How many blocks there are of some size: other ones where a tile has just one row."""
    return tl.where(num_rows == 1, tl.cdiv(size, OF_ROW), tl.cdiv(size, OF_TILE))
