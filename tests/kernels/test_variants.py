"""How many variants of a kernel are compiled: nothing that changes from step to step may make another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hearth.kernels import (
    activation,
    decode_attention,
    host_read,
    linear,
    norm,
    quantized,
    rotary,
    step_read,
)
from hearth.kernels.paged import Heads, PagedRows
from tests.kernels.test_decode_attention import scratch_for
from tests.kernels.test_quantized import scratch_for as product_scratch

pytestmark = pytest.mark.gpu

HEADS = Heads(4, 2, 64)
#: Triton would compile another variant for 1, and for multiples of 16.
ROWS = [1, 2, 16, 17, 48]


def attend(rows: int) -> None:
    kv = torch.zeros(8, 2, 16, HEADS.num_kv, HEADS.dim, device="cuda", dtype=torch.bfloat16)
    places = torch.zeros(2, rows, device="cuda", dtype=torch.int32)
    table = torch.zeros(1, 8, device="cuda", dtype=torch.int32)
    qkv, out = numbers(rows, 8 * 64), numbers(rows, 4 * 64)
    paged = PagedRows(places[0], places[0], table)
    rotary.rotate_and_store_triton(qkv, HEADS, paged, kv, cos_sin=None, norms=None)
    decode_attention.decode_attention_triton(
        qkv, HEADS, paged, kv, window=None, scratch=scratch_for(HEADS, "cuda", 8, rows), out=out
    )


def numbers(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device="cuda", dtype=torch.bfloat16)


def eight_bit(function: Callable[..., None]) -> Callable[[int], None]:
    def run(rows: int) -> None:
        weight, scale = numbers(64, 64).to(torch.int8), torch.ones(64, device="cuda")
        function(numbers(rows, 64), weight, scale, None, out=numbers(rows, 64))

    return run


def tiled(*operands: Any, out: torch.Tensor) -> None:
    scratch = product_scratch("cuda", num_processors=2)
    quantized.quantized_tiled_triton(*operands, out=out, scratch=scratch, tile=quantized.TILES[32])


KERNELS: dict[str, tuple[Any, Callable[[int], None]]] = {
    "decode attention": (decode_attention._decode_attention_kernel, attend),
    "rotary": (rotary._rotate_and_store_kernel, attend),
    "norm": (
        norm._add_norm_kernel,
        lambda rows: norm.add_norm_triton(
            None, numbers(rows, 64), None, None, 1e-5, is_rms=True, out=numbers(rows, 64)
        ),
    ),
    "activation": (
        activation._activate_kernel,
        lambda rows: activation.activate_triton(
            numbers(rows, 64), "relu", gated=False, out=numbers(rows, 64)
        ),
    ),
    "product": (
        linear._skinny_linear_kernel,
        lambda rows: linear.skinny_linear_triton(
            numbers(rows, 64), numbers(64, 64), None, out=numbers(rows, 64)
        ),
    ),
    "product of eight bits": (quantized._skinny_kernel, eight_bit(quantized.quantized_skinny_triton)),
    "tiled product of eight bits": (quantized._tiled_kernel, eight_bit(tiled)),
    "host read": (
        host_read._read_host_kernel,
        lambda rows: host_read.read_host_triton(
            torch.zeros(rows, dtype=torch.int32, device="cuda"),
            torch.zeros(rows, dtype=torch.int32).pin_memory(),
        ),
    ),
    "step read": (
        step_read._read_step_kernel,
        lambda rows: step_read.read_step_triton(
            torch.zeros(rows, dtype=torch.int32, device="cuda"),
            torch.zeros(rows, dtype=torch.int32).pin_memory(),
            rows,
            table=torch.zeros(64, dtype=torch.int32, device="cuda"),
            writes=torch.arange(2 * min(rows, 64), dtype=torch.int32).view(2, -1).pin_memory(),
        ),
    ),
}


@pytest.mark.parametrize(("kernel", "run"), KERNELS.values(), ids=KERNELS)
def test_one_variant_serves_any_number_of_rows(kernel: Any, run: Callable[[int], None]) -> None:
    run(ROWS[0])
    variants = len(kernel.device_caches[torch.cuda.current_device()][0])

    for rows in ROWS[1:]:
        run(rows)

    assert len(kernel.device_caches[torch.cuda.current_device()][0]) == variants
