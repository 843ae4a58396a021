"""Causal attention of runs of query tokens over their paged KV (prefill, whole or in chunks).

The KV of the run itself has been written before; whatever precedes it in the sequence is read from the
same blocks, so a first chunk, a later chunk and a prefix hit are one case. Knows shapes and pointers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hearth.kernels.jit import runs_triton, tl, triton
from hearth.kernels.paged import Heads, PagedRows, load_tile

_LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """A run of consecutive tokens of one sequence among the rows of a step."""

    begin: int  #: first row
    num_tokens: int
    start: int  #: position of the first token

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.begin + self.num_tokens)


def prefill_attention(
    qkv: torch.Tensor,
    heads: Heads,
    rows: PagedRows,
    spans: Sequence[PrefillSpan],
    span_begins: torch.Tensor,
    kv: torch.Tensor,
    *,
    window: int | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Attend from each row of a span to its sequence up to itself, or to the last `window` tokens of that.

    `spans` say on the host what `span_begins` (int32 [spans + 1], rows) and `rows` say on the device. Rows
    outside of all spans are left alone. Returns `out`, or the library's own buffer where one span is all
    there is.
    """
    if not runs_triton(qkv):
        prefill_attention_reference(qkv, heads, rows, spans, kv, window=window, out=out)
    elif _suits_library(qkv, heads) and all(_is_fresh(span, window) for span in spans):
        if spans[0].num_tokens == len(qkv):
            return attend_fresh(qkv, heads)
        for span in spans:
            out[span.rows] = attend_fresh(qkv[span.rows], heads)
    else:
        prefill_attention_triton(qkv, heads, rows, spans, span_begins, kv, window=window, out=out)
    return out


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


#: Below this one launch for all spans beats the library's launch per span (bench/engine/kernels.py).
_FRESH_TOKENS = 1024


def _suits_library(qkv: torch.Tensor, heads: Heads) -> bool:
    """Return True if cuDNN or flash attention take these; else torch would build the whole matrix."""
    return qkv.dtype != torch.float32 and heads.dim % 8 == 0 and heads.dim <= 256


def _is_fresh(span: PrefillSpan, window: int | None) -> bool:
    """Return True for a long run without a cached prefix and without an effective window."""
    fits_window = window is None or span.num_tokens <= window
    return span.start == 0 and span.num_tokens >= _FRESH_TOKENS and fits_window


_LIBRARY = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def attend_fresh(qkv: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Return causal attention of a whole prompt over its own q, k, v, through cuDNN or flash attention."""
    sizes = [heads.num_q, heads.num_kv, heads.num_kv]
    q, k, v = qkv.view(1, len(qkv), -1, heads.dim).transpose(1, 2).split_with_sizes(sizes, dim=1)
    with sdpa_kernel(_LIBRARY, set_priority=True):
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=heads.num_q != heads.num_kv
        )
    return attended[0].transpose(0, 1).flatten(1)


def prefill_attention_triton(
    qkv: torch.Tensor,
    heads: Heads,
    rows: PagedRows,
    spans: Sequence[PrefillSpan],
    span_begins: torch.Tensor,
    kv: torch.Tensor,
    *,
    window: int | None,
    out: torch.Tensor,
) -> None:
    dim_pad = max(16, triton.next_power_of_2(heads.dim))
    is_wide = dim_pad > 128 or qkv.dtype == torch.float32
    block_m, block_n = (32, 32) if is_wide else (64, 64)
    longest = max(span.num_tokens for span in spans)
    _prefill_attention_kernel[(triton.cdiv(longest, block_m), heads.num_q, len(spans))](
        out,
        qkv,
        qkv.stride(0),
        span_begins,
        rows.positions,
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


@triton.jit
def _prefill_attention_kernel(
    out,
    qkv,
    qkv_stride,
    span_begins,
    positions,
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
    head = tl.program_id(1)
    kv_head = head // (NUM_Q // NUM_KV)
    begin = tl.load(span_begins + tl.program_id(2))
    num_tokens = tl.load(span_begins + tl.program_id(2) + 1) - begin
    tile = tl.program_id(0) * BLOCK_M
    if tile >= num_tokens:
        return
    start = tl.load(positions + begin)
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
