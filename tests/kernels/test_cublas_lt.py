from __future__ import annotations

import ctypes
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hearth.errors import DeviceError
from hearth.kernels import cublas_lt
from hearth.kernels.cublas_lt import ChosenProducts, CublasLt, Launch, size_of
from hearth.kernels.linear import add_linear, linear, linear_reference
from hearth.kernels.product_table import ProductSize, ProductTable
from tests.kernels.cases import assert_close
from tests.kernels.fake_cublas_lt import STREAM, algorithm, aligned, fake_library, fake_lt, last_algorithm

SIZES = [(2, 3, 5), (5, 128, 64), (96, 33, 80)]


def chosen(x: torch.Tensor, weight: torch.Tensor, *, adds: bool, kernel: int) -> ChosenProducts:
    table = ProductTable("a device", "1", {size_of(x, weight, adds=adds): algorithm(kernel)})
    return ChosenProducts(fake_lt(), table)


@pytest.mark.parametrize(("rows", "n", "k"), SIZES)
@pytest.mark.parametrize("adds", [False, True])
def test_a_product_by_a_chosen_kernel_is_that_of_torch(rows: int, n: int, k: int, adds: bool) -> None:
    x, weight = aligned(rows, k, seed=1), aligned(n, k, seed=2)
    out = aligned(rows, n, seed=3)
    if not adds:
        out.fill_(float("nan"))
    expected = torch.empty(rows, n, dtype=torch.float64)
    linear_reference(x.double(), weight.double(), None, out=expected)
    if adds:
        expected += out.double()
    products = chosen(x, weight, adds=adds, kernel=6)

    if adds:
        assert add_linear(x, weight, out=out, products=products)
    else:
        linear(x, weight, None, out=out, products=products)

    assert_close(out, expected)
    assert last_algorithm() == 6
    assert ctypes.c_void_p.in_dll(fake_library(), "last_stream").value == STREAM


def test_products_of_other_sizes_with_a_bias_or_in_other_memory_are_left_to_torch() -> None:
    x, weight, out = aligned(5, 64, seed=1), aligned(128, 64, seed=2), aligned(5, 128, seed=3)
    products = chosen(x, weight, adds=False, kernel=5)  # which would give other numbers
    assert products.multiply(x, weight, out, adds=False)
    assert not products.multiply(x, weight, out, adds=True)
    assert not products.multiply(x[:4], weight, out[:4], adds=False)
    assert not products.multiply(x.half(), weight.half(), out.half(), adds=False)
    assert not products.multiply(x, weight, aligned(128, 5, seed=1).t(), adds=False)
    moved = torch.cat([x.view(-1), x.view(-1)])[1:321].view(5, 64)
    assert not products.multiply(moved, weight, out, adds=False)
    bias = aligned(128, seed=4)
    expected = torch.empty(5, 128, dtype=torch.float64)
    linear_reference(x.double(), weight.double(), bias.double(), out=expected)
    linear(x, weight, bias, out=out, products=products)
    assert_close(out, expected)


def test_a_kernel_that_the_library_refuses_is_never_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    x, weight, out = aligned(5, 64, seed=1), aligned(128, 64, seed=2), aligned(5, 128, seed=3)
    products, before = chosen(x, weight, adds=False, kernel=4), out.clone()
    assert not products.multiply(x, weight, out, adds=False)
    assert not products.multiply(x, weight, out, adds=False)
    assert torch.equal(out, before)
    assert products.num_refused == 1
    (record,) = caplog.records
    assert "fallback product=torch" in record.message
    assert "returned 15" in record.message


def test_a_kernel_that_was_only_tried_is_not_kept_and_a_chosen_one_is_prepared_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model has hundreds of sizes, and a hundred kernels are tried for each."""
    x, weight, out = aligned(5, 64, seed=1), aligned(128, 64, seed=2), aligned(5, 128, seed=3)
    lt, size = fake_lt(), size_of(x, weight, adds=False)
    tried = weakref.ref(lt.launcher(size, algorithm(1)))
    assert tried() is None

    prepared, launcher = list[bytes](), CublasLt.launcher

    def note(lt: CublasLt, size: ProductSize, word: bytes) -> Launch:
        prepared.append(word)
        return launcher(lt, size, word)

    monkeypatch.setattr(CublasLt, "launcher", note)
    products = chosen(x, weight, adds=False, kernel=6)
    for _ in range(2):
        assert products.multiply(x, weight, out, adds=False)
    assert prepared == [algorithm(6)]


def test_only_kernels_are_proposed_that_can_run_without_memory_of_their_own() -> None:
    size = size_of(aligned(5, 64, seed=1), aligned(128, 64, seed=2), adds=False)
    lt = fake_lt()
    assert lt.version == "130100"
    assert lt.proposed(size, 24) == [algorithm(number) for number in (1, 4, 5, 6)]
    assert lt.proposed(size, 2) == [algorithm(1)]
    assert lt.can_run(size, algorithm(6))
    assert lt.can_run(size, algorithm(7)), "it is proposed for other rows, and can do with these"
    for number in (2, 3, 8):
        assert not lt.can_run(size, algorithm(number))
    unknown = size_of(aligned(5, 64, seed=1), aligned(13, 64, seed=2), adds=False)
    assert lt.proposed(unknown, 24) == []
    assert lt.proposed(replace(size, dtype="float32"), 24) == []


def test_a_machine_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00 r-xp 0 00:00 0 /usr/lib/libc.so.6\n")
    monkeypatch.setattr(cublas_lt, "_MAPS", maps)
    cublas_lt.loaded_library.cache_clear()
    cublas_lt.lt_obstacle.cache_clear()
    with pytest.raises(DeviceError, match="found: none"):
        cublas_lt.loaded_library()
    assert "found: none" in str(cublas_lt.lt_obstacle())
    cublas_lt.lt_obstacle.cache_clear()  # others have one
