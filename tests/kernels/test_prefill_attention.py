from __future__ import annotations

import pytest
import torch
import triton

from hearth.kernels import jit, prefill_hopper
from hearth.kernels.paged import Heads
from hearth.kernels.prefill_attention import (
    PromptKernel,
    PromptTileShape,
    prefill_attention_triton,
    prompt_kernel,
    prompt_tile_tokens,
)
from tests.kernels.cases import assert_close, crossed
from tests.kernels.prompt_step import PromptStep, assert_rest_is_left_alone

#: Of each sequence, the tokens that are in KV already and those of the step: prompts from the start, later
#: chunks, prefixes that were found, and single tokens.
CHUNKS = [(0, 1), (16, 70), (5, 33), (0, 65), (37, 3)]
LONG_CHUNKS = [*CHUNKS, (0, 300), (128, 128), (500, 129), (1000, 1), (1023, 64), (3000, 200), (0, 1100)]
HEADS = [Heads(2, 2, 64), Heads(6, 2, 80), Heads(5, 1, 96), Heads(2, 2, 128), Heads(9, 3, 20)]
GPU_HEADS = [
    *HEADS,
    Heads(8, 2, 64),
    Heads(14, 2, 64),
    Heads(16, 2, 128),
    Heads(4, 4, 192),
    Heads(4, 2, 256),
    Heads(7, 1, 256),
]
WINDOWS = [None, 33, 7]
#: What Triton's interpreter takes its time for.
CPU_CASES = [
    pytest.param(heads, window, "cpu", dtype)
    for heads, window, dtype in [
        (Heads(2, 2, 64), 33, torch.float32),
        (Heads(6, 2, 80), None, torch.float32),
        (Heads(5, 1, 96), 7, torch.float32),
        (Heads(2, 2, 128), None, torch.float16),
        (Heads(9, 3, 20), 33, torch.float16),
        (Heads(6, 2, 80, scale=0.3, cap=1.5), 33, torch.float32),
        (Heads(9, 3, 20, scale=0.3, cap=1.5), None, torch.float16),
    ]
]
GPU_CASES = [
    pytest.param(heads, window, "cuda", dtype, marks=pytest.mark.gpu)
    for heads in [*HEADS, Heads(8, 4, 256, scale=224**-0.5, cap=50.0), Heads(9, 3, 20, scale=0.3, cap=1.5)]
    for window in WINDOWS
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize(("heads", "window", "device", "dtype"), CPU_CASES + GPU_CASES, ids=str)
def test_kernel_equals_reference_for_chunks_and_prefixes(
    heads: Heads, window: int | None, device: str, dtype: torch.dtype
) -> None:
    step = PromptStep.build(CHUNKS, heads, device, dtype)
    tiles = step.tiles(prompt_tile_tokens(heads, dtype, len(step.qkv)))

    out = step.attended(prefill_attention_triton, tiles, window=window)

    assert_rest_is_left_alone(out)
    assert_close(out, step.expected(window))


@pytest.mark.parametrize(("device", "dtype"), crossed([()], halves_on_cpu=[]))
@pytest.mark.parametrize(("window", "block_tokens"), [(20, 16), (None, 12), (20, 64)])
def test_few_programs_work_off_all_tiles_of_packed_heads(
    device: str, dtype: torch.dtype, window: int | None, block_tokens: int
) -> None:
    step = PromptStep.build(CHUNKS, Heads(8, 2, 32), device, dtype, block_tokens)
    shape = PromptTileShape(num_packed=2, num_keys=32, num_warps=4, num_stages=2)
    tiles = step.tiles(tile_tokens=32, capacity=40)

    out = step.attended(prefill_attention_triton, tiles, window=window, shape=shape, max_programs=7)

    assert_rest_is_left_alone(out)
    assert_close(out, step.expected(window))


@pytest.mark.parametrize(("device", "dtype"), crossed([()], halves_on_cpu=[]))
def test_a_list_without_tiles_writes_nothing(device: str, dtype: torch.dtype) -> None:
    step = PromptStep.build(CHUNKS, Heads(2, 1, 64), device, dtype)
    tiles = step.tiles(prompt_tile_tokens(step.heads, dtype, len(step.qkv)), capacity=40)
    tiles.count.zero_()

    out = step.attended(prefill_attention_triton, tiles)

    assert (out == 7.0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", GPU_HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 200])
def test_large_and_small_tiles_equal_the_reference(heads: Heads, window: int | None) -> None:
    step = PromptStep.build(LONG_CHUNKS, heads, "cuda", torch.bfloat16)
    expected = step.expected(window)
    for tile_tokens in {64, 64 if heads.dim > 128 else 128}:
        tiles = step.tiles(tile_tokens, capacity=200)

        out = step.attended(prefill_attention_triton, tiles, window=window)

        assert_rest_is_left_alone(out)
        assert_close(out, expected)


@pytest.mark.gpu
def test_kernel_reads_behind_the_first_two_to_the_31_elements() -> None:
    near = PromptStep.build(LONG_CHUNKS, Heads(4, 2, 128), "cuda", torch.bfloat16)
    step = near.moved_far()
    tiles = step.tiles(prompt_tile_tokens(step.heads, torch.bfloat16, len(step.qkv)))

    out = step.attended(prefill_attention_triton, tiles)

    assert_close(out, near.expected())


def test_prompts_are_cut_by_heads_dtype_rows_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    multi, grouped, wide = Heads(32, 32, 128), Heads(32, 8, 128), Heads(16, 16, 256)
    half, full = torch.bfloat16, torch.float32
    _pretend_to_be(80, monkeypatch)

    assert [prompt_tile_tokens(multi, half, rows) for rows in (128, 1024, 1088)] == [64, 64, 128]
    assert prompt_tile_tokens(grouped, half, 8192) == 64, "with two heads a tile has 128 rows all the same"
    assert prompt_tile_tokens(wide, half, 8192) == 64
    assert prompt_tile_tokens(multi, full, 8192) == 32

    _pretend_to_be(89, monkeypatch)  # less shared memory

    assert prompt_tile_tokens(multi, half, 8192) == 64
    assert prompt_tile_tokens(wide, half, 8192) == 32

    _pretend_to_be(90, monkeypatch)

    assert [prompt_tile_tokens(multi, half, rows) for rows in (128, 8192)] == [128, 128]
    assert [prompt_tile_tokens(grouped, half, rows) for rows in (128, 8192)] == [64, 64]
    assert prompt_tile_tokens(multi, full, 8192) == 32
    assert prompt_tile_tokens(multi, half, 128, block_tokens=128) == 64, "not for the kernel for Hopper"


def test_a_kernel_that_is_not_the_fastest_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, half = Heads(32, 8, 128), torch.bfloat16
    _pretend_to_be(90, monkeypatch)

    assert prompt_kernel(heads, half) == PromptKernel("hopper", None)
    assert prompt_kernel(heads, torch.float32).slow_reason == (
        "the kernel for Hopper takes bfloat16 and float16, given: float32"
    )
    capped = Heads(16, 8, 256, cap=50.0)
    assert prompt_kernel(capped, half).slow_reason == (
        "the kernel for Hopper has no soft cap of scores, given: 50"
    )
    assert prompt_kernel(Heads(32, 32, 80), half).slow_reason == (
        "the kernel for Hopper takes heads of 64, 128, 256, given: 80"
    )
    assert prompt_kernel(heads, half, block_tokens=12).slow_reason == (
        "the kernel for Hopper takes blocks of 8, 16, 32, 64 tokens, given: 12"
    )

    monkeypatch.setattr(prefill_hopper, "HAS_GLUON", False)

    assert prompt_kernel(heads, half) == PromptKernel(
        "triton",
        f"the kernel for Hopper needs Gluon as of Triton 3.6 to 3.9, given: {triton.__version__}",
    )

    _pretend_to_be(80, monkeypatch)

    assert prompt_kernel(heads, half) == PromptKernel("triton", None), "there is none that is faster"


def _pretend_to_be(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (jit, prefill_hopper):
        monkeypatch.setattr(module, "capability", lambda: capability)
