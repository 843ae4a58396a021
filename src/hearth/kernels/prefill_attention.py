"""Causal attention of runs of query tokens over their paged KV (prefill, whole or in chunks).

The KV of the run itself has been written before; whatever precedes it in the sequence is read from the
same blocks, so a first chunk, a later chunk and a prefix hit are one case. Knows shapes and pointers only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hearth.kernels.jit import launch, runs_triton, tl, triton
from hearth.kernels.paged import Heads, PagedRows, load_tile
from hearth.kernels.prompt_tiles import PrefillSpan, PromptTiles

_LOG2E = 1.4426950408889634


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

    `tiles` say on the device what `spans` say on the host, which only the torch reference reads. Rows outside
    of all spans are left alone.
    """
    if runs_triton(qkv):
        assert tiles is not None, "the CUDA path needs tiles"
        prefill_attention_triton(qkv, heads, rows, tiles, kv, window=window, out=out)
    else:
        prefill_attention_reference(qkv, heads, rows, spans, kv, window=window, out=out)


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
        attended = F.scaled_dot_product_attention(
            q[None], k[None], v[None], seen, enable_gqa=heads.num_q != heads.num_kv
        )
        out[span.rows] = attended[0].transpose(0, 1).flatten(1)


def prompt_tile_tokens(heads: Heads, dtype: torch.dtype) -> int:
    """Return how many query tokens a tile has for heads and numbers like these."""
    return 32 if heads.dim > 128 or dtype == torch.float32 else 64


def prefill_attention_triton(
    qkv: torch.Tensor,
    heads: Heads,
    rows: PagedRows,
    tiles: PromptTiles,
    kv: torch.Tensor,
    *,
    window: int | None,
    out: torch.Tensor,
) -> None:
    dim_pad = max(16, triton.next_power_of_2(heads.dim))
    is_wide = dim_pad > 128 or qkv.dtype == torch.float32
    block_m, block_n = tiles.tile_tokens, 32 if is_wide else 64
    launch(
        _prefill_attention_kernel,
        (heads.num_q, len(tiles.items)),
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
        heads.dim**-0.5 * _LOG2E,
        WINDOW=window or 0,
        NUM_Q=heads.num_q,
        NUM_KV=heads.num_kv,
        DIM=heads.dim,
        DIM_PAD=dim_pad,
        BLOCK_TOKENS=kv.shape[2],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
        num_stages=1 if is_wide else 3,
    )


@triton.jit(do_not_specialize=["table_stride"])
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
    WINDOW: tl.constexpr,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head = tl.program_id(0)
    kv_head = head // (NUM_Q // NUM_KV)
    if tl.program_id(1) >= tl.load(num_tiles):
        return
    fields = tiles + tl.program_id(1) * 4
    begin = tl.load(fields)
    num_tokens = tl.load(fields + 1)
    start = tl.load(fields + 2)
    tile = tl.load(fields + 3)
    row_table = table + tl.load(slots + begin).to(tl.int64) * table_stride

    index = tile + tl.arange(0, BLOCK_M)
    position = start + index
    dim = tl.arange(0, DIM_PAD)
    in_dim = dim < DIM
    in_q = (index[:, None] < num_tokens) & in_dim[None, :]
    row = (begin + index).to(tl.int64)
    q = tl.load(qkv + row[:, None] * qkv_stride + head * DIM + dim[None, :], in_q, other=0.0)

    first = 0
    if WINDOW > 0:
        first = tl.maximum(start + tile - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(start + tile + BLOCK_M, start + num_tokens)
    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PAD], tl.float32)
    for at in range(first, end, BLOCK_N):
        token = at + tl.arange(0, BLOCK_N)
        k, v = load_tile(kv, kv_stride, row_table, token, end, kv_head, dim, NUM_KV, DIM, BLOCK_TOKENS)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = token[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (token[None, :] > position[:, None] - WINDOW)
        score = tl.where(seen, score, -float("inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        # A tile wholly outside the window leaves the maximum at -inf; 0 keeps the differences finite.
        pivot = tl.where(new_best == -float("inf"), 0.0, new_best)
        shrink = tl.exp2(best - pivot)
        p = tl.exp2(score - pivot[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        best = new_best
    out_at = out + row[:, None] * (NUM_Q * DIM) + head * DIM + dim[None, :]
    tl.store(out_at, (acc / total[:, None]).to(q.dtype), in_q)
