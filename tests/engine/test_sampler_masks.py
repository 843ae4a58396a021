from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import RequestId, SamplingParams
from hearth.engine.sampler import apply_masks
from hearth.engine.upload import Uploads
from hearth.policy.batch.plan import Admission
from tests.engine.harness import new_sampler, sample, sample_rows

UPLOADS = Uploads(torch.device("cpu"))


def mask_of(allowed: set[int], vocab_size: int) -> bytes:
    num_words = -(-vocab_size // 32)
    return sum(1 << token for token in allowed).to_bytes(4 * num_words, "little")


@given(st.data(), st.sampled_from([1, 20, 31, 32, 33, 64, 100]))
def test_forbidden_tokens_are_out_and_all_else_stays(data: st.DataObject, vocab_size: int) -> None:
    logits = torch.randn(4, vocab_size)
    rows = data.draw(st.lists(st.integers(0, 3), unique=True, min_size=1))
    token_sets = st.sets(st.integers(0, vocab_size - 1), min_size=1)
    allowed = [data.draw(token_sets) for _ in rows]
    expected = logits.clone()
    for row, tokens in zip(rows, allowed, strict=True):
        expected[row, [token for token in range(vocab_size) if token not in tokens]] = -math.inf

    masks = UPLOADS.words([mask_of(tokens, vocab_size) for tokens in allowed])
    apply_masks(logits, torch.tensor(rows), masks)

    assert torch.equal(logits, expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_mask_hides_nothing_that_a_model_should_not_compute(temperature: float, broken: float) -> None:
    sampler = new_sampler(2, 40, UPLOADS.device)
    params = SamplingParams(temperature=temperature, seed=1, top_p=0.9, min_p=0.1)
    sampler.admit([Admission(RequestId("a"), slot, (1,), 1, 0, params) for slot in range(2)])
    logits = torch.randn(2, 40)
    logits[0] = broken

    samples = sample(
        sampler, logits, sample_rows(range(2), 1, dict.fromkeys(range(2), mask_of({17, 35}, 40)))
    )

    assert samples.chosen[:, 1].view(torch.float32).isfinite().tolist() == [False, True]
    assert samples.tokens[1].item() in {17, 35}


def test_a_mask_that_allows_no_token_shows() -> None:
    sampler = new_sampler(1, 40, UPLOADS.device)
    sampler.admit([Admission(RequestId("a"), 0, (1,), 1, 0, SamplingParams(temperature=0.0))])

    samples = sample(sampler, torch.randn(1, 40), sample_rows([0], 1, {0: mask_of(set(), 40)}))

    assert samples.chosen[:, 1].view(torch.float32).tolist() == [-math.inf]
