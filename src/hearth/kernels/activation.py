"""The MLP's activation, gated or plain, in one pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hearth.kernels.jit import cdiv, launch, runs_triton, tl, triton
from hearth.kernels.overlap import wait_for_inputs

#: Activations by the values of `models.arch.Activation`.
_TORCH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activate(x: torch.Tensor, kind: str, *, gated: bool, out: torch.Tensor) -> None:
    """Compute `out = f(x)`, or `out = f(gate) * up` where a row of `x` is gate, then up."""
    impl = activate_triton if runs_triton(x) else activate_reference
    impl(x, kind, gated=gated, out=out)


def activate_reference(x: torch.Tensor, kind: str, *, gated: bool, out: torch.Tensor) -> None:
    if not gated:
        out.copy_(_TORCH[kind](x))
        return
    gate, up = x.chunk(2, dim=-1)
    torch.mul(_TORCH[kind](gate), up, out=out)


def activate_triton(x: torch.Tensor, kind: str, *, gated: bool, out: torch.Tensor) -> None:
    rows, size = out.shape
    block = 1024
    launch(
        _activate_kernel,
        (rows, cdiv(size, block)),
        x,
        out,
        size,
        KIND=kind,
        GATED=gated,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _activate_kernel(
    x,
    out,
    size,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < size
    stride = 2 * size if GATED else size
    raw = tl.load(x + row * stride + cols, inside, other=0.0)
    a = raw.to(tl.float32)
    if KIND == "silu":
        a = a * tl.sigmoid(a)
    elif KIND == "gelu":
        a = 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (a + 0.044715 * a * a * a)
        a = a * tl.sigmoid(2.0 * inner)
    else:
        a = tl.maximum(a, 0.0)
        if KIND == "relu2":
            a = a * a
    if GATED:
        a = a * tl.load(x + row * stride + size + cols, inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + cols, a.to(raw.dtype), inside)
