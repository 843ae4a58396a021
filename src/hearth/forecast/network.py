"""A network that is trained on all models: what in the recent and the usual counts of any model recurs.

It has the inputs of the regression, relative to how much the model's counts change in a step, so that one
network fits models of all sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hearth.forecast.methods import Origins
from hearth.forecast.regression import recent_inputs, usual_inputs
from hearth.forecast.series import Numbers

NUM_UNITS, DROPOUT, NUM_ROUNDS, NUM_SAMPLES, RATE = 64, 0.1, 1000, 2048, 3e-3
#: Rows of all models that are trained on.
NUM_ROWS = 150_000


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    network: nn.Module
    scale: float  #: by how much roots of counts change in a step
    day: int
    week: int

    def predict(self, counts: Numbers, origins: Origins, horizon: int) -> Numbers:
        roots = np.sqrt(counts) / self.scale
        rows = _rows(roots, origins, self.day, self.week, horizon)
        with torch.inference_mode():
            changes = self.network(torch.from_numpy(rows)).numpy()
        expected: Numbers = np.maximum(roots[origins - 1][:, None] + changes, 0.0) * self.scale
        return expected**2


def scale_of(counts: Numbers) -> float:
    return float(np.abs(np.diff(np.sqrt(counts))).mean()) + 1e-6 if len(counts) > 1 else 1.0


def train(series: Sequence[Numbers], day: int, week: int, horizon: int) -> nn.Module:
    """Train a network on counts of several models, each of two days at least."""
    chance = np.random.default_rng(0)
    all_rows, all_changes = [], []
    for counts in series:
        roots = np.sqrt(counts) / scale_of(counts)
        origins = np.arange(day, len(counts) - horizon + 1)
        origins = chance.permutation(origins)[: NUM_ROWS // len(series) + 1]
        later = np.lib.stride_tricks.sliding_window_view(roots, horizon)[origins]
        all_rows.append(_rows(roots, origins, day, week, horizon))
        all_changes.append((later - roots[origins - 1][:, None]).astype(np.float32))
    rows, changes = (torch.from_numpy(np.concatenate(each)) for each in (all_rows, all_changes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = _network(rows.std(dim=0) > 1e-6, horizon)
        optimizer = torch.optim.AdamW(network.parameters(), weight_decay=1e-3)
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=NUM_ROUNDS)
        nearer = 1.0 / torch.arange(1, horizon + 1)
        for _ in range(NUM_ROUNDS):
            some = torch.randint(len(rows), (NUM_SAMPLES,))
            loss = ((network(rows[some]) - changes[some]).abs() * nearer).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rate.step()
    return network.eval()


def _network(known: Tensor, horizon: int) -> nn.Module:
    """Return a network that expects no change yet and never heeds inputs that are not `known`."""
    first, last = nn.Linear(len(known), NUM_UNITS), nn.Linear(NUM_UNITS, horizon)
    with torch.no_grad():
        first.weight[:, ~known] = 0.0
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    hidden = nn.Linear(NUM_UNITS, NUM_UNITS)
    return nn.Sequential(first, nn.SiLU(), nn.Dropout(DROPOUT), hidden, nn.SiLU(), nn.Dropout(DROPOUT), last)


def _rows(roots: Numbers, origins: Origins, day: int, week: int, horizon: int) -> npt.NDArray[np.float32]:
    sums = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(roots, prepend=roots[:1])))])
    begin = np.maximum(origins - day, 0)
    restless = (sums[origins] - sums[begin]) / (origins - begin)
    newest = roots[origins - 1]
    inputs = [
        np.stack([newest, newest == 0, restless], axis=1),
        recent_inputs(roots, origins),
        *(usual_inputs(roots, origins, day, week, ahead) for ahead in range(horizon)),
    ]
    rows: npt.NDArray[np.float32] = np.arcsinh(np.concatenate(inputs, axis=1)).astype(np.float32)
    return rows
