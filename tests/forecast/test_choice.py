from __future__ import annotations

import numpy as np

from hearth.core.types import ModelId
from hearth.forecast.choice import HORIZON, Chosen, choose
from hearth.forecast.series import Numbers, Series

MODEL = ModelId("m")
STEP_S = 600.0


def choose_one(counts: Numbers) -> Chosen:
    return choose({MODEL: Series(counts, STEP_S)})[MODEL]


def test_a_daily_pattern_is_expected_to_return() -> None:
    day = np.arange(144.0) % 7 * 30
    counts = np.tile(day, 16)
    forecast = choose_one(counts).forecast(MODEL, Series(counts, STEP_S))
    assert forecast.method == "regression"
    assert np.allclose(forecast.mean_per_s, day[:HORIZON] / STEP_S, atol=0.06)
    assert forecast.mase is not None
    assert forecast.mase < 0.1


def test_series_without_a_past_are_expected_to_stay() -> None:
    for counts in ([], [np.nan, np.nan], [5.0], [2.0, 9.0] * 8, [0.0] * 500, [7.0] * 500):
        past = np.array(counts)
        forecast = choose_one(past).forecast(MODEL, Series(past, STEP_S))
        last = 0.0 if np.isnan(past).all() else past[-1]
        assert forecast.mean_per_s == forecast.high_per_s == (last / STEP_S,) * HORIZON
