"""How many steps a pipeline has in flight: more than stages only while no token is later for it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.batch.flights import StageTimes, choose_flights


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a pipeline: what each stage takes for its weights, and for all rows, which flights share."""

    weights_s: tuple[float, ...]
    rows_s: tuple[float, ...]
    hops_s: float

    def stage_s(self, num_flights: int) -> list[float]:
        return [
            weights + rows / num_flights for weights, rows in zip(self.weights_s, self.rows_s, strict=True)
        ]

    def times(self, num_flights: int) -> StageTimes:
        return StageTimes(self.stage_s(num_flights), self.hops_s)

    def between_tokens_s(self, num_flights: int) -> float:
        stage_s = self.stage_s(num_flights)
        return max(num_flights * max(stage_s), sum(stage_s) + self.hops_s)


SECONDS = st.floats(1e-5, 1.0)
COSTS = st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=8).flatmap(
    lambda stages: st.builds(
        Costs,
        st.just(tuple(weights for weights, _ in stages)),
        st.just(tuple(rows for _, rows in stages)),
        st.floats(0.0, 4.0),
    )
)


def test_there_are_as_many_flights_as_stages_while_times_are_unknown() -> None:
    assert choose_flights(None, 3, 4) == 3
    assert choose_flights(StageTimes((0.0, 0.0), 1.0), 2, 3) == 2


def test_there_is_one_more_only_while_hops_take_longer_than_a_stage() -> None:
    """Measured between two GPUs: a stage of 1.9 ms and hops of 55 us."""
    assert choose_flights(StageTimes((0.0019, 0.0019), 2 * 55e-6), 2, 3) == 2
    assert choose_flights(StageTimes((0.0019, 0.0019), 2 * 1e-3), 2, 3) == 3
    assert choose_flights(StageTimes((0.0019, 0.0019), 1.0), 2, 3) == 3


def test_stages_on_one_device_take_turns() -> None:
    times = StageTimes((0.0019, 0.0019), 2 * 55e-6, devices=(0, 0))
    assert choose_flights(times, 1, 3) == 1
    assert choose_flights(StageTimes((0.001, 0.001), 0.0021, devices=(0, 0)), 1, 3) == 2
    assert choose_flights(StageTimes((0.001, 0.001, 0.002), 0.0, devices=(0, 0, 1)), 2, 4) == 2


def test_hops_that_a_slow_stage_hides_take_no_flight() -> None:
    assert choose_flights(StageTimes((0.001, 0.005), 0.004), 2, 3) == 2


@given(COSTS, st.integers(0, 3))
def test_more_flights_than_stages_make_no_token_later(costs: Costs, num_more: int) -> None:
    """Also if the times were measured with more flights, whose steps have fewer rows."""
    fewest = len(costs.weights_s)
    num_flights = choose_flights(costs.times(fewest + num_more), fewest, most=fewest + num_more)
    assert fewest <= num_flights <= fewest + num_more
    if num_flights == fewest + num_more:
        assert costs.between_tokens_s(num_flights) <= costs.between_tokens_s(fewest) * (1 + 1e-9)


@given(COSTS)
def test_longer_hops_never_take_flights_away(costs: Costs) -> None:
    fewest = len(costs.weights_s)
    stage_s = costs.stage_s(fewest)
    chosen = [
        choose_flights(StageTimes(stage_s, factor * costs.hops_s), fewest, 2 * fewest) for factor in (0, 1, 2)
    ]
    assert chosen == sorted(chosen)
    assert chosen[0] == fewest, "hops that take no time"
