from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch

from hearth.kernels import four_bits
from hearth.kernels.four_bits import (
    FourBitWeight,
    dequantize_reference,
    dequantize_triton,
    four_bit_linear,
    four_bit_tiled_triton,
    four_bit_widened_triton,
    pack_codes,
    unpack_codes,
)
from hearth.kernels.quantized import ProductScratch, Tile
from tests.kernels.cases import DEVICES, DTYPES, assert_close, crossed, random

Kernel = Callable[..., None]
SMALL = Tile(16, 16, 128, num_warps=4, num_stages=2, per_processor=4)
#: rows, n, k, group: chunks that are not full, groups of less and more than a chunk, whole rows
SHAPES = [
    (1, 37, 160, 32),
    (3, 16, 128, 16),
    (17, 20, 320, 64),
    (5, 9, 512, 256),
    (3, 18, 300, 300),
]
KINDS = ["symmetric", "minimum", "codebook"]


def weight_of(n: int, k: int, group: int, kind: str, device: str = "cpu") -> FourBitWeight:
    codes = torch.randint(16, (n, k), generator=torch.Generator().manual_seed(n))
    scale = random(k // group, n, device=device, seed=5).abs() / 40
    minimum = random(k // group, n, device=device, seed=6) / 10 if kind == "minimum" else None
    codebook = random(16, device=device, seed=7) if kind == "codebook" else None
    if kind == "symmetric":
        scale = scale.bfloat16()
    return FourBitWeight(pack_codes(codes).to(device), scale, minimum, codebook)


def scratch_for(device: str, num_processors: int) -> ProductScratch:
    """Scratch amid which nothing may be read before it was written."""
    counters = torch.zeros(4 * num_processors, device=device, dtype=torch.int32)
    return ProductScratch(num_processors, torch.full((1 << 18,), float("nan"), device=device), counters)


@pytest.mark.parametrize("k", [1, 16, 127, 128, 200])
def test_codes_survive_packing(k: int) -> None:
    codes = torch.randint(16, (5, k), dtype=torch.int32)

    words = pack_codes(codes)

    assert torch.equal(unpack_codes(words, k), codes)
    assert words.shape == (-(-k // 128), 5, 16)


def test_the_place_of_a_code_is_as_documented() -> None:
    codes = torch.zeros(1, 256, dtype=torch.int32)
    codes[0, 128 + 16 * 3 + 5] = 11

    words = pack_codes(codes)

    assert words[1, 0, 5] == 11 << 12
    assert words.count_nonzero() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_what_the_formula_says(kind: str) -> None:
    weight, codes = (
        weight_of(3, 64, 32, kind),
        torch.randint(16, (3, 64), generator=torch.Generator().manual_seed(3)),
    )

    found = dequantize_reference(weight, 64)

    for row, i in ((0, 0), (1, 31), (2, 32), (2, 63)):
        code, scale = int(codes[row, i]), weight.scale[i // 32, row].float()
        value = torch.tensor(float(code if weight.minimum is not None else code - 8))
        value = value if weight.codebook is None else weight.codebook[code]
        wanted = value * scale if weight.minimum is None else value * scale + weight.minimum[i // 32, row]
        assert found[row, i] == wanted


@pytest.mark.parametrize(("kind", "device", "dtype"), crossed([(kind,) for kind in KINDS], [("minimum",)]))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("way", ["tiled", "shared", "widened", "reference"])
def test_products_equal_those_in_float64(
    way: str, shape: tuple[int, int, int, int], kind: str, device: str, dtype: torch.dtype
) -> None:
    rows, n, k, group = shape
    weight, bias = weight_of(n, k, group, kind, device), random(n, device=device, dtype=dtype, seed=4)
    x, out = (
        random(rows, k, device=device, dtype=dtype, seed=1),
        torch.zeros(rows, n, device=device, dtype=dtype),
    )
    scratch = scratch_for(device, 3)
    kernels: dict[str, Kernel] = {
        "tiled": partial(four_bit_tiled_triton, tile=SMALL),
        "shared": partial(four_bit_tiled_triton, tile=SMALL, scratch=scratch),
        "widened": partial(four_bit_widened_triton, wide=torch.empty(16, k, device=device, dtype=dtype)),
        "reference": four_bits.four_bit_reference,
    }

    kernels[way](x, weight, bias, out=out)

    wide = dequantize_reference(weight, k).to(device)
    assert_close(out, x.double() @ wide.double().t() + bias.double())
    assert scratch.counters.count_nonzero() == 0
    assert way != "shared" or k <= 128 or not scratch.partial.isnan().all(), "nothing was shared"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_dequantises_bit_for_bit_as_the_reference(kind: str, device: str) -> None:
    weight, k = weight_of(40, 192, 64, kind, device), 192
    out = torch.zeros(24, k, device=device)

    dequantize_triton(weight, 16, out=out)

    # The compiler may fuse a product with the sum behind it, which rounds once less.
    expected = dequantize_reference(weight, k)[16:].to(device)
    assert torch.equal(out, expected) if kind != "minimum" else torch.allclose(out, expected, atol=1e-7)


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize("kind", KINDS[:2])
def test_every_code_of_every_place_is_read_exactly(kind: str, device: str, dtype: torch.dtype) -> None:
    codes = (torch.arange(128)[None, :] + torch.arange(16)[:, None]) % 16
    minimum = torch.zeros(4, 16, device=device) if kind == "minimum" else None
    weight = FourBitWeight(pack_codes(codes).to(device), torch.ones(4, 16, device=device), minimum, None)
    out = torch.empty(128, 16, device=device, dtype=dtype)

    four_bit_tiled_triton(
        torch.eye(128, device=device, dtype=dtype), weight, None, out=out, tile=Tile(128, 16, 128, 4, 2)
    )

    assert torch.equal(out.float().cpu(), codes.t().float() - (0 if kind == "minimum" else 8))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 33, 64, 65, 300])
def test_any_number_of_rows_finds_its_kernel(rows: int, kind: str, dtype: torch.dtype, device: str) -> None:
    weight = weight_of(1000, 4224, 32, kind, device)
    x, out = (
        random(rows, 4224, device=device, dtype=dtype),
        torch.empty(rows, 1000, device=device, dtype=dtype),
    )
    counters = torch.zeros(2048, device=device, dtype=torch.int32)
    scratch = ProductScratch(132, torch.full((1 << 24,), float("nan"), device=device), counters)
    room = torch.empty(1 << 22, device=device)

    four_bit_linear(x, weight, None, out=out, scratch=scratch, room=room)

    assert_close(out, x.double() @ dequantize_reference(weight, 4224).to(device).double().t())
    first = out.clone()
    for _ in range(20):
        four_bit_linear(x, weight, None, out=out, scratch=scratch, room=room)
        assert torch.equal(out, first)


def test_without_room_for_rows_of_the_weight_none_are_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []
    monkeypatch.setattr(four_bits, "runs_triton", lambda x: True)
    monkeypatch.setattr(four_bits, "four_bit_tiled_triton", lambda *args, **options: ways.append("tiled"))
    monkeypatch.setattr(
        four_bits, "four_bit_widened_triton", lambda *args, wide, **options: ways.append(str(len(wide)))
    )
    weight, x = weight_of(40, 128, 32, "symmetric"), torch.zeros(100, 128, dtype=torch.bfloat16)
    for room in (None, torch.empty(15 * 64), torch.empty(33 * 64)):
        four_bit_linear(x, weight, None, out=torch.empty(100, 40), room=room)

    assert ways == ["tiled", "tiled", "32"]


#: Compiles the kernel for devices of the given compute capabilities, in a child for each: a kernel keeps to
#: the first device that it meets.
COMPILE = """
import os, sys
import torch
from hearth.kernels.four_bits import FourBitWeight, four_bit_tiled_triton
from hearth.kernels.quantized import ProductScratch, Tile
from hearth.kernels.variants import TargetDriver
def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")
scratch = ProductScratch(2, meta(1 << 20, dtype=torch.float32), meta(8, dtype=torch.int32))
weight = FourBitWeight(meta(2, 64, 16, dtype=torch.int32), meta(8, 64), None, None)
for capability in map(int, sys.argv[1:]):
    if (child := os.fork()) == 0:
        TargetDriver(capability).activate()
        tile = Tile(8, 32, 128, 2, 2, 1)
        four_bit_tiled_triton(meta(1, 256), weight, None, out=meta(1, 64), scratch=scratch, tile=tile)
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(f"not for {capability}: exit code {code}")
"""


@pytest.mark.e2e
def test_the_kernel_is_compiled_for_older_devices_too(tmp_path: object) -> None:
    """In another process, for here Triton's interpreter is on in place of its compiler."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE, "80"],
        check=True,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )
