"""Rotary positions, per-head q/k norms and the KV write, in one pass over the fused q, k, v.

    a row of qkv:  | q heads | k heads | v heads |        each head head_dim wide

Slot, position and block table determine where a token's k and v are written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hearth.kernels.jit import cdiv, launch, next_power_of_2, runs_triton, tl, triton
from hearth.kernels.overlap import wait_for_inputs
from hearth.kernels.paged import Heads, PagedRows, RotaryFactors


@dataclass(frozen=True, slots=True)
class HeadNorms:
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


def rotate_and_store(
    qkv: torch.Tensor,
    heads: Heads,
    rows: PagedRows,
    kv: torch.Tensor,
    *,
    cos_sin: torch.Tensor | None,
    norms: HeadNorms | None,
) -> None:
    """Norm and rotate q in place; norm and rotate k, and write it with v to `kv`.

    `kv` is [blocks, 2, block_tokens, kv_heads, dim]. k in `qkv` is undefined afterwards. `cos_sin` is
    [positions, 2, rotary_dim / 2] in float32; None: q and k are not rotated.
    """
    impl = rotate_and_store_triton if runs_triton(qkv) else rotate_and_store_reference
    impl(qkv, heads, rows, kv, cos_sin=cos_sin, norms=norms)


def rotate_and_store_reference(
    qkv: torch.Tensor,
    heads: Heads,
    rows: PagedRows,
    kv: torch.Tensor,
    *,
    cos_sin: torch.Tensor | None,
    norms: HeadNorms | None,
) -> None:
    x = qkv.view(qkv.shape[0], -1, heads.dim)
    num_qk = heads.num_q + heads.num_kv
    if norms is not None:
        _norm_heads(x[:, : heads.num_q], norms.q_weight, norms.eps)
        _norm_heads(x[:, heads.num_q : num_qk], norms.k_weight, norms.eps)
    if cos_sin is not None:
        _rotate(x[:, :num_qk], rows.rotary_factors(cos_sin))
    targets = rows.kv_targets(block_tokens=kv.shape[2])
    written = x[:, heads.num_q :].unflatten(1, (2, heads.num_kv))
    if kv.is_contiguous():
        # With one layer torch treats all memory from the first block to the last as the target of the write.
        written = written.clone()
    kv.transpose(1, 2).index_put_((targets.blocks, targets.offsets), written)


def _norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    x.copy_(y * weight.float())


def _rotate(x: torch.Tensor, factors: RotaryFactors) -> None:
    """(a, b) becomes (a * cos - b * sin, b * cos + a * sin)."""
    size = factors.cos.shape[-1]
    x = x[..., :size]
    y = x.float()
    x.copy_((y * factors.cos).addcmul_(y.roll(size // 2, -1), factors.sin))


def heads_per_program(heads: Heads) -> int:
    """Return the heads per program: as many as let each of 128 threads read 16 bytes of a half.

    Programs wait for positions, blocks and angles in turn, so each should move many bytes.
    """
    return min(32, max(1, 2048 // next_power_of_2(heads.dim)))


def rotate_and_store_triton(
    qkv: torch.Tensor,
    heads: Heads,
    rows: PagedRows,
    kv: torch.Tensor,
    *,
    cos_sin: torch.Tensor | None,
    norms: HeadNorms | None,
    per_program: int | None = None,
) -> None:
    num_tokens = qkv.shape[0]
    num_heads = heads.num_q + 2 * heads.num_kv
    half = 0 if cos_sin is None else cos_sin.shape[-1]
    rest = heads.dim - 2 * half
    per_program = heads_per_program(heads) if per_program is None else per_program
    launch(
        _rotate_and_store_kernel,
        (num_tokens, cdiv(num_heads, per_program)),
        qkv,
        rows.positions,
        rows.slots,
        rows.block_table,
        rows.block_table.stride(0),
        kv,
        kv.stride(0),
        cos_sin,
        None if norms is None else norms.q_weight,
        None if norms is None else norms.k_weight,
        0.0 if norms is None else norms.eps,
        NUM_Q=heads.num_q,
        NUM_KV=heads.num_kv,
        DIM=heads.dim,
        HALF=half,
        HALF_PAD=next_power_of_2(max(half, 1)),
        REST=rest,
        REST_PAD=next_power_of_2(max(rest, 1)),
        BLOCK_TOKENS=kv.shape[2],
        HAS_NORMS=norms is not None,
        HEADS=per_program,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["table_stride"])
def _rotate_and_store_kernel(
    qkv,
    positions,
    slots,
    table,
    table_stride,
    kv,
    kv_stride,
    cos_sin,
    q_weight,
    k_weight,
    eps,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < NUM_Q + 2 * NUM_KV
    is_q = head < NUM_Q
    is_v = head >= NUM_Q + NUM_KV
    half_dims = tl.arange(0, HALF_PAD)[None, :]
    # The token's target and angles are read while the previous kernel runs.
    position = tl.load(positions + token)
    slot = tl.load(slots + token).to(tl.int64)
    block = tl.load(table + slot * table_stride + position // BLOCK_TOKENS).to(tl.int64)
    if HALF > 0:
        angles = cos_sin + position.to(tl.int64) * (2 * HALF)
        cos = tl.load(angles + half_dims, half_dims < HALF, other=1.0)
        sin = tl.load(angles + HALF + half_dims, half_dims < HALF, other=0.0)
    wait_for_inputs(OVERLAPS)

    source = qkv + token.to(tl.int64) * ((NUM_Q + 2 * NUM_KV) * DIM) + head[:, None] * DIM
    # k and v heads are numbered 0 .. 2 * NUM_KV - 1 from the end of q: side k|v, then head.
    kv_head = tl.where(is_q, 0, head - NUM_Q)
    side, kv_head = kv_head // NUM_KV, kv_head % NUM_KV
    target = side * (BLOCK_TOKENS * NUM_KV * DIM) + (position % BLOCK_TOKENS) * (NUM_KV * DIM) + kv_head * DIM
    target = kv + block * kv_stride + target[:, None]
    leaves = is_head & (is_q == 0)  # written to the cache; q stays in place
    rest_dims = tl.arange(0, REST_PAD)[None, :]
    squares = tl.zeros([HEADS], tl.float32)
    if HALF > 0:
        in_half = is_head[:, None] & (half_dims < HALF)
        a = tl.load(source + half_dims, in_half, other=0.0)
        b = tl.load(source + HALF + half_dims, in_half, other=0.0)
        x, y = a.to(tl.float32), b.to(tl.float32)
        squares += tl.sum(x * x + y * y, 1)
    if REST > 0:
        in_rest = is_head[:, None] & (rest_dims < REST)
        c = tl.load(source + 2 * HALF + rest_dims, in_rest, other=0.0)
        z = c.to(tl.float32)
        squares += tl.sum(z * z, 1)
    if HAS_NORMS:
        scale = tl.where(is_v, 1.0, tl.rsqrt(squares / DIM + eps))[:, None]
    if HALF > 0:
        in_dim = half_dims < HALF
        if HAS_NORMS:
            x *= scale * _head_weight(q_weight, k_weight, half_dims, in_dim, is_q, is_v)
            y *= scale * _head_weight(q_weight + HALF, k_weight + HALF, half_dims, in_dim, is_q, is_v)
            x, y = x.to(a.dtype).to(tl.float32), y.to(a.dtype).to(tl.float32)
        cos = tl.where(is_v[:, None], 1.0, cos)
        sin = tl.where(is_v[:, None], 0.0, sin)
        rotated_x = (x * cos - y * sin).to(a.dtype)
        rotated_y = (y * cos + x * sin).to(a.dtype)
        tl.store(source + half_dims, rotated_x, is_q[:, None] & in_dim)
        tl.store(source + HALF + half_dims, rotated_y, is_q[:, None] & in_dim)
        tl.store(target + half_dims, rotated_x, leaves[:, None] & in_dim)
        tl.store(target + HALF + half_dims, rotated_y, leaves[:, None] & in_dim)
    if REST > 0:
        in_dim = rest_dims < REST
        if HAS_NORMS:
            z *= scale * _head_weight(q_weight + 2 * HALF, k_weight + 2 * HALF, rest_dims, in_dim, is_q, is_v)
            tl.store(source + 2 * HALF + rest_dims, z.to(c.dtype), is_q[:, None] & in_dim)
        tl.store(target + 2 * HALF + rest_dims, z.to(c.dtype), leaves[:, None] & in_dim)


@triton.jit
def _head_weight(q_weight, k_weight, dims, in_dim, is_q, is_v):
    q = tl.load(q_weight + dims, in_dim, other=0.0).to(tl.float32)
    k = tl.load(k_weight + dims, in_dim, other=0.0).to(tl.float32)
    return tl.where(is_v[:, None], 1.0, tl.where(is_q[:, None], q, k))
