from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.errors import BadCheckpoint
from hearth.core.sizes import StepLimits, StepSize
from hearth.kernels.four_bits import FourBitWeight, dequantize_reference
from hearth.kernels.quantized import ProductScratch, quantized_linear_reference
from hearth.models import decoder
from hearth.models.decoder import Decoder
from hearth.models.formats import FourBits
from hearth.models.layout import layout_of
from hearth.models.quantize import Quantized, quantize, quantize_to_four_bits
from hearth.models.weights import Linear, Weights, bind, contiguous_places
from hearth.models.workspace import Workspace
from tests.models.test_decoder import Stage, prefill, stage
from tests.models.zoo import build, pack_directory

QUANTS = ["int8", "fp8"]

#: Linears outside of the layers.
OUTER = ("embed_in", "embed_out", "head")

#: From subnormal numbers to far beyond any weight.
NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32)
WEIGHTS = st.integers(1, 6).flatmap(
    lambda k: st.lists(st.lists(NUMBERS, min_size=k, max_size=k), min_size=1, max_size=4).map(torch.tensor)
)


def dequantize(quantized: Quantized) -> torch.Tensor:
    return quantized.values.float() * quantized.scale[:, None]


@given(WEIGHTS)
def test_int8_is_wrong_by_half_a_step_at_most(weight: torch.Tensor) -> None:
    quantized = quantize(weight, "int8")

    error = (dequantize(quantized).double() - weight.double()).abs()
    assert quantized.values.dtype == torch.int8
    assert (error <= 0.50001 * quantized.scale.double()[:, None]).all()


@given(WEIGHTS)
def test_fp8_is_wrong_by_half_a_unit_in_its_last_place_at_most(weight: torch.Tensor) -> None:
    quantized = quantize(weight, "fp8")

    error = (dequantize(quantized).double() - weight.double()).abs()
    half_subnormal = quantized.scale.double()[:, None] * 2.0**-10
    assert quantized.values.dtype == torch.float8_e4m3fn
    assert (error <= 1.00001 * torch.maximum(weight.double().abs() * 2.0**-4, half_subnormal)).all()


@pytest.mark.parametrize("quant", QUANTS)
@given(weight=WEIGHTS)
def test_quantising_what_was_quantised_changes_nothing(quant: str, weight: torch.Tensor) -> None:
    once = quantize(weight, quant)

    twice = quantize(dequantize(once), quant)

    assert torch.equal(twice.values.float(), once.values.float())
    torch.testing.assert_close(twice.scale, once.scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("quant", "largest"), [("int8", 127), ("fp8", 448)])
def test_each_row_uses_the_whole_range(quant: str, largest: int, dtype: torch.dtype) -> None:
    weight = torch.tensor([[0.5, -2.0, 1.0], [-0.25, 0.125, 0.0]], dtype=dtype)

    quantized = quantize(weight, quant)

    assert quantized.values.float().abs().amax(dim=1).tolist() == [largest, largest]
    assert quantized.scale.tolist() == pytest.approx([2.0 / largest, 0.25 / largest])


def test_int8_rounds_halves_to_even_numbers() -> None:
    quantized = quantize(torch.tensor([[127.0, 0.5, 1.5, 2.5, -2.5]]), "int8")

    assert quantized.values.tolist() == [[127, 0, 2, 2, -2]]


@pytest.mark.parametrize("quant", QUANTS)
def test_a_row_of_zeros_stays_zero(quant: str) -> None:
    quantized = quantize(torch.tensor([[0.0, -0.0], [1.0, 2.0]]), quant)

    assert quantized.scale.isfinite().all()
    assert dequantize(quantized)[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_refused(quant: str, bad: float) -> None:
    weight = torch.ones(3, 4)
    weight[1, 2] = bad

    with pytest.raises(BadCheckpoint, match=rf"\[3, 4\] holds NaN or infinity in row 1.*{quant}"):
        quantize(weight, quant)


def test_four_bits_are_off_by_half_a_step_at_most() -> None:
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(3))
    form = FourBits(32, "float32", "float32")

    rows = quantize_to_four_bits(weight, form)

    groups = weight.view(5, 3, 32)
    step = (groups.amax(2) - groups.amin(2)) / 15
    error = (rows.wide() - weight).view(5, 3, 32).square().mean(2).sqrt()
    plain = (groups - groups.amin(2, keepdim=True)) / step.unsqueeze(2)
    plain_error = ((plain.round() - plain) * step.unsqueeze(2)).square().mean(2).sqrt()
    assert (error <= plain_error + 1e-6).all(), "cutting off is tried beside the whole range"
    assert (error < plain_error - 1e-6).any()


def test_weights_that_four_bits_hold_are_kept_exactly() -> None:
    codes = torch.arange(64).view(1, 64) % 16
    weight = codes * 0.25 - 1.5

    rows = quantize_to_four_bits(weight, FourBits(32, "bfloat16", "bfloat16"))

    assert torch.equal(rows.wide(), weight)
    assert torch.equal(rows.codes, codes.to(torch.uint8))


def test_packed_rows_are_read_back_as_they_were() -> None:
    weight = torch.randn(7, 160, generator=torch.Generator().manual_seed(3))
    form = FourBits(32, "bfloat16", "float32")
    rows = quantize_to_four_bits(weight, form)

    tensors = rows.stored(form)

    packed = FourBitWeight(tensors["weight"], tensors["scale"], tensors["min"], None)
    assert torch.equal(dequantize_reference(packed, 160), rows.wide())


@pytest.mark.parametrize("quant", [*QUANTS, "int4", "int4-g16-float32-float32 int8:o,down.1-2,embed"])
@pytest.mark.parametrize("name", ["llama-gqa", "smollm2", "opt-350m", "falcon-rw-like"])
def test_decoder_gives_the_logits_of_the_dequantised_weights(name: str, quant: str) -> None:
    plain, quantised, step = stage(name), _quantised(name, quant), prefill(name)
    plain.decoder.rebind(_dequantised(quantised.decoder.weights))
    expected = plain.logits(plain.decoder.embed(step), step)

    logits = quantised.logits(quantised.decoder.embed(step), step)

    assert quantised.decoder.weights.layers[0].qkv.scale is not None
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", ["llama-gqa", "opt-350m", "falcon-7b", "neox-parallel"])
def test_products_may_leave_parts_of_sums_where_nobody_needs_what_is_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, step = _quantised(name, "int8"), prefill(name)
    expected = it.logits(it.decoder.embed(step), step).clone()
    seen = []

    def spoiling(*operands: torch.Tensor, out: torch.Tensor, scratch: ProductScratch) -> None:
        scratch.partial.fill_(math.nan)
        quantized_linear_reference(*operands, out=out)
        scratch.partial.fill_(math.nan)
        seen.append(scratch)

    monkeypatch.setattr(decoder, "quantized_linear", spoiling)

    logits = it.logits(it.decoder.embed(step), step)

    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert len(seen) >= 4 * it.decoder.arch.num_layers


@pytest.mark.parametrize(
    ("max_tokens", "quant", "is_told"), [(64, "int8", True), (8192, "int8", False), (64, "none", False)]
)
def test_a_decoder_tells_where_products_of_eight_bits_have_too_little_scratch(
    max_tokens: int, quant: str, is_told: bool
) -> None:
    arch = stage("llama-gqa").decoder.arch
    size = StepSize.of(StepLimits(max_tokens, 256, 16), "cuda", 4)

    def meta(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    layout = layout_of(arch, "bfloat16", quant)
    counters = torch.empty(256 * arch.num_kv_heads, dtype=torch.int32, device="meta")
    base = meta(Workspace.num_bytes(arch, torch.bfloat16, size))
    workspace = Workspace.bind(arch, torch.bfloat16, size, base, counters)
    weights = bind(arch, layout, contiguous_places(layout, meta(layout.num_bytes)))

    obstacle = Decoder(arch, weights, workspace, None).sharing_obstacle()

    assert (obstacle is not None) is is_told, obstacle


def _quantised(name: str, quant: str) -> Stage:
    """The stage of all layers, with weights of eight bits."""
    quantised = stage(name)
    arch = quantised.decoder.arch
    layout = layout_of(arch, "float32", quant)
    base = torch.empty(layout.num_bytes, dtype=torch.uint8)
    pack_directory(build(name).directory, arch, layout, base)
    quantised.decoder.rebind(bind(arch, layout, contiguous_places(layout, base)))
    return quantised


def _dequantised(weights: Weights) -> Weights:
    layers = tuple(
        replace(layer, qkv=_plain(layer.qkv), o=_plain(layer.o), up=_plain(layer.up), down=_plain(layer.down))
        for layer in weights.layers
    )
    outer = {name: _plain(linear) for name in OUTER if (linear := getattr(weights, name)) is not None}
    if weights.embed_scale is not None:
        embed = dequantize(Quantized(weights.embed, weights.embed_scale))
        outer |= {"embed": embed, "embed_scale": None}
    return replace(weights, layers=layers, **outer)


def _plain(linear: Linear) -> Linear:
    if linear.scale is None:
        return linear
    if (packed := linear.four_bits) is not None:
        num_inputs = packed.scale.shape[0] * (32 if packed.scale.dtype == torch.bfloat16 else 16)
        return Linear(dequantize_reference(packed, num_inputs), None, linear.bias)
    return Linear(dequantize(Quantized(linear.weight, linear.scale)), None, linear.bias)
