"""Limits the cost of wrong forecasts to a share of all devices' time, saved up for two hours at most."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hearth.policy.fleet.records import PrewarmHold

#: As much as pays for a model on a whole device over the default `keep_alive`, and a little more.
MAX_SAVED_S = 7200.0


@dataclass(slots=True)
class PrewarmBudget:
    """Seconds of whole devices. Mutable; written only by `step`.

    A hold takes all that it may cost in advance, and gives it back if a request comes in time. So in any time
    T, what is lost to wrong forecasts is at most `share` x the number of devices x (T + `MAX_SAVED_S`).
    """

    device_s: float = 0.0
    at_s: float | None = None  #: to which it has grown; None: it has never been used
    per_s: float = 0.0
    machine_s: float = -math.inf  #: when a machine was last ordered for a forecast

    def grow(self, now_s: float, per_s: float) -> None:
        """Add what has been saved since the last call. `per_s`: from now on."""
        elapsed_s = 0.0 if self.at_s is None else max(0.0, now_s - self.at_s)
        self.device_s = min(self.device_s + elapsed_s * self.per_s, per_s * MAX_SAVED_S)
        self.at_s, self.per_s = now_s, per_s

    def take(self, cost_s: float) -> bool:
        """Take `cost_s` if there is as much; False: there is not."""
        if cost_s > self.device_s:
            return False
        self.device_s -= cost_s
        return True

    def give_back(self, hold: PrewarmHold, now_s: float) -> None:
        if now_s <= hold.until_s:
            self.device_s = min(self.device_s + hold.cost_s, self.per_s * MAX_SAVED_S)
