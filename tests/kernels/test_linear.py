from __future__ import annotations

import pytest
import torch

from hearth.kernels.linear import (
    FLIPPED_ROWS,
    MAX_SKINNY_ROWS,
    add_linear,
    flipped_linear,
    linear_reference,
    skinny_linear_triton,
)
from tests.kernels.cases import DTYPES, assert_close, random


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 64, 64), (1, 97, 1500), (2, 33, 1024), (1, 40, 4096)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_kernel_equals_reference(
    device: str, dtype: torch.dtype, rows: int, n: int, k: int, has_bias: bool
) -> None:
    x = random(rows, k, device=device, dtype=dtype, seed=1)
    weight = random(n, k, device=device, dtype=dtype, seed=2)
    bias = random(n, device=device, dtype=dtype, seed=3) if has_bias else None
    expected = torch.empty(rows, n, device=device, dtype=torch.float64)
    linear_reference(x.double(), weight.double(), None if bias is None else bias.double(), out=expected)
    out = torch.full((rows, n), float("nan"), device=device, dtype=dtype)

    skinny_linear_triton(x, weight, bias, out=out)

    assert_close(out, expected)


@pytest.mark.parametrize(("rows", "n", "k"), [(9, 64, 64), (16, 97, 150), (96, 33, 80)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_swapped_factors_give_the_same_product(rows: int, n: int, k: int, has_bias: bool) -> None:
    x, weight = random(rows, k, device="cpu", seed=1), random(n, k, device="cpu", seed=2)
    bias = random(n, device="cpu", seed=3) if has_bias else None
    expected, out = torch.empty(rows, n), torch.full((rows, n), float("nan"))
    linear_reference(x, weight, bias, out=expected)

    flipped_linear(x, weight, bias, out=out)

    assert_close(out, expected)


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), [(2, 64, 64), (5, 97, 150), (96, 33, 80)])
def test_a_product_is_added_to_what_is_there(
    device: str, dtype: torch.dtype, rows: int, n: int, k: int
) -> None:
    x, weight = (random(count, k, device=device, dtype=dtype, seed=count) for count in (rows, n))
    out = random(rows, n, device=device, dtype=dtype, seed=3)
    expected = torch.empty(rows, n, device=device, dtype=torch.float64)
    linear_reference(x.double(), weight.double(), None, out=expected)
    expected += out.double()

    assert add_linear(x, weight, out=out)

    assert_close(out, expected)


@pytest.mark.parametrize(
    ("rows", "device"), [(MAX_SKINNY_ROWS, "meta"), (FLIPPED_ROWS[0], "cpu"), (FLIPPED_ROWS[-1], "cpu")]
)
def test_rows_that_are_multiplied_otherwise_are_not_added(rows: int, device: str) -> None:
    dtype = torch.bfloat16
    x, weight = (torch.ones(count, 8, device=device, dtype=dtype) for count in (rows, 4))
    out = torch.zeros(rows, 4, device=device, dtype=dtype)

    assert not add_linear(x, weight, out=out)

    assert out.is_meta or not out.any()
