"""What the running average makes of transfers: their sizes, their order, and those that tell nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.memory.reload_cost import HALF_LIFE_BYTES, RunningRate

GB = 10**9


def rate_of(*transfers: tuple[int, float]) -> float | None:
    rate = RunningRate()
    for num_bytes, seconds in transfers:
        rate.add(num_bytes, seconds)
    return rate.bytes_per_s


def test_there_is_no_rate_before_the_first_transfer() -> None:
    assert rate_of() is None


def test_one_transfer_is_the_rate() -> None:
    assert rate_of((6 * GB, 2.0)) == pytest.approx(3 * GB)


def test_a_big_transfer_counts_more_than_a_small_one() -> None:
    assert rate_of((1000, 1.0), (GB, 1.0)) == pytest.approx(GB / 2, rel=0.1)
    assert rate_of((1000, 1e-3), (GB, 1.0)) == pytest.approx(GB, rel=0.01)


def test_what_is_a_half_life_back_counts_half() -> None:
    slow, fast = (HALF_LIFE_BYTES, 4.0), (HALF_LIFE_BYTES, 1.0)
    assert rate_of(slow, fast) == pytest.approx(1.5 * HALF_LIFE_BYTES / (0.5 * 4.0 + 1.0))


def test_a_change_of_speed_is_followed_within_a_few_half_lives() -> None:
    transfers = [(HALF_LIFE_BYTES, 100.0)] + 10 * [(HALF_LIFE_BYTES, 1.0)]
    assert rate_of(*transfers) == pytest.approx(HALF_LIFE_BYTES, rel=0.1)


@pytest.mark.parametrize("nothing", [(GB, 0.0), (GB, -1.0), (0, 1.0)])
def test_a_transfer_without_bytes_or_seconds_says_nothing(nothing: tuple[int, float]) -> None:
    assert rate_of(nothing) is None
    assert rate_of((GB, 1.0), nothing) == pytest.approx(GB)


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(1e-6, 1e6)), min_size=1, max_size=20))
def test_the_rate_lies_between_the_slowest_and_the_fastest(transfers: list[tuple[int, float]]) -> None:
    rates = [num_bytes / seconds for num_bytes, seconds in transfers]
    average = rate_of(*transfers)
    assert average is not None
    assert min(rates) * (1 - 1e-9) <= average <= max(rates) * (1 + 1e-9)
