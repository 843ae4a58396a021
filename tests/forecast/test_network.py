from __future__ import annotations

import numpy as np
import pytest

from hearth.forecast import network
from hearth.forecast.choice import HORIZON
from hearth.forecast.network import Trained, scale_of, train
from hearth.forecast.series import Numbers

DAY, WEEK = 24, 168


def spikes(num_steps: int, level: float, seed: int) -> Numbers:
    """A level, and now and then one step with four times as many requests."""
    chance = np.random.default_rng(seed)
    return np.where(chance.random(num_steps) < 0.2, 4 * level, level)


def test_what_recurs_in_some_models_is_expected_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "NUM_ROUNDS", 60)
    trained = train([spikes(200, level, seed) for seed, level in enumerate((5.0, 60.0))], DAY, WEEK, HORIZON)
    counts = spikes(160, 2000.0, seed=7)
    predicted = Trained(trained, scale_of(counts), DAY, WEEK).predict(counts, np.arange(100, 160), HORIZON)
    assert np.abs(predicted[:, 0] - 2000.0).mean() < 500.0, "a spike is expected to end"


def test_inputs_that_training_did_not_see_count_for_nothing() -> None:
    trained = train([spikes(3 * DAY, 50.0, seed) for seed in range(2)], DAY, WEEK, HORIZON)
    counts = np.full(2 * WEEK, 50.0)
    counts[-3] = 200.0
    other = counts.copy()
    origin = len(counts)
    other[origin - WEEK - 1 : origin - WEEK + 2] = 4000.0
    expected, again = (
        Trained(trained, 1.0, DAY, WEEK).predict(each, np.array([origin]), HORIZON)
        for each in (counts, other)
    )
    assert np.array_equal(expected, again)
