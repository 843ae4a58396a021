"""Model families as data: how a Hugging Face config fills in an `Arch`.

A new family is a row in `FAMILIES` and a name map in `tensor_names.py`. Configs that the decoder does not
support are refused by field and value: for all families in `REFUSALS`, for one in its reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hearth.core.errors import BadCheckpoint, UnsupportedModel
from hearth.core.model_files import brief, read_object
from hearth.models import readers
from hearth.models.arch import Arch
from hearth.models.config_fields import Fields


@dataclass(frozen=True, slots=True)
class Family:
    architecture: str  #: transformers' class, for a config without `model_type`
    read: Callable[[Fields], Arch]
    defaults: Mapping[str, object]  #: transformers' values for absent fields
    aliases: Mapping[str, str] = field(default_factory=dict)  #: other spellings of a field


def read_arch(directory: Path) -> Arch:
    path = directory / "config.json"
    try:
        config = read_object(path, BadCheckpoint)
    except FileNotFoundError:
        raise BadCheckpoint(f"no config.json in `{directory}`; give a Hugging Face model directory") from None
    return arch_from_config(config, where=str(path))


def arch_from_config(config: Mapping[str, object], where: str = "config.json") -> Arch:
    _refuse_unsupported(config, where)
    name = _family_name(config, where)
    family = FAMILIES[name]
    aliased = {family.aliases[key]: config[key] for key in family.aliases.keys() & config.keys()}
    arch = family.read(Fields(name, {**family.defaults, **aliased, **config}, where))
    if arch.num_heads % arch.num_kv_heads != 0:
        raise UnsupportedModel(
            f"{where}: the number of attention heads must be a multiple of the number of key-value "
            f"heads, given: {arch.num_heads} and {arch.num_kv_heads}"
        )
    return arch


def _refuse_unsupported(config: Mapping[str, object], where: str) -> None:
    for refusal in REFUSALS:
        for key, value in config.items():
            if value is None or value in refusal.harmless:
                continue
            if re.fullmatch(refusal.pattern, key, re.DOTALL):
                raise UnsupportedModel(f"{where}: `{key:.80}` is {brief(value)}: {refusal.why}")


def _family_name(config: Mapping[str, object], where: str) -> str:
    architectures = Fields("transformers", config, where).texts("architectures") or []
    for architecture in architectures:
        if "For" in architecture and not architecture.endswith("ForCausalLM"):
            raise UnsupportedModel(
                f"{where}: `architectures` has {brief(architecture)}; supported: *ForCausalLM"
            )
    model_type = config.get("model_type")
    if model_type is None:
        by_class = {family.architecture: name for name, family in FAMILIES.items()}
        model_type = next((by_class[name] for name in architectures if name in by_class), None)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModel(
            f"{where}: `model_type` is {brief(model_type)}; supported: {', '.join(sorted(FAMILIES))}"
        )
    return model_type


_GATED: Mapping[str, object] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_QWEN: Mapping[str, object] = {
    **_GATED,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        readers.llama,
        {**_GATED, "vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        readers.mistral,
        {
            **_GATED,
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "qwen2": Family("Qwen2ForCausalLM", readers.qwen2, _QWEN),
    "qwen3": Family("Qwen3ForCausalLM", readers.qwen3, {**_QWEN, "head_dim": 128}),
    "opt": Family(
        "OPTForCausalLM",
        readers.opt,
        {
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "do_layer_norm_before": True,
            "num_attention_heads": 12,
            "activation_function": "relu",
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        readers.gpt_neox,
        {
            "vocab_size": 50432,
            "hidden_size": 6144,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "intermediate_size": 24576,
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "use_parallel_residual": True,
            "attention_bias": True,
            "rotary_emb_base": 10000.0,
            "rotary_pct": 0.25,
        },
    ),
    "falcon": Family(
        "FalconForCausalLM",
        readers.falcon,
        {
            "vocab_size": 65024,
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "layer_norm_epsilon": 1e-5,
            "multi_query": True,
            "parallel_attn": True,
            "max_position_embeddings": 2048,
            "activation": "gelu",
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
        },
        aliases={
            "n_embed": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_head_kv": "num_kv_heads",
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Fields that change the forward pass of any family, unless their value is harmless or null."""

    pattern: str
    why: str
    harmless: tuple[object, ...] = (False, 0)


REFUSALS = (
    Refusal(r".*experts?(_.*)?", "mixtures of experts are not supported; use a dense model", (0, 1, False)),
    Refusal(r".*soft_?cap(ping)?", "soft caps on logits are not supported"),
    Refusal(r"(use_)?alibi", "ALiBi positions are not supported; rotary and learned ones are"),
    Refusal(r".*sinks?(_.*)?", "attention sinks are not supported"),
    Refusal(
        r"(quantization|compression)_config",
        "quantized checkpoints (AWQ, GPTQ, ...) are not supported; use the float16 or bfloat16 original",
        ({},),
    ),
    Refusal(r"is_encoder_decoder|add_cross_attention", "only decoders are supported"),
    Refusal(r"scale_attn_weights", "attention scores are always scaled by head_dim ** -0.5", (True,)),
    Refusal(
        r"scale_attn_by_inverse_layer_idx|query_pre_attn_scalar|attn_scale|attention_multiplier",
        "attention scores are always scaled by head_dim ** -0.5",
    ),
    Refusal(
        r"(embedding|residual)_multiplier|logits_scaling|logit_scale",
        "scaled embeddings, residuals and logits are not supported",
        (1.0,),
    ),
    Refusal(
        r"clip_qkv|(use_)?qk_(layer)?norm", "it changes queries and keys in a way the decoder does not have"
    ),
)
