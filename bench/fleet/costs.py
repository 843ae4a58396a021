"""How long things take in a simulation: loads by the speed of rungs, runs at random. Moves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from hearth.core.types import Rung
from hearth.policy.fleet.events import RungUse


@dataclass(frozen=True, slots=True)
class CostModel:
    """The times of a simulated service. Draws from `chooser`, whose seed makes a simulation repeatable."""

    chooser: Random
    bytes_per_s: Mapping[Rung, float]  #: that each rung delivers to a device
    mean_run_s: float  #: of a request; run times are distributed exponentially
    cancelled_share: float = 0.0  #: of requests, those whose clients go away before the end
    #: A request ends so long after its dispatch even where its model was loading all the while.
    runs_from_dispatch: bool = False

    def plan_load(self, num_bytes: int, host_bytes: int) -> tuple[RungUse, ...]:
        """Return how long each rung delivers to a load; what is not in host memory comes from disk."""
        from_host = min(num_bytes, host_bytes)
        parts = ((Rung.HOST, from_host), (Rung.DISK, num_bytes - from_host))
        return tuple(RungUse(rung, part, part / self.bytes_per_s[rung]) for rung, part in parts if part)

    def draw_run_s(self) -> float:
        """Draw how long a request runs."""
        return self.chooser.expovariate(1 / self.mean_run_s)

    def draw_cancelled(self) -> bool:
        """Draw whether the client of a request goes away instead of waiting for its end."""
        return self.chooser.random() < self.cancelled_share
