from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from hearth.core.errors import BadCheckpoint
from hearth.models.dtypes import DTYPES, STORED_DTYPES
from hearth.models.families import read_arch
from hearth.models.layout import Layout, layout_of
from hearth.models.pack import checkpoint_dtype, iter_tensors, pack
from hearth.models.quantize import quantize
from hearth.store.format.hf import open_directory, read_checkpoint
from tests.models.zoo import VARIANTS, build, pack_directory, save, tiny

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]


def _packed(directory: Path, dtype: str = "float32", quant: str = "none") -> Tensors:
    arch = read_arch(directory)
    layout = layout_of(arch, dtype, quant)
    out = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    pack_directory(directory, arch, layout, out)
    return _tensors(layout, out)


def _tensors(layout: Layout, out: torch.Tensor) -> Tensors:
    return {
        spec.name: out[spec.offset : spec.offset + spec.nbytes]
        .view(STORED_DTYPES[spec.dtype])
        .view(spec.shape)
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


#: Families whose tensors are stacked and no more, or sorted by heads. Logits show the same of the others.
SAME = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "stablelm", "opt", "gpt_neox", "falcon")


@pytest.mark.parametrize("name", [name for name, one in VARIANTS.items() if one.model_type in SAME])
def test_packs_what_the_model_holds(name: str) -> None:
    model, directory = build(name)

    tensors = _packed(directory)

    assert _same(tensors, _expected(model))


def test_norms_that_multiply_by_one_more_than_their_weights_are_stored_in_float32() -> None:
    model, directory = build("nemotron")

    tensors = _packed(directory, "bfloat16")

    norm = model.base_model.layers[1].input_layernorm
    assert torch.equal(tensors["layers.1.attn_norm.weight"], norm.weight + 1.0)
    assert torch.equal(tensors["layers.1.attn_norm.bias"], norm.bias)
    assert tensors["layers.1.o.weight"].dtype == torch.bfloat16


def test_rows_that_are_rotated_as_pairs_become_halves() -> None:
    model, directory = build("glm")
    arch, attention = read_arch(directory), model.base_model.layers[0].self_attn

    bias = _packed(directory)["layers.0.qkv.bias"]

    first = attention.q_proj.bias[: arch.head_dim]
    assert torch.equal(bias[:24], torch.cat([first[0:12:2], first[1:12:2], first[12:]]))
    assert torch.equal(bias[-arch.head_dim :], attention.v_proj.bias)


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

    assert checkpoint_dtype(read_checkpoint(tmp_path)) == dtype
    assert _same(tensors, _expected(model))


def test_streams_tensors_in_the_layouts_order() -> None:
    directory = build("llama-gqa").directory
    with open_directory(directory) as source:
        layout = layout_of(source.arch, "bfloat16")

        packed = list(iter_tensors(source.checkpoint, source.arch, layout))

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
        BadCheckpoint, match=r"`model\.norm\.weight` is stored as int8; supported: float32, float16, bfloat16"
    ):
        _packed(directory)


def test_checkpoint_of_integers_has_no_dtype_to_serve(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")

    with pytest.raises(BadCheckpoint, match="stored as int8; supported: float32, float16, bfloat16"):
        checkpoint_dtype(read_checkpoint(tmp_path))


def test_checkpoint_without_tensors_has_no_dtype() -> None:
    with pytest.raises(BadCheckpoint, match="holds no tensors"):
        checkpoint_dtype({})


@pytest.mark.parametrize("quant", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["llama-bias", "falcon-40b", "opt-350m"])
def test_linears_are_quantised_by_rows_and_the_rest_is_not(name: str, quant: str) -> None:
    model, directory = build(name)
    expected = {}
    for key, tensor in _expected(model).items():
        module, kind = key.split(".")[-2:]
        is_plain = kind == "bias" or module in ("embed", "positions") or module.endswith("norm")
        expected[key] = tensor if is_plain else quantize(tensor, quant).values
        if not is_plain:
            expected[key.replace("weight", "scale")] = quantize(tensor, quant).scale

    tensors = _packed(directory, quant=quant)

    assert tensors.keys() == expected.keys()
    assert all(torch.equal(_bits(tensors[key]), _bits(expected[key])) for key in expected)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_large_weights_are_quantised_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = build("llama-gqa").directory
    at_once = _packed(directory, quant="int8")
    monkeypatch.setattr("hearth.models.pack.SLAB_ROWS", 7)

    tensors = _packed(directory, quant="int8")

    assert _same(tensors, at_once)


def test_weight_that_cannot_be_quantised_is_named(tmp_path: Path) -> None:
    broken = torch.zeros(64, 112)
    broken[3, 5] = float("nan")
    directory = _edited("llama-gqa", tmp_path, **{"model.layers.1.mlp.down_proj.weight": broken})

    with pytest.raises(BadCheckpoint, match=r"`layers\.1\.down\.weight`: from row 0 on: .* NaN or infinity"):
        _packed(directory, quant="int8")


@pytest.mark.parametrize("value", [65520.0, -1e6])
def test_weight_too_large_for_float16_is_named(tmp_path: Path, value: float) -> None:
    large = torch.zeros(64, 112)
    large[3, 5] = value
    directory = _edited("llama-gqa", tmp_path, **{"model.layers.1.mlp.down_proj.weight": large})

    with pytest.raises(
        BadCheckpoint, match=r"`layers\.1\.down\.weight` from row 0 on: .* 65504, .*; convert to bfloat16"
    ):
        _packed(directory, "float16")


def test_weight_that_was_infinite_before_stays_so_in_float16(tmp_path: Path) -> None:
    directory = _edited("llama-gqa", tmp_path, **{"model.norm.weight": torch.full((64,), torch.inf)})

    tensors = _packed(directory, "float16")

    assert tensors["final_norm.weight"].isinf().all()


def test_buffer_of_another_size_is_our_bug() -> None:
    arch = read_arch(build("llama-gqa").directory)
    layout = layout_of(arch, "float32")

    with pytest.raises(AssertionError, match="num_bytes"):
        pack({}, arch, layout, torch.zeros(layout.num_bytes - 1, dtype=torch.uint8))
