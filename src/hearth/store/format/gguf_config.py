"""GGUF metadata as the Hugging Face config that the file was made from. Reads no tensors and no tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from hearth.core.errors import BadCheckpoint, UnsupportedModel
from hearth.models.config_fields import Fields
from hearth.models.layout import Shape

ARCHITECTURES = ("llama", "qwen2", "qwen3")
EMBEDDING, HEAD = "token_embd.weight", "output.weight"

#: Metadata that must be there: absent fields of a config would count as transformers' defaults.
_INTEGERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
#: Metadata that is taken over only to be refused, by the checks of every config.
_REFUSED = {
    "expert_count": "num_experts",
    "attention.scale": "attention_multiplier",
    "attention.clamp_kqv": "clip_qkv",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale",
}

#: Llama 3's scaling, which GGUF stores as one divisor per frequency; only the factor differs between models.
_LOW_FREQ, _HIGH_FREQ, _ORIGINAL_POSITIONS = 1.0, 4.0, 8192


def config_of(
    metadata: Fields, shapes: Mapping[str, Shape], rope_factors: Sequence[float] | None
) -> dict[str, object]:
    """Return the config that the file was made from.

    `shapes` are those of the file's tensors under their own names, `rope_factors` its `rope_freqs.weight`.
    """
    family = architecture(metadata)
    if EMBEDDING not in shapes:
        raise BadCheckpoint(f"{metadata.where} has no tensor `{EMBEDDING}`; fetch or convert it again")
    config: dict[str, object] = {
        "model_type": family,
        "vocab_size": shapes[EMBEDDING][0],
        "rms_norm_eps": metadata.number(f"{family}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": HEAD not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
    }
    config |= {name: metadata.integer(f"{family}.{key}") for key, name in _INTEGERS.items()}
    for key, name in _REFUSED.items():
        if metadata.has(f"{family}.{key}"):
            config[name] = metadata.values[f"{family}.{key}"]
    num_kv_heads = metadata.maybe_integer(f"{family}.attention.head_count_kv")
    config["num_key_value_heads"] = num_kv_heads or config["num_attention_heads"]
    config["head_dim"] = head_dim = _head_dim(metadata, family)
    config["rope_parameters"] = _rope(metadata, family, head_dim, rope_factors)
    return config | _window(metadata, family)


def architecture(metadata: Fields) -> str:
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{metadata.where}: `general.architecture` is {name!r:.80}; supported: {', '.join(ARCHITECTURES)}"
        )
    return name


def _head_dim(metadata: Fields, family: str) -> int:
    key, value = f"{family}.attention.key_length", f"{family}.attention.value_length"
    hidden_size = metadata.integer(f"{family}.embedding_length")
    num_heads = metadata.integer(f"{family}.attention.head_count")
    head_dim = metadata.maybe_integer(key) or hidden_size // num_heads
    if head_dim == 0:
        raise BadCheckpoint(
            f"{metadata.where}: `{family}.embedding_length` must be at least the {num_heads} of "
            f"`{family}.attention.head_count`, given: {hidden_size}"
        )
    if metadata.has(value) and metadata.integer(value) != head_dim:
        raise metadata.unsupported(value, f"keys and values must have the same length, keys: {head_dim}")
    return head_dim


def _window(metadata: Fields, family: str) -> dict[str, object]:
    key = f"{family}.attention.sliding_window"
    if not metadata.has(key) or metadata.values[key] == 0:
        return {}
    window = metadata.integer(key)
    if window >= metadata.integer(f"{family}.context_length"):
        return {}
    if family != "llama":
        raise metadata.unsupported(key, "GGUF does not store which layers have the window")
    return {"model_type": "mistral", "sliding_window": window}


def _rope(metadata: Fields, family: str, head_dim: int, factors: Sequence[float] | None) -> dict[str, object]:
    base, dim = f"{family}.rope.freq_base", f"{family}.rope.dimension_count"
    theta = metadata.number(base) if metadata.has(base) else 10000.0
    rotated = metadata.maybe_integer(dim) or head_dim
    rope = {
        "rope_theta": theta,
        "partial_rotary_factor": rotated / head_dim,
        **_scaling(metadata, family),
    }
    if factors is None:
        return rope
    if rope["rope_type"] != "default":
        raise UnsupportedModel(
            f"{metadata.where} scales its rotary frequencies by `rope_freqs.weight` and by "
            f"{rope['rope_type']!r}; supported: one of the two"
        )
    return rope | _llama3(metadata, theta, rotated, factors)


def _scaling(metadata: Fields, family: str) -> dict[str, object]:
    kind, factor = f"{family}.rope.scaling.type", f"{family}.rope.scaling.factor"
    if not metadata.has(factor):
        factor = f"{family}.rope.scale_linear"
    has_factor = metadata.has(factor) and metadata.values[factor] != 0
    name = metadata.text(kind) if metadata.has(kind) else "linear"
    if name == "none" or (name == "linear" and not has_factor):
        return {"rope_type": "default"}
    scaling = {"rope_type": name, **({"factor": metadata.number(factor)} if has_factor else {})}
    if metadata.has(original := f"{family}.rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = metadata.integer(original)
    return scaling


def _llama3(metadata: Fields, theta: float, dim: int, factors: Sequence[float]) -> dict[str, object]:
    factor = round(max(factors), 4)
    is_whole = 2 * len(factors) == dim  # or a head of absurd size would have as many factors computed
    is_close = partial(math.isclose, rel_tol=1e-4)  # the file's are computed in float32
    if not is_whole or not all(map(is_close, factors, _llama3_factors(theta, dim, factor))):
        raise UnsupportedModel(
            f"{metadata.where}: `rope_freqs.weight` is not Llama 3's scaling (low_freq_factor {_LOW_FREQ}, "
            f"high_freq_factor {_HIGH_FREQ}, original_max_position_embeddings {_ORIGINAL_POSITIONS}) by its "
            f"largest value: {factor}; convert the model from its Hugging Face directory"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FREQ,
        "high_freq_factor": _HIGH_FREQ,
        "original_max_position_embeddings": _ORIGINAL_POSITIONS,
    }


def _llama3_factors(theta: float, dim: int, factor: float) -> Iterator[float]:
    for i in range(0, dim, 2):
        rotations = _ORIGINAL_POSITIONS / theta ** (i / dim) / (2 * math.pi)
        share = min(max((rotations - _LOW_FREQ) / (_HIGH_FREQ - _LOW_FREQ), 0.0), 1.0)
        yield 1.0 / (share + (1.0 - share) / factor)
