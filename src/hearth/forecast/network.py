"""A network for the busiest models, trained on all of them: how counts stray from what is usual at the time.

What is usual is the median of the days before. The network is an LSTM, as in FlashServe. It sees each count
relative to it and says which share of the usual change to expect, and what change beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hearth.forecast.methods import Origins
from hearth.forecast.series import Numbers

NUM_UNITS, NUM_LAYERS, NUM_DAYS = 128, 2, 7
NUM_ROUNDS, NUM_SEQUENCES, NUM_STEPS, RATE = 300, 32, 120, 3e-3
#: Steps that the network has seen before its predictions are used.
WARM_UP = 96


class StrayLSTM(nn.Module):
    def __init__(self, horizon: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3 + horizon, NUM_UNITS, NUM_LAYERS, batch_first=True)
        self.head = nn.Linear(NUM_UNITS, 2 * horizon)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the change until each of the next steps, after each step. Rows: see `_rows`."""
        usual_changes = rows[..., 3:]
        share, beyond = self.head(self.lstm(torch.asinh(rows))[0]).chunk(2, dim=-1)
        changes: Tensor = torch.sigmoid(share) * usual_changes + beyond
        return changes


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    network: StrayLSTM
    scale: float  #: by how much roots of counts change in a step
    day: int

    def predict(self, counts: Numbers, origins: Origins, horizon: int) -> Numbers:
        begin, end = max(0, int(origins.min()) - WARM_UP), int(origins.max())
        roots = np.sqrt(counts) / self.scale
        rows = torch.from_numpy(_rows(roots, self.day, horizon)[begin:end]).float()
        with torch.inference_mode():
            changes = self.network(rows).numpy()[origins - 1 - begin]
        expected = np.maximum(roots[origins - 1][:, None] + changes, 0.0) * self.scale
        predicted: Numbers = expected**2
        return predicted


def scale_of(counts: Numbers) -> float:
    return float(np.abs(np.diff(np.sqrt(counts))).mean()) + 1e-6 if len(counts) > 1 else 1.0


def train(series: Sequence[Numbers], day: int, horizon: int) -> StrayLSTM:
    """Train a network on counts of several models. Those of less than two days are left out."""
    all_roots = [np.sqrt(counts) / scale_of(counts) for counts in series if len(counts) >= 2 * day]
    all_rows = [_rows(roots, day, horizon) for roots in all_roots]
    all_changes = [_changes(roots, horizon) for roots in all_roots]
    num_steps = min(NUM_STEPS, *(len(changes) - day for changes in all_changes))
    chance = np.random.default_rng(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = StrayLSTM(horizon)
    optimizer = torch.optim.Adam(network.parameters())
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=NUM_ROUNDS)
    nearer = 1.0 / torch.arange(1, horizon + 1)
    for _ in range(NUM_ROUNDS):
        parts = []
        for model in chance.integers(0, len(all_roots), NUM_SEQUENCES):
            begin = chance.integers(day, len(all_changes[model]) - num_steps + 1)
            parts.append((model, slice(begin, begin + num_steps)))
        rows, changes = (
            torch.from_numpy(np.stack([each[model][part] for model, part in parts])).float()
            for each in (all_rows, all_changes)
        )
        loss = ((network(rows) - changes).abs() * nearer).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        rate.step()
    return network


def _changes(roots: Numbers, horizon: int) -> Numbers:
    """Return the changes until each of the next steps, after each step that has so many after it."""
    later = np.lib.stride_tricks.sliding_window_view(roots[1:], horizon)
    changes: Numbers = later - roots[: len(later), None]
    return changes


def _rows(roots: Numbers, day: int, horizon: int) -> Numbers:
    """Return for each step: root, change, how far it strays, and the usual changes until the next steps."""
    steps = np.arange(len(roots) + horizon)
    before = steps[:, None] - day * np.arange(1, NUM_DAYS + 1)
    days = np.where(before >= 0, roots[np.maximum(before, 0)], np.nan)
    usual = np.zeros(len(steps))
    usual[day:] = np.nanmedian(days[day:], axis=1)
    past = usual[: len(roots)]
    seen = np.stack([roots, np.diff(roots, prepend=roots[:1]), roots - past], axis=1)
    return np.concatenate([seen, _changes(usual, horizon)], axis=1)
