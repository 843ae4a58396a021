from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.memory.pin_order import PinOrder

NUM_REGIONS = 6


def test_what_nobody_waits_for_comes_in_order_and_around_what_was_taken() -> None:
    order = PinOrder(4)
    assert order.take(1)
    assert [order.take_next() for _ in range(4)] == [0, 2, 3, None]
    assert order.is_complete


def test_while_a_load_is_under_way_only_what_it_waits_for_is_pinned() -> None:
    order = PinOrder(3)
    order.load_began()
    order.load_began()
    assert (order.take_next(), order.take(2), order.take(2)) == (None, True, False)
    order.load_ended()
    assert order.take_next() is None
    order.load_ended()
    assert [order.take_next() for _ in range(3)] == [0, 1, None]


@given(st.lists(st.sampled_from(["begin", "end", "next", *range(NUM_REGIONS)]), max_size=40))
def test_every_region_is_given_once_and_none_that_nobody_waits_for_beside_a_load(
    steps: list[str | int],
) -> None:
    order, given_out, num_loads = PinOrder(NUM_REGIONS), list[int](), 0
    for step in steps:
        if step == "begin":
            order.load_began()
            num_loads += 1
        elif step == "end":
            if num_loads:
                order.load_ended()
                num_loads -= 1
        elif step == "next":
            region = order.take_next()
            left = sorted(set(range(NUM_REGIONS)) - set(given_out))
            assert region == (None if num_loads or not left else left[0])
            given_out += [] if region is None else [region]
        else:
            assert isinstance(step, int)
            is_new = step not in given_out
            assert order.take(step) == is_new
            given_out += [step] if is_new else []
        assert order.is_complete == (len(given_out) == NUM_REGIONS)
    assert len(set(given_out)) == len(given_out)
