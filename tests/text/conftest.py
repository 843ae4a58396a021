# ruff: noqa: RUF001 - letters that look alike are the point of these texts
"""Small tokenizers of each kind, trained on the spot, in directories as models have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from hearth.text.tokenizer import Tokenizer

CORPUS = [
    "The hearth keeps the house warm; the house keeps the hearth.",
    "def warm(house): return [room for room in house if room.hearth]",
    "Le foyer réchauffe la maison. Das Feuer wärmt das Haus.",
    "你好，世界。今天天气很好。 こんにちは世界 안녕하세요",
    "שלום עולם مرحبا بالعالم नमस्ते दुनिया",
    "    indented\n\n\ttabs and   runs of    spaces\n",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    " leading and trailing ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🤦🏽‍♂️ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ①②③ ﷽",
    "鑑賞用の鬱蒼とした森 𠮷野家",
    "for i in range(10):\n\tprint(f'{i:>3}')  # ok\r\n",
    "e\u0301 vs \u00e9, zero\u200bwidth, no\u00a0break, \ufeffmark",
    "<s> is not always special, nor is <0xE4> or ▁",
    "naïve café — “quotes” … €100",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|tool|>"]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return TEXTS


def byte_level() -> Backend:
    """Make a tokenizer as in Llama 3, Qwen, SmolLM2, GPT-NeoX, Falcon and OPT."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think>", "two words", "日本"])
    return backend


def byte_fallback() -> Backend:
    """Make a tokenizer as in Llama 2, Mistral and Yi: bytes for characters that have no token."""
    backend = Backend(_byte_fallback_model())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def byte_fallback_with_metaspace() -> Backend:
    """Byte fallback under a decoder that looks at neighbours, so that tokens have no spelling."""
    backend = Backend(_byte_fallback_model())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens(SPECIAL)
    return backend


def _byte_fallback_model() -> models.BPE:
    trained = Backend(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=300, limit_alphabet=60, special_tokens=SPECIAL, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *list(model["vocab"])[len(SPECIAL) :]]
    return models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[(left, right) for left, right in model["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )


def word_piece() -> Backend:
    """Make a tokenizer whose decoder puts spaces between words and none before `##` or a full stop."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def metaspace() -> Backend:
    """Make a tokenizer whose decoder drops the mark of the first word."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def unigram() -> Backend:
    """Make a tokenizer of likelihoods, with bytes for characters that have no token."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    scores = [(token, score) for token, score in json.loads(backend.to_str())["model"]["vocab"]]
    pieces = [*scores, *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    backend.model = models.Unigram(pieces, unk_id=0, byte_fallback=True)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return backend


def word_ends() -> Backend:
    """Make a tokenizer whose decoder makes the end of a word a space unless it is the last."""
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


KINDS: dict[str, Callable[[], Backend]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_with_metaspace": byte_fallback_with_metaspace,
    "word_piece": word_piece,
    "metaspace": metaspace,
    "unigram": unigram,
    "word_ends": word_ends,
}


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory per kind of tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    for kind, build in KINDS.items():
        (root / kind).mkdir()
        build().save(str(root / kind / "tokenizer.json"))
        (root / kind / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"})
        )
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="session")
def tokenizers(directories: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.load(directory) for kind, directory in directories.items()}
