from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hearth.kernels import packed_products
from hearth.kernels.four_bits import FourBitWeight, dequantize_reference, four_bit_linear
from hearth.kernels.packed_products import MAX_ROWS, packed_linear
from hearth.kernels.quantized import quantized_linear
from hearth.system.native_code import native_library
from tests.kernels.cases import assert_close, random
from tests.kernels.test_four_bits import KINDS, SHAPES, weight_of

#: None, one, as many as are multiplied in C, and more.
ROWS = [0, 1, 3, MAX_ROWS, MAX_ROWS + 1, 100]


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CC", "/no/such/compiler")
    packed_products._compiled.cache_clear()
    yield
    packed_products._compiled.cache_clear()


def four_bit_product(x: torch.Tensor, weight: FourBitWeight, out: torch.Tensor) -> bool:
    lookup = {"minimum": weight.minimum, "codebook": weight.codebook}
    return packed_linear(x, weight.codes, weight.scale, None, out=out, **lookup)


def eight_bits(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Every code that is a number, in a random order."""
    codes = torch.randperm(256, generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F] if dtype == torch.float8_e4m3fn else codes
    return codes.repeat(-(-n * k // len(codes)))[: n * k].view(n, k).view(dtype)


@pytest.mark.parametrize("scale", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_four_bits_are_widened_bit_for_bit_as_in_the_reference(
    shape: tuple[int, int, int, int], kind: str, scale: torch.dtype
) -> None:
    _, n, k, group = shape
    weight = weight_of(n, k, group, kind)
    minimum = None if weight.minimum is None else weight.minimum.to(scale)
    # Among the scales are zeros and the smallest that float16 has.
    scales = torch.where(weight.scale.float() < 0.005, weight.scale.float() * 1e-5, weight.scale.float())
    weight = FourBitWeight(weight.codes, scales.to(scale), minimum, weight.codebook)

    for rows in (k, min(k, MAX_ROWS)):
        out = torch.empty(rows, n)  # products with unit vectors, no sum of which is rounded

        assert four_bit_product(torch.eye(k)[:rows], weight, out)

        assert torch.equal(out.t(), dequantize_reference(weight, k)[:, :rows])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("n", "k"), [(5, 100), (8, 128), (19, 300)])
def test_eight_bits_are_widened_bit_for_bit(n: int, k: int, dtype: torch.dtype) -> None:
    values, scale = eight_bits(n, k, dtype), random(n, device="cpu", seed=2).abs()

    for rows in (k, min(k, MAX_ROWS)):
        out = torch.empty(rows, n)

        assert packed_linear(torch.eye(k)[:rows], values, scale, None, out=out)

        assert torch.equal(out.t(), (values.float() * scale[:, None])[:, :rows])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", [*KINDS, "int8", "fp8"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_equal_those_in_float64(
    rows: int, kind: str, monkeypatch: pytest.MonkeyPatch, *, has_bias: bool
) -> None:
    n, k = 37, 320 if kind in KINDS else 300
    monkeypatch.setattr(
        packed_products._scratch, "wide", torch.empty(20 * k)
    )  # room for 16 outputs at a time
    x, bias = random(rows, k, device="cpu", seed=1), random(n, device="cpu", seed=4) if has_bias else None
    out = torch.full((rows, n), torch.nan)
    if kind in KINDS:
        weight = weight_of(n, k, 32, kind)
        four_bit_linear(x, weight, bias, out=out)
        wide = dequantize_reference(weight, k)
    else:
        values = eight_bits(n, k, torch.int8 if kind == "int8" else torch.float8_e4m3fn)
        scale = random(n, device="cpu", seed=2).abs() / 100
        quantized_linear(x, values, scale, bias, out=out)
        wide = values.float() * scale[:, None]

    if rows:
        assert_close(out, x.double() @ wide.double().t() + (0 if bias is None else bias.double()))


def test_threads_share_the_outputs() -> None:
    weight, x = weight_of(100, 256, 32, "minimum"), random(2, 256, device="cpu", seed=1)
    alone, shared = torch.empty(2, 100), torch.empty(2, 100)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert four_bit_product(x, weight, alone)
        torch.set_num_threads(3)
        assert four_bit_product(x, weight, shared)
    finally:
        torch.set_num_threads(threads)

    assert torch.equal(alone, shared)


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_the_reference_multiplies(caplog: pytest.LogCaptureFixture) -> None:
    weight, x, out = weight_of(9, 64, 32, "minimum"), random(2, 64, device="cpu", seed=1), torch.empty(2, 9)

    assert not packed_products.is_missing(), "it is not known yet"
    four_bit_linear(x, weight, None, out=out)
    four_bit_linear(x, weight, None, out=out)
    assert packed_products.is_missing()

    assert_close(out, x.double() @ dequantize_reference(weight, 64).double().t())
    assert [record.message for record in caplog.records if "fallback products=torch" in record.message] == [
        "fallback products=torch reason=`/no/such/compiler: No such file or directory` "
        "remedy=`install a C compiler (cc)`"
    ]


def test_the_compilation_that_was_begun_early_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    compilations = []

    def counted(*args: Any, **options: Any) -> Any:
        compilations.append(args)
        return native_library(*args, **options)

    monkeypatch.setattr(packed_products, "native_library", counted)
    packed_products._compiled.cache_clear()
    weight, x = weight_of(9, 64, 32, "minimum"), random(2, 64, device="cpu", seed=1)

    packed_products.prepare()
    packed_products.prepare()

    assert four_bit_product(x, weight, torch.empty(2, 9))
    assert len(compilations) == 1
    assert not packed_products.is_missing()


def test_the_source_is_in_the_package() -> None:
    assert Path(packed_products.__file__).with_suffix(".c").is_file()
