"""Adapters on a CUDA device: Triton kernels, graphs, half precision, adapters that come and go."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hearth.core.config import EngineConfig
from hearth.core.types import RequestId, SamplingParams
from hearth.engine.assemble import own_limits
from hearth.engine.dry_run import KernelNeeds
from hearth.engine.engine import Output
from hearth.engine.kernel_warmup import KernelWarmup
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.jit import triton
from hearth.kernels.kernel_cache import KernelCache
from hearth.models.families import read_arch
from tests.engine.harness import ROOMY, engine_for, engine_over, greedy, kv_bytes, new_id, run
from tests.engine.test_adapters import add, check, prompts, request, turns_of
from tests.models.adapters import KINDS, random_adapter
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
BUSY = replace(ROOMY, max_batch_tokens=96, max_seqs=12)


@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_batches_of_adapters_and_the_bare_model_give_the_best_tokens(name: str) -> None:
    """float32, tokens as transformers chooses them on the CPU: graphs, chunks, prefix hits, preemption."""
    turns = [*turns_of(name), *turns_of(name)]
    asked = prompts(name, [1, 3, 4, 5, 17, 17, 9, 26])
    tight = replace(ROOMY, max_batch_tokens=16, max_seqs=6, kv_bytes=kv_bytes(engine_for(name), 14))
    for config in (ROOMY, tight):
        engine = engine_for(name, config, "cuda")
        add(engine, *turns_of(name))
        for _ in ("first", "again, on the prefixes that the first has left"):
            answers = run(engine, [request(engine, *each) for each in zip(asked, turns, strict=True)])
            check(name, asked, turns, answers)


def outputs_of(config: EngineConfig, name: str, dtype: str, quant: str) -> list[Output]:
    """All that comes of random traffic while adapters come and go, each the next time at another place."""
    engine = engine_over(build(name).directory, config, "cuda", dtype=dtype, quant=quant)
    engine.runner.layers.kv.view(torch.uint8).fill_(0xFF)
    chance, outputs = random.Random(3), list[Output]()
    asked = prompts(name, [1, 2, 5, 17, 30, 64, 90, 7, 7, 40])
    adapters = [random_adapter(name, kind, seed) for kind in KINDS for seed in range(2)]
    arrivals = list(enumerate(asked * 3))
    users: dict[RequestId, str] = {}
    kept = []
    while engine.has_work or arrivals:
        for _ in range(chance.choice([0, 0, 1, 4])):
            if not arrivals:
                break
            number, prompt = arrivals.pop(0)
            one = chance.choice([*adapters, None])
            params = SamplingParams(
                temperature=number % 2 * 0.8,
                seed=number,
                max_tokens=4 + number % 9,
                logprobs=5,
                ignore_eos=True,
            )
            if one is not None and one.adapter not in engine.adapters:
                kept.append(torch.empty(chance.randint(1, 1 << 16), dtype=torch.uint8, device="cuda"))
                add(engine, one, dtype=getattr(torch, dtype))
            own = None if one is None else one.adapter
            engine.add(engine.request(RequestId(str(number)), prompt, params, adapter=own))
            if own is not None:
                users[RequestId(str(number))] = own
        if engine.has_work:
            step = engine.step().outputs
            outputs.extend(step)
            for request_id in step.finished:
                users.pop(request_id, None)
            for idle in sorted(set(engine.adapters) - set(users.values())):
                if chance.random() < 0.5:
                    engine.runner.synchronize()  # as whoever takes the memory back does
                    engine.remove_adapter(idle)
    return outputs


@pytest.mark.parametrize(
    ("name", "dtype", "quant"),
    [
        ("llama-gqa", "float32", "none"),
        ("llama-gqa", "bfloat16", "none"),
        ("llama-gqa", "bfloat16", "int8"),
        ("llama-gqa", "bfloat16", "fp8"),
        ("llama-odd-head", "bfloat16", "none"),
        ("opt-350m", "float16", "none"),
        ("neox-parallel", "bfloat16", "none"),
    ],
)
def test_graph_replay_equals_eager_execution_while_adapters_come_and_go(
    name: str, dtype: str, quant: str
) -> None:
    """The same kernels on the same shapes, so the same bits."""
    eager = outputs_of(replace(BUSY, graphs="off"), name, dtype, quant)

    assert all(output.logprobs is not None for output in eager)
    for graphs in ("lazy", "start"):
        assert outputs_of(replace(BUSY, graphs=graphs), name, dtype, quant) == eager


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_scores_in_half_precision_are_close_to_those_of_transformers(quant: str) -> None:
    engine = engine_over(build("llama-gqa").directory, ROOMY, "cuda", dtype="bfloat16", quant=quant)
    (asked,) = prompts("llama-gqa", [40])
    params = replace(greedy(1), prompt_logprobs=0)
    for kind in KINDS:
        adapter = random_adapter("llama-gqa", kind)
        add(engine, adapter, dtype=torch.bfloat16)
        (answer,) = run(engine, [engine.request(new_id(), asked, params, adapter=adapter.adapter)])
        expected = adapter.logits(asked)[:-1].log_softmax(-1)
        own = [float(row[token]) for row, token in zip(expected, asked[1:], strict=True)]
        assert answer.reading is not None
        assert answer.reading.logprobs is not None
        assert [one.logprob for one in answer.reading.logprobs] == pytest.approx(own, abs=0.6)


def test_a_step_without_adapters_replays_the_graphs_of_the_bare_model() -> None:
    engine = engine_for("llama-gqa", BUSY, "cuda")
    asked = prompts("llama-gqa", [5, 9])
    before = run(engine, [request(engine, one, None) for one in asked])
    graphs = engine.runner.layers.graphs
    assert graphs is not None
    num_bare = len(graphs)
    adapter = random_adapter("llama-gqa", "all")
    add(engine, adapter)

    assert run(engine, [request(engine, one, None) for one in asked]) == before
    assert len(graphs) == num_bare
    run(engine, [request(engine, one, adapter) for one in asked])
    assert len(graphs) == 2 * num_bare


@pytest.fixture
def _tritons_own_cache() -> object:
    """Leave Triton's settings as they were."""
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        yield


@pytest.mark.usefixtures("_tritons_own_cache")
def test_requests_with_adapters_find_every_kernel_ready(tmp_path: Path) -> None:
    name, cuda = "mistral-window", torch.device("cuda")
    arch = read_arch(build(name).directory)
    COMPILATIONS.watch()
    warmup = KernelWarmup(KernelCache.open(tmp_path / "kernels"))
    limits = own_limits(ROOMY, arch, torch.bfloat16, cuda)
    warmup.compile(KernelNeeds.on(cuda, arch, "bfloat16", "none", limits))
    before = COMPILATIONS.num_while_serving, COMPILATIONS.num_loads_while_serving

    engine = engine_for(name, device="cuda", dtype="bfloat16")
    turns = turns_of(name)
    add(engine, *turns, dtype=torch.bfloat16)
    for lengths in ([1, 3, 40, 90], [64, 5, 17, 2]):
        asked = prompts(name, lengths)
        run(engine, [request(engine, *each) for each in zip(asked, turns, strict=True)])

    assert (COMPILATIONS.num_while_serving, COMPILATIONS.num_loads_while_serving) == before
