"""Stays near the last value while that is better. Does not choose a method."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hearth.forecast.methods import Fitted, LastValue, Origins
from hearth.forecast.series import Numbers

SHARES = np.linspace(0.0, 1.0, 5)


@dataclass(frozen=True, slots=True)
class Hedged:
    """Between the last value and a method, at the share that was best in the `window` steps before."""

    fitted: Fitted
    window: int

    def predict(self, counts: Numbers, origins: Origins, horizon: int) -> Numbers:
        begin = max(1, int(origins.min()) - self.window - horizon)
        tried = np.arange(begin, int(origins.max()) + 1)
        last = LastValue().predict(counts, tried, horizon)
        change = self.fitted.predict(counts, tried, horizon) - last
        missed = outcomes(counts, tried, horizon) - last
        errors = np.nan_to_num(np.abs(missed - SHARES[:, None, None] * change))
        sums = np.concatenate([np.zeros_like(errors[:, :1]), np.cumsum(errors, axis=1)], axis=1)
        # What an origin expected for `ahead` steps later is known to those that come after that step.
        ahead = np.arange(horizon)
        known = np.maximum(origins[:, None] - begin - ahead, 0)
        recent = sums[:, known, ahead] - sums[:, np.maximum(known - self.window, 0), ahead]
        share = SHARES[np.argmin(recent, axis=0)]
        now = origins - begin
        predicted: Numbers = last[now] + share * change[now]
        return predicted


def outcomes(counts: Numbers, origins: Origins, horizon: int) -> Numbers:
    """Return what came in the `horizon` steps after each origin; NaN: not known yet."""
    padded = np.concatenate([counts, np.full(horizon, np.nan)])
    came: Numbers = np.lib.stride_tricks.sliding_window_view(padded, horizon)[origins]
    return came
