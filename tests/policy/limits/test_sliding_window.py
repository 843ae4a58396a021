"""A window against a plain list of all that was taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.limits.sliding_window import WINDOW_S, SlidingWindow

#: (time since the one before, amount)
TAKES = st.lists(st.tuples(st.floats(0.0, 40.0), st.integers(1, 5)), max_size=40)


@given(TAKES, st.integers(1, 12))
def test_no_minute_wherever_it_begins_has_more_than_the_limit(
    takes: list[tuple[float, int]], limit: int
) -> None:
    window, now_s = SlidingWindow(), 0.0
    taken: list[tuple[float, int]] = []
    for later_s, amount in takes:
        now_s += later_s
        if window.wait_s(amount, limit, now_s) == 0.0:
            window.take(amount, now_s)
            taken.append((now_s, amount))
        assert len(window._slots) <= WINDOW_S + 1
    for begin_s, _ in taken:
        within = [amount for at_s, amount in taken if begin_s <= at_s < begin_s + WINDOW_S]
        assert sum(within) <= limit


@given(TAKES, st.integers(1, 5), st.integers(5, 40))
def test_what_has_to_wait_fits_at_the_time_that_was_said_and_not_a_second_before(
    takes: list[tuple[float, int]], amount: int, limit: int
) -> None:
    window, now_s = SlidingWindow(), 0.0
    for later_s, taken in takes:
        now_s += later_s
        window.take(taken, now_s)
    wait_s = window.wait_s(amount, limit, now_s)
    assert 0.0 <= wait_s <= WINDOW_S
    used = window.used
    if wait_s > 1.1:  # what is taken within one second comes back together
        assert window.wait_s(amount, limit, now_s + wait_s - 1.1) > 0.0
    assert window.wait_s(amount, limit, now_s + wait_s + 1e-6) == 0.0
    assert window.used <= used


@given(TAKES)
def test_what_was_taken_comes_back_little_by_little_and_whole(takes: list[tuple[float, int]]) -> None:
    window, now_s = SlidingWindow(), 0.0
    for later_s, amount in takes:
        now_s += later_s
        window.take(amount, now_s)
    used, reset_s = window.used, window.reset_s(now_s)
    for part in range(1, 11):
        window.advance(now_s + reset_s * part / 10 + 1e-6)
        assert window.used <= used
        used = window.used
    assert used == 0


def test_what_is_given_back_after_a_minute_is_given_back_already() -> None:
    window = SlidingWindow()
    slot = window.take(10, 0.0)
    window.take(3, 59.0)
    window.advance(60.0)
    window.give_back(slot, 4)
    assert window.used == 3


@pytest.mark.parametrize("amount", [11, 1000])
def test_more_than_the_limit_never_fits(amount: int) -> None:
    assert SlidingWindow().wait_s(amount, 10, 0.0) == float("inf")
