"""The whole engine against transformers, for every family, under every schedule (DESIGN: same output, b)."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch

from hearth.core.config import EngineConfig
from hearth.core.errors import BadPrompt, BadSampling, LogitsNotFinite, PromptTooLong
from hearth.core.types import FinishReason, RequestId, SamplingParams
from hearth.engine.engine import Engine, Usage
from hearth.engine.pending_step import PendingStep, StepInFlight
from hearth.engine.step_times import StepTimer
from hearth.policy.batch.plan import StepPlan
from hearth.policy.batch.prompt_allowance import FIRST_LONE_TOKENS
from tests.engine.harness import (
    ROOMY,
    admissions_of,
    ask,
    assert_greedy,
    engine_for,
    greedy,
    kv_bytes,
    new_id,
    prompts_for,
    run,
)
from tests.models.zoo import FAMILIES, VARIANTS, build

LENGTHS = [1, 3, 4, 5, 17, 30]


def prompts(name: str, lengths: list[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    model, _ = build(name)
    return prompts_for(model.config.vocab_size, lengths, seed)


@pytest.mark.parametrize("name", ["llama-gqa", "opt-350m", "gemma3"])
def test_greedy_tokens_are_those_of_transformers_generate(name: str) -> None:
    """Elsewhere `assert_greedy` finds as much in the logits of one pass, which takes far less time."""
    model, _ = build(name)
    asked = prompts(name, [9])
    model.generation_config.eos_token_id = None
    generated = model.generate(torch.tensor(asked), max_new_tokens=12, do_sample=False, pad_token_id=0)

    (answer,) = ask(engine_for(name), asked, greedy(12))

    if answer.tokens != generated[0, 9:].tolist():
        assert assert_greedy(name, asked[0], answer.tokens) > 0
    assert answer.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("name", VARIANTS)
def test_mixed_batches_and_chunked_prefill_give_the_best_tokens(name: str) -> None:
    config = replace(ROOMY, max_batch_tokens=7, max_seqs=4)
    asked = prompts(name)

    answers = ask(engine_for(name, config), asked, greedy())

    for prompt, answer in zip(asked, answers, strict=True):
        assert_greedy(name, prompt, answer.tokens)
        assert len(answer.tokens) == 12


def test_a_prompt_has_as_many_tokens_of_each_step_as_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the answer of a short one, and from the first step that anybody decodes in."""
    asked = prompts("llama-gqa", [5, 40])
    engine = engine_for("llama-gqa", replace(ROOMY, max_batch_tokens=16, max_step=0.06))
    monkeypatch.setattr(engine.allowance, "num_tokens", lambda num_waiting_tokens: 4)
    plans, launch = list[StepPlan](), engine.runner.launch

    def watched_launch(plan: StepPlan) -> PendingStep:
        plans.append(plan)
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", watched_launch)
    answers = ask(engine, asked, greedy())

    assert [plan.num_prompt_tokens for plan in plans][:9] == [5 + 8, *[4] * 8]
    for prompt, answer in zip(asked, answers, strict=True):
        assert_greedy("llama-gqa", prompt, answer.tokens)


def test_steps_are_measured() -> None:
    engine = engine_for("llama-gqa", replace(ROOMY, max_step=0.06))
    assert engine.samples.typical() == []
    ask(engine, prompts("llama-gqa", [5]), greedy())
    assert engine.samples.typical() != []


def test_nobody_waits_for_the_driver_between_a_step_and_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may be busy for two steps with a graph of some model, and is asked for times later."""
    engine = engine_for("llama-gqa", replace(ROOMY, max_step=0.06))
    asked, launch = list[str](), engine.runner.launch
    monkeypatch.setattr(PendingStep, "is_computed", False)  # as on a device
    monkeypatch.setattr(StepTimer, "seconds", lambda timer: asked.append("time") or 0.01)

    def watched_launch(plan: StepPlan) -> PendingStep:
        asked.append("launch")
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", watched_launch)
    engine.add(engine.request(new_id(), prompts("llama-gqa", [5])[0], greedy(3)))
    engine.step()
    for num_measured in range(3):
        asked.clear()
        tokens = engine.step().outputs.tokens
        assert len(tokens) == 1
        assert asked == ["time"] * (num_measured > 0) + ["launch"] * (num_measured < 2)
    taken_in = weakref.ref(engine._unmeasured.pending)  # type: ignore[union-attr] # of the last step
    engine.flush()
    assert asked == ["time", "time"]
    assert taken_in() is None  # its event went behind its tokens, too


def test_an_engine_knows_whether_first_tokens_need_only_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for("llama-gqa")
    engine.add(engine.request(new_id(), prompts("llama-gqa", [5])[0], greedy(3)))
    assert not engine.computes_first_tokens, "nothing was launched"
    engine.step()
    assert not engine.computes_first_tokens, "a CPU is done with it"
    monkeypatch.setattr(PendingStep, "is_done", False)  # as on a device
    assert engine.computes_first_tokens
    engine.step()
    assert not engine.computes_first_tokens, "the first was taken in"
    engine.flush()
    assert not engine.computes_first_tokens


def test_the_device_is_waited_for_where_the_books_of_a_broken_engine_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, done = engine_for("llama-gqa"), list[str]()
    monkeypatch.setattr(engine.batcher.blocks, "release_all", lambda sequences: 1 // 0)
    monkeypatch.setattr(engine.runner, "close", lambda: done.append("waited"))
    engine.add(engine.request(new_id(), prompts("llama-gqa", [5])[0], greedy(1)))
    engine.step()
    with pytest.raises(ZeroDivisionError):
        engine.step()

    with pytest.raises(ZeroDivisionError):
        engine.close()
    assert done == ["waited"]


def test_a_cpu_begins_with_few_tokens_of_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows yet how long it takes for more, be it the first step of a model or behind its load."""
    (asked,) = prompts("llama-gqa", [60])
    engine = engine_for("llama-gqa", replace(ROOMY, max_step=0.06))
    num_tokens, launch = list[int](), engine.runner.launch

    def watched_launch(plan: StepPlan) -> PendingStep:
        num_tokens.append(plan.num_prompt_tokens)
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", watched_launch)
    (answer,) = ask(engine, [asked], greedy())

    assert 0 < num_tokens[0] <= FIRST_LONE_TOKENS
    assert sum(num_tokens) == 60
    assert_greedy("llama-gqa", asked, answer.tokens)


class OpeningGate:
    """A gate whose weights are always there, and all of them after some steps."""

    def __init__(self, num_steps: float) -> None:
        self._num_steps = num_steps

    def is_open(self) -> bool:
        return self._num_steps <= 0

    def embed(self) -> None:
        pass

    def layer(self, layer: int) -> None:
        pass

    def head(self) -> None:
        self._num_steps -= 1


def test_steps_that_may_have_waited_for_weights_are_not_measured() -> None:
    engine = engine_for("llama-gqa", replace(ROOMY, max_step=0.06))
    engine.runner.layers.follow(OpeningGate(math.inf))
    ask(engine, prompts("llama-gqa", [5]), greedy())
    assert engine.samples.typical() == []


def test_a_long_prompt_beside_decoding_soon_advances_by_many_tokens_on_a_slow_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps take as long whatever they have, and the first one waits for weights, so it tells nothing."""
    monkeypatch.setattr(StepTimer, "seconds", lambda timer: 0.4)
    engine = engine_for("llama-gqa", replace(ROOMY, max_step=0.1))
    engine.runner.layers.follow(OpeningGate(1))
    asked, num_tokens, launch = prompts("llama-gqa", [10, 100]), list[int](), engine.runner.launch

    def watched_launch(plan: StepPlan) -> StepInFlight:
        num_tokens.append(plan.num_prompt_tokens)
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", watched_launch)
    answers = ask(engine, asked, greedy(20))

    assert num_tokens[0] <= FIRST_LONE_TOKENS
    assert sum(num_tokens) == 110
    assert max(num_tokens) > 2 * FIRST_LONE_TOKENS
    for prompt, answer in zip(asked, answers, strict=True):
        assert_greedy("llama-gqa", prompt, answer.tokens)


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "opt-350m", "falcon-40b"])
def test_preempted_requests_come_back_with_the_best_tokens(name: str) -> None:
    asked = prompts(name)
    config = replace(ROOMY, max_batch_tokens=16, kv_bytes=kv_bytes(engine_for(name), 14))
    engine = engine_for(name, config)
    admissions = admissions_of(engine)
    answers = ask(engine, asked, greedy())

    assert len(admissions) > len(asked), "nothing was preempted"
    for prompt, answer in zip(asked, answers, strict=True):
        assert_greedy(name, prompt, answer.tokens)


@pytest.mark.parametrize(
    ("name", "is_known"), [*((name, True) for name in VARIANTS), *((name, False) for name in FAMILIES)]
)
def test_prefix_hits_give_the_best_tokens(name: str, is_known: bool) -> None:
    engine = engine_for(name)
    (shared,) = prompts(name, [16])
    tails = prompts(name, [1, 5, 9], seed=1)
    if is_known:
        ask(engine, [shared + tails[0]], greedy())
    admissions = admissions_of(engine)
    answers = ask(engine, [shared + tail for tail in tails], greedy())

    assert [admission.num_cached_tokens for admission in admissions] == [16 if is_known else 0, 16, 16]
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
        engine.runner.layers.kv.view(torch.uint8).fill_(fill)
        for number, prompt in enumerate(asked):
            engine.add(engine.request(RequestId(str(number)), prompt, params))
        outputs = []
        while engine.has_work:
            outputs.extend(engine.step().outputs)
        runs.append(outputs)

    assert runs[0] == runs[1]


def test_weights_that_move_change_nothing() -> None:
    asked = prompts("qwen3")
    expected = [answer.tokens for answer in ask(engine_for("qwen3"), asked, greedy())]
    engine, elsewhere = engine_for("qwen3"), engine_for("qwen3")
    engine.runner.rebind(elsewhere.runner.layers.decoder.weights)

    assert [answer.tokens for answer in ask(engine, asked, greedy())] == expected


def test_a_workspace_that_moves_changes_nothing_and_its_old_memory_is_not_touched_any_more() -> None:
    asked = prompts("qwen3")
    expected = [answer.tokens for answer in ask(engine_for("qwen3"), asked, greedy())]
    engine = engine_for("qwen3")
    before = engine.runner.layers.decoder.logits
    engine.runner.rebind(
        engine.runner.layers.decoder.weights, torch.full((1 << 24,), 0xFF, dtype=torch.uint8)
    )
    before.fill_(7.0)

    assert [answer.tokens for answer in ask(engine, asked, greedy())] == expected
    assert (before == 7.0).all()


def test_a_step_tells_who_was_admitted_and_who_gave_way() -> None:
    tight = replace(ROOMY, max_batch_tokens=16, kv_bytes=kv_bytes(engine_for("llama-gqa"), 6))
    engine = engine_for("llama-gqa", tight)
    (shared,) = prompts("llama-gqa", [8])
    ask(engine, [shared], greedy(1))
    for name in ("old", "young"):
        engine.add(engine.request(RequestId(name), [*shared, 5], greedy(10)))
    told = []
    while engine.has_work:
        outcome = engine.step()
        told += [(a.request_id, a.num_cached_tokens) for a in outcome.admitted]
        told += [(request_id, None) for request_id in outcome.preempted]

    assert told[:3] == [("old", 8), ("young", 8), ("young", None)]
    assert [request_id for request_id, _ in told[3:]] == ["young"]


def test_usage_counts_requests_and_the_blocks_they_hold() -> None:
    engine = engine_for(
        "llama-gqa", replace(ROOMY, max_seqs=1, kv_bytes=kv_bytes(engine_for("llama-gqa"), 9))
    )
    idle = engine.usage
    for name in ("first", "second"):
        engine.add(engine.request(RequestId(name), [5, 6, 7, 8, 9], greedy(4)))
    engine.step()

    assert idle == Usage(num_running=0, num_waiting=0, kv_used_blocks=0, kv_cached_blocks=0, kv_blocks=9)
    assert engine.usage == Usage(
        num_running=1, num_waiting=1, kv_used_blocks=2, kv_cached_blocks=0, kv_blocks=9
    )
    while engine.has_work:
        engine.step()
    assert engine.usage == replace(idle, kv_cached_blocks=2)


def tensors() -> list[torch.Tensor]:
    return [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]


def test_an_engine_that_is_let_go_leaves_no_memory_behind() -> None:
    """At once, by its last reference: a cycle would keep gigabytes until the collector comes by."""
    build("llama-gqa")
    gc.collect()
    gc.disable()
    try:
        before = set(map(id, tensors()))
        engine = engine_for("llama-gqa")
        params = replace(greedy(9), logit_bias={3: 1.0}, repetition_penalty=1.2)
        for name in ("a", "b"):
            engine.add(engine.request(RequestId(name), [5, 6, 7], params))
        for _ in range(3):
            engine.step()
        left = [weakref.ref(tensor) for tensor in tensors() if id(tensor) not in before]

        engine.close()
        del engine

        assert len(left) > 30
        assert not any(tensor() is not None for tensor in left)
    finally:
        gc.enable()


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


# --- logits that are not finite ---

NAN_TOKEN = 2  #: below all that `prompts` draws


def with_nan_embedding(config: EngineConfig = ROOMY) -> Engine:
    """An engine in which one token's embedding is NaN, so that all who have it in their sequence break."""
    engine = engine_for("llama-gqa", config)
    embedding(engine)[NAN_TOKEN] = torch.nan
    return engine


def embedding(engine: Engine) -> torch.Tensor:
    weights = engine.runner.layers.decoder.weights
    assert weights.embed is not None
    assert weights.head is not None
    assert weights.embed.data_ptr() != weights.head.weight.data_ptr(), "all logits would be NaN"
    return weights.embed


@pytest.mark.parametrize("budget", [256, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_breaks_fails_and_its_neighbours_are_untouched(
    budget: int, temperature: float
) -> None:
    config = replace(ROOMY, max_batch_tokens=budget, max_seqs=4)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=10, ignore_eos=True)
    asked = prompts("llama-gqa", [5, 9, 17, 30, 8])
    broken = {1: 0, 3: 20}  #: where in the prompt
    for number, at in broken.items():
        asked[number][at] = NAN_TOKEN

    undisturbed = ask(engine_for("llama-gqa", config), asked, params)
    answers = ask(with_nan_embedding(config), asked, params)

    for number, answer in enumerate(answers):
        if number in broken:
            assert (answer.tokens, answer.finish_reason, type(answer.error)) == ([], None, LogitsNotFinite)
        else:
            assert answer == undisturbed[number]


def test_a_request_that_breaks_while_it_is_answered_keeps_what_it_has() -> None:
    """The step behind the broken one is under way by the time that the host knows."""
    (asked,) = prompts("llama-gqa", [5])
    engine = with_nan_embedding()
    wishes = [replace(greedy(8), logit_bias={NAN_TOKEN: 100.0}), greedy(8)]

    answer, neighbour = run(engine, [engine.request(new_id(), asked, wish) for wish in wishes])

    assert (answer.tokens, answer.finish_reason) == ([NAN_TOKEN], None)
    assert isinstance(answer.error, LogitsNotFinite)
    assert "after 5 tokens of prompt and 1 of output" in str(answer.error)
    assert neighbour == ask(engine_for("llama-gqa"), [asked], greedy(8))[0]
    assert engine.tables.needed_bytes() == {}
    assert engine.usage.num_running == engine.usage.kv_used_blocks == 0


def test_a_prompt_that_breaks_fails_at_the_chunk_where_it_does() -> None:
    """Before anything of that chunk could be a prefix of others, and before the rest is computed."""
    (asked,) = prompts("llama-gqa", [30])
    asked[9] = NAN_TOKEN
    engine = with_nan_embedding(replace(ROOMY, max_batch_tokens=8))
    engine.add(engine.request(RequestId("a"), asked, greedy()))

    outcomes = [engine.step() for _ in range(3)]

    assert [len(outcome.failures) for outcome in outcomes] == [0, 0, 1]
    assert engine.usage == Usage(0, 0, 0, 0, engine.usage.kv_blocks)


@pytest.mark.parametrize("budget", [256, 7])
def test_nobody_finds_the_prefix_of_a_request_that_broke(budget: int) -> None:
    (asked,) = prompts("llama-gqa", [30])
    asked[11] = NAN_TOKEN
    config = replace(ROOMY, max_batch_tokens=budget)
    engine = with_nan_embedding(config)
    (broken,) = ask(engine, [asked], greedy())
    assert isinstance(broken.error, LogitsNotFinite)
    sound = engine_for("llama-gqa", config)
    embedding(engine)[NAN_TOKEN] = embedding(sound)[NAN_TOKEN]  # as after a fault that has passed
    admissions = admissions_of(engine)

    assert ask(engine, [asked], greedy()) == ask(sound, [asked], greedy())
    assert admissions[0].num_cached_tokens == 0
