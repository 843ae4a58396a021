"""What every pool promises, whatever it does inside. A new implementation adds a line to POOLS."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.errors import DeviceError
from hearth.memory.pool import Need, Pool, Space
from hearth.memory.whole import WholePool
from hearth.types import ModelId

BUDGET_BYTES = 1 << 16
POOLS: dict[str, Callable[[int], Pool]] = {
    "whole": lambda budget_bytes: WholePool(torch.device("cpu"), budget_bytes)
}
BYTES = st.integers(0, BUDGET_BYTES // 2)
NEEDS = st.builds(Need, BYTES, BYTES, BYTES)
MODELS = st.sampled_from([ModelId(name) for name in "abcdef"])


@pytest.fixture(params=POOLS)
def new_pool(request: pytest.FixtureRequest) -> Callable[[int], Pool]:
    return POOLS[request.param]


def tensors(space: Space) -> tuple[torch.Tensor, ...]:
    return space.weights, space.workspace, space.kv


def spans(space: Space) -> list[range]:
    return [range(one.data_ptr(), one.data_ptr() + len(one)) for one in tensors(space) if len(one)]


def check(pool: Pool, spaces: dict[ModelId, tuple[Need, Space]]) -> None:
    assert pool.used_bytes == sum(need.num_bytes for need, _ in spaces.values()) <= pool.budget_bytes
    taken = sorted(
        (span for _, space in spaces.values() for span in spans(space)), key=lambda span: span.start
    )
    for before, after in pairwise(taken):
        assert before.stop <= after.start, f"{before} and {after} overlap"


@pytest.mark.parametrize("kind", POOLS)
@given(st.lists(st.tuples(MODELS, NEEDS), max_size=40))
def test_no_byte_is_given_twice_and_none_beyond_the_budget(
    kind: str, wishes: list[tuple[ModelId, Need]]
) -> None:
    pool = POOLS[kind](BUDGET_BYTES)
    spaces: dict[ModelId, tuple[Need, Space]] = {}
    for model, need in wishes:
        if model in spaces:
            del spaces[model]
            pool.give_back(model)
        elif need.num_bytes > pool.budget_bytes - pool.used_bytes:
            with pytest.raises(DeviceError):
                pool.take(model, need)
        else:
            space = pool.take(model, need)
            assert [len(one) for one in tensors(space)] == [
                *(need.weights_bytes, need.workspace_bytes, need.kv_bytes)
            ]
            assert all(one.dtype == torch.uint8 and one.data_ptr() % 16 == 0 for one in tensors(space))
            spaces[model] = (need, space)
        check(pool, spaces)
    for model in spaces:
        pool.give_back(model)
    assert pool.used_bytes == 0


def test_what_is_beyond_the_budget_is_refused_with_the_numbers(new_pool: Callable[[int], Pool]) -> None:
    pool = new_pool(1000)
    pool.take(ModelId("a"), Need(300, 200, 100))

    with pytest.raises(DeviceError, match=r"`b` needs 401 bytes .* 400 of 1000 are free"):
        pool.take(ModelId("b"), Need(401, 0, 0))

    assert pool.used_bytes == 600


def test_what_is_given_back_is_free_for_others(new_pool: Callable[[int], Pool]) -> None:
    pool = new_pool(1000)
    pool.take(ModelId("a"), Need(1000, 0, 0))
    pool.give_back(ModelId("a"))

    assert len(pool.take(ModelId("b"), Need(0, 0, 1000)).kv) == 1000


def test_the_whole_pool_keeps_nothing_alive_that_was_given_back() -> None:
    pool = WholePool(torch.device("cpu"), 1000)
    space = pool.take(ModelId("a"), Need(500, 0, 0))
    memory = weakref.ref(space.weights.untyped_storage())
    pool.give_back(ModelId("a"))
    del space

    assert memory() is None


def test_a_device_that_has_less_than_the_budget_says_so() -> None:
    pool = WholePool(torch.device("cpu"), 1 << 62)

    with pytest.raises(DeviceError, match=r"are within the budget of .* does not have them"):
        pool.take(ModelId("a"), Need(1 << 61, 0, 0))
    assert pool.used_bytes == 0
