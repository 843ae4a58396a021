"""Products with weight matrices: the library's, and Hearth's kernels on CUDA where they are faster.

The kernel for one row reads memory faster; the one for few rows and small matrices starts earlier.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hearth.kernels.jit import can_overlap, cdiv, has_large_memory, launch, runs_triton, tl, triton
from hearth.kernels.overlap import wait_for_inputs


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor) -> None:
    """Compute `out = x @ weight.T + bias` for x [rows, k] and weight [n, k]."""
    if _is_skinny(x):
        skinny_linear_triton(x, weight, bias, out=out)
    elif _is_flipped(x):
        flipped_linear(x, weight, bias, out=out)
    elif _is_narrow(x, weight):
        narrow_linear_triton(x, weight, bias, out=out)
    else:
        linear_reference(x, weight, bias, out=out)


def add_linear(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> bool:
    """Compute `out += x @ weight.T`, rounded once. False: not done, as `linear` and a sum are faster."""
    if _is_skinny(x) or _is_flipped(x):
        return False
    if _is_narrow(x, weight):
        narrow_linear_triton(x, weight, None, out=out, adds=True)
    else:
        out.addmm_(x, weight.t())
    return True


def _is_skinny(x: torch.Tensor) -> bool:
    return x.shape[0] <= MAX_SKINNY_ROWS and runs_triton(x) and x.dtype != torch.float32


def _is_narrow(x: torch.Tensor, weight: torch.Tensor) -> bool:
    rows, (outputs, inputs) = x.shape[0], weight.shape
    if rows > MAX_NARROW_ROWS or outputs > MAX_NARROW_OUTPUTS or inputs > narrow_tile(rows).max_inputs:
        return False
    if x.dtype == torch.float32 or not runs_triton(x) or not can_overlap() or not has_large_memory():
        return False
    return inputs % 8 == 0 and weight.data_ptr() % 16 == 0  # alignment of device loads


def _is_flipped(x: torch.Tensor) -> bool:
    return x.shape[0] in FLIPPED_ROWS and x.is_cpu


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor
) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


#: Rows for which the CPU's library (OpenBLAS) is faster with factors swapped: 1.4 times at 16, 1.05 at 64.
FLIPPED_ROWS = range(9, 65)


def flipped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor
) -> None:
    out.copy_(torch.mm(weight, x.t()).t())
    if bias is not None:
        out.add_(bias)


#: Up to so many rows Hearth's kernel beats cuBLAS (bench/engine/kernels.py).
MAX_SKINNY_ROWS = 1


def skinny_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    block_n: int | None = None,
    block_k: int = 1024,
    num_warps: int = 4,
) -> None:
    n, k = weight.shape
    if block_n is None:
        # With few inputs, two outputs are read faster than programs start: a head of 152k words and
        # 896 inputs takes 95 us by two, 78 by four. With more inputs two are better.
        block_n = 4 if k <= block_k else 2
    launch(
        _skinny_linear_kernel,
        (cdiv(n, block_n), x.shape[0]),
        out,
        x,
        weight,
        bias,
        n,
        k,
        HAS_BIAS=bias is not None,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_K=k % block_k == 0,
        num_warps=num_warps,
        num_stages=3,
    )


@triton.jit
def _skinny_linear_kernel(
    out,
    x,
    weight,
    bias,
    n,
    k,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = outputs < n
    weight_at = weight + outputs.to(tl.int64)[:, None] * k
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for at in range(0, k, BLOCK_K):
        inputs = at + tl.arange(0, BLOCK_K)
        if EVEN_K:
            w = tl.load(weight_at + inputs[None, :], in_n[:, None], other=0.0, eviction_policy="evict_first")
            a = tl.load(x + row * k + inputs)
        else:
            in_k = inputs < k
            w = tl.load(weight_at + inputs[None, :], in_n[:, None] & in_k[None, :], other=0.0)
            a = tl.load(x + row * k + inputs, in_k, other=0.0)
        acc += w.to(tl.float32) * a.to(tl.float32)[None, :]
    result = tl.sum(acc, 1)
    if HAS_BIAS:
        result += tl.load(bias + outputs, in_n, other=0.0).to(tl.float32)
    tl.store(out + row * n + outputs, result.to(out.dtype.element_ty), in_n)


@dataclass(frozen=True, slots=True)
class NarrowTile:
    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    max_inputs: int = 1024  #: up to which this is faster than the library (docs/log)


#: Tiles by their largest number of rows.
NARROW_TILES = {
    16: NarrowTile(16, 32, 256, num_stages=4),
    32: NarrowTile(64, 16, 128, num_stages=6),
    64: NarrowTile(64, 16, 128, num_stages=6, max_inputs=2048),
    128: NarrowTile(128, 16, 128, num_stages=5),
}
MAX_NARROW_ROWS, MAX_NARROW_OUTPUTS = max(NARROW_TILES), 2048


def narrow_tile(rows: int) -> NarrowTile:
    return next(tile for most, tile in NARROW_TILES.items() if rows <= most)


def narrow_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    adds: bool = False,
    tile: NarrowTile | None = None,
) -> None:
    """Compute as `linear`, or with `adds` as `add_linear`. Sums are not split: bits depend on sizes alone."""
    rows, (n, k) = x.shape[0], weight.shape
    tile = narrow_tile(rows) if tile is None else tile
    launch(
        _narrow_linear_kernel,
        (cdiv(n, tile.block_n),),
        out,
        x,
        weight,
        bias,
        rows,
        n,
        k,
        rows if adds else 0,
        HAS_BIAS=bias is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN_K=k % tile.block_k == 0,
        FETCHES=not x.is_cpu,  # the interpreter has no assembly
        num_warps=4,
        num_stages=tile.num_stages,
    )


@triton.jit(do_not_specialize=["rows", "added_rows"])
def _narrow_linear_kernel(
    out,
    x,
    weight,
    bias,
    rows,
    n,
    k,
    added_rows,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    FETCHES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the last output or row, that one is computed again and dropped: loads need no mask.
    weight_at = weight + tl.minimum(outputs, n - 1).to(tl.int64) * k
    if FETCHES:
        _fetch(weight_at, k * weight.dtype.element_ty.primitive_bitwidth // 8)
    wait_for_inputs(OVERLAPS)
    tokens, inputs = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    x_at = x + tl.minimum(tokens, rows - 1)[:, None] * k + inputs[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, k, BLOCK_K):
        if EVEN_K:
            w, a = tl.load(weight_at[None, :] + at + inputs[:, None]), tl.load(x_at + at)
        else:
            in_k = inputs < k - at
            w = tl.load(weight_at[None, :] + at + inputs[:, None], in_k[:, None], other=0.0)
            a = tl.load(x_at + at, in_k[None, :], other=0.0)
        acc = tl.dot(a, w, acc, input_precision="ieee")
    out_at = out + tokens[:, None].to(tl.int64) * n + outputs[None, :]
    inside = (tokens[:, None] < rows) & (outputs[None, :] < n)
    if HAS_BIAS:
        acc += tl.load(bias + outputs, outputs < n, other=0.0).to(tl.float32)[None, :]
    # All rows of the old output are added, or none: one variant serves both.
    is_added = (tokens[:, None] < added_rows) & (outputs[None, :] < n)
    acc += tl.load(out_at, is_added, other=0.0).to(tl.float32)
    tl.store(out_at, acc.to(out.dtype.element_ty), inside)


@triton.jit
def _fetch(pointers, num_bytes):
    """Prefetch memory into the L2 cache, `num_bytes` from each pointer."""
    tl.inline_asm_elementwise(
        """
        {
        cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [pointers.to(tl.int64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
