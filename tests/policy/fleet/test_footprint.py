"""Memory by facts alone, compared with what the engine's own workspace takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.control.deploy.deployer import facts_of
from hearth.core.errors import ConfigError
from hearth.core.sizes import Dimensions, StepLimits, StepSize, run_bytes, sampler_buffers
from hearth.memory import cuda_pages
from hearth.models.dtypes import DTYPES
from hearth.models.families import read_arch
from hearth.models.layout import ALIGNMENT_BYTES, layout_of
from hearth.models.workspace import Workspace
from hearth.policy.fleet.footprint import (
    MAX_EXTENTS,
    PAGE_BYTES,
    REGION_BYTES,
    Facts,
    arena_loss_bytes,
    context_of,
    fitted_context,
    fixed_bytes_of,
    footprint,
    tables_bytes_of,
    workspace_bytes_of,
)
from hearth.store.format.manifest import Manifest
from hearth.text.tokenizer import Tokenizer
from tests.models.zoo import VARIANTS, build

LIMITS = StepLimits(max_batch_tokens=4096, max_seqs=256, block_tokens=16)
#: About a model of seven billion parameters.
LARGE = Facts(
    num_bytes=14 << 30,
    wide_bytes=28 << 30,
    dtype="bfloat16",
    quant="none",
    num_parameters=7 << 30,
    largest_bytes=1 << 30,
    dimensions=Dimensions(
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        hidden_size=4096,
        embed_size=4096,
        intermediate_size=11_008,
        vocab_size=32000,
        rope_dim=128,
        is_gated=True,
        is_parallel=False,
    ),
    max_positions=8192,
    eos_ids=(2,),
    has_chat_template=True,
    family="llama",
)


def facts(name: str, dtype: str, quant: str, tokenizer: Tokenizer) -> Facts:
    arch = read_arch(build(name).directory)
    return facts_of(Manifest.of(arch, dtype, quant, (), 4096, {}), tokenizer)


def test_memory_is_counted_in_the_units_that_pools_give_it_in() -> None:
    assert (PAGE_BYTES, REGION_BYTES) == (cuda_pages.PAGE_BYTES, ALIGNMENT_BYTES)


@pytest.mark.parametrize("name", VARIANTS)
def test_workspace_is_as_much_as_the_real_one_in_whole_pages_or_regions(
    name: str, tokenizer: Tokenizer
) -> None:
    arch = read_arch(build(name).directory)
    for dtype, kind in product(DTYPES, ("cpu", "cuda")):
        computed = torch.float32 if kind == "cpu" else DTYPES[dtype]
        size = StepSize(LIMITS.max_batch_tokens, LIMITS.max_seqs, num_programs=1 if kind == "cpu" else 768)
        unit_bytes = REGION_BYTES if kind == "cpu" else PAGE_BYTES

        real_bytes = Workspace.num_bytes(arch, computed, size)
        told_bytes = workspace_bytes_of(facts(name, dtype, "none", tokenizer), kind, LIMITS)

        assert real_bytes <= told_bytes < real_bytes + unit_bytes


@pytest.mark.parametrize("limits", [StepLimits(1, 1, 1), StepLimits(7, 3, 16), StepLimits(64, 8, 4)])
def test_workspace_suffices_for_small_engines_too(limits: StepLimits, tokenizer: Tokenizer) -> None:
    arch = read_arch(build("opt-350m").directory)
    size = StepSize(limits.max_batch_tokens, limits.max_seqs, 1)
    told_bytes = workspace_bytes_of(facts("opt-350m", "float32", "none", tokenizer), "cpu", limits)
    assert told_bytes >= Workspace.num_bytes(arch, torch.float32, size)


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_a_cpu_needs_room_for_the_largest_tensor_beside_a_narrow_model_while_it_is_widened(
    quant: str, tokenizer: Tokenizer
) -> None:
    arch = read_arch(build("llama-gqa").directory)
    narrow = facts("llama-gqa", "bfloat16", quant, tokenizer)
    wide = facts("llama-gqa", "float32", quant, tokenizer)

    assert (
        narrow.wide_bytes == wide.wide_bytes == wide.num_bytes == layout_of(arch, "float32", quant).num_bytes
    )
    added = fixed_bytes_of(narrow, "cpu", LIMITS, 128) - fixed_bytes_of(wide, "cpu", LIMITS, 128)
    assert added == narrow.largest_bytes
    assert narrow.largest_bytes == max(spec.nbytes for spec in layout_of(arch, "bfloat16", quant).tensors)


def shaped(model: Facts, **dimensions: int) -> Facts:
    """The same model with other dimensions."""
    return replace(model, dimensions=replace(model.dimensions, **dimensions))


def pages(num_bytes: int) -> int:
    """Up to whole ones."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def test_kv_that_is_promised_is_one_full_context_and_the_sink() -> None:
    taken = footprint(LARGE, "cuda", LIMITS, context=2048)
    assert taken.min_kv_bytes == pages((2048 + 16) * 32 * 2 * 8 * 128 * 2)
    assert taken.least_bytes == taken.fixed_bytes + taken.min_kv_bytes


def test_out_of_turn_a_model_keeps_its_tables_and_the_sink() -> None:
    block_bytes = 16 * 32 * 2 * 8 * 128 * 2
    on_gpu, on_cpu = footprint(LARGE, "cuda", LIMITS, 2048), footprint(LARGE, "cpu", LIMITS, 2048)
    assert on_gpu.promise.standing_bytes == on_gpu.tables_bytes + pages(block_bytes)
    assert on_cpu.promise.standing_bytes == on_cpu.tables_bytes + 3 * 2 * block_bytes, (
        "as wide as it computes"
    )


def test_kv_is_never_more_than_all_sequences_can_fill() -> None:
    few = replace(LIMITS, max_seqs=2)
    filled_bytes = (2 * 256 + 16) * 32 * 2 * 8 * 128 * 2
    assert footprint(LARGE, "cuda", few, context=256).max_kv_bytes == pages(filled_bytes)
    assert footprint(LARGE, "cpu", few, context=256).max_kv_bytes == 2 * filled_bytes


def test_weights_workspace_and_kv_take_whole_pages_of_their_own() -> None:
    exact = footprint(LARGE, "cuda", LIMITS)
    for num_bytes in (exact.fixed_bytes, exact.min_kv_bytes, exact.max_kv_bytes):
        assert num_bytes % PAGE_BYTES == 0
    longer = footprint(replace(LARGE, num_bytes=LARGE.num_bytes + 1), "cuda", LIMITS)
    assert longer.fixed_bytes - exact.fixed_bytes == PAGE_BYTES


@given(
    st.sampled_from([1, 3, 16]),
    st.lists(st.integers(1, 500), min_size=MAX_EXTENTS, max_size=MAX_EXTENTS),
    st.lists(st.floats(0.0, 1.0), min_size=MAX_EXTENTS, max_size=MAX_EXTENTS),
)
def test_kv_that_is_promised_fits_into_free_regions_of_an_arena_wherever_they_begin(
    block_tokens: int, gaps: list[int], shares: list[float]
) -> None:
    """Blocks lie at multiples of their size, regions at multiples of 4096 bytes."""
    model, limits = shaped(LARGE, num_kv_heads=3), StepLimits(64, 4, block_tokens)
    promised_bytes = footprint(model, "cpu", limits, context=256).min_kv_bytes
    left_pages = -(-(promised_bytes + arena_loss_bytes(model, limits)) // 4096)
    block_bytes = block_tokens * 32 * 2 * 3 * 128 * 4

    num_blocks = begin = 0
    for gap, share in zip(gaps, [*shares[:-1], 1.0], strict=True):
        num_pages = int(left_pages * share)
        left_pages -= num_pages
        begin += gap * 4096
        end = begin + num_pages * 4096
        num_blocks += max(0, end // block_bytes - -(-begin // block_bytes))
        begin = end
    assert num_blocks * block_bytes >= promised_bytes


def test_a_ceiling_that_leaves_no_room_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        footprint(LARGE, "cuda", LIMITS, ceiling_bytes=14 << 30)
    fixed_bytes = footprint(LARGE, "cuda", LIMITS).fixed_bytes
    assert f"a memory ceiling of {14 << 30} bytes is too low on a cuda device" in str(caught.value)
    assert f"take {fixed_bytes}, KV at least {pages((8192 + 16) * 32 * 2 * 8 * 128 * 2)}" in str(caught.value)


@pytest.mark.parametrize("context", [1, 0, -5, 8193])
def test_a_context_beyond_the_model_is_refused(context: int) -> None:
    with pytest.raises(ConfigError, match=rf"from 2 to what the model was made for, 8192; given: {context}"):
        context_of(LARGE, context)


KINDS = st.sampled_from(["cpu", "cuda"])
CONTEXTS = st.none() | st.integers(2, LARGE.max_positions)
MODELS = st.builds(
    lambda num_bytes, dtype, heads, rope_dim: replace(
        shaped(LARGE, num_kv_heads=heads, rope_dim=rope_dim),
        num_bytes=num_bytes,
        wide_bytes=2 * num_bytes,
        dtype=dtype,
    ),
    st.integers(1 << 20, 1 << 40),
    st.sampled_from(sorted(DTYPES)),
    st.integers(1, 64),
    st.sampled_from([0, 64]),
)
SIZES = st.builds(StepLimits, st.integers(1, 8192), st.integers(1, 512), st.sampled_from([1, 16, 64]))


@given(MODELS, KINDS, SIZES, CONTEXTS)
def test_the_least_is_never_more_than_the_most(
    model: Facts, kind: str, limits: StepLimits, context: int | None
) -> None:
    taken = footprint(model, kind, limits, context)
    assert 0 < taken.min_kv_bytes <= taken.max_kv_bytes
    assert taken.fixed_bytes > model.num_bytes


@given(MODELS, KINDS, SIZES, CONTEXTS)
def test_what_is_fixed_is_weights_workspace_and_tables(
    model: Facts, kind: str, limits: StepLimits, context: int | None
) -> None:
    taken = footprint(model, kind, limits, context)
    assert taken.fixed_bytes == taken.weights_bytes + taken.workspace_bytes + taken.tables_bytes
    assert taken.weights_bytes >= model.num_bytes
    assert taken.workspace_bytes == workspace_bytes_of(model, kind, limits) > 0
    assert taken.tables_bytes == tables_bytes_of(model, kind, limits, context or model.max_positions) > 0


@given(MODELS, KINDS, SIZES)
def test_penalties_and_biases_are_not_promised_to_anybody(
    model: Facts, kind: str, limits: StepLimits
) -> None:
    """A larger vocabulary takes more logits and what chooses among them, and nothing else."""
    larger = shaped(model, vocab_size=4 * model.dimensions.vocab_size)
    one, other = footprint(model, kind, limits), footprint(larger, kind, limits)
    chooses_bytes = run_bytes(sampler_buffers(limits.max_seqs, larger.dimensions.vocab_size))
    unit_bytes = PAGE_BYTES if kind == "cuda" else REGION_BYTES
    assert 0 <= other.tables_bytes - one.tables_bytes <= chooses_bytes + unit_bytes
    assert one.workspace_bytes <= other.workspace_bytes


@given(MODELS, KINDS, SIZES, CONTEXTS)
def test_the_least_kv_holds_one_full_context(
    model: Facts, kind: str, limits: StepLimits, context: int | None
) -> None:
    taken = footprint(model, kind, limits, context)
    item_bytes = 4 if kind == "cpu" or model.dtype == "float32" else 2
    block_bytes = limits.block_tokens * 32 * 2 * model.dimensions.num_kv_heads * 128 * item_bytes
    num_tokens = (taken.min_kv_bytes // block_bytes - 1) * limits.block_tokens  # block 0 is the sink
    assert num_tokens >= (context or model.max_positions)


@given(MODELS, KINDS, SIZES, st.integers(2, 1 << 17), st.integers(0, 1 << 42))
def test_a_fitted_context_is_the_longest_that_fits(
    model: Facts, kind: str, limits: StepLimits, max_positions: int, budget_bytes: int
) -> None:
    def is_fitting(context: int) -> bool:
        taken = footprint(model, kind, limits, context)
        return taken.fixed_bytes + taken.min_kv_bytes <= budget_bytes

    model = replace(model, max_positions=max_positions)
    context = fitted_context(model, kind, limits, budget_bytes)

    assert min(2048, max_positions) <= context <= max_positions
    assert context == max_positions or context % 16 == 0
    assert is_fitting(context) or context == min(2048, max_positions)
    assert context == max_positions or not is_fitting(min(context + 16, max_positions))


def test_a_small_model_is_served_within_a_gibibyte_on_a_cpu() -> None:
    dimensions = shaped(
        LARGE,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        hidden_size=576,
        embed_size=576,
        intermediate_size=1536,
        vocab_size=49152,
        rope_dim=64,
    )
    smollm = replace(dimensions, num_bytes=538_090_000, wide_bytes=538_090_000, dtype="float32")
    context = fitted_context(smollm, "cpu", LIMITS, 1 << 30)
    assert 4096 <= context < 8192
    taken = footprint(smollm, "cpu", LIMITS, context)
    assert taken.fixed_bytes + taken.min_kv_bytes <= 1 << 30


@given(MODELS, KINDS, SIZES, st.integers(2, 8192), st.integers(2, 8192))
def test_a_longer_context_never_takes_less(
    model: Facts, kind: str, limits: StepLimits, one: int, other: int
) -> None:
    short = footprint(model, kind, limits, min(one, other))
    long = footprint(model, kind, limits, max(one, other))
    assert short.fixed_bytes <= long.fixed_bytes
    assert short.min_kv_bytes <= long.min_kv_bytes
    assert short.max_kv_bytes <= long.max_kv_bytes


@given(MODELS, KINDS, SIZES, CONTEXTS, st.integers(0, 1 << 42))
def test_a_ceiling_is_kept_or_refused(
    model: Facts, kind: str, limits: StepLimits, context: int | None, ceiling_bytes: int
) -> None:
    free = footprint(model, kind, limits, context)
    try:
        taken = footprint(model, kind, limits, context, ceiling_bytes=ceiling_bytes)
    except ConfigError:
        assert ceiling_bytes < free.fixed_bytes + free.min_kv_bytes
        return
    assert taken.fixed_bytes + taken.max_kv_bytes <= max(ceiling_bytes, 0)
    assert taken.min_kv_bytes == free.min_kv_bytes <= taken.max_kv_bytes <= free.max_kv_bytes


@given(MODELS, KINDS, SIZES, CONTEXTS, st.integers(0, 1 << 42))
def test_a_floor_is_reached_as_far_as_it_can_be_filled(
    model: Facts, kind: str, limits: StepLimits, context: int | None, floor_bytes: int
) -> None:
    free = footprint(model, kind, limits, context)
    taken = footprint(model, kind, limits, context, floor_bytes=floor_bytes)
    full = footprint(model, kind, limits, context, floor_bytes=1 << 60)
    assert taken.max_kv_bytes >= free.max_kv_bytes
    assert taken.fixed_bytes + taken.min_kv_bytes >= min(floor_bytes, full.fixed_bytes + full.max_kv_bytes)


@given(MODELS, KINDS, SIZES, CONTEXTS)
def test_floor_and_ceiling_that_are_one_leave_one_choice(
    model: Facts, kind: str, limits: StepLimits, context: int | None
) -> None:
    free = footprint(model, kind, limits, context)
    total_bytes = free.fixed_bytes + free.max_kv_bytes
    taken = footprint(model, kind, limits, context, floor_bytes=total_bytes, ceiling_bytes=total_bytes)
    assert taken.min_kv_bytes == taken.max_kv_bytes == free.max_kv_bytes
