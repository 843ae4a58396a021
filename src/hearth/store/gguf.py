"""A GGUF file as a source that looks like the Hugging Face checkpoint it was made from. Converts nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, ReaderField
from gguf.quants import dequantize

from hearth.errors import BadCheckpoint
from hearth.models.arch import Arch
from hearth.models.config_fields import Fields
from hearth.models.families import arch_from_config
from hearth.models.layout import Shape
from hearth.models.pack import StoredTensor
from hearth.store.gguf_config import architecture, config_of
from hearth.store.gguf_tokenizer import text_files
from hearth.store.source import ModelSource

#: Bytes of float32 that are dequantised at a time: gguf needs the memory of its result several times over.
SLAB_BYTES = 8 << 20

#: What gguf raises, by accident or on purpose, for a file that is no GGUF or ends early.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, ArithmeticError, StructError)

#: What an array begins with, the kind and number of its items; and what a string does.
_ARRAY_HEAD, _LENGTH = Struct("<IQ"), Struct("<Q")

ROPE_FACTORS = "rope_freqs.weight"

#: llama.cpp's names of modules, and transformers' of the same.
_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_FLOATS = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


@contextmanager
def open_gguf(path: Path) -> Iterator[ModelSource]:
    """Open a GGUF file by mapping it; each tensor is dequantised on its own when it is read."""
    with _naming(path):
        reader = _ArrayReader(path)
        values = {name: _value(field) for name, field in reader.fields.items()}
    if reader.endianess != GGUFEndian.LITTLE:
        raise BadCheckpoint(f"`{path}` is big-endian; supported: little-endian, so convert it again")
    metadata = Fields("GGUF", values, where=f"`{path}`")
    _refuse_part(metadata)
    tensors = {
        tensor.name: _GgufTensor(tensor.data, tensor.tensor_type, tuple(reversed(tensor.shape.tolist())))
        for tensor in reader.tensors
    }
    shapes = {name: stored.shape for name, stored in tensors.items()}
    factors = tensors.pop(ROPE_FACTORS).read().tolist() if ROPE_FACTORS in tensors else None
    arch = arch_from_config(config_of(metadata, shapes, factors))
    heads = _interleaved_heads(arch) if architecture(metadata) == "llama" else {}
    checkpoint = {_transformers_name(name): _in_order(name, tensors[name], heads) for name in tensors}
    yield ModelSource(arch, checkpoint, lambda: text_files(metadata))


class _ArrayReader(GGUFReader):
    """gguf's reader, with arrays read at once: element by element, a tokenizer takes it seconds.

    Fields come out as gguf makes them, for the tests compare both.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[npt.NDArray[np.generic]], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        data, begin = self.data.view(np.ndarray), orig_offs + _ARRAY_HEAD.size
        item_type, num_items = _ARRAY_HEAD.unpack(data[orig_offs:begin].tobytes())
        items: list[npt.NDArray[np.generic]]
        head: list[npt.NDArray[np.generic]] = [
            data[orig_offs : orig_offs + 4].view(np.uint32),
            data[orig_offs + 4 : begin].view(np.uint64),
        ]
        if item_type == GGUFValueType.STRING:
            items, end = _strings(data, begin, num_items)
        elif (dtype := self.gguf_scalar_to_np.get(GGUFValueType(item_type))) is not None:
            end = begin + num_items * np.dtype(dtype).itemsize
            items = [*_part(data, begin, end).view(dtype).reshape(-1, 1)]
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        types = [GGUFValueType.ARRAY, *([GGUFValueType(item_type)] if items else [])]
        return end - orig_offs, [*head, *items], list(range(len(head), len(head) + len(items))), types


def _strings(data: npt.NDArray[np.uint8], begin: int, num_strings: int) -> _Strings:
    """Return the bytes of strings that stand one after the other, each behind its length, and their end."""
    strings: list[npt.NDArray[np.generic]] = []
    for _ in range(num_strings):
        text = begin + _LENGTH.size
        (num_bytes,) = _LENGTH.unpack(_part(data, begin, text).tobytes())
        begin = text + num_bytes
        strings.append(_part(data, text, begin))
    return _Strings(strings, begin)


def _part(data: npt.NDArray[np.uint8], begin: int, end: int) -> npt.NDArray[np.uint8]:
    if end > len(data):
        raise ValueError(f"it ends at byte {len(data)}, in the midst of a field that goes to {end}")
    return data[begin:end]


class _Strings(NamedTuple):
    """Strings of an array, and where they end."""

    items: list[npt.NDArray[np.generic]]
    end: int


@dataclass(frozen=True, slots=True)
class _GgufTensor:
    """A tensor in the mapped file."""

    data: npt.NDArray[np.generic]  #: values of F32 and F16, bytes of all other kinds
    kind: GGMLQuantizationType
    shape: Shape

    @property
    def dtype(self) -> str:
        """The dtype to store; bfloat16 for quantised kinds: it rounds their values by less than they did."""
        if self.kind in _FLOATS:
            return _FLOATS[self.kind]
        return "bfloat16" if _can_dequantise(self.kind) else self.kind.name

    def read(self) -> torch.Tensor:
        """Return the values, quantised ones in float32, so that whoever rounds them rounds once.

        Takes little more memory than the tensor itself.
        """
        if self.kind == GGMLQuantizationType.BF16:
            return torch.from_numpy(np.array(self.data)).view(torch.bfloat16)
        if self.kind in _FLOATS:
            return torch.from_numpy(np.array(self.data))
        tensor = torch.empty(self.shape)
        rows, blocks = tensor.view(-1, self.shape[-1]), self.data.reshape(-1, self.data.shape[-1])
        num_rows = max(1, SLAB_BYTES // rows[0].nbytes)
        for begin in range(0, len(rows), num_rows):
            slab = dequantize(blocks[begin : begin + num_rows], self.kind)
            rows[begin : begin + num_rows] = torch.from_numpy(slab)
        return tensor


@dataclass(frozen=True, slots=True)
class _Interleaved:
    """Queries or keys whose rows llama.cpp has reordered: the halves of a head, which the rotary positions
    turn as pairs, alternate row by row, where transformers has one half after the other."""

    stored: _GgufTensor
    num_heads: int

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def shape(self) -> Shape:
        return self.stored.shape

    def read(self) -> torch.Tensor:
        rows = self.stored.read()
        return rows.view(self.num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


@cache
def _can_dequantise(kind: GGMLQuantizationType) -> bool:
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Say which file gguf could not read."""
    try:
        yield
    except _UNREADABLE as error:
        raise BadCheckpoint(
            f"`{path}` is truncated or no GGUF file of version 2 or 3: {error}; fetch it again"
        ) from error


def _value(field: ReaderField) -> object:
    """Return a field's value, float32 by its shortest decimals: 1e-05, not 9.999999747378752e-06."""
    value: object = field.contents()
    if field.types == [GGUFValueType.FLOAT32] and isinstance(value, float):
        return float(str(np.float32(value)))
    return value


def _refuse_part(metadata: Fields) -> None:
    num_parts = metadata.maybe_integer("split.count") or 1
    if num_parts > 1:
        raise BadCheckpoint(
            f"{metadata.where} is one of {num_parts} parts of a model; supported: one file, so join them "
            "with `llama-gguf-split --merge`"
        )


def _interleaved_heads(arch: Arch) -> dict[str, int]:
    return {"attn_q": arch.num_heads, "attn_k": arch.num_kv_heads}


def _in_order(name: str, stored: _GgufTensor, heads: Mapping[str, int]) -> StoredTensor:
    *_, module, _ = ("", *name.split("."))
    return _Interleaved(stored, heads[module]) if module in heads else stored


def _transformers_name(name: str) -> str:
    """Return transformers' name of a tensor. One of llama.cpp's other architectures stays as it is."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None:
        return name
    layer, module, kind = found.groups()
    if layer is None:
        return f"{_MODULES[module]}.{kind}" if module in _MODULES else name
    return f"model.layers.{layer}.{_LAYER_MODULES[module]}.{kind}" if module in _LAYER_MODULES else name
