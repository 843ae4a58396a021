from __future__ import annotations

from itertools import pairwise

import pytest

from hearth.core.errors import DeviceError
from hearth.models.dtypes import DTYPES, STORED_DTYPES
from hearth.models.families import arch_from_config, read_arch
from hearth.models.formats import QUANTS
from hearth.models.layout import ALIGNMENT_BYTES, COMPUTED_DTYPES, STORED_ITEM_BYTES, layout_of
from tests.models.zoo import VARIANTS, build

TINY = {"num_hidden_layers": 2, "vocab_size": 10, "hidden_size": 8, "num_attention_heads": 2}


@pytest.mark.parametrize("name", VARIANTS)
def test_tensors_are_aligned_and_do_not_overlap(name: str) -> None:
    arch = read_arch(build(name).directory)
    for quant in QUANTS:
        layout = layout_of(arch, "float32", quant)

        assert layout.tensors[0].offset == 0
        assert all(spec.offset % ALIGNMENT_BYTES == 0 for spec in layout.tensors)
        assert all(
            a.offset + a.nbytes <= b.offset < a.offset + a.nbytes + 4096 for a, b in pairwise(layout.tensors)
        )
        assert layout.num_bytes == layout.tensors[-1].end


def test_dtypes_have_the_sizes_that_torch_gives_them() -> None:
    assert {name: dtype.itemsize for name, dtype in STORED_DTYPES.items()} == STORED_ITEM_BYTES
    assert tuple(DTYPES) == COMPUTED_DTYPES


def test_order_is_that_of_the_forward_pass() -> None:
    arch = arch_from_config({"model_type": "qwen3", **TINY, "num_key_value_heads": 1, "head_dim": 4})

    names = [spec.name for spec in layout_of(arch, "float32").tensors]

    layer = ["attn_norm", "qkv", "q_norm", "k_norm", "o", "mlp_norm", "up", "down"]
    assert names == [
        "embed.weight",
        *[f"layers.0.{module}.weight" for module in layer],
        *[f"layers.1.{module}.weight" for module in layer],
        "final_norm.weight",
        "head.weight",
    ]


def test_projected_learned_and_tied_tensors_have_their_places() -> None:
    arch = arch_from_config(
        {"model_type": "opt", **TINY, "word_embed_proj_dim": 4, "max_position_embeddings": 6, "ffn_dim": 12}
    )

    shapes = {spec.name: spec.shape for spec in layout_of(arch, "float32").tensors}

    assert shapes["embed.weight"] == (10, 4)
    assert shapes["positions.weight"] == (8, 8)
    assert shapes["embed_in.weight"] == (8, 4)
    assert shapes["layers.1.qkv.bias"] == (24,)
    assert shapes["layers.1.up.weight"] == (12, 8)
    assert shapes["embed_out.weight"] == (4, 8)
    assert "head.weight" not in shapes


def test_a_shared_norm_is_stored_once() -> None:
    arch = arch_from_config({"model_type": "falcon", **TINY})

    names = {spec.name for spec in layout_of(arch, "float32").tensors}

    assert "layers.0.mlp_norm.weight" not in names


def test_half_precision_takes_half_the_bytes() -> None:
    arch = read_arch(build("llama-gqa").directory)

    sizes = {dtype: layout_of(arch, dtype).tensors[0].nbytes for dtype in ("float32", "float16", "bfloat16")}

    assert sizes == {"float32": 160 * 64 * 4, "float16": 160 * 64 * 2, "bfloat16": 160 * 64 * 2}


def test_unknown_dtype_names_the_valid_ones() -> None:
    with pytest.raises(DeviceError, match="`int8`; supported: float32, float16, bfloat16"):
        layout_of(arch_from_config({"model_type": "llama"}), "int8")


@pytest.mark.parametrize(("quant", "stored"), [("int8", "int8"), ("fp8", "float8_e4m3fn")])
def test_a_quantised_weight_is_followed_by_its_scale_and_then_its_bias(quant: str, stored: str) -> None:
    layout = layout_of(read_arch(build("llama-bias").directory), "bfloat16", quant)

    at = next(i for i, spec in enumerate(layout.tensors) if spec.name == "layers.1.up.weight")
    specs = [(spec.name, spec.dtype, spec.shape, spec.nbytes) for spec in layout.tensors[at : at + 3]]
    assert specs == [
        ("layers.1.up.weight", stored, (224, 64), 224 * 64),
        ("layers.1.up.scale", "float32", (224,), 224 * 4),
        ("layers.1.up.bias", "bfloat16", (224,), 224 * 2),
    ]


def test_all_linears_are_quantised_and_nothing_else() -> None:
    arch = read_arch(build("opt-350m").directory)

    layout = layout_of(arch, "bfloat16", "int8")

    quantised = {spec.name for spec in layout.tensors if spec.dtype == "int8"}
    layers = {f"layers.{i}.{name}.weight" for i in range(3) for name in ("qkv", "o", "up", "down")}
    assert quantised == {"embed_in.weight", "embed_out.weight", *layers}
    plain = [spec.name for spec in layout.tensors if spec.dtype == "bfloat16"]
    assert plain[:2] == ["embed.weight", "positions.weight"]


def test_a_head_is_quantised_unless_it_is_the_embedding() -> None:
    untied = layout_of(read_arch(build("llama-gqa").directory), "bfloat16", "fp8")
    tied = layout_of(read_arch(build("smollm2").directory), "bfloat16", "fp8")

    assert [spec.name for spec in untied.tensors[-2:]] == ["head.weight", "head.scale"]
    assert untied.tensors[-2].dtype == "float8_e4m3fn"
    assert (tied.tensors[0].dtype, tied.tensors[-1].name) == ("bfloat16", "final_norm.weight")


def test_quant_none_is_the_plain_layout() -> None:
    arch = read_arch(build("qwen3").directory)

    layout = layout_of(arch, "float16", "none")

    assert layout == layout_of(arch, "float16")
    assert not any(spec.name.endswith(".scale") for spec in layout.tensors)


def test_unknown_quant_names_the_valid_ones() -> None:
    with pytest.raises(DeviceError, match="`int5`; supported: none, int8, fp8, int4"):
        layout_of(arch_from_config({"model_type": "llama"}), "float32", "int5")
