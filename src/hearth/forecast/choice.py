"""Chooses the method that would have forecast a model's recent past best.

every day     `choose`: tries all methods, fits them, trains what is trained
every hour    `Chosen.refit`: fits the chosen method again
every step    `Chosen.forecast`: predicts from the newest counts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hearth.core.types import ModelId
from hearth.forecast.methods import Fitted, LastValue, SeasonalNaive
from hearth.forecast.series import DAY_S, WEEK_S, Numbers, Series

#: How many steps are forecast.
HORIZON = 6
#: The probability that more requests come than the upper bound says.
MISS = 0.1
#: How much better than the last value a method must have been.
MARGIN = 0.02
#: Steps of the recent past that are forecast to compare methods, and the least history before them.
NUM_TRIED, MIN_HISTORY = 432, 12

Fit = Callable[[Numbers, Series], Fitted | None]


@dataclass(frozen=True, slots=True)
class Forecast:
    method: str
    step_s: float
    mean_per_s: tuple[float, ...]  #: requests per second in each of the next steps
    high_per_s: tuple[float, ...]  #: more come with a probability of 10%
    #: Mean absolute error one step ahead, on the recent past, relative to the last value as the forecast.
    mase: float | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The method for one model, fitted, and how it has done."""

    method: str
    fitted: Fitted
    excess: Numbers  #: for each step ahead, requests beyond the forecast, exceeded with probability `MISS`
    mase: float | None

    def refit(self, series: Series) -> Chosen:
        """Return the same method with parameters that fit the series of now."""
        return self

    def forecast(self, series: Series) -> Forecast:
        counts = series.without_gaps()
        mean = np.zeros(HORIZON)
        if len(counts):
            mean = self.fitted.predict(counts, np.array([len(counts)]), HORIZON)[0]
        high = np.maximum(mean + self.excess, 0.0)
        mean_per_s, high_per_s = ((one / series.step_s).tolist() for one in (mean, high))
        return Forecast(self.method, series.step_s, tuple(mean_per_s), tuple(high_per_s), self.mase)


def choose(series_by_model: Mapping[ModelId, Series]) -> dict[ModelId, Chosen]:
    """Choose a method for each model. The busiest models may have costlier ones."""
    return {model: _choose(series) for model, series in series_by_model.items()}


def _choose(series: Series) -> Chosen:
    counts = series.without_gaps()
    begin = max(MIN_HISTORY, len(counts) - NUM_TRIED)
    if begin >= len(counts):
        return Chosen("last value", LastValue(), np.zeros(HORIZON), None)
    origins = np.arange(begin, len(counts))
    padded = np.concatenate([counts, np.full(HORIZON, np.nan)])
    came = np.lib.stride_tricks.sliding_window_view(padded, HORIZON)[origins]
    misses_by_method = {}
    fitted_by_method: dict[str, Fitted] = {"last value": LastValue()}
    for name, period_s in (("same time yesterday", DAY_S), ("same time last week", WEEK_S)):
        if series.num_steps(period_s) < begin:
            fitted_by_method[name] = SeasonalNaive(series.num_steps(period_s))
    for name, fitted in fitted_by_method.items():
        misses_by_method[name] = came - fitted.predict(counts, origins, HORIZON)
    errors = {name: float(np.nanmean(np.abs(misses[:, 0]))) for name, misses in misses_by_method.items()}
    best = min(errors, key=errors.__getitem__)
    naive = errors["last value"]
    if errors[best] >= (1.0 - MARGIN) * naive:
        best = "last value"
    excess = np.nanquantile(misses_by_method[best], 1.0 - MISS, axis=0)
    return Chosen(best, fitted_by_method[best], excess, errors[best] / naive if naive else None)
