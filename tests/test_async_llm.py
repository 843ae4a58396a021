"""`AsyncLLM`: requests as async generators, judged by what `LLM` answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest

from hearth import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    LoRARequest,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    async_llm,
    question,
)
from hearth.core.config import EngineConfig
from hearth.core.errors import BadPrompt, EngineFailed, UnknownModel
from hearth.core.types import FinishReason
from hearth.engine.engine import StepOutputs
from hearth.outputs import logprobs_by_token
from hearth.policy.batch.plan import RequestFailed
from tests.completions import completions
from tests.engine.harness import prompts_for
from tests.models.zoo import build
from tests.test_llm import saved, wait_until_idle
from tests.test_llm_adapters import PARAMS, first, peft_of, second

CONFIG = EngineConfig(max_batch_tokens=64, max_seqs=8, block_tokens=4, kv_bytes=8 << 20)
TEN = SamplingParams(temperature=1.0, seed=7, max_tokens=10, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("async") / "model")


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, device="cpu", engine=CONFIG) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=directory, device="cpu", engine=CONFIG))
    yield engine
    engine.shutdown()


async def all_of(outputs: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def asked_together(
    engine: AsyncLLM, prompts: Sequence[str], params: SamplingParams
) -> list[list[RequestOutput]]:
    return await asyncio.gather(
        *(all_of(engine.generate(prompt, params, f"q{at}")) for at, prompt in enumerate(prompts))
    )


def test_outputs_grow_into_the_answers_of_generate(llm: LLM, engine: AsyncLLM) -> None:
    prompts = ["warm", "cold", "lukewarm"]
    params = replace(TEN, logprobs=None)  # whose last digits depend on which requests share a step
    wanted = llm.generate(prompts, params)

    told = asyncio.run(asked_together(engine, prompts, params))

    for at, (outputs, answer) in enumerate(zip(told, wanted, strict=True)):
        assert outputs[-1] == answer
        assert {output.request_id for output in outputs} == {f"q{at}"}
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        texts = [output.outputs[0].text for output in outputs]
        assert all(after.startswith(before) for before, after in pairwise(texts))


def test_deltas_add_up_to_the_answer(llm: LLM, engine: AsyncLLM) -> None:
    (wanted,) = completions(llm, "warm", TEN)

    (told,) = asyncio.run(asked_together(engine, ["warm"], replace(TEN, output_kind=RequestOutputKind.DELTA)))

    deltas = [output.outputs[0] for output in told]
    assert "".join(one.text for one in deltas) == wanted.text
    assert [token for one in deltas for token in one.token_ids] == wanted.token_ids
    assert [named for one in deltas for named in one.logprobs or ()] == wanted.logprobs
    assert deltas[-1].cumulative_logprob == wanted.cumulative_logprob
    assert deltas[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_a_wake_without_a_message_is_no_output(
    engine: AsyncLLM, kind: RequestOutputKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal of a step may come after its message was read with that of the step before."""
    received, wakes = async_llm._AwaitedOutbox.received, iter([True])

    async def woken(outbox: async_llm._AwaitedOutbox) -> list[StepOutputs | RequestFailed]:
        return [] if next(wakes, False) else await received(outbox)

    monkeypatch.setattr(async_llm._AwaitedOutbox, "received", woken)
    (told,) = asyncio.run(asked_together(engine, ["warm"], replace(TEN, output_kind=kind)))

    assert {len(output.outputs) for output in told} == {1}
    assert not next(wakes, False)


def test_logprobs_of_a_prompt_are_named_once(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    named = Mock(wraps=logprobs_by_token)
    monkeypatch.setattr(question, "logprobs_by_token", named)
    params = replace(TEN, logprobs=None, prompt_logprobs=1)

    (told,) = asyncio.run(asked_together(engine, ["warm"], params))

    assert len(told[0].prompt_token_ids) > 1
    assert named.call_count == len(told[0].prompt_token_ids) - 1
    assert all(output.prompt_logprobs == told[-1].prompt_logprobs for output in told)


def test_a_final_output_comes_alone_and_has_all_answers(llm: LLM, engine: AsyncLLM) -> None:
    several = replace(TEN, n=3, output_kind=RequestOutputKind.FINAL_ONLY)

    (told,) = asyncio.run(asked_together(engine, ["warm"], several))

    assert told == llm.generate("warm", several)


def test_answers_of_one_prompt_grow_by_their_index(llm: LLM, engine: AsyncLLM) -> None:
    several = replace(TEN, n=3, output_kind=RequestOutputKind.DELTA)
    (wanted,) = llm.generate("warm", several)

    (told,) = asyncio.run(asked_together(engine, ["warm"], several))

    for answer in wanted.outputs:
        own = [one for output in told for one in output.outputs if one.index == answer.index]
        assert [token for one in own for token in one.token_ids] == answer.token_ids
    assert [output.finished for output in told].count(True) == 1


def test_a_stop_string_ends_an_answer_as_in_generate(llm: LLM, engine: AsyncLLM) -> None:
    (free,) = completions(llm, "warm", TEN)
    stopped = replace(TEN, stop=(free.text[4:6],))
    (wanted,) = completions(llm, "warm", stopped)

    (told,) = asyncio.run(asked_together(engine, ["warm"], stopped))

    assert told[-1].outputs == [wanted]
    assert wanted.stop_reason == free.text[4:6]
    wait_until_idle(engine._llm)


@pytest.mark.parametrize("way", ["abort", "close", "cancel"])
def test_a_request_that_is_given_up_frees_the_engine(engine: AsyncLLM, way: str) -> None:
    wait_until_idle(engine._llm)
    num_free = engine._llm.engine.batcher.blocks.num_available
    endless = replace(TEN, max_tokens=None)

    async def scene() -> list[FinishReason | None]:
        outputs, reasons = engine.generate("warm", endless, "q"), []
        if way == "cancel":
            task = asyncio.create_task(all_of(outputs))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait([task])
            return reasons
        async for output in outputs:
            if way == "close":
                await outputs.aclose()
                break
            await engine.abort(["q", "unknown"])
            reasons.append(output.outputs[0].finish_reason)
        return reasons

    reasons = asyncio.run(scene())

    if way == "abort":
        assert reasons[-1] is FinishReason.CANCELLED
        assert set(reasons[:-1]) == {None}
    wait_until_idle(engine._llm)
    assert engine._llm.engine.batcher.blocks.num_available == num_free
    assert len(asyncio.run(asked_together(engine, ["warm"], TEN))[0]) > 0, "its id is free again"


def test_an_id_that_is_in_use_is_refused(engine: AsyncLLM) -> None:
    async def scene() -> None:
        outputs = engine.generate("warm", TEN, "q")
        await anext(outputs)
        with pytest.raises(BadPrompt, match="a request with the id `q` is running; choose another id"):
            await anext(engine.generate("cold", TEN, "q"))
        await outputs.aclose()

    asyncio.run(scene())


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_an_aborted_final_output_has_the_text_of_all_its_tokens(
    engine: AsyncLLM, stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    several = replace(TEN, n=3, max_tokens=None, stop=stop, output_kind=RequestOutputKind.FINAL_ONLY)
    received = async_llm._AwaitedOutbox.received

    async def aborted(outbox: async_llm._AwaitedOutbox) -> list[StepOutputs | RequestFailed]:
        messages = await received(outbox)
        if messages:
            await engine.abort("q0")
        return messages

    monkeypatch.setattr(async_llm._AwaitedOutbox, "received", aborted)
    ((output,),) = asyncio.run(asked_together(engine, ["warm"], several))

    for answer in output.outputs:
        assert answer.finish_reason is FinishReason.CANCELLED
        assert answer.token_ids
        whole = engine._llm.get_tokenizer().decode([*output.prompt_token_ids, *answer.token_ids])
        assert "warm" + answer.text == whole


def test_a_bad_prompt_is_refused_and_its_id_is_free(engine: AsyncLLM) -> None:
    with pytest.raises(BadPrompt):
        asyncio.run(all_of(engine.generate([10**9], TEN, "q")))
    assert asyncio.run(all_of(engine.generate("warm", TEN, "q")))[-1].finished


def test_shutting_down_fails_what_runs(directory: Path) -> None:
    engine = AsyncLLM(directory, device="cpu", engine=CONFIG)

    async def scene() -> None:
        outputs = engine.generate("warm", replace(TEN, max_tokens=None), "q")
        await anext(outputs)
        engine.shutdown()
        with pytest.raises(EngineFailed, match="it was closed"):
            await all_of(outputs)
        with pytest.raises(EngineFailed, match="the LLM was closed"):
            await anext(engine.generate("warm", TEN, "r"))

    asyncio.run(scene())
    engine.shutdown()


def test_an_event_loop_that_ends_early_leaves_the_engine_working(engine: AsyncLLM) -> None:
    async def leave() -> None:
        await anext(engine.generate("warm", replace(TEN, max_tokens=None), "left"))

    asyncio.run(leave())

    assert asyncio.run(asked_together(engine, ["warm"], TEN))[0][-1].finished


def test_an_adapter_is_loaded_with_the_first_request_that_names_its_path() -> None:
    (prompt,) = prompts_for(160, [12])
    options = {"device": "cpu", "engine": CONFIG, "skip_tokenizer_init": True}
    with LLM(build("llama-gqa").directory, adapters={"second": second().order.where}, **options) as prepared:
        wanted = completions(prepared, [prompt, prompt], PARAMS, lora_request=["second", None])
        later = LoRARequest("first", 1, str(peft_of(first())))
        by_path = completions(prepared, [prompt, prompt], PARAMS, lora_request=[later, later])
        by_name = completions(prepared, [prompt], PARAMS, lora_request="first")
    engine = AsyncLLM(build("llama-gqa").directory, **options)
    request = LoRARequest("mine", 2, str(second().order.where))

    async def scene() -> list[list[RequestOutput]]:
        with pytest.raises(UnknownModel, match=r"unknown adapter: `mine`; the model has: none; .*lora_path"):
            await all_of(engine.generate(prompt, PARAMS, "q", lora_request="mine"))
        asked = [("a", request), ("b", request), ("c", None)]
        return await asyncio.gather(
            *(all_of(engine.generate(prompt, PARAMS, one, lora_request=adapter)) for one, adapter in asked)
        )

    told = [outputs[-1].outputs[0] for outputs in asyncio.run(scene())]
    engine.shutdown()

    assert told == [wanted[0], *wanted]
    assert by_path == [*by_name, *by_name]
    assert by_name[0] not in wanted
