from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hearth.core.errors import ModelError
from hearth.models.layout import layout_of
from hearth.models.pack import checkpoint_quant, iter_tensors
from hearth.store.format.hf import open_directory
from tests.models.quantized_files import Tensors, compressed_config
from tests.models.zoo import build

FP8: Mapping[str, object] = {"quant_method": "fp8", "activation_scheme": "static"}
COMPRESSED = {**compressed_config(strategy="channel", type="float", num_bits=8), "format": "float-quantized"}


def _write(directory: Path, name: str, config: Mapping[str, object], scale: Tensors | None = None) -> Tensors:
    """Write a model in e4m3 and return its wide weights. `scale`: that of one module instead."""
    torch.manual_seed(7)
    source = build(name).directory
    wide = load_file(source / "model.safetensors")
    tensors = dict(wide)
    for path in [path for path in wide if path.endswith("_proj.weight")]:
        rows = len(wide[path])
        scales = torch.rand(()) if config is FP8 else torch.rand(rows, 1)
        tensors[path] = (wide[path] * 100).to(torch.float8_e4m3fn)
        tensors[f"{path}_scale"] = scales
        tensors[path.replace("weight", "input_scale")] = torch.rand(1)
        wide[path] = tensors[path].float() * scales
    save_file(tensors | (scale or {}), directory / "model.safetensors")
    fields = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    return wide


def _packed(directory: Path, quant: str) -> Tensors:
    with open_directory(directory) as source:
        layout = layout_of(source.arch, "float32", quant)
        return {one.spec.name: one.tensor for one in iter_tensors(source.checkpoint, source.arch, layout)}


@pytest.mark.parametrize("config", [FP8, COMPRESSED], ids=["by-tensor", "by-output"])
@pytest.mark.parametrize("name", ["llama-gqa", "cohere"])
def test_eight_bit_floats_are_kept(tmp_path: Path, name: str, config: Mapping[str, object]) -> None:
    wide = _write(tmp_path, name, config)

    with open_directory(tmp_path) as source:
        quant = checkpoint_quant(source.checkpoint, source.arch)
        assert all(torch.equal(source.checkpoint[path].read(), wide[path]) for path in wide)
    kept, widened = _packed(tmp_path, quant), _packed(tmp_path, "none")

    assert quant.removesuffix(" none:head") == "fp8"
    assert kept["layers.0.qkv.weight"].dtype == torch.float8_e4m3fn
    for path, tensor in widened.items():
        scale = kept.get(path.replace("weight", "scale"))
        assert torch.equal(kept[path] if scale is None else kept[path].float() * scale[:, None], tensor)


BLOCKS = {**FP8, "weight_block_size": [48, 40]}
ROW_BLOCKS = {**FP8, "weight_block_size": [48, 2**31 - 1]}
COMPRESSED_BLOCKS = {
    **compressed_config(strategy="block", type="float", num_bits=8, block_structure=[48, 40]),
    "format": "float-quantized",
}


def _write_blocks(directory: Path, config: Mapping[str, object], scale: Tensors | None = None) -> Tensors:
    """Write a model with a scale for each 48 outputs and 40 inputs or all, and return its wide weights."""
    kind = "weight_scale" if config is COMPRESSED_BLOCKS else "weight_scale_inv"
    torch.manual_seed(7)
    source = build("llama-gqa").directory
    wide = load_file(source / "model.safetensors")
    tensors = dict(wide)
    for path in [path for path in wide if path.endswith("_proj.weight")]:
        outputs, inputs = wide[path].shape
        width = inputs if config is ROW_BLOCKS else 40
        scales = torch.rand(-(-outputs // 48), -(-inputs // width))
        tensors[path] = (wide[path] * 100).to(torch.float8_e4m3fn)
        tensors[path.replace("weight", kind)] = scales
        whole = torch.kron(scales, torch.ones(48, width))[:outputs, :inputs]
        wide[path] = tensors[path].float() * whole
    save_file(tensors | (scale or {}), directory / "model.safetensors")
    fields = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    return wide


@pytest.mark.parametrize("config", [BLOCKS, ROW_BLOCKS, COMPRESSED_BLOCKS], ids=["fp8", "rows", "compressed"])
def test_blocks_with_scales_become_eight_bits_by_output(tmp_path: Path, config: Mapping[str, object]) -> None:
    wide = _write_blocks(tmp_path, config)

    with open_directory(tmp_path) as source:
        quant = checkpoint_quant(source.checkpoint, source.arch)
        assert all(torch.equal(source.checkpoint[path].read(), wide[path]) for path in wide)
    kept, widened = _packed(tmp_path, quant), _packed(tmp_path, "none")

    assert quant == "int8 none:head"
    found = kept["layers.0.qkv.weight"].float() * kept["layers.0.qkv.scale"][:, None]
    assert (found - widened["layers.0.qkv.weight"]).norm() < 0.01 * widened["layers.0.qkv.weight"].norm()


@pytest.mark.parametrize(
    ("size", "message"),
    [([0, 128], "blocks must have outputs"), ([128], "must be a list of 2"), ("128", "must be a list of 2")],
)
def test_sizes_of_blocks_that_are_none_are_refused(tmp_path: Path, size: object, message: str) -> None:
    _write(tmp_path, "llama-gqa", {**FP8, "weight_block_size": size})

    with pytest.raises(ModelError, match=message), open_directory(tmp_path):
        pass


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(2, 3), r"weight_scale_inv` must be \[2, 2\], given: \[2, 3\]"),
        (torch.full((2, 2), torch.nan), "holds NaN or infinity"),
    ],
)
def test_scales_of_blocks_that_do_not_fit_are_refused(
    tmp_path: Path, scale: torch.Tensor, message: str
) -> None:
    _write_blocks(tmp_path, BLOCKS, {"model.layers.1.self_attn.o_proj.weight_scale_inv": scale})

    with pytest.raises(ModelError, match=message):
        _packed(tmp_path, "int8 none:head")


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(3), r"o_proj.weight_scale` must be a number or one for each of 64 outputs, given: \[3\]"),
        (torch.ones(64, dtype=torch.int32), "of int32"),
        (torch.tensor(torch.nan), "holds NaN or infinity"),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, scale: torch.Tensor, message: str
) -> None:
    _write(tmp_path, "llama-gqa", FP8, {"model.layers.1.self_attn.o_proj.weight_scale": scale})

    with pytest.raises(ModelError, match=message):
        _packed(tmp_path, "fp8")
