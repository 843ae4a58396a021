"""Products with weight matrices of eight bits and activations of sixteen or more (W8A16).

    out[row, j] = scale[j] * sum(x[row, i] * weight[j, i]) + bias[j]

The weight stays in eight bits until it is in registers, where int8 and float8_e4m3fn become the
activations' dtype without loss; sums are float32 and are scaled once. Quantises nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hearth.kernels.jit import cdiv, launch, runs_triton, tl, triton
from hearth.kernels.overlap import prefetch, wait_for_inputs

#: Up to so many rows a program for each row beats tensor cores.
MAX_SKINNY_ROWS = 1


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
) -> None:
    """Compute `out = (x @ weight.T) * scale + bias` for x [rows, k], weight [n, k] and scale [n]."""
    if not runs_triton(x):
        quantized_linear_reference(x, weight, scale, bias, out=out)
    elif x.shape[0] <= MAX_SKINNY_ROWS:
        quantized_skinny_triton(x, weight, scale, bias, out=out)
    else:
        quantized_tiled_triton(x, weight, scale, bias, out=out)


def quantized_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
) -> None:
    """Compute in float32, because sums that are not yet scaled may pass float16's largest number."""
    product = torch.mm(x.float(), weight.float().t()).mul_(scale)
    out.copy_(product if bias is None else product.add_(bias))


def quantized_skinny_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    block_n: int | None = None,
    block_k: int = 1024,
    num_warps: int = 2,
    ahead: int = 0,
    num_ahead: int = 1584,
) -> None:
    rows, (n, k) = x.shape[0], weight.shape
    if block_n is None:
        block_n = 2 if weight.dtype == torch.int8 else 1  # measured: 64.7 against 66.8 us, 62.6 against 64.7
    launch(
        _skinny_kernel,
        (rows * cdiv(n, block_n),),
        out,
        x,
        weight,
        scale,
        bias,
        rows,
        n,
        k,
        HAS_BIAS=bias is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_N=n % block_n == 0,
        EVEN_K=k % block_k == 0,
        AS_MANTISSAS=not x.is_cpu,  # the interpreter knows no assembly
        AHEAD=ahead if k % 16 == 0 else 0,
        NUM_AHEAD=num_ahead,
        NUM_THREADS=32 * num_warps,
        num_warps=num_warps,
    )


@triton.jit(do_not_specialize=["rows"])
def _skinny_kernel(
    out,
    x,
    weight,
    scale,
    bias,
    rows,
    n,
    k,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    AS_MANTISSAS: tl.constexpr,
    AHEAD: tl.constexpr,
    NUM_AHEAD: tl.constexpr,
    NUM_THREADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # Programs that run together share their weights.
    row = (tl.program_id(0) % rows).to(tl.int64)
    outputs = tl.program_id(0) // rows * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = outputs < n
    weight_at = weight + outputs.to(tl.int64)[:, None] * k
    if OVERLAPS and AHEAD > 0:
        first = tl.program_id(0) // rows * BLOCK_N
        if tl.program_id(0) < NUM_AHEAD:
            num_bytes = tl.minimum(n - first, BLOCK_N) * k
            prefetch(weight + tl.cast(first, tl.int64) * k, num_bytes, AHEAD, NUM_THREADS)
    wait_for_inputs(OVERLAPS)
    # Each thread loads 16 weights at a time and adds up their products alone. To have the same 16 of x,
    # and not through shared memory, x must be loaded in the shape of the weights.
    acc = tl.zeros([BLOCK_N, BLOCK_K // 16], tl.float32)
    inputs = tl.arange(0, BLOCK_K)[None, :]
    x_at = tl.broadcast_to(x + row * k + inputs, [BLOCK_N, BLOCK_K])
    num_whole = k // BLOCK_K * BLOCK_K
    for at in range(0, num_whole, BLOCK_K):
        if EVEN_N:
            w = tl.load(weight_at + at + inputs, eviction_policy="evict_first")
        else:
            w = tl.load(weight_at + at + inputs, in_n[:, None], other=0.0, eviction_policy="evict_first")
        a = tl.load(x_at + at)
        products = _widened(w, AS_MANTISSAS) * a.to(tl.float32)
        acc += tl.sum(products.reshape(BLOCK_N, BLOCK_K // 16, 16), 2)
    if not EVEN_K:
        valid = in_n[:, None] & (inputs < k - num_whole)
        w = tl.load(weight_at + num_whole + inputs, valid, other=0.0)
        a = tl.load(x_at + num_whole, valid, other=0.0)
        products = _widened(w, AS_MANTISSAS) * a.to(tl.float32)
        acc += tl.sum(products.reshape(BLOCK_N, BLOCK_K // 16, 16), 2)
    result = tl.sum(acc, 1) * tl.load(scale + outputs, in_n, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + outputs, in_n, other=0.0).to(tl.float32)
    tl.store(out + row * n + outputs, result.to(out.dtype.element_ty), in_n)


@triton.jit
def _widened(w, AS_MANTISSAS: tl.constexpr):
    """Eight bits as float32. With AS_MANTISSAS integers take a short cut, for their conversion is slow:
    shifted to 0..255, a byte is put under the exponent of 2**23, four of them from one register."""
    if w.dtype.is_floating() or not AS_MANTISSAS:
        return w.to(tl.float32)
    mantissas = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 shifted;
        xor.b32 shifted, $4, 0x80808080;
        prmt.b32 $0, shifted, 0x4B000000, 0x7440;
        prmt.b32 $1, shifted, 0x4B000000, 0x7441;
        prmt.b32 $2, shifted, 0x4B000000, 0x7442;
        prmt.b32 $3, shifted, 0x4B000000, 0x7443;
        }
        """,
        "=r,=r,=r,=r,r",
        [w],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )
    return mantissas - 8388736.0  # 2**23 and the shift


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of the output that one program computes: [block_m, block_n], in steps of block_k."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


#: Tiles by the most rows that they are meant for; the last serves all that are larger.
TILES = {
    16: Tile(16, 32, 256, num_warps=4, num_stages=4),
    32: Tile(32, 64, 128, num_warps=4, num_stages=4),
    64: Tile(64, 64, 128, num_warps=4, num_stages=3),
    256: Tile(128, 64, 128, num_warps=4, num_stages=3),
    1 << 31: Tile(256, 128, 64, num_warps=8, num_stages=4),
}

#: The tile for float32, which tensor cores would round.
FLOAT32_TILE = Tile(16, 32, 32, num_warps=4, num_stages=2)

#: How many weight tiles are in the L2 cache at a time while all rows pass over them.
GROUP_N = 8


def tile_for(rows: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return FLOAT32_TILE
    return next(tile for max_rows, tile in TILES.items() if rows <= max_rows)


def quantized_tiled_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    tile: Tile | None = None,
) -> None:
    rows, (n, k) = x.shape[0], weight.shape
    tile = tile_for(rows, x.dtype) if tile is None else tile
    launch(
        _tiled_kernel,
        (cdiv(rows, tile.block_m) * cdiv(n, tile.block_n),),
        out,
        x,
        weight,
        scale,
        bias,
        rows,
        n,
        k,
        HAS_BIAS=bias is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN_K=k % tile.block_k == 0,
        GROUP_N=GROUP_N,
        AS_MANTISSAS=not x.is_cpu,  # the interpreter knows no assembly
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit(do_not_specialize=["rows"])
def _tiled_kernel(
    out,
    x,
    weight,
    scale,
    bias,
    rows,
    n,
    k,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_N: tl.constexpr,
    AS_MANTISSAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    # Programs that run together share a group of weight tiles and differ in their rows.
    per_group = GROUP_N * tl.cdiv(rows, BLOCK_M)
    first_n = tl.program_id(0) // per_group * GROUP_N
    num_in_group = tl.minimum(tl.cdiv(n, BLOCK_N) - first_n, GROUP_N)
    place = tl.program_id(0) % per_group
    outputs = (first_n + place % num_in_group) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = place // num_in_group * BLOCK_M + tl.arange(0, BLOCK_M)
    inputs = tl.arange(0, BLOCK_K)
    in_n, in_rows = outputs[:, None] < n, tokens[None, :] < rows
    weight_at = weight + outputs.to(tl.int64)[:, None] * k + inputs[None, :]
    x_at = x + tokens.to(tl.int64)[None, :] * k + inputs[:, None]
    # Transposed, out.T = weight @ x.T: the factor on the left may be converted in registers.
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in range(0, k, BLOCK_K):
        in_k = inputs < k - at
        w = tl.load(weight_at + at, in_n if EVEN_K else in_n & in_k[None, :], other=0.0)
        a = tl.load(x_at + at, in_rows if EVEN_K else in_rows & in_k[:, None], other=0.0)
        # To bfloat16 by way of float32: the direct conversions are slow instructions.
        acc = tl.dot(_widened(w, AS_MANTISSAS).to(a.dtype), a, acc, input_precision="ieee")
    acc *= tl.load(scale + outputs, outputs < n, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + outputs, outputs < n, other=0.0).to(tl.float32)[:, None]
    out_at = out + tokens.to(tl.int64)[None, :] * n + outputs[:, None]
    tl.store(out_at, acc.to(out.dtype.element_ty), in_n & in_rows)
