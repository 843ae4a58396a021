"""A GGUF file as a source that looks like the Hugging Face checkpoint it was made from. Converts nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from hearth.core.errors import BadCheckpoint
from hearth.models.config_fields import Fields
from hearth.models.families import arch_from_config
from hearth.models.formats import LINEARS
from hearth.models.layout import Shape
from hearth.models.pack import StoredTensor
from hearth.models.quantize import FourBitRows, QuantizedTensor
from hearth.models.tensor_names import NAMES, NameMap
from hearth.store.format.gguf_config import ROPE_FACTORS, architecture, config_of
from hearth.store.format.gguf_four_bits import FORMS, four_bit_rows
from hearth.store.format.gguf_header import GgufHeader, MalformedGguf, TensorEntry, read_header
from hearth.store.format.gguf_tokenizer import text_files
from hearth.store.format.source import ModelSource

#: Bytes of float32 that are dequantised at a time: gguf needs the memory of its result several times over.
SLAB_BYTES = 1 << 20

MAX_ROPE_FACTORS = 4096

#: Canonical modules by llama.cpp's names, and which of the parts that are stacked there.
_MODULES = {
    "token_embd": ("embed", 0),
    "position_embd": ("positions", 0),
    "output_norm": ("final_norm", 0),
    "output": ("head", 0),
    "attn_norm": ("attn_norm", 0),
    "attn_qkv": ("qkv", 0),
    "attn_q": ("qkv", 0),
    "attn_k": ("qkv", 1),
    "attn_v": ("qkv", 2),
    "attn_q_norm": ("q_norm", 0),
    "attn_k_norm": ("k_norm", 0),
    "attn_output": ("o", 0),
    "post_attention_norm": ("attn_out_norm", 0),
    "ffn_norm": ("mlp_norm", 0),
    "ffn_gate": ("up", 0),
    "ffn_up": ("up", -1),
    "ffn_down": ("down", 0),
    "post_ffw_norm": ("mlp_out_norm", 0),
}
#: Architectures whose queries and keys llama.cpp's converter reorders.
_REORDERED = ("llama", "granite", "smollm3")

_FLOATS = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
_VALUES: Mapping[GGMLQuantizationType, type[np.generic]] = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
}


@contextmanager
def open_gguf(path: Path) -> Iterator[ModelSource]:
    data, header = _mapped(path)
    metadata = Fields("GGUF", header.metadata, where=f"`{path}`")
    _refuse_part(metadata)
    tensors = {entry.name: _GgufTensor.of(entry, data) for entry in header.tensors}
    shapes = {name: stored.shape for name, stored in tensors.items()}
    factors = {name: _rope_factors(name, tensors.pop(name), path) for name in ROPE_FACTORS if name in tensors}
    arch = arch_from_config(config_of(metadata, shapes, factors), metadata.where)
    is_reordered = architecture(metadata) in _REORDERED
    heads = {"attn_q": arch.num_heads, "attn_k": arch.num_kv_heads} if is_reordered else {}
    names = NAMES[arch.family]
    checkpoint = {
        _transformers_name(names, name): _as_trained(names, name, tensors[name], heads) for name in tensors
    }
    if len(checkpoint) != len(tensors):
        raise BadCheckpoint(f"`{path}` has a tensor under two names, llama.cpp's and transformers'")
    yield ModelSource(arch, checkpoint, lambda: text_files(metadata))


@dataclass(frozen=True, slots=True)
class _GgufTensor:
    data: npt.NDArray[np.generic]  #: values of F32 and F16, rows of bytes of all other kinds
    kind: GGMLQuantizationType
    shape: Shape

    @staticmethod
    def of(entry: TensorEntry, file: npt.NDArray[np.uint8]) -> _GgufTensor:
        stored = file[entry.begin : entry.end].view(_VALUES.get(entry.kind, np.uint8))
        return _GgufTensor(stored.reshape(*entry.shape[:-1], -1), entry.kind, entry.shape)

    @property
    def dtype(self) -> str:
        """The dtype to store, if dequantised bfloat16: it rounds values by less than quantisation did."""
        if self.kind in _FLOATS:
            return _FLOATS[self.kind]
        return "bfloat16" if _can_dequantise(self.kind) else self.kind.name

    @property
    def is_quantised(self) -> bool:
        return self.kind not in _FLOATS and len(self.shape) == 2 and _can_dequantise(self.kind)

    def rows(self) -> torch.Tensor | FourBitRows:
        return four_bit_rows(self.data, self.kind) if self.kind in FORMS else self.read()

    def read(self) -> torch.Tensor:
        """Return the values, quantised ones in float32, so that they are rounded once."""
        if self.kind == GGMLQuantizationType.BF16:
            return torch.from_numpy(np.array(self.data)).view(torch.bfloat16)
        if self.kind in _FLOATS:
            return torch.from_numpy(np.array(self.data))
        tensor = torch.empty(self.shape)
        rows, blocks = tensor.view(-1, self.shape[-1]), self.data.reshape(-1, self.data.shape[-1])
        num_rows = max(1, SLAB_BYTES // rows[0].nbytes)
        for begin in range(0, len(rows), num_rows):
            # As one row, for by itself it takes 16 rows at a time, which are three times as slow.
            slab = dequantize(blocks[begin : begin + num_rows].reshape(1, -1), self.kind)
            rows[begin : begin + num_rows] = torch.from_numpy(slab.reshape(-1, self.shape[-1]))
        return tensor


@dataclass(frozen=True, slots=True)
class _ChangedTensor:
    """A tensor that is not what it was in transformers until `change` undoes what llama.cpp did."""

    stored: _GgufTensor
    shape: Shape
    change: Callable[[torch.Tensor], torch.Tensor]

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    def read(self) -> torch.Tensor:
        return self.change(self.stored.read())


@cache
def _can_dequantise(kind: GGMLQuantizationType) -> bool:
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _mapped(path: Path) -> tuple[npt.NDArray[np.uint8], GgufHeader]:
    try:
        data = np.asarray(np.memmap(path, mode="r"))  # whose class makes every view of it slow
        return data, read_header(data)
    except (OSError, ValueError, MalformedGguf) as error:  # ValueError: it is empty
        raise BadCheckpoint(f"`{path}` is truncated or no GGUF file: {error}; fetch it again") from error


def _rope_factors(name: str, stored: _GgufTensor, path: Path) -> list[float]:
    if stored.kind not in _FLOATS or len(stored.shape) != 1 or stored.shape[0] > MAX_ROPE_FACTORS:
        raise BadCheckpoint(
            f"`{path}`: tensor `{name}` must be up to {MAX_ROPE_FACTORS} floats, "
            f"given: {stored.kind.name} {list(stored.shape)}"
        )
    factors: list[float] = stored.read().tolist()
    for factor in factors:
        if not 0.0 < factor < math.inf:
            raise BadCheckpoint(f"`{path}`: tensor `{name}` must hold positive numbers, given: {factor}")
    return factors


def _refuse_part(metadata: Fields) -> None:
    num_parts = metadata.maybe_integer("split.count") or 1
    if num_parts > 1:
        raise BadCheckpoint(
            f"{metadata.where} is one of {num_parts} parts of a model; supported: one file, so join them "
            "with `llama-gguf-split --merge`"
        )


def _as_trained(names: NameMap, name: str, stored: _GgufTensor, heads: Mapping[str, int]) -> StoredTensor:
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    if kind == "weight" and names.norm_shift and module.endswith("norm"):
        return _ChangedTensor(stored, stored.shape, lambda weight: weight.float() - names.norm_shift)
    if names.is_transposed and kind == "weight" and _MODULES.get(module, ("", 0))[0] in LINEARS - {"head"}:
        return _ChangedTensor(stored, stored.shape[::-1], torch.t)
    in_halves = partial(_halves, heads[module]) if module in heads else None
    if not stored.is_quantised:
        return stored if in_halves is None else _ChangedTensor(stored, stored.shape, in_halves)
    # Other kinds than those of 4 bits are stored in 8, with one scale for a row.
    form = FORMS.get(stored.kind, "int8")
    quantised = QuantizedTensor(stored.shape, stored.dtype, form, stored.rows)
    return quantised if in_halves is None else quantised.reordered(in_halves)


def _halves(num_heads: int, rows: torch.Tensor) -> torch.Tensor:
    """Undo llama.cpp's order of queries and keys: the halves of a head, which the rotary positions turn as
    pairs, alternate row by row, where transformers has one half after the other."""
    return rows.view(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _transformers_name(names: NameMap, name: str) -> str:
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in _MODULES:
        return name
    layer, module, kind = found.groups()
    canonical, part = _MODULES[module]
    if canonical == "head":
        return f"{names.head.partition('|')[0]}.{kind}"
    templates = names.modules.get(canonical, ())
    if part >= len(templates) or (module == "attn_qkv" and len(templates) > 1):
        return name
    path = templates[part].partition("|")[0]
    # A tensor of a layer is none of the whole model, and the other way round.
    return (
        name
        if ("{i}" in path) != (layer is not None)
        else f"{names.prefixes[0]}{path.format(i=layer)}.{kind}"
    )
