from __future__ import annotations

import pytest
import torch

from hearth.kernels import jit
from hearth.kernels import linear as linear_module
from hearth.kernels.linear import (
    FLIPPED_ROWS,
    MAX_SKINNY_ROWS,
    add_linear,
    flipped_linear,
    linear,
    linear_reference,
    narrow_linear_triton,
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


@pytest.mark.parametrize(
    ("device", "dtype"), [one for one in DTYPES if one.values != ("cuda", torch.float32)]
)
@pytest.mark.parametrize(("rows", "n", "k"), [(2, 33, 64), (16, 97, 904), (50, 40, 256), (100, 64, 136)])
@pytest.mark.parametrize("to", ["out", "out with a bias", "sum"])
def test_narrow_kernel_equals_reference(
    device: str, dtype: torch.dtype, rows: int, n: int, k: int, to: str
) -> None:
    x = random(rows, k, device=device, dtype=dtype, seed=1)
    weight = random(n, k, device=device, dtype=dtype, seed=2)
    bias = random(n, device=device, dtype=dtype, seed=3) if "bias" in to else None
    around = torch.full((rows + 2, n), float("nan"), device=device, dtype=dtype)
    out = around[1:-1]
    expected = torch.empty(rows, n, device=device, dtype=torch.float64)
    linear_reference(x.double(), weight.double(), None if bias is None else bias.double(), out=expected)
    if to == "sum":
        out.copy_(random(rows, n, device=device, dtype=dtype, seed=4))
        expected += out.double()

    narrow_linear_triton(x, weight, bias, out=out, adds=to == "sum")

    assert_close(out, expected)
    assert around[[0, -1]].isnan().all()


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", [2, 16, 17, 64, 128])
@pytest.mark.parametrize(("n", "k"), [(1152, 896), (896, 896), (2048, 1024)])
def test_narrow_sums_have_the_same_bits_every_time(rows: int, n: int, k: int, device: str) -> None:
    x = random(rows, k, device=device, dtype=torch.bfloat16, seed=1)
    weight = random(n, k, device=device, dtype=torch.bfloat16, seed=2)
    out, first = (torch.empty(rows, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    narrow_linear_triton(x, weight, None, out=first)
    assert_close(first, x.float() @ weight.float().t())

    for _ in range(50):
        narrow_linear_triton(x, weight, None, out=out)
        assert torch.equal(out, first)


@pytest.mark.parametrize(
    ("rows", "n", "k", "dtype", "device", "is_narrow"),
    [
        (2, 1152, 896, torch.bfloat16, 90, True),
        (128, 896, 896, torch.float16, 90, True),
        (64, 2048, 2048, torch.bfloat16, 90, True),
        (32, 2048, 2048, torch.bfloat16, 90, False),
        (128, 2048, 2048, torch.bfloat16, 90, False),
        (129, 896, 896, torch.bfloat16, 90, False),
        (2, 4096, 896, torch.bfloat16, 90, False),
        (2, 896, 4864, torch.bfloat16, 90, False),
        (2, 896, 900, torch.bfloat16, 90, False),
        (2, 896, 896, torch.float32, 90, False),
        (2, 896, 896, torch.bfloat16, 80, False),
        (2, 896, 896, torch.bfloat16, 120, False),  # whose programs have too little shared memory
    ],
)
def test_few_rows_and_a_small_matrix_have_a_kernel_of_their_own_where_kernels_overlap(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: int,
    is_narrow: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jit, "capability", lambda: device)
    monkeypatch.setattr(linear_module, "can_overlap", lambda: device >= 90)
    asked: list[object] = []
    monkeypatch.setattr(linear_module, "launch", lambda *args, **_: asked.append(args[-1]))
    x, weight, out = (
        torch.empty(size, device="meta", dtype=dtype) for size in ((rows, k), (n, k), (rows, n))
    )

    linear(x, weight, None, out=out)
    assert add_linear(x, weight, out=out)

    assert asked == ([0, rows] if is_narrow else [])


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
