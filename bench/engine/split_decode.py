"""Attention of one query token per sequence over its paged KV (decode). Knows shapes and pointers only.

The context of a sequence is cut into up to `num_splits` runs, each attended by its own program; the
program that finishes last merges the partial results, in a fixed order, so the result does not depend
on which one that was. How many splits are used follows from the length on the device, so one captured
launch serves every length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hearth.kernels.jit import launch, runs_triton, tl, triton
from hearth.kernels.paged import Heads, PagedRows, load_tile

_LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Memory in which splits leave partial results. Counters are zero between launches."""

    num_programs: int  #: splits are added until this many programs run
    partial: torch.Tensor  #: float32, flat: [row][q head][split][dim]
    stats: torch.Tensor  #: float32, flat: [row][q head][split][maximum, sum]
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


def choose_splits(num_rows: int, num_kv_heads: int, num_programs: int) -> int:
    """Return the most splits such that rows * kv heads * splits is within `num_programs`; at least one."""
    return max(1, min(_MAX_SPLITS, num_programs // (num_rows * num_kv_heads)))


_MAX_SPLITS = 16
_BLOCK_N = 64  #: tokens per tile, and the fewest of a split


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
    num_splits: int | None = None,
) -> None:
    group = heads.num_q // heads.num_kv
    if num_splits is None:
        num_splits = choose_splits(len(qkv), heads.num_kv, scratch.num_programs)
    launch(
        _decode_attention_kernel,
        (len(qkv), heads.num_kv, num_splits),
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
        heads.dim**-0.5 * _LOG2E,
        WINDOW=window or 0,
        NUM_KV=heads.num_kv,
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)) if group > 1 else 1,
        DIM=heads.dim,
        DIM_PAD=max(16, triton.next_power_of_2(heads.dim)),
        BLOCK_TOKENS=kv.shape[2],
        BLOCK_N=_BLOCK_N,
        SPLITS=num_splits,
        COUNTS_ROWS=num_rows is not None,
        num_warps=2 if group == 1 else 4,
        num_stages=3,
    )


@triton.jit
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
    scale,
    WINDOW: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    COUNTS_ROWS: tl.constexpr,
):
    row = tl.program_id(0)
    if COUNTS_ROWS:  # noqa: SIM102 - a constexpr, so that nothing is loaded without
        if row >= tl.load(num_rows):
            return
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    end = tl.load(positions + row) + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(end - WINDOW, 0)
    length = end - begin
    chunk = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    num_active = tl.cdiv(length, chunk)
    if split >= num_active:
        return
    first = begin + split * chunk
    last = tl.minimum(first + chunk, end)

    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    in_dim = dim < DIM
    q_head = kv_head * GROUP + member
    in_q = (member[:, None] < GROUP) & in_dim[None, :]
    q_at = qkv + row.to(tl.int64) * qkv_stride + q_head[:, None] * DIM + dim[None, :]
    q = tl.load(q_at, in_q, other=0.0)
    row_table = table + tl.load(slots + row).to(tl.int64) * table_stride

    best = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for at in range(first, last, BLOCK_N):
        token = at + tl.arange(0, BLOCK_N)
        k, v = load_tile(kv, kv_stride, row_table, token, last, kv_head, dim, NUM_KV, DIM, BLOCK_TOKENS)
        if GROUP == 1:
            score = tl.sum(k.to(tl.float32) * q.to(tl.float32), 1)[None, :] * scale
        else:
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where((token < last)[None, :], score, -float("inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        shrink = tl.exp2(best - new_best)
        p = tl.exp2(score - new_best[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if GROUP == 1:
            acc += tl.sum(tl.trans(p) * v.to(tl.float32), 0)[None, :]
        else:
            acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
        best = new_best

    out_at = out + row.to(tl.int64) * (NUM_KV * GROUP * DIM) + q_head[:, None] * DIM + dim[None, :]
    if num_active == 1:
        tl.store(out_at, (acc / total[:, None]).to(q.dtype), in_q)
        return
    # [row][q head][split]: leave the partial result, and merge if every other split has left its own.
    place = (row.to(tl.int64) * (NUM_KV * GROUP) + q_head) * SPLITS
    in_group = member < GROUP
    tl.store(partial + (place + split)[:, None] * DIM + dim[None, :], acc, in_q)
    tl.store(stats + (place + split) * 2, best, in_group)
    tl.store(stats + (place + split) * 2 + 1, total, in_group)
    tl.debug_barrier()
    counter = counters + row * NUM_KV + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") != num_active - 1:
        return
    tl.debug_barrier()
    best = tl.full([GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for other in range(0, num_active):
        its_best = tl.load(stats + (place + other) * 2, in_group, other=0.0, cache_modifier=".cg")
        its_total = tl.load(stats + (place + other) * 2 + 1, in_group, other=1.0, cache_modifier=".cg")
        its_acc_at = partial + (place + other)[:, None] * DIM + dim[None, :]
        its_acc = tl.load(its_acc_at, in_q, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, its_best)
        shrink, its_shrink = tl.exp2(best - new_best), tl.exp2(its_best - new_best)
        total = total * shrink + its_total * its_shrink
        acc = acc * shrink[:, None] + its_acc * its_shrink[:, None]
        best = new_best
    tl.store(out_at, (acc / total[:, None]).to(q.dtype), in_q)
    tl.store(counter, 0)
