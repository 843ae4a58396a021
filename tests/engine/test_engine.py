"""The whole engine against transformers, for every family, under every schedule (DESIGN: same output, b)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hearth.errors import BadPrompt, BadSampling, PromptTooLong
from hearth.types import FinishReason, RequestId, SamplingParams
from tests.engine.harness import (
    ROOMY,
    admissions_of,
    ask,
    assert_greedy,
    engine_for,
    greedy,
    kv_bytes,
    prompts_for,
)
from tests.models.zoo import VARIANTS, build

LENGTHS = [1, 3, 4, 5, 17, 30]


def prompts(name: str, lengths: list[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    model, _ = build(name)
    return prompts_for(model.config.vocab_size, lengths, seed)


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_are_those_of_transformers_generate(name: str) -> None:
    model, _ = build(name)
    asked = prompts(name, [9])
    model.generation_config.eos_token_id = None
    generated = model.generate(torch.tensor(asked), max_new_tokens=12, do_sample=False, pad_token_id=0)

    (answer,) = ask(engine_for(name), asked, greedy(12))

    if answer.tokens != generated[0, 9:].tolist():
        assert assert_greedy(name, asked[0], answer.tokens) > 0
    assert answer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("budget", [256, 7])
def test_mixed_batches_and_chunked_prefill_give_the_best_tokens(name: str, budget: int) -> None:
    config = replace(ROOMY, max_batch_tokens=budget, max_seqs=4)
    asked = prompts(name)

    answers = ask(engine_for(name, config), asked, greedy())

    for prompt, answer in zip(asked, answers, strict=True):
        assert_greedy(name, prompt, answer.tokens)
        assert len(answer.tokens) == 12


@pytest.mark.parametrize("name", VARIANTS)
def test_preempted_requests_come_back_with_the_best_tokens(name: str) -> None:
    asked = prompts(name)
    config = replace(ROOMY, max_batch_tokens=16, kv_bytes=kv_bytes(engine_for(name), 14))
    engine = engine_for(name, config)
    admissions = admissions_of(engine)
    answers = ask(engine, asked, greedy())

    assert len(admissions) > len(asked), "nothing was preempted"
    for prompt, answer in zip(asked, answers, strict=True):
        assert_greedy(name, prompt, answer.tokens)


@pytest.mark.parametrize("name", VARIANTS)
def test_prefix_hits_give_the_best_tokens(name: str) -> None:
    engine = engine_for(name)
    (shared,) = prompts(name, [16])
    tails = prompts(name, [1, 5, 9], seed=1)
    ask(engine, [shared + tails[0]], greedy())
    admissions = admissions_of(engine)
    answers = ask(engine, [shared + tail for tail in tails], greedy())

    assert [admission.num_cached_tokens for admission in admissions] == [16, 16, 16]
    for tail, answer in zip(tails, answers, strict=True):
        assert_greedy(name, shared + tail, answer.tokens)


def test_same_seed_gives_the_same_tokens_under_any_schedule() -> None:
    asked = prompts("llama-gqa")
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=10, repetition_penalty=1.2)
    alone = [ask(engine_for("llama-gqa"), [prompt], params)[0].tokens for prompt in asked]
    tight = replace(ROOMY, max_batch_tokens=9, kv_bytes=kv_bytes(engine_for("llama-gqa"), 12))

    together = [answer.tokens for answer in ask(engine_for("llama-gqa", tight), asked, params)]

    assert together == alone


def test_a_stop_token_ends_the_answer_and_is_its_last_token() -> None:
    (asked,) = prompts("llama-gqa", [5])
    free = ask(engine_for("llama-gqa"), [asked], greedy(8))[0].tokens
    stop = free[3]
    engine = engine_for("llama-gqa", eos_ids=frozenset([stop]))

    (answer,) = ask(engine, [asked], SamplingParams(temperature=0.0, max_tokens=8))

    assert answer.tokens == free[: free.index(stop) + 1]
    assert answer.finish_reason is FinishReason.STOP


def test_memory_that_was_used_before_changes_nothing() -> None:
    """The same plans, with every KV byte 0xFF (NaN) before: bit-identical (DESIGN: same output, a)."""
    asked = prompts("llama-gqa")
    params = SamplingParams(temperature=0.0, max_tokens=10, logprobs=3, ignore_eos=True)
    runs = []
    for fill in (0x00, 0xFF):
        engine = engine_for("llama-gqa")
        engine.runner.kv.view(torch.uint8).fill_(fill)
        for number, prompt in enumerate(asked):
            engine.add(engine.request(RequestId(str(number)), prompt, params))
        outputs = []
        while engine.has_work:
            outputs.extend(engine.step())
        runs.append(outputs)

    assert runs[0] == runs[1]


def test_weights_that_move_change_nothing() -> None:
    asked = prompts("qwen3")
    expected = [answer.tokens for answer in ask(engine_for("qwen3"), asked, greedy())]
    engine, elsewhere = engine_for("qwen3"), engine_for("qwen3")
    engine.runner.rebind(elsewhere.runner.decoder.weights)

    assert [answer.tokens for answer in ask(engine, asked, greedy())] == expected


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], BadPrompt, "prompt has 0 tokens, at least 1"),
        ([1, 10_000], BadPrompt, "`prompt` holds 10000, a token id must be an integer from 0 to"),
        ([1, -1], BadPrompt, "`prompt` holds -1"),
        ([1] * 5000, PromptTooLong, "prompt has 5000 tokens, limit: 127"),
    ],
)
def test_bad_prompts_are_refused_and_nothing_else_is_lost(
    prompt: list[int], error: type[Exception], message: str
) -> None:
    engine = engine_for("llama-gqa")

    with pytest.raises(error, match=message):
        engine.request(RequestId("bad"), prompt, greedy())

    assert len(ask(engine, prompts("llama-gqa", [4]), greedy(3))[0].tokens) == 3


@pytest.mark.parametrize("field", ["allowed_token_ids", "stop_token_ids"])
def test_token_ids_outside_the_vocabulary_are_refused(field: str) -> None:
    engine = engine_for("llama-gqa")

    with pytest.raises(BadSampling, match=f"`{field}` holds 99999"):
        engine.request(RequestId("bad"), [1, 2], SamplingParams(**{field: [99_999]}))
