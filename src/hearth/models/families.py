"""Model families as data: how a Hugging Face config fills in an `Arch`.

A new family is a row in `FAMILIES` and a name map in `tensor_names.py`. Configs that the decoder does not
support are refused by field and value: for all families in `REFUSALS`, for one in its reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    reads: frozenset[str] = frozenset()  #: fields that are refused elsewhere, and followed here


def read_arch(directory: Path) -> Arch:
    path = directory / "config.json"
    try:
        config = read_object(path, BadCheckpoint)
    except FileNotFoundError:
        raise BadCheckpoint(f"no config.json in `{directory}`; give a Hugging Face model directory") from None
    return arch_from_config(config, where=str(path))


def arch_from_config(config: Mapping[str, object], where: str = "config.json") -> Arch:
    outer_type = config.get("model_type")
    is_text_part = isinstance(outer_type, str) and outer_type in TEXT_PARTS
    config = _text_part(config, where) if is_text_part else config
    architectures = Fields("transformers", config, where).texts("architectures") or []
    name = _family_name(config, architectures)
    family = FAMILIES.get(name)
    _refuse_unsupported(config, name, frozenset() if family is None else family.reads, where)
    for architecture in architectures:
        if "For" in architecture and not architecture.endswith("ForCausalLM"):
            raise UnsupportedModel(
                f"{where}: `architectures` has {brief(architecture)}; supported: *ForCausalLM"
            )
    if family is None:
        raise UnsupportedModel(
            f"{where}: `model_type` is {brief(config.get('model_type'))}; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    aliased = {family.aliases[key]: config[key] for key in family.aliases.keys() & config.keys()}
    arch = family.read(Fields(name, {**family.defaults, **aliased, **config}, where))
    if arch.num_heads % arch.num_kv_heads != 0:
        raise UnsupportedModel(
            f"{where}: the number of attention heads must be a multiple of the number of key-value "
            f"heads, given: {arch.num_heads} and {arch.num_kv_heads}"
        )
    return replace(arch, is_text_part=is_text_part)


def _text_part(config: Mapping[str, object], where: str) -> Mapping[str, object]:
    """Return the config of the language model of one that also reads images."""
    outer_type, text = str(config["model_type"]), Fields("vision", config, where).section("text_config")
    family = TEXT_PARTS[outer_type]
    if text.values.get("model_type", family) not in (family, outer_type, f"{outer_type}_text"):
        raise text.unsupported("model_type", f"supported: {family}")
    outer = {key: value for key, value in config.items() if key not in ("architectures", "text_config")}
    own: dict[str, object] = {"model_type": family, "architectures": None}
    if config.get(tied := "tie_word_embeddings") is not None:
        own[tied] = config[tied]  # the head is that of the whole
    return {**outer, **text.values, **own}


def _family_name(config: Mapping[str, object], architectures: Sequence[str]) -> str:
    """Return the model type, or if there is none that of the class; of other models, perhaps no family."""
    model_type = config.get("model_type")
    if model_type is None:
        by_class = {family.architecture: name for name, family in FAMILIES.items()}
        model_type = next((by_class[name] for name in architectures if name in by_class), None)
    return model_type if isinstance(model_type, str) else "other"


def _refuse_unsupported(config: Mapping[str, object], family: str, reads: frozenset[str], where: str) -> None:
    for refusal in REFUSALS:
        for key, value in config.items():
            if value is None or value in refusal.harmless or key in reads:
                continue
            if re.fullmatch(refusal.pattern, key, re.DOTALL):
                why = refusal.why.replace("FAMILY", f"`{family:.80}`")
                raise UnsupportedModel(f"{where}: `{key:.80}` is {brief(value)}: {why}")


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

_GEMMA: Mapping[str, object] = {
    **_GATED,
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_attention_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GEMMA2: Mapping[str, object] = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
}
_OLMO: Mapping[str, object] = {
    **_GATED,
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
_GRANITE: Mapping[str, object] = {
    **_GATED,
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GLM: Mapping[str, object] = {
    **_GATED,
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
_COHERE: Mapping[str, object] = {
    **_GATED,
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
_GEMMA_READS = frozenset({"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"})
_GRANITE_READS = frozenset(
    {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
)

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
    "gemma": Family("GemmaForCausalLM", readers.gemma, {**_GEMMA, "num_hidden_layers": 28}),
    "gemma2": Family(
        "Gemma2ForCausalLM", readers.gemma2, {**_GEMMA2, "attn_logit_softcapping": 50.0}, reads=_GEMMA_READS
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        readers.gemma3,
        {
            **_GEMMA2,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
        },
        reads=_GEMMA_READS,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        readers.phi3,
        {
            **_GATED,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        readers.smollm3,
        {
            **_GATED,
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": Family("Olmo2ForCausalLM", readers.olmo2, _OLMO),
    "olmo3": Family("Olmo3ForCausalLM", readers.olmo3, {**_OLMO, "rope_theta": 5e5, "sliding_window": 4096}),
    "granite": Family("GraniteForCausalLM", readers.granite, _GRANITE, reads=_GRANITE_READS),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        readers.granite_hybrid,
        {**_GRANITE, "num_local_experts": 8, "shared_intermediate_size": 1024},
        reads=_GRANITE_READS | {"num_local_experts", "num_experts_per_tok"},
    ),
    "glm": Family("GlmForCausalLM", readers.glm, _GLM),
    "glm4": Family("Glm4ForCausalLM", readers.glm4, _GLM),
    "cohere": Family("CohereForCausalLM", readers.cohere, _COHERE, reads=frozenset({"logit_scale"})),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        readers.cohere2,
        {**_COHERE, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
        reads=frozenset({"logit_scale"}),
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        readers.starcoder2,
        {
            **_GATED,
            "vocab_size": 49152,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        readers.stablelm,
        {
            **_GATED,
            "vocab_size": 50304,
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        readers.nemotron,
        {
            **_GATED,
            "vocab_size": 256000,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_attention_heads": 48,
            "head_dim": 128,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        readers.gpt2,
        {
            "vocab_size": 50257,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 1024,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        },
        aliases={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "n_inner": "intermediate_size",
        },
    ),
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


#: The family of the language model of models that also read images, which are refused.
TEXT_PARTS: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Fields that change the forward pass of any family, unless their value is harmless or null.

    FAMILY in `why` stands for the name of the family.
    """

    pattern: str
    why: str
    harmless: tuple[object, ...] = (False, 0)


REFUSALS = (
    Refusal(r".*experts?(_.*)?", "mixtures of experts are not supported; use a dense model", (0, 1, False)),
    Refusal(r".*soft_?cap(ping)?", "soft caps are not supported in FAMILY models"),
    Refusal(r"(use_)?alibi", "ALiBi positions are not supported; rotary and learned ones are"),
    Refusal(r".*sinks?(_.*)?", "attention sinks are not supported"),
    Refusal(
        r"compression_config",
        "this way to compress weights is not supported; use the float16 or bfloat16 original",
        ({},),
    ),
    Refusal(r"use_bidirectional_attention", "attention is causal here"),
    Refusal(r"is_encoder_decoder|add_cross_attention", "only decoders are supported"),
    Refusal(
        r"scale_attn_weights", "attention scores of FAMILY models are scaled by head_dim ** -0.5", (True,)
    ),
    Refusal(
        r"scale_attn_by_inverse_layer_idx|query_pre_attn_scalar|attn_scale|attention_multiplier",
        "attention scores of FAMILY models are scaled by head_dim ** -0.5",
    ),
    Refusal(
        r"(embedding|residual)_multiplier|logits_scaling|logit_scale",
        "scaled embeddings, residuals and logits are not supported in FAMILY models",
        (1.0,),
    ),
    Refusal(
        r"clip_qkv|(use_)?qk_(layer)?norm", "it changes queries and keys in a way the decoder does not have"
    ),
)
