from __future__ import annotations

import pytest
import torch

from hearth.kernels.activation import activate_reference, activate_triton
from tests.kernels.cases import DTYPES, assert_close, random


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 1025), (2, 11008)])
def test_kernel_equals_reference(
    device: str, dtype: torch.dtype, kind: str, gated: bool, rows: int, size: int
) -> None:
    x = 3 * random(rows, 2 * size if gated else size, device=device, dtype=dtype)
    expected = torch.empty(rows, size, device=device)
    activate_reference(x.float(), kind, gated=gated, out=expected)
    out = torch.full((rows, size), float("nan"), device=device, dtype=dtype)

    activate_triton(x, kind, gated=gated, out=out)

    assert_close(out, expected)


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize("gated", [True, False])
def test_what_adapters_add_counts_as_if_it_had_been_in_the_projection(
    device: str, dtype: torch.dtype, gated: bool
) -> None:
    x, added = (random(3, 2 * 1025, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    expected, out = (
        torch.full((3, 1025 * (2 - gated)), float("nan"), device=device, dtype=dtype) for _ in range(2)
    )
    activate_triton(x + added, "silu", gated=gated, out=expected)

    activate_triton(x, "silu", gated=gated, out=out, added=added)

    assert torch.equal(out, expected)
    by_torch = torch.empty_like(out)
    activate_reference(x, "silu", gated=gated, out=by_torch, added=added)
    assert_close(by_torch, expected)
