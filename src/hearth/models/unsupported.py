"""Refuses configs with fields that no family can follow. Fields that one family refuses are in its reader."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hearth.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Refusal:
    """Fields, in any family, that change the forward pass unless their value is harmless or null."""

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


def refuse_unsupported(config: Mapping[str, object]) -> None:
    """Raise UnsupportedModel at the first field that no family can follow."""
    for refusal in REFUSALS:
        for key, value in config.items():
            if re.fullmatch(refusal.pattern, key) and value is not None and value not in refusal.harmless:
                raise UnsupportedModel(f"config.json: `{key}` is {value!r}: {refusal.why}")
