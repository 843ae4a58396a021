from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hearth.kernels.paged import Heads
from hearth.kernels.prefill_attention import prefill_attention, prompt_tile_tokens
from hearth.kernels.prefill_hopper import (
    gluon_obstacle,
    hopper_tile_tokens,
    is_hopper,
    prefill_attention_hopper,
)
from tests.kernels.cases import assert_close
from tests.kernels.prompt_step import UNTOUCHED, PromptStep, assert_rest_is_left_alone
from tests.kernels.test_prefill_attention import LONG_CHUNKS

HEADS = [
    Heads(2, 2, 64),
    Heads(6, 2, 64),
    Heads(14, 2, 64),
    Heads(3, 3, 128),
    Heads(4, 2, 128),
    Heads(5, 1, 128),
    Heads(8, 2, 128),
    Heads(14, 2, 128),
    Heads(16, 2, 128),
    Heads(4, 4, 256),
    Heads(4, 2, 256),
]
KINDS = [(heads, torch.bfloat16) for heads in HEADS] + [
    (Heads(8, 2, dim), torch.float16) for dim in (64, 128, 256)
]
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if not is_hopper():
        pytest.skip("needs a device of the Hopper generation")
    assert gluon_obstacle() is None


@pytest.mark.parametrize(("heads", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("windows", [(None,), (1, 7, 200, 1024)], ids=str)
def test_kernel_equals_reference_for_chunks_and_prefixes(
    heads: Heads, dtype: torch.dtype, windows: tuple[int | None, ...]
) -> None:
    step = PromptStep.build(LONG_CHUNKS, heads, "cuda", dtype)
    tiles = step.tiles(hopper_tile_tokens(heads), capacity=200)

    for window in windows:
        out = step.attended(prefill_attention_hopper, tiles, window=window)

        assert_rest_is_left_alone(out)
        assert_close(out, step.expected(window))


@pytest.mark.parametrize(("block_tokens", "dim"), [(8, 64), (32, 128), (64, 128), (64, 256)])
def test_other_block_sizes_are_served(block_tokens: int, dim: int) -> None:
    step = PromptStep.build(LONG_CHUNKS, Heads(4, 2, dim), "cuda", torch.bfloat16, block_tokens)

    out = step.attended(prefill_attention_hopper, step.tiles(hopper_tile_tokens(step.heads)))

    assert_close(out, step.expected())


@pytest.mark.parametrize("heads", [Heads(8, 8, 128), Heads(8, 2, 64)], ids=str)
def test_result_does_not_depend_on_the_number_of_programs(heads: Heads) -> None:
    step = PromptStep.build(LONG_CHUNKS, heads, "cuda", torch.bfloat16)
    tiles = step.tiles(hopper_tile_tokens(heads))

    few, many = (
        step.attended(prefill_attention_hopper, tiles, max_programs=programs) for programs in (3, 1000)
    )

    assert torch.equal(few, many)
    assert_close(few, step.expected())


def test_a_list_without_tiles_writes_nothing() -> None:
    step = PromptStep.build(LONG_CHUNKS, Heads(4, 2, 128), "cuda", torch.bfloat16)
    tiles = step.tiles(hopper_tile_tokens(step.heads), capacity=200)
    tiles.count.zero_()

    out = step.attended(prefill_attention_hopper, tiles)

    assert (out == 7.0).all()


def test_kernel_reads_behind_the_first_two_to_the_31_elements() -> None:
    near = PromptStep.build(LONG_CHUNKS, Heads(4, 2, 128), "cuda", torch.bfloat16)
    step = near.moved_far()

    out = step.attended(prefill_attention_hopper, step.tiles(hopper_tile_tokens(step.heads)))

    assert_close(out, near.expected())


@pytest.mark.parametrize("heads", [Heads(4, 4, 128), Heads(4, 2, 80)], ids=str)
def test_a_captured_launch_serves_every_list(heads: Heads) -> None:
    step = PromptStep.build(LONG_CHUNKS, heads, "cuda", torch.bfloat16)
    tiles = step.tiles(prompt_tile_tokens(heads, torch.bfloat16, len(step.qkv)), capacity=200)
    out = torch.empty(len(step.qkv), heads.num_q * heads.dim, device="cuda", dtype=torch.bfloat16)

    def attend() -> None:
        prefill_attention(step.qkv, heads, step.rows, (), tiles, step.kv, window=None, out=out)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for spans in (step.spans[:1], step.spans[3:], [], step.spans[::2], step.spans):
        some = replace(step, spans=spans)
        cut = some.tiles(tiles.tile_tokens)
        tiles.items[: len(cut.items)] = cut.items
        tiles.count.copy_(cut.count)
        step.qkv.normal_()
        out.fill_(UNTOUCHED)

        graph.replay()

        assert_close(out, some.expected())
