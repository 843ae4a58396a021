"""Counts GPU time in metrics: what models and keys were charged since the last time."""

from __future__ import annotations

from hearth.control.observe.metrics import Metrics
from hearth.core.types import ModelId
from hearth.policy.fleet.gpu_time import GpuTime, ModelTime, cost_of

#: Devices report more often, each for itself.
PERIOD_S = 1.0


class Charges:
    """Mutable; used on the event loop alone."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._charged_s = -PERIOD_S
        #: What was charged for models. A model that was removed begins anew.
        self._models: dict[ModelId, tuple[ModelTime, float, float]] = {}

    def charge(self, time: GpuTime, now_s: float) -> None:
        if now_s < self._charged_s + PERIOD_S:
            return
        self._charged_s, charged, self._models = now_s, self._models, {}
        for name in time.by_model:
            model = time.model(name, now_s)
            known, held_s, idle_s = charged.get(name, (model, 0.0, 0.0))
            if known is not model:
                held_s = idle_s = 0.0
            if (series := self._metrics.models.find(name)) is not None:
                series.device_s += model.held_s - held_s
                series.idle_s += model.idle_s - idle_s
            self._models[name] = model, model.held_s, model.idle_s
        for key, seconds in time.take_by_key().items():
            if key is not None:
                label = self._metrics.key_label(key)
                self._metrics.key_device_s.labels(label).inc(seconds)
                if (cost := cost_of(seconds, self._metrics.device_hour_price)) is not None:
                    self._metrics.key_cost.labels(label).inc(cost)
