"""What it costs to have bytes back: the formula, and the estimates that feed it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import AdapterId, ModelId, Rung
from hearth.policy.memory.reload_cost import (
    MIN_DUE_S,
    MIN_TELLING_BYTES,
    PRIOR_BYTES_PER_S,
    DeviceReloadCosts,
    ReloadCosts,
    reload_cost,
)

A, B = ModelId("a"), ModelId("b")
PRIORS = {Rung.HOST: 100.0, Rung.DISK: 10.0, Rung.OBJECT: 1.0}
SIZES = st.integers(0, 1000)
SECONDS = st.floats(0.0, 1e6)
SHARES = st.floats(0.0, 1.0)


def test_the_reload_cost_is_probability_times_load_time_times_weight() -> None:
    assert reload_cost(p_wanted=0.5, load_s=4.0, weight=3.0) == 6.0


def test_bytes_that_nobody_wants_cost_nothing() -> None:
    assert reload_cost(p_wanted=0.0, load_s=4.0, weight=3.0) == 0.0


def test_a_load_of_negative_time_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="negative"):
        reload_cost(p_wanted=0.5, load_s=-1.0, weight=1.0)


@given(SHARES, SECONDS, SECONDS, st.floats(0.0, 100.0))
def test_what_takes_longer_to_come_back_never_costs_less(
    p_wanted: float, load_s: float, more_s: float, weight: float
) -> None:
    assert reload_cost(p_wanted, load_s + more_s, weight) >= reload_cost(p_wanted, load_s, weight)


def test_what_a_rung_has_shown_replaces_what_was_assumed() -> None:
    costs = ReloadCosts(PRIORS)
    assert costs.load_s(50, None) == 5.0
    costs.moved(Rung.DISK, 100, 2.0)
    assert costs.load_s(50, None) == pytest.approx(1.0)


#: Bytes by rung and the seconds that each was busy, of loads that are large enough to tell.
RUNG_USES = st.dictionaries(
    st.sampled_from(list(Rung)),
    st.tuples(st.integers(MIN_TELLING_BYTES, 10**12), st.floats(0.001, 1e3)),
    min_size=1,
)
WHOLE_S = st.floats(0.001, 1e4)


def learn(costs: ReloadCosts, uses: dict[Rung, tuple[int, float]], total_s: float | None) -> dict[Rung, int]:
    """Teach one load and return its bytes by rung."""
    bytes_by_rung = {rung: num_bytes for rung, (num_bytes, _) in uses.items()}
    costs.learn_load(bytes_by_rung, {rung: seconds for rung, (_, seconds) in uses.items()}, total_s)
    return bytes_by_rung


def test_a_load_that_takes_longer_than_its_rung_is_busy_is_expected_to_again() -> None:
    costs = ReloadCosts(PRIORS)
    learn(costs, {Rung.DISK: (538_000_000, 0.308)}, total_s=0.994)
    assert costs.load_s(538_000_000, {Rung.DISK: 538_000_000}) == pytest.approx(0.994)
    assert costs.load_s(269_000_000, None) == pytest.approx(0.497)


@given(RUNG_USES, WHOLE_S)
def test_after_one_load_the_same_one_is_expected_to_take_as_long(
    uses: dict[Rung, tuple[int, float]], total_s: float
) -> None:
    costs = ReloadCosts(PRIORS)
    bytes_by_rung = learn(costs, uses, total_s)
    assert costs.load_s(sum(bytes_by_rung.values()), bytes_by_rung) == pytest.approx(total_s)


@given(st.lists(st.tuples(st.integers(MIN_TELLING_BYTES, 10**11), WHOLE_S), min_size=1), WHOLE_S)
def test_an_estimate_lies_within_what_loads_took_and_only_nears_one_that_repeats(
    loads: list[tuple[int, float]], again_s: float
) -> None:
    costs = ReloadCosts(PRIORS)
    for num_bytes, total_s in loads:
        learn(costs, {Rung.DISK: (num_bytes, 0.5)}, total_s)
        byte_s = 1 / costs.bytes_per_s(Rung.DISK)
        assert byte_s >= min(seconds / size for size, seconds in loads) * (1 - 1e-9)
        assert byte_s <= max(seconds / size for size, seconds in loads) * (1 + 1e-9)
    errors_s = []
    for _ in range(5):
        errors_s.append(costs.load_s(10**9, None) - again_s)
        learn(costs, {Rung.DISK: (10**9, 0.5)}, again_s)
    assert all(abs(later) <= abs(sooner) + 1e-6 for sooner, later in pairwise(errors_s))
    assert all(later * sooner >= -1e-6 for sooner, later in pairwise(errors_s)), "it swings past the truth"


@given(RUNG_USES, WHOLE_S, st.booleans())
def test_a_load_that_came_in_part_elsewhen_or_is_small_tells_only_how_long_rungs_were_busy(
    uses: dict[Rung, tuple[int, float]], total_s: float, is_small: bool
) -> None:
    costs, plain = ReloadCosts(PRIORS), ReloadCosts(PRIORS)
    if is_small:
        uses = {rung: (MIN_TELLING_BYTES // (1 + len(Rung)), seconds) for rung, (_, seconds) in uses.items()}
    learn(costs, uses, total_s if is_small else None)
    for rung, (num_bytes, seconds) in uses.items():
        plain.moved(rung, num_bytes, seconds)
        assert costs.bytes_per_s(rung) == plain.bytes_per_s(rung)


@given(SIZES, SIZES, SIZES, SIZES)
def test_more_on_a_near_rung_never_makes_a_load_longer(
    num_bytes: int, host_bytes: int, disk_bytes: int, more_bytes: int
) -> None:
    costs = ReloadCosts(PRIORS)
    load_s = costs.load_s(num_bytes, {Rung.HOST: host_bytes, Rung.DISK: disk_bytes})
    nearer = costs.load_s(num_bytes, {Rung.HOST: host_bytes + more_bytes, Rung.DISK: disk_bytes})
    assert 0.0 <= nearer <= load_s + 1e-9
    assert num_bytes / 100.0 - 1e-9 <= load_s <= num_bytes / 1.0


def test_a_model_that_nobody_has_asked_for_costs_nothing_to_have_back() -> None:
    costs = ReloadCosts(PRIORS)
    assert costs.cost_s(A, 10.0, 1.0, now_s=5.0) == 0.0
    costs.asked(A, 5.0)
    assert costs.cost_s(A, 10.0, 2.0, now_s=5.0) == 2 * costs.cost_s(A, 10.0, 1.0, now_s=5.0) > 0.0
    costs.forget(A)
    assert costs.cost_s(A, 10.0, 1.0, now_s=5.0) == 0.0


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=8), SECONDS, SECONDS)
def test_silence_never_makes_a_model_dearer(intervals_s: list[float], since_s: float, later_s: float) -> None:
    costs, now_s = ReloadCosts(PRIORS), 0.0
    for interval_s in intervals_s:
        now_s += interval_s
        costs.asked(A, now_s)
    soon = costs.cost_s(A, 1.0, 1.0, now_s + since_s)
    assert costs.cost_s(A, 1.0, 1.0, now_s + since_s + later_s) <= soon + 1e-12


def device(*asked_s: float) -> DeviceReloadCosts:
    costs = DeviceReloadCosts()
    for now_s in asked_s:
        costs.asked(A, now_s)
        costs.asked(B, now_s)
    return costs


def come(costs: DeviceReloadCosts, model: ModelId, bytes_by_rung: Mapping[Rung, int]) -> None:
    """Have a model come from some rungs, faster than the clock could tell: their speeds stay as assumed."""
    costs.learn_load(model, bytes_by_rung, dict.fromkeys(bytes_by_rung, 0.0), None)


def test_a_byte_that_came_from_disk_is_dearer_on_a_device_than_one_from_host_memory() -> None:
    costs = device(0.0)
    come(costs, A, {Rung.DISK: 100})
    come(costs, B, {Rung.HOST: 100})
    ratio = costs.cost_s_per_byte(A, 1.0) / costs.cost_s_per_byte(B, 1.0)
    assert ratio == pytest.approx(PRIOR_BYTES_PER_S[Rung.HOST] / PRIOR_BYTES_PER_S[Rung.DISK])


def test_a_load_that_took_no_bytes_changes_no_price() -> None:
    costs = device(0.0)
    come(costs, A, {Rung.DISK: 100})
    before = costs.cost_s_per_byte(A, 1.0)
    come(costs, A, {})
    come(costs, A, {Rung.HOST: 0})
    assert costs.cost_s_per_byte(A, 1.0) == before


def test_a_weighty_model_is_dearer_on_a_device() -> None:
    costs = device(0.0)
    costs.hosted(A, 3.0)
    assert costs.cost_s_per_byte(A, 1.0) == pytest.approx(3 * costs.cost_s_per_byte(B, 1.0))


def test_of_adapters_that_are_all_certain_to_be_wanted_the_one_that_is_asked_for_less_is_cheaper() -> None:
    costs, often, seldom = DeviceReloadCosts(), AdapterId("often"), AdapterId("seldom")
    for now_s in range(21):
        costs.asked(often, now_s)
    for now_s in range(0, 21, 10):
        costs.asked(seldom, now_s)
    assert costs.cost_s_per_byte(often, 20.0) == costs.cost_s_per_byte(seldom, 20.0), "both by the horizon"
    ratio = costs.adapter_cost_per_byte(often, 20.0) / costs.adapter_cost_per_byte(seldom, 20.0)
    assert ratio == pytest.approx(10)
    costs.hosted(seldom, 3.0)
    assert costs.adapter_cost_per_byte(often, 20.0) == pytest.approx(
        10 / 3 * costs.adapter_cost_per_byte(seldom, 20.0)
    )


def test_few_of_many_adapters_are_asked_for_that_have_given_way() -> None:
    """Room for 100 of 1,000 that are asked for as Zipf has it: the best that could be kept miss 31%."""
    drawn, costs = random.Random(1), DeviceReloadCosts()
    names = [AdapterId(f"{drawn.getrandbits(64):x}") for _ in range(1000)]
    asked = drawn.choices(names, cum_weights=list(accumulate(1 / rank for rank in range(1, 1001))), k=6000)
    there: set[AdapterId] = set()
    num_missed = 0
    for number, adapter in enumerate(asked):
        now_s = number / 100
        costs.asked(adapter, now_s)
        if adapter not in there:
            num_missed += number >= 2000
            if len(there) == 100:
                there.remove(min(there, key=lambda one: (costs.adapter_cost_per_byte(one, now_s), one)))
            there.add(adapter)
    assert num_missed / 4000 < 0.37, "by the probability within the horizon it is 0.46, by age 0.42"


def test_a_forgotten_model_is_worth_nothing_on_a_device() -> None:
    costs = device(0.0)
    costs.hosted(A, 3.0)
    come(costs, A, {Rung.OBJECT: 10})
    costs.forget(A)
    assert costs.cost_s_per_byte(A, 1.0) == 0.0


def test_a_paused_model_costs_the_more_the_sooner_it_is_due_and_the_slower_it_comes() -> None:
    costs = device(0.0)
    come(costs, A, {Rung.DISK: 100})
    come(costs, B, {Rung.HOST: 100})
    assert costs.paused_cost_s_per_byte(A, 2.0) == pytest.approx(costs.load_s_per_byte(A) / 2)
    assert costs.paused_cost_s_per_byte(A, 1.0) > costs.paused_cost_s_per_byte(B, 1.0)
    assert costs.paused_cost_s_per_byte(A, 0.0) == costs.paused_cost_s_per_byte(A, MIN_DUE_S) > 0


@given(st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_a_paused_model_that_is_due_later_never_costs_more(due_in_s: float, later_in_s: float) -> None:
    costs = device(0.0)
    sooner_s, later_s = sorted((due_in_s, later_in_s))
    assert costs.paused_cost_s_per_byte(A, sooner_s) >= costs.paused_cost_s_per_byte(A, later_s) > 0


@given(st.dictionaries(st.sampled_from(list(Rung)), st.integers(0, 10**12)))
def test_a_byte_costs_between_the_nearest_and_the_farthest_rung(bytes_by_rung: dict[Rung, int]) -> None:
    costs, nearest, farthest = device(0.0), device(0.0), device(0.0)
    come(costs, A, bytes_by_rung)
    come(nearest, A, {Rung.HOST: 1})
    come(farthest, A, {Rung.OBJECT: 1})
    cost_s = costs.cost_s_per_byte(A, 1.0)
    assert nearest.cost_s_per_byte(A, 1.0) * (1 - 1e-9) <= cost_s
    assert cost_s <= farthest.cost_s_per_byte(A, 1.0) * (1 + 1e-9)


@given(
    st.dictionaries(st.sampled_from(Rung), st.integers(0, 1 << 40)),
    st.dictionaries(st.sampled_from(Rung), st.floats(0.0, 1e4)),
)
def test_only_rungs_that_have_delivered_have_a_measured_rate(
    bytes_by_rung: dict[Rung, int], seconds_by_rung: dict[Rung, float]
) -> None:
    costs = DeviceReloadCosts()
    assert costs.measured_rates() == {}
    busy_s = {rung: seconds_by_rung.get(rung, 0.0) for rung in bytes_by_rung}
    costs.learn_load(A, bytes_by_rung, busy_s, None)
    rates = costs.measured_rates()
    assert set(rates) == {rung for rung, part in bytes_by_rung.items() if part and busy_s[rung]}
    assert all(rate > 0 for rate in rates.values())
