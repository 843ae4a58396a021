"""Adapters as PEFT itself saves and applies them, for every family, against what PEFT computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from hearth.core.types import AdapterId
from hearth.engine.engine import Engine
from hearth.models.families import read_arch
from hearth.store.format.convert_adapter import AdapterBase
from hearth.store.format.read_adapter import read_adapter
from tests.engine.harness import (
    ROOMY,
    admissions_of,
    assert_best,
    assert_greedy,
    engine_for,
    greedy,
    kv_bytes,
    new_id,
    prompts_for,
    run,
)
from tests.models.zoo import build, tiny

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from peft import PeftModel

#: For each way in which families name and fuse projections, an adapter as users train them, and a second one.
CONFIGS: Mapping[str, tuple[dict[str, object], dict[str, object]]] = {
    "llama-gqa": (
        {"target_modules": "all-linear", "r": 1, "lora_alpha": 2},
        {"target_modules": ["v_proj"], "r": 256, "lora_alpha": 40},
    ),
    "llama-odd-head": (
        {
            "target_modules": r".*\.layers\.[02]\.(self_attn\.(q|o)_proj|mlp\.up_proj)",
            "use_rslora": True,
            "rank_pattern": {r"^model\.layers\.0\..*": 5, "up_proj": 9},
            "alpha_pattern": {r"layers\.2\.self_attn\.o_proj": 1},
        },
        {"target_modules": ["k_proj", "gate_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    ),
    "mistral-head": (
        {"target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"], "exclude_modules": ["k_proj"]},
        {"target_modules": ["model.layers.2.mlp.down_proj"], "init_lora_weights": "gaussian"},
    ),
    "qwen2": (
        {"target_modules": ["q_proj", "gate_proj"], "modules_to_save": [], "task_type": None},
        {"target_modules": ["o_proj"], "rank_pattern": {"layers.0.self_attn.o_proj": 3}},
    ),
    "qwen3": (
        {"target_modules": ["up_proj", "k_proj"], "alpha_pattern": {r".*\.k_proj": 17}},
        {"target_modules": ["down_proj"], "init_lora_weights": "orthogonal"},
    ),
    "opt-350m": (
        {"target_modules": ["out_proj", "fc1"], "lora_dropout": 0.3},
        {"target_modules": ["k_proj", "fc2"], "use_rslora": True},
    ),
    "neox-parallel": ({"target_modules": "all-linear"}, {"target_modules": ["query_key_value"], "r": 7}),
    "falcon-40b": (
        {"target_modules": ["query_key_value", "dense_4h_to_h"], "r": 3},
        {"target_modules": ["dense"], "lora_alpha": 40},
    ),
}


def adapted(name: str) -> PeftModel:
    """A model of the zoo with two random adapters."""
    from peft import LoraConfig, get_peft_model

    configs = [
        LoraConfig(**{"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM", **one}) for one in CONFIGS[name]
    ]
    model = get_peft_model(tiny(name), configs[0], adapter_name="first")
    model.add_adapter("second", configs[1])
    generator = torch.Generator().manual_seed(7)
    for path, parameter in model.named_parameters():
        if "lora_" in path:
            factor = torch.randn(parameter.shape, generator=generator) / max(parameter.shape) ** 0.5
            parameter.data = factor.half().float()  # so that either precision holds it
    return model.eval()


@contextmanager
def applied(model: PeftModel, adapter: str) -> Iterator[PeftModel]:
    model.set_adapter(adapter)
    with torch.inference_mode():
        yield model


def add(engine: Engine, directory: Path, name: str) -> AdapterId:
    """Have an engine know an adapter that lies in a directory of PEFT, each layer in memory of its own."""
    found = read_adapter(directory, AdapterBase(read_arch(build(name).directory), "float32"))
    pieces = [
        torch.frombuffer(bytearray(found.content[part.begin : part.end]), dtype=torch.uint8)
        for _, part in found.layout.layers
    ]
    engine.add_adapter(found.adapter, found.layout, pieces)
    return found.adapter


@pytest.mark.parametrize("name", CONFIGS)
def test_what_peft_has_saved_says_what_peft_says(name: str, tmp_path: Path) -> None:
    """Mixed with the bare model, in chunks, on prefixes of an earlier round, and with some preempted."""
    model = adapted(name)
    model.save_pretrained(tmp_path)
    second = tmp_path / "second" / "adapter_model.safetensors"
    save_file({path: one.half() for path, one in load_file(second).items()}, second)
    tight = replace(ROOMY, max_batch_tokens=16, max_seqs=6, kv_bytes=kv_bytes(engine_for(name), 14))
    engine = engine_for(name, tight)
    ids = {one: add(engine, tmp_path / one, name) for one in ("first", "second")}
    turns = ("first", "second", None) * 3
    asked = prompts_for(model.config.vocab_size, [3, 4, 5, 17, 17, 9, 26, 1, 12])
    admissions = admissions_of(engine)
    changed = set()  #: adapters that have the model say something else

    for _ in ("first", "again, on the prefixes that the first has left"):
        requests = [
            engine.request(new_id(), prompt, greedy(6), adapter=None if turn is None else ids[turn])
            for prompt, turn in zip(asked, turns, strict=True)
        ]
        answers = run(engine, requests)
        for prompt, turn, answer in zip(asked, turns, answers, strict=True):
            assert answer.tokens, answer
            if turn is None:
                assert_greedy(name, prompt, answer.tokens)
                continue
            with applied(model, turn):
                logits = model(torch.tensor([[*prompt, *answer.tokens]])).logits[0]
            assert_best(logits, prompt, answer.tokens)
            bare = build(name).model(torch.tensor([[*prompt, *answer.tokens]])).logits[0]
            if bare.argmax(-1)[len(prompt) - 1 : -1].tolist() != answer.tokens:
                changed.add(turn)
    assert changed == ids.keys()
    assert len(admissions) > 2 * len(asked), "nobody was preempted"
    assert any(one.num_cached_tokens for one in admissions)
