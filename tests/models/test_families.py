from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hearth.core.errors import BadCheckpoint, UnsupportedModel
from hearth.models.arch import Activation, Llama3Scaling, Norm, QkNorm, Residual, Rope, YarnScaling
from hearth.models.families import FAMILIES, arch_from_config, read_arch
from hearth.models.readers import ACTIVATIONS
from hearth.models.rope import frequencies
from tests.models.zoo import VARIANTS, build

YARN = Rope(10000.0, 16, yarn=YarnScaling(4.0, 4.0, 1.0, True, 32), magnitude=1.0 + 0.1 * math.log(4.0))
FACTS: dict[str, dict[str, object]] = {
    "llama-gqa": {"num_kv_heads": 2, "gated": True, "norm": Norm.RMS, "residual": Residual.PRE},
    "llama-mha-tied": {"num_kv_heads": 4, "tied_head": True},
    "llama3-rope": {"ropes": (Rope(5000.0, 16, llama3=Llama3Scaling(8.0, 1.0, 4.0, 32)),)},
    "llama-odd-head": {"head_dim": 20, "q_size": 80, "kv_size": 20, "qkv_size": 120},
    "llama-bias": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "ropes": (Rope(10000.0, 16, 2.0),)},
    "yi": {"num_kv_heads": 1, "ropes": (Rope(5e6, 8),)},
    "smollm2": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 8, "norm_eps": 1e-5, "tied_head": True},
    "mistral-window": {"windows": (7, 7, 7), "norm_eps": 1e-5},
    "mistral-head": {"windows": (None, None, None), "head_dim": 24},
    "qwen2": {"qkv_bias": True, "o_bias": False, "windows": (None, None, None), "ropes": (Rope(1e6, 16),)},
    "qwen2-window": {"windows": (None, 5, 5), "tied_head": True},
    "qwen3": {"qk_norm": QkNorm.HEAD, "head_dim": 32, "qkv_bias": False},
    "qwen3-bias": {"qk_norm": QkNorm.HEAD, "qkv_bias": True, "o_bias": True, "mlp_bias": False},
    "qwen2-yarn": {"ropes": (YARN,), "layer_ropes": (0, 0, 0)},
    "gemma": {"wide_norms": True, "embed_scale": 72**0.5, "head_dim": 24, "activation": Activation.GELU_TANH},
    "gemma2": {
        "residual": Residual.SANDWICH,
        "windows": (5, None, 5),
        "score_scale": 30**-0.5,
        "score_cap": 2.0,
        "logit_cap": 3.0,
    },
    "gemma3": {
        "windows": (5, None, 5),
        "ropes": (Rope(1e6, 32, 8.0), Rope(10000.0, 32)),
        "layer_ropes": (1, 0, 1),
        "qk_norm": QkNorm.HEAD,
        "score_cap": None,
    },
    "phi3": {"windows": (7, 7, 7), "ropes": (Rope(10000.0, 16),)},
    "phi4-mini": {"tied_head": True, "head_dim": 16, "rope_dim": 12},
    "smollm3": {"layer_ropes": (0, None, 0)},
    "olmo2": {"residual": Residual.OUTPUT, "qk_norm": QkNorm.ALL, "num_norms": 4},
    "olmo3": {
        "windows": (5, None, 5),
        "ropes": (replace(YARN, theta=5e5), Rope(5e5, 16)),
        "layer_ropes": (1, 0, 1),
    },
    "granite": {"score_scale": 0.4, "logit_scale": 1 / 6, "embed_scale": 3.0 / 0.22},
    "granite4": {"intermediate_size": 80, "ropes": (Rope(10000.0, 16),)},
    "granite4-nope": {"ropes": (), "layer_ropes": (None, None, None)},
    "glm": {"ropes": (Rope(10000.0, 12),), "residual": Residual.PRE, "qkv_bias": True, "o_bias": False},
    "glm4": {"ropes": (Rope(10000.0, 10),), "residual": Residual.SANDWICH},
    "cohere": {"norm": Norm.LAYER, "norm_bias": False, "shares_norm": True, "logit_scale": 0.3},
    "cohere2": {"windows": (5, None, 5), "layer_ropes": (0, None, 0)},
    "starcoder2": {"windows": (7, 7, 7), "gated": False, "norm_bias": True, "mlp_bias": True},
    "stablelm": {"ropes": (Rope(10000.0, 4),), "qkv_bias": True, "residual": Residual.PRE},
    "stablelm-parallel": {"residual": Residual.PARALLEL, "shares_norm": True},
    "nemotron": {"activation": Activation.RELU2, "wide_norms": True, "ropes": (Rope(10000.0, 12),)},
    "gpt2": {"position_offset": 0, "ropes": (), "tied_head": True, "head_dim": 20},
    "opt-pre": {"position_offset": 2, "ropes": (), "activation": Activation.RELU, "has_final_norm": True},
    "opt-350m": {"residual": Residual.POST, "embed_size": 48, "has_final_norm": False},
    "opt-no-affine": {"norm_weight": False, "norm_bias": False, "qkv_bias": False, "mlp_bias": False},
    "neox-parallel": {"residual": Residual.PARALLEL, "shares_norm": False, "ropes": (Rope(10000.0, 4),)},
    "neox-sequential": {
        "residual": Residual.PRE,
        "qkv_bias": False,
        "mlp_bias": True,
        "ropes": (Rope(10000.0, 8),),
    },
    "falcon-7b": {"num_kv_heads": 1, "residual": Residual.PARALLEL, "shares_norm": True, "tied_head": True},
    "falcon-40b": {"num_kv_heads": 2, "shares_norm": False, "intermediate_size": 256},
    "falcon-11b": {"num_kv_heads": 2, "shares_norm": True, "intermediate_size": 112, "tied_head": False},
    "falcon-rw-like": {"num_kv_heads": 4, "residual": Residual.PRE, "qkv_bias": True, "mlp_bias": True},
}


WITH_ONE_ROPE = [
    name
    for name, variant in VARIANTS.items()
    if variant.model_type not in ("opt", "gpt2", "gemma3_text", "olmo3") and name != "granite4-nope"
]


@pytest.mark.parametrize("name", VARIANTS)
def test_reads_the_arch_of_a_saved_model(name: str) -> None:
    model, directory = build(name)

    arch = read_arch(directory)

    assert arch.family == VARIANTS[name].model_type
    assert arch.vocab_size == 160
    assert arch.hidden_size == model.config.hidden_size
    assert arch.num_layers == len(arch.windows) == 3
    assert arch.max_positions == 128
    holders = {fact: arch if hasattr(arch, fact) else arch.dimensions for fact in FACTS[name]}
    assert {fact: getattr(holder, fact) for fact, holder in holders.items()} == FACTS[name]


@pytest.mark.parametrize("name", WITH_ONE_ROPE)
def test_rotary_settings_give_transformers_frequencies(name: str) -> None:
    model, directory = build(name)
    (rope,) = read_arch(directory).ropes

    theirs = model.base_model.rotary_emb

    torch.testing.assert_close(frequencies(rope, 128), theirs.inv_freq)
    assert rope.magnitude == pytest.approx(theirs.attention_scaling)


#: Transformers' defaults of others are hybrids of several kinds of layers.
DENSE = [name for name in FAMILIES if name != "granitemoehybrid"]


@pytest.mark.parametrize("model_type", DENSE)
def test_absent_fields_mean_what_transformers_takes_them_for(model_type: str) -> None:
    from transformers import AutoConfig

    arch = arch_from_config({"model_type": model_type})

    assert arch == arch_from_config(AutoConfig.for_model(model_type).to_dict())


LINEAR = {"factor": 2.0}
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}
SPELLINGS = {
    "theta": ("llama", {"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "linear": (
        "llama",
        {"rope_scaling": {"type": "linear", **LINEAR}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, **LINEAR}},
    ),
    "llama3": (
        "llama",
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ),
    "dtype": ("mistral", {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    "windows": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 2},
        {
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
            "num_hidden_layers": 2,
        },
    ),
    "neox": (
        "gpt_neox",
        {"rotary_pct": 0.5, "rotary_emb_base": 5000},
        {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 5000.0}},
    ),
    "falcon": (
        "falcon",
        {"n_head": 8, "n_layer": 2, "n_embed": 64, "n_head_kv": 2, "new_decoder_architecture": True},
        {
            "num_attention_heads": 8,
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
        },
    ),
    "swish": ("llama", {"hidden_act": "swish"}, {"hidden_act": "silu"}),
    "heads": ("qwen2", {"num_key_value_heads": None}, {"num_key_value_heads": 32}),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_old_and_new_spellings_mean_the_same(case: str) -> None:
    model_type, old, new = SPELLINGS[case]

    arch = arch_from_config({"model_type": model_type, **old})

    assert arch == arch_from_config({"model_type": model_type, **new})


def test_class_name_decides_where_model_type_is_absent() -> None:
    arch = arch_from_config({"architectures": ["Qwen3ForCausalLM"]})

    assert arch.family == "qwen3"


def test_window_counts_the_token_itself_as_transformers_does() -> None:
    from transformers.masking_utils import sliding_window_causal_mask_function

    windows = arch_from_config({"model_type": "mistral", "sliding_window": 7}).windows

    visible = sliding_window_causal_mask_function(7)(0, 0, torch.tensor(50), torch.arange(64))
    assert visible.nonzero().flatten().tolist() == [44, 45, 46, 47, 48, 49, 50]
    assert visible.sum() == windows[0]


def test_activation_names_mean_transformers_functions() -> None:
    from torch.nn import functional
    from transformers.activations import ACT2FN

    x = torch.linspace(-4, 4, 81)
    ours = {
        Activation.SILU: functional.silu(x),
        Activation.GELU: functional.gelu(x),
        Activation.GELU_TANH: functional.gelu(x, approximate="tanh"),
        Activation.RELU: functional.relu(x),
        Activation.RELU2: functional.relu(x) ** 2,
    }

    for name, activation in ACTIVATIONS.items():
        torch.testing.assert_close(ACT2FN[name](x), ours[activation], msg=name)


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({}, Activation.GELU_TANH),
        ({"hidden_act": "gelu"}, Activation.GELU_TANH),
        ({"hidden_act": "gelu", "hidden_activation": None}, Activation.GELU_TANH),
        ({"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, Activation.GELU_TANH),
        ({"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu"}, Activation.GELU),
        ({"hidden_act": "relu"}, Activation.RELU),
    ],
)
def test_gelu_of_the_first_gemma_means_its_approximation(
    fields: dict[str, object], activation: Activation
) -> None:
    assert arch_from_config({"model_type": "gemma", **fields}).activation is activation


def test_a_class_name_alone_lets_its_family_read_what_others_refuse() -> None:
    fields = {"residual_multiplier": 0.5, "logits_scaling": 4.0, "attention_multiplier": 0.25}

    arch = arch_from_config({"architectures": ["GraniteForCausalLM"], **fields})

    assert arch == arch_from_config({"model_type": "granite", **fields})


GRANITE4 = {"model_type": "granitemoehybrid", "num_local_experts": 0, "layer_types": ["attention"] * 32}
REFUSED = [
    ({"model_type": "mamba"}, "`model_type` is 'mamba'; supported: cohere, cohere2, falcon, "),
    ({}, "`model_type` is None"),
    ({"model_type": ["llama"]}, r"`model_type` is \['llama'\]; supported: cohere"),
    ({"model_type": {"gemma3": 1}, "alibi": True}, "`alibi` is True: ALiBi"),
    ({"model_type": "mixtral", "num_local_experts": 8}, "`num_local_experts` is 8: mixtures of experts"),
    ({"model_type": "qwen3", "num_experts": 64}, "`num_experts` is 64"),
    (
        {"model_type": "gpt_neox", "attn_logit_softcapping": 50.0},
        "`attn_logit_softcapping` is 50.0: soft caps are not supported in `gpt_neox` models",
    ),
    ({"model_type": "falcon", "alibi": True}, "`alibi` is True: ALiBi"),
    ({"model_type": "llama", "compression_config": {"format": "x"}}, "`compression_config` is .*original"),
    ({"model_type": "t5", "is_encoder_decoder": True}, "`is_encoder_decoder` is True: only decoders"),
    ({"model_type": "llama", "attention_sink_size": 4}, "`attention_sink_size` is 4: attention sinks"),
    ({"model_type": "llama", "scale_attn_weights": False}, "`scale_attn_weights` is False"),
    ({"model_type": "llama", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ({"model_type": "llama", "residual_multiplier": 0.22}, "`residual_multiplier` is 0.22.* in `llama` mod"),
    ({"model_type": "granite", "residual_multiplier": 1e-30}, "`residual_multiplier` is 1e-30: .* 0.001 to"),
    ({"model_type": "granite", "residual_multiplier": 1001}, "`residual_multiplier` is 1001: .* to 1000"),
    (
        {"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1.0},
        "`rope_theta` is 1.0: it must be above 1.0 with `yarn`",
    ),
    ({"model_type": "llama", "use_qk_norm": True}, "`use_qk_norm` is True"),
    (
        {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
        "ForSequenceClassification",
    ),
    ({"model_type": "llama", "rope_scaling": {"type": "ntk", "factor": 4.0}}, "`type` is 'ntk': supported"),
    ({"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "'dynamic': supported"),
    ({"model_type": "qwen3", "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "share one rotary"),
    ({"model_type": "llama", "partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5"),
    (
        {"model_type": "falcon", "rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor` is 0.5",
    ),
    ({"model_type": "llama", "hidden_act": "mish"}, "`hidden_act` is 'mish': supported: silu"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "attention is causal"),
    ({"model_type": "granitemoehybrid"}, "`num_local_experts` is 8: mixtures of experts"),
    ({**GRANITE4, "layer_types": ["mamba"]}, "`layer_types` is .*'mamba'.*Mamba layers are not"),
    ({**GRANITE4, "position_embedding_type": "absolute"}, "'absolute': supported: rope, nope"),
    ({"model_type": "cohere", "use_qk_norm": True}, "`use_qk_norm` is True"),
    ({"model_type": "stablelm", "qk_layernorm": True}, "`qk_layernorm` is True"),
    ({"model_type": "stablelm", "partial_rotary_factor": 1.5}, "`partial_rotary_factor` is 1.5"),
    ({"model_type": "mistral3", "text_config": {"model_type": "ministral3"}}, "'ministral3': supported: mis"),
    ({"model_type": "llama", "num_key_value_heads": 5}, "multiple .* given: 32 and 5"),
    ({"model_type": "llama", "hidden_size": 100}, "`hidden_size` is 100.*`num_attention_heads`: 32"),
    ({"model_type": "llama", "head_dim": 15}, "must be even, here: 15"),
    ({"model_type": "gpt_neox", "rotary_pct": 0.01}, "must be even, here: 0"),
    ({"model_type": "llama", "sliding_window": 64}, "`sliding_window` is 64"),
    ({"model_type": "qwen2", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, "`layer_types`"),
    (
        {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["linear_attention"]},
        "linear_attention",
    ),
    (
        {"model_type": "mistral", "num_hidden_layers": 1, "layer_types": ["full_attention"]},
        "share `sliding_w",
    ),
    ({"model_type": "falcon", "multi_query": False, "num_kv_heads": 8}, "`num_kv_heads` is 8"),
    ({"model_type": "falcon", "num_ln_in_parallel_attn": 2}, "`num_ln_in_parallel_attn` is 2"),
    ({"model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False}, "`parallel_attn`"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_refuses_what_the_decoder_cannot_represent(config: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        arch_from_config(config)


HARMLESS = {
    "num_experts": 0,
    "attn_logit_softcapping": None,
    "alibi": False,
    "quantization_config": None,
    "is_encoder_decoder": False,
    "scale_attn_weights": True,
    "residual_multiplier": 1.0,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
    "rope_scaling": None,
}


def test_harmless_values_of_refused_fields_change_nothing() -> None:
    arch = arch_from_config({"model_type": "llama", **HARMLESS})

    assert arch == arch_from_config({"model_type": "llama"})


BAD = [
    ({"hidden_size": "4096"}, "`hidden_size` must be an integer of at least 1, given: '4096'"),
    ({"num_hidden_layers": 0}, "`num_hidden_layers` must be an integer of at least 1, given: 0"),
    ({"vocab_size": True}, "`vocab_size` must be an integer"),
    ({"rms_norm_eps": None}, r"`rms_norm_eps` must be a number from 1.2e-38 to 3\.4e\+38, given: None"),
    ({"rms_norm_eps": 1e-320}, r"`rms_norm_eps` must be a number from 1\.2e-38"),
    ({"attention_bias": "yes"}, "`attention_bias` must be true or false, given: 'yes'"),
    ({"hidden_act": 3}, "`hidden_act` must be a string, given: 3"),
    ({"rope_scaling": "linear"}, "`rope_scaling` must be an object"),
    ({"rope_scaling": {"type": "linear"}}, "`rope_scaling` has no `factor`"),
    (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        "`rope_parameters` has no `low_freq_factor`",
    ),
    (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0]}},
        "`long_factor` must be a list of 64 numbers",
    ),
    (
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 1},
        "`original_max_position_embeddings` must be an integer of at least 2, given: 1",
    ),
    ({"layer_types": ["full_attention"]}, "`layer_types` has 1 entries for 32 layers"),
    ({"architectures": "LlamaForCausalLM"}, "`architectures` must be a list of strings"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_names_a_field_that_is_missing_or_malformed(fields: dict[str, object], message: str) -> None:
    with pytest.raises(BadCheckpoint, match=message):
        arch_from_config({"model_type": "llama", **fields})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no config.json"),
        ("{", "not valid JSON"),
        (json.dumps([1]), r"must hold a JSON object, given: \[1\]"),
    ],
)
def test_unreadable_config_file_is_a_bad_checkpoint(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)

    with pytest.raises(BadCheckpoint, match=message):
        read_arch(tmp_path)
