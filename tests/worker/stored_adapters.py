"""Random adapters of the zoo's models as a worker finds them, with their reference. Asserts nothing."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from hearth.core.messages import AdapterOrder
from hearth.core.types import AdapterId
from hearth.memory.pool import PieceRun
from hearth.models.adapter import AdapterLayout
from hearth.store.format.convert_adapter import AdapterBase, convert_adapter
from hearth.store.format.peft import open_peft
from tests.models.adapters import RandomAdapter, random_adapter


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    order: AdapterOrder
    layout: AdapterLayout
    reference: RandomAdapter


def run_in(memory: torch.Tensor, *sizes: int) -> PieceRun:
    """Return pieces that take all of a memory."""
    base = memory.data_ptr()
    return PieceRun(base, sizes, lambda address, size: memory[address - base : address - base + size])


def write_random_peft(adapter: RandomAdapter, directory: Path) -> Path:
    """Write an adapter as PEFT does; the scale is in its factors already."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors, ranks = {}, {}
    for module, factors in adapter.factors.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = factors.a.contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = factors.b.contiguous()
        ranks[module] = factors.b.shape[1]
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "bias": "none",
        "r": 1,
        "lora_alpha": 1,
        "rank_pattern": ranks,
        "alpha_pattern": ranks,
        "target_modules": sorted({module.rpartition(".")[2] for module in ranks}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@cache
def stored_adapter(model: str, seed: int = 0, kind: str = "all", dtype: str = "float32") -> StoredAdapter:
    """An adapter in Hearth's format, made once per process. Do not change it."""
    reference = random_adapter(model, kind, seed)
    directory = Path(tempfile.mkdtemp(prefix="hearth-adapter-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    adapter = open_peft(write_random_peft(reference, directory / "peft"))
    base = AdapterBase(reference.arch, dtype)
    manifest = convert_adapter(adapter, directory / "stored", base, chunk_bytes=64 << 10)
    order = AdapterOrder(AdapterId(manifest.digest), f"{model}-{kind}-{seed}", str(directory / "stored"))
    return StoredAdapter(order, manifest.layout, reference)
