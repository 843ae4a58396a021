from __future__ import annotations

import numpy as np
import pytest

from hearth.forecast.choice import HORIZON, Fit, methods
from hearth.forecast.hedge import Hedged
from hearth.forecast.methods import LastValue, Origins
from hearth.forecast.regression import Regression, fit_regression
from hearth.forecast.series import Numbers, Series

STEP_S, DAY, WEEK = 3600.0, 24, 168


def bursts(num_steps: int) -> Numbers:
    chance = np.random.default_rng(0)
    hours = np.arange(num_steps) % DAY
    return np.where(chance.random(num_steps) < 0.7, chance.poisson(20 + 15 * np.sin(hours / 4)), 0).astype(
        float
    )


class Constant:
    def predict(self, counts: Numbers, origins: Origins, horizon: int) -> Numbers:
        return np.full((len(origins), horizon), 10.0)


@pytest.fixture(scope="module")
def fits() -> dict[str, Fit]:
    return methods([Series(bursts(400), STEP_S)])


@pytest.mark.parametrize("method", ["last value", "regression", "network", "network and regression"])
def test_no_method_looks_ahead(method: str, fits: dict[str, Fit]) -> None:
    counts = bursts(400)
    fitted = fits[method](counts[:250], Series(counts, STEP_S))
    assert fitted is not None
    fitted = Hedged(fitted, window=DAY)
    origins = np.arange(250, 400)
    predicted = fitted.predict(counts, origins, HORIZON)
    for origin in (250, 300, 399):
        changed = np.concatenate([counts[:origin], 1000 - counts[origin:]])
        again = fitted.predict(changed, origins, HORIZON)
        known = origins <= origin
        assert np.array_equal(again[known], predicted[known])
        alone = fitted.predict(counts[:origin], np.array([origin]), HORIZON)
        assert np.allclose(alone, predicted[origin - 250], rtol=1e-3)


def test_a_regression_finds_the_week_before_although_some_counts_are_far_off() -> None:
    week = np.random.default_rng(1).uniform(0.0, 400.0, WEEK)
    counts = np.tile(week, 8)
    counts[::201] = 5000.0
    fitted = fit_regression(counts, DAY, WEEK, HORIZON)
    assert fitted is not None
    predicted = fitted.predict(np.tile(week, 8), np.arange(7 * WEEK, 8 * WEEK - HORIZON), 1)[:, 0]
    assert np.abs(predicted - week[: len(predicted)]).mean() < 10.0


def test_a_regression_sums_weighted_differences_of_roots() -> None:
    counts = bursts(300)
    weights = np.zeros((HORIZON, 19))
    weights[:, 0], weights[:, 12] = 0.3, 0.5  # the step before, and the same time yesterday
    fitted = Regression(weights, DAY, WEEK)
    roots = np.sqrt(counts)
    for origin in (3, 200, 300):
        expected = []
        for ahead in range(HORIZON):
            newest, earlier = roots[origin - 1], roots[origin - 2]
            yesterday = roots[origin + ahead - DAY] if origin >= DAY else newest
            expected.append((newest + 0.3 * (earlier - newest) + 0.5 * (yesterday - newest)) ** 2)
        assert np.allclose(fitted.predict(counts, np.array([origin]), HORIZON)[0], expected)


def test_a_method_has_the_share_that_was_best_on_the_last_day() -> None:
    constant, last = Constant(), LastValue()
    noise = np.tile([0.0, 20.0], 30)
    kept = np.full(60, 500.0)
    origins = np.array([60])
    for counts, expected in ((noise, constant), (kept, last)):
        predicted = Hedged(constant, window=DAY).predict(counts, origins, 1)
        assert np.array_equal(predicted, expected.predict(counts, origins, 1))
    changed = np.concatenate([noise, kept])
    begun, later = Hedged(constant, window=DAY).predict(changed, np.array([60, 90]), 1)[:, 0]
    assert (begun, later) == (10.0, 500.0)
