"""Requests with adapters and without in one engine, against transformers whose weights were changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hearth.core.sizes import StepLimits
from hearth.core.types import AdapterId, Pooling, RequestId
from hearth.engine import adapter_inputs, inputs
from hearth.engine.dry_run import DryMemory, KernelNeeds, dry_runner
from hearth.engine.engine import Engine
from hearth.engine.step_shape import PaddedSizes
from hearth.models.adapter import Projection
from hearth.models.families import read_arch
from hearth.policy.batch.plan import Admission, DecodeRows, EngineRequest, StepPlan, TableWrite, TableWrites
from tests.engine.harness import (
    ROOMY,
    Answer,
    admissions_of,
    assert_best,
    assert_greedy,
    engine_for,
    engine_over,
    greedy,
    kv_bytes,
    new_id,
    prompts_for,
    run,
)
from tests.models.adapters import KINDS, Factors, RandomAdapter, random_adapter
from tests.models.zoo import VARIANTS, build, tiny

#: Models that differ from another one of their family in rope, windows, norms or vocabulary alone.
ALIKE = {
    "llama3-rope",
    "llama-mha-tied",
    "yi",
    "smollm2",
    "mistral-window",
    "mistral-head",
    "qwen2-window",
    "opt-no-affine",
    "falcon-11b",
}
#: The adapter of each request in turn; None: the bare model.
Turns = Sequence[RandomAdapter | None]


def turns_of(name: str) -> Turns:
    return [*(random_adapter(name, kind) for kind in KINDS), None]


def add(engine: Engine, *adapters: RandomAdapter | None, dtype: torch.dtype = torch.float32) -> None:
    device = engine.runner.layers.kv.device
    for one in adapters:
        if one is not None:
            engine.add_adapter(one.adapter, one.layout(dtype), one.pieces(device, dtype))


def request(
    engine: Engine, prompt: Sequence[int], adapter: RandomAdapter | None, max_tokens: int = 6
) -> EngineRequest:
    own = None if adapter is None else adapter.adapter
    return engine.request(new_id(), prompt, greedy(max_tokens), adapter=own)


def prompts(name: str, lengths: list[int], seed: int = 0) -> list[list[int]]:
    return prompts_for(build(name).model.config.vocab_size, lengths, seed)


def check(name: str, asked: Sequence[Sequence[int]], turns: Turns, answers: Sequence[Answer]) -> None:
    for prompt, adapter, answer in zip(asked, turns, answers, strict=True):
        assert answer.tokens, answer
        if adapter is None:
            assert_greedy(name, prompt, answer.tokens)
        else:
            assert_best(adapter.logits([*prompt, *answer.tokens]), prompt, answer.tokens)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ALIKE])
def test_mixed_batches_of_adapters_and_the_bare_model_give_the_best_tokens(name: str) -> None:
    """In chunks, on prefixes of an earlier round, and with too little KV for all: some are preempted."""
    turns = [*turns_of(name), *turns_of(name)]
    asked = prompts(name, [1, 3, 4, 5, 17, 17, 9, 26])
    tight = replace(ROOMY, max_batch_tokens=16, max_seqs=6, kv_bytes=kv_bytes(engine_for(name), 14))
    engine = engine_for(name, tight)
    add(engine, *turns_of(name))
    admissions = admissions_of(engine)

    for num_rounds in (1, 2):  # the second on the prefixes that the first has left
        answers = run(engine, [request(engine, *each) for each in zip(asked, turns, strict=True)])
        assert len(admissions) > num_rounds * len(asked), "nothing was preempted"
        check(name, asked, turns, answers)


def test_an_adapter_changes_what_is_said() -> None:
    (asked,) = prompts("llama-gqa", [9])
    engine = engine_for("llama-gqa")
    turns = turns_of("llama-gqa")
    add(engine, *turns)

    answers = run(engine, [request(engine, asked, one, 12) for one in turns])

    assert len({tuple(answer.tokens) for answer in answers}) == len(turns)


def test_a_cpu_runs_adapters_that_are_stored_for_a_gpu() -> None:
    (asked,) = prompts("llama-gqa", [9])
    turns, said = turns_of("llama-gqa"), []
    for dtype in (torch.float32, torch.bfloat16):
        engine = engine_for("llama-gqa")
        add(engine, *turns, dtype=dtype)
        answers = run(engine, [request(engine, asked, one) for one in turns])
        said.append([answer.tokens for answer in answers])

    assert said[0] == said[1]


def test_a_prefix_is_shared_by_requests_of_one_adapter_alone() -> None:
    (asked,) = prompts("llama-gqa", [21])
    engine = engine_for("llama-gqa")
    turns = turns_of("llama-gqa")
    add(engine, *turns)
    admissions = admissions_of(engine)

    for one in (*turns, *turns):
        check("llama-gqa", [asked], [one], run(engine, [request(engine, asked, one)]))

    assert [one.num_cached_tokens for one in admissions] == [0, 0, 0, 0, 20, 20, 20, 20]


def test_another_adapter_under_the_same_bytes_address_is_not_taken_for_the_one_before() -> None:
    """Removed and added, between steps of requests that go on: what was sent to the device is sent anew."""
    name, asked = "llama-gqa", prompts("llama-gqa", [5, 7])
    first, second = random_adapter(name, "all"), random_adapter(name, "all", seed=1)
    engine = engine_for(name)
    for one in (first, second, first):
        add(engine, one)
        answers = run(engine, [request(engine, prompt, one) for prompt in asked])
        check(name, asked, [one, one], answers)
        engine.remove_adapter(one.adapter)
    assert not engine.adapters


def test_adapters_come_and_go_while_others_decode() -> None:
    name, asked = "qwen3", prompts("qwen3", [5, 7, 6])
    stays, goes = random_adapter(name, "all"), random_adapter(name, "mlp")
    engine = engine_for(name)
    add(engine, stays, goes)
    tokens: dict[str, list[int]] = {}
    requests = [request(engine, asked[0], stays, 20), request(engine, asked[1], goes, 4)]
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for output in engine.step().outputs:
            tokens.setdefault(output.request_id, []).append(output.token)
            if output.finish_reason is not None and output.request_id == requests[1].request_id:
                engine.remove_adapter(goes.adapter)
                add(engine, random_adapter(name, "attention"))
                requests.append(request(engine, asked[2], random_adapter(name, "attention"), 5))
                engine.add(requests[-1])
    turns = [stays, goes, random_adapter(name, "attention")]
    check(name, asked, turns, [Answer(tokens[one.request_id]) for one in requests])
    assert [len(tokens[one.request_id]) for one in requests] == [20, 4, 5]


def test_all_that_steps_with_adapters_share_lies_in_the_memory_of_their_model() -> None:
    """So that it has the same addresses in every process; also scratch of an MLP that has too few rows."""
    arch, limits = read_arch(build("llama-gqa").directory), StepLimits(64, 8, 16)
    taken: list[torch.Tensor] = []

    def take(num_bytes: int) -> torch.Tensor:
        taken.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return taken[-1]

    runner = dry_runner(KernelNeeds.of(arch, "bfloat16", "none", limits, 132, 90), DryMemory(take, take))
    sizes = PaddedSizes.of(limits)
    for shape in sizes.all_shapes(has_adapters=True):
        step = runner.layers.inputs.view(None, shape)
        found = [runner.layers.decoder._scratch(projection) for projection in Projection]
        for rows in (step.adapters, step.logit_adapters):
            assert rows is not None
            found += [rows.order, rows.shares]
        for tensor in found:
            owners = {one.untyped_storage().data_ptr() for one in taken}
            assert tensor.untyped_storage().data_ptr() in owners
            assert tensor.numel() > 0


def test_which_rows_have_adapters_is_sent_again_when_tables_were_somebody_elses() -> None:
    engine, (adapter, *_) = engine_for("llama-gqa"), turns_of("llama-gqa")
    assert adapter is not None
    add(engine, adapter)
    runner, sent = engine.runner, engine.runner._tables.inputs["adapters"]
    ids = [RequestId("one")]
    admission = Admission(ids[0], 0, (1,), 1, 0, greedy())
    decode = DecodeRows(ids, [0], [0], adapters=[adapter.adapter])
    plan = StepPlan(0, (admission,), TableWrites.of(TableWrite(0, 0, (1,))), decode, ())
    runner.launch(plan).wait()
    first = sent.clone()
    assert first.any()
    runner.fill_tables()
    assert not sent.any()
    runner.launch(plan).wait()
    assert torch.equal(sent, first)


def test_which_rows_have_adapters_is_sent_before_the_launch_that_waits_for_all_in_front(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels read these lists before they wait for the launch in front of them (`kernels/overlap.py`)."""
    engine, adapter = engine_for("llama-gqa"), random_adapter("llama-gqa", "mlp")
    add(engine, adapter)
    queued: list[str] = []
    for module, name in ((adapter_inputs, "read_host"), (inputs, "gather_tokens")):

        def noted(
            *args: object, name: str = name, queue: object = getattr(module, name), **kw: object
        ) -> None:
            queued.append(name)
            queue(*args, **kw)  # type: ignore[operator]

        monkeypatch.setattr(module, name, noted)
    ids = [RequestId("one")]
    admission = Admission(ids[0], 0, (1,), 1, 0, greedy())
    decode = DecodeRows(ids, [0], [0], adapters=[adapter.adapter])
    writes = TableWrites.of(TableWrite(0, 0, (1,)))
    engine.runner.launch(StepPlan(0, (admission,), writes, decode, ())).wait()

    assert queued == ["read_host", "gather_tokens"]


def test_a_request_whose_adapter_is_not_there_and_an_adapter_in_use_are_faults_of_the_caller() -> None:
    engine, adapter = engine_for("llama-gqa"), random_adapter("llama-gqa", "mlp")
    asked = request(engine, [5, 6], adapter)
    with pytest.raises(AssertionError, match="is not there"):
        engine.add(asked)
    assert not engine.has_work
    add(engine, adapter)
    engine.add(asked)
    with pytest.raises(AssertionError, match="in use"):
        engine.remove_adapter(adapter.adapter)
    engine.cancel(asked.request_id)
    engine.remove_adapter(adapter.adapter)


def test_embeddings_and_scores_are_those_with_the_adapter() -> None:
    name, adapter = "llama-gqa", random_adapter("llama-gqa", "all")
    (asked,) = prompts(name, [19])
    engine = engine_for(name, replace(ROOMY, max_batch_tokens=8))
    add(engine, adapter)
    scored = engine.request(new_id(), asked, replace(greedy(1), prompt_logprobs=0), adapter=adapter.adapter)
    pooled = engine.request(new_id(), asked, greedy(0), pooling=Pooling.LAST, adapter=adapter.adapter)

    score, vector = run(engine, [scored, pooled])

    expected = adapter.logits(asked)[:-1].log_softmax(-1)
    own = [float(row[token]) for row, token in zip(expected, asked[1:], strict=True)]
    assert score.reading is not None
    assert score.reading.logprobs is not None
    assert [one.logprob for one in score.reading.logprobs] == pytest.approx(own, abs=1e-3)
    with torch.inference_mode():
        states = adapter.model(torch.tensor([asked]), output_hidden_states=True).hidden_states[-1][0, -1]
    assert vector.reading is not None
    assert vector.reading.embedding is not None
    told = torch.frombuffer(bytearray(vector.reading.embedding), dtype=torch.float32)
    torch.testing.assert_close(told, states / states.norm(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_an_adapter_adds_to_a_quantised_model(quant: str) -> None:
    """Among steps of others it says what it says alone, which is close to what it says unquantised."""
    name, adapter = "llama-gqa", random_adapter("llama-gqa", "all")
    asked = prompts(name, [9, 5])
    engine = engine_over(build(name).directory, quant=quant)
    add(engine, adapter)
    alone = run(engine, [request(engine, asked[0], adapter, 1)])
    mixed = run(engine, [request(engine, asked[0], adapter, 1), request(engine, asked[1], None, 1)])
    assert mixed[0].tokens == alone[0].tokens
    logits = adapter.logits(asked[0])[-1]
    assert float(logits.max() - logits[alone[0].tokens[0]]) < 0.15 * float(logits.std())


def test_tokens_are_those_of_peft() -> None:
    """The same factors as peft applies them: a scale, ranks that differ by module, modules left out."""
    from peft import LoraConfig, get_peft_model

    name = "llama-gqa"
    config = LoraConfig(
        r=4,
        lora_alpha=24,
        target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
        rank_pattern={"v_proj": 7},
        use_rslora=True,
        lora_bias=False,
    )
    model = get_peft_model(tiny(name), config)
    generator = torch.Generator().manual_seed(3)
    factors = {}
    for path, module in model.named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            with torch.no_grad():
                a.copy_(0.1 * torch.randn(a.shape, generator=generator))
                b.copy_(0.3 * torch.randn(b.shape, generator=generator))
            factors[path] = Factors(a.detach(), b.detach() * module.scaling["default"])
    adapter = RandomAdapter(AdapterId("of peft"), random_adapter(name, "all").arch, factors, model.eval())
    asked = prompts(name, [9, 17])
    engine = engine_for(name)
    add(engine, adapter)

    answers = run(engine, [request(engine, asked[0], adapter, 12), request(engine, asked[1], None)])

    check(name, asked, [adapter, None], answers)
