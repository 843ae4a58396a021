from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.sizes import StepLimits
from hearth.core.types import AdapterId, RequestId
from hearth.engine.step_shape import GraphKey, PaddedSizes, StepPart, StepShape
from hearth.policy.batch.plan import DecodeRows, Row, StepPlan, TableWrites

LIMITS = st.builds(StepLimits, st.integers(1, 20_000), st.integers(1, 2_000), st.just(16))


def plan(num_decode: int, prompts: list[int]) -> StepPlan:
    decode = DecodeRows([RequestId("d")] * num_decode, [0] * num_decode, [7] * num_decode)
    rows = [Row(RequestId("p"), 0, 0, length, (1,) * length, samples=True) for length in prompts]
    return StepPlan(0, (), TableWrites(), decode, tuple(rows))


@given(LIMITS, st.data())
def test_a_shape_holds_its_plan_within_the_limits(limits: StepLimits, data: st.DataObject) -> None:
    most = min(limits.max_seqs, limits.max_batch_tokens)
    num_decode = data.draw(st.integers(0, min(most, 50)))
    room = min(limits.max_batch_tokens - num_decode, 300)
    lengths = st.lists(st.integers(1, max(1, room // 4)), max_size=min(4, room, most - num_decode))
    prompts = data.draw(lengths)
    if not num_decode and not prompts:
        return
    sizes, step = PaddedSizes.of(limits), plan(num_decode, prompts)

    shape = sizes.shape_of(step)

    assert step.num_tokens <= shape.num_rows <= limits.max_batch_tokens
    assert step.num_rows <= shape.num_logits <= most
    assert shape.has_prompts == bool(prompts)
    known = {key for one in sizes.all_shapes() for key in one.keys}
    assert set(shape.keys) <= known


@given(LIMITS)
def test_sizes_grow_up_to_the_limit(limits: StepLimits) -> None:
    sizes = PaddedSizes.of(limits)
    most = min(limits.max_seqs, limits.max_batch_tokens)

    for some, last in ((sizes.decode, most), (sizes.samples, most), (sizes.mixed, limits.max_batch_tokens)):
        assert some[-1] == last
        assert all(low < high for low, high in pairwise(some))
    assert all(high - low <= max(64, low / 2) for low, high in pairwise(sizes.mixed))
    assert all(high - low <= max(128, low / 4) for low, high in pairwise(sizes.mixed))


def test_a_full_batch_has_a_size_of_its_own() -> None:
    sizes = PaddedSizes.of(StepLimits(max_batch_tokens=100, max_seqs=6, block_tokens=16))

    assert sizes == PaddedSizes(decode=(1, 2, 4, 6), mixed=(64, 100), samples=(1, 6))


@pytest.mark.parametrize("num_rows", [224, 240, 416, 448, 832])
def test_sizes_whose_products_take_longer_than_those_of_more_rows_are_left_out(num_rows: int) -> None:
    sizes = PaddedSizes.of(StepLimits(8192, 1024, 16))
    assert num_rows not in sizes.decode
    assert num_rows not in sizes.mixed


def test_few_sizes_serve_the_largest_batches() -> None:
    sizes = PaddedSizes.of(StepLimits(max_batch_tokens=8192, max_seqs=1024, block_tokens=16))

    assert (len(sizes.decode), len(sizes.mixed), len(sizes.samples)) == (32, 38, 10)


def test_a_step_is_one_graph_or_two() -> None:
    sizes = PaddedSizes.of(StepLimits(max_batch_tokens=512, max_seqs=64, block_tokens=16))

    assert sizes.shape_of(plan(5, [])).keys == (GraphKey(StepPart.DECODE, 8),)
    mixed = (GraphKey(StepPart.MIXED, 128), GraphKey(StepPart.TAIL, 8))
    assert sizes.shape_of(plan(5, [70, 1])).keys == mixed


def test_without_sizes_a_step_stays_as_it_is() -> None:
    assert PaddedSizes().shape_of(plan(5, [70, 1])) == StepShape(True, 76, 7)


def test_steps_with_adapters_have_graphs_of_their_own_whichever_rows_have_them() -> None:
    sizes = PaddedSizes(decode=(1, 8), mixed=(64, 128), samples=(1, 8))
    bare, beside = plan(5, []), plan(5, [70])
    decode = replace(bare.decode, adapters=[None, AdapterId("one"), None, None, None])
    keys = sizes.shape_of(replace(bare, decode=decode)).keys
    assert keys == (GraphKey(StepPart.DECODE, 8, has_adapters=True),)
    row = beside.prompts[0]._replace(adapter=AdapterId("one"))
    assert sizes.shape_of(replace(beside, prompts=(row,))).keys == (
        GraphKey(StepPart.MIXED, 128, has_adapters=True),
        GraphKey(StepPart.TAIL, 8, has_adapters=True),
    )
    assert not {key for shape in sizes.all_shapes() for key in shape.keys if key.has_adapters}
    assert {
        replace(key, has_adapters=False)
        for shape in sizes.all_shapes(has_adapters=True)
        for key in shape.keys
    } == {key for shape in sizes.all_shapes() for key in shape.keys}
    assert PaddedSizes().shape_of(plan(5, [])) == StepShape.decode(5)


def test_first_steps_of_requests_are_foreseen_where_all_prompts_go_into_one() -> None:
    sizes = PaddedSizes(decode=(1, 8, 64), mixed=(16, 128), samples=(1, 8, 64))
    assert sizes.first_shapes(3, 40, 3) == [StepShape(True, 128, 8), StepShape.decode(8)]
    assert sizes.first_shapes(9, 40, 1) == [StepShape(True, 128, 64), StepShape.decode(1)]
    assert sizes.first_shapes(3, 40, 0) == [StepShape(True, 128, 8)], "all end with their first token"
    assert sizes.first_shapes(1, 129, 1) == [StepShape.decode(1)], "its prompt takes several steps"
    assert sizes.first_shapes(65, 100, 65) == []
    assert sizes.first_shapes(0, 0, 0) == []
    assert PaddedSizes().first_shapes(1, 1, 1) == [], "nothing is captured"
