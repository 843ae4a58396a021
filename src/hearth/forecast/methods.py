"""The methods of forecasting. Each is fitted to the past and then predicts from any point of time.

`counts` are those of `Series.without_gaps`. An origin is a number of counts that are known: a prediction from
`origin` depends on `counts[:origin]` alone, so one call predicts as it would have been predicted each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hearth.forecast.series import Numbers

Origins = npt.NDArray[np.int64]


class Fitted(Protocol):
    """A method with its parameters."""

    def predict(self, counts: Numbers, origins: Origins, horizon: int) -> Numbers:
        """Return a row for each origin: what is expected in the next `horizon` steps. Origins are over 0."""
        ...


@dataclass(frozen=True, slots=True)
class LastValue:
    """The next counts are as the newest."""

    def predict(self, counts: Numbers, origins: Origins, horizon: int) -> Numbers:
        return np.repeat(counts[origins - 1][:, None], horizon, axis=1)


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of what several methods predict."""

    methods: tuple[Fitted, ...]

    def predict(self, counts: Numbers, origins: Origins, horizon: int) -> Numbers:
        predicted = [method.predict(counts, origins, horizon) for method in self.methods]
        mean: Numbers = np.mean(predicted, axis=0)
        return mean
