"""Products with weight matrices: the library's, except for skinny ones on CUDA, where ours read faster."""

from __future__ import annotations

import torch

from hearth.kernels.cublas_lt import ProductKernels
from hearth.kernels.jit import cdiv, launch, runs_triton, tl, triton
from hearth.kernels.overlap import wait_for_inputs


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    products: ProductKernels | None = None,
) -> None:
    """Compute `out = x @ weight.T + bias` for x [rows, k] and weight [n, k].

    `products` may have a better kernel than the one that torch takes.
    """
    if _is_skinny(x):
        skinny_linear_triton(x, weight, bias, out=out)
    elif _is_flipped(x):
        flipped_linear(x, weight, bias, out=out)
    elif products is None or bias is not None or not products.multiply(x, weight, out, adds=False):
        linear_reference(x, weight, bias, out=out)


def add_linear(
    x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, products: ProductKernels | None = None
) -> bool:
    """Compute `out += x @ weight.T` in one pass, whose sum is rounded once; False: not with so many rows.

    Where nothing is computed `linear` is faster, with a sum behind it. `products` are as there.
    """
    if _is_skinny(x) or _is_flipped(x):
        return False
    if products is None or not products.multiply(x, weight, out, adds=True):
        out.addmm_(x, weight.t())
    return True


def _is_skinny(x: torch.Tensor) -> bool:
    return x.shape[0] <= MAX_SKINNY_ROWS and runs_triton(x) and x.dtype != torch.float32


def _is_flipped(x: torch.Tensor) -> bool:
    return x.shape[0] in FLIPPED_ROWS and x.is_cpu


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor
) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


#: Rows at which a CPU's library (OpenBLAS) is faster with factors swapped: 1.4 times at 16, 1.05 at 64.
FLIPPED_ROWS = range(9, 65)


def flipped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor
) -> None:
    """Compute the product as `(weight @ x.T).T`."""
    out.copy_(torch.mm(weight, x.t()).t())
    if bias is not None:
        out.add_(bias)


#: Up to so many rows our kernel beats cuBLAS (bench/engine/kernels.py).
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
        # With so few inputs, two outputs are read sooner than programs are started: a head of 152k words and
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
