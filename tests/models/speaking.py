"""A tiny random model that can be asked: a tokenizer of single bytes and a chat template. Asserts nothing."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tests.models.zoo import save, tiny


def save_speaking(directory: Path) -> Path:
    """A Llama as Hugging Face would publish it."""
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    save(tiny("llama-gqa", vocab_size=len(tokens), bos_token_id=0, eos_token_id=1), directory)
    return directory
