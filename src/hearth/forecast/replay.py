"""The forecasts that a service would have made of a workload, for its simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hearth.core.types import ModelId
from hearth.forecast.forecaster import Forecaster
from hearth.forecast.series import Numbers, Series
from hearth.policy.fleet.events import DemandForecast

#: As a service records them, see `control/request_history.py`.
STEP_S, MAX_STEPS = 600.0, 2160


def replay(
    before: Mapping[ModelId, Sequence[float]], arrivals_s: Mapping[ModelId, Sequence[float]], length_s: float
) -> Iterator[DemandForecast]:
    """Yield what is forecast after each step of a workload, from what has come until then.

    `before`: requests of each model in the steps before the workload; all have as many steps.
    """
    num_before, num_steps = max(map(len, before.values()), default=0), math.ceil(length_s / STEP_S)
    counts: dict[ModelId, Numbers] = {}
    for model, times_s in arrivals_s.items():
        come = np.bincount((np.asarray(times_s) // STEP_S).astype(int), minlength=num_steps)
        counts[model] = np.concatenate([before.get(model, [0.0] * num_before), come])
    forecaster = Forecaster()
    for step in range(num_steps):
        end = num_before + step
        series = {
            model: Series(known[max(0, end - MAX_STEPS) : end], STEP_S) for model, known in counts.items()
        }
        for one in forecaster.forecast(series if end else {}, step * STEP_S):
            yield DemandForecast(step * STEP_S, one.model, one.step_s, one.mean_per_s, one.high_per_s, 0.0)
