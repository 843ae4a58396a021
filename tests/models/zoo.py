"""Tiny random models of every family, built with transformers and saved as checkpoints. Downloads nothing.

    from tests.models.zoo import VARIANTS, build
    model, directory = build("llama-gqa")

Every parameter is random, norms and biases too, so that a tensor left out or mixed up shows in the logits.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from hearth.models.arch import Arch
from hearth.models.layout import Layout
from hearth.models.pack import pack
from hearth.store.format.hf import open_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

_SIZES: Mapping[str, object] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_GATED: Mapping[str, object] = {**_SIZES, "intermediate_size": 112, "num_key_value_heads": 2}
_OPT: Mapping[str, object] = {**_SIZES, "ffn_dim": 112}
_NEOX: Mapping[str, object] = {**_SIZES, "intermediate_size": 112}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 32,
}
#: Special tokens within the vocabulary.
_NO_PAD: Mapping[str, object] = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
_MULTIPLIERS: Mapping[str, object] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
    "logits_scaling": 6.0,
}
_GRANITE4: Mapping[str, object] = {
    **_GATED,
    **_MULTIPLIERS,
    "shared_intermediate_size": 80,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "layer_types": ["full_attention"] * 3,
}


class Variant(NamedTuple):
    model_type: str
    config: Mapping[str, object]


class Built(NamedTuple):
    model: PreTrainedModel
    directory: Path


VARIANTS: Mapping[str, Variant] = {
    "llama-gqa": Variant("llama", _GATED),
    "llama-mha-tied": Variant("llama", {**_GATED, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama3-rope": Variant("llama", {**_GATED, "rope_parameters": _LLAMA3}),
    "llama-odd-head": Variant("llama", {**_GATED, "head_dim": 20, "num_key_value_heads": 1}),
    "llama-bias": Variant(
        "llama",
        {
            **_GATED,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
    "yi": Variant(
        "llama",
        {
            **_GATED,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_theta": 5e6},
        },
    ),
    "smollm2": Variant(
        "llama",
        {
            **_GATED,
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 1e5},
        },
    ),
    "mistral-window": Variant("mistral", {**_GATED, "sliding_window": 7, "rms_norm_eps": 1e-5}),
    "mistral-head": Variant("mistral", {**_GATED, "sliding_window": None, "head_dim": 24}),
    "qwen2": Variant("qwen2", {**_GATED, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen2-window": Variant(
        "qwen2",
        {
            **_GATED,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": Variant("qwen3", {**_GATED, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-bias": Variant("qwen3", {**_GATED, "head_dim": 16, "attention_bias": True}),
    "qwen2-yarn": Variant("qwen2", {**_GATED, "rope_parameters": _YARN}),
    "gemma": Variant("gemma", {**_GATED, "hidden_size": 72, "head_dim": 24, "num_key_value_heads": 1}),
    "gemma2": Variant(
        "gemma2",
        {
            **_GATED,
            "head_dim": 20,
            "sliding_window": 5,
            "query_pre_attn_scalar": 30,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Variant(
        "gemma3_text",
        {
            **_GATED,
            "head_dim": 32,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3": Variant("phi3", {**_GATED, **_NO_PAD, "sliding_window": 7}),
    "phi4-mini": Variant(
        "phi3",
        {
            **_GATED,
            **_NO_PAD,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "hidden_size": 96,
            "original_max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.125, 1.25, 2.0, 2.0, 3.5],
                "long_factor": [1.0, 2.125, 4.25, 8.0, 9.0, 9.5],
                "attention_factor": 1.2,
            },
        },
    ),
    "smollm3": Variant("smollm3", {**_GATED, **_NO_PAD, "no_rope_layers": [1, 0, 1]}),
    "olmo2": Variant("olmo2", _GATED),
    "olmo3": Variant(
        "olmo3",
        {
            **_GATED,
            "num_key_value_heads": 1,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {**_YARN, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "granite": Variant("granite", {**_GATED, **_MULTIPLIERS, "tie_word_embeddings": True}),
    "granite4": Variant("granitemoehybrid", {**_GRANITE4, "position_embedding_type": "rope"}),
    "granite4-nope": Variant("granitemoehybrid", {**_GRANITE4, "tie_word_embeddings": True}),
    "glm": Variant("glm", {**_GATED, **_NO_PAD, "head_dim": 24, "num_key_value_heads": 1}),
    "glm4": Variant("glm4", {**_GATED, **_NO_PAD, "num_attention_heads": 6, "head_dim": 20}),
    "cohere": Variant("cohere", {**_GATED, "logit_scale": 0.3}),
    "cohere2": Variant("cohere2", {**_GATED, "sliding_window": 5, "sliding_window_pattern": 2}),
    "starcoder2": Variant("starcoder2", {**_GATED, **_NO_PAD, "sliding_window": 7}),
    "stablelm": Variant("stablelm", {**_GATED, "use_qkv_bias": True}),
    "stablelm-parallel": Variant("stablelm", {**_GATED, "use_parallel_residual": True, "hidden_size": 96}),
    "nemotron": Variant("nemotron", {**_GATED, "head_dim": 24}),
    "gpt2": Variant(
        "gpt2",
        {
            "vocab_size": 160,
            "n_embd": 60,
            "n_layer": 3,
            "n_head": 3,
            "n_positions": 128,
            "n_inner": 112,
            **_NO_PAD,
        },
    ),
    "opt-pre": Variant("opt", _OPT),
    "opt-350m": Variant("opt", {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 48}),
    "opt-no-affine": Variant(
        "opt", {**_OPT, "layer_norm_elementwise_affine": False, "enable_bias": False, "hidden_size": 80}
    ),
    "neox-parallel": Variant("gpt_neox", _NEOX),
    "neox-sequential": Variant(
        "gpt_neox",
        {
            **_NEOX,
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "falcon-7b": Variant("falcon", _SIZES),
    "falcon-40b": Variant("falcon", {**_SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": Variant(
        "falcon",
        {
            **_SIZES,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 112,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-rw-like": Variant(
        "falcon", {**_SIZES, "multi_query": False, "parallel_attn": False, "bias": True, "hidden_size": 48}
    ),
}

#: One variant of each architecture, the first.
FAMILIES = list({variant.model_type: name for name, variant in reversed(VARIANTS.items())}.values())

_WIDE = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8}
#: Some 20 MB in float32 each: models of several pages, where a page of a device has 2 MiB at least.
WIDE: Mapping[str, Variant] = {
    "llama-wide": Variant("llama", {**_GATED, **_WIDE, "num_key_value_heads": 8, "intermediate_size": 768}),
    "qwen3-wide": Variant("qwen3", {**_GATED, **_WIDE, "intermediate_size": 704, "head_dim": 32}),
    "opt-wide": Variant("opt", {**_SIZES, **_WIDE, "ffn_dim": 1024}),
}


def tiny(name: str, **changes: object) -> PreTrainedModel:
    """A fresh model of the variant in float32, ready for inference, the same in every process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    variant = {**VARIANTS, **WIDE}[name]
    config = AutoConfig.for_model(variant.model_type, **{**variant.config, **changes})
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm_weight = parameter.dim() == 1 and path.endswith("weight")
            scale = 0.5 if "embed" in path else 0.2
            parameter.copy_(1.0 + 0.3 * noise if is_norm_weight else scale * noise)
    return model.eval()


@cache
def build(name: str) -> Built:
    """The variant's model and its saved checkpoint, made once per process. Do not change either."""
    model = tiny(name)
    directory = Path(tempfile.mkdtemp(prefix=f"hearth-zoo-{name}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    save(model, directory)
    return Built(model, directory)


def save(model: PreTrainedModel, directory: Path, **options: object) -> None:
    """`save_pretrained` without its progress bar."""
    with _quiet():
        model.save_pretrained(directory, **options)


def pack_directory(directory: Path, arch: Arch, layout: Layout, out: torch.Tensor) -> None:
    """`pack` of the checkpoint that is saved there."""
    with open_directory(directory) as source:
        pack(source.checkpoint, arch, layout, out)


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
