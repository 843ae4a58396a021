from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hearth.core.errors import ModelError
from hearth.kernels.four_bits import FourBitWeight, dequantize_reference
from hearth.models.layout import layout_of
from hearth.models.pack import checkpoint_quant, iter_tensors
from hearth.store.format.hf import open_directory
from tests.models.quantized_files import Tensors, compressed_config
from tests.models.zoo import build, tiny

Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
O_PROJ = "model.layers.1.self_attn.o_proj"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BITSANDBYTES: Mapping[str, object] = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def fp4_config(name: str, strategy: str) -> Mapping[str, object]:
    weights = compressed_config(type="float", strategy=strategy)
    return {**weights, "format": f"{name}-pack-quantized"}


def json_bytes(state: Mapping[str, object]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def nf4(path: str, weight: torch.Tensor, *, nested_size: int = 0) -> tuple[Tensors, torch.Tensor]:
    """Return random codes as bitsandbytes writes them, and what they stand for.

    `nested_size`: how many scales share one; 0: scales have none.
    """
    outputs, inputs = weight.shape
    codes, values = torch.randint(16, weight.shape), torch.linspace(-1, 1, 16) ** 3
    num_scales = weight.numel() // 16
    state = {"quant_type": "nf4", "blocksize": 16, "dtype": "bfloat16", "shape": [outputs, inputs]}
    scale = torch.rand(num_scales)
    tensors = {path: (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8).view(-1, 1)}
    if nested_size:
        state |= {"nested_blocksize": nested_size, "nested_offset": 0.25}
        nested_size = min(nested_size, num_scales)
        index, steps = torch.randint(256, (num_scales,)), torch.linspace(-1, 1, 256)
        nested = torch.rand(-(-num_scales // nested_size))
        scale = steps[index] * nested.repeat_interleave(nested_size)[:num_scales] + 0.25
        tensors |= {f"{path}.absmax": index.to(torch.uint8), f"{path}.nested_quant_map": steps}
        tensors[f"{path}.nested_absmax"] = nested
    else:
        tensors[f"{path}.absmax"] = scale
    tensors |= {f"{path}.quant_map": values, f"{path}.quant_state.bitsandbytes__nf4": json_bytes(state)}
    return tensors, values[codes] * scale.view(outputs, -1).repeat_interleave(16, 1)


def int8(path: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values, scale = torch.randint(-127, 128, weight.shape).to(torch.int8), torch.rand(len(weight))
    prefix = path.removesuffix("weight")
    tensors = {
        path: values,
        f"{prefix}SCB": scale,
        f"{prefix}weight_format": torch.zeros((), dtype=torch.uint8),
    }
    return tensors, values.float() * (scale / 127)[:, None]


def fp4(path: str, weight: torch.Tensor, *, group: int) -> tuple[Tensors, torch.Tensor]:
    codes, shape = torch.randint(16, weight.shape), (len(weight), weight.shape[1] // group)
    tensors = {f"{path}_packed": (codes[:, 1::2] << 4 | codes[:, ::2]).to(torch.uint8)}
    if group == 32:
        exponents = torch.randint(100, 130, shape)
        tensors[f"{path}_scale"], scale = exponents.to(torch.uint8), torch.exp2(exponents.float() - 127)
    else:
        tensors[f"{path}_scale"] = torch.rand(shape).to(torch.float8_e4m3fn)
        tensors[f"{path}_global_scale"] = torch.tensor([3.7])
        tensors[path.replace("weight", "input_global_scale")] = torch.tensor([2.0])
        scale = tensors[f"{path}_scale"].float() / 3.7
    return tensors, E2M1[codes] * scale.repeat_interleave(group, 1)


FORMATS: Mapping[str, tuple[Mapping[str, object], Writer, str]] = {
    "nf4": (BITSANDBYTES, nf4, "int4-g16-float32-codebook"),
    "nf4-nested": (
        BITSANDBYTES,
        lambda path, weight: nf4(path, weight, nested_size=100),
        "int4-g16-float32-codebook",
    ),
    "nf4-nested-once": (
        BITSANDBYTES,
        lambda path, weight: nf4(path, weight, nested_size=1 << 60),
        "int4-g16-float32-codebook",
    ),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8, "int8"),
    "mxfp4": (
        fp4_config("mxfp4", "group"),
        lambda path, weight: fp4(path, weight, group=32),
        "int4-g32-bfloat16-codebook",
    ),
    "nvfp4": (
        fp4_config("nvfp4", "tensor_group"),
        lambda path, weight: fp4(path, weight, group=16),
        "int4-g16-float32-codebook",
    ),
}


def write(
    directory: Path, form: str, changed: Tensors | None = None, dropped: str = "", source: Path | None = None
) -> Tensors:
    """Write a model in this format and return its wide weights."""
    torch.manual_seed(7)
    config, writer, _ = FORMATS[form]
    source = source or build("llama-gqa").directory
    wide = load_file(source / "model.safetensors")
    tensors = dict(wide)
    # The others have inputs that groups of 32 do not divide.
    for path in [path for path in wide if re.search(r"(?<!down)(?<!\.c)_proj\.weight|c_fc\.weight", path)]:
        written, wide[path] = writer(path, tensors.pop(path))
        tensors |= written
    tensors |= changed or {}
    tensors.pop(dropped, None)
    save_file(tensors, directory / "model.safetensors")
    fields = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    return wide


def packed(directory: Path, quant: str | None = None) -> Tensors:
    with open_directory(directory) as source:
        quant = checkpoint_quant(source.checkpoint, source.arch) if quant is None else quant
        layout = layout_of(source.arch, "float32", quant)
        return {one.spec.name: one.tensor for one in iter_tensors(source.checkpoint, source.arch, layout)}


@pytest.mark.parametrize("form", FORMATS)
def test_looked_up_weights_keep_every_value(tmp_path: Path, form: str) -> None:
    wide = write(tmp_path, form)

    with open_directory(tmp_path) as source:
        quant = checkpoint_quant(source.checkpoint, source.arch)
        assert all(torch.equal(source.checkpoint[path].read(), wide[path]) for path in wide)
    kept, widened = packed(tmp_path), packed(tmp_path, "none")

    assert quant.split()[0] == FORMATS[form][2]
    for path, tensor in widened.items():
        scale = kept.get(path.replace("weight", "scale"))
        if scale is None:
            assert torch.equal(kept[path], tensor)
        elif form == "int8":
            assert torch.equal(kept[path].float() * scale[:, None], tensor)
        else:
            weight = FourBitWeight(kept[path], scale, None, kept[path.replace("weight", "codebook")])
            assert torch.equal(dequantize_reference(weight, tensor.shape[1]), tensor)


def test_codes_of_weights_that_are_transposed_get_eight_bits(tmp_path: Path) -> None:
    tiny("gpt2", n_embd=64, n_head=4).save_pretrained(tmp_path / "source")
    write(tmp_path, "nf4", source=tmp_path / "source")

    assert packed(tmp_path)["layers.0.up.weight"].dtype == torch.int8


STATE: Mapping[str, object] = {"blocksize": 16, "dtype": "bfloat16", "shape": [64, 64]}


def nf4_state(**changed: object) -> Tensors:
    return {f"{O_PROJ}.weight.quant_state.bitsandbytes__nf4": json_bytes({**STATE, **changed})}


@pytest.mark.parametrize(
    ("form", "changed", "message"),
    [
        ("nf4", nf4_state(blocksize=0), "groups must be 16, .* given: 0"),
        ("nf4", nf4_state(blocksize=1 << 40), "groups must be 16, .* given: 1099511627776"),
        ("nf4", nf4_state(blocksize="64"), "groups must be 16"),
        ("nf4", nf4_state(blocksize=128), "divide a row of 64"),
        ("nf4", nf4_state(shape=[-64, -64]), "must have a `shape` of a matrix"),
        ("nf4", nf4_state(shape=[1 << 30, 64]), r"weight` must be \[34359738368, 1\] of uint8"),
        ("nf4", nf4_state(shape=[10**4000, 10**4000]), "must have a `shape` of a matrix"),
        ("nf4", nf4_state(shape=[32, 128]), "has shape .*, config.json says"),
        ("nf4", nf4_state(nested_blocksize=0, nested_offset=0.0), "`nested_blocksize` must be an integer"),
        ("nf4", nf4_state(nested_offset="a"), "`nested_offset` must be a number"),
        ("nf4", nf4_state(nested_offset=10**400), "`nested_offset` must be a number"),
        ("nf4", nf4_state(nested_blocksize=64, nested_offset=0.0), "absmax` must be .* of uint8"),
        (
            "nf4",
            {f"{O_PROJ}.weight.quant_state.bitsandbytes__nf4": torch.full((9,), 91, dtype=torch.uint8)},
            "is no JSON",
        ),
        ("nf4", {f"{O_PROJ}.weight.absmax": torch.full((256,), torch.nan)}, "NaN or infinite"),
        ("nf4", {f"{O_PROJ}.weight.quant_map": torch.zeros(15)}, r"quant_map` must be \[16\]"),
        ("nf4", {f"{O_PROJ}.weight.quant_map": torch.full((16,), torch.inf)}, "codebook .* NaN or infin"),
        ("int8", {f"{O_PROJ}.SCB": torch.full((64,), torch.inf)}, "o_proj.weight` holds NaN or infinity"),
        ("int8", {f"{O_PROJ}.SCB": torch.zeros(63)}, r"SCB` must be \[64\]"),
        ("mxfp4", {f"{O_PROJ}.weight_scale": torch.full((64, 2), 255, dtype=torch.uint8)}, "holds NaN"),
        ("mxfp4", {f"{O_PROJ}.weight_scale": torch.zeros(64, 4, dtype=torch.uint8)}, r"must be \[64, 2\]"),
        ("mxfp4", {f"{O_PROJ}.weight_packed": torch.zeros(64, 3, dtype=torch.uint8)}, "has 6 inputs"),
        ("nvfp4", {f"{O_PROJ}.weight_global_scale": torch.zeros(1)}, "holds NaN or infinity"),
        ("nvfp4", {f"{O_PROJ}.weight_global_scale": torch.zeros(2)}, r"global_scale` must be \[1\]"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, form: str, changed: Tensors, message: str) -> None:
    write(tmp_path, form, changed)

    with pytest.raises(ModelError, match=message):
        packed(tmp_path)


@pytest.mark.parametrize(
    ("form", "dropped"),
    [("nf4", "weight.absmax"), ("int8", "SCB"), ("mxfp4", "weight_scale"), ("nvfp4", "weight_global_scale")],
)
def test_a_missing_tensor_is_named(tmp_path: Path, form: str, dropped: str) -> None:
    write(tmp_path, form, dropped=f"{O_PROJ}.{dropped}")

    with pytest.raises(ModelError, match=f"the checkpoint has no `{O_PROJ}.{dropped}`"):
        packed(tmp_path, "none")
