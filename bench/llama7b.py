"""A random Llama-2-7B on the device, for benchmarks that need its shapes and not its wits."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from hearth.config import EngineConfig
from hearth.engine.assemble import ModelSpec, assemble, own_limits
from hearth.engine.engine import Engine
from hearth.models.families import arch_from_config
from hearth.models.layout import layout_of
from hearth.models.weights import bind, contiguous_places
from hearth.text.tokenizer import Tokenizer

CONFIG: dict[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
ARCH = arch_from_config(CONFIG)
LAYOUT = layout_of(ARCH, "bfloat16")


def new_engine(config: EngineConfig, *, seed: int | None) -> Engine:
    """Return an engine over random weights; without a seed they are whatever the memory holds."""
    device = torch.device("cuda")
    limits = own_limits(config, ARCH, torch.bfloat16, device)  # before anything is taken of the memory
    base = torch.empty(LAYOUT.num_bytes, dtype=torch.uint8, device=device)
    if seed is not None:
        generator = torch.Generator(device).manual_seed(seed)
        for spec in LAYOUT.tensors:
            tensor = base[spec.offset : spec.offset + spec.nbytes].view(torch.bfloat16)
            if "norm" in spec.name:
                tensor.fill_(1.0)
            else:
                tensor.normal_(std=0.02, generator=generator)
    weights = bind(ARCH, LAYOUT, contiguous_places(LAYOUT, base))
    model = ModelSpec(ARCH, torch.bfloat16, ARCH.max_positions, limits, frozenset())
    return assemble(model, weights, config, device)


def new_tokenizer(directory: Path) -> Tokenizer:
    """Return a byte-level tokenizer of 32,000 entries: detokenising costs what it costs with a real one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(ARCH.vocab_size - len(alphabet))]
    backend = Backend(models.BPE(vocab={token: at for at, token in enumerate(alphabet + words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)
