from __future__ import annotations

from itertools import pairwise

import pytest

from hearth.errors import DeviceError
from hearth.models.families import arch_from_config, read_arch
from hearth.models.layout import ALIGNMENT_BYTES, layout_of
from tests.models.zoo import VARIANTS, build

TINY = {"num_hidden_layers": 2, "vocab_size": 10, "hidden_size": 8, "num_attention_heads": 2}


@pytest.mark.parametrize("name", VARIANTS)
def test_tensors_are_aligned_and_do_not_overlap(name: str) -> None:
    layout = layout_of(read_arch(build(name).directory), "float32")

    assert layout.tensors[0].offset == 0
    assert all(spec.offset % ALIGNMENT_BYTES == 0 for spec in layout.tensors)
    assert all(
        a.offset + a.nbytes <= b.offset < a.offset + a.nbytes + 4096 for a, b in pairwise(layout.tensors)
    )
    assert layout.num_bytes == layout.tensors[-1].end


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


def test_layer_ranges_touch_and_cover_exactly_the_layers() -> None:
    layout = layout_of(read_arch(build("llama-gqa").directory), "bfloat16")

    ranges = [layout.layer_range(i) for i in range(3)]

    offsets = {spec.name: spec.offset for spec in layout.tensors}
    assert ranges[0].begin == offsets["layers.0.attn_norm.weight"]
    assert [r.end for r in ranges[:-1]] == [r.begin for r in ranges[1:]]
    assert ranges[-1].end == offsets["final_norm.weight"]


def test_half_precision_takes_half_the_bytes() -> None:
    arch = read_arch(build("llama-gqa").directory)

    sizes = {dtype: layout_of(arch, dtype).tensors[0].nbytes for dtype in ("float32", "float16", "bfloat16")}

    assert sizes == {"float32": 160 * 64 * 4, "float16": 160 * 64 * 2, "bfloat16": 160 * 64 * 2}


def test_unknown_dtype_names_the_valid_ones() -> None:
    with pytest.raises(DeviceError, match="`int8`; supported: float32, float16, bfloat16"):
        layout_of(arch_from_config({"model_type": "llama"}), "int8")
