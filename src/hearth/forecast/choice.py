"""Chooses the method that would have forecast a model's recent past best.

every day     `choose`: trains the network, tries all methods, fits the best
every hour    `Chosen.refit`: fits the chosen method again
every step    `Chosen.forecast`: predicts from the newest counts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hearth.core.forecast_messages import RequestForecast
from hearth.core.types import ModelId
from hearth.forecast.hedge import Hedged, outcomes
from hearth.forecast.methods import Fitted, LastValue, Mean
from hearth.forecast.regression import fit_regression
from hearth.forecast.series import DAY_S, WEEK_S, Numbers, Series

#: How many steps are forecast.
HORIZON = 6
#: The probability that more requests come than the upper bound says.
MISS = 0.1
#: The recent past that is forecast to compare methods, and the fewest steps before it.
TRIED_S, MIN_HISTORY = 3 * DAY_S, 12

Fit = Callable[[Numbers, Series], Fitted | None]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The method for one model, fitted, and how it has done."""

    method: str
    fit: Fit
    fitted: Fitted
    excess: Numbers  #: for each step ahead, requests beyond the forecast, exceeded with probability `MISS`
    mase: float | None  #: as in `RequestForecast`

    def refit(self, series: Series) -> Chosen:
        """Return the same method with parameters that fit the series of now."""
        fitted = fit_hedged(self.fit, series.without_gaps(), series)
        return self if fitted is None else replace(self, fitted=fitted)

    def forecast(self, model: ModelId, series: Series) -> RequestForecast:
        counts = series.without_gaps()
        mean = np.zeros(HORIZON)
        if len(counts):
            mean = self.fitted.predict(counts, np.array([len(counts)]), HORIZON)[0]
        high = np.maximum(mean + self.excess, 0.0)
        mean_per_s, high_per_s = ((one / series.step_s).tolist() for one in (mean, high))
        return RequestForecast(
            model, self.method, series.step_s, tuple(mean_per_s), tuple(high_per_s), self.mase
        )


def choose(series_by_model: Mapping[ModelId, Series]) -> dict[ModelId, Chosen]:
    """Choose a method for each model. All series have the same step."""
    series = list(series_by_model.values())
    tried = methods(series, TRIED_S)
    fits = methods(series) if "network" in tried else tried
    return {model: choose_one(one, tried, fits) for model, one in series_by_model.items()}


def methods(series: Sequence[Series], without_s: float = 0.0) -> dict[str, Fit]:
    """Return all methods. The network is trained on all series but their last `without_s`."""
    fits: dict[str, Fit] = {"last value": _last_value, "regression": _regression}
    pasts = []
    for one in series:
        counts, day, week = one.without_gaps(), one.num_steps(DAY_S), one.num_steps(WEEK_S)
        past = counts[: max(0, len(counts) - round(without_s / one.step_s))]
        if len(past) >= 2 * day and np.any(past):
            pasts.append(past)
    if not pasts:
        return fits
    from hearth.forecast.network import Trained, scale_of, train  # torch needs memory

    network = train(pasts, day, week, HORIZON)

    def fit_network(counts: Numbers, series: Series) -> Fitted:
        return Trained(network, scale_of(counts), day, week)

    def fit_both(counts: Numbers, series: Series) -> Fitted | None:
        regression = _regression(counts, series)
        return regression and Mean((regression, fit_network(counts, series)))

    return {**fits, "network": fit_network, "network and regression": fit_both}


def _last_value(counts: Numbers, series: Series) -> Fitted:
    return LastValue()


def _regression(counts: Numbers, series: Series) -> Fitted | None:
    return fit_regression(counts, series.num_steps(DAY_S), series.num_steps(WEEK_S), HORIZON)


def choose_one(series: Series, tried: Mapping[str, Fit], fits: Mapping[str, Fit]) -> Chosen:
    """Choose among `tried`, which know nothing of the recent past, and fit the same method of `fits`."""
    counts = series.without_gaps()
    begin = max(MIN_HISTORY, len(counts) - series.num_steps(TRIED_S))
    if len(counts) - begin < HORIZON:
        return Chosen("last value", _last_value, LastValue(), np.zeros(HORIZON), None)
    origins = np.arange(begin, len(counts))
    came = outcomes(counts, origins, HORIZON)
    misses_by_method: dict[str, Numbers] = {}
    for method, fit in tried.items():
        if fitted := fit_hedged(fit, counts[:begin], series):
            misses_by_method[method] = came - fitted.predict(counts, origins, HORIZON)
    errors = {method: float(np.nanmean(np.abs(misses[:, 0]))) for method, misses in misses_by_method.items()}
    # Of those that are equally good, the first.
    best = min(errors, key=errors.__getitem__)
    naive = errors["last value"]
    excess = np.nanquantile(misses_by_method[best], 1.0 - MISS, axis=0)
    fitted = fit_hedged(fits[best], counts, series)
    assert fitted is not None, f"{best=} fits {begin=} counts, but not {len(counts)}"
    return Chosen(best, fits[best], fitted, excess, errors[best] / naive if naive else 1.0)


def fit_hedged(fit: Fit, counts: Numbers, series: Series) -> Fitted | None:
    fitted = fit(counts, series)
    return fitted and Hedged(fitted, window=series.num_steps(DAY_S))
