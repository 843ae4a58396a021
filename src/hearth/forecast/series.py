"""How many requests came for a model, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.float64]

DAY_S, WEEK_S = 86_400.0, 7 * 86_400.0


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    counts: Numbers  #: requests in each step, the newest last; NaN: not recorded
    step_s: float

    def without_gaps(self) -> Numbers:
        """Return the counts from the first recorded one on; one that is missing is as the one before it."""
        recorded = np.flatnonzero(~np.isnan(self.counts))
        if not len(recorded):
            return np.zeros(0)
        known = self.counts[recorded[0] :]
        newest = np.maximum.accumulate(np.where(np.isnan(known), 0, np.arange(len(known))))
        filled: Numbers = known[newest]
        return filled

    def num_steps(self, period_s: float) -> int:
        return max(1, round(period_s / self.step_s))
