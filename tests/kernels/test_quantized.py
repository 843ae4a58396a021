from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from hearth.kernels import jit, quantized
from hearth.kernels.quantized import (
    FLOAT32_TILE,
    GROUP_N,
    TILES,
    ProductScratch,
    Tile,
    quantized_linear,
    quantized_linear_reference,
    quantized_skinny_triton,
    quantized_tiled_triton,
    sharing_obstacle,
    tile_for,
)
from tests.kernels.cases import DEVICES, DTYPES, assert_close, crossed, random

KERNELS = [quantized_skinny_triton, quantized_tiled_triton]
STORED = [torch.int8, torch.float8_e4m3fn]
#: rows, n, k: in every way off the tiles, and one that fits them; the interpreter takes its time
SKINNY_SHAPES = [(1, 37, 100), (1, 8, 2048), (2, 9, 4100), (3, 17, 250), (7, 1, 8), (17, 5, 48)]
TILED_SHAPES = [
    (1, 37, 100),
    (2, 33, 1024),
    (3, 65, 250),
    (7, 1, 8),
    (17, 97, 144),
    (65, 63, 301),
    (130, 67, 72),
    (64, 64, 512),
]
CASES = [
    *[pytest.param(quantized_skinny_triton, shape, id=f"skinny-{shape}") for shape in SKINNY_SHAPES],
    *[pytest.param(quantized_tiled_triton, shape, id=f"tiled-{shape}") for shape in TILED_SHAPES],
]
GUARD_BYTES = 4096

Kernel = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Case:
    """Operands of a product, each amid bytes of 0xFF, which read as NaN or -1."""

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    around_out: torch.Tensor

    @staticmethod
    def build(
        shape: tuple[int, int, int],
        device: str,
        dtype: torch.dtype,
        stored: torch.dtype,
        *,
        has_bias: bool = True,
    ) -> Case:
        rows, n, k = shape
        weight = (40 * random(n, k, device="cpu", seed=2)).clamp(-127, 127).round().to(stored)
        out, around_out = _guarded(torch.zeros(rows, n, dtype=dtype), device)
        return Case(
            _guarded(random(rows, k, device="cpu", dtype=dtype, seed=1), device)[0],
            _guarded(weight, device)[0],
            _guarded(random(n, device="cpu", seed=3).abs() / 40, device)[0],
            _guarded(random(n, device="cpu", dtype=dtype, seed=4), device)[0] if has_bias else None,
            out,
            around_out,
        )

    def expected(self) -> torch.Tensor:
        """In float64, from what the operands are in torch's own eyes."""
        product = (self.x.double() @ self.weight.double().t()) * self.scale.double()
        return product if self.bias is None else product + self.bias.double()

    def run(self, kernel: Kernel, **launch: Tile | ProductScratch) -> torch.Tensor:
        kernel(self.x, self.weight, self.scale, self.bias, out=self.out, **launch)
        return self.out


def _guarded(tensor: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same inside a larger run of bytes, and that run."""
    nbytes = tensor.nbytes
    run = torch.full((nbytes + 2 * GUARD_BYTES,), 0xFF, dtype=torch.uint8)
    run[GUARD_BYTES : GUARD_BYTES + nbytes] = tensor.contiguous().view(torch.uint8).flatten()
    run = run.to(device)
    return run[GUARD_BYTES : GUARD_BYTES + nbytes].view(tensor.dtype).view(tensor.shape), run


@pytest.mark.parametrize(
    ("has_bias", "device", "dtype"), crossed([(True,), (False,)], halves_on_cpu=[(True,)])
)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize(("kernel", "shape"), CASES)
def test_kernel_equals_the_product_in_float64(
    kernel: Kernel,
    shape: tuple[int, int, int],
    has_bias: bool,
    stored: torch.dtype,
    device: str,
    dtype: torch.dtype,
) -> None:
    case = Case.build(shape, device, dtype, stored, has_bias=has_bias)

    out = case.run(kernel)

    assert_close(out, case.expected())
    assert (case.around_out[:GUARD_BYTES] == 0xFF).all()
    assert (case.around_out[-GUARD_BYTES:] == 0xFF).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("function", [quantized_linear_reference, quantized_linear])
def test_reference_equals_the_product_in_float64(
    function: Kernel, has_bias: bool, stored: torch.dtype, dtype: torch.dtype
) -> None:
    case = Case.build((17, 65, 100), "cpu", dtype, stored, has_bias=has_bias)

    out = case.run(function)

    assert_close(out, case.expected())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 16, 33, 200, 1030])
def test_any_number_of_rows_finds_its_kernel(rows: int, dtype: torch.dtype, device: str) -> None:
    case = Case.build((rows, 257, 320), device, dtype, torch.int8)

    out = case.run(quantized_linear)

    assert_close(out, case.expected())


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("kernel", [quantized_linear_reference, *KERNELS])
def test_every_value_of_eight_bits_is_read_exactly(
    kernel: Kernel, stored: torch.dtype, device: str, dtype: torch.dtype
) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes[codes.view(stored).float().isnan()] = 0
    weight = codes.view(stored)
    x = torch.eye(16, device=device, dtype=dtype)
    out = torch.empty(16, 16, device=device, dtype=dtype)

    # Left to itself this kernel has a program for each weight or two, and the interpreter takes its time.
    wide = {"block_n": 16} if kernel is quantized_skinny_triton and device == "cpu" else {}
    kernel(x, weight.to(device), torch.ones(16, device=device), None, out=out, **wide)

    assert torch.equal(out.float().cpu(), weight.float().t())


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_programs_that_share_read_every_value_of_eight_bits_exactly(
    stored: torch.dtype, device: str, dtype: torch.dtype
) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes[codes.view(stored).float().isnan()] = 0
    x = torch.eye(16, device=device, dtype=dtype)
    out, scale = torch.empty(16, 16, device=device, dtype=dtype), torch.ones(16, device=device)
    tile = Tile(16, 64, 128, num_warps=4, num_stages=2, per_processor=1)

    quantized_tiled_triton(
        x, codes.view(stored).to(device), scale, None, out=out, scratch=scratch_for(device, 2), tile=tile
    )

    assert torch.equal(out.float().cpu(), codes.view(stored).float().t())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kernel", [quantized_linear_reference, *KERNELS])
def test_sums_past_the_range_of_float16_are_scaled_before_they_are_rounded(
    kernel: Kernel, device: str
) -> None:
    x = torch.full((3, 1024), 2.0, device=device, dtype=torch.float16)
    weight = torch.full((5, 1024), 127, device=device, dtype=torch.int8)
    out = torch.empty(3, 5, device=device, dtype=torch.float16)

    kernel(x, weight, torch.full((5,), 1 / 127, device=device), None, out=out)

    assert out.unique().tolist() == [2048.0]


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
def test_every_tile_is_computed_once_where_groups_do_not_divide_the_weight(
    device: str, dtype: torch.dtype
) -> None:
    case = Case.build((40, 16 * (GROUP_N + 2) + 3, 48), device, dtype, torch.int8)

    out = case.run(quantized_tiled_triton, tile=Tile(16, 16, 32, num_warps=4, num_stages=2))

    assert_close(out, case.expected())


def scratch_for(device: str, num_processors: int, room: int = 1 << 20) -> ProductScratch:
    """Scratch amid which nothing may be read before it was written."""
    counters = torch.zeros(4 * num_processors, device=device, dtype=torch.int32)
    return ProductScratch(num_processors, torch.full((room,), float("nan"), device=device), counters)


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("num_processors", [1, 7])
@pytest.mark.parametrize("shape", [(17, 37, 144), (3, 16, 300), (20, 65, 200)])
def test_programs_may_share_the_sums_of_tiles(
    shape: tuple[int, int, int], num_processors: int, stored: torch.dtype, device: str, dtype: torch.dtype
) -> None:
    """As many as there are tiles and steps, fewer, more, and shares that begin and end within tiles."""
    case, scratch = Case.build(shape, device, dtype, stored), scratch_for(device, num_processors)
    tile = Tile(16, 16, 32, num_warps=4, num_stages=2, per_processor=4)

    out = case.run(quantized_tiled_triton, tile=tile, scratch=scratch)

    assert_close(out, case.expected())
    assert (case.around_out[:GUARD_BYTES] == 0xFF).all()
    assert (case.around_out[-GUARD_BYTES:] == 0xFF).all()
    assert scratch.counters.count_nonzero() == 0
    assert not scratch.partial.isnan().all(), "nothing was shared"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lacks", ["room", "counters"])
@pytest.mark.parametrize(("num_there", "num_programs"), [(8, 8), (7, 6), (2, 2), (1, 0)])
def test_as_many_programs_share_as_scratch_has_room_for(
    num_there: int, num_programs: int, lacks: str, device: str
) -> None:
    case = Case.build((16, 36, 96), device, torch.float32, torch.int8)
    tile = Tile(16, 16, 32, num_warps=4, num_stages=2, per_processor=4)
    scratch = scratch_for(device, 2, room=2 * 8 * tile.block_m * tile.block_n)
    if lacks == "room":
        scratch = replace(scratch, partial=scratch.partial[: 2 * num_there * tile.block_m * tile.block_n])
    else:
        scratch = replace(scratch, counters=scratch.counters[:num_there])
    assert scratch.num_programs(tile) == num_programs

    out = case.run(quantized_tiled_triton, tile=tile, scratch=scratch)

    assert_close(out, case.expected())
    assert scratch.partial.isnan().all() == (num_programs == 0), "left alone"


def test_who_gets_too_little_scratch_is_told_of_which_rows() -> None:
    def told(room: int, num_counters: int, max_rows: int, dtype: torch.dtype = torch.bfloat16) -> str | None:
        counters = torch.zeros(num_counters, dtype=torch.int32)
        return sharing_obstacle(ProductScratch(10, torch.empty(room), counters), max_rows, dtype)

    room_of_64, room_of_256 = 2 * 2 * 10 * 64 * 64, 2 * 2 * 10 * 128 * 64
    assert told(room_of_256, 30, 4096) is None
    assert told(room_of_64, 30, 64) is None, "more rows than that never come"
    assert told(0, 0, 4096, torch.float32) is None, "never shared"
    assert told(0, 0, 1) is None, "one row has another kernel"
    assert "10 programs share products of 65 to 100 rows, not 20" in (told(room_of_64, 30, 100) or "")
    assert "20 programs share products of 2 to 16 rows, not 30" in (told(room_of_256, 29, 4096) or "")


@pytest.mark.parametrize(("capability", "is_by_pairs"), [(80, False), (90, True)])
def test_pairs_of_weights_are_converted_at_once_where_the_device_can(
    capability: int, is_by_pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(quantized, "launch", lambda *args, BY_PAIRS, **options: asked.append(BY_PAIRS))
    monkeypatch.setattr(quantized, "capability", lambda: capability)
    case = Case.build((20, 64, 128), "cpu", torch.bfloat16, torch.int8)
    for scratch in (scratch_for("cpu", 2), None):
        quantized_tiled_triton(case.x, case.weight, case.scale, None, out=case.out, scratch=scratch)

    assert asked == [is_by_pairs, False]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("shape", [(1000, 4096), (4096, 11008), (12288, 4096)])
@pytest.mark.parametrize("rows", [2, 17, 48, 100, 256, 300])
def test_sums_are_right_and_have_the_same_bits_every_time(
    rows: int, shape: tuple[int, int], stored: torch.dtype, device: str
) -> None:
    case = Case.build((rows, *shape), device, torch.bfloat16, stored)
    scratch = scratch_for(device, jit.num_processors(), 1 << 24)

    first, expected = case.run(quantized_linear, scratch=scratch).clone(), case.expected()
    assert (first - expected).abs().max() < 0.01 * expected.abs().max(), "a part of some sum"
    for _ in range(50):
        assert torch.equal(case.run(quantized_linear, scratch=scratch), first)


#: Compiles shared sums of integers for devices of the given compute capabilities, in a child for each: a
#: kernel keeps to the first device that it meets.
COMPILE = """
import os, sys
import torch
from hearth.kernels.quantized import ProductScratch, quantized_tiled_triton
from hearth.kernels.variants import TargetDriver
def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")
scratch = ProductScratch(2, meta(1 << 20, dtype=torch.float32), meta(8, dtype=torch.int32))
weight, scale = meta(64, 128, dtype=torch.int8), meta(64, dtype=torch.float32)
for capability in map(int, sys.argv[1:]):
    if (child := os.fork()) == 0:
        TargetDriver(capability).activate()
        quantized_tiled_triton(meta(16, 128), weight, scale, None, out=meta(16, 64), scratch=scratch)
        os._exit(0)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(f"not for {capability}: exit code {code}")
"""


@pytest.mark.e2e
def test_shared_sums_of_integers_are_compiled_for_older_devices_too(tmp_path: Path) -> None:
    """In another process, for here Triton's interpreter is on in place of its compiler."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE, "80", "90"],
        check=True,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert len(list(tmp_path.glob("**/_tiled_kernel.cubin"))) == 2


def test_tiles_grow_with_the_rows() -> None:
    tiles = [tile_for(rows, torch.bfloat16) for rows in (2, 16, 17, 64, 256, 257, 100_000)]

    assert tiles == [TILES[16], TILES[16], TILES[32], TILES[64], TILES[256], *[TILES[1 << 31]] * 2]
    assert tile_for(1000, torch.float32) == FLOAT32_TILE


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_weight_of_more_than_two_to_the_31_elements_is_read_to_its_end(
    kernel: Kernel, stored: torch.dtype, device: str
) -> None:
    n, k = 2**19 + 5, 4112
    last = Case.build((3, 8, k), device, torch.bfloat16, stored, has_bias=False)
    weight = torch.zeros(n, k, device=device, dtype=torch.uint8).view(stored)
    weight[-8:] = last.weight
    scale = torch.ones(n, device=device)
    scale[-8:] = last.scale
    out = torch.empty(3, n, device=device, dtype=torch.bfloat16)

    kernel(last.x, weight, scale, None, out=out)

    assert out[:, :-8].count_nonzero() == 0
    assert_close(out[:, -8:], last.expected())
