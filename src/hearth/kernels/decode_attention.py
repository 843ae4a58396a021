"""Attention of one query token per sequence over its paged KV (decode).

    tiles of KV:   | row 0, head 0 | row 0, head 1 | ... | row 1, head 0 | ...      a tile: BLOCK_N tokens
    programs:      |   0   |   1   |   2   |   3   |   4   | ...                    equal numbers of tiles

A program attends to a run of tiles across heads and rows, so that long and short contexts share the device
evenly. The run is one loop: the first tile of a head is loaded while the last tile of the previous head is
computed. If a head's tiles belong to several programs, each writes a partial result, and the program that
finishes last merges them in the order of the tiles, so the result does not depend on timing. The number of
rows and their lengths are read on the device, so one captured launch serves all, and a launch without rows
costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hearth.core.sizes import PROGRAMS_PER_PROCESSOR, num_subgroups
from hearth.kernels.jit import (
    capability,
    cdiv,
    has_large_memory,
    launch,
    next_power_of_2,
    runs_triton,
    tl,
    triton,
)
from hearth.kernels.overlap import wait_for_inputs
from hearth.kernels.paged import Heads, PagedRows

LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Memory for partial results of programs. Counters are zero between launches."""

    num_programs: int  #: limit of a launch
    partial: torch.Tensor  #: float32, flat: [program][first, last][q head of the group][dim]
    stats: torch.Tensor  #: float32, flat: [program][first, last][q head of the group][maximum, sum]
    counters: torch.Tensor  #: int32, flat: [row][kv head][part of its q heads]


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

    `num_rows` (int32 [1], on the device): only so many of the first rows are computed; None: all. Only the
    CUDA path uses it.

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
    # The q heads that share a k head are the rows of one query, so that each k and v is read once.
    q = qkv[:, : heads.num_q * heads.dim].view(len(qkv), heads.num_kv, -1, heads.dim)
    k, v = map(context.read, kv.unbind(1))
    out.view(q.shape).copy_(attend_reference(q, k, v, context.seen, heads))


def attend_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None, heads: Heads
) -> torch.Tensor:
    """Attend from [..., heads, queries, dim] to [..., kv_heads, tokens, dim]; `seen`: None: to all tokens."""
    is_grouped = q.shape[-3] != k.shape[-3]
    if heads.cap is None:
        return F.scaled_dot_product_attention(q, k, v, seen, scale=heads.scale, enable_gqa=is_grouped)
    if is_grouped:
        k, v = (side.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for side in (k, v))
    scores = (q.float() @ k.float().mT * (heads.score_scale / heads.cap)).tanh_() * heads.cap
    if seen is not None:
        scores.masked_fill_(seen.logical_not(), -torch.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


@dataclass(frozen=True, slots=True)
class TileShape:
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  #: per thread; None: the compiler chooses
    per_processor: int = 4  #: programs per multiprocessor; scratch is for four


def tile_shape(heads: Heads, dtype: torch.dtype) -> TileShape:
    """Return a tile for these heads and dtypes with which all programs fit on the device at once.

    Hopper and later have shared memory for larger tiles, or for more stages.
    """
    group = heads.num_q // heads.num_kv
    members = cdiv(group, num_subgroups(group))
    has_room = capability() >= 90 and has_large_memory() and dtype != torch.float32
    if has_room and 128 < heads.dim <= 256 and members <= 16:
        return TileShape(64, num_warps=4, num_stages=2, per_processor=2)
    if has_room and heads.dim <= 64 and members > 32:
        return TileShape(128, num_warps=4, num_stages=2, per_processor=2)
    # k and v of two bytes take 16 KB together.
    block_n = 16 if heads.dim > 128 else 32 if heads.dim > 64 or dtype == torch.float32 else 64
    if members > 16:  # queries and results take as much memory as k and v
        per_processor = 4 if members <= 32 else 3 if heads.dim <= 64 else 2
        return TileShape(block_n, num_warps=4, num_stages=2, per_processor=per_processor)
    if has_room and heads.dim <= 64:
        return TileShape(64, num_warps=4, num_stages=3, max_registers=128)
    if has_room and heads.dim <= 128:
        return TileShape(64, num_warps=4, num_stages=2, max_registers=128)
    return TileShape(block_n, num_warps=4, num_stages=2, max_registers=128)


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
    shape = tile_shape(heads, qkv.dtype) if shape is None else shape
    subgroups = num_subgroups(group)
    members = cdiv(group, subgroups)
    launch(
        _decode_attention_kernel,
        (max(1, scratch.num_programs * shape.per_processor // PROGRAMS_PER_PROCESSOR),),
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
        heads.score_scale * LOG2E,
        CAP=(heads.cap or 0.0) * LOG2E,
        WINDOW=window or 0,
        NUM_KV=heads.num_kv,
        GROUP=group,
        SUBGROUPS=subgroups,
        MEMBERS=members,
        GROUP_PAD=max(16, next_power_of_2(members)),  # the minimum of tensor cores
        MERGE_PAD=next_power_of_2(members),
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
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    SUBGROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    MERGE_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    COUNTS_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # KV heads, once per part of the q heads that share them.
    NUM_HEADS: tl.constexpr = NUM_KV * SUBGROUPS
    # Lengths do not change during a step, so they are read while the previous kernel runs.
    first_rows = tl.arange(0, BLOCK_ROWS)
    first_tiles = _tiles_of(positions, first_rows, max_rows, WINDOW, BLOCK_N)
    if COUNTS_ROWS:
        max_rows = tl.minimum(max_rows, tl.load(num_rows))
        first_tiles = tl.where(first_rows < max_rows, first_tiles, 0)
    total = tl.sum(first_tiles, 0)
    for at in range(BLOCK_ROWS, max_rows, BLOCK_ROWS):
        num_tiles = _tiles_of(positions, at + tl.arange(0, BLOCK_ROWS), max_rows, WINDOW, BLOCK_N)
        total += tl.sum(num_tiles, 0)
    # One program merges the parts of a head, so a mean length is cut into at most 64 parts, and into at most
    # 16 if they have less than four tiles.
    mean = tl.cdiv(total, tl.maximum(max_rows, 1))
    least = tl.maximum(tl.minimum(tl.cdiv(mean, 16), 4), tl.cdiv(mean, 64))
    total *= NUM_HEADS
    share = tl.maximum(tl.cdiv(total, tl.num_programs(0)), tl.maximum(least, 1))
    first_tile = tl.program_id(0) * share
    last_tile = tl.minimum(first_tile + share, total)
    # The row of the first tile, and the number of tiles before that row.
    row, before = 0, 0
    if (first_tile < last_tile) & (max_rows > 1):
        first_tiles *= NUM_HEADS
        is_before = (first_tiles > 0) & (tl.cumsum(first_tiles, 0) <= first_tile)
        row = tl.sum(is_before.to(tl.int32), 0)
        before = tl.sum(tl.where(is_before, first_tiles, 0), 0)
        if max_rows > BLOCK_ROWS:
            passed = tl.sum(first_tiles, 0)
            for at in range(BLOCK_ROWS, max_rows, BLOCK_ROWS):
                num_tiles = _tiles_of(positions, at + tl.arange(0, BLOCK_ROWS), max_rows, WINDOW, BLOCK_N)
                num_tiles *= NUM_HEADS
                is_before = (num_tiles > 0) & (passed + tl.cumsum(num_tiles, 0) <= first_tile)
                row += tl.sum(is_before.to(tl.int32), 0)
                before += tl.sum(tl.where(is_before, num_tiles, 0), 0)
                passed += tl.sum(num_tiles, 0)

    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    # Of a tile: row, head, index among the head's tiles, tokens and their pages. All of it is known one tile
    # ahead, and of the next row what its first tile would need.
    last_row = tl.maximum(max_rows - 1, 0)
    end = tl.load(positions + row) + 1
    row_table = table + tl.load(slots + row).to(tl.int64) * table_stride
    begin = _begin(end, WINDOW)
    num_tiles = tl.maximum(tl.cdiv(end - begin, BLOCK_N), 1)
    head = (first_tile - before) // num_tiles
    at = (first_tile - before) % num_tiles
    token = begin + at * BLOCK_N + tl.arange(0, BLOCK_N)
    page = tl.load(row_table + _page_of(token, BLOCK_TOKENS), token < end, other=0)
    next_row = tl.minimum(row + 1, last_row)
    next_end = tl.load(positions + next_row) + 1
    next_slot = tl.load(slots + next_row).to(tl.int64)
    wait_for_inputs(OVERLAPS)

    opening_row, opening_head, opening_at, opening_tiles = row, head, at, num_tiles
    first = at  # of this program's tiles of the current head
    best = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total_p = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for tile in tl.range(first_tile, last_tile, num_stages=STAGES):
        in_q = _in_group(member, head, GROUP, MEMBERS, SUBGROUPS)[:, None] & (dim < DIM)[None, :]
        q_head = _q_head(head, GROUP, MEMBERS, SUBGROUPS) + member
        q_at = qkv + tl.cast(row, tl.int64) * qkv_stride + q_head[:, None] * DIM + dim[None, :]
        q = tl.load(q_at, in_q, other=0.0)
        in_context = token < end
        # Recycled memory may hold NaN, and 0 times NaN is NaN: zeros where there are no tokens.
        in_tile = in_context[:, None] & (dim < DIM)[None, :]
        unit = _unit(page, token, kv_stride, NUM_KV * DIM, BLOCK_TOKENS)
        unit += (head // SUBGROUPS) * DIM
        k_at = kv + unit[:, None] + dim[None, :]
        k = tl.load(k_at, in_tile, other=0.0)
        v = tl.load(k_at + BLOCK_TOKENS * NUM_KV * DIM, in_tile, other=0.0)

        # Advance, and load the next tile's pages: their contents can be loaded only after that.
        out_row, out_head = row, head
        ends_head = at == num_tiles - 1
        ends_row = ends_head & (head == NUM_HEADS - 1)
        at = tl.where(ends_head, 0, at + 1)
        head = tl.where(ends_row, 0, tl.where(ends_head, head + 1, head))
        row = tl.where(ends_row, tl.minimum(row + 1, last_row), row)
        end = tl.where(ends_row, next_end, end)
        row_table = tl.where(ends_row, table + next_slot * table_stride, row_table)
        begin = _begin(end, WINDOW)
        num_tiles = tl.cdiv(end - begin, BLOCK_N)
        token = begin + at * BLOCK_N + tl.arange(0, BLOCK_N)
        page = tl.load(row_table + _page_of(token, BLOCK_TOKENS), token < end, other=0)
        next_row = tl.minimum(row + 1, last_row)
        next_end = tl.load(positions + next_row) + 1
        next_slot = tl.load(slots + next_row).to(tl.int64)

        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAP > 0:
            score = soft_cap(score, 1.0, CAP)
        score = tl.where(in_context[None, :], score, -float("inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        shrink = tl.exp2(best - new_best)
        p = tl.exp2(score - new_best[:, None])
        total_p = total_p * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        best = new_best
        if ends_head | (tile == last_tile - 1):
            out_in_group = _in_group(member, out_head, GROUP, MEMBERS, SUBGROUPS)
            out_in_q = out_in_group[:, None] & (dim < DIM)[None, :]
            if ends_head & (first == 0):
                whole_head = _q_head(out_head, GROUP, MEMBERS, SUBGROUPS) + member
                out_at = _out_at(out, out_row, whole_head, dim, NUM_KV * GROUP, DIM)
                tl.store(out_at, (acc / total_p[:, None]).to(q.dtype), out_in_q)
            else:  # write a partial result: last for the head that the program ends in, else first
                place = (tl.program_id(0) * 2 + tl.where(first == 0, 1, 0)) * MEMBERS + member
                tl.store(partial + place[:, None] * DIM + dim[None, :], acc, out_in_q)
                tl.store(stats + place * 2, best, out_in_group)
                tl.store(stats + place * 2 + 1, total_p, out_in_group)
            best = tl.full([GROUP_PAD], -float("inf"), tl.float32)
            total_p = tl.zeros([GROUP_PAD], tl.float32)
            acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
            first = 0

    # Partial results exist for the heads of the first and of the last tile, unless this program has all of
    # their tiles. The program that writes the last part of a head merges all of them.
    is_same = (row == opening_row) & (head == opening_head)
    num_heads = tl.where(first_tile < last_tile, tl.where((at > 0) & (is_same == 0), 2, 1), 0)
    for which in range(num_heads):
        is_opening = which == 0
        its_row = tl.where(is_opening, opening_row, row)
        its_head = tl.where(is_opening, opening_head, head)
        head_begin = tl.where(is_opening, first_tile - opening_at, last_tile - at)
        head_end = head_begin + tl.where(is_opening, opening_tiles, num_tiles)
        if (head_begin < first_tile) | (head_end > last_tile):
            opens = head_begin // share
            num_parts = (head_end - 1) // share - opens + 1
            tl.debug_barrier()
            counter = counters + its_row * NUM_HEADS + its_head
            is_done = tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1
            tl.debug_barrier()
            if is_done:
                _merge(
                    out, partial, stats, its_row, its_head, opens, num_parts,
                    NUM_KV, GROUP, SUBGROUPS, MEMBERS, MERGE_PAD, DIM, DIM_PAD,
                )  # fmt: skip
                tl.store(counter, 0)


@triton.jit
def _merge(
    out,
    partial,
    stats,
    row,
    head,
    opens,
    num_parts,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    SUBGROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    MERGE_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Merge a head, of which programs from `opens` on have written parts."""
    member = tl.arange(0, MERGE_PAD)
    dim = tl.arange(0, DIM_PAD)
    in_group = _in_group(member, head, GROUP, MEMBERS, SUBGROUPS)
    in_q = in_group[:, None] & (dim < DIM)[None, :]
    best = tl.full([MERGE_PAD], -float("inf"), tl.float32)
    total_p = tl.zeros([MERGE_PAD], tl.float32)
    acc = tl.zeros([MERGE_PAD, DIM_PAD], tl.float32)
    for part in tl.range(0, num_parts, loop_unroll_factor=4):
        place = ((opens + part) * 2 + tl.where(part == 0, 1, 0)) * MEMBERS + member
        its_best = tl.load(stats + place * 2, in_group, other=0.0, cache_modifier=".cg")
        its_total = tl.load(stats + place * 2 + 1, in_group, other=1.0, cache_modifier=".cg")
        its_acc_at = partial + place[:, None] * DIM + dim[None, :]
        its_acc = tl.load(its_acc_at, in_q, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, its_best)
        shrink, its_shrink = tl.exp2(best - new_best), tl.exp2(its_best - new_best)
        total_p = total_p * shrink + its_total * its_shrink
        acc = acc * shrink[:, None] + its_acc * its_shrink[:, None]
        best = new_best
    q_head = _q_head(head, GROUP, MEMBERS, SUBGROUPS) + member
    out_at = _out_at(out, row, q_head, dim, NUM_KV * GROUP, DIM)
    tl.store(out_at, (acc / total_p[:, None]).to(out.dtype.element_ty), in_q)


@triton.jit
def soft_cap(score, scale, CAP: tl.constexpr):
    """Return what `scale` makes `CAP * tanh(score * scale / CAP)` of."""
    bent = 1.0 - 2.0 / (1.0 + tl.exp(score * (2.0 * scale / CAP)))
    return bent * (CAP / scale)


@triton.jit
def _in_group(member, head, GROUP: tl.constexpr, MEMBERS: tl.constexpr, SUBGROUPS: tl.constexpr):
    in_group = member < MEMBERS
    if GROUP % MEMBERS != 0:
        in_group = in_group & (member < GROUP - head % SUBGROUPS * MEMBERS)
    return in_group


@triton.jit
def _q_head(head, GROUP: tl.constexpr, MEMBERS: tl.constexpr, SUBGROUPS: tl.constexpr):
    if SUBGROUPS == 1:
        return head * GROUP
    return head // SUBGROUPS * GROUP + head % SUBGROUPS * MEMBERS


@triton.jit
def _page_of(token, BLOCK_TOKENS: tl.constexpr):
    """The index of a token's page in its row. Unsigned division is faster."""
    return token.to(tl.uint32) // BLOCK_TOKENS


@triton.jit
def _unit(page, token, kv_stride, TOKEN_STRIDE: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    offset = (token.to(tl.uint32) % BLOCK_TOKENS).to(tl.int32) * TOKEN_STRIDE
    return page.to(tl.uint32).to(tl.int64) * kv_stride + offset


@triton.jit
def _begin(end, WINDOW: tl.constexpr):
    return tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0


@triton.jit
def _out_at(out, row, q_head, dim, NUM_Q: tl.constexpr, DIM: tl.constexpr):
    at = tl.cast(row, tl.int64) * NUM_Q + q_head
    return out + at[:, None] * DIM + dim[None, :]


@triton.jit
def _tiles_of(positions, rows, num_rows, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    length = tl.load(positions + rows, rows < num_rows, other=-1) + 1
    if WINDOW > 0:
        length = tl.minimum(length, WINDOW)
    return tl.cdiv(length, BLOCK_N)
