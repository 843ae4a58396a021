"""Language models of models that also read images: the same model as one saved without the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from hearth.models.families import TEXT_PARTS, read_arch
from hearth.models.layout import layout_of
from tests.models.zoo import pack_directory, save

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TEXT = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 112,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_SIGHT = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
}
_QWEN_TOKENS = {
    "image_token_id": 9,
    "video_token_id": 8,
    "vision_start_token_id": 7,
    "vision_end_token_id": 6,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
#: By model_type: what differs in the language model, and the rest of the config.
CASES: Mapping[str, tuple[Mapping[str, object], Mapping[str, object]]] = {
    "gemma3": (
        {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 2},
        {
            "vision_config": {**_SIGHT, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 1,
            "image_token_index": 9,
            "boi_token_index": 8,
            "eoi_token_index": 7,
        },
    ),
    "mistral3": (
        {"model_type": "mistral", "head_dim": 24, "sliding_window": None},
        {"vision_config": {**_SIGHT, "model_type": "pixtral", "head_dim": 16}, "image_token_index": 9},
    ),
    "qwen2_vl": (
        {"rope_parameters": _MROPE},
        {
            "vision_config": {
                "depth": 1,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 2,
                "mlp_ratio": 1,
                "patch_size": 14,
            },
            **_QWEN_TOKENS,
        },
    ),
    "qwen2_5_vl": (
        {"rope_parameters": _MROPE},
        {"vision_config": {**_QWEN_SIGHT, "fullatt_block_indexes": [0]}, **_QWEN_TOKENS},
    ),
    "qwen3_vl": (
        {"head_dim": 16, "rope_parameters": _MROPE},
        {
            "vision_config": {
                **_QWEN_SIGHT,
                "num_position_embeddings": 4,
                "deepstack_visual_indexes": [0],
            },
            **_QWEN_TOKENS,
        },
    ),
}


def built(model_type: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model that reads images, and its language model alone, with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    text, rest = CASES[model_type]
    config = AutoConfig.for_model(model_type, text_config={**_TEXT, **text}, **rest)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    own = {**_TEXT, **text, "tie_word_embeddings": config.tie_word_embeddings}
    own.pop("model_type", None)
    own_config = AutoConfig.for_model(TEXT_PARTS[model_type], **own)
    alone = AutoModelForCausalLM.from_config(own_config, dtype=torch.float32).eval()
    alone.model.load_state_dict(whole.model.language_model.state_dict())
    alone.lm_head.load_state_dict(whole.lm_head.state_dict())
    return whole, alone


@pytest.mark.parametrize("model_type", TEXT_PARTS)
def test_a_language_model_is_read_without_what_reads_images(model_type: str, tmp_path: Path) -> None:
    whole, alone = built(model_type)
    save(whole, tmp_path / "whole")
    save(alone, tmp_path / "alone")

    arch = read_arch(tmp_path / "whole")

    assert arch == replace(read_arch(tmp_path / "alone"), is_text_part=True)
    layout = layout_of(arch, "float32")
    ours, theirs = torch.zeros(2, layout.num_bytes, dtype=torch.uint8)
    pack_directory(tmp_path / "whole", arch, layout, ours)
    pack_directory(tmp_path / "alone", arch, layout, theirs)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("model_type", TEXT_PARTS)
def test_a_text_has_the_logits_that_the_whole_gives_it(model_type: str) -> None:
    """Positions along all axes of an image are alike in a text, so ordinary rotary positions serve."""
    whole, alone = built(model_type)
    tokens = torch.arange(20, 50)[None]

    with torch.inference_mode():
        torch.testing.assert_close(alone(tokens).logits, whole(tokens).logits)
