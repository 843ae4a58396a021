"""LoRA adapters as PEFT saves them, written without it. Asserts nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from hearth.models.adapter import Projection, projection_shape
from hearth.models.adapter_pack import target_names
from hearth.models.arch import Arch
from hearth.models.families import read_arch
from hearth.models.tensor_names import NAMES
from tests.models.zoo import build

Tensors = dict[str, torch.Tensor]

PREFIX = "base_model.model."


def factors(arch: Arch, targets: Sequence[str], rank: int) -> Tensors:
    """Return random factors of these modules of every layer, by the names that PEFT saves them under."""
    names, sizes = NAMES[arch.family], arch.dimensions
    made: Tensors = {}
    torch.manual_seed(rank)
    for layer in range(arch.num_layers):
        for projection in Projection:
            templates = names.modules[projection]
            num_outputs, num_inputs = projection_shape(sizes, projection)
            rows = [num_outputs // len(templates)] * len(templates)
            if projection is Projection.QKV and len(templates) == 3:
                rows = [sizes.q_size, sizes.kv_size, sizes.kv_size]
            for template, size in zip(templates, rows, strict=True):
                module = f"{PREFIX}{names.prefixes[0]}{template.format(i=layer)}"
                if module.rpartition(".")[2] in targets:
                    made[f"{module}.lora_A.weight"] = torch.randn(rank, num_inputs)
                    made[f"{module}.lora_B.weight"] = torch.randn(size, rank)
    return made


def write_peft(
    directory: Path,
    variant: str = "llama-gqa",
    *,
    targets: Sequence[str] | None = None,
    rank: int = 4,
    config: Mapping[str, object] | None = None,
    change: Callable[[Tensors], object] = lambda tensors: None,
    is_pickled: bool = False,
) -> Path:
    """Write an adapter for a model of the zoo; `config` and `change` make it another one."""
    arch = read_arch(build(variant).directory)
    targets = target_names(arch.family) if targets is None else targets
    tensors = factors(arch, targets, rank)
    change(tensors)
    directory.mkdir(parents=True, exist_ok=True)
    if is_pickled:
        torch.save(tensors, directory / "adapter_model.bin")
    else:
        save_file(tensors, directory / "adapter_model.safetensors")
    usual = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/Tiny-Llama",
        "bias": "none",
        "fan_in_fan_out": False,
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "r": rank,
        "target_modules": list(targets),
        "use_dora": False,
        "use_rslora": False,
    }
    (directory / "adapter_config.json").write_text(json.dumps({**usual, **(config or {})}))
    return directory
