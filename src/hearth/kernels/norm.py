"""Residual add and normalisation in one pass over the hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hearth.kernels.jit import launch, next_power_of_2, runs_triton, tl, triton
from hearth.kernels.overlap import wait_for_inputs


def add_norm(
    delta: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    is_rms: bool,
    out: torch.Tensor | None,
    more: torch.Tensor | None = None,
    delta_weight: torch.Tensor | None = None,
) -> None:
    """Compute `residual += delta`, then `out = norm(residual)`; `out` may be `residual` itself (post-norm).

    `more` is added after `delta`. With `delta_weight` the RMS norm of `delta` is added instead of it. Without
    `out` nothing is normalised. `residual` may be columns of a matrix if `out` is the same and nothing is
    added. Sums are rounded to the tensors' dtype before they are normalised, so
    passing hidden states between layer ranges does not change bits.
    """
    impl = add_norm_triton if runs_triton(residual) else add_norm_reference
    impl(delta, residual, weight, bias, eps, is_rms=is_rms, out=out, more=more, delta_weight=delta_weight)


def add_norm_reference(
    delta: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    is_rms: bool,
    out: torch.Tensor | None,
    more: torch.Tensor | None = None,
    delta_weight: torch.Tensor | None = None,
) -> None:
    if delta is not None and delta_weight is not None:
        delta = (_rms(delta.float(), eps) * delta_weight).to(delta.dtype)
    if delta is not None:
        residual.add_(delta)
    if more is not None:
        residual.add_(more)
    if out is None:
        return
    x = residual.float()
    if is_rms:
        torch.mul(_rms(x, eps), 1.0 if weight is None else weight, out=out)
        return
    w = None if weight is None else weight.float()
    b = None if bias is None else bias.float()
    out.copy_(F.layer_norm(x, x.shape[-1:], w, b, eps))


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def add_norm_triton(
    delta: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    is_rms: bool,
    out: torch.Tensor | None,
    more: torch.Tensor | None = None,
    delta_weight: torch.Tensor | None = None,
) -> None:
    rows, hidden = residual.shape
    stride = residual.stride(0) if rows > 1 else hidden
    assert stride == hidden or (out is residual and delta is None and more is None), f"{stride=} {hidden=}"
    block = next_power_of_2(hidden)
    launch(
        _add_norm_kernel,
        (rows,),
        residual if out is None else out,
        residual,
        delta,
        more,
        weight,
        bias,
        delta_weight,
        hidden,
        eps,
        STRIDE=0 if stride == hidden else stride,
        HAS_OUT=out is not None,
        HAS_DELTA=delta is not None,
        HAS_DELTA_WEIGHT=delta_weight is not None,
        HAS_MORE=more is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        IS_RMS=is_rms,
        IN_PLACE=out is not None and out.data_ptr() == residual.data_ptr(),
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )


@triton.jit
def _add_norm_kernel(
    out,
    residual,
    delta,
    more,
    weight,
    bias,
    delta_weight,
    hidden,
    eps,
    STRIDE: tl.constexpr,
    HAS_OUT: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_DELTA_WEIGHT: tl.constexpr,
    HAS_MORE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_RMS: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * (hidden if STRIDE == 0 else STRIDE)
    cols = tl.arange(0, BLOCK)
    inside = cols < hidden
    # Loaded first: weights do not change, and after the sum over the row the load would be waited for.
    if HAS_WEIGHT:
        w = tl.load(weight + cols, inside, other=0.0)
    if HAS_BIAS:
        b = tl.load(bias + cols, inside, other=0.0)
    if HAS_DELTA_WEIGHT:
        dw = tl.load(delta_weight + cols, inside, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAPS)
    x = tl.load(residual + row + cols, inside, other=0.0)
    if HAS_DELTA:
        d = tl.load(delta + row + cols, inside, other=0.0)
        if HAS_DELTA_WEIGHT:
            z = d.to(tl.float32)
            d = (z * tl.rsqrt(tl.sum(z * z, 0) / hidden + eps) * dw).to(d.dtype)
        x = (x.to(tl.float32) + d.to(tl.float32)).to(x.dtype)
    if HAS_MORE:
        m = tl.load(more + row + cols, inside, other=0.0)
        x = (x.to(tl.float32) + m.to(tl.float32)).to(x.dtype)
    if (HAS_DELTA or HAS_MORE) and not IN_PLACE:
        tl.store(residual + row + cols, x, inside)
    if HAS_OUT:
        y = x.to(tl.float32)
        if not IS_RMS:
            y = tl.where(inside, y - tl.sum(y, 0) / hidden, 0.0)
        y = y * tl.rsqrt(tl.sum(y * y, 0) / hidden + eps)
        if HAS_WEIGHT:
            y = y * w.to(tl.float32)
        if HAS_BIAS:
            y = y + b.to(tl.float32)
        tl.store(out + row + cols, y.to(x.dtype), inside)
