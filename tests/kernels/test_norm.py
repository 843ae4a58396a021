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


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize("has_out", [True, False])
def test_a_normed_delta_is_added(device: str, dtype: torch.dtype, has_out: bool) -> None:
    residual, delta = (random(3, 577, device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    weight, delta_weight = (random(577, device=device, seed=seed) for seed in (3, 4))
    expected_residual, expected = residual.clone(), torch.empty_like(residual) if has_out else None
    out = torch.empty_like(residual) if has_out else None

    for add_norm, x, to in (
        (add_norm_reference, expected_residual, expected),
        (add_norm_triton, residual, out),
    ):
        add_norm(delta, x, weight, None, 1e-5, is_rms=True, out=to, delta_weight=delta_weight)

    assert_close(residual, expected_residual)
    if out is not None and expected is not None:
        assert_close(out, expected)


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
def test_columns_of_a_matrix_are_normed_in_place(device: str, dtype: torch.dtype) -> None:
    whole, weight = random(3, 200, device=device, dtype=dtype), random(80, device=device, seed=3)
    expected = whole.clone()
    for add_norm, x in ((add_norm_reference, expected[:, 40:120]), (add_norm_triton, whole[:, 40:120])):
        add_norm(None, x, weight, None, 1e-5, is_rms=True, out=x)

    assert_close(whole, expected)
    assert torch.equal(whole[:, 120:], expected[:, 120:])
