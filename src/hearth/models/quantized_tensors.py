"""Weights that a Hugging Face directory holds in four bits, by GPTQ, AWQ or compressed-tensors.

Eight codes share a word of 32 bits; a group of inputs has a scale and a zero point for each output:

    weight = (code - zero) * scale = code * scale + minimum

If all zeros are 8 there are no minimums. Others are stored in float32, which holds them exactly if the scales
have 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hearth.core.errors import BadCheckpoint
from hearth.kernels.four_bits import ZERO_CODE
from hearth.models.arch import Arch
from hearth.models.codebook_tensors import FP4_FORMATS, with_bitsandbytes, with_fp4
from hearth.models.config_fields import Fields
from hearth.models.dtypes import DTYPES
from hearth.models.formats import FourBits, is_group
from hearth.models.fp8_tensors import with_fp8
from hearth.models.layout import canonical_shapes
from hearth.models.pack import Checkpoint, StoredTensor, find_matrix, find_tensor, read_tensor
from hearth.models.quantize import FourBitRows, QuantizedTensor
from hearth.models.tensor_names import NAMES

_WORD_CODES = 8  #: of int32
_CONFIG = "quantization_config"
_METHODS = ("gptq", "awq", "compressed-tensors", "bitsandbytes", "fp8")


@dataclass(frozen=True, slots=True)
class _Packing:
    """How a module's codes, scales and zeros are stored. Scales and zeros lie as the codes do."""

    group: int | None  #: as in FourBits
    has_zeros: bool  #: other than 8
    codes: str = "qweight"
    scale: str = "scales"
    zeros: str = "qzeros"
    others: tuple[str, ...] = ()
    is_transposed: bool = True  #: [inputs, outputs]
    codes_axis: int = 1  #: along which words hold eight
    zeros_axis: int = 1
    order: Sequence[int] = range(_WORD_CODES)  #: which code of a word is in its bits 0 to 3, 4 to 7, ...
    zero_shift: int = 0  #: what is added to a stored zero


def with_quantized(checkpoint: Checkpoint, config: Fields, arch: Arch) -> Checkpoint:
    """Return the checkpoint with one weight in place of the tensors of each quantised module."""
    method = config.section(_CONFIG)
    if not method.values:
        method = config.section("text_config").section(_CONFIG)
    if not method.values:
        return checkpoint
    match method.text("quant_method"):
        case "gptq":
            packing = _gptq(method)
        case "awq":
            packing = _awq(method)
        case "compressed-tensors" if method.text("format") == "float-quantized":
            found = _compressed_weights(method, "float", ("tensor", "channel", "block"))
            is_block = found.text("strategy") == "block"
            return with_fp8(checkpoint, _block(found, "block_structure") if is_block else None)
        case "compressed-tensors" if method.text("format") in FP4_FORMATS:
            _compressed_weights(method, "float", ("group", "tensor_group"))
            return with_fp4(checkpoint)
        case "compressed-tensors":
            packing = _compressed(method)
        case "bitsandbytes":
            return with_bitsandbytes(checkpoint)
        case "fp8":
            size = "weight_block_size"
            return with_fp8(checkpoint, _block(method, size) if method.has(size) else None)
        case _:
            raise method.unsupported("quant_method", f"supported: {', '.join(_METHODS)}")
    suffix = f".{packing.codes}"
    modules = [name.removesuffix(suffix) for name in checkpoint if name.endswith(suffix)]
    kinds = (packing.codes, packing.scale, packing.zeros, *packing.others)
    weights: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for module in modules:
        weights[f"{module}.weight"] = _weight(packing, checkpoint, module)
        used |= {f"{module}.{kind}" for kind in kinds}
    used |= _empty_biases(checkpoint, modules, arch)
    if twice := weights.keys() & checkpoint.keys():
        raise BadCheckpoint(
            f"the checkpoint holds `{min(twice):.80}` twice, quantised and not; fetch it again"
        )
    return {name: stored for name, stored in checkpoint.items() if name not in used} | weights


def _gptq(f: Fields) -> _Packing:
    group = _group(f)
    if f.flag("desc_act") and group is not None:
        raise f.unsupported("desc_act", "inputs of a group must be neighbours; supported: false")
    for pattern in f.section("dynamic").values:
        if not pattern.startswith("-:"):
            raise f.unsupported(
                "dynamic", "all quantised layers must have the same format; supported: `-:...`"
            )
    version = f.text("checkpoint_format") if f.has("checkpoint_format") else "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise f.unsupported("checkpoint_format", "supported: gptq, gptq_v2")
    return _Packing(
        group,
        has_zeros=not f.flag("sym"),
        others=("g_idx",),
        codes_axis=0,
        zero_shift=1 if version == "gptq" else 0,
    )


def _awq(f: Fields) -> _Packing:
    if f.has("version") and f.text("version").lower() != "gemm":
        raise f.unsupported("version", "supported: gemm")
    return _Packing(_group(f), has_zeros=True, order=(0, 2, 4, 6, 1, 3, 5, 7))


def _compressed(f: Fields) -> _Packing:
    if f.text("format") != "pack-quantized":
        raise f.unsupported("format", "supported: pack-quantized, float-quantized, " + ", ".join(FP4_FORMATS))
    weights = _compressed_weights(f, "int", ("group", "channel"))
    if weights.values.get("actorder") not in (None, False, "weight", "static"):
        raise weights.unsupported("actorder", "inputs of a group must be neighbours; supported: null, weight")
    is_grouped = weights.text("strategy") == "group"
    return _Packing(
        _group(weights, bits="num_bits", is_grouped=is_grouped),
        has_zeros=not weights.flag("symmetric"),
        codes="weight_packed",
        scale="weight_scale",
        zeros="weight_zero_point",
        others=("weight_shape",),
        is_transposed=False,
        zeros_axis=0,
    )


def _compressed_weights(f: Fields, kind: str, strategies: Sequence[str]) -> Fields:
    for name in ("transform_config", "sparsity_config", "kv_cache_scheme"):
        if f.section(name).values.get("format", None if f.values.get(name) else "dense") != "dense":
            raise f.unsupported(name, "supported: null")
    groups = f.section("config_groups")
    found = [groups.section(name).section("weights") for name in groups.values]
    if not found or any(one.values != found[0].values for one in found):
        raise f.unsupported("config_groups", "all quantised layers must have the same format")
    for name, supported in (("type", (kind,)), ("strategy", strategies)):
        if found[0].text(name) not in supported:
            raise found[0].unsupported(name, f"supported: {', '.join(supported)}")
    return found[0]


def _group(f: Fields, bits: str = "bits", *, is_grouped: bool = True) -> int | None:
    if f.integer(bits) != 4:
        raise f.unsupported(bits, "supported: 4")
    if not is_grouped or f.values.get("group_size") == -1:
        return None
    if not is_group(f.integer("group_size")):
        raise f.unsupported("group_size", "supported: -1, 16, 32, 64 and multiples of 128")
    return f.integer("group_size")


def _block(f: Fields, name: str) -> list[int]:
    sizes = f.integers(name, 2)
    if 0 in sizes:
        raise f.unsupported(name, "blocks must have outputs and inputs")
    return sizes


def _weight(packing: _Packing, checkpoint: Checkpoint, module: str) -> QuantizedTensor:
    """Check shapes and dtypes, which alone are read now."""
    codes = find_matrix(checkpoint, f"{module}.{packing.codes}", "int32")
    sizes = [
        size * (_WORD_CODES if axis == packing.codes_axis else 1) for axis, size in enumerate(codes.shape)
    ]
    inputs, outputs = sizes if packing.is_transposed else sizes[::-1]
    group = inputs if packing.group is None else packing.group
    if not inputs or inputs % group:
        raise BadCheckpoint(f"`{module}` has {inputs} inputs, which groups of {group} do not divide")
    by_group = (inputs // group, outputs) if packing.is_transposed else (outputs, inputs // group)
    words_of_zeros = tuple(
        -(-size // _WORD_CODES) if axis == packing.zeros_axis else size for axis, size in enumerate(by_group)
    )
    scale = find_tensor(checkpoint, f"{module}.{packing.scale}", by_group, *DTYPES)
    parts = {packing.codes: codes, packing.scale: scale}
    for kind, shape in ((packing.zeros, words_of_zeros), ("g_idx", (inputs,))):
        name = f"{module}.{kind}"
        if name in checkpoint or (kind == packing.zeros and packing.has_zeros):
            parts[kind] = find_tensor(checkpoint, name, shape, "int32")
    form = FourBits(packing.group, scale.dtype, "float32" if packing.has_zeros else None)
    load = partial(_rows, packing, parts, group, module)
    return QuantizedTensor((outputs, inputs), scale.dtype, form, load)


def _rows(packing: _Packing, parts: Mapping[str, StoredTensor], group: int, module: str) -> FourBitRows:
    if "g_idx" in parts:
        order = parts["g_idx"].read()
        if not torch.equal(order, (torch.arange(len(order)) // group).to(order.dtype)):
            raise BadCheckpoint(f"`{module}.g_idx` reorders its inputs; supported: models without `desc_act`")
    codes = _unpacked(parts[packing.codes].read(), packing.codes_axis, packing.order)
    scale = parts[packing.scale].read().float()
    zeros = torch.full(scale.shape, ZERO_CODE)
    if packing.zeros in parts:
        zeros = _unpacked(parts[packing.zeros].read(), packing.zeros_axis, packing.order) + packing.zero_shift
        zeros = zeros[: scale.shape[0], : scale.shape[1]]
    if not packing.has_zeros and (zeros != ZERO_CODE).any():
        raise BadCheckpoint(f"`{module}.{packing.zeros}` differ, but config.json says that it is symmetric")
    minimum = -zeros.float() * scale if packing.has_zeros else None
    rows = FourBitRows(codes, scale, minimum)
    if packing.is_transposed:
        minimum = None if minimum is None else minimum.t().contiguous()
        rows = FourBitRows(codes.t().contiguous(), scale.t().contiguous(), minimum)
    return rows


def _unpacked(words: torch.Tensor, axis: int, order: Sequence[int]) -> torch.Tensor:
    """Return the codes in uint8, eight for one along the axis."""
    planes = torch.empty(*words.shape, _WORD_CODES, dtype=torch.uint8)
    for place, code in enumerate(order):
        planes[..., code] = (words >> 4 * place) & 15
    return planes.movedim(2, axis + 1).flatten(axis, axis + 1)


def _empty_biases(checkpoint: Checkpoint, modules: Sequence[str], arch: Arch) -> set[str]:
    """Return the names of biases of zeros, which GPTQ adds to modules that have none."""
    biased = {name.split(".")[-2] for name, _ in canonical_shapes(arch) if name.endswith(".bias")}
    paths = [path for name in biased for path in NAMES[arch.family].modules.get(name, ())]
    needed = {path.rpartition(".")[2] for path in paths}
    names = [f"{module}.bias" for module in modules if module.rpartition(".")[2] not in needed]
    return {name for name in names if name in checkpoint and not read_tensor(name, checkpoint).any()}
