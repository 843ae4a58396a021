"""The engine on a CUDA device: Triton kernels, graphs, half precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hearth.config import EngineConfig
from hearth.engine.engine import Output
from hearth.types import RequestId, SamplingParams
from tests.engine.harness import ROOMY, ask, assert_greedy, engine_for, greedy, kv_bytes, prompts_for
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
    """float32, tokens as transformers would choose them on the CPU, with graphs, chunks and preemption."""
    asked = prompts(name, [1, 3, 4, 5, 17, 30])
    tight = replace(ROOMY, max_batch_tokens=16, kv_bytes=kv_bytes(engine_for(name), 14))
    for config in (ROOMY, tight):
        answers = ask(engine_for(name, config, "cuda"), asked, greedy())

        for prompt, answer in zip(asked, answers, strict=True):
            assert_greedy(name, prompt, answer.tokens)
            assert len(answer.tokens) == 12


def outputs_of(config: EngineConfig, num_prompts: int) -> list[Output]:
    engine = engine_for("llama-gqa", config, "cuda")
    engine.runner.kv.view(torch.uint8).fill_(0xFF)
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=5, ignore_eos=True)
    for number, prompt in enumerate(prompts("llama-gqa", [7] * num_prompts)):
        engine.add(engine.request(RequestId(str(number)), prompt, params))
    outputs = []
    while engine.has_work:
        outputs.extend(engine.step())
    return outputs


def test_graph_replay_equals_eager_execution() -> None:
    """Four sequences fill a graph of four: the same kernels on the same shapes, so the same bits."""
    assert outputs_of(ROOMY, 4) == outputs_of(replace(ROOMY, graphs="off"), 4)


def test_padded_rows_of_a_graph_change_no_token() -> None:
    padded, eager = (outputs_of(replace(ROOMY, graphs=graphs), 5) for graphs in ("start", "off"))

    assert [(o.request_id, o.token) for o in padded] == [(o.request_id, o.token) for o in eager]


def test_memory_that_was_used_before_changes_nothing() -> None:
    assert outputs_of(ROOMY, 3) == outputs_of(ROOMY, 3)


def test_7b_shaped_model_is_as_near_to_float32_as_transformers_in_bfloat16(tmp_path: Path) -> None:
    """Teacher-forced on Hearth's own answer: mean and worst error of logprobs at most 1.25 times theirs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from hearth import LLM

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
