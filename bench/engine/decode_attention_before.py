"""Attention of one query token per sequence over its paged KV (decode). Knows shapes and pointers only.

    tiles of KV:   | row 0, head 0 | row 0, head 1 | ... | row 1, head 0 | ...      a tile: BLOCK_N tokens
    programs:      |   0   |   1   |   2   |   3   |   4   | ...                    as many tiles each

A program attends to a run of tiles, wherever heads and rows begin and end in it, so long and short contexts
share the device evenly. Where a head's tiles are of more than one program, each leaves a part of the result,
and the one that finishes last merges the parts, in the order of the tiles: the result does not depend on
which one that was. How many rows there are and how long is read on the device, so one captured launch serves
them all, and a launch without rows costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hearth.kernels.jit import launch, next_power_of_2, runs_triton, tl, triton
from hearth.kernels.overlap import wait_for_inputs
from hearth.kernels.paged import Heads, PagedRows

_LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Memory in which programs leave parts of results. Counters are zero between launches."""

    num_programs: int  #: of a launch
    partial: torch.Tensor  #: float32, flat: [program][first, last][q head of the group][dim]
    stats: torch.Tensor  #: float32, flat: [program][first, last][q head of the group][maximum, sum]
    counters: torch.Tensor  #: int32, flat: [row][kv head]


def decode_attention(
    qkv: torch.Tensor,
    heads: Heads,
    rows: PagedRows,
    kv: torch.Tensor,
    *,
    window: int | None,
    scratch: SplitScratch | None,
    out: torch.Tensor,
    num_rows: torch.Tensor | None = None,
) -> None:
    """Attend from each row to its sequence up to itself, or to the last `window` tokens of that.

    `num_rows` (int32 [1], on the device) is how many of the rows there are in this step; the others are left
    alone. None: all of them are there. Only the CUDA path knows rows that are not there.

    q is the head of each row of `qkv`; k and v are read from `kv` [blocks, 2, block_tokens, kv_heads, dim].
    """
    if runs_triton(qkv):
        assert scratch is not None, "the CUDA path needs scratch"
        decode_attention_triton(
            qkv, heads, rows, kv, window=window, scratch=scratch, out=out, num_rows=num_rows
        )
    else:
        decode_attention_reference(qkv, heads, rows, kv, window=window, out=out)


def decode_attention_reference(
    qkv: torch.Tensor,
    heads: Heads,
    rows: PagedRows,
    kv: torch.Tensor,
    *,
    window: int | None,
    out: torch.Tensor,
) -> None:
    context = rows.context(kv.shape[2], window)
    # The q heads that share a k head are the rows of one query, so the library reads each k and v once.
    q = qkv[:, : heads.num_q * heads.dim].view(len(qkv), heads.num_kv, -1, heads.dim)
    k, v = map(context.read, kv.unbind(1))
    out.view(q.shape).copy_(F.scaled_dot_product_attention(q, k, v, context.seen))


@dataclass(frozen=True, slots=True)
class TileShape:
    """How many tokens a program reads at a time, and with what."""

    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  #: of a thread; None: what the compiler takes


def tile_shape(heads: Heads, dtype: torch.dtype, window: int | None) -> TileShape:
    """Return the tile for heads and numbers like these, such that four programs fit on a multiprocessor."""
    block_n = 32 if heads.dim > 128 or dtype == torch.float32 else 64
    takes_many = heads.dim > 128 or window is not None
    return TileShape(block_n, num_warps=4, num_stages=2, max_registers=128 if takes_many else None)


#: Rows whose lengths a program reads at a time.
_BLOCK_ROWS = 256


def decode_attention_triton(
    qkv: torch.Tensor,
    heads: Heads,
    rows: PagedRows,
    kv: torch.Tensor,
    *,
    window: int | None,
    scratch: SplitScratch,
    out: torch.Tensor,
    num_rows: torch.Tensor | None = None,
    shape: TileShape | None = None,
) -> None:
    group = heads.num_q // heads.num_kv
    shape = tile_shape(heads, qkv.dtype, window) if shape is None else shape
    launch(
        _decode_attention_kernel,
        (scratch.num_programs,),
        out,
        qkv,
        qkv.stride(0),
        rows.positions,
        rows.slots,
        rows.block_table,
        rows.block_table.stride(0),
        kv,
        kv.stride(0),
        scratch.partial,
        scratch.stats,
        scratch.counters,
        num_rows,
        len(qkv),
        heads.dim**-0.5 * _LOG2E,
        WINDOW=window or 0,
        NUM_KV=heads.num_kv,
        GROUP=group,
        GROUP_PAD=max(16, next_power_of_2(group)),  # what tensor cores take
        DIM=heads.dim,
        DIM_PAD=max(16, next_power_of_2(heads.dim)),
        BLOCK_TOKENS=kv.shape[2],
        BLOCK_N=shape.block_n,
        BLOCK_ROWS=_BLOCK_ROWS,
        STAGES=shape.num_stages,
        COUNTS_ROWS=num_rows is not None,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        maxnreg=shape.max_registers,
    )


@triton.jit(do_not_specialize=["table_stride", "max_rows"])
def _decode_attention_kernel(
    out,
    qkv,
    qkv_stride,
    positions,
    slots,
    table,
    table_stride,
    kv,
    kv_stride,
    partial,
    stats,
    counters,
    num_rows,
    max_rows,
    scale,
    WINDOW: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    COUNTS_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # Lengths are those of the whole step, so they are read while the kernel in front still runs.
    if COUNTS_ROWS:
        max_rows = tl.minimum(max_rows, tl.load(num_rows))
    total = 0
    for at in range(0, max_rows, BLOCK_ROWS):
        num_tiles = _tiles_of(positions, at + tl.arange(0, BLOCK_ROWS), max_rows, WINDOW, BLOCK_N)
        total += tl.sum(num_tiles, 0)
    # One program merges the parts of a head, so a mean length is cut into 64 of them at most, and into no
    # more than 16 while they are of less than four tiles.
    mean = tl.cdiv(total, tl.maximum(max_rows, 1))
    least = tl.maximum(tl.minimum(tl.cdiv(mean, 16), 4), tl.cdiv(mean, 64))
    total *= NUM_KV
    share = tl.maximum(tl.cdiv(total, tl.num_programs(0)), tl.maximum(least, 1))
    tile = tl.program_id(0) * share
    last_tile = tl.minimum(tile + share, total)
    # The row that the first tile is of, and how many tiles lie before that row.
    row, before, passed = 0, 0, 0
    if (tile < last_tile) & (max_rows > 1):
        for at in range(0, max_rows, BLOCK_ROWS):
            num_tiles = _tiles_of(positions, at + tl.arange(0, BLOCK_ROWS), max_rows, WINDOW, BLOCK_N)
            num_tiles *= NUM_KV
            is_before = (num_tiles > 0) & (passed + tl.cumsum(num_tiles, 0) <= tile)
            row += tl.sum(is_before.to(tl.int32), 0)
            before += tl.sum(tl.where(is_before, num_tiles, 0), 0)
            passed += tl.sum(num_tiles, 0)
    wait_for_inputs(OVERLAPS)

    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    in_group = member < GROUP
    in_q = in_group[:, None] & (dim < DIM)[None, :]
    while tile < last_tile:
        end = tl.load(positions + row) + 1
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(end - WINDOW, 0)
        num_tiles = tl.cdiv(end - begin, BLOCK_N)
        kv_head = (tile - before) // num_tiles
        first = (tile - before) % num_tiles
        stop = tl.minimum(first + last_tile - tile, num_tiles)
        q_head = kv_head * GROUP + member
        q_at = qkv + tl.cast(row, tl.int64) * qkv_stride + q_head[:, None] * DIM + dim[None, :]
        q = tl.load(q_at, in_q, other=0.0)
        row_table = table + tl.load(slots + row).to(tl.int64) * table_stride

        best = tl.full([GROUP_PAD], -float("inf"), tl.float32)
        total_p = tl.zeros([GROUP_PAD], tl.float32)
        acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
        last = tl.minimum(begin + stop * BLOCK_N, end)
        token = begin + first * BLOCK_N + tl.arange(0, BLOCK_N)
        # Pages are looked up one tile ahead, for what they hold cannot be asked for before.
        page = tl.load(row_table + token // BLOCK_TOKENS, token < last, other=0)
        for _ in tl.range(first, stop, num_stages=STAGES):
            in_context = token < last
            # Recycled memory may hold NaN, and 0 times NaN is NaN: zeros where there are no tokens.
            in_tile = in_context[:, None] & (dim < DIM)[None, :]
            unit = page.to(tl.int64) * kv_stride + (token % BLOCK_TOKENS) * (NUM_KV * DIM) + kv_head * DIM
            k_at = kv + unit[:, None] + dim[None, :]
            k = tl.load(k_at, in_tile, other=0.0)
            v = tl.load(k_at + BLOCK_TOKENS * NUM_KV * DIM, in_tile, other=0.0)
            token += BLOCK_N
            page = tl.load(row_table + token // BLOCK_TOKENS, token < last, other=0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            score = tl.where(in_context[None, :], score, -float("inf"))
            new_best = tl.maximum(best, tl.max(score, 1))
            shrink = tl.exp2(best - new_best)
            p = tl.exp2(score - new_best[:, None])
            total_p = total_p * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            best = new_best

        is_done = True
        if stop - first < num_tiles:
            # Leave this part, and merge if every other program has left its own. The head begins in the
            # program `opens`, as the last of its parts; in all others the part is the first.
            opens = (tile - first) // share
            num_parts = (tile - first + num_tiles - 1) // share - opens + 1
            place = (tl.program_id(0) * 2 + tl.where(first == 0, 1, 0)) * GROUP + member
            tl.store(partial + place[:, None] * DIM + dim[None, :], acc, in_q)
            tl.store(stats + place * 2, best, in_group)
            tl.store(stats + place * 2 + 1, total_p, in_group)
            tl.debug_barrier()
            counter = counters + row * NUM_KV + kv_head
            is_done = tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1
            tl.debug_barrier()
            if is_done:
                best = tl.full([GROUP_PAD], -float("inf"), tl.float32)
                total_p = tl.zeros([GROUP_PAD], tl.float32)
                acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
                for part in tl.range(0, num_parts, loop_unroll_factor=4):
                    place = ((opens + part) * 2 + tl.where(part == 0, 1, 0)) * GROUP + member
                    its_best = tl.load(stats + place * 2, in_group, other=0.0, cache_modifier=".cg")
                    its_total = tl.load(stats + place * 2 + 1, in_group, other=1.0, cache_modifier=".cg")
                    its_acc_at = partial + place[:, None] * DIM + dim[None, :]
                    its_acc = tl.load(its_acc_at, in_q, other=0.0, cache_modifier=".cg")
                    new_best = tl.maximum(best, its_best)
                    shrink, its_shrink = tl.exp2(best - new_best), tl.exp2(its_best - new_best)
                    total_p = total_p * shrink + its_total * its_shrink
                    acc = acc * shrink[:, None] + its_acc * its_shrink[:, None]
                    best = new_best
                tl.store(counter, 0)
        if is_done:
            out_at = (
                out + tl.cast(row, tl.int64) * (NUM_KV * GROUP * DIM) + q_head[:, None] * DIM + dim[None, :]
            )
            tl.store(out_at, (acc / total_p[:, None]).to(q.dtype), in_q)
        tile += stop - first
        if tile - before == num_tiles * NUM_KV:
            row += 1
            before = tile


@triton.jit
def _tiles_of(positions, rows, num_rows, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many tiles each row has for a head; none from `num_rows` on."""
    length = tl.load(positions + rows, rows < num_rows, other=-1) + 1
    if WINDOW > 0:
        length = tl.minimum(length, WINDOW)
    return tl.cdiv(length, BLOCK_N)
