from __future__ import annotations

import pytest
import torch

from hearth.kernels.norm import add_norm_reference, add_norm_triton
from tests.kernels.cases import DTYPES, assert_close, random


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (3, 80), (5, 577), (2, 4096)])
@pytest.mark.parametrize("is_rms", [True, False])
@pytest.mark.parametrize("parts", ["delta more weight bias", "delta weight", "weight", "delta", ""])
def test_kernel_equals_reference(
    device: str, dtype: torch.dtype, rows: int, hidden: int, is_rms: bool, parts: str
) -> None:
    residual = random(rows, hidden, device=device, dtype=dtype, seed=1)
    delta = random(rows, hidden, device=device, dtype=dtype, seed=2) if "delta" in parts else None
    more = random(rows, hidden, device=device, dtype=dtype, seed=5) if "more" in parts else None
    weight = random(hidden, device=device, dtype=dtype, seed=3) if "weight" in parts else None
    bias = random(hidden, device=device, dtype=dtype, seed=4) if "bias" in parts and not is_rms else None
    expected_residual, expected = residual.clone(), torch.empty_like(residual)
    add_norm_reference(delta, expected_residual, weight, bias, 1e-5, is_rms=is_rms, out=expected, more=more)
    out = torch.full_like(residual, float("nan"))

    add_norm_triton(delta, residual, weight, bias, 1e-5, is_rms=is_rms, out=out, more=more)

    assert torch.equal(residual, expected_residual)
    assert_close(out, expected)


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
def test_result_may_replace_the_residual(device: str, dtype: torch.dtype) -> None:
    residual, delta = (random(3, 80, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    expected = residual.clone()
    add_norm_reference(delta, expected, None, None, 1e-5, is_rms=False, out=expected)

    add_norm_triton(delta, residual, None, None, 1e-5, is_rms=False, out=residual)

    assert_close(residual, expected)
