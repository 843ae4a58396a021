"""Times that the brain has learnt: how long requests run, and what reloading a model costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from hearth.core.types import ModelId
from hearth.policy.memory.reload_cost import ReloadCosts

PRIOR_RUN_S = 1.0
NEWEST_WEIGHT = 0.2


@dataclass(slots=True)
class Estimates:
    reload: ReloadCosts
    mean_run_s: float | None = None
    run_s_by_model: dict[ModelId, float] = field(default_factory=dict)

    def ran(self, model: ModelId, seconds: float) -> None:
        """Learn the run time of a request, from when its worker could run it."""
        self.mean_run_s = _averaged(self.mean_run_s, seconds)
        self.run_s_by_model[model] = _averaged(self.run_s_by_model.get(model), seconds)

    def forget(self, model: ModelId) -> None:
        self.run_s_by_model.pop(model, None)
        self.reload.forget(model)

    def run_s(self, model: ModelId | None = None) -> float:
        known_s = self.mean_run_s if model is None else self.run_s_by_model.get(model, self.mean_run_s)
        return PRIOR_RUN_S if known_s is None else known_s


def _averaged(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + NEWEST_WEIGHT * (newest - mean)
