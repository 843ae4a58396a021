from __future__ import annotations

import pytest
import torch

from hearth.models.arch import Arch
from hearth.models.families import read_arch
from hearth.models.layout import Layout, layout_of
from hearth.models.weights import TensorPlace, bind, contiguous_places
from tests.models.zoo import VARIANTS, build, pack_directory


def _packed(name: str, dtype: str = "float32", quant: str = "none") -> tuple[Arch, Layout, torch.Tensor]:
    directory = build(name).directory
    arch = read_arch(directory)
    layout = layout_of(arch, dtype, quant)
    base = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    pack_directory(directory, arch, layout, base)
    return arch, layout, base


@pytest.mark.parametrize("name", VARIANTS)
def test_binds_every_family_without_copying(name: str) -> None:
    model, _ = build(name)
    arch, layout, base = _packed(name)

    weights = bind(arch, layout, contiguous_places(layout, base))

    start, end = base.data_ptr(), base.data_ptr() + len(base)
    assert torch.equal(weights.embed, model.get_input_embeddings().weight)
    assert torch.equal(weights.head.weight, model.get_output_embeddings().weight)
    assert len(weights.layers) == 3
    assert all(start <= layer.down.weight.data_ptr() < end for layer in weights.layers)


def test_absent_tensors_are_none() -> None:
    arch, layout, base = _packed("falcon-7b")

    weights = bind(arch, layout, contiguous_places(layout, base))

    layer = weights.layers[0]
    assert (weights.positions, weights.embed_in, weights.embed_out) == (None,) * 3
    assert (layer.mlp_norm, layer.q_norm, layer.k_norm, layer.qkv.bias, layer.up.bias) == (None,) * 5


def test_norms_without_parameters_bind_as_empty_ones() -> None:
    arch, layout, base = _packed("opt-no-affine")

    weights = bind(arch, layout, contiguous_places(layout, base))

    assert weights.final_norm is not None
    assert (weights.final_norm.weight, weights.layers[0].attn_norm.weight) == (None, None)


def test_post_norm_model_has_projections_but_no_final_norm() -> None:
    arch, layout, base = _packed("opt-350m")

    weights = bind(arch, layout, contiguous_places(layout, base))

    assert weights.final_norm is None
    assert weights.embed_in is not None
    assert weights.embed_in.weight.shape == (64, 48)
    assert weights.embed_out is not None
    assert weights.embed_out.weight.shape == (48, 64)


def test_tied_head_is_the_embedding_itself() -> None:
    arch, layout, base = _packed("smollm2")

    weights = bind(arch, layout, contiguous_places(layout, base))

    assert weights.head.weight.data_ptr() == weights.embed.data_ptr()


@pytest.mark.parametrize(("quant", "dtype"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_quantised_linears_have_a_scale_for_each_row(quant: str, dtype: torch.dtype) -> None:
    arch, layout, base = _packed("opt-350m", "bfloat16", quant)

    weights = bind(arch, layout, contiguous_places(layout, base))

    layer = weights.layers[1]
    for linear in (weights.embed_in, layer.qkv, layer.o, layer.up, layer.down, weights.embed_out):
        assert linear.weight.dtype == dtype
        assert linear.scale.dtype == torch.float32
        assert linear.scale.shape == linear.weight.shape[:1]
    assert layer.qkv.bias.dtype == torch.bfloat16


def test_a_quantised_model_keeps_its_tied_head_as_it_is() -> None:
    arch, layout, base = _packed("smollm2", "float32", "int8")

    weights = bind(arch, layout, contiguous_places(layout, base))

    assert weights.head.scale is None
    assert weights.head.weight.data_ptr() == weights.embed.data_ptr()


def test_linears_that_are_not_quantised_have_no_scale() -> None:
    arch, layout, base = _packed("llama-gqa")

    weights = bind(arch, layout, contiguous_places(layout, base))

    assert (weights.layers[0].qkv.scale, weights.head.scale) == (None, None)


def test_bytes_written_later_show_through_the_views() -> None:
    arch, layout, base = _packed("llama-gqa")
    weights = bind(arch, layout, contiguous_places(layout, base))

    base.zero_()

    assert not weights.layers[1].qkv.weight.any()


def test_each_tensor_may_lie_in_a_base_of_its_own() -> None:
    arch, layout, base = _packed("qwen3", "bfloat16")
    scattered = {}
    for spec in layout.tensors:
        own = torch.zeros(64 + spec.nbytes, dtype=torch.uint8)
        own[64:] = base[spec.offset : spec.offset + spec.nbytes]
        scattered[spec.name] = TensorPlace(own, 64)

    weights = bind(arch, layout, scattered)

    together = bind(arch, layout, contiguous_places(layout, base))
    assert weights.embed.dtype == torch.bfloat16
    assert torch.equal(weights.layers[2].qkv.weight, together.layers[2].qkv.weight)
    assert weights.layers[2].qkv.weight.data_ptr() != together.layers[2].qkv.weight.data_ptr()


def test_layer_range_needs_no_places_of_other_layers() -> None:
    arch, layout, base = _packed("llama-gqa")
    places = {
        name: place for name, place in contiguous_places(layout, base).items() if "layers.0." not in name
    }

    weights = bind(arch, layout, places, layers=range(1, 3))

    whole = bind(arch, layout, contiguous_places(layout, base))
    assert [layer.o.weight.data_ptr() for layer in weights.layers] == [
        layer.o.weight.data_ptr() for layer in whole.layers[1:]
    ]


@pytest.mark.parametrize("name", ["llama-gqa", "smollm2", "opt-350m"])
def test_a_stage_in_the_middle_needs_its_own_layers_only(name: str) -> None:
    arch, layout, base = _packed(name)
    places = {name: place for name, place in contiguous_places(layout, base).items() if "layers.1." in name}

    weights = bind(arch, layout, places, layers=range(1, 2))

    assert len(weights.layers) == 1
    outside = (
        weights.embed,
        weights.positions,
        weights.embed_in,
        weights.final_norm,
        weights.embed_out,
        weights.head,
    )
    assert outside == (None,) * 6


@pytest.mark.parametrize(
    ("offset", "num_bytes", "message"),
    [
        (0, 160 * 64 * 4 - 1, "embed.weight: bytes 0:40960 of a base of 40959"),
        (-16, 160 * 64 * 4, "embed.weight: bytes -16:40944"),
        (4, 160 * 64 * 4 + 4, "embed.weight: address=.* is not a multiple of 16"),
    ],
)
def test_place_out_of_bounds_or_alignment_is_our_bug(offset: int, num_bytes: int, message: str) -> None:
    arch, layout, base = _packed("llama-gqa")
    places = contiguous_places(layout, base)
    places["embed.weight"] = TensorPlace(torch.zeros(num_bytes, dtype=torch.uint8), offset)

    with pytest.raises(AssertionError, match=message):
        bind(arch, layout, places)


def test_base_must_be_bytes() -> None:
    arch, layout, base = _packed("llama-gqa")

    with pytest.raises(AssertionError, match=r"embed\.weight: base\.dtype=torch\.float32"):
        bind(arch, layout, contiguous_places(layout, base.view(torch.float32)))
