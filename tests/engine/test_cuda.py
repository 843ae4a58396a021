"""The engine on a CUDA device: Triton kernels, graphs, half precision."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch

from hearth import LLM
from hearth.core.config import EngineConfig
from hearth.core.errors import LogitsNotFinite
from hearth.core.types import Pooling, RequestId, SamplingParams
from hearth.engine.engine import Engine, Output
from hearth.engine.graph_capture import GraphCapture
from hearth.engine.graph_trial import rehearse_trial
from hearth.engine.step_shape import GraphKey, StepPart
from hearth.engine.upload import Uploads
from hearth.kernels.compilations import COMPILATIONS
from hearth.policy.batch.blocks import SINK_BLOCK
from hearth.policy.batch.plan import Admission
from tests.completions import completions
from tests.engine.harness import (
    ROOMY,
    ask,
    assert_greedy,
    engine_for,
    engine_over,
    greedy,
    kv_bytes,
    new_id,
    new_sampler,
    prompts_for,
    reference_logits,
    run,
    sample,
    sample_rows,
    waited,
)
from tests.engine.pipeline_rig import pipeline_for
from tests.engine.test_elastic import EXTENTS, elastic_memory
from tests.engine.test_graphs import Source
from tests.engine.test_prompt_reader import check_all, hidden_states
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
def test_stages_on_a_device_give_the_best_tokens(name: str) -> None:
    asked = prompts(name, [1, 3, 5, 17, 30, 9])
    for num_flights, cuts in enumerate([[1], [1, 2]], start=1):
        memory = partial(elastic_memory, device="cuda")
        engine, runners = pipeline_for(
            name, cuts, num_flights, device="cuda", memory=memory, is_kv_wide=num_flights == 2
        )
        for extent in EXTENTS:
            engine.add_blocks(extent)
        for _ in range(2):  # captured, then replayed
            for prompt, answer in zip(asked, ask(engine, asked, greedy()), strict=True):
                assert_greedy(name, prompt, answer.tokens)
                assert len(answer.tokens) == 12
        graphs = [runner.layers.graphs for runner in runners]
        parts = [{key.part for key in each.captured} for each in graphs if each is not None]
        assert [StepPart.TAIL in each for each in parts] == [False] * len(cuts) + [True]


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "qwen3"])
def test_a_stream_resumed_in_half_precision_is_as_near_to_float32_as_an_undisturbed_one(name: str) -> None:
    """Another pipeline computes prompt and output again in other batches; another token may be the best."""
    (asked, *others), (cut, num_tokens) = prompts(name, [9, 5, 30, 17]), (25, 60)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=20, ignore_eos=True)
    undisturbed = streamed(half_precision_stages(name), asked, params)
    said = [output.token for output in undisturbed]
    resumed = streamed(half_precision_stages(name), asked, params, said[:cut], others)

    assert len(resumed) == num_tokens - cut
    told = [output.token for output in resumed]
    error, accepted = (
        errors(name, asked, text, outputs)
        for text, outputs in ((said[:cut] + told, resumed), (said, undisturbed))
    )
    assert float(error.mean()) < 1.25 * float(accepted.mean())
    assert float(error.max()) < 1.5 * float(accepted.max())
    for at, (own, other) in enumerate(zip(told, said[cut:], strict=True), cut):
        if own != other:  # up to here the contexts are the same
            exact = exact_logprobs(name, asked, said)[at]
            assert float((exact[own] - exact[other]).abs()) < 2 * float(accepted.max()), f"token {at}"
            break


def half_precision_stages(name: str, device: str = "cuda") -> Engine:
    memory = partial(elastic_memory, device=device)
    engine, _ = pipeline_for(name, [1], 2, device=device, dtype="bfloat16", memory=memory)
    for extent in EXTENTS:
        engine.add_blocks(extent)
    return engine


def streamed(
    engine: Engine,
    asked: list[int],
    params: SamplingParams,
    said: Sequence[int] = (),
    others: Sequence[list[int]] = (),
) -> list[Output]:
    """Return what a request is told that has `said` so much, beside others that begin."""
    own = new_id()
    engine.add(engine.request(own, asked, params, output=tuple(said)))
    for other in others:
        engine.add(engine.request(new_id(), other, greedy()))
    outputs = list[Output]()
    while engine.has_work:
        outputs += [output for output in engine.step().outputs if output.request_id == own]
    return outputs


def errors(name: str, asked: list[int], text: list[int], outputs: Sequence[Output]) -> torch.Tensor:
    """Return how far the logprobs of likely tokens are from those in float32, for the last of `text`."""
    exact = exact_logprobs(name, asked, text)[-len(outputs) :]
    tops = [[] if output.logprobs is None else output.logprobs.top for output in outputs]
    ids = torch.tensor([[one.token_id for one in top] for top in tops])
    ours = torch.tensor([[one.logprob for one in top] for top in tops])
    return (ours - exact.gather(1, ids)).abs()


def exact_logprobs(name: str, asked: list[int], text: list[int]) -> torch.Tensor:
    return reference_logits(name, (*asked, *text))[len(asked) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_gives_the_best_tokens(name: str) -> None:
    """float32, tokens as transformers chooses them on the CPU: graphs, chunks, prefix hits, preemption.

    Some prompts begin alike, and find that in the step that computes it.
    """
    asked = prompts(name, [1, 3, 4, 5, 17, 30])
    asked += [
        asked[-1][:length] + tail for length, tail in zip((24, 16, 9), prompts(name, [1, 5, 2]), strict=True)
    ]
    tight = replace(ROOMY, max_batch_tokens=16, kv_bytes=kv_bytes(engine_for(name), 14))
    for config in (ROOMY, tight):
        engine = engine_for(name, config, "cuda")
        for _ in ("first", "again, on the prefixes that the first has left"):
            answers = ask(engine, asked, greedy())

            for prompt, answer in zip(asked, answers, strict=True):
                assert_greedy(name, prompt, answer.tokens)
                assert len(answer.tokens) == 12


@pytest.mark.parametrize("graphs", ["off", "lazy", "start"])
@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_and_scores_are_those_of_transformers(
    name: str, graphs: Literal["off", "lazy", "start"]
) -> None:
    """Beside continuations, whole and in chunks, twice: with graphs captured first and replayed then."""
    for config in (ROOMY, replace(ROOMY, max_batch_tokens=16)):
        engine = engine_for(name, replace(config, graphs=graphs), "cuda")
        for _ in ("captured", "replayed"):
            check_all(name, engine, [1, 17])


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_reading_prompts_in_half_precision_needs_no_further_kernels(quant: str) -> None:
    """All that a step with readings launches was compiled for steps of its size, also the head's products."""
    config = replace(ROOMY, max_batch_tokens=64, graphs="start")
    engine = engine_over(build("llama-gqa").directory, config, "cuda", dtype="bfloat16", quant=quant)
    ask(engine, prompts("llama-gqa", [1, 5, 30]), greedy())
    COMPILATIONS.watch()
    num_before = COMPILATIONS.num_while_serving
    (asked,) = prompts("llama-gqa", [40])
    params = replace(greedy(2), prompt_logprobs=3)
    (answer,) = ask(engine, [asked], params)
    (vector,) = run(engine, [engine.request(new_id(), asked, greedy(0), pooling=Pooling.MEAN)])

    assert COMPILATIONS.num_while_serving == num_before
    assert answer.reading is not None
    assert answer.reading.logprobs is not None
    expected = reference_logits("llama-gqa", tuple(asked))[:-1].log_softmax(-1)
    own = [float(row[token]) for row, token in zip(expected, asked[1:], strict=True)]
    assert [one.logprob for one in answer.reading.logprobs] == pytest.approx(own, abs=0.5)
    assert vector.reading is not None
    assert vector.reading.embedding is not None
    states = hidden_states("llama-gqa", tuple(asked)).mean(0)
    told = torch.frombuffer(bytearray(vector.reading.embedding), dtype=torch.float32)
    assert float(told @ (states / states.norm())) > 0.99


def test_steps_are_measured_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps queue up, so the host's clock would count some twice: together they took no longer than all."""
    engine = engine_for("llama-gqa", replace(ROOMY, max_step=0.06), "cuda")
    for _ in range(2):  # from here on kernels and graphs are there; steps that capture one are not measured
        ask(engine, prompts("llama-gqa", [5, 30]), greedy())
    measured: list[float] = []
    learn = engine.allowance.measured

    def watched(num_decode_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        measured.append(seconds)
        learn(num_decode_rows, num_prompt_tokens, seconds)

    monkeypatch.setattr(engine.allowance, "measured", watched)
    began_s = time.perf_counter()
    ask(engine, prompts("llama-gqa", [5, 30]), greedy())
    took_s = time.perf_counter() - began_s
    assert len(measured) >= 10
    assert min(measured) > 0
    assert sum(measured) <= took_s


#: Few tokens a step and few slots: prompts are cut, steps mix, requests wait, and sizes come again.
BUSY = replace(ROOMY, max_batch_tokens=96, max_seqs=12)


def outputs_of(
    config: EngineConfig,
    name: str = "llama-gqa",
    dtype: str = "float32",
    quant: str = "none",
    fill: int = 0xFF,
) -> list[Output]:
    """All that comes of random traffic, of which every second round begins with prompts of the first."""
    engine = engine_over(build(name).directory, config, "cuda", dtype=dtype, quant=quant)
    engine.runner.layers.kv.view(torch.uint8).fill_(fill)
    chance, outputs, asked = (
        random.Random(3),
        list[Output](),
        prompts(name, [1, 2, 5, 17, 30, 64, 90, 7, 7, 40]),
    )
    arrivals = [(number, prompt) for number, prompt in enumerate(asked * 2 + asked[:3] * 3)]
    while engine.has_work or arrivals:
        for _ in range(chance.choice([0, 0, 1, 4])):
            if arrivals:
                number, prompt = arrivals.pop(0)
                params = SamplingParams(
                    temperature=number % 2 * 0.8,
                    seed=number,
                    max_tokens=4 + number % 9,
                    logprobs=5,
                    ignore_eos=True,
                )
                engine.add(engine.request(RequestId(str(number)), prompt, params))
        if engine.has_work:
            outputs.extend(engine.step().outputs)
    if engine.runner.layers.graphs is not None:
        assert len(engine.runner.layers.graphs) > 5
    return outputs


@pytest.mark.parametrize(
    ("name", "dtype", "quant"),
    [
        ("llama-gqa", "float32", "none"),
        ("llama-gqa", "float16", "none"),
        ("llama-gqa", "bfloat16", "int8"),
        ("llama-gqa", "bfloat16", "fp8"),
        ("llama-mha-tied", "bfloat16", "none"),
        ("llama-odd-head", "bfloat16", "none"),
        ("mistral-window", "bfloat16", "none"),
        ("qwen3", "bfloat16", "none"),
        ("opt-350m", "float16", "none"),
        ("neox-parallel", "bfloat16", "none"),
        ("falcon-40b", "bfloat16", "none"),
    ],
)
def test_graph_replay_equals_eager_execution(name: str, dtype: str, quant: str) -> None:
    """The same kernels on the same shapes, so the same bits; KV is full of NaN where nothing was written."""
    eager = outputs_of(replace(BUSY, graphs="off"), name, dtype, quant)

    assert all(output.logprobs is not None for output in eager)
    for graphs in ("lazy", "start"):
        assert outputs_of(replace(BUSY, graphs=graphs), name, dtype, quant) == eager


def test_random_traffic_in_padded_steps_gives_the_best_tokens() -> None:
    """float32, as transformers chooses them on the CPU."""
    engine = engine_for("mistral-window", BUSY, "cuda")
    asked = prompts("mistral-window", [1, 2, 5, 17, 30, 64, 90, 7, 40])
    for _ in ("first", "again"):
        for prompt, answer in zip(asked, ask(engine, asked, greedy()), strict=True):
            assert_greedy("mistral-window", prompt, answer.tokens)


def test_memory_that_was_used_before_changes_nothing() -> None:
    assert outputs_of(BUSY, fill=0x00) == outputs_of(BUSY, fill=0xFF)


def test_no_graph_of_weights_that_have_moved_is_replayed() -> None:
    asked = prompts("llama-gqa", [5, 9])
    engine, elsewhere = (engine_for("llama-gqa", ROOMY, "cuda") for _ in range(2))
    before = [answer.tokens for answer in ask(engine, asked, greedy())]
    left = engine.runner.layers.decoder.weights.layers[0].qkv.weight.untyped_storage()

    engine.runner.rebind(elsewhere.runner.layers.decoder.weights)
    left.fill_(0xFF)

    assert [answer.tokens for answer in ask(engine, asked, greedy())] == before


def test_a_step_is_captured_behind_its_first_run_and_not_before_all_weights_are_there() -> None:
    class Gate:
        def __init__(self) -> None:
            self.is_shut = True

        def is_open(self) -> bool:
            return not self.is_shut

        def embed(self) -> None: ...

        def layer(self, index: int) -> None: ...

        def head(self) -> None: ...

    engine, gate = engine_for("llama-gqa", ROOMY, "cuda"), Gate()
    graphs = engine.runner.layers.graphs
    assert graphs is not None
    engine.runner.layers.follow(gate)
    asked = prompts("llama-gqa", [5, 9])

    answers = ask(engine, asked, greedy())
    assert len(graphs) == 0
    gate.is_shut = False

    for _ in ("behind the gate", "by graphs"):
        assert ask(engine, asked, greedy()) == answers
    for key in (GraphKey(StepPart.MIXED, 64), GraphKey(StepPart.TAIL, 8), GraphKey(StepPart.DECODE, 2)):
        assert key in graphs
    assert len(graphs) == 3


def test_first_steps_that_another_thread_has_captured_answer_as_eager_ones() -> None:
    """A snapshot has their graphs, which never come; so is what would try them, and touches nothing."""
    asked = prompts("llama-gqa", [5, 17])
    expected = [one.tokens for one in ask(engine_for("llama-gqa", ROOMY, "cuda"), asked, greedy())]
    engine = engine_for("llama-gqa", replace(ROOMY, graphs="lazy"), "cuda")
    runner, graphs = engine.runner, engine.runner.layers.graphs
    assert graphs is not None
    shapes = runner.layers.sizes.first_shapes(len(asked), sum(map(len, asked)), len(asked))
    graphs.restore_from(Source(coming={key.name for shape in shapes for key in shape.keys}))
    kv = runner.layers.kv.clone()

    def capture() -> None:
        torch.cuda.set_device(runner.layers.kv.device)
        for shape in shapes:
            runner.layers.capture_substitutes(shape, GraphCapture)
        rehearse_trial(runner.layers, runner.sampler, GraphCapture())

    with ThreadPoolExecutor(1) as thread:
        thread.submit(capture).result()
    runner.synchronize()
    assert torch.equal(runner.layers.kv.view(torch.uint8), kv.view(torch.uint8))
    assert len(shapes) == 2
    assert all(key in graphs for shape in shapes for key in shape.keys)

    assert [one.tokens for one in ask(engine, asked, greedy())] == expected
    engine.flush()
    engine.batcher.kv.remove_all()  # with the cached prefixes, so that steps are of the same sizes again
    engine.batcher.kv.add(range(SINK_BLOCK + 1, len(runner.layers.kv)))
    runner.drop_restored()  # and with them those that stood in: others are captured, in memory of their own
    assert [one.tokens for one in ask(engine, asked, greedy())] == expected
    assert graphs.captured


def test_a_prompt_beside_many_decode_rows_and_beyond_the_smallest_sizes_is_captured_too() -> None:
    config = replace(ROOMY, max_batch_tokens=1024, max_seqs=40)
    asked = prompts("llama-gqa", [9] * 33 + [100, 100, 60])
    outputs = []
    for graphs in ("off", "lazy"):
        engine = engine_for("llama-gqa", replace(config, graphs=graphs), "cuda", dtype="bfloat16")
        outputs.append([ask(engine, asked, greedy()), ask(engine, asked[::-1], greedy())])

    assert outputs[0] == outputs[1]


def test_an_engine_that_is_let_go_leaves_no_memory_behind() -> None:
    engine = engine_for("llama-gqa", replace(ROOMY, graphs="start"), "cuda")
    ask(engine, prompts("llama-gqa", [5, 9]), greedy())
    parts = [
        weakref.ref(part)
        for part in (engine, engine.runner, engine.runner.layers.kv, engine.runner.layers.graphs)
    ]
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
    sampler = new_sampler(4, 100, torch.device("cuda"))
    params = SamplingParams(temperature=1.0, seed=1)
    sampler.admit([Admission(RequestId(str(slot)), slot, (1,), 1, 0, params) for slot in range(4)])
    mask = sum(1 << token for token in (31, 32, 99)).to_bytes(16, "little")
    rows = sample_rows(range(4), 1, {1: mask, 3: mask}, "cuda")

    tokens = sample(sampler, torch.randn(4, 100, device="cuda"), rows).tokens.tolist()

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
        embed = engine.runner.layers.decoder.weights.embed
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
        sampler = new_sampler(4, 1000, torch.device("cuda"))
        sampler.admit([Admission(RequestId(str(slot)), slot, (1,), 1, 0, params) for slot in range(4)])
        given = logits.clone()
        if is_broken:
            given[1, 77] = broken
        samples = sample(sampler, given, sample_rows(range(4), 1, device="cuda"))
        results.append(waited(samples))

    sound, disturbed = results
    assert (sound.broken_rows, disturbed.broken_rows) == ([], [1])
    for at in (0, 2, 3):
        assert disturbed.tokens[at] == sound.tokens[at]
        assert disturbed.logprobs is not None
        assert sound.logprobs is not None
        assert disturbed.logprobs[at] == sound.logprobs[at]
    assert 0 <= disturbed.tokens[1] < 1000


def test_each_row_gets_the_logprobs_it_asked_for() -> None:
    wishes = (1, 20, None, 0)
    sampler = new_sampler(4, 1000, torch.device("cuda"))
    params = [SamplingParams(temperature=0.0, logprobs=wish) for wish in wishes]
    sampler.admit([Admission(RequestId(str(at)), at, (1,), 1, 0, each) for at, each in enumerate(params)])
    rows = sample_rows(range(4), 1, device="cuda")
    samples = sample(sampler, torch.randn(4, 1000, device="cuda"), rows)

    told = waited(samples).logprobs

    assert told is not None
    assert [None if one is None else len(one.top) for one in told] == list(wishes)


def test_models_follow_each_other_in_one_process() -> None:
    _, directory = build("llama-gqa")
    for _ in range(2):
        with LLM(directory, device="cuda", skip_tokenizer_init=True) as llm:
            completions(llm, [[1, 2, 3]], greedy(2))


def test_two_models_capture_and_run_side_by_side() -> None:
    expected = {
        name: ask(engine_for(name), prompts(name, [9]), greedy())[0].tokens for name in ("qwen3", "llama-gqa")
    }
    llms = {name: LLM.over(engine_for(name, ROOMY, "cuda"), None) for name in expected}

    def answer(name: str) -> list[int]:
        return completions(llms[name], prompts(name, [9]), greedy())[0].token_ids

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
    with LLM(tmp_path, device="cuda", skip_tokenizer_init=True, engine=EngineConfig(kv_bytes=8 << 30)) as llm:
        (answer,) = completions(llm, [asked], params)
    assert answer.logprobs is not None
    # Greedy: the sampled token is one of the 20 best, and the first.
    top_ids = torch.tensor([list(entry) for entry in answer.logprobs], device="cuda")
    ours = torch.tensor([[top.logprob for top in entry.values()] for entry in answer.logprobs], device="cuda")

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
