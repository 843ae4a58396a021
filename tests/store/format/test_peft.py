"""Adapters of PEFT: what is read of them, and what is refused with which reason."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.errors import BadCheckpoint, ModelError, UnsupportedModel
from hearth.models.adapter import AdapterSlice, Projection
from hearth.models.adapter_pack import AdapterSource, LoraModules
from hearth.models.families import read_arch
from hearth.store.format.adapter_manifest import read_adapter_manifest
from hearth.store.format.convert_adapter import AdapterBase, convert_adapter
from hearth.store.format.peft import open_peft
from tests.models.zoo import build
from tests.store.format.peft_files import PREFIX, Tensors, write_peft

LLAMA = "llama-gqa"
Q = "model.layers.0.self_attn.q_proj"
Q_A, Q_B = (f"{PREFIX}{Q}.lora_{factor}.weight" for factor in "AB")


def source_of(directory: Path, variant: str = LLAMA, dtype: str = "float32") -> AdapterSource:
    adapter = open_peft(directory)
    return AdapterSource.of(read_arch(build(variant).directory), adapter.checkpoint, adapter.modules, dtype)


def convert(directory: Path, dest: Path, variant: str = LLAMA, dtype: str = "float32") -> None:
    convert_adapter(open_peft(directory), dest, AdapterBase(read_arch(build(variant).directory), dtype))


def renamed(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.__setitem__(new, tensors.pop(old))


def put(name: str, *shape: int, value: float = 1.0) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.__setitem__(name, torch.full(shape, value))


def test_parts_of_a_fused_projection_have_ranks_of_their_own(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{PREFIX}model.layers.1.self_attn.v_proj.lora_A.weight"] = torch.randn(7, 64)
        tensors[f"{PREFIX}model.layers.1.self_attn.v_proj.lora_B.weight"] = torch.randn(32, 7)

    config = {"rank_pattern": {r"layers\.1\.self_attn\.v_proj": 7}}
    write_peft(tmp_path, targets=["q_proj", "v_proj"], config=config, change=change)
    targets = [place.target for place in source_of(tmp_path).layout.places]
    assert [(target.layer, target.projection) for target in targets] == [
        (layer, Projection.QKV) for layer in range(3)
    ]
    assert targets[0].slices == (AdapterSlice(0, 64, 4), AdapterSlice(96, 32, 4))
    assert targets[1].slices == (AdapterSlice(0, 64, 4), AdapterSlice(96, 32, 7))


@pytest.mark.parametrize("rank", [1, 256])
def test_ranks_from_1_to_256_are_taken(tmp_path: Path, rank: int) -> None:
    write_peft(tmp_path, targets=["down_proj"], rank=rank)
    assert source_of(tmp_path).layout.places[0].target.rank == rank


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"lora_alpha": 0.5}, 0.125),
        ({"alpha_pattern": {"q_proj": 32, Q: 1}}, 8.0),
        ({"alpha_pattern": {"k_proj": 32, r"model\.layers\.[0-1]\.self_attn\.q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"proj": 32, "layers.0": 5}}, 2.0),  # a part of a name is no name
    ],
)
def test_the_scale_is_as_peft_finds_it(tmp_path: Path, config: dict[str, object], scale: float) -> None:
    write_peft(tmp_path, targets=["q_proj"], config=config)
    assert math.isclose(open_peft(tmp_path).modules[Q].scale, scale)


@pytest.mark.parametrize("is_pickled", [False, True])
def test_both_kinds_of_files_hold_the_same_adapter(tmp_path: Path, is_pickled: bool) -> None:
    write_peft(tmp_path / "a", is_pickled=is_pickled)
    write_peft(tmp_path / "b")
    for name in "ab":
        convert(tmp_path / name, tmp_path / f"{name}-made")
    one, other = (read_adapter_manifest(tmp_path / f"{name}-made") for name in "ab")
    assert one == other


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "`use_dora`, .*DoRA scales the weights.*merge_and_unload"),
        ({"modules_to_save": ["lm_head"]}, "`modules_to_save`.*whole layers were trained"),
        ({"lora_bias": True}, "`lora_bias`.*biases"),
        ({"bias": "all"}, "`bias` 'all'.*biases were trained"),
        ({"fan_in_fan_out": True}, "`fan_in_fan_out`.*transposed"),
        ({"trainable_token_indices": [3]}, "`trainable_token_indices`.*embeddings"),
        ({"layer_replication": [[0, 3]]}, "`layer_replication`.*nothing is known of it"),
        ({"use_qalora": True}, "`use_qalora`"),
        ({"alora_invocation_tokens": [1]}, "`alora_invocation_tokens`.*activated LoRA"),
        ({"some_new_method": {"x": 1}}, "`some_new_method`.*not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "which changes the base"),
        ({"peft_type": "LOHA"}, "`peft_type` 'LOHA'; supported: 'LORA'"),
        ({"peft_type": None}, "`peft_type` None"),
    ],
)
def test_what_cannot_be_served_exactly_is_refused_by_its_config(
    tmp_path: Path, config: dict[str, object], reason: str
) -> None:
    write_peft(tmp_path, targets=["q_proj"], config=config)
    with pytest.raises(UnsupportedModel, match=reason):
        open_peft(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put(f"{PREFIX}model.embed_tokens.lora_embedding_A", 4, 160), "adapts an embedding"),
        (put(f"{PREFIX}{Q}.lora_magnitude_vector", 64), "DoRA"),
        (put(f"{PREFIX}{Q}.lora_B.bias", 64), "biases"),
        (put(f"{PREFIX}lm_head.weight", 160, 64), "whole layers were trained"),
        (put(f"{PREFIX}lm_head.lora_A.weight", 4, 64), "no `lora_B` for `lm_head`"),
        (renamed(Q_A, f"{PREFIX}{Q}.lora_A.default.weight"), None),
        (renamed(Q_A, f"{PREFIX}{Q}.lora_A.other.weight"), "whole layers"),
        (lambda tensors: tensors.pop(Q_A), "no `lora_A` for"),
        (lambda tensors: tensors.pop(Q_B), "no `lora_B` for"),
        (put(f"{PREFIX}{Q}.lora_A.default.weight", 4, 64), "under two names"),
        (Tensors.clear, "factors for 1 to 4096 modules, given: 0"),
        (renamed(Q_A, f"{'m' * 600}.lora_A.weight"), "whose name has 614 characters, limit: 512"),
        (put(Q_A, 4, 63), r"shape \[4, 63\], the base needs \[rank, 64\]"),
        (put(Q_B, 32, 4), r"shape \[32, 4\], the base needs \[64, rank\]"),
        (put(Q_B, 64, 5), "rank 4, .* 5"),
        (put(Q_A, 5, 64), "have rank 5, .* says 4"),
        (put(Q_A, 4), r"shape \[4\]"),
        (put(Q_B, 64, 4, value=math.nan), "NaN or infinity"),
        (put(Q_A, 4, 64, value=math.inf), "NaN or infinity"),
        (lambda tensors: tensors.__setitem__(Q_A, torch.ones(4, 64, dtype=torch.int8)), "stored as int8"),
    ],
)
def test_tensors_that_are_not_the_factors_of_the_base_are_refused(
    tmp_path: Path, change: Callable[[Tensors], object], reason: str | None
) -> None:
    write_peft(tmp_path / "adapter", targets=["q_proj"], change=change)
    if reason is None:
        convert(tmp_path / "adapter", tmp_path / "made")
        return
    with pytest.raises(ModelError, match=reason):
        convert(tmp_path / "adapter", tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("module", ["lm_head", "model.layers.3.mlp.up_proj", "model.layers.00.mlp.up_proj"])
def test_modules_that_the_base_does_not_have_are_refused_with_those_that_it_has(
    tmp_path: Path, module: str
) -> None:
    def change(tensors: Tensors) -> None:
        put(f"{PREFIX}{module}.lora_A.weight", 4, 64)(tensors)
        put(f"{PREFIX}{module}.lora_B.weight", 112, 4)(tensors)

    config = {"target_modules": ["q_proj", "lm_head", "up_proj"]}
    write_peft(tmp_path, targets=["q_proj"], config=config, change=change)
    with pytest.raises(BadCheckpoint, match=f"`{module}`, .* family llama, 3 layers; .*q_proj, k_proj"):
        source_of(tmp_path)


def test_more_modules_than_patterns_can_be_tried_on_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.store.format.peft.MAX_MODULES", 2)
    write_peft(tmp_path, targets=["q_proj"])
    with pytest.raises(BadCheckpoint, match="1 to 2 modules, given: 3"):
        open_peft(tmp_path)


def test_an_adapter_of_another_family_is_refused(tmp_path: Path) -> None:
    write_peft(tmp_path, "neox-parallel")
    with pytest.raises(BadCheckpoint, match=r"`gpt_neox\.layers\.0\."):
        source_of(tmp_path)


def test_factors_of_modules_that_the_config_does_not_name_are_refused(tmp_path: Path) -> None:
    write_peft(tmp_path, config={"target_modules": ["q_proj"]})
    with pytest.raises(BadCheckpoint, match=r"`target_modules` of .* does not name: \['q_proj'\]"):
        open_peft(tmp_path)
    write_peft(tmp_path, config={"target_modules": r".*\.(q|k)_proj"})  # which PEFT has tried already
    open_peft(tmp_path)


def test_a_scale_that_leaves_the_range_of_the_dtype_is_refused(tmp_path: Path) -> None:
    write_peft(tmp_path, targets=["q_proj"], config={"lora_alpha": 500_000})
    with pytest.raises(BadCheckpoint, match=r"float16, .* up to 65504, found"):
        b"".join(source_of(tmp_path, dtype="float16").pieces())


@pytest.mark.parametrize(
    "config",
    [
        {"r": 257},
        {"r": 4.0},
        {"r": 0},
        {"r": True},
        {"r": "4"},
        {"r": 10**400},
        {"lora_alpha": math.nan},
        {"lora_alpha": math.inf},
        {"lora_alpha": "much"},
        {"lora_alpha": 10**400},
        {"rank_pattern": ["q_proj"]},
        {"rank_pattern": {"(": 4}},
        {"rank_pattern": {"(a+)+b": 4}},
        {"alpha_pattern": {"x" * 2000: 4}},
        {"alpha_pattern": {".*.*.*.*.*.*q": 4}},
        {"alpha_pattern": {"m?" * 30 + "m" * 30: 4}},
        {"alpha_pattern": dict.fromkeys(map(str, range(5000)), 4)},
        {"alpha_pattern": {"q_proj": {"deep": []}}},
    ],
)
def test_numbers_and_patterns_out_of_range_are_refused(tmp_path: Path, config: dict[str, object]) -> None:
    write_peft(tmp_path, targets=["q_proj"], config=config)
    with pytest.raises(ModelError) as caught:
        open_peft(tmp_path)
    assert len(str(caught.value)) < 1000


def test_a_pattern_that_takes_too_long_for_the_names_at_hand_is_refused(tmp_path: Path) -> None:
    """As many repetitions as may be, on a name that may be so long, keep the machine busy for hours."""

    def lengthen(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.replace(".layers.", f".{'a.' * 150}layers.")] = tensors.pop(name)

    config = {"alpha_pattern": {".*.*.*.*x": 4}}
    write_peft(tmp_path, targets=["q_proj"], config=config, change=lengthen)
    with pytest.raises(BadCheckpoint, match="too costly to try on 3 modules"):
        open_peft(tmp_path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=9), inner, max_size=2),
    max_leaves=4,
)
FIELDS = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "bias"),
    *("peft_type", "use_dora", "init_lora_weights", "base_model_name_or_path", "layers_to_transform"),
)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_peft(tmp_path_factory.mktemp("fuzzed"), targets=["q_proj"])


@given(changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
def test_whatever_a_config_holds_is_taken_or_refused(changes: dict[str, object], fuzzed: Path) -> None:
    usual = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (fuzzed / "adapter_config.json").write_text(json.dumps({**usual, **changes}))
    modules: LoraModules = {}
    with suppress(ModelError):
        modules = open_peft(fuzzed).modules
    assert all(math.isfinite(module.scale) for module in modules.values())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b'"LORA"',
        b"\xff\xfe",
        b'{"peft_type": "LORA", "r": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"peft_type": "LORA", "x": "' + b"y" * (13 << 20) + b'"}',
    ],
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    write_peft(tmp_path, targets=["q_proj"])
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(ModelError):
        open_peft(tmp_path)


def test_a_config_that_leads_out_of_its_directory_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"peft_type": "LORA"}))
    directory = write_peft(tmp_path / "adapter", targets=["q_proj"])
    (directory / "adapter_config.json").unlink()
    (directory / "adapter_config.json").symlink_to(secret)
    with pytest.raises(BadCheckpoint, match="outside of the model's directory"):
        open_peft(directory)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}"),
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_weights_that_are_none_are_refused(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    write_peft(tmp_path, targets=["q_proj"])
    spoil(tmp_path / "adapter_model.safetensors")
    with pytest.raises(BadCheckpoint):
        open_peft(tmp_path)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "harm"),))

    write_peft(tmp_path, targets=["q_proj"])
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save({"x": Harm()}, tmp_path / "adapter_model.bin")
    with pytest.raises(BadCheckpoint, match="it could run code"):
        open_peft(tmp_path)
    assert not (tmp_path / "harm").exists()
