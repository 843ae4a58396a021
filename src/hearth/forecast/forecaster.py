"""Forecasts all models each time it is asked: chooses methods every day, and fits them every hour."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping

from hearth.core.forecast_messages import RequestForecast
from hearth.core.types import ModelId
from hearth.forecast.choice import Chosen, choose
from hearth.forecast.series import DAY_S, Series

HOUR_S = 3600.0

log = logging.getLogger(__name__)


class Forecaster:
    """Mutable; one caller."""

    def __init__(self) -> None:
        self._chosen: dict[ModelId, Chosen] = {}
        self._chosen_s = self._refitted_s = -math.inf

    def forecast(self, series: Mapping[ModelId, Series], now_s: float) -> Iterator[RequestForecast]:
        """Yield a forecast for each model. All series have the same step. `now_s` never goes back."""
        if now_s - self._chosen_s >= DAY_S:
            began_s = time.monotonic()
            self._chosen, self._chosen_s, self._refitted_s = choose(series), now_s, now_s
            log.info("methods_chosen num_models=%d seconds=%.1f", len(series), time.monotonic() - began_s)
        elif now_s - self._refitted_s >= HOUR_S:
            known = {
                name: one for name, one in self._chosen.items() if name in series and one.mase is not None
            }
            self._chosen = {name: one.refit(series[name]) for name, one in known.items()}
            self._refitted_s = now_s
        # Also those that had too little history an hour ago.
        self._chosen |= choose({name: one for name, one in series.items() if name not in self._chosen})
        for name, one in series.items():
            yield self._chosen[name].forecast(name, one)
