"""The limits of steps that nobody has set: large where memory is, and never at the cost of another model."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.hosting import SHAPES, facts_of
from hearth.core.sizes import Dimensions, StepLimits, StepSize, WantedLimits, workspace_bytes
from hearth.core.types import Hold
from hearth.policy.batch.step_limits import CUDA_LIMITS, WORKSPACE_SHARE, step_limits
from hearth.policy.fleet.capacity import Promises
from hearth.policy.fleet.footprint import footprint

GIB = 1 << 30
NOTHING_SET = WantedLimits(max_batch_tokens=None, max_seqs=None, block_tokens=16)
#: Limits that a small budget serves as many small models with as ours have to.
BEFORE = StepLimits(max_batch_tokens=4096, max_seqs=256, block_tokens=16)
LARGE = Dimensions(80, 64, 8, 128, 8192, 8192, 28672, 128256, 128, is_gated=True, is_parallel=False)
WIDE = Dimensions(18, 8, 1, 256, 2048, 2048, 16384, 256000, 256, is_gated=True, is_parallel=False)

COUNTS, WIDTHS = st.integers(1, 64), st.integers(64, 16384)
DIMENSIONS = st.builds(
    Dimensions,
    num_layers=COUNTS,
    num_heads=COUNTS,
    num_kv_heads=COUNTS,
    head_dim=st.sampled_from([64, 80, 128, 256]),
    hidden_size=WIDTHS,
    embed_size=WIDTHS,
    intermediate_size=WIDTHS,
    vocab_size=st.integers(256, 300_000),
    rope_dim=st.just(64),
    is_gated=st.booleans(),
    is_parallel=st.booleans(),
).map(lambda sizes: replace(sizes, num_heads=sizes.num_heads * sizes.num_kv_heads))
WANTED = st.builds(
    WantedLimits,
    st.none() | st.integers(1, 65536),
    st.none() | st.integers(1, 4096),
    st.sampled_from([1, 16, 64]),
)
KINDS, DTYPES = st.sampled_from(["cpu", "cuda"]), st.sampled_from(["bfloat16", "float16", "float32"])
BUDGETS = st.none() | st.integers(1, 1 << 40)


def of(name: str) -> Dimensions:
    return facts_of(name, "none", 4096).dimensions


def taken(dimensions: Dimensions, dtype: str, kind: str, limits: StepLimits) -> int:
    return workspace_bytes(dimensions, dimensions.layers, dtype, StepSize.of(limits, kind))


@given(WANTED, DIMENSIONS, DTYPES, KINDS, BUDGETS)
def test_what_is_set_stays_and_the_rest_takes_a_small_share_of_the_memory_or_the_least_that_makes_sense(
    wanted: WantedLimits, dimensions: Dimensions, dtype: str, kind: str, budget_bytes: int | None
) -> None:
    limits = step_limits(wanted, dimensions, dtype, kind, budget_bytes)
    least = step_limits(wanted, dimensions, dtype, kind, None)
    assert limits.block_tokens == wanted.block_tokens
    assert wanted.max_batch_tokens in (None, limits.max_batch_tokens)
    assert wanted.max_seqs in (None, limits.max_seqs)
    assert wanted.max_seqs is not None or limits.max_seqs <= limits.max_batch_tokens
    if limits != least:
        assert taken(dimensions, dtype, kind, limits) <= (budget_bytes or 0) * WORKSPACE_SHARE


@given(WANTED, DIMENSIONS, DTYPES, KINDS, st.integers(1, 1 << 40), st.integers(0, 1 << 40))
def test_more_memory_never_lowers_a_limit(
    wanted: WantedLimits, dimensions: Dimensions, dtype: str, kind: str, budget_bytes: int, more_bytes: int
) -> None:
    one = step_limits(wanted, dimensions, dtype, kind, budget_bytes)
    other = step_limits(wanted, dimensions, dtype, kind, budget_bytes + more_bytes)
    assert one.max_batch_tokens <= other.max_batch_tokens
    assert one.max_seqs <= other.max_seqs


@given(DIMENSIONS, DTYPES, BUDGETS)
def test_limits_that_nobody_set_are_round(
    dimensions: Dimensions, dtype: str, budget_bytes: int | None
) -> None:
    limits = step_limits(NOTHING_SET, dimensions, dtype, "cuda", budget_bytes)
    assert (limits.max_batch_tokens, limits.max_seqs) in CUDA_LIMITS
    assert limits.max_batch_tokens % 1024 == limits.max_seqs % 256 == 0


@pytest.mark.parametrize(
    ("dimensions", "num_gib", "expected"),
    [
        (of("Llama-3.2-1B"), 8, (2048, 256)),
        (of("Llama-3.2-1B"), 24, (4096, 256)),
        (of("Llama-3.2-3B"), 24, (4096, 256)),
        (of("Llama-3.1-8B"), 40, (4096, 512)),
        (of("Llama-2-7B"), 72, (8192, 1024)),
        (of("Llama-3.1-8B"), 72, (8192, 1024)),
        (of("Llama-2-7B"), 125, (8192, 1024)),
        (of("Llama-3.1-8B"), 125, (8192, 1024)),
        (LARGE, 72, (4096, 512)),
        (LARGE, 125, (8192, 1024)),
        (WIDE, 24, (2048, 256)),
        (WIDE, 72, (8192, 512)),
        (WIDE, 125, (8192, 1024)),
    ],
)
def test_a_device_has_batches_as_large_as_its_memory(
    dimensions: Dimensions, num_gib: int, expected: tuple[int, int]
) -> None:
    limits = step_limits(NOTHING_SET, dimensions, "bfloat16", "cuda", num_gib * GIB)
    assert (limits.max_batch_tokens, limits.max_seqs) == expected


def test_a_cpu_has_short_steps_however_much_memory_it_has() -> None:
    limits = step_limits(NOTHING_SET, of("Llama-3.2-1B"), "float32", "cpu", 1 << 40)
    assert (limits.max_batch_tokens, limits.max_seqs) == (512, 256)


@pytest.mark.parametrize("quant", ["none", "int8"])
@pytest.mark.parametrize(
    "names", [("Llama-3.2-1B",), ("Llama-3.2-3B",), ("Llama-3.2-1B", "Llama-3.2-3B"), tuple(SHAPES)]
)
def test_a_budget_of_24_gib_or_less_hosts_as_many_models_as_with_the_limits_before(
    names: tuple[str, ...], quant: str
) -> None:
    def num_hosted(limits: list[StepLimits]) -> int:
        promises, num_models = Promises(num_gib * GIB), 0
        sizes = [footprint(facts, "cuda", one, context) for facts, one in zip(models, limits, strict=True)]
        while promises.has_room(size := sizes[num_models % len(sizes)]):
            promises.add(size.promise, Hold.WARM)
            num_models += 1
        return num_models

    for num_gib, context in product((8, 16, 24), (2048, 4096, 8192, 32768, 131072)):
        models = [facts_of(name, quant, context) for name in names]
        found = [
            step_limits(NOTHING_SET, facts.dimensions, facts.dtype, "cuda", num_gib * GIB) for facts in models
        ]
        assert num_hosted(found) >= num_hosted([BEFORE] * len(models)), (num_gib, context)
