"""Tiny GGUF files, written with gguf's own writer the way llama.cpp's converter writes them. Reads none."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Metadata = Mapping[str, object]
Floats = npt.NDArray[np.float32]
F32 = GGMLQuantizationType.F32

#: What a file must say so that it can be opened for its tokenizer or a few tensors.
SMALLEST: Metadata = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
EMBEDDING = np.zeros((8, 32), np.float32)


def write(
    path: Path,
    metadata: Metadata = SMALLEST,
    tensors: Mapping[str, npt.NDArray[np.generic]] | None = None,
    *,
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
    architecture: str = "llama",
    endianess: GGUFEndian = GGUFEndian.LITTLE,
) -> Path:
    """`tensors` in torch's order of dimensions; those in `kinds` are blocks of bytes already."""
    writer = GGUFWriter(path, architecture, endianess=endianess)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in (tensors or {"token_embd.weight": EMBEDDING}).items():
        writer.add_tensor(name, tensor, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(
    path: Path,
    model: PreTrainedModel,
    *,
    kind: GGMLQuantizationType = F32,
    changes: Metadata | None = None,
    without: Collection[str] = (),
    rope_factors: Floats | None = None,
) -> Path:
    """A model of the zoo. Matrices are stored as `kind`, norms and biases in float32, as usual."""
    architecture = architecture_of(model)
    metadata = {**model_metadata(model.config, architecture), **(changes or {})}
    tensors = {name: tensor for name, tensor in model_tensors(model).items() if name not in without}
    if rope_factors is not None:
        tensors["rope_freqs.weight"] = rope_factors
    matrices = {name: kind for name, tensor in tensors.items() if tensor.ndim == 2 and kind != F32}
    stored = {name: quantize(t, kind) if name in matrices else t for name, t in tensors.items()}
    return write(
        path,
        {key: value for key, value in metadata.items() if key not in without},
        stored,
        kinds=matrices,
        architecture=architecture,
    )


#: Where llama.cpp's name is not transformers'. Mistral and OLMo 3 have no architecture of their own.
_ARCHITECTURES = {"mistral": "llama", "olmo3": "olmo2", "gemma3_text": "gemma3", "cohere": "command-r"}
#: Fields of transformers' configs, where there are such, by llama.cpp's keys.
_FIELDS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_LAYER_NORM_EPS = ("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")


def architecture_of(model: PreTrainedModel) -> str:
    return _ARCHITECTURES.get(model.config.model_type, str(model.config.model_type))


def model_metadata(config: PretrainedConfig, architecture: str) -> dict[str, object]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields = {key: getattr(config, name, None) for key, name in _FIELDS.items()}
    intermediate = getattr(config, "n_inner", None) or getattr(config, "intermediate_size", None)
    scale = getattr(config, "logits_scaling", None) or getattr(config, "logit_scale", None)
    eps = [getattr(config, name) for name in _LAYER_NORM_EPS if hasattr(config, name)]
    metadata: dict[str, object] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": intermediate,
        "attention.head_count": config.num_attention_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": config.vocab_size,
        "logit_scale": scale,
        "attention.layer_norm_epsilon": eps[0] if eps else None,
        **fields,
        **_rope_metadata(config, head_dim),
    }
    types = getattr(config, "layer_types", None) or []
    if "sliding_attention" in types and "full_attention" in types:
        metadata["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in types]
    return {f"{architecture}.{key}": value for key, value in metadata.items() if value is not None}


def _rope_metadata(config: PretrainedConfig, head_dim: int) -> dict[str, object]:
    given = getattr(config, "rope_parameters", None)
    if given is None:
        return {}
    rope = given.get("full_attention", given)
    metadata = {
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": rope["rope_theta"],
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
    }
    if rope["rope_type"] == "longrope":
        metadata["rope.scaling.attn_factor"] = rope["attention_factor"]
    if rope["rope_type"] in ("linear", "yarn"):
        metadata |= {
            "rope.scaling.type": rope["rope_type"],
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
        }
    return metadata


def model_tensors(model: PreTrainedModel) -> dict[str, Floats]:
    """By llama.cpp's names, and changed as its converter changes them."""
    config, architecture = model.config, architecture_of(model)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    is_reordered = architecture in ("llama", "granite", "smollm3")
    tensors = {}
    for path, parameter in model.named_parameters():
        name = names.get_name(path, try_suffixes=(".weight", ".bias"))
        assert name is not None, f"gguf has no name for {path}"
        tensor = parameter.detach().numpy()
        if is_reordered and "q_proj" in path:
            tensor = interleave(tensor, config.num_attention_heads)
        if is_reordered and "k_proj" in path:
            tensor = interleave(tensor, config.num_key_value_heads)
        if path.endswith("norm.weight") and ("gemma" in architecture or architecture == "nemotron"):
            tensor = tensor + 1.0
        if architecture == "gpt2" and path.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
            tensor = np.ascontiguousarray(tensor.T)
        tensors[name] = tensor
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in ("short", "long"):
        if f"{kind}_factor" in rope:
            tensors[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    return tensors


def interleave(rows: Floats, num_heads: int) -> Floats:
    """What llama.cpp's converter does to q and k: the halves of each head alternate, row by row."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


#: Tokens of these tests' vocabularies that are matched whole, and whether they are special.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level_metadata(corpus: Sequence[str], pre: str) -> dict[str, object]:
    """A byte-level vocabulary whose merges cross all borders of words, so that wrong cuts show in the ids."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(backend.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), *SPECIAL, *ADDED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            CONTROL if token in SPECIAL else USER_DEFINED if token in ADDED else NORMAL for token in tokens
        ],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }


def sentence_piece_metadata(corpus: Sequence[str]) -> dict[str, object]:
    """A SentencePiece vocabulary: bytes for rare characters, and scores that fall from the first merge on."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=500, limit_alphabet=80, show_progress=False)
    )
    vocab = json.loads(trained.to_str())["model"]["vocab"]
    merged = [token for token in sorted(vocab, key=vocab.__getitem__) if len(token) > 1]
    characters = [token for token in vocab if len(token) == 1]
    controls, byte_tokens = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [*merged, *characters]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), *[USER_DEFINED] * len(ADDED)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*controls, *byte_tokens, *pieces, *ADDED],
        "tokenizer.ggml.scores": [
            *[0.0] * 259,
            *(-float(i) for i in range(len(pieces))),
            *[0.0] * len(ADDED),
        ],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _add(writer: GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key}: {value!r}")


def transformers_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """What transformers makes of the tokenizer in a GGUF file.

    It opens the file several times, so gguf's reader gets a tenth of the time that it takes.
    """
    from transformers import AutoTokenizer

    with mock.patch("gguf.GGUFReader", ArrayReader):
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


#: What an array begins with, the kind and number of its items; and what a string does.
_ARRAY_HEAD, _LENGTH = Struct("<IQ"), Struct("<Q")


class ArrayReader(GGUFReader):
    """gguf's reader, with arrays read at once: element by element, a tokenizer takes it seconds."""

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
