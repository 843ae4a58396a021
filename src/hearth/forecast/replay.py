"""The forecasts that a service would have made of a workload, for its simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hearth.core.forecast_messages import LONG_STEP_S, NUM_STEPS
from hearth.core.types import ModelId
from hearth.forecast.forecaster import Forecaster
from hearth.forecast.series import Numbers, Series
from hearth.policy.fleet.events import DemandForecast


def replay(
    before: Mapping[ModelId, Sequence[float]], arrivals_s: Mapping[ModelId, Sequence[float]], length_s: float
) -> Iterator[DemandForecast]:
    """Yield what is forecast after each step of a workload, from what has come until then.

    `before`: requests of each model in the steps before the workload; all have as many steps.
    """
    num_before, num_steps = max(map(len, before.values()), default=0), math.ceil(length_s / LONG_STEP_S)
    counts: dict[ModelId, Numbers] = {}
    for model, times_s in arrivals_s.items():
        come = np.bincount((np.asarray(times_s) // LONG_STEP_S).astype(int), minlength=num_steps)
        counts[model] = np.concatenate([before.get(model, [0.0] * num_before), come])
    forecaster = Forecaster()
    for step in range(num_steps):
        end, now_s = num_before + step, step * LONG_STEP_S
        newest = slice(max(0, end - NUM_STEPS), end)
        series = {model: Series(known[newest], LONG_STEP_S) for model, known in counts.items()}
        for one in forecaster.forecast(series if end else {}, now_s):
            yield DemandForecast(now_s, one.model, one.step_s, one.mean_per_s, one.high_per_s)
