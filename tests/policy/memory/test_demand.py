"""What the estimate says in plain cases, and that it never moves the wrong way."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.memory.demand import NEWEST_WEIGHT, PRIOR_INTERVAL_S, Demand

seconds = st.floats(0.0, 1e6)
intervals = st.lists(seconds, max_size=8)


def asked(*times_s: float) -> Demand:
    demand = Demand()
    for now_s in times_s:
        demand.arrived("model", now_s)
    return demand


def asked_in_intervals(intervals_s: list[float]) -> Demand:
    return asked(*accumulate(intervals_s, initial=0.0))


def test_a_model_nobody_asked_for_is_not_expected() -> None:
    assert asked(1.0).probability("another", now_s=2.0, horizon_s=1e9) == 0.0


def test_a_model_asked_for_once_is_expected_as_the_prior_says() -> None:
    assert asked(5.0).probability("model", 5.0, PRIOR_INTERVAL_S) == pytest.approx(1 - math.exp(-1))


def test_a_model_asked_for_regularly_is_expected_at_its_interval() -> None:
    assert asked(0.0, 10.0, 20.0).probability("model", 20.0, 20.0) == pytest.approx(1 - math.exp(-2))


def test_the_newest_interval_counts_by_its_weight() -> None:
    mean_s = (1 - NEWEST_WEIGHT) * 10.0 + NEWEST_WEIGHT * 30.0
    assert asked(0.0, 10.0, 40.0).probability("model", 40.0, mean_s) == pytest.approx(1 - math.exp(-1))


def test_a_silence_longer_than_the_mean_takes_its_place() -> None:
    demand = asked(0.0, 10.0)
    assert demand.probability("model", 20.0, 10.0) == pytest.approx(1 - math.exp(-1))
    assert demand.probability("model", 110.0, 100.0) == pytest.approx(1 - math.exp(-1))


def test_requests_at_one_moment_are_certain_to_go_on_but_not_within_no_time() -> None:
    demand = asked(5.0, 5.0)
    assert demand.probability("model", 5.0, 1.0) == 1.0
    assert demand.probability("model", 5.0, 0.0) == 0.0


def test_models_are_counted_apart() -> None:
    demand = asked(0.0, 1.0)
    demand.arrived("another", 1.0)
    assert demand.probability("another", 1.0, 1.0) < demand.probability("model", 1.0, 1.0)


@given(intervals_s=intervals, since_s=st.floats(-10.0, 1e6), horizon_s=seconds)
def test_a_probability_is_between_0_and_1(intervals_s: list[float], since_s: float, horizon_s: float) -> None:
    probability = asked_in_intervals(intervals_s).probability("model", sum(intervals_s) + since_s, horizon_s)
    assert 0.0 <= probability <= 1.0


@given(intervals_s=intervals, since_s=seconds, horizon_s=seconds, more_s=seconds)
def test_a_longer_horizon_is_not_less_probable(
    intervals_s: list[float], since_s: float, horizon_s: float, more_s: float
) -> None:
    demand, now_s = asked_in_intervals(intervals_s), sum(intervals_s) + since_s
    longer = demand.probability("model", now_s, horizon_s + more_s)
    assert longer >= demand.probability("model", now_s, horizon_s)


@given(intervals_s=intervals, since_s=seconds, horizon_s=seconds, more_s=seconds)
def test_a_longer_silence_is_not_more_probable(
    intervals_s: list[float], since_s: float, horizon_s: float, more_s: float
) -> None:
    demand, now_s = asked_in_intervals(intervals_s), sum(intervals_s) + since_s
    later = demand.probability("model", now_s + more_s, horizon_s)
    assert later <= demand.probability("model", now_s, horizon_s)


@given(intervals_s=intervals, factor=st.floats(0.0, 1.0), since_s=seconds, horizon_s=seconds)
def test_shorter_intervals_are_not_less_probable(
    intervals_s: list[float], factor: float, since_s: float, horizon_s: float
) -> None:
    shorter_s = [factor * interval_s for interval_s in intervals_s]
    sparse = asked_in_intervals(intervals_s).probability("model", sum(intervals_s) + since_s, horizon_s)
    dense = asked_in_intervals(shorter_s).probability("model", sum(shorter_s) + since_s, horizon_s)
    assert dense >= sparse - 1e-6


@given(intervals_s=intervals, since_s=seconds, horizon_s=seconds)
def test_one_more_request_never_makes_the_next_less_probable(
    intervals_s: list[float], since_s: float, horizon_s: float
) -> None:
    demand, now_s = asked_in_intervals(intervals_s), sum(intervals_s) + since_s
    before = demand.probability("model", now_s, horizon_s)
    demand.arrived("model", now_s)
    assert demand.probability("model", now_s, horizon_s) >= before - 1e-6


@given(num=st.integers(1, 50), interval_s=st.floats(0.001, 1e3), horizon_s=st.floats(0.1, 1e4))
def test_requests_told_together_count_as_if_evenly_spaced(
    num: int, interval_s: float, horizon_s: float
) -> None:
    apart, together = asked(0.0), asked(0.0)
    for at in range(1, num + 1):
        apart.arrived("model", at * interval_s)
    together.arrived("model", num * interval_s, num)
    now_s = num * interval_s
    expected = apart.probability("model", now_s, horizon_s)
    assert together.probability("model", now_s, horizon_s) == pytest.approx(expected, rel=1e-6)
