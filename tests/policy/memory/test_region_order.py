from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.memory.region_order import MAX_HELD_S, MIN_PAUSE_S, TRICKLE_S, RegionOrder

NUM_REGIONS = 6


def take_next(order: RegionOrder, now_s: float = 0.0) -> int | None:
    region = order.peek(now_s)
    if region is not None:
        order.take_unasked(region, now_s)
    return region


def test_what_nobody_waits_for_comes_behind_what_a_load_took_and_then_from_the_front() -> None:
    order = RegionOrder(5)
    assert take_next(order) == 0
    assert order.take(2)
    assert [take_next(order) for _ in range(4)] == [3, 4, 1, None]
    assert order.is_complete


def test_while_a_load_is_under_way_only_what_it_waits_for_is_given() -> None:
    order = RegionOrder(3)
    order.load_began(0.0)
    order.load_began(0.0)
    assert (take_next(order), order.take(2), order.take(2)) == (None, True, False)
    order.load_ended(0.0)
    assert take_next(order) is None
    order.load_ended(0.0)
    assert [take_next(order) for _ in range(3)] == [0, 1, None]


def test_beside_loads_that_never_cease_regions_come_little_by_little() -> None:
    order = RegionOrder(4)
    order.load_began(1.0)
    assert (take_next(order, 30.9), order.wait_s(30.9)) == (None, pytest.approx(0.1))
    assert take_next(order, 1.0 + MAX_HELD_S) == 0
    assert take_next(order, 1.01 + MAX_HELD_S) is None
    assert take_next(order, 1.01 + MAX_HELD_S + TRICKLE_S) == 1
    order.load_ended(40.0)
    assert order.wait_s(40.0) == 0.0
    order.load_began(40.0 + MIN_PAUSE_S / 2)  # too soon for a region to come
    assert take_next(order, 41.0) == 2
    order.load_ended(50.0)
    order.load_began(50.0 + MIN_PAUSE_S)
    assert take_next(order, 49.9 + MAX_HELD_S) is None, "it had its chance"


def test_a_load_after_a_long_rest_is_not_disturbed() -> None:
    order = RegionOrder(4)
    assert take_next(order, 0.0) == 0
    order.load_began(1000.0)
    assert take_next(order, 1001.0) is None


@given(st.lists(st.sampled_from(["begin", "end", "next", *range(NUM_REGIONS)]), max_size=40))
def test_every_region_is_given_once_and_none_that_nobody_waits_for_beside_a_load(
    steps: list[str | int],
) -> None:
    order, given_out, num_loads = RegionOrder(NUM_REGIONS), list[int](), 0
    for step in steps:
        left = set(range(NUM_REGIONS)) - set(given_out)
        if step == "begin":
            order.load_began(0.0)
            num_loads += 1
        elif step == "end":
            if num_loads:
                order.load_ended(0.0)
                num_loads -= 1
        elif step == "next":
            region = take_next(order)
            assert (region is None) == (num_loads > 0 or not left)
            assert region is None or region in left
            given_out += [] if region is None else [region]
        else:
            assert isinstance(step, int)
            assert order.take(step) == (step in left)
            given_out += [step] if step in left else []
        assert order.is_complete == (len(given_out) == NUM_REGIONS)
    assert len(set(given_out)) == len(given_out)
