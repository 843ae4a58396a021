from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.memory.region_order import RegionOrder

NUM_REGIONS = 6


def take_next(order: RegionOrder) -> int | None:
    region = order.peek()
    assert region is None or order.take(region)
    return region


def test_what_nobody_waits_for_comes_behind_what_a_load_took_and_then_from_the_front() -> None:
    order = RegionOrder(5)
    assert take_next(order) == 0
    assert order.take(2)
    assert [take_next(order) for _ in range(4)] == [3, 4, 1, None]
    assert order.is_complete


def test_while_a_load_is_under_way_only_what_it_waits_for_is_given() -> None:
    order = RegionOrder(3)
    order.load_began()
    order.load_began()
    assert (take_next(order), order.take(2), order.take(2)) == (None, True, False)
    order.load_ended()
    assert take_next(order) is None
    order.load_ended()
    assert [take_next(order) for _ in range(3)] == [0, 1, None]


@given(st.lists(st.sampled_from(["begin", "end", "next", *range(NUM_REGIONS)]), max_size=40))
def test_every_region_is_given_once_and_none_that_nobody_waits_for_beside_a_load(
    steps: list[str | int],
) -> None:
    order, given_out, num_loads = RegionOrder(NUM_REGIONS), list[int](), 0
    for step in steps:
        left = set(range(NUM_REGIONS)) - set(given_out)
        if step == "begin":
            order.load_began()
            num_loads += 1
        elif step == "end":
            if num_loads:
                order.load_ended()
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
