"""Requests that go on in another engine, cut at every token (DESIGN: same output, b)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hearth.core.errors import BadPrompt, PromptTooLong
from hearth.core.types import FinishReason, RequestId, SamplingParams
from hearth.engine.engine import Engine
from tests.engine.harness import (
    ROOMY,
    Answer,
    ask,
    assert_greedy,
    engine_for,
    greedy,
    kv_bytes,
    new_id,
    prompts_for,
    run,
)
from tests.models.zoo import build

FAMILIES = ["llama-gqa", "mistral-window", "qwen3", "opt-350m", "neox-parallel", "falcon-40b"]
CASES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=10),
    "random": SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=11, max_tokens=10),
    "penalties": SamplingParams(
        temperature=0.0,
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=0.9,
        max_tokens=10,
    ),
    "bias": SamplingParams(temperature=1.0, seed=5, logit_bias={7: 4.0, 9: 5.0, 11: -100.0}, max_tokens=10),
    "no limit": SamplingParams(temperature=0.7, seed=3, max_tokens=None, ignore_eos=True),
}


def prompt_for(name: str, length: int = 9) -> list[int]:
    return prompts_for(build(name).model.config.vocab_size, [length])[0]


def resume(engine: Engine, prompt: list[int], params: SamplingParams, whole: Answer) -> list[Answer]:
    """Each answer that began elsewhere, from no token known to all but one, all in one batch."""
    cuts = range(len(whole.tokens))
    requests = [engine.request(new_id(), prompt, params, output=whole.tokens[:cut]) for cut in cuts]
    answers = run(engine, requests)
    return [
        Answer(whole.tokens[:cut] + rest.tokens, rest.finish_reason)
        for cut, rest in zip(cuts, answers, strict=True)
    ]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_the_whole_is_that_of_an_undisturbed_run_wherever_it_was_cut(name: str, case: str) -> None:
    prompt, params = prompt_for(name, 118 if case == "no limit" else 9), CASES[case]
    (whole,) = ask(engine_for(name), [prompt], params)

    answers = resume(engine_for(name), prompt, params, whole)

    assert len(answers) == 10
    for answer in answers:
        if case == "greedy":
            assert_greedy(name, prompt, answer.tokens)
        else:
            assert answer == whole
        assert answer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("min_tokens", [0, 5])
def test_stop_tokens_and_min_tokens_count_from_the_first_token(min_tokens: int) -> None:
    prompt = prompt_for("llama-gqa")
    (free,) = ask(engine_for("llama-gqa"), [prompt], greedy(8))
    eos_ids = frozenset([free.tokens[3]])
    params = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=min_tokens, stop_token_ids=[3, 4, 5])
    (whole,) = ask(engine_for("llama-gqa", eos_ids=eos_ids), [prompt], params)

    answers = resume(engine_for("llama-gqa", eos_ids=eos_ids), prompt, params, whole)

    assert answers == [whole] * len(whole.tokens)
    assert len(whole.tokens) == 4 if min_tokens == 0 else len(whole.tokens) > 5


def test_resumed_requests_that_preempt_each_other_are_not_disturbed() -> None:
    prompt, params = prompt_for("llama-gqa"), replace(CASES["penalties"], temperature=0.8, seed=2)
    (whole,) = ask(engine_for("llama-gqa"), [prompt], params)
    tight = replace(ROOMY, max_batch_tokens=9, kv_bytes=kv_bytes(engine_for("llama-gqa"), 7))

    assert resume(engine_for("llama-gqa", tight), prompt, params, whole) == [whole] * 10


def test_an_output_that_is_no_output_is_refused() -> None:
    engine, request_id = engine_for("llama-gqa"), RequestId("a")

    with pytest.raises(BadPrompt, match="`output` holds 10000, a token id must be"):
        engine.request(request_id, [1, 2], greedy(), output=[10_000])
    with pytest.raises(BadPrompt, match="the output of 12 tokens is complete"):
        engine.request(request_id, [1, 2], greedy(12), output=[5] * 12)
    with pytest.raises(PromptTooLong, match="prompt has 2 tokens and output 126, limit: 127"):
        engine.request(request_id, [1, 2], greedy(500), output=[5] * 126)
