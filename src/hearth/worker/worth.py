"""What it is worth to keep a model's bytes on this worker (T2), from what was asked and loaded here.

Keeps no memory and takes none.
"""

from __future__ import annotations

from hearth.policy.memory.bandwidth import RunningRate
from hearth.policy.memory.demand import Demand
from hearth.policy.memory.reload_cost import HORIZON_S, reload_cost
from hearth.types import ModelId

#: Of host memory, until a model has been loaded.
PRIOR_BYTES_PER_S = 20e9


class Worth:
    """Mutable; the step thread alone calls it."""

    def __init__(self) -> None:
        self._demand = Demand()
        self._weights: dict[ModelId, float] = {}  #: T2's alpha of every model that was hosted here
        self._rates: dict[ModelId, RunningRate] = {}  #: at which its bytes came

    def hosted(self, model: ModelId, weight: float) -> None:
        self._weights[model] = weight

    def asked(self, model: ModelId, now_s: float) -> None:
        self._demand.arrived(model, now_s)

    def loaded(self, model: ModelId, num_bytes: int, seconds: float) -> None:
        self._rates.setdefault(model, RunningRate()).add(num_bytes, seconds)

    def forget(self, model: ModelId) -> None:
        """Another of the same name may be nothing like it."""
        self._demand.forget(model)
        self._weights.pop(model, None)
        self._rates.pop(model, None)

    def cost_s_per_byte(self, model: ModelId, now_s: float) -> float:
        """What it is expected to cost to have one byte back."""
        p_miss = self._demand.probability(model, now_s, HORIZON_S)
        rate = self._rates.get(model)
        bytes_per_s = (rate and rate.bytes_per_s) or PRIOR_BYTES_PER_S
        return reload_cost(p_miss, 1 / bytes_per_s, self._weights.get(model, 1.0))
