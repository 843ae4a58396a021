"""Drawing without sorting, beside the reference that sorts: the same tokens from the same seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from hearth.kernels.draw import draw_tokens_reference, draw_tokens_triton
from hearth.kernels.noise import gumbel, noise_keys
from tests.kernels.cases import DEVICES

INF = math.inf


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of logits with the knobs of their slots."""

    logits: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    knobs: torch.Tensor
    seeds: torch.Tensor

    @property
    def chosen(self) -> torch.Tensor:
        """Each row's highest logit as a greedy step leaves it."""
        best, tokens = self.logits.max(-1)
        return torch.stack((tokens.int(), best.view(torch.int32)), 1)

    def scores(self, row: int) -> torch.Tensor:
        """What the tokens of a row are drawn by, of those that no rule forbids."""
        slot = int(self.slots[row])
        logits, best = self.logits[row].cpu(), self.logits[row].max().cpu()
        keys = noise_keys(self.seeds.cpu()[slot : slot + 1], self.positions.cpu()[row : row + 1] + 1)
        return (logits - best) / self.knobs[slot, 0].cpu() + gumbel(keys, len(logits))[0]


def case(
    num_rows: int, vocab_size: int, knobs: list[tuple[float, ...]], device: str, step: float = 0
) -> Case:
    """Random logits, in multiples of `step` if there is one; knobs go around the slots."""
    generator = torch.Generator().manual_seed(vocab_size + num_rows)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
    if step:
        logits = (logits / step).round() * step
    slots = torch.randperm(num_rows + 3, generator=generator)[:num_rows].int()
    positions = torch.randint(0, 1000, (num_rows,), generator=generator).int()
    table = torch.tensor([knobs[slot % len(knobs)] for slot in range(num_rows + 4)], dtype=torch.float32)
    table[:, 1].clamp_(max=vocab_size)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows + 4,), generator=generator)
    return Case(*(one.to(device) for one in (logits, slots, positions, table, seeds)))


def drawn(given: Case, *, by_kernel: bool) -> tuple[list[int], list[int]]:
    """The tokens of the rows, and the last one of each slot."""
    chosen, last_tokens = given.chosen, torch.full((len(given.seeds),), -1, device=given.logits.device)
    draw = draw_tokens_triton if by_kernel else draw_tokens_reference
    columns = (given.slots, given.positions, given.knobs, given.seeds)
    draw(given.logits, *columns, chosen=chosen, last_tokens=last_tokens)
    return chosen[:, 0].tolist(), last_tokens.tolist()


def assert_equal(given: Case) -> None:
    expected, expected_last = drawn(given, by_kernel=False)
    tokens, last_tokens = drawn(given, by_kernel=True)
    for row, (token, other) in enumerate(zip(tokens, expected, strict=True)):
        if token != other:  # the last bits of sums and logarithms are free
            scores = given.scores(row)
            assert abs(float(scores[token] - scores[other])) < 1e-5, f"{row=} {token=} {other=}"
            expected_last[int(given.slots[row])] = token
    assert last_tokens == expected_last


KNOBS = {
    "greedy": (0.0, 1e6, INF, -INF),
    "plain": (1.0, 1e6, INF, -INF),
    "cold": (0.01, 1e6, INF, -INF),
    "hot": (50.0, 1e6, INF, -INF),
    "top_k": (0.8, 7, INF, -INF),
    "top_p": (0.8, 1e6, 0.9, -INF),
    "narrow_top_p": (5.0, 1e6, 0.05, -INF),
    "both": (1.5, 40, 0.7, -INF),
    "min_p": (1.2, 1e6, INF, math.log(0.1)),
    "all": (1.2, 60, 0.95, math.log(0.02)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [1, 7, 2049, 8200])
def test_kernels_draw_what_the_reference_draws(device: str, vocab_size: int) -> None:
    assert_equal(case(10, vocab_size, list(KNOBS.values()), device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["top_k", "narrow_top_p", "all"])
def test_kernels_draw_what_the_reference_draws_where_many_logits_are_equal(device: str, kind: str) -> None:
    assert_equal(case(6, 601, [KNOBS[kind]], device, step=0.5))


@pytest.mark.parametrize("device", DEVICES)
def test_forbidden_tokens_are_never_drawn_and_broken_rows_end(device: str) -> None:
    given = case(6, 300, [KNOBS["plain"], KNOBS["both"], KNOBS["narrow_top_p"]], device)
    given.logits[:3, 10:] = -INF
    given.logits[3, 77], given.logits[4, 78] = math.nan, INF
    given.logits[5] = -INF

    tokens, _ = drawn(given, by_kernel=True)

    assert max(tokens[:3]) < 10
    assert all(0 <= token < 300 for token in tokens)
    rows = (one[:3] for one in (given.logits, given.slots, given.positions))
    assert_equal(Case(*rows, given.knobs, given.seeds))
