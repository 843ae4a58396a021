"""How probable it is that a model is requested again soon."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

#: What the newest interval counts in the mean; all earlier ones together count the rest.
NEWEST_WEIGHT = 0.3

#: The interval of a model that was asked for once: there is none to measure yet.
PRIOR_INTERVAL_S = 3600.0
#: A model is taken to be asked for no more often than this.
MIN_INTERVAL_S = 0.001


@dataclass(slots=True)
class DemandHistory:
    last_s: float
    mean_interval_s: float | None = None  #: None after one request

    def interval_s(self, now_s: float) -> float:
        mean_s = PRIOR_INTERVAL_S if self.mean_interval_s is None else self.mean_interval_s
        return max(mean_s, now_s - self.last_s)


@dataclass(slots=True)
class Demand:
    """How often each model is requested. Mutable; one caller at a time."""

    history_by_model: dict[str, DemandHistory] = field(default_factory=dict)
    #: Only the last request counts, as for "least recently used".
    by_last_use: bool = False

    def arrived(self, model: str, now_s: float, num_requests: int = 1) -> None:
        """Count requests since the last call; several are assumed evenly spaced."""
        assert num_requests >= 1, f"{num_requests=}"
        history = self.history_by_model.get(model)
        if history is None:
            self.history_by_model[model] = DemandHistory(now_s)
            return
        interval_s = max(0.0, now_s - history.last_s) / num_requests
        mean_s = interval_s if history.mean_interval_s is None else history.mean_interval_s
        kept = (1 - NEWEST_WEIGHT) ** num_requests
        history.mean_interval_s = interval_s + kept * (mean_s - interval_s)
        history.last_s = max(now_s, history.last_s)

    def forget(self, model: str) -> None:
        self.history_by_model.pop(model, None)

    def probability(self, model: str, now_s: float, horizon_s: float) -> float:
        history = self.history_by_model.get(model)
        if history is None or horizon_s <= 0:
            return 0.0
        interval_s = self._interval_s(history, now_s)
        return -math.expm1(-horizon_s / interval_s) if interval_s > 0 else 1.0

    def requests_per_s(self, model: str, now_s: float) -> float:
        history = self.history_by_model.get(model)
        return 0.0 if history is None else 1 / max(self._interval_s(history, now_s), MIN_INTERVAL_S)

    def _interval_s(self, history: DemandHistory, now_s: float) -> float:
        return now_s - history.last_s if self.by_last_use else history.interval_s(now_s)
