"""What a service would have forecast of a workload depends on what had come until then alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.core.forecast_messages import LONG_STEP_S
from hearth.core.types import ModelId
from hearth.forecast.replay import replay

A, B = ModelId("a"), ModelId("b")
NUM_STEPS, LENGTH_S = 24, 24 * 600.0
TIMES = st.lists(st.floats(0.0, LENGTH_S, exclude_max=True), max_size=60)


@settings(max_examples=20, deadline=None)
@given(past=TIMES, one=TIMES, other=TIMES, now=st.integers(0, NUM_STEPS - 1))
def test_other_requests_in_the_future_change_no_forecast(
    past: list[float], one: list[float], other: list[float], now: int
) -> None:
    known = [at_s for at_s in past if at_s < now * LONG_STEP_S]
    before = {A: [float(step % 3) for step in range(30)]}

    def forecasts(future: list[float]) -> list[object]:
        later = [at_s for at_s in future if at_s >= now * LONG_STEP_S]
        told = replay(before, {A: known + later, B: later}, LENGTH_S)
        return [event for event in told if event.now_s <= now * LONG_STEP_S]

    assert forecasts(one) == forecasts(other)


def test_models_are_forecast_at_each_step_from_all_that_came_before() -> None:
    told = list(replay({A: [6.0] * 3}, {A: [], B: [LONG_STEP_S + 1.0] * 12}, 3 * LONG_STEP_S))
    assert [(event.now_s, event.model) for event in told] == [
        (step * LONG_STEP_S, model) for step in range(3) for model in (A, B)
    ]
    mean_per_s = {(event.now_s, event.model): event.mean_per_s[0] for event in told}
    assert mean_per_s[0.0, A] == 6.0 / LONG_STEP_S, "the last value, of before the workload"
    assert mean_per_s[LONG_STEP_S, B] == 0.0
    assert mean_per_s[2 * LONG_STEP_S, B] == 12.0 / LONG_STEP_S


def test_nothing_is_forecast_from_nothing() -> None:
    assert [event.now_s for event in replay({}, {A: [0.0]}, 2 * LONG_STEP_S)] == [LONG_STEP_S]
