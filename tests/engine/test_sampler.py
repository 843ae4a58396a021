"""The sampler against a slow oracle in float64 and Python ints, and what must not influence a draw."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import RequestId, SamplingParams, TokenLogprobs
from hearth.engine.pending_step import StepResult
from hearth.engine.sampler import Sampler, Samples
from hearth.policy.batch.plan import Admission
from tests.engine.harness import new_sampler, sample, sample_rows, waited

Floats = npt.NDArray[np.float64]
CPU = torch.device("cpu")
NUM_SLOTS = 20_000  #: a step has no more rows
VOCAB = 20  #: no more than `logprobs` may ask for, so that a test can see the whole distribution


def admission(
    slot: int, sampling: SamplingParams, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = ()
) -> Admission:
    tokens = (*prompt, *output)
    return Admission(RequestId(f"in slot {slot}"), slot, tokens, len(prompt), 0, sampling)


def random_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def sampler_with(*samplings: SamplingParams, vocab_size: int = VOCAB) -> Sampler:
    """Request i sits in slot i, with the prompt 1, 2, 3; there are slots enough for many rows at once."""
    sampler = new_sampler(NUM_SLOTS, vocab_size, CPU)
    sampler.admit([admission(slot, sampling) for slot, sampling in enumerate(samplings)])
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, positions: Sequence[int], slot: int = 0) -> list[int]:
    """The same row of logits at every position, in one call."""
    rows = sample_rows([slot] * len(positions), positions)
    tokens: list[int] = sample(sampler, logits.repeat(len(rows), 1), rows).tokens.tolist()
    return tokens


def expected_logits(logits: Floats, request: Admission, position: int) -> Floats:
    """Penalties, bias, mask and ban, one token at a time. `request.tokens` end before `position`."""
    p, output = request.sampling, request.tokens[request.num_prompt_tokens :]
    result = logits.copy()
    for token in range(len(logits)):
        if token in request.tokens:
            result[token] *= 1 / p.repetition_penalty if result[token] > 0 else p.repetition_penalty
        result[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty * (token in output)
        result[token] += p.logit_bias.get(token, 0.0)
        is_masked = p.allowed_token_ids is not None and token not in p.allowed_token_ids
        is_early_stop = token in p.stop_token_ids and position - request.num_prompt_tokens < p.min_tokens
        if is_masked or is_early_stop:
            result[token] = -math.inf
    return result


def expected_support(logits: Floats, p: SamplingParams) -> npt.NDArray[np.bool_]:
    probs = np.exp((logits - logits.max()) / p.temperature)
    order = [int(i) for i in np.argsort(-probs) if probs[i] > 0][: p.top_k or None]
    total, mass, kept = probs[order].sum(), 0.0, []
    for token in order:
        if mass / total < p.top_p and probs[token] >= p.min_p * probs[order[0]]:
            kept.append(token)
        mass += probs[token]
    return np.isin(np.arange(len(logits)), kept)


def expected_noise(seed: int, position: int, vocab_size: int) -> Floats:
    def mix64(x: int) -> int:
        x %= 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    def mix32(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    golden = 0x9E3779B97F4A7C15
    high, low = divmod(mix64(mix64(seed + golden) + position * golden), 2**32)
    bits = np.array([mix32(mix32(token ^ low) ^ high) % 2**31 for token in range(vocab_size)])
    return np.asarray(-np.log(-np.log1p(-(bits + 0.5) / 2**31)))


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, -0.5, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.4, 0.6]),
    seed=st.integers(-(2**63), 2**63 - 1),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3),
    logprobs=st.just(VOCAB),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9), max_size=4),
    allowed_token_ids=st.none() | st.just(tuple(range(0, VOCAB, 2))),
    max_tokens=st.none(),
)


@given(st.data(), st.lists(samplings, min_size=1, max_size=5), st.integers(0, 2**20))
def test_every_rule_in_its_order_matches_the_oracle(
    data: st.DataObject, params: list[SamplingParams], logits_seed: int
) -> None:
    sampler = new_sampler(8, VOCAB, CPU)
    slots = data.draw(st.permutations(range(8)))
    tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)
    requests = [admission(slots[i], p, data.draw(tokens), data.draw(tokens)) for i, p in enumerate(params)]
    sampler.admit(requests)
    for step in range(3):
        logits = random_logits(len(params), seed=logits_seed + step)
        oracle = [logits[i].double().numpy() for i in range(len(params))]
        samples = sample(
            sampler,
            logits.clone(),
            sample_rows([r.slot for r in requests], [len(r.tokens) for r in requests]),
        )
        for i, request in enumerate(requests):
            _check_row(samples, i, request, expected_logits(oracle[i], request, len(request.tokens)))
        requests = [
            admission(
                r.slot, r.sampling, r.tokens[: r.num_prompt_tokens], (*r.tokens[r.num_prompt_tokens :], t)
            )
            for r, t in zip(requests, samples.tokens.tolist(), strict=True)
        ]


def _check_row(samples: Samples, i: int, request: Admission, logits: Floats) -> None:
    assert samples.logprobs is not None
    assert samples.top_ids is not None
    assert samples.top_logprobs is not None
    logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    ids = samples.top_ids[i].tolist()
    assert sorted(ids) == list(range(VOCAB))
    np.testing.assert_allclose(samples.top_logprobs[i].numpy(), logprobs[ids], atol=2e-5)

    p, token = request.sampling, int(samples.tokens[i])
    assert samples.logprobs[i].item() == pytest.approx(logprobs[token], abs=2e-5)
    scores = logits
    if p.temperature > 0:
        noise = expected_noise(p.seed or 0, len(request.tokens), VOCAB)
        scores = np.where(expected_support(logits, p), logits / p.temperature + noise, -math.inf)
    # Float32 may decide a near tie differently.
    assert token in (int(scores.argmax()), _runner_up_within(scores, 1e-4))


def _runner_up_within(scores: Floats, margin: float) -> int | None:
    best, second = (int(i) for i in np.argsort(-scores)[:2])
    return second if scores[best] - scores[second] < margin else None


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 1.5])
    num_draws = 20_000
    sampler = sampler_with(*(SamplingParams(temperature=0.7, seed=seed) for seed in range(3)), vocab_size=6)
    expected = (logits / 0.7).double().softmax(-1) * num_draws

    for slot in range(3):
        counts = torch.bincount(torch.tensor(draw(sampler, logits, range(num_draws), slot)), minlength=6)
        # The 99.9% quantile of chi-square with 5 degrees of freedom; the seeds are fixed.
        assert ((counts - expected) ** 2 / expected).sum().item() < 20.5


@pytest.mark.slow
def test_draws_from_a_large_flat_vocabulary_favour_no_region() -> None:
    sampler = sampler_with(SamplingParams(seed=5), vocab_size=32_768)

    tokens = torch.tensor(
        [t for i in range(8) for t in draw(sampler, torch.zeros(32_768), range(i, 2048, 8))]
    )

    counts = torch.bincount(tokens // 2048, minlength=16)
    assert ((counts - 128.0) ** 2 / 128.0).sum().item() < 37.7  # 99.9%, 15 degrees of freedom


@pytest.mark.parametrize(
    ("sampling", "support"),
    [
        (SamplingParams(seed=1, top_k=2), {0, 1}),
        (SamplingParams(seed=1, top_p=0.6), {0, 1}),
        (SamplingParams(seed=1, top_k=3, top_p=0.95), {0, 1, 2}),
        (SamplingParams(seed=1, min_p=0.4), {0, 1}),
        (SamplingParams(seed=1, min_p=0.4, temperature=2.0), {0, 1, 2}),
        (SamplingParams(seed=1, top_k=3, min_p=0.001), {0, 1, 2}),
    ],
)
def test_only_and_all_tokens_of_the_support_are_drawn(sampling: SamplingParams, support: set[int]) -> None:
    logits = torch.tensor([0.45, 0.30, 0.15, 0.06, 0.04]).log()

    assert set(draw(sampler_with(sampling, vocab_size=5), logits, range(500))) == support


@given(st.data(), st.lists(samplings, min_size=2, max_size=6))
def test_a_draw_does_not_depend_on_batch_slot_or_order(
    data: st.DataObject, params: list[SamplingParams]
) -> None:
    logits = random_logits(len(params))
    alone = [draw(sampler_with(p), logits[i], [3])[0] for i, p in enumerate(params)]
    order = data.draw(st.permutations(range(len(params))))
    sampler = new_sampler(10, VOCAB, CPU)
    sampler.admit([admission(9 - i, params[i]) for i in order])

    together = sample(sampler, logits[order], sample_rows([9 - i for i in order], 3)).tokens

    assert together.tolist() == [alone[i] for i in order]


def test_a_different_seed_or_position_gives_different_draws() -> None:
    sampler = sampler_with(SamplingParams(seed=1), SamplingParams(seed=2))
    logits = torch.zeros(VOCAB)

    first, second = draw(sampler, logits, range(200), slot=0), draw(sampler, logits, range(200), slot=1)

    assert len(set(first)) == VOCAB
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 30


def test_greedy_rows_take_the_best_logit_whatever_shares_the_batch() -> None:
    greedy, hot = SamplingParams(temperature=0.0, seed=1), SamplingParams(temperature=100.0, seed=2)
    sampler = sampler_with(greedy, hot, greedy, SamplingParams(top_k=1, temperature=100.0, seed=3))
    logits = random_logits(4)

    for position in range(50):
        samples = sample(sampler, logits.clone(), sample_rows(range(4), position))
        assert samples.tokens[[0, 2, 3]].tolist() == logits.argmax(-1)[[0, 2, 3]].tolist()


def test_logits_of_fewer_bits_are_widened_once_more_than_the_best_is_wanted() -> None:
    random = SamplingParams(temperature=1.0, seed=3, logprobs=4, repetition_penalty=1.3)
    narrow = random_logits(3).bfloat16()
    wanted, rows = narrow.float(), sample_rows([0, 1, 2], [3, 3, 3])
    expected = sample(sampler_with(*[random] * 3), wanted, rows)
    sampler, wide = sampler_with(*[random] * 3), torch.full((3, VOCAB), math.nan)
    sampler.take_best(narrow, rows.device_slots)

    samples = sampler.sample(narrow, rows, wide)

    assert samples.tokens.tolist() == expected.tokens.tolist()
    assert samples.logprobs is not None
    assert expected.logprobs is not None
    assert samples.logprobs.tolist() == expected.logprobs.tolist()
    greedy, untouched = sampler_with(*[SamplingParams(temperature=0.0)] * 3), torch.full((3, VOCAB), 7.0)
    greedy.take_best(narrow, rows.device_slots)
    assert greedy.sample(narrow, rows, untouched).tokens.tolist() == narrow.float().argmax(-1).tolist()
    assert (untouched == 7.0).all()


def test_greedy_ties_go_to_the_lowest_id_on_the_cpu() -> None:
    logits = torch.randint(0, 3, (64, 999), generator=torch.Generator().manual_seed(0)).float()
    sampler = sampler_with(SamplingParams(temperature=0.0), vocab_size=999)

    tokens = sample(sampler, logits.clone(), sample_rows([0] * 64, 3)).tokens.tolist()

    assert tokens == [row.index(max(row)) for row in logits.tolist()]


def test_stop_tokens_are_forbidden_until_min_tokens_are_sampled() -> None:
    sampling = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[4, 5, 10**6])
    logits = torch.zeros(VOCAB)
    logits[[4, 5, 6]] = torch.tensor([3.0, 2.0, 1.0])

    assert draw(sampler_with(sampling), logits, [3, 4, 5]) == [6, 6, 4]


def test_a_mask_of_stop_tokens_alone_outranks_min_tokens() -> None:
    sampling = SamplingParams(seed=0, min_tokens=2, stop_token_ids=[4, 5], allowed_token_ids=[4])

    assert draw(sampler_with(sampling), torch.zeros(VOCAB), [3, 4]) == [4, 4]


def test_a_forbidden_token_stays_forbidden_under_the_strongest_bias() -> None:
    sampling = SamplingParams(seed=0, logit_bias={1: 100.0, 2: 5.0}, allowed_token_ids=[2, 3, 3])

    assert set(draw(sampler_with(sampling), torch.zeros(VOCAB), range(2000))) == {2, 3}


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e300])
def test_extreme_temperatures_respect_the_mask(temperature: float) -> None:
    sampling = SamplingParams(seed=0, temperature=temperature, allowed_token_ids=[7, 8], top_p=0.999)

    tokens = set(draw(sampler_with(sampling), torch.arange(VOCAB).float(), range(300)))

    assert tokens == ({7, 8} if temperature > 1 else {8})


def test_logprobs_are_given_only_if_a_row_asks() -> None:
    logits = random_logits(2)
    rows = sample_rows([0, 1], 3)
    plain, chosen, best = (SamplingParams(seed=1, temperature=0.5, logprobs=n) for n in (None, 0, 3))

    none, zero, three = (sample(sampler_with(plain, p), logits.clone(), rows) for p in (plain, chosen, best))

    reference = logits.log_softmax(-1)
    assert none.logprobs is None
    assert zero.logprobs is not None
    assert zero.top_ids is None
    torch.testing.assert_close(zero.logprobs, reference[[0, 1], zero.tokens])
    assert three.top_ids is not None
    assert three.top_ids.tolist() == reference.topk(3).indices.tolist()
    torch.testing.assert_close(three.top_logprobs, reference.topk(3).values)


def test_the_token_of_each_slot_is_kept_at_a_fixed_address() -> None:
    sampler = sampler_with(*[SamplingParams(temperature=0.0)] * 3)
    address = sampler.tokens.data_ptr()
    logits = torch.eye(VOCAB)[[9, 5]].clone()

    sample(sampler, logits, sample_rows([2, 0], 3))

    assert sampler.tokens[:4].tolist() == [5, 0, 9, 0]
    assert sampler.tokens.data_ptr() == address


def test_no_rows_give_no_samples() -> None:
    sampler = sampler_with(SamplingParams(seed=1))

    assert sampler.sample(torch.empty(0, VOCAB), sample_rows([], [])).tokens.tolist() == []


@given(samplings, samplings)
def test_a_reused_slot_remembers_nothing_of_its_last_request(
    old: SamplingParams, new: SamplingParams
) -> None:
    used, fresh = new_sampler(1, VOCAB, CPU), sampler_with(new)
    used.admit([admission(0, old, prompt=range(10), output=range(5, 15))])
    draw(used, random_logits(1)[0], [20])
    used.admit([admission(0, new)])

    for position in range(3, 6):
        logits, rows = random_logits(1, seed=position), sample_rows([0], position)
        after, clean = sample(used, logits.clone(), rows), sample(fresh, logits.clone(), rows)
        assert after.tokens.tolist() == clean.tokens.tolist()
        torch.testing.assert_close(after.top_logprobs, clean.top_logprobs, rtol=0, atol=0)


def test_a_preempted_request_continues_as_if_it_had_stayed() -> None:
    sampling = SamplingParams(
        seed=3, temperature=0.9, repetition_penalty=1.4, frequency_penalty=0.8, top_p=0.9
    )
    logits = random_logits(20, seed=1)
    staying = sampler_with(sampling)
    undisturbed = [draw(staying, logits[i], [3 + i])[0] for i in range(20)]
    moving = sampler_with(sampling, sampling)
    head = [draw(moving, logits[i], [3 + i])[0] for i in range(8)]

    moving.admit(
        [admission(0, SamplingParams(seed=9, presence_penalty=1.0)), admission(1, sampling, output=head)]
    )
    tail = [draw(moving, logits[i], [3 + i], slot=1)[0] for i in range(8, 20)]

    assert head + tail == undisturbed


def test_a_random_request_without_a_seed_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="no seed"):
        sampler_with(SamplingParams(temperature=1.0))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.gpu
def test_a_mixed_batch_draws_the_same_tokens_on_the_gpu_without_waiting_for_it() -> None:
    """Both devices hash the same bits; logarithms may differ in the last ones, which decide near ties alone.

    The inputs are fixed and hold no near tie, so all tokens must agree.
    """
    kinds = [
        SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=[5, 6]),
        SamplingParams(seed=1, temperature=0.8, top_p=0.95),
        SamplingParams(seed=2, top_k=40, repetition_penalty=1.2, frequency_penalty=0.5),
        SamplingParams(seed=3, min_p=0.05, logit_bias={7: 4.0}, logprobs=5),
        SamplingParams(seed=4, temperature=1.5, allowed_token_ids=[*range(0, 30_000, 3)]),
    ]
    admissions = [admission(slot, kinds[slot % len(kinds)]) for slot in range(16)]
    drawn = {}
    for device in (CPU, torch.device("cuda")):
        sampler = new_sampler(16, 32_000, device)
        steps = [random_logits(16, 32_000, seed=step).to(device) for step in range(6)]
        rows = [sample_rows(range(16), 3 + step, device=device) for step in range(6)]
        try:
            torch.cuda.set_sync_debug_mode("error")
            sampler.admit(admissions)
            drawn[device.type] = [
                sample(sampler, logits, own).tokens for logits, own in zip(steps, rows, strict=True)
            ]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert torch.stack(drawn["cuda"]).tolist() == torch.stack(drawn["cpu"]).tolist()


def test_many_rows_are_sampled_some_at_a_time_and_draw_what_they_draw_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = [
        SamplingParams(seed=1, temperature=0.8, top_p=0.7),
        SamplingParams(seed=2, top_k=4, repetition_penalty=1.4, frequency_penalty=0.5),
        SamplingParams(temperature=0.0, presence_penalty=0.7, logit_bias={3: -9.0, 4: 2.0}),
        SamplingParams(seed=3, min_p=0.05, top_k=3, top_p=0.9),
    ]
    logits, drawn = random_logits(11), []
    mask = bytes([0b1011_0111] * 4 * -(-VOCAB // 32))
    for num_at_once in (11, 3):
        monkeypatch.setattr("hearth.core.sizes._LOGITS_AT_ONCE", num_at_once * VOCAB)
        sampler = sampler_with(*(kinds[slot % 4] for slot in range(11)))
        for position in range(3, 8):
            rows = sample_rows(range(11), position, dict.fromkeys(range(0, 11, 2), mask))
            drawn.append(sample(sampler, logits.clone(), rows).tokens.tolist())
    assert drawn[:5] == drawn[5:]


@pytest.mark.gpu
def test_a_thousand_rows_of_a_large_vocabulary_are_sampled_within_four_gigabytes() -> None:
    device, vocab_size, num_rows = torch.device("cuda"), 128_256, 1024
    sampler = new_sampler(num_rows, vocab_size, device)
    sampling = SamplingParams(seed=1, top_p=0.9, frequency_penalty=0.1)
    sampler.admit([admission(slot, sampling) for slot in range(num_rows)])
    logits = torch.randn(num_rows, vocab_size, device=device)
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    sample(sampler, logits, sample_rows(range(num_rows), 3, device=device))
    assert torch.cuda.max_memory_allocated() - before_bytes < 4 << 30


# --- who shares the batch ---


def result(sampler: Sampler, logits: torch.Tensor, slots: Sequence[int]) -> StepResult:
    samples = sample(sampler, logits.clone(), sample_rows(slots, 3))
    return waited(samples)


def logprobs_of(one: StepResult) -> list[TokenLogprobs | None]:
    """The logprobs of each row, whether anybody asked for some or not."""
    return one.logprobs or [None] * len(one.tokens)


@given(
    st.lists(st.none() | st.integers(0, 20), min_size=1, max_size=6),
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 2**20),
    st.sampled_from([VOCAB, 300]),
)
def test_each_request_gets_the_logprobs_it_asked_for_whoever_shares_the_batch(
    wishes: list[int | None], temperature: float, seed: int, vocab_size: int
) -> None:
    """Logits are rounded, as those of half precision are, so that many are equal."""
    params = [SamplingParams(temperature=temperature, seed=3, logprobs=wish) for wish in wishes]
    sampler = sampler_with(*params, vocab_size=vocab_size)
    logits = random_logits(len(wishes), vocab_size, seed).round()

    together = result(sampler, logits, range(len(wishes)))

    for slot, wish in enumerate(wishes):
        own = logprobs_of(together)[slot]
        assert (None if own is None else len(own.top)) == wish
        assert logprobs_of(result(sampler, logits[slot : slot + 1], [slot])) == [own]


@given(
    st.lists(samplings, min_size=2, max_size=5),
    st.sampled_from([math.nan, math.inf]),
    st.integers(0, VOCAB - 1),
    st.integers(0, 2**20),
)
def test_a_row_that_is_not_finite_is_named_and_changes_no_other(
    params: list[SamplingParams], broken: float, token: int, seed: int
) -> None:
    logits = random_logits(len(params), seed=seed)
    undisturbed = result(sampler_with(*params), logits, range(len(params)))
    logits[0, token] = broken

    disturbed = result(sampler_with(*params), logits, range(len(params)))

    assert (undisturbed.broken_rows, disturbed.broken_rows) == ([], [0])
    assert disturbed.tokens[1:] == undisturbed.tokens[1:]
    assert logprobs_of(disturbed)[1:] == logprobs_of(undisturbed)[1:]
    assert 0 <= disturbed.tokens[0] < VOCAB, "the next step reads it before anybody knows"
