"""Causal attention of runs of query tokens over their paged KV (prefill, whole or in chunks).

The KV of the run itself has been written before; the tokens before it are read from the same blocks, so a
first chunk, a later chunk and a prefix hit are one case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hearth.kernels.decode_attention import LOG2E, attend_reference, soft_cap
from hearth.kernels.jit import (
    has_large_memory,
    launch,
    next_power_of_2,
    num_processors,
    runs_triton,
    tl,
    triton,
)
from hearth.kernels.paged import Heads, PagedRows
from hearth.kernels.prefill_hopper import (
    hopper_obstacle,
    hopper_tile_tokens,
    is_hopper,
    prefill_attention_hopper,
)
from hearth.kernels.prompt_tiles import PrefillSpan, PromptTiles, num_packed


def prefill_attention(
    qkv: torch.Tensor,
    heads: Heads,
    rows: PagedRows,
    spans: Sequence[PrefillSpan],
    tiles: PromptTiles | None,
    kv: torch.Tensor,
    *,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """Attend from each row of a span to its sequence up to itself, or to the last `window` tokens of that.

    `tiles` on the device equal `spans` on the host, which only the torch reference reads. Rows outside of all
    spans are not written.
    """
    if not runs_triton(qkv):
        prefill_attention_reference(qkv, heads, rows, spans, kv, window=window, out=out)
        return
    assert tiles is not None, "the CUDA path needs tiles"
    if prompt_kernel(heads, qkv.dtype, kv.shape[2]).name == "hopper":
        prefill_attention_hopper(qkv, heads, rows, tiles, kv, window=window, out=out)
    else:
        prefill_attention_triton(qkv, heads, rows, tiles, kv, window=window, out=out)


@dataclass(frozen=True, slots=True)
class PromptKernel:
    name: Literal["hopper", "triton"]
    slow_reason: str | None  #: why it is not the fastest for this device; None: it is


def prompt_kernel(heads: Heads, dtype: torch.dtype, block_tokens: int = 16) -> PromptKernel:
    if not is_hopper():
        return PromptKernel("triton", None)
    obstacle = hopper_obstacle(heads, dtype, block_tokens)
    return PromptKernel("hopper" if obstacle is None else "triton", obstacle)


def prefill_attention_reference(
    qkv: torch.Tensor,
    heads: Heads,
    rows: PagedRows,
    spans: Sequence[PrefillSpan],
    kv: torch.Tensor,
    *,
    window: int | None,
    out: torch.Tensor,
) -> None:
    block_tokens = kv.shape[2]
    for span in spans:
        end = span.start + span.num_tokens
        blocks = rows.block_table[rows.slots[span.begin], : -(-end // block_tokens)]
        k, v = (kv[blocks, side].flatten(0, 1)[:end].transpose(0, 1) for side in (0, 1))
        q = qkv[span.rows, : heads.num_q * heads.dim].view(-1, heads.num_q, heads.dim).transpose(0, 1)
        at = torch.arange(span.start, end, device=qkv.device)[:, None]
        back = at - torch.arange(end, device=qkv.device)
        seen = back >= 0 if window is None else (back >= 0) & (back < window)
        attended = attend_reference(q[None], k[None], v[None], seen, heads)
        out[span.rows] = attended[0].transpose(0, 1).flatten(1)


def prompt_tile_tokens(heads: Heads, dtype: torch.dtype, num_rows: int, block_tokens: int = 16) -> int:
    """Return the query tokens per tile for a step of `num_rows` rows, padding included."""
    if prompt_kernel(heads, dtype, block_tokens).name == "hopper":
        return hopper_tile_tokens(heads)
    if heads.dim > 128 or dtype == torch.float32:
        return 64 if dtype.itemsize == 2 and has_large_memory() else 32
    return 128 if num_packed(heads) == 1 and num_rows > _SMALL_STEP_ROWS and has_large_memory() else 64


#: A step of at most so many rows has too few large tiles to occupy a device.
_SMALL_STEP_ROWS = 1024


@dataclass(frozen=True, slots=True)
class PromptTileShape:
    num_packed: int  #: heads of a group per tile
    num_keys: int  #: tokens of the context per iteration
    num_warps: int
    num_stages: int

    @staticmethod
    def of(heads: Heads, tile_tokens: int, num_rows: int) -> PromptTileShape:
        if tile_tokens == 32:
            return PromptTileShape(1, 32, 4, 1)
        if heads.dim > 128:
            return PromptTileShape(1, 64, 8, 2)
        if not has_large_memory():
            return PromptTileShape(1, 64, 4, 2)
        if tile_tokens == 64 and num_rows <= _SMALL_STEP_ROWS:
            return PromptTileShape(1, 64, 4, 3)
        if tile_tokens == 64 and num_packed(heads) == 2:
            return PromptTileShape(2, 128, 8, 3)
        return PromptTileShape(1, 64, 8, 3)


#: The Triton kernel has at most so many programs per multiprocessor, each of which loops over tiles.
_PROGRAMS_PER_PROCESSOR = 16


def prefill_attention_triton(
    qkv: torch.Tensor,
    heads: Heads,
    rows: PagedRows,
    tiles: PromptTiles,
    kv: torch.Tensor,
    *,
    window: int | None,
    out: torch.Tensor,
    shape: PromptTileShape | None = None,
    max_programs: int | None = None,
) -> None:
    if shape is None:
        shape = PromptTileShape.of(heads, tiles.tile_tokens, len(qkv))
    num_items = len(tiles.items) * (heads.num_q // shape.num_packed)
    if max_programs is None:
        max_programs = _PROGRAMS_PER_PROCESSOR * num_processors()
    launch(
        _prefill_attention_kernel,
        (min(num_items, max_programs),),
        out,
        qkv,
        qkv.stride(0),
        tiles.items,
        tiles.count,
        rows.slots,
        rows.block_table,
        rows.block_table.stride(0),
        kv,
        kv.stride(0),
        heads.score_scale * LOG2E,
        window or 0,
        CAP=(heads.cap or 0.0) * LOG2E,
        HAS_WINDOW=window is not None,
        NUM_Q=heads.num_q,
        NUM_KV=heads.num_kv,
        DIM=heads.dim,
        DIM_PAD=max(16, next_power_of_2(heads.dim)),
        BLOCK_TOKENS=kv.shape[2],
        TILE_TOKENS=tiles.tile_tokens,
        PACKED=shape.num_packed,
        BLOCK_N=shape.num_keys,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


@triton.jit(
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=["tiles", "num_tiles", "slots", "table"],
)
def _prefill_attention_kernel(
    out,
    qkv,
    qkv_stride,
    tiles,
    num_tiles,
    slots,
    table,
    table_stride,
    kv,
    kv_stride,
    scale,
    window,
    CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    BLOCK_M: tl.constexpr = TILE_TOKENS * PACKED
    GROUPS: tl.constexpr = NUM_Q // PACKED
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    dim = tl.arange(0, DIM_PAD)
    in_dim = dim < DIM
    num_items = tl.load(num_tiles) * GROUPS
    num_rounds = tl.cdiv(num_items, num_programs)
    # Values that are the same in every iteration are recomputed, to save registers.
    for turn in tl.range(0, num_rounds, disable_licm=True):
        # Back and forth: the program with the longest tile of one round has the shortest of the next.
        item = turn * num_programs + tl.where(turn % 2 == 0, program, num_programs - 1 - program)
        if item < num_items:
            fields = tiles + item // GROUPS * 4
            begin = tl.load(fields)
            num_tokens = tl.load(fields + 1)
            start = tl.load(fields + 2)
            tile = tl.load(fields + 3)
            row_table = table + tl.load(slots + begin).to(tl.int64) * table_stride

            # A row of the tile is a token and a head: all tokens with one head, then with the next.
            member = tl.arange(0, BLOCK_M)
            index = tile + member % TILE_TOKENS
            head = item % GROUPS * PACKED + member // TILE_TOKENS
            kv_head = item % GROUPS * PACKED // (NUM_Q // NUM_KV)
            position = start + index
            in_q = (index[:, None] < num_tokens) & in_dim[None, :]
            row = (begin + index).to(tl.int64)
            q = tl.load(qkv + row[:, None] * qkv_stride + head[:, None] * DIM + dim[None, :], in_q, other=0.0)

            end = start + tl.minimum(tile + TILE_TOKENS, num_tokens)
            first = 0
            # From `seen_by_all` on, and up to `unmasked_end`, every row sees every token.
            unmasked_end = (start + tile + 1) // BLOCK_N * BLOCK_N
            if HAS_WINDOW:
                first = tl.maximum(start + tile - window + 1, 0) // BLOCK_N * BLOCK_N
                seen_by_all = tl.cdiv(tl.maximum(end - window, 0), BLOCK_N) * BLOCK_N
                seen_by_all = tl.minimum(tl.maximum(seen_by_all, first), tl.maximum(unmasked_end, first))
                unmasked_end = tl.maximum(unmasked_end, seen_by_all)

            best = tl.full([BLOCK_M], -float("inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
            if HAS_WINDOW:
                best, total, acc = _attend(
                    first, seen_by_all, best, total, acc, q, position, end, row_table, kv, kv_stride, kv_head,
                    scale, window, CAP, True, HAS_WINDOW, NUM_KV, DIM, DIM_PAD, BLOCK_TOKENS, BLOCK_N,
                )  # fmt: skip
                first = seen_by_all
            best, total, acc = _attend(
                first, unmasked_end, best, total, acc, q, position, end, row_table, kv, kv_stride,
                kv_head, scale, window, CAP, False, HAS_WINDOW, NUM_KV, DIM, DIM_PAD, BLOCK_TOKENS, BLOCK_N,
            )  # fmt: skip
            best, total, acc = _attend(
                unmasked_end, end, best, total, acc, q, position, end, row_table, kv, kv_stride,
                kv_head, scale, window, CAP, True, HAS_WINDOW, NUM_KV, DIM, DIM_PAD, BLOCK_TOKENS, BLOCK_N,
            )  # fmt: skip
            out_at = out + row[:, None] * (NUM_Q * DIM) + head[:, None] * DIM + dim[None, :]
            tl.store(out_at, (acc / total[:, None]).to(q.dtype), in_q)


@triton.jit
def _attend(
    first,
    last,
    best,
    total,
    acc,
    q,
    position,
    end,
    row_table,
    kv,
    kv_stride,
    kv_head,
    scale,
    window,
    CAP: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend from `first` to `last`. Blocks are looked up an iteration ahead: k and v never wait for that."""
    dim = tl.arange(0, DIM_PAD)
    token = first + tl.arange(0, BLOCK_N)
    page = tl.load(row_table + token // BLOCK_TOKENS, token < end, other=0)
    for at in range(first, last, BLOCK_N):
        token = at + tl.arange(0, BLOCK_N)
        unit = page.to(tl.int64) * kv_stride + (token % BLOCK_TOKENS) * (NUM_KV * DIM) + kv_head * DIM
        k_at = kv + unit[:, None] + dim[None, :]
        v_at = k_at + BLOCK_TOKENS * NUM_KV * DIM
        following = token + BLOCK_N
        page = tl.load(row_table + following // BLOCK_TOKENS, following < end, other=0)
        # Beyond the end memory may hold NaN, and 0 times NaN is NaN.
        if MASKED:
            in_tile = (token < end)[:, None] & (dim < DIM)[None, :]
            k = tl.load(k_at, in_tile, other=0.0)
            v = tl.load(v_at, in_tile, other=0.0)
        elif DIM < DIM_PAD:
            k = tl.load(k_at, (dim < DIM)[None, :], other=0.0)
            v = tl.load(v_at, (dim < DIM)[None, :], other=0.0)
        else:
            k = tl.load(k_at)
            v = tl.load(v_at)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAP > 0:
            score = soft_cap(score, scale, CAP)
        if MASKED:
            seen = token[None, :] <= position[:, None]
            if HAS_WINDOW:
                seen = seen & (token[None, :] > position[:, None] - window)
            score = tl.where(seen, score, -float("inf"))
        new_best = tl.maximum(best, tl.max(score, 1) * scale)
        pivot = new_best
        if HAS_WINDOW:
            # A row that has seen nothing yet leaves the maximum at -inf; 0 keeps the differences finite.
            pivot = tl.where(new_best == -float("inf"), 0.0, new_best)
        shrink = tl.exp2(best - pivot)
        p = tl.exp2(score * scale - pivot[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        best = new_best
    return best, total, acc
