from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hearth.core.errors import ModelError
from hearth.kernels.four_bits import FourBitWeight, dequantize_reference
from hearth.models.formats import FourBits, QuantPlan
from hearth.models.layout import layout_of
from hearth.models.pack import checkpoint_quant, iter_tensors
from hearth.store.format.convert import convert
from hearth.store.format.hf import open_directory
from tests.models.quantized_files import Codes, Tensors, awq, compressed, compressed_config, gptq
from tests.models.zoo import build

Writer = Callable[[str, Codes], Tensors]

GPTQ: Mapping[str, object] = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}
AWQ: Mapping[str, object] = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}

#: Each way to write a model: its config, its tensors, and the plan that keeps them.
FORMATS: Mapping[str, tuple[Mapping[str, object], Writer, str]] = {
    "gptq": (GPTQ, gptq, "int4-g16-float16-float32"),
    "gptq-v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        lambda module, one: gptq(module, one, is_v2=True),
        "int4-g16-float16-float32",
    ),
    "gptq-groups-of-a-row": ({**GPTQ, "sym": True, "group_size": 64}, gptq, "int4-g64-float16"),
    "gptq-symmetric-rows": ({**GPTQ, "sym": True, "group_size": -1}, gptq, "int4-row-float16"),
    "awq": (AWQ, awq, "int4-g16-float16-float32"),
    "compressed": (
        compressed_config(),
        lambda module, one: compressed(module, one, is_symmetric=True),
        "int4-g16-bfloat16",
    ),
    "compressed-asymmetric-rows": (
        compressed_config(strategy="channel", group_size=None, symmetric=False),
        lambda module, one: compressed(module, one, is_symmetric=False),
        "int4-row-bfloat16-float32",
    ),
}


def _write(directory: Path, name: str, config: Mapping[str, object], write: Writer, plan: str) -> Path:
    """Write a model of random codes to `directory`, and the same with wide weights beside it."""
    torch.manual_seed(7)
    source = build(name).directory
    wide = load_file(source / "model.safetensors")
    tensors = dict(wide)
    dtype = torch.float16 if "float16" in plan.split("-")[2] and "bfloat16" not in plan else torch.bfloat16
    form = QuantPlan.parse(plan).default
    assert isinstance(form, FourBits)
    for path in [path for path in wide if path.endswith("_proj.weight")]:
        outputs, inputs = wide[path].shape
        if (groups := form.groups(inputs)) is None:
            continue
        del tensors[path]
        is_symmetric = "float32" not in plan
        one = Codes.random(outputs, inputs, groups, dtype, is_symmetric=is_symmetric)
        wide[path] = one.weight()
        tensors |= write(path.removesuffix(".weight"), one)
    fields = json.loads((source / "config.json").read_text())
    for place, written in ((directory, tensors), (directory / "wide", wide)):
        place.mkdir(parents=True, exist_ok=True)
        save_file(written, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(fields))
    (directory / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    return directory


def _packed(directory: Path, quant: str) -> Tensors:
    with open_directory(directory) as source:
        layout = layout_of(source.arch, "float32", quant)
        return {one.spec.name: one.tensor for one in iter_tensors(source.checkpoint, source.arch, layout)}


def _widened(tensors: Tensors, wide: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in wide.items():
        prefix = name.removesuffix("weight")
        if f"{prefix}scale" in tensors:
            minimum = tensors.get(f"{prefix}min")
            packed = FourBitWeight(tensors[name], tensors[f"{prefix}scale"], minimum, None)
            yield name, dequantize_reference(packed, tensor.shape[1])
        else:
            yield name, tensors[name]


@pytest.mark.parametrize(
    ("name", "form"),
    [*(("llama-gqa", form) for form in FORMATS), ("cohere", "gptq"), ("llama-odd-head", "compressed")],
)
def test_weights_of_four_bits_keep_every_value(tmp_path: Path, name: str, form: str) -> None:
    directory = _write(tmp_path, name, *FORMATS[form])
    expected = _packed(directory / "wide", "none")

    with open_directory(directory) as source:
        quant = checkpoint_quant(source.checkpoint, source.arch)
    kept, widened = _packed(directory, quant), _packed(directory, "none")

    assert quant.split()[0] == FORMATS[form][2]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in _widened(kept, expected))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in widened.items())


def test_converted_checkpoint_keeps_its_four_bits_by_default(tmp_path: Path) -> None:
    directory = _write(tmp_path / "source", "llama-gqa", *FORMATS["awq"])

    assert convert(directory, tmp_path / "m").quant == f"{FORMATS['awq'][2]} none:head"
    assert convert(directory, tmp_path / "wide", quant="none").quant == "none"


def test_biases_of_zeros_that_gptq_adds_are_dropped(tmp_path: Path) -> None:
    def with_bias(module: str, one: Codes) -> Tensors:
        return gptq(module, one) | {f"{module}.bias": torch.zeros(len(one.codes))}

    directory = _write(tmp_path, "llama-gqa", GPTQ, with_bias, FORMATS["gptq"][2])

    assert "layers.0.o.bias" not in _packed(directory, "none")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, "`quant_method` is 'hqq': supported: gptq, awq, comp"),
        ({**GPTQ, "bits": 3}, "`bits` is 3: supported: 4"),
        ({**GPTQ, "group_size": 24}, "`group_size` is 24: supported: -1, 16"),
        ({**GPTQ, "group_size": 1280000}, "`group_size` is 1280000"),
        ({**GPTQ, "desc_act": True}, "`desc_act` is True: .*supported: false"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "`dynamic` is .*same format"),
        (
            {**GPTQ, "checkpoint_format": "marlin"},
            "`checkpoint_format` is 'marlin': supported: gptq, gptq_v2",
        ),
        ({**AWQ, "version": "gemv"}, "`version` is 'gemv': supported: gemm"),
        (
            {**compressed_config(), "format": "marlin-24"},
            "`format` is 'marlin-24': supported: pack-quantized",
        ),
        ({**compressed_config(), "format": ["pack-quantized"]}, "`format` must be a string"),
        ({**compressed_config(), "transform_config": {"config_groups": {}}}, "`transform_config` is"),
        ({**compressed_config(), "sparsity_config": {"format": "sparse-24"}}, "`sparsity_config` is"),
        ({**compressed_config(), "config_groups": {}}, "`config_groups` is {}"),
        (compressed_config(type="float"), "`type` is 'float': supported: int"),
        (compressed_config(strategy="block"), "`strategy` is 'block': supported: group, channel"),
        (compressed_config(actorder="group"), "`actorder` is 'group'"),
        (compressed_config(num_bits=8), "`num_bits` is 8: supported: 4"),
    ],
)
def test_configs_that_say_something_else_are_refused_by_field(
    tmp_path: Path, config: Mapping[str, object], message: str
) -> None:
    _write(tmp_path, "llama-gqa", config, gptq, FORMATS["gptq"][2])

    with pytest.raises(ModelError, match=message), open_directory(tmp_path):
        pass


@pytest.mark.parametrize(
    ("kind", "tensor", "message"),
    [
        ("qweight", torch.zeros(8, dtype=torch.int32), r"qweight` must be a matrix, given: \[8\]"),
        ("qweight", torch.zeros(0, 64, dtype=torch.int32), "has 0 inputs"),
        ("qweight", torch.zeros(7, 64, dtype=torch.int32), "has 56 inputs, which groups of 16 do not divide"),
        ("qweight", torch.zeros(8, 64), r"must be \[8, 64\] of int32, given: \[8, 64\] of float32"),
        ("qweight", torch.zeros(10, 64, dtype=torch.int32), r"scales` must be \[5, 64\]"),
        ("scales", torch.ones(3, 64), r"scales` must be \[4, 64\]"),
        ("scales", torch.ones(4, 64, dtype=torch.int32), "scales` must be .* of float32 or float16"),
        ("scales", torch.full((4, 64), torch.inf, dtype=torch.float16), "NaN or infinite; fetch"),
        ("scales", None, r"has no `.*o_proj.scales`; fetch"),
        ("qzeros", None, r"has no `.*o_proj.qzeros`; fetch"),
        ("qzeros", torch.zeros(4, 64, dtype=torch.int32), r"qzeros` must be \[4, 8\]"),
        ("g_idx", torch.arange(64).flip(0).int(), "g_idx` reorders its inputs"),
        ("g_idx", torch.zeros(63, dtype=torch.int32), r"g_idx` must be \[64\]"),
        ("weight", torch.zeros(64, 64), "o_proj.weight` twice, quantised and not"),
        ("bias", torch.ones(64).to(torch.float8_e4m3fn), "o_proj.bias` is stored as float8_e4m3fn"),
        ("bias", torch.ones(64), "1 tensors that do not fit its config.json: .*o_proj.bias"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, kind: str, tensor: torch.Tensor | None, message: str
) -> None:
    def spoiled(module: str, one: Codes) -> Tensors:
        tensors = gptq(module, one)
        if module.endswith("1.self_attn.o_proj"):
            tensors.pop(f"{module}.{kind}", None)
            tensors |= {} if tensor is None else {f"{module}.{kind}": tensor}
        return tensors

    directory = _write(tmp_path, "llama-gqa", GPTQ, spoiled, FORMATS["gptq"][2])

    with pytest.raises(ModelError, match=message):
        _packed(directory, "int4-g16-float16-float32 none:head")


def test_rows_without_inputs_are_refused(tmp_path: Path) -> None:
    def spoiled(module: str, one: Codes) -> Tensors:
        return gptq(module, one) | {f"{module}.qweight": torch.zeros(0, 64, dtype=torch.int32)}

    config, _, plan = FORMATS["gptq-symmetric-rows"]
    _write(tmp_path, "llama-gqa", config, spoiled, plan)

    with pytest.raises(ModelError, match="has 0 inputs"), open_directory(tmp_path):
        pass


def test_zeros_that_contradict_a_symmetric_config_are_refused(tmp_path: Path) -> None:
    directory = _write(tmp_path, "llama-gqa", {**GPTQ, "sym": True}, gptq, FORMATS["gptq"][2])

    with pytest.raises(ModelError, match=r"q_proj.qzeros` differ, but config.json says that it is symmetric"):
        _packed(directory, "none")
