"""Top-k and top-p against a slow count over sorted values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hearth.kernels.top_k_top_p import rank_cutoff


def cutoff(rows: list[list[float]], top_ks: list[int], top_ps: list[float]) -> list[float]:
    knobs = torch.tensor([top_ks, [p if p < 1 else math.inf for p in top_ps]]).unsqueeze(-1)
    return rank_cutoff(torch.tensor(rows), knobs[0], knobs[1], top_ks).flatten().tolist()


@given(st.data(), st.integers(1, 30))
def test_keeps_the_k_best_and_of_these_the_fewest_that_reach_p(data: st.DataObject, size: int) -> None:
    values = st.lists(st.integers(-12, 12).map(lambda v: v / 4), min_size=size, max_size=size)
    rows = data.draw(st.lists(values, min_size=1, max_size=4))
    top_ks = [data.draw(st.integers(1, size)) for _ in rows]
    top_ps = [data.draw(st.sampled_from([1.0, 0.01, 0.35, 0.8, 0.97])) for _ in rows]
    expected = []
    for row, top_k, top_p in zip(rows, top_ks, top_ps, strict=True):
        best = np.sort(np.array(row))[::-1][:top_k]
        reached = np.cumsum(np.exp(best)) / np.exp(best).sum()
        assume(top_p == 1.0 or np.abs(reached - top_p).min() > 1e-5)
        expected.append(best[-1] if top_p == 1.0 else best[np.argmax(reached >= top_p)])

    assert cutoff(rows, top_ks, top_ps) == expected


@pytest.mark.parametrize("spread", [0.01, 2.0, 10.0])
def test_a_nucleus_is_exact_however_many_tokens_it_holds(spread: float) -> None:
    logits = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(0)) * spread
    reached = logits.sort(descending=True).values.double().softmax(-1).cumsum(-1)
    expected = logits.sort(descending=True).values.gather(1, (reached < 0.9).sum(-1, keepdim=True))

    found = cutoff(logits.tolist(), [20_000, 20_000, 20], [0.9, 0.9, 1.0])

    assert found[:2] == expected.flatten().tolist()[:2]
    assert found[2] == logits[2].topk(20).values[-1].item()


def test_the_best_token_survives_the_smallest_top_p() -> None:
    assert cutoff([[0.0, 3.0, 1.0]], [3], [1e-300]) == [3.0]
