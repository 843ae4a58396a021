from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from hearth.errors import BadCheckpoint
from hearth.models.families import read_arch
from hearth.models.layout import DTYPES, Layout, layout_of
from hearth.models.pack import checkpoint_dtype, iter_tensors, pack
from tests.models.zoo import VARIANTS, build, save, tiny

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]


def _packed(directory: Path, dtype: str = "float32") -> Tensors:
    arch = read_arch(directory)
    layout = layout_of(arch, dtype)
    out = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    pack(directory, arch, layout, out)
    return _tensors(layout, out)


def _tensors(layout: Layout, out: torch.Tensor) -> Tensors:
    return {
        spec.name: out[spec.offset : spec.offset + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
        for spec in layout.tensors
    }


def _expected_layer(model: PreTrainedModel, i: int) -> Tensors:
    """One layer's tensors by canonical name, taken from transformers' own modules."""
    layer = _layers(model)[i]
    modules: dict[str, list[torch.nn.Module]] = {}
    attention = getattr(layer, "self_attn", None) or getattr(layer, "attention", None) or layer.self_attention
    mlp = getattr(layer, "mlp", None)
    modules["attn_norm"] = [_first(layer, "input_layernorm", "self_attn_layer_norm", "ln_attn")]
    if mlp_norm := _first(layer, "post_attention_layernorm", "final_layer_norm", "ln_mlp"):
        modules["mlp_norm"] = [mlp_norm]
    if hasattr(attention, "q_norm"):
        modules |= {"q_norm": [attention.q_norm], "k_norm": [attention.k_norm]}
    modules["o"] = [_first(attention, "o_proj", "out_proj", "dense")]
    if hasattr(mlp, "gate_proj"):
        modules |= {"up": [mlp.gate_proj, mlp.up_proj], "down": [mlp.down_proj]}
    elif mlp is not None:
        modules |= {"up": [mlp.dense_h_to_4h], "down": [mlp.dense_4h_to_h]}
    else:
        modules |= {"up": [layer.fc1], "down": [layer.fc2]}
    tensors = {}
    for name, parts in modules.items():
        for kind in ("weight", "bias"):
            if getattr(parts[0], kind, None) is not None:
                tensors[f"layers.{i}.{name}.{kind}"] = torch.cat([getattr(part, kind) for part in parts])
    for kind in ("weight", "bias"):
        fused = _expected_qkv(model, attention, kind)
        if fused is not None:
            tensors[f"layers.{i}.qkv.{kind}"] = fused
    return tensors


def _expected_qkv(model: PreTrainedModel, attention: torch.nn.Module, kind: str) -> torch.Tensor | None:
    if hasattr(attention, "q_proj"):
        parts = [getattr(module, kind) for module in (attention.q_proj, attention.k_proj, attention.v_proj)]
        return None if parts[0] is None else torch.cat(parts)
    fused = getattr(attention.query_key_value, kind)
    if fused is None:
        return None
    # What the model does to activations [batch, tokens, rows], done to the rows of the weight itself.
    rows = fused.view(len(fused), -1).T[None]
    if model.config.model_type == "falcon":
        split = attention._split_heads(rows)
        num_kv_heads = attention.num_kv_heads
    else:
        split = rows.view(1, rows.shape[1], -1, 3 * attention.head_size).chunk(3, dim=-1)
        num_kv_heads = model.config.num_attention_heads
    q, k, v = split
    k, v = (heads[:, :, :: heads.shape[2] // num_kv_heads] for heads in (k, v))
    back = torch.cat([heads.flatten(2)[0].T for heads in (q, k, v)])
    return back.reshape(fused.shape)


def _first(module: torch.nn.Module, *names: str) -> torch.nn.Module | None:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    base = getattr(model.base_model, "decoder", model.base_model)
    return base.h if hasattr(base, "h") else base.layers


def _expected(model: PreTrainedModel) -> Tensors:
    base = getattr(model.base_model, "decoder", model.base_model)
    tensors: Tensors = {"embed.weight": model.get_input_embeddings().weight}
    tops = {
        "positions": _first(base, "embed_positions"),
        "embed_in": _first(base, "project_in"),
        "final_norm": _first(base, "norm", "final_layer_norm", "ln_f"),
        "embed_out": _first(base, "project_out"),
    }
    for name, module in tops.items():
        for kind in ("weight", "bias"):
            if getattr(module, kind, None) is not None:
                tensors[f"{name}.{kind}"] = getattr(module, kind)
    for i in range(len(_layers(model))):
        tensors |= _expected_layer(model, i)
    if not model.config.tie_word_embeddings:
        tensors["head.weight"] = model.get_output_embeddings().weight
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _same(ours: Tensors, theirs: Tensors) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", VARIANTS)
def test_packs_what_the_model_holds(name: str) -> None:
    model, directory = build(name)

    tensors = _packed(directory)

    assert _same(tensors, _expected(model))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-bias", "falcon-40b", "opt-350m"])
def test_converts_to_the_layouts_dtype(name: str, dtype: str) -> None:
    model, directory = build(name)

    tensors = _packed(directory, dtype)

    assert _same(tensors, {key: tensor.to(DTYPES[dtype]) for key, tensor in _expected(model).items()})


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_every_stored_dtype(tmp_path: Path, dtype: str) -> None:
    model = tiny("neox-parallel").to(DTYPES[dtype])
    save(model, tmp_path)

    tensors = _packed(tmp_path, dtype)

    assert checkpoint_dtype(tmp_path) == dtype
    assert _same(tensors, _expected(model))


def test_shards_give_the_same_bytes_as_one_file(tmp_path: Path) -> None:
    model, whole = build("qwen2")
    save(model, tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2

    tensors = _packed(tmp_path)

    assert _same(tensors, _packed(whole))


def test_streams_tensors_in_the_layouts_order() -> None:
    directory = build("llama-gqa").directory
    arch = read_arch(directory)
    layout = layout_of(arch, "bfloat16")

    packed = list(iter_tensors(directory, arch, layout))

    assert [item.spec for item in packed] == list(layout.tensors)
    assert all(tuple(item.tensor.shape) == item.spec.shape for item in packed)
    assert {item.tensor.dtype for item in packed} == {torch.bfloat16}


def _edited(name: str, directory: Path, **changes: torch.Tensor) -> Path:
    from safetensors.torch import load_file, save_file

    source = build(name).directory
    shutil.copy(source / "config.json", directory)
    save_file({**load_file(source / "model.safetensors"), **changes}, directory / "model.safetensors")
    return directory


def test_stored_copy_of_a_tied_head_is_passed_over(tmp_path: Path) -> None:
    model = build("smollm2").model
    copy = model.get_input_embeddings().weight.detach().clone()

    tensors = _packed(_edited("smollm2", tmp_path, **{"lm_head.weight": copy}))

    assert _same(tensors, _expected(model))


def test_tied_head_that_differs_from_the_embedding_is_refused(tmp_path: Path) -> None:
    directory = _edited("smollm2", tmp_path, **{"lm_head.weight": torch.zeros(160, 72)})

    with pytest.raises(
        BadCheckpoint, match=r"`lm_head\.weight` differs .* set `tie_word_embeddings` to false"
    ):
        _packed(directory)


def test_quantized_tensor_is_refused_by_name_and_dtype(tmp_path: Path) -> None:
    directory = _edited("llama-gqa", tmp_path, **{"model.norm.weight": torch.zeros(64, dtype=torch.int8)})

    with pytest.raises(
        BadCheckpoint, match=r"`model\.norm\.weight` is stored as I8; supported: F32, F16, BF16"
    ):
        _packed(directory)


def test_checkpoint_of_integers_has_no_dtype_to_serve(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")

    with pytest.raises(BadCheckpoint, match="stored as I8; supported: F32, F16, BF16"):
        checkpoint_dtype(tmp_path)


def test_directory_without_safetensors_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()

    with pytest.raises(BadCheckpoint, match=r"holds: pytorch_model\.bin; .*\.bin files are not read"):
        checkpoint_dtype(tmp_path)


@pytest.mark.parametrize("num_kept", [0, 4, 2000, -1])
def test_truncated_file_is_named(tmp_path: Path, num_kept: int) -> None:
    whole = (build("llama-gqa").directory / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:num_kept])

    with pytest.raises(BadCheckpoint, match=r"model\.safetensors` is truncated or no safetensors file"):
        checkpoint_dtype(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save(build("qwen2").model, tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()

    with pytest.raises(BadCheckpoint, match=f"names `{shard.name}`, which is not in"):
        _packed(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "no readable `weight_map`"),
        (json.dumps({}), "no readable `weight_map`"),
        (json.dumps({"weight_map": ["model.safetensors"]}), "no readable `weight_map`"),
        (json.dumps({"weight_map": {"a": "../a.safetensors"}}), "not a file beside it"),
    ],
)
def test_broken_index_is_a_bad_checkpoint(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)

    with pytest.raises(BadCheckpoint, match=message):
        checkpoint_dtype(tmp_path)


def test_buffer_of_another_size_is_our_bug() -> None:
    directory = build("llama-gqa").directory
    arch = read_arch(directory)
    layout = layout_of(arch, "float32")

    with pytest.raises(AssertionError, match="num_bytes"):
        pack(directory, arch, layout, torch.zeros(layout.num_bytes - 1, dtype=torch.uint8))
