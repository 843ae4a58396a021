"""Adapters as PEFT itself merges them, for every family."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hearth.models.adapter import AdapterLayout, Projection
from hearth.models.adapter_pack import AdapterSource, target_names
from hearth.models.families import read_arch
from hearth.models.layout import layout_of
from hearth.models.pack import iter_tensors
from hearth.store.format.hf import open_directory
from hearth.store.format.peft import open_peft
from tests.models.zoo import build

if TYPE_CHECKING:
    from types import ModuleType

#: One of each way in which families name and fuse projections.
FAMILIES = {
    "llama-gqa": {},
    "llama-odd-head": {"use_rslora": True, "lora_alpha": 3},
    "qwen2": {"target_modules": ["q_proj", "v_proj"], "r": 1},
    "qwen3": {"rank_pattern": {"k_proj": 2, r"layers\.1\..*down_proj": 7}, "alpha_pattern": {"up_proj": 32}},
    "mistral-head": {"target_modules": r".*\.(o_proj|gate_proj)", "layers_to_transform": None},
    "opt-pre": {"layers_to_transform": [0, 2], "target_modules": ["k_proj", "fc1", "fc2", "out_proj"]},
    "opt-350m": {"target_modules": ["v_proj", "fc2"]},
    "neox-parallel": {"rank_pattern": {"gpt_neox.layers.1.attention.query_key_value": 3}},
    "neox-sequential": {"target_modules": ["query_key_value"]},
    "falcon-7b": {"lora_alpha": 0.5},
    "falcon-40b": {"use_rslora": True},
    "falcon-rw-like": {"target_modules": ["dense", "query_key_value"]},
}


@pytest.fixture(scope="module")
def peft() -> ModuleType:
    import peft

    return peft


def save_adapter(peft: ModuleType, variant: str, directory: Path, **options: object) -> Any:
    """Save a random adapter and return the model that PEFT has merged it into."""
    model, _ = build(variant)
    config = {"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM", **options}
    config.setdefault("target_modules", target_names(read_arch(build(variant).directory).family))
    copied = type(model)(model.config)
    copied.load_state_dict(model.state_dict())
    adapted = peft.get_peft_model(copied, peft.LoraConfig(**config))
    torch.manual_seed(zlib.crc32(variant.encode()))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    adapted.save_pretrained(directory)
    return adapted.merge_and_unload()


def unpacked(layout: AdapterLayout, data: bytes) -> Mapping[tuple[int, Projection], torch.Tensor]:
    """Return what each target of a float32 adapter adds to its weight."""
    numbers = torch.frombuffer(bytearray(data), dtype=torch.float32)

    def factor(offset: int, *shape: int) -> torch.Tensor:
        return numbers[offset // 4 :][: shape[0] * shape[1]].view(shape)

    added = {}
    for place in layout.places:
        target = place.target
        num_rows = max(part.begin + part.size for part in target.slices)
        change = torch.zeros(num_rows, target.num_inputs)
        a, at = factor(place.a, target.rank, target.num_inputs), 0
        for part, offset in zip(target.slices, place.b, strict=True):
            b = factor(offset, part.rank, part.row_size)[:, : part.size]
            change[part.begin : part.begin + part.size] = b.t() @ a[at : at + part.rank]
            at += part.rank
        added[target.layer, target.projection] = change
    return added


@pytest.mark.parametrize("variant", FAMILIES)
def test_merging_what_was_packed_is_packing_what_peft_has_merged(
    variant: str, peft: ModuleType, tmp_path: Path
) -> None:
    merged = save_adapter(peft, variant, tmp_path / "adapter", **FAMILIES[variant])
    merged.save_pretrained(tmp_path / "merged")
    arch, layout = _base(variant)
    adapter = open_peft(tmp_path / "adapter")
    source = AdapterSource.of(arch, adapter.checkpoint, adapter.modules, "float32")
    data = b"".join(source.pieces())
    assert len(data) == source.layout.num_bytes
    added = unpacked(source.layout, data)
    with open_directory(build(variant).directory) as base, open_directory(tmp_path / "merged") as wanted:
        pairs = zip(
            iter_tensors(base.checkpoint, arch, layout),
            iter_tensors(wanted.checkpoint, arch, layout),
            strict=True,
        )
        for before, after in pairs:
            path = before.spec.name.split(".")
            change = None
            if path[0] == "layers" and path[2] in list(Projection) and path[3] == "weight":
                change = added.pop((int(path[1]), Projection(path[2])), None)
            expected = before.tensor.clone()
            if change is not None:
                assert change.abs().max() > 0
                expected[: len(change)] += change
            torch.testing.assert_close(after.tensor, expected, rtol=1e-5, atol=1e-5)
    assert not added


def _base(variant: str) -> tuple[Any, Any]:
    arch = read_arch(build(variant).directory)
    return arch, layout_of(arch, "float32")
