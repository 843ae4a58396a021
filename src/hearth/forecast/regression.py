"""Predicts by how recent counts and those of the day and the week before differed from the newest one.

Square roots of counts are regressed, so that a burst does not weigh more than all else, by least absolute
deviations: what does not recur is ignored. Does not know how counts came about.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hearth.forecast.methods import Origins
from hearth.forecast.series import Numbers

LAGS = (2, 3, 4, 5, 6, 12)
MEANS = (6, 36)
#: Steps whose extremes are inputs, and those whose median is.
SPAN, MEDIAN = 12, 5
RIDGE, NUM_ITERATIONS = 10.0, 12
#: Fewer are too few to tell what recurs; more are too old.
MIN_ROWS, MAX_ROWS = 36, 1500


@dataclass(frozen=True, slots=True, eq=False)
class Regression:
    weights: Numbers  #: a row for each step ahead
    day: int
    week: int

    def predict(self, counts: Numbers, origins: Origins, horizon: int) -> Numbers:
        roots = np.sqrt(counts)
        recent = recent_inputs(roots, origins)
        steps = []
        for ahead, weights in enumerate(self.weights[:horizon]):
            usual = usual_inputs(roots, origins, self.day, self.week, ahead)
            steps.append(np.concatenate([recent, usual], axis=1) @ weights)
        changed: Numbers = np.maximum(roots[origins - 1][:, None] + np.stack(steps, axis=1), 0.0)
        return changed * changed


def fit_regression(counts: Numbers, day: int, week: int, horizon: int) -> Regression | None:
    num_rows = min(len(counts) - max(LAGS) - horizon, MAX_ROWS)
    if num_rows < MIN_ROWS:
        return None
    roots = np.sqrt(counts)
    origins = np.arange(len(counts) - horizon - num_rows, len(counts) - horizon) + 1
    recent, weights = recent_inputs(roots, origins), []
    for ahead in range(horizon):
        inputs = np.concatenate([recent, usual_inputs(roots, origins, day, week, ahead)], axis=1)
        weights.append(_least_absolute(inputs, roots[origins + ahead] - roots[origins - 1]))
    return Regression(np.stack(weights), day, week)


def recent_inputs(roots: Numbers, origins: Origins) -> Numbers:
    """Return roots of the last hours, and what they come to, less the newest."""
    newest = roots[origins - 1]
    earlier = [_at(roots, origins - lag, newest) for lag in LAGS]
    sums = np.concatenate([[0.0], np.cumsum(roots)])
    for width in MEANS:
        begin = np.maximum(origins - width, 0)
        earlier.append((sums[origins] - sums[begin]) / (origins - begin))
    recent = np.stack([_at(roots, origins - lag, newest) for lag in range(1, SPAN + 1)])
    earlier += [recent.max(axis=0), recent.min(axis=0), np.median(recent[:MEDIAN], axis=0)]
    return np.stack(earlier, axis=1) - newest[:, None]


def usual_inputs(roots: Numbers, origins: Origins, day: int, week: int, ahead: int) -> Numbers:
    """Return roots of the same time on earlier days, and what they come to, less the newest."""
    newest = roots[origins - 1]
    earlier = [
        _at(roots, np.minimum(origins + ahead - period + shift, origins - 1), newest)
        for period in (day, week)
        for shift in (-1, 0, 1)
    ]
    usual_then, usual_now = (
        np.median(
            [_at(roots, origins + shift - period, newest) for period in range(day, week + 1, day)], axis=0
        )
        for shift in (ahead, -1)
    )
    earlier += [usual_then, usual_then - usual_now + newest]
    return np.stack(earlier, axis=1) - newest[:, None]


def _at(roots: Numbers, steps: Origins, newest: Numbers) -> Numbers:
    """Return the roots of these steps; the newest before the first."""
    return np.where(steps >= 0, roots[np.maximum(steps, 0)], newest)


def _least_absolute(inputs: Numbers, wanted: Numbers) -> Numbers:
    """Return weights by least squares, iterated: each row weighs less the farther it was off."""
    scale = inputs.std(axis=0) + 1e-9
    rows = inputs / scale
    ridge = RIDGE * np.eye(rows.shape[1])
    least = 1e-2 * float(np.abs(wanted).mean()) + 1e-9
    weights = np.zeros(rows.shape[1])
    for _ in range(NUM_ITERATIONS):
        share = 1.0 / np.maximum(np.abs(wanted - rows @ weights), least)
        weighted = rows * (share / share.mean())[:, None]
        weights = np.linalg.solve(weighted.T @ rows + ridge, weighted.T @ wanted)
    found: Numbers = weights / scale
    return found
