"""Embeddings and prompt logprobs against transformers, for every family, under every schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from hearth.core.config import EngineConfig
from hearth.core.errors import LogitsNotFinite, PromptTooLong
from hearth.core.sizes import sampled_pieces
from hearth.core.types import FinishReason, Pooling, PromptReading, RequestId, SamplingParams
from hearth.engine.engine import Engine
from hearth.policy.batch.plan import EngineRequest
from hearth.policy.batch.prompt_allowance import FIRST_LONE_TOKENS, GROWTH
from tests.engine.harness import (
    ROOMY,
    Answer,
    admissions_of,
    ask,
    assert_greedy,
    engine_for,
    greedy,
    kv_bytes,
    new_id,
    prompts_for,
    reference_logits,
    run,
)
from tests.engine.test_padded_steps import padded
from tests.models.zoo import VARIANTS, build

#: Prompts are cut, run beside decodes, and have few rows of logits.
CHUNKED = replace(ROOMY, max_batch_tokens=7, max_seqs=4)
#: Read in whole prompts, too.
WHOLE = ["llama-gqa", "opt-350m", "falcon-7b"]
NUM_TOP = 3


def prompts(name: str, lengths: list[int], seed: int = 0) -> list[list[int]]:
    return prompts_for(build(name).model.config.vocab_size, lengths, seed)


def embedding(engine: Engine, prompt: list[int], pooling: Pooling) -> EngineRequest:
    return engine.request(new_id(), prompt, greedy(0), pooling=pooling)


def scored(engine: Engine, prompt: list[int], max_tokens: int = 0) -> EngineRequest:
    return engine.request(new_id(), prompt, replace(greedy(max_tokens), prompt_logprobs=NUM_TOP))


@lru_cache(maxsize=256)
def hidden_states(name: str, prompt: tuple[int, ...]) -> torch.Tensor:
    """The last hidden states of transformers' AutoModel, behind the final norm: float32 [tokens, hidden]."""
    with torch.inference_mode():
        states: torch.Tensor = build(name).model.base_model(torch.tensor([prompt])).last_hidden_state[0]
    return states


def assert_embeds(name: str, prompt: list[int], pooling: Pooling, answer: Answer) -> None:
    states = hidden_states(name, tuple(prompt))
    expected = states[-1] if pooling is Pooling.LAST else states.mean(0)
    assert answer.reading is not None
    assert answer.reading.embedding is not None
    vector = torch.frombuffer(bytearray(answer.reading.embedding), dtype=torch.float32)
    torch.testing.assert_close(vector, expected / expected.norm(), atol=2e-5, rtol=1e-4)
    assert answer.finish_reason is FinishReason.LENGTH


def assert_scores(name: str, prompt: list[int], reading: PromptReading | None) -> None:
    assert reading is not None
    assert reading.logprobs is not None
    told = list(reading.logprobs)
    expected = reference_logits(name, tuple(prompt))[:-1].log_softmax(-1)
    assert len(told) == len(expected) == len(prompt) - 1
    for row, token, one in zip(expected, prompt[1:], told, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert one.rank == pytest.approx(int((row > row[token]).sum()) + 1, abs=1)  # where two nearly tie
        assert [best.logprob for best in one.top] == pytest.approx(
            row.topk(NUM_TOP).values.tolist(), abs=1e-4
        )
        for best in one.top:
            assert best.logprob == pytest.approx(float(row[best.token_id]), abs=1e-4)


def check_all(name: str, engine: Engine, lengths: list[int]) -> None:
    """Ask for embeddings, scores and continuations of prompts, all in the same batches."""
    asked = prompts(name, lengths)
    requests = [
        *(embedding(engine, prompt, pooling) for prompt in asked for pooling in Pooling),
        *(scored(engine, prompt) for prompt in asked),
        engine.request(new_id(), asked[-1][:9], greedy(4)),
        scored(engine, asked[-1], max_tokens=4),
    ]
    requests = requests[::2] + requests[1::2]
    answers = run(engine, requests)
    for request, answer in zip(requests, answers, strict=True):
        prompt, sampling = list(request.prompt), request.sampling
        if request.pooling is not None:
            assert_embeds(name, prompt, request.pooling, answer)
        elif sampling.prompt_logprobs is not None:
            assert_scores(name, prompt, answer.reading)
        else:
            assert answer.reading is None
        if sampling.max_tokens:
            assert_greedy(name, prompt, answer.tokens)
    assert len(engine.reading) == 0


@pytest.mark.parametrize(
    ("name", "config"), [*((name, CHUNKED) for name in VARIANTS), *((name, ROOMY) for name in WHOLE)]
)
def test_embeddings_and_scores_are_those_of_transformers(name: str, config: EngineConfig) -> None:
    check_all(name, engine_for(name, config), [1, 17])


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("config", [ROOMY, CHUNKED], ids=["whole", "chunked"])
def test_padding_changes_nothing_that_is_read(name: str, config: EngineConfig) -> None:
    check_all(name, padded(name, config), [1, 17])


def test_the_head_runs_over_pieces_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never over more rows than the logits of a step have, nor than their temporaries have room for."""
    engine = engine_for("llama-gqa", replace(ROOMY, max_seqs=8))
    monkeypatch.setattr("hearth.core.sizes._LOGITS_AT_ONCE", 5 * 160)
    assert sampled_pieces(8, 160)[0].stop == 5
    num_rows, head = list[int](), engine.runner.layers.decoder.head

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(engine.runner.layers.decoder, "head", watched)
    (asked,) = prompts("llama-gqa", [32])
    (answer,) = run(engine, [scored(engine, asked)])
    assert_scores("llama-gqa", asked, answer.reading)
    assert num_rows == [*[5] * 6, 1, 1]


def test_only_what_needs_every_token_is_computed_without_the_known_prefix() -> None:
    engine = engine_for("llama-gqa")
    (asked,) = prompts("llama-gqa", [19])
    ask(engine, [asked], greedy(1))
    admissions = admissions_of(engine)
    requests = [
        embedding(engine, asked, Pooling.LAST),
        embedding(engine, asked, Pooling.MEAN),
        scored(engine, asked),
        engine.request(new_id(), asked, greedy(3)),
    ]
    last, mean, score, answer = run(engine, requests)

    assert [one.num_cached_tokens for one in admissions] == [16, 0, 0, 16]
    assert_embeds("llama-gqa", asked, Pooling.LAST, last)
    assert_embeds("llama-gqa", asked, Pooling.MEAN, mean)
    assert_scores("llama-gqa", asked, score.reading)
    assert_greedy("llama-gqa", asked, answer.tokens)


@pytest.mark.parametrize("pooling", [*Pooling, None])
def test_a_slow_device_takes_more_tokens_at_once_also_where_all_prompts_are_read(
    pooling: Pooling | None,
) -> None:
    engine = engine_for("llama-gqa", replace(ROOMY, max_step=100.0))
    assert engine.allowance.num_lone_tokens == FIRST_LONE_TOKENS
    for asked in prompts("llama-gqa", [FIRST_LONE_TOKENS] * 2):
        run(engine, [scored(engine, asked) if pooling is None else embedding(engine, asked, pooling)])
    assert engine.allowance.num_lone_tokens == GROWTH * FIRST_LONE_TOKENS


@pytest.mark.parametrize("pooling", [*Pooling, None])
def test_a_request_that_is_preempted_in_its_prompt_is_read_anew(pooling: Pooling | None) -> None:
    engine = engine_for("llama-gqa", CHUNKED)
    (asked,) = prompts("llama-gqa", [24])
    request = scored(engine, asked) if pooling is None else embedding(engine, asked, pooling)
    admissions = admissions_of(engine)
    engine.add(request)
    for _ in range(2):  # the second piece is in flight, the first was taken in
        engine.step()
    engine.batcher._preempt(engine.batcher._sequences[request.request_id])
    answer = Answer([])
    while engine.has_work:
        for output in engine.step().outputs:
            answer = Answer([output.token], output.finish_reason, reading=output.reading)

    assert len(admissions) == 2
    assert admissions[1].num_cached_tokens == (4 if pooling is Pooling.LAST else 0)
    if pooling is None:
        assert_scores("llama-gqa", asked, answer.reading)
    else:
        assert_embeds("llama-gqa", asked, pooling, answer)


def test_a_request_that_comes_back_with_tokens_is_not_read_again() -> None:
    """They came with the first token, be it preempted since or on another worker now."""
    tight = replace(ROOMY, max_batch_tokens=16, kv_bytes=kv_bytes(engine_for("llama-gqa"), 9))
    engine = engine_for("llama-gqa", tight)
    asked = prompts("llama-gqa", [9, 9, 9])
    admissions = admissions_of(engine)
    answers = run(engine, [scored(engine, prompt, max_tokens=12) for prompt in asked])
    assert any(len(one.tokens) > one.num_prompt_tokens for one in admissions), "nobody was preempted"
    for prompt, answer in zip(asked, answers, strict=True):
        assert_greedy("llama-gqa", prompt, answer.tokens)
        assert_scores("llama-gqa", prompt, answer.reading)

    params = replace(greedy(12), prompt_logprobs=NUM_TOP)
    resumed = engine.request(new_id(), asked[0], params, output=answers[0].tokens[:5])
    (rest,) = run(engine, [resumed])
    assert rest.reading is None
    assert rest.tokens == answers[0].tokens[5:]


def test_a_request_that_is_cancelled_in_its_prompt_leaves_nothing_behind() -> None:
    engine = engine_for("llama-gqa", CHUNKED)
    (asked,) = prompts("llama-gqa", [24])
    request = embedding(engine, asked, Pooling.MEAN)
    engine.add(request)
    for _ in range(2):
        engine.step()
    engine.cancel(request.request_id)
    while engine.has_work:
        assert not engine.step().outputs.readings
    assert len(engine.reading) == 0


def test_who_has_the_id_of_a_cancelled_request_is_not_told_what_was_read_of_that() -> None:
    """The step that reads the cancelled one is still in flight when the id has its new owner."""
    engine, (first, second) = engine_for("llama-gqa"), prompts("llama-gqa", [9, 6])
    before = embedding(engine, first, Pooling.MEAN)
    engine.add(before)
    engine.step()
    engine.cancel(before.request_id)
    again = replace(embedding(engine, second, Pooling.MEAN), request_id=before.request_id)

    (answer,) = run(engine, [again])

    assert_embeds("llama-gqa", second, Pooling.MEAN, answer)
    assert len(engine.reading) == 0


def test_a_prompt_of_the_whole_context_can_be_read() -> None:
    """For there is nothing to be sampled behind it that would be computed."""
    engine = engine_for("llama-gqa")
    (asked,) = prompts("llama-gqa", [128])
    (answer,) = run(engine, [embedding(engine, asked, Pooling.MEAN)])
    assert_embeds("llama-gqa", asked, Pooling.MEAN, answer)
    with pytest.raises(PromptTooLong, match="129 tokens, limit: 128"):
        embedding(engine, [*asked, 5], Pooling.MEAN)
    with pytest.raises(PromptTooLong, match="128 tokens, limit: 127"):
        engine.request(new_id(), asked, greedy(1))


@pytest.mark.parametrize("pooling", Pooling)
def test_hidden_states_that_are_not_finite_fail_their_request_alone(pooling: Pooling) -> None:
    engine = engine_for("llama-gqa")
    good, bad = prompts("llama-gqa", [9, 9])
    embed = engine.runner.layers.decoder.weights.embed
    assert embed is not None
    embed[bad[0]] = torch.nan
    good = [token for token in good if token != bad[0]]
    answers = run(engine, [embedding(engine, prompt, pooling) for prompt in (good, bad)])
    assert_embeds("llama-gqa", good, pooling, answers[0])
    assert isinstance(answers[1].error, LogitsNotFinite)
    assert len(engine.reading) == 0


def test_scores_of_a_single_token_are_none() -> None:
    engine = engine_for("llama-gqa")
    (answer,) = run(engine, [scored(engine, [5], max_tokens=2)])
    assert answer.reading is not None
    assert answer.reading.logprobs is not None
    assert list(answer.reading.logprobs) == []


def test_a_request_without_tokens_needs_no_stop_token() -> None:
    engine = engine_for("llama-gqa", eos_ids=frozenset(range(160)))
    params = SamplingParams(max_tokens=0, temperature=0.0)
    (answer,) = run(engine, [engine.request(RequestId("e"), [5, 6], params, pooling=Pooling.LAST)])
    assert answer.reading is not None
    assert answer.finish_reason is not None
