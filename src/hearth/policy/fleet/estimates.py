"""What the brain has learnt of times: how fast rungs deliver, how long requests run, who is asked for again.

Running averages over what the events said. Decides nothing, measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from hearth.policy.memory.bandwidth import RunningRate
from hearth.policy.memory.demand import Demand
from hearth.policy.memory.eviction import reload_cost
from hearth.types import ModelId, Rung

#: A model is worth keeping for requests that come within this time.
HORIZON_S = 600.0
#: How long a request runs, until the first one has.
PRIOR_RUN_S = 1.0
#: What the newest run counts in a mean; all earlier ones together count the rest.
NEWEST_WEIGHT = 0.2


class Estimates:
    """Mutable; written only by `step`."""

    def __init__(self, priors: Mapping[Rung, float]) -> None:
        self.demand = Demand()
        self._priors = priors
        self._rates = {rung: RunningRate() for rung in Rung}
        self._mean_run_s: float | None = None
        self._run_s_by_model: dict[ModelId, float] = {}

    def moved(self, rung: Rung, num_bytes: int, seconds: float) -> None:
        self._rates[rung].add(num_bytes, seconds)

    def ran(self, model: ModelId, seconds: float) -> None:
        """One request, from when its worker could run it to its end."""
        self._mean_run_s = _averaged(self._mean_run_s, seconds)
        self._run_s_by_model[model] = _averaged(self._run_s_by_model.get(model), seconds)

    def forget(self, model: ModelId) -> None:
        """It was removed: another of the same name may be nothing like it."""
        self._run_s_by_model.pop(model, None)
        self.demand.forget(model)

    def run_s(self, model: ModelId | None = None) -> float:
        """How long a request runs: of that model, of all where it has shown none yet."""
        known_s = self._mean_run_s if model is None else self._run_s_by_model.get(model, self._mean_run_s)
        return PRIOR_RUN_S if known_s is None else known_s

    def load_s(self, num_bytes: int, bytes_by_rung: Mapping[Rung, int] | None) -> float:
        """Missing bytes per rung over its speed (T6); what nobody has reported on is taken to be on disk."""
        if bytes_by_rung is None:
            return num_bytes / self._bytes_per_s(Rung.DISK)
        host_bytes = min(num_bytes, bytes_by_rung.get(Rung.HOST, 0))
        disk_bytes = min(num_bytes - host_bytes, bytes_by_rung.get(Rung.DISK, 0))
        object_bytes = num_bytes - host_bytes - disk_bytes
        return (
            host_bytes / self._bytes_per_s(Rung.HOST)
            + disk_bytes / self._bytes_per_s(Rung.DISK)
            + object_bytes / self._bytes_per_s(Rung.OBJECT)
        )

    def eviction_cost_s(
        self, model: ModelId, num_bytes: int, load_s: float, weight: float, now_s: float
    ) -> float:
        """T2: what it is expected to cost to have the model back, from the rungs it would come from."""
        if load_s <= 0:
            return 0.0
        p_miss = self.demand.probability(model, now_s, HORIZON_S)
        return reload_cost(p_miss, num_bytes, num_bytes / load_s, weight)

    def _bytes_per_s(self, rung: Rung) -> float:
        return self._rates[rung].bytes_per_s or self._priors[rung]


def _averaged(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + NEWEST_WEIGHT * (newest - mean)
