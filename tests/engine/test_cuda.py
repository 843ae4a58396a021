"""The engine on a CUDA device: Triton kernels, graphs, half precision."""

from __future__ import annotations

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from hearth import LLM
from hearth.config import EngineConfig
from hearth.engine.engine import Output
from hearth.engine.runner import PendingStep
from hearth.engine.sampler import Sampler, SampleRow
from hearth.engine.upload import Uploads
from hearth.errors import LogitsNotFinite
from hearth.policy.batch.plan import Admission
from hearth.types import RequestId, SamplingParams
from tests.engine.harness import (
    ROOMY,
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

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

FAMILIES = [
    "llama-gqa",
    "llama-odd-head",
    "mistral-window",
    "qwen3",
    "opt-350m",
    "neox-parallel",
    "falcon-40b",
]


def prompts(name: str, lengths: list[int]) -> list[list[int]]:
    model, _ = build(name)
    return prompts_for(model.config.vocab_size, lengths)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_gives_the_best_tokens(name: str) -> None:
    """float32, tokens as transformers chooses them on the CPU: graphs, chunks, prefix hits, preemption."""
    asked = prompts(name, [1, 3, 4, 5, 17, 30])
    tight = replace(ROOMY, max_batch_tokens=16, kv_bytes=kv_bytes(engine_for(name), 14))
    for config in (ROOMY, tight):
        engine = engine_for(name, config, "cuda")
        for _ in ("first", "again, on the prefixes that the first has left"):
            answers = ask(engine, asked, greedy())

            for prompt, answer in zip(asked, answers, strict=True):
                assert_greedy(name, prompt, answer.tokens)
                assert len(answer.tokens) == 12


def test_steps_are_measured_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps queue up, so the host's clock would count some twice: together they took no longer than all."""
    engine = engine_for("llama-gqa", replace(ROOMY, max_step=0.06), "cuda")
    ask(engine, prompts("llama-gqa", [5]), greedy())  # kernels and graphs are there from here on
    measured: list[float] = []
    learn = engine.allowance.measured

    def watched(num_decode_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        measured.append(seconds)
        learn(num_decode_rows, num_prompt_tokens, seconds)

    monkeypatch.setattr(engine.allowance, "measured", watched)
    began_s = time.perf_counter()
    ask(engine, prompts("llama-gqa", [5, 30]), greedy())
    took_s = time.perf_counter() - began_s
    assert len(measured) >= 12
    assert min(measured) > 0
    assert sum(measured) <= took_s


def outputs_of(
    config: EngineConfig, num_prompts: int, dtype: str = "float32", fill: int = 0xFF
) -> list[Output]:
    engine = engine_for("llama-gqa", config, "cuda", dtype=dtype)
    engine.runner.kv.view(torch.uint8).fill_(fill)
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=5, ignore_eos=True)
    for number, prompt in enumerate(prompts("llama-gqa", [7] * num_prompts)):
        engine.add(engine.request(RequestId(str(number)), prompt, params))
    outputs = []
    while engine.has_work:
        outputs.extend(engine.step().outputs)
    return outputs


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("num_prompts", [1, 4])
def test_graph_replay_equals_eager_execution(num_prompts: int, dtype: str) -> None:
    """As many sequences as a graph has rows: the same kernels on the same shapes, so the same bits."""
    eager = replace(ROOMY, graphs="off")

    assert outputs_of(ROOMY, num_prompts, dtype) == outputs_of(eager, num_prompts, dtype)


def test_padded_rows_of_a_graph_change_no_token() -> None:
    padded, eager = (outputs_of(replace(ROOMY, graphs=graphs), 5) for graphs in ("start", "off"))

    assert [(o.request_id, o.token) for o in padded] == [(o.request_id, o.token) for o in eager]


def test_memory_that_was_used_before_changes_nothing() -> None:
    assert outputs_of(ROOMY, 3, fill=0x00) == outputs_of(ROOMY, 3, fill=0xFF)


def test_graphs_are_captured_anew_when_weights_move() -> None:
    asked = prompts("llama-gqa", [5, 9])
    engine, elsewhere = (engine_for("llama-gqa", ROOMY, "cuda") for _ in range(2))
    before = [answer.tokens for answer in ask(engine, asked, greedy())]

    engine.runner.rebind(elsewhere.runner.decoder.weights)

    assert [answer.tokens for answer in ask(engine, asked, greedy())] == before


def test_an_engine_that_is_let_go_leaves_no_memory_behind() -> None:
    engine = engine_for("llama-gqa", replace(ROOMY, graphs="start"), "cuda")
    ask(engine, prompts("llama-gqa", [5, 9]), greedy())
    parts = [weakref.ref(part) for part in (engine, engine.runner, engine.runner.kv, engine.runner.graphs)]
    gc.collect()
    gc.disable()
    try:
        engine.close()
        del engine
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


def test_what_a_step_was_sent_is_kept_until_the_device_has_read_it() -> None:
    """Never waiting, so that memory which is let go too early is overwritten by what is sent later."""
    uploads = Uploads(torch.device("cuda"))
    busy = torch.randn(4096, 4096, device="cuda")
    sent = []
    for number in range(200):
        uploads.next_step()
        busy = busy @ busy.softmax(-1)
        sent.append((uploads.ints([number] * 500, [number + 1])[0], uploads.floats([number] * 300)))

    for number, (ints, floats) in enumerate(sent):
        assert ints.tolist() == [number] * 500
        assert floats.tolist() == [number] * 300


def test_guided_rows_are_masked_on_the_device() -> None:
    sampler = Sampler(4, 100, Uploads(torch.device("cuda")))
    params = SamplingParams(temperature=1.0, seed=1)
    sampler.admit([Admission(RequestId(str(slot)), slot, (1,), 1, 0, params) for slot in range(4)])
    mask = sum(1 << token for token in (31, 32, 99)).to_bytes(16, "little")
    rows = [SampleRow(slot, 1, mask if slot % 2 else None) for slot in range(4)]

    tokens = sampler.sample(torch.randn(4, 100, device="cuda"), rows).tokens.tolist()

    assert {tokens[1], tokens[3]} <= {31, 32, 99}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graphs", ["start", "off"])
@pytest.mark.parametrize("budget", [256, 16])
def test_a_request_that_breaks_fails_and_its_neighbours_are_untouched(
    budget: int, graphs: Literal["start", "off"], dtype: str
) -> None:
    """One breaks in its prompt and one while it is answered, among rows of prompts, chunks and graphs."""
    config = replace(ROOMY, max_batch_tokens=budget, graphs=graphs)
    nan_token, asked = 2, prompts("llama-gqa", [7, 40, 7, 7])
    asked[1][20] = nan_token
    wishes = [greedy(), greedy(), replace(greedy(), logit_bias={nan_token: 100.0}), greedy()]
    answers = []
    for is_broken in (False, True):
        engine = engine_for("llama-gqa", config, "cuda", dtype=dtype)
        embed = engine.runner.decoder.weights.embed
        assert embed is not None
        if is_broken:
            embed[nan_token] = torch.nan
        requests = [engine.request(new_id(), *pair) for pair in zip(asked, wishes, strict=True)]
        answers.append(run(engine, requests))

    undisturbed, disturbed = answers
    assert [type(answer.error) for answer in disturbed[1:3]] == [LogitsNotFinite] * 2
    assert [answer.tokens for answer in disturbed[1:3]] == [[], [nan_token]]
    for at in (0, 3):
        assert disturbed[at].error is None
        if dtype == "float32":
            assert_greedy("llama-gqa", asked[at], disturbed[at].tokens)
        assert len(disturbed[at].tokens) == len(undisturbed[at].tokens) == 12


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_named_and_changes_no_other(broken: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1, top_p=0.9, top_k=50, logprobs=5)
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).cuda()
    results = []
    for is_broken in (False, True):
        sampler = Sampler(4, 1000, Uploads(torch.device("cuda")))
        sampler.admit([Admission(RequestId(str(slot)), slot, (1,), 1, 0, params) for slot in range(4)])
        given = logits.clone()
        if is_broken:
            given[1, 77] = broken
        samples = sampler.sample(given, [SampleRow(slot, 1) for slot in range(4)])
        results.append(PendingStep(samples, samples.best_logits).wait())

    sound, disturbed = results
    assert (sound.broken_rows, disturbed.broken_rows) == ([], [1])
    for at in (0, 2, 3):
        assert disturbed.tokens[at] == sound.tokens[at]
        assert disturbed.logprobs[at] == sound.logprobs[at]
    assert 0 <= disturbed.tokens[1] < 1000


def test_each_row_gets_the_logprobs_it_asked_for() -> None:
    wishes = (1, 20, None, 0)
    sampler = Sampler(4, 1000, Uploads(torch.device("cuda")))
    params = [SamplingParams(temperature=0.0, logprobs=wish) for wish in wishes]
    sampler.admit([Admission(RequestId(str(at)), at, (1,), 1, 0, each) for at, each in enumerate(params)])
    samples = sampler.sample(torch.randn(4, 1000, device="cuda"), [SampleRow(slot, 1) for slot in range(4)])

    told = PendingStep(samples, samples.best_logits).wait().logprobs

    assert [None if one is None else len(one.top) for one in told] == list(wishes)


def test_a_full_batch_has_a_graph_of_its_own() -> None:
    graphs = engine_for("llama-gqa", replace(ROOMY, max_seqs=6), "cuda").runner.graphs

    assert graphs is not None
    assert (graphs.sizes, graphs.size_for(5), graphs.size_for(7)) == ((1, 2, 4, 6), 6, None)


def test_models_follow_each_other_in_one_process() -> None:
    _, directory = build("llama-gqa")
    for _ in range(2):
        with LLM(directory, device="cuda", skip_tokenizer=True) as llm:
            llm.generate([[1, 2, 3]], greedy(2))


def test_two_models_capture_and_run_side_by_side() -> None:
    expected = {
        name: ask(engine_for(name), prompts(name, [9]), greedy())[0].tokens for name in ("qwen3", "llama-gqa")
    }
    llms = {name: LLM.over(engine_for(name, ROOMY, "cuda"), None) for name in expected}

    def answer(name: str) -> list[int]:
        return llms[name].generate(prompts(name, [9]), greedy())[0].token_ids

    with ThreadPoolExecutor() as pool:
        for _ in range(3):
            assert dict(zip(expected, pool.map(answer, expected), strict=True)) == expected
    for llm in llms.values():
        llm.close()


def test_7b_shaped_model_is_as_near_to_float32_as_transformers_in_bfloat16(tmp_path: Path) -> None:
    """Teacher-forced on Hearth's own answer: mean and worst error of logprobs at most 1.25 times theirs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=4096)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(tmp_path)
    (asked,) = prompts_for(32000, [300])
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=20, ignore_eos=True)
    with LLM(tmp_path, device="cuda", skip_tokenizer=True, engine=EngineConfig(kv_bytes=8 << 30)) as llm:
        (answer,) = llm.generate([asked], params)
    assert answer.logprobs is not None
    top_ids = torch.tensor([[top.token_id for top in entry.top] for entry in answer.logprobs], device="cuda")
    ours = torch.tensor([[top.logprob for top in entry.top] for entry in answer.logprobs], device="cuda")

    def reference() -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([asked + answer.token_ids], device="cuda")).logits[0]
        return logits[len(asked) - 1 : -1].float().log_softmax(-1).gather(1, top_ids)

    theirs = reference()
    model.float()
    exact = reference()

    assert ours.shape == (40, 20)
    for error in (torch.mean, torch.max):
        found, accepted = float(error((ours - exact).abs())), float(error((theirs - exact).abs()))
        assert found < 1.25 * accepted, f"{error.__name__}: {found=} {accepted=}"
