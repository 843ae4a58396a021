"""GGUF metadata as the Hugging Face config that the file was made from. Reads no tensors and no tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from hearth.core.errors import BadCheckpoint, UnsupportedModel
from hearth.models.config_fields import Fields
from hearth.models.layout import Shape

#: Families by llama.cpp's architectures.
ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2vl": "qwen2",
    "qwen3": "qwen3",
    "qwen3vl": "qwen3",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "granite": "granite",
    "glm4": "glm4",
    "command-r": "cohere",
    "cohere2": "cohere2",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "nemotron": "nemotron",
    "gpt2": "gpt2",
}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
#: Tensors of divisors of rotary frequencies: Llama 3's, and the two of LongRoPE.
_LLAMA3_FACTORS, _LONG_FACTORS = "rope_freqs.weight", "rope_factors_long.weight"
_SHORT_FACTORS = "rope_factors_short.weight"
ROPE_FACTORS = (_LLAMA3_FACTORS, _SHORT_FACTORS, _LONG_FACTORS)

#: The field of the epsilon, of families with layer norms; others have RMS norms.
_LAYER_NORM_EPS = {
    "cohere": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
    "stablelm": "layer_norm_eps",
    "nemotron": "norm_eps",
    "gpt2": "layer_norm_epsilon",
}
#: Layers of models whose scores are scaled by the hidden size of a head, which is not its size: 27B of each.
_SCALED_BY_HIDDEN = {"gemma2": 46, "gemma3": 62}
#: What llama.cpp takes for the base of layers with a window where the file does not say.
_LOCAL_THETA = {"gemma3_text": 10000.0}

#: Metadata that must be there: absent fields of a config would count as transformers' defaults.
_INTEGERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
#: Metadata that some families follow; the checks of every config refuse it for others.
_FOLLOWED_OR_REFUSED = {
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
    metadata: Fields, shapes: Mapping[str, Shape], rope_factors: Mapping[str, Sequence[float]]
) -> dict[str, object]:
    """Return the config that the file was made from.

    `shapes` are those of the file's tensors under their own names, `rope_factors` those of ROPE_FACTORS.
    """
    name = architecture(metadata)
    family = ARCHITECTURES[name]
    if EMBEDDING not in shapes:
        raise BadCheckpoint(f"{metadata.where} has no tensor `{EMBEDDING}`; fetch or convert it again")
    has_qkv_bias = "blk.0.attn_q.bias" in shapes
    config: dict[str, object] = {
        "model_type": family,
        "vocab_size": shapes[EMBEDDING][0],
        "tie_word_embeddings": HEAD not in shapes,
        "attention_bias": has_qkv_bias,
        "use_qkv_bias": has_qkv_bias,
        "use_bias": has_qkv_bias,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in shapes,
    }
    eps = _LAYER_NORM_EPS.get(family, "rms_norm_eps")
    eps_key = "layer_norm_rms_epsilon" if eps == "rms_norm_eps" else "layer_norm_epsilon"
    config[eps] = metadata.number(f"{name}.attention.{eps_key}")
    config |= {field: metadata.integer(f"{name}.{key}") for key, field in _INTEGERS.items()}
    for key, field in _FOLLOWED_OR_REFUSED.items():
        if metadata.has(f"{name}.{key}"):
            config[field] = metadata.values[f"{name}.{key}"]
    if family == "granite" and "logit_scale" in config:
        config["logits_scaling"] = config.pop("logit_scale")
    num_kv_heads = metadata.maybe_integer(f"{name}.attention.head_count_kv")
    config["num_key_value_heads"] = num_kv_heads or config["num_attention_heads"]
    config["head_dim"] = head_dim = _head_dim(metadata, name)
    if name in _SCALED_BY_HIDDEN:
        is_large = metadata.integer(f"{name}.block_count") == _SCALED_BY_HIDDEN[name]
        size = metadata.integer(f"{name}.embedding_length")
        num_heads = metadata.integer(f"{name}.attention.head_count")
        config["query_pre_attn_scalar"] = size // num_heads if is_large else head_dim
    config |= _window(metadata, name, family)
    rope = _rope(metadata, name, head_dim, rope_factors)
    if config["model_type"] in ("gemma3_text", "olmo3"):
        swa, usual = f"{name}.rope.freq_base_swa", _LOCAL_THETA.get(family, rope["rope_theta"])
        local = {"rope_theta": metadata.values.get(swa, usual), "rope_type": "default"}
        rope = {"full_attention": rope, "sliding_attention": local}
    config["rope_parameters"] = rope
    if metadata.has(original := f"{name}.rope.scaling.original_context_length"):
        config["original_max_position_embeddings"] = metadata.integer(original)
    return config


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


#: The family of a model with windows, by that without: GGUF has one architecture for both.
_WITH_WINDOWS = {
    "llama": "mistral",
    "olmo2": "olmo3",
    **{family: family for family in ("phi3", "gemma2", "gemma3_text", "cohere2")},
}


def _window(metadata: Fields, name: str, family: str) -> dict[str, object]:
    key, pattern = f"{name}.attention.sliding_window", f"{name}.attention.sliding_window_pattern"
    if not metadata.has(key):
        return {}  # as many as in the family's other models, or none
    window = metadata.values[key]
    if window == 0 or metadata.integer(key) >= metadata.integer(f"{name}.context_length"):
        return {"sliding_window": None}
    if family not in _WITH_WINDOWS:
        raise metadata.unsupported(key, "GGUF does not store which layers have the window")
    config = {"model_type": _WITH_WINDOWS[family], "sliding_window": window}
    match metadata.values.get(pattern):
        case list(kinds):
            names = ["sliding_attention" if kind else "full_attention" for kind in kinds]
            return config | {"layer_types": names[: metadata.integer(f"{name}.block_count")]}
        case int(every):
            return config | {"sliding_window_pattern": every}
    return config


def _rope(
    metadata: Fields, name: str, head_dim: int, factors: Mapping[str, Sequence[float]]
) -> dict[str, object]:
    base, dim = f"{name}.rope.freq_base", f"{name}.rope.dimension_count"
    theta = metadata.number(base) if metadata.has(base) else 10000.0
    rotated = metadata.maybe_integer(dim) or head_dim
    rope = {
        "rope_theta": theta,
        "partial_rotary_factor": rotated / head_dim,
        **_scaling(metadata, name),
    }
    if not factors:
        return rope
    if rope["rope_type"] != "default" and rope["rope_type"] != "longrope":
        raise UnsupportedModel(
            f"{metadata.where} scales its rotary frequencies by `{next(iter(factors))}` and by "
            f"{rope['rope_type']!r}; supported: one of the two"
        )
    if _LLAMA3_FACTORS in factors:
        return rope | _llama3(metadata, theta, rotated, factors[_LLAMA3_FACTORS])
    magnitude = f"{name}.rope.scaling.attn_factor"
    return rope | {
        "rope_type": "longrope",
        "short_factor": factors.get(_SHORT_FACTORS),
        "long_factor": factors.get(_LONG_FACTORS),
        **({"attention_factor": metadata.number(magnitude)} if metadata.has(magnitude) else {}),
    }


def _scaling(metadata: Fields, name: str) -> dict[str, object]:
    kind, factor = f"{name}.rope.scaling.type", f"{name}.rope.scaling.factor"
    if not metadata.has(factor):
        factor = f"{name}.rope.scale_linear"
    has_factor = metadata.has(factor) and metadata.values[factor] != 0
    rope_type = metadata.text(kind) if metadata.has(kind) else "linear"
    if rope_type == "none" or (rope_type == "linear" and not has_factor):
        return {"rope_type": "default"}
    scaling = {"rope_type": rope_type, **({"factor": metadata.number(factor)} if has_factor else {})}
    if rope_type == "yarn":
        for key in ("yarn_beta_fast", "yarn_beta_slow"):
            if metadata.has(f"{name}.rope.scaling.{key}"):
                scaling[key.removeprefix("yarn_")] = metadata.number(f"{name}.rope.scaling.{key}")
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
