"""The Python API over a tiny Llama and a tokenizer of its size, judged by transformers."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from hearth import (
    LLM,
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from hearth.cli import local_models
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.observe.views import ModelView
from hearth.core.config import EngineConfig
from hearth.core.errors import (
    BadCheckpoint,
    BadGuide,
    BadPrompt,
    BadSampling,
    BadTokenizer,
    DeviceError,
    EngineFailed,
    HearthError,
    LogitsNotFinite,
    ModelError,
    PromptTooLong,
    UnknownModel,
)
from hearth.core.types import FinishReason
from hearth.engine.engine import StepOutcome, StepOutputs
from hearth.engine.loop import Outbox, StepLoop
from hearth.inputs import Prompt
from hearth.offline import find_model
from hearth.outputs import Delta
from hearth.policy.batch.plan import EngineRequest
from hearth.store.format.convert import convert
from hearth.system import garbage
from hearth.text.tokenizer import Tokenizer
from hearth.text.transcript import Transcript
from tests.completions import completions
from tests.engine.harness import assert_greedy, engine_for, reference_logits
from tests.models.zoo import build

NAME = "llama-gqa"
VOCAB_SIZE = 160
EOS_ID = 2
NAN_ID = 3  #: a character that no prompt has
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
CONFIG = EngineConfig(max_batch_tokens=64, max_seqs=8, block_tokens=4, kv_bytes=8 << 20)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
PATIENCE_S = 120.0


def tokenizer() -> Backend:
    """One token per byte: printable ASCII and as many other bytes as the model has room for."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<unk>", "<s>", "</s>", *letters[: VOCAB_SIZE - 3]]
    backend = Backend(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(names[:3])
    return backend


#: Tokens whose text is one ASCII character, so that text and tokens can be told from each other at sight.
LETTERS = [
    token_id
    for name, token_id in sorted(tokenizer().get_vocab().items())
    if len(name) == 1 and name.isascii()
]


def saved(directory: Path, name: str = NAME) -> Path:
    """A model directory with a tokenizer."""
    shutil.copytree(build(name).directory, directory)
    tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return saved(tmp_path / "model")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(saved(tmp_path_factory.mktemp("llm") / "model"), device="cpu", engine=CONFIG) as llm:
        yield llm


@pytest.fixture(scope="module")
def converted_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    root = tmp_path_factory.mktemp("converted")
    convert(saved(root / "model"), root / "converted", dtype="float32")
    with LLM(root / "converted", device="cpu", engine=CONFIG) as llm:
        yield llm


def greedy(max_tokens: int | None = 8, **others: object) -> SamplingParams:
    """Letters only; does not end by itself unless told otherwise."""
    fields = {"temperature": 0.0, "max_tokens": max_tokens, "allowed_token_ids": LETTERS, **others}
    return SamplingParams(**fields)  # type: ignore[arg-type] # fields of several types


def wait_until_idle(llm: LLM) -> None:
    """A cancellation takes effect at the next step."""
    deadline_s = time.monotonic() + PATIENCE_S
    while llm.engine.has_work or not llm.engine.batcher.is_settled:
        assert time.monotonic() < deadline_s, "the engine still has work"
        time.sleep(0.001)


def text_of(token_ids: list[int]) -> str:
    return tokenizer().decode(token_ids)


def test_tokens_are_the_best_by_transformers_and_text_is_theirs(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate("keep warm", params)

    (completion,) = output.outputs
    assert output.prompt == "keep warm"
    assert output.prompt_token_ids == tokenizer().encode("keep warm").ids
    assert_greedy(NAME, output.prompt_token_ids, completion.token_ids)
    assert len(completion.token_ids) == 12
    assert completion.text == text_of(completion.token_ids)
    assert (completion.finish_reason, completion.logprobs) == (LENGTH, None)


def test_a_completion_is_the_text_behind_its_prompt(tmp_path: Path) -> None:
    backend = tokenizer()
    backend.decoder = decoders.Metaspace(replacement="!")  # which drops the space that a text begins with
    backend.save(str(tmp_path / "tokenizer.json"))
    (space,) = backend.encode("!").ids
    params = greedy(3, allowed_token_ids=[space])

    with LLM.over(engine_for(NAME), Tokenizer.load(tmp_path)) as llm:
        (completion,) = completions(llm, "Once upon", params)
        streamed = "".join(delta.text for delta in llm.stream("Once upon", params))

    assert completion.text == streamed == "   "


def test_text_and_its_token_ids_are_the_same_prompt(llm: LLM) -> None:
    ids = tokenizer().encode("hearth").ids

    by_text, by_ids, in_tuple = (completions(llm, p, greedy())[0] for p in ("hearth", ids, tuple(ids)))

    assert by_text == by_ids == in_tuple


def test_a_mixed_list_is_answered_in_its_order(llm: LLM) -> None:
    prompts: list[Prompt] = ["a long prompt, read in several steps; " * 2, [70, 71], "b", (80, 81, 82)]
    params = [greedy(n) for n in (3, 9, 1, 5)]

    found = completions(llm, prompts, params)

    alone = [completions(llm, [prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    assert found == alone
    assert [len(completion.token_ids) for completion in found] == [3, 9, 1, 5]


def test_no_prompts_give_no_completions(llm: LLM) -> None:
    assert completions(llm, []) == []


def test_more_prompts_than_sequences_that_run_at_once_are_all_answered(llm: LLM) -> None:
    prompts = [[3 + number] for number in range(3 * CONFIG.max_seqs)]

    outputs = llm.generate(prompts, greedy(3))

    assert [output.prompt_token_ids for output in outputs] == prompts


def test_without_params_the_defaults_apply(llm: LLM) -> None:
    (completion,) = completions(llm, "warm")

    assert 1 <= len(completion.token_ids) <= 16


def test_the_progress_bar_changes_no_answer(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    quiet, shown = (llm.generate(["a", "b"], greedy(), use_tqdm=is_shown) for is_shown in (False, True))

    assert quiet == shown
    told = capsys.readouterr()
    assert ("generating" in told.err, told.out) == (True, "")


def test_the_end_of_sequence_token_stops_and_has_no_text(llm: LLM) -> None:
    only_eos = SamplingParams(
        temperature=0.0, max_tokens=8, allowed_token_ids=[EOS_ID], skip_special_tokens=False
    )

    (completion,) = completions(llm, "warm", only_eos)

    assert (completion.token_ids, completion.text, completion.finish_reason) == ([EOS_ID], "", STOP)


def test_ignore_eos_goes_on(llm: LLM) -> None:
    (completion,) = completions(
        llm,
        "warm",
        SamplingParams(temperature=0.0, max_tokens=4, allowed_token_ids=[EOS_ID], ignore_eos=True),
    )

    assert (completion.token_ids, completion.finish_reason) == ([EOS_ID] * 4, LENGTH)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_ends_the_answer_and_is_shown_only_if_asked_for(llm: LLM, include: bool) -> None:
    (free,) = completions(llm, "warm", greedy(8))
    stop = free.token_ids[4]
    expected = free.token_ids[: free.token_ids.index(stop) + 1]

    (completion,) = completions(
        llm, "warm", greedy(8, stop_token_ids=[stop], include_stop_str_in_output=include)
    )

    assert (completion.token_ids, completion.finish_reason) == (expected, STOP)
    assert completion.text == text_of(expected if include else expected[:-1])


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_the_text_and_ends_the_request(llm: LLM, include: bool) -> None:
    (free,) = completions(llm, "warm", greedy(20))
    stop = free.text[5:8]
    start = free.text.find(stop)

    (completion,) = completions(
        llm, "warm", greedy(None, stop=["never ever", stop], include_stop_str_in_output=include)
    )

    assert completion.text == free.text[: start + len(stop) if include else start]
    assert completion.token_ids == free.token_ids[: start + len(stop)]
    assert completion.finish_reason is STOP
    wait_until_idle(llm)


def test_a_stream_ends_with_its_stop_string(llm: LLM) -> None:
    (free,) = completions(llm, "warm", greedy(20))
    stop = free.text[5:8]

    deltas = list(llm.stream("warm", greedy(None, stop=stop)))

    assert "".join(delta.text for delta in deltas) == free.text[: free.text.find(stop)]
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [STOP]
    wait_until_idle(llm)


def test_min_tokens_keeps_stop_tokens_and_stop_strings_away(llm: LLM) -> None:
    (free,) = completions(llm, "warm", greedy(12))
    params = greedy(12, min_tokens=6, stop=list(set(free.text)), stop_token_ids=[EOS_ID])

    (completion,) = completions(llm, "warm", params)

    assert (completion.token_ids, completion.text) == (free.token_ids[:7], free.text[:6])


def test_the_context_ends_an_answer_without_max_tokens(llm: LLM) -> None:
    (completion,) = completions(llm, [[5] * 100], greedy(None))

    assert (len(completion.token_ids), completion.finish_reason) == (28, LENGTH)


@pytest.mark.parametrize("wanted", [0, 1, 5])
def test_logprobs_are_those_of_transformers(llm: LLM, wanted: int) -> None:
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=6, ignore_eos=True, logprobs=wanted)

    (output,) = llm.generate("warm", params)

    (completion,) = output.outputs
    prompt, tokens = output.prompt_token_ids, completion.token_ids
    expected = reference_logits(NAME, (*prompt, *tokens)).log_softmax(-1)[len(prompt) - 1 : -1]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 6
    for row, token, logprobs in zip(expected, tokens, completion.logprobs, strict=True):
        assert next(iter(logprobs)) == token
        assert logprobs[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert logprobs[token].decoded_token == text_of([token])
        best = row.topk(wanted).indices.tolist()
        assert set(logprobs) == {token, *best}
        for rank, each in enumerate(best, 1):
            assert logprobs[each].rank == rank
            assert logprobs[each].logprob == pytest.approx(float(row[each]), abs=1e-4)
    chosen = [each[token].logprob for each, token in zip(completion.logprobs, tokens, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen))


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_prompt_logprobs_are_those_of_transformers(llm: LLM, max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=2, ignore_eos=True)
    (output,) = llm.generate(["Hello there"], params)

    (completion,) = output.outputs
    prompt = output.prompt_token_ids
    expected = reference_logits(NAME, tuple(prompt)).log_softmax(-1)
    assert output.prompt_logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None
    for row, token, told in zip(expected, prompt[1:], others, strict=False):
        assert told is not None
        assert told[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert told[token].rank == 1 + int((row > row[token]).sum())
        assert set(told) == {token, *row.topk(2).indices.tolist()}
    assert (len(completion.token_ids), completion.finish_reason) == (max_tokens, LENGTH)
    assert completion.text == "" or max_tokens
    assert sum(len(delta.token_ids) for delta in llm.stream("Hello there", params)) == max_tokens


def test_an_answer_of_no_tokens_ends_by_its_length_whatever_is_sampled_behind_the_prompt(llm: LLM) -> None:
    ((token,),) = (one.token_ids for one in completions(llm, ["Hello there"], greedy(1)))
    (completion,) = completions(llm, ["Hello there"], greedy(0, stop_token_ids=(token,)))
    assert (completion.token_ids, completion.finish_reason) == ([], LENGTH)


def test_each_prompt_gets_as_many_logprobs_as_it_asked_for(llm: LLM) -> None:
    params = [greedy(3), greedy(3, logprobs=0), greedy(3, logprobs=4), greedy(3, logprobs=2)]

    none, zero, four, two = (completion.logprobs for completion in completions(llm, ["warm"] * 4, params))

    assert none is None
    for logprobs, count in ((zero, 1), (four, 4), (two, 2)):  # the greedy token is the best one
        assert logprobs is not None
        assert [len(each) for each in logprobs] == [count] * 3


def test_a_prompt_that_breaks_raises_its_own_error_and_the_model_answers_on(directory: Path) -> None:
    with LLM(directory, device="cpu", engine=CONFIG) as llm:
        (expected,) = completions(llm, "warm", greedy(3))
        weights = llm.engine.runner.layers.decoder.weights
        assert weights.embed is not None
        weights.embed[NAN_ID] = float("nan")

        with pytest.raises(LogitsNotFinite, match="NaN or infinite logits after 2 tokens of prompt"):
            completions(llm, [[NAN_ID, NAN_ID], "warm"], greedy(3))

        with pytest.raises(LogitsNotFinite):
            list(llm.stream([NAN_ID], greedy(3)))
        assert completions(llm, "warm", greedy(3)) == [expected]


def test_what_breaks_behind_a_stop_string_harms_nobody(directory: Path) -> None:
    """The engine goes on until it hears that the answer has ended."""
    with LLM(directory, device="cpu", engine=CONFIG) as llm:
        weights = llm.engine.runner.layers.decoder.weights
        assert weights.embed is not None
        weights.embed[NAN_ID] = float("nan")
        stopped = greedy(9, logit_bias={NAN_ID: 100.0}, stop=[text_of([NAN_ID])])

        (first, second) = completions(llm, ["warm", "cold"], [stopped, greedy(30)])

    assert (first.token_ids, first.finish_reason) == ([NAN_ID], STOP)
    assert len(second.token_ids) == 30


def test_the_same_seed_gives_the_same_answer_in_any_company(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    (alone,) = completions(llm, "warm", params)

    together = completions(llm, ["cold", "warm", "lukewarm"], [SamplingParams(), params, SamplingParams()])

    assert together[1] == alone


def test_without_a_seed_answers_differ(llm: LLM) -> None:
    answers = completions(llm, ["warm"] * 4, SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True))

    assert len({tuple(answer.token_ids) for answer in answers}) > 1


def test_the_seed_of_a_model_repeats_its_answers_in_order(tmp_path: Path) -> None:
    directory = saved(tmp_path / "model")
    params = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)
    told = []
    for seed in (0, 0, 1):
        with LLM(directory, device="cpu", engine=CONFIG, seed=seed) as llm:
            told.append([tuple(one.token_ids) for one in completions(llm, ["warm"] * 3, params)])

    assert told[0] == told[1] != told[2]
    assert len(set(told[0])) > 1


def test_the_deltas_of_a_stream_are_what_generate_returns(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=5, max_tokens=40, ignore_eos=True, logprobs=2)
    (completion,) = completions(llm, "warm", params)

    deltas = list(llm.stream("warm", params))

    assert "".join(delta.text for delta in deltas) == completion.text
    assert [token for delta in deltas for token in delta.token_ids] == completion.token_ids
    assert completion.logprobs is not None
    told = [each.logprob for delta in deltas for each in delta.logprobs or ()]
    own = zip(completion.token_ids, completion.logprobs, strict=True)
    assert told == [logprobs[token].logprob for token, logprobs in own]
    assert [delta.finish_reason for delta in deltas] == [None] * 39 + [LENGTH]
    assert "\ufffd" in completion.text, "no broken character put the detokenizer to the test"


def test_leaving_a_stream_early_frees_the_engine(llm: LLM) -> None:
    wait_until_idle(llm)
    num_free = llm.engine.batcher.blocks.num_available
    stream = llm.stream("warm", greedy(None))
    next(stream)

    stream.close()  # type: ignore[attr-defined] # as leaving a `for` does

    wait_until_idle(llm)
    llm.engine.batcher.check()
    assert llm.engine.batcher.blocks.num_available == num_free


def test_no_step_waits_for_a_collection_of_garbage_and_afterwards_all_is_as_before(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, found, step = gc.get_threshold(), set[int](), llm.engine.step

    def watched() -> StepOutcome:
        found.add(gc.get_threshold()[0])
        return step()

    monkeypatch.setattr(llm.engine, "step", watched)
    completions(llm, ["warm", "cold"], greedy(4))
    assert (found, gc.get_threshold()) == ({garbage.MAX_YOUNG}, given)
    found.clear()
    assert len(list(llm.stream("warm", greedy(4)))) == 4
    assert (found, gc.get_threshold()) == ({garbage.MAX_YOUNG}, given)
    stream = llm.stream("warm", greedy(None))
    next(stream)
    stream.close()  # type: ignore[attr-defined] # as leaving a `for` does
    assert gc.get_threshold() == given
    with pytest.raises(BadPrompt):
        completions(llm, [[VOCAB_SIZE]], greedy(4))
    assert gc.get_threshold() == given


def test_the_device_has_all_prompts_before_their_text_is_looked_at(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that fails, none of them stays behind."""
    are_streamed: list[bool] = []

    def decode(*_: object, **__: object) -> str:
        raise RuntimeError("no text")

    def add(requests: Sequence[EngineRequest], outbox: Outbox) -> None:
        are_streamed.extend(request.is_streamed for request in requests)
        StepLoop.add(llm._loop, requests, outbox)

    monkeypatch.setattr(llm._loop, "add", add)
    monkeypatch.setattr(Tokenizer, "decode", decode)
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    with pytest.raises(RuntimeError, match="no text"):
        completions(llm, [[5, 6], [7, 8]], params)
    with pytest.raises(RuntimeError, match="no text"):
        next(llm.stream([5, 6], params))
    monkeypatch.undo()
    assert are_streamed == [False, False, True]
    wait_until_idle(llm)


def test_the_text_of_long_answers_is_made_in_small_parts_and_is_that_of_a_stream(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end, when the device has nothing to do, little of it is left."""
    sizes: list[int] = []

    def push_all(transcript: Transcript, tokens: Sequence[int], reason: FinishReason | None) -> str:
        sizes.append(len(tokens))
        return whole(transcript, tokens, reason)

    whole = Transcript.push_all
    monkeypatch.setattr(Transcript, "push_all", push_all)
    params = [SamplingParams(temperature=1.0, seed=n, max_tokens=20 + 9 * n, ignore_eos=True) for n in (0, 5)]

    answers = completions(llm, [[50, 60], [70, 80]], params)

    assert [len(answer.token_ids) for answer in answers] == [20, 65]
    assert (sum(sizes), max(sizes)) == (85, 16)
    streams = [llm.stream(prompt, one) for prompt, one in zip([[50, 60], [70, 80]], params, strict=True)]
    assert [answer.text for answer in answers] == ["".join(d.text for d in stream) for stream in streams]


def test_only_an_answer_that_its_text_ends_has_to_be_cancelled(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (whole,) = completions(llm, "hearth", params)
    cancelled: list[str] = []
    monkeypatch.setattr(llm._loop, "cancel", cancelled.append)

    assert completions(llm, ["hearth", "other"], params)[0] == whole
    assert not cancelled

    (cut,) = completions(llm, "hearth", replace(params, stop=whole.text[2:4]))
    assert cut.finish_reason is STOP
    assert len(cancelled) == 1
    monkeypatch.undo()
    wait_until_idle(llm)


def test_threads_that_ask_at_once_get_their_own_answers(llm: LLM) -> None:
    prompts: list[list[Prompt]] = [[f"{thread}", [50 + thread, 60]] for thread in range(6)]
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=10, ignore_eos=True)
    expected = [completions(llm, each, params) for each in prompts]

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda each: completions(llm, each, params), prompts))

    assert answers == expected


BAD_PROMPTS: list[tuple[object, type[HearthError], str]] = [
    ("", BadPrompt, "prompt has 0 tokens, at least 1 is needed"),
    ([], BadPrompt, "prompt has 0 tokens, at least 1 is needed"),
    ([5, 160], BadPrompt, "`prompt` holds 160, a token id must be an integer from 0 to 159"),
    ([5, True], BadPrompt, "`prompt` holds True"),
    ([5, "a"], BadPrompt, "`prompt` holds 'a'"),
    ([5] * 128, PromptTooLong, "prompt has 128 tokens, limit: 127 (the context holds 128"),
    ("x" * 500, PromptTooLong, "prompt has 500 tokens, limit: 127"),
    ("\ud800", BadPrompt, "a prompt must be valid Unicode"),
    (None, BadPrompt, "a prompt must be text or a list of token ids, given: NoneType"),
]


@pytest.mark.parametrize(("prompt", "error", "message"), BAD_PROMPTS, ids=[m for _, _, m in BAD_PROMPTS])
def test_one_bad_prompt_among_good_ones_is_an_error_and_nothing_is_generated(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, prompt: object, error: type[HearthError], message: str
) -> None:
    added: list[object] = []
    with monkeypatch.context() as patched:
        patched.setattr(llm.engine, "add", added.append)
        with pytest.raises(error) as refusal:
            completions(llm, ["good", prompt, "good"], greedy())  # type: ignore[arg-type] # wrong on purpose

    assert str(refusal.value).startswith(message)
    assert added == []
    assert len(completions(llm, "good", greedy(3))[0].token_ids) == 3


@pytest.mark.parametrize("prompts", [[5, 6, "text"], ["text", 5], [[5, 6], 7]], ids=str)
def test_token_ids_and_prompts_side_by_side_are_refused(
    llm: LLM, prompts: list[int | str | list[int]]
) -> None:
    with pytest.raises(BadPrompt, match="a list must have token ids or prompts, not both"):
        completions(llm, prompts, greedy())  # type: ignore[arg-type] # wrong on purpose


def test_a_stream_refuses_a_bad_prompt_before_it_is_read(llm: LLM) -> None:
    with pytest.raises(BadPrompt):
        llm.stream("", greedy())


@pytest.mark.parametrize(
    ("name", "value"), [("allowed_token_ids", [160]), ("stop_token_ids", [-1]), ("logit_bias", {9999: 1.0})]
)
def test_sampling_outside_of_the_vocabulary_is_refused(llm: LLM, name: str, value: object) -> None:
    with pytest.raises(BadSampling, match=f"`{name}` holds"):
        completions(llm, "good", SamplingParams(**{name: value}))  # type: ignore[arg-type] # of several types


@pytest.mark.parametrize("count", [0, 1, 3])
def test_params_must_be_one_or_one_for_each_prompt(llm: LLM, count: int) -> None:
    with pytest.raises(
        BadSampling, match=f"{count} sampling params or adapters for 2 prompts; pass one, or one for each"
    ):
        completions(llm, ["a", "b"], [greedy()] * count)


def test_an_unknown_sampling_name_is_an_error() -> None:
    with pytest.raises(TypeError, match="tempreature"):
        SamplingParams(tempreature=0.5)  # type: ignore[call-arg] # the point


def test_contradictory_sampling_values_are_refused() -> None:
    with pytest.raises(BadSampling, match="`min_tokens` must not exceed `max_tokens`: 9 > 8"):
        SamplingParams(min_tokens=9, max_tokens=8)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "float8"}, DeviceError, "unknown dtype: `float8`; supported: "),
        ({"device": "tpu"}, DeviceError, "unknown device: `tpu`; supported: auto, cpu, cuda"),
        ({"device": "cuda"}, DeviceError, "device `cuda` was asked for, but torch sees no CUDA device"),
        (
            {"max_model_len": 1},
            ModelError,
            "`max_model_len` must be from 2 to what the model was made for, 128",
        ),
        ({"max_model_len": 129}, ModelError, "`max_model_len` must be from 2 to .* 128; given: 129"),
        ({"engine": replace(CONFIG, kv_bytes=1)}, DeviceError, "KV memory of 1 bytes holds 0 blocks"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, object],
    error: type[HearthError],
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(error, match=message):
        LLM(directory, **options)  # type: ignore[arg-type] # of several types


def without_directory(path: Path) -> None:
    shutil.rmtree(path)


def without_config(path: Path) -> None:
    (path / "config.json").unlink()


def without_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def without_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")


def with_a_wrong_shape(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, path / "model.safetensors")


def with_half_the_weights(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def without_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()


def with_a_broken_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text('{"model": ')


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (without_directory, ModelError, "no model at `.*`; give a Hugging Face directory"),
        (without_config, ModelError, "config.json"),
        (without_weights, BadCheckpoint, "neither model.safetensors nor pytorch_model.bin"),
        (without_a_tensor, BadCheckpoint, "model.layers.1.mlp.up_proj.weight"),
        (with_a_wrong_shape, BadCheckpoint, r"model.norm.weight.*63"),
        (with_half_the_weights, BadCheckpoint, "is truncated or no safetensors file"),
        (without_tokenizer, BadTokenizer, "no `tokenizer.json` in"),
        (with_a_broken_tokenizer, BadTokenizer, "tokenizer.json cannot be read"),
    ],
)
def test_a_damaged_model_directory_is_refused(
    directory: Path, damage: Callable[[Path], None], error: type[HearthError], message: str
) -> None:
    damage(directory)

    with pytest.raises(error, match=message):
        LLM(directory, device="cpu", engine=CONFIG)


def test_max_context_limits_prompt_and_answer(directory: Path) -> None:
    with LLM(directory, device="cpu", engine=CONFIG, max_model_len=10) as short:
        (completion,) = completions(short, [[5] * 6], greedy(None))
        assert (len(completion.token_ids), completion.finish_reason) == (4, LENGTH)
        with pytest.raises(PromptTooLong, match="prompt has 10 tokens, limit: 9"):
            completions(short, [[5] * 10])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_dtype_answers_on_the_cpu(directory: Path, dtype: str) -> None:
    with LLM(directory, device="cpu", dtype=dtype, engine=CONFIG) as llm:
        assert len(completions(llm, "warm", greedy(4))[0].token_ids) == 4


def test_without_a_tokenizer_prompts_are_token_ids_and_answers_have_no_text(directory: Path) -> None:
    without_tokenizer(directory)
    with LLM(directory, device="cpu", engine=CONFIG, skip_tokenizer_init=True) as bare:
        (completion,) = completions(bare, [[5, 6]], SamplingParams(max_tokens=4, allowed_token_ids=[EOS_ID]))
        assert (completion.token_ids, completion.text) == ([EOS_ID] * 4, "")
        assert completion.finish_reason is LENGTH
        assert not bare.has_chat_template
        with pytest.raises(
            BadPrompt, match="loaded with `skip_tokenizer_init`, so prompts must be token ids"
        ):
            completions(bare, "text")
        with pytest.raises(BadPrompt, match="skip_tokenizer"):
            bare.chat_prompt([{"role": "user", "content": "warm"}])
        with pytest.raises(BadSampling, match="`stop` needs a tokenizer"):
            completions(bare, [[5, 6]], SamplingParams(stop="x"))


def test_a_chat_prompt_follows_the_template(llm: LLM) -> None:
    ids = llm.chat_prompt([{"role": "user", "content": "warm"}])

    assert llm.has_chat_template
    assert text_of(ids) == "[user]warm>"
    assert llm.generate(ids, greedy(3))[0].prompt_token_ids == ids


def test_a_model_without_template_takes_no_chat(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text("{}")
    with LLM(directory, device="cpu", engine=CONFIG) as plain:
        assert not plain.has_chat_template
        with pytest.raises(BadPrompt, match="this model has no chat template"):
            plain.chat_prompt([{"role": "user", "content": "warm"}])


def test_two_models_in_one_process_take_turns(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=10, ignore_eos=True)
    with LLM(saved(tmp_path / "other", "qwen3"), device="cpu", engine=CONFIG) as other:
        alone = [completions(each, "warm", params)[0].token_ids for each in (llm, other)]

        turns = list(zip(llm.stream("warm", params), other.stream("warm", params), strict=True))

    assert [[turn[side].token_ids[0] for turn in turns] for side in (0, 1)] == alone
    assert alone[0] != alone[1]


def asked_and_closed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, ask: Callable[[], object]
) -> BaseException | None:
    """What becomes of a question whose engine gets nowhere and is closed."""
    stepping = threading.Event()

    def step() -> StepOutcome:
        stepping.set()
        return StepOutcome(StepOutputs(), (), ())

    monkeypatch.setattr(llm.engine, "step", step)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        assert stepping.wait(PATIENCE_S)
        llm.close()
        return asked.exception(PATIENCE_S)


def test_closing_ends_live_requests(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(directory, device="cpu", engine=CONFIG)

    error = asked_and_closed(llm, monkeypatch, lambda: completions(llm, ["a", "b"], greedy()))

    assert isinstance(error, EngineFailed)
    assert str(error) == "the engine stopped during r1: it was closed; load the model again"


def test_closing_ends_live_streams(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(directory, device="cpu", engine=CONFIG)

    error = asked_and_closed(llm, monkeypatch, lambda: list(llm.stream("a", greedy())))

    assert isinstance(error, EngineFailed)


def test_prompts_may_come_from_a_generator(llm: LLM) -> None:
    assert len(completions(llm, (text for text in ["warm", "cold"]), greedy())) == 2


@pytest.mark.parametrize("prompt", [None, 5, b"warm"])
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: object) -> None:
    with pytest.raises(BadPrompt, match="a prompt must be text or a list of token ids"):
        completions(llm, prompt, greedy())  # type: ignore[arg-type] # the point of the test


def test_closing_lets_the_engine_and_its_memory_go() -> None:
    llm = LLM.over(engine_for("llama-gqa"), None)
    completions(llm, [[1, 2, 3]], greedy())
    engine = weakref.ref(llm.engine)

    llm.close()
    gc.collect()

    assert engine() is None


def test_use_after_closing_is_an_error_and_closing_twice_is_not(directory: Path) -> None:
    llm = LLM(directory, device="cpu", engine=CONFIG)
    stream = llm.stream("warm", greedy())
    llm.close()
    llm.close()

    uses: list[Callable[[], list[CompletionOutput] | Delta]] = [
        lambda: completions(llm, "warm", greedy()),
        lambda: next(llm.stream("warm", greedy())),
        lambda: next(stream),
    ]
    for use in uses:
        with pytest.raises(EngineFailed, match="was closed; load the model again"):
            use()


def test_an_engine_that_breaks_fails_the_question_with_its_cause(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> StepOutcome:
        raise ZeroDivisionError("no such device")

    with LLM(directory, device="cpu", engine=CONFIG) as llm:
        monkeypatch.setattr(llm.engine, "step", step)
        for _ in range(2):
            with pytest.raises(EngineFailed, match="no such device") as failure:
                completions(llm, ["a", "b"], greedy())
            assert isinstance(failure.value.__cause__, ZeroDivisionError)


def test_an_llm_over_an_engine_made_elsewhere_answers() -> None:
    with LLM.over(engine_for(NAME), None) as llm:
        (completion,) = completions(llm, [[5, 6]], SamplingParams(temperature=0.0, max_tokens=3))

    assert_greedy(NAME, [5, 6], completion.token_ids)
    assert (len(completion.token_ids), completion.text) == (3, "")


def test_a_forgotten_llm_ends_its_thread(directory: Path) -> None:
    before = set(threading.enumerate())
    llm = LLM(directory, device="cpu", engine=CONFIG)
    completions(llm, "warm", greedy(2))
    (thread,) = {one for one in threading.enumerate() if one.name == "hearth-step"} - before

    del llm
    gc.collect()

    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def fresh(code: str) -> subprocess.CompletedProcess[str]:
    """Run in a new interpreter that finds the package where this one does."""
    import hearth

    assert hearth.__file__ is not None
    environment = {**os.environ, "PYTHONPATH": str(Path(hearth.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def test_importing_the_package_does_not_import_torch() -> None:
    done = fresh("import hearth, sys; hearth.SamplingParams(); print('torch' in sys.modules)")

    assert (done.stdout, done.stderr) == ("False\n", "")


def test_the_package_offers_its_api_and_nothing_else() -> None:
    import hearth

    assert (hearth.LLM, hearth.SamplingParams) == (LLM, SamplingParams)
    assert {name: getattr(hearth, name).__module__ for name in hearth.__all__}
    with pytest.raises(AttributeError, match="module `hearth` has no attribute `Nothing`"):
        _ = hearth.Nothing


def chosen(output: RequestOutput) -> list[list[int]]:
    return [answer.token_ids for answer in output.outputs]


def test_several_answers_have_seeds_of_their_own_and_one_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=6, ignore_eos=True, prompt_logprobs=0)

    first, second = llm.generate(["warm", "cold"], params)

    assert [answer.index for answer in first.outputs] == [0, 1, 2]
    assert len({tuple(tokens) for tokens in chosen(first)}) == 3
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids)
    alone = [llm.generate("cold", replace(params, n=1, seed=seed))[0] for seed in (7, 8, 9)]
    assert chosen(second) == [one.outputs[0].token_ids for one in alone]
    assert (first.finished, first.prompt) == (True, "warm")
    with pytest.raises(BadSampling, match="a stream is one answer; leave out `n`"):
        llm.stream("warm", params)


@pytest.mark.parametrize("n", [0, -1, 1.0, True])
def test_a_wrong_number_of_answers_is_refused(n: int) -> None:
    with pytest.raises(BadSampling, match="`n` must be a whole number of at least 1"):
        SamplingParams(n=n)


def test_prompts_may_be_dicts_as_in_vllm(llm: LLM) -> None:
    ids = tokenizer().encode("hearth").ids
    (plain,) = llm.generate("hearth", greedy())
    prompts: list[Prompt] = [
        TextPrompt(prompt="hearth"),
        TokensPrompt(prompt_token_ids=ids),
        {"prompt_token_ids": ids, "prompt": "shown"},
    ]

    outputs = llm.generate(prompts, greedy())

    assert [output.prompt for output in outputs] == ["hearth", None, "shown"]
    assert [output.outputs for output in outputs] == [plain.outputs] * 3
    assert llm.generate(TokensPrompt(prompt_token_ids=ids), greedy())[0].outputs == plain.outputs


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({}, "a prompt as a dict has `prompt`, `prompt_token_ids` or both, given: none"),
        ({"prompt": "a", "multi_modal_data": {}}, "given: prompt, multi_modal_data"),
        ({"prompt": 5}, "a prompt must be text or a list of token ids, given: NoneType"),
        ({"prompt_token_ids": "a"}, "a prompt must be text or a list of token ids, given: str"),
    ],
    ids=str,
)
def test_a_dict_that_is_no_prompt_is_refused(llm: LLM, prompt: Prompt, message: str) -> None:
    with pytest.raises(BadPrompt, match=re.escape(message)):
        llm.generate(prompt, greedy())


def test_what_stopped_an_answer_is_told(llm: LLM) -> None:
    (free,) = completions(llm, "warm", greedy(8))
    ends: list[SamplingParams] = [
        greedy(8),
        greedy(8, stop=free.text[3:5]),
        greedy(8, stop_token_ids=[free.token_ids[0]]),
        greedy(8, allowed_token_ids=[EOS_ID]),
    ]

    found = completions(llm, ["warm"] * 4, ends)

    assert [answer.stop_reason for answer in found] == [None, free.text[3:5], free.token_ids[0], None]
    assert [answer.finish_reason for answer in found] == ["length", "stop", "stop", "stop"]


def test_a_chat_is_the_prompt_that_the_template_makes_of_it(llm: LLM) -> None:
    one, other = [[{"role": "user", "content": text}] for text in ("warm", "cold")]

    (alone,) = llm.chat(one, greedy())
    first, second = llm.chat([one, other], greedy())

    assert (alone.prompt, second.prompt) == ("[user]warm>", "[user]cold>")
    assert alone.prompt_token_ids == llm.chat_prompt(one)
    assert alone == first == replace(llm.generate(llm.chat_prompt(one), greedy())[0], prompt="[user]warm>")
    (open_ended,) = llm.chat(one, greedy(), add_generation_prompt=False)
    assert open_ended.prompt == "[user]warm"


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_is_the_hidden_state_of_transformers(llm: LLM, pooling: Literal["last", "mean"]) -> None:
    prompts = ["a text of some length", "b"]

    outputs = llm.embed(prompts, pooling=pooling)

    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([output.prompt_token_ids])
        assert output.prompt_token_ids == tokenizer().encode(prompt).ids
        with torch.inference_mode():
            hidden = build(NAME).model.model(ids).last_hidden_state[0]
        wanted = hidden[-1] if pooling == "last" else hidden.mean(0)
        assert output.outputs.embedding == pytest.approx((wanted / wanted.norm()).tolist(), abs=1e-4)
        assert output.outputs.hidden_size == len(wanted)


CONSTRAINTS = {
    "json": (StructuredOutputsParams(json={"enum": ["warm", "cold"]}), '"(warm|cold)"'),
    "json as text": (StructuredOutputsParams(json='{"type": "boolean"}'), "true|false"),
    "json_object": (StructuredOutputsParams(json_object=True), r"\{.*"),
    "regex": (StructuredOutputsParams(regex="[a-c]{4}"), "[a-c]{4}"),
    "choice": (StructuredOutputsParams(choice=["yes", "no"]), "yes|no"),
    "grammar": (StructuredOutputsParams(grammar='root ::= "a" | "b"'), "a|b"),
}


@pytest.mark.parametrize(("constraint", "expected"), CONSTRAINTS.values(), ids=CONSTRAINTS)
@pytest.mark.parametrize("is_converted", [False, True])
def test_an_answer_keeps_to_its_constraint(
    llm: LLM, converted_llm: LLM, constraint: StructuredOutputsParams, expected: str, is_converted: bool
) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, structured_outputs=constraint)

    (answer,) = completions(converted_llm if is_converted else llm, "warm", params)

    assert re.fullmatch(expected, answer.text, re.DOTALL), answer.text


@pytest.mark.parametrize(
    ("given", "told"), [({}, "none"), ({"regex": "a", "choice": ["b"]}, "`regex` and `choice`")], ids=str
)
def test_an_output_has_one_constraint(given: dict[str, object], told: str) -> None:
    with pytest.raises(BadSampling, match=f"takes exactly one constraint, given: {told}"):
        StructuredOutputsParams(**given)  # type: ignore[arg-type] # of several types


def test_a_constraint_that_cannot_be_followed_is_refused(llm: LLM) -> None:
    broken = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    with pytest.raises(BadGuide, match="the regular expression cannot guide an output"):
        llm.generate("warm", broken)


def test_the_tokenizer_can_be_had(llm: LLM) -> None:
    assert llm.get_tokenizer().encode("warm") == tokenizer().encode("warm").ids


class Deployed(NamedTuple):
    directory: Path
    model: Path  #: what the service would load


@pytest.fixture
def deployed(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployed:
    """The data directory of a service with a model `warm`, which came from the Hub."""
    data = tmp_path / "data"
    monkeypatch.setenv("HEARTH_DATA_DIR", str(data))
    *_, model = local_models.deploy(DeployOrder(str(directory), "warm"), data)
    with sqlite3.connect(data / "registry.db") as registry:
        registry.execute("update models set source = 'hf:org/tiny' where name = 'warm'")
    assert isinstance(model, ModelView)
    return Deployed(data, Path(model.where))


def test_a_deployed_model_is_opened_by_its_name_or_by_that_on_the_hub(deployed: Deployed) -> None:
    assert [find_model(name) for name in ("warm", "org/tiny", "hf:org/tiny")] == [str(deployed.model)] * 3
    with LLM("warm", device="cpu", engine=CONFIG) as llm:
        assert len(completions(llm, "warm", greedy(3))[0].token_ids) == 3


def test_an_unknown_name_is_refused_with_the_one_that_was_meant(deployed: Deployed) -> None:
    with pytest.raises(UnknownModel, match=r"no model named `wamr`; did you mean `warm`\?"):
        LLM("wamr")


def test_paths_come_before_names(
    directory: Path, deployed: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory.rename("warm")
    assert find_model("warm") == "warm"
    assert find_model("./elsewhere") == "./elsewhere"
    assert find_model("s3://bucket/model") == "s3://bucket/model"


def test_a_model_of_the_hub_is_downloaded_into_its_own_cache(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(
        repo_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        asked.append((repo_id, revision))
        names = [one.name for one in directory.iterdir()]
        wanted = huggingface_hub.utils._paths.filter_repo_objects(
            [*names, "onnx/model.safetensors"], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        cached = tmp_path / "cached"
        cached.mkdir(exist_ok=True)
        for name in wanted:
            shutil.copy(directory / name, cached / name)
        return str(cached)

    monkeypatch.setenv("HEARTH_DATA_DIR", str(tmp_path / "nothing"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    (directory / "README.md").write_text("not needed")

    with LLM("org/tiny", revision="v1", device="cpu", engine=CONFIG) as llm:
        assert len(completions(llm, "warm", greedy(3))[0].token_ids) == 3

    assert asked == [("org/tiny", "v1")]
    assert not (tmp_path / "cached" / "README.md").exists()
    assert find_model("hf:org/tiny@v2") == tmp_path / "cached"
    assert asked[1:] == [("org/tiny", "v2")]


def test_weights_of_pytorch_are_downloaded_where_there_are_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(repo_id: str, *, allow_patterns: list[str], **_: object) -> str:
        if "*.bin" in allow_patterns:
            (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
        return str(tmp_path)

    monkeypatch.setenv("HEARTH_DATA_DIR", str(tmp_path / "nothing"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    assert find_model("org/old") == tmp_path
    assert (tmp_path / "pytorch_model.bin").exists()
