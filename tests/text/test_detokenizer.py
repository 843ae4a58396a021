from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from hearth.text.detokenizer import Detokenizer, prompt_text
from hearth.text.token_spelling import SpelledTokens
from hearth.text.tokenizer import REPLACEMENT, Tokenizer

pytestmark = pytest.mark.slow

KINDS = [
    "byte_level",
    "byte_fallback",
    "byte_fallback_with_metaspace",
    "word_piece",
    "metaspace",
    "unigram",
    "word_ends",
]
#: Here a run of byte tokens that is not UTF-8 spoils itself as a whole in `Tokenizer.decode`.
SPOILS_RUNS = {"byte_fallback", "byte_fallback_with_metaspace", "unigram"}

random_ids = st.lists(st.integers(min_value=0, max_value=700), max_size=40)
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def pieces(detokenizer: Detokenizer, ids: Iterable[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", sorted(set(KINDS) - SPOILS_RUNS))
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@given(ids=random_ids)
def test_any_ids_give_the_text_of_decode(
    tokenizers: dict[str, Tokenizer], kind: str, skip_special_tokens: bool, ids: list[int]
) -> None:
    detokenizer = Detokenizer(tokenizers[kind], skip_special_tokens)

    streamed = "".join(pieces(detokenizer, ids))

    assert streamed == tokenizers[kind].decode(ids, skip_special_tokens)


@pytest.mark.parametrize("kind", sorted(SPOILS_RUNS))
@given(ids=random_ids)
def test_any_ids_of_whole_characters_give_the_text_of_decode(
    tokenizers: dict[str, Tokenizer], kind: str, ids: list[int]
) -> None:
    whole = [token_id for token_id in ids if not (tokenizers[kind].token(token_id) or "").startswith("<0x")]

    streamed = "".join(pieces(Detokenizer(tokenizers[kind]), whole))

    assert streamed == tokenizers[kind].decode(whole)


@pytest.mark.parametrize("kind", KINDS)
@given(text=any_text)
def test_any_text_gives_the_text_of_decode(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    ids = tokenizers[kind].encode(text)

    streamed = "".join(pieces(Detokenizer(tokenizers[kind]), ids))

    assert streamed == tokenizers[kind].decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_every_language_gives_the_text_of_decode(
    tokenizers: dict[str, Tokenizer], texts: list[str], kind: str
) -> None:
    encoded = [tokenizers[kind].encode(text) for text in texts]

    streamed = ["".join(pieces(Detokenizer(tokenizers[kind]), ids)) for ids in encoded]

    assert streamed == [tokenizers[kind].decode(ids) for ids in encoded]


@pytest.mark.parametrize("kind", KINDS)
@given(text=any_text, cut=st.floats(min_value=0, max_value=1))
def test_prompt_and_output_are_together_the_text_of_decode(
    tokenizers: dict[str, Tokenizer], kind: str, text: str, cut: float
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("the house " + text + " keeps 鬱 warm")
    prompt, output = ids[: round(cut * len(ids))], ids[round(cut * len(ids)) :]

    answer = "".join(pieces(Detokenizer(tokenizer, prompt=prompt), output))

    assert prompt_text(tokenizer, prompt) + answer == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - SPOILS_RUNS))
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@given(prompt=random_ids, output=random_ids)
def test_any_prompt_and_any_output_are_together_the_text_of_decode(
    tokenizers: dict[str, Tokenizer],
    kind: str,
    skip_special_tokens: bool,
    prompt: list[int],
    output: list[int],
) -> None:
    tokenizer = tokenizers[kind]

    answer = "".join(pieces(Detokenizer(tokenizer, skip_special_tokens, prompt), output))

    begun = prompt_text(tokenizer, prompt, skip_special_tokens)
    assert begun + answer == tokenizer.decode(prompt + output, skip_special_tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_long_prompt_is_read_by_tokens_only_at_its_end(
    tokenizers: dict[str, Tokenizer], kind: str, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, num_pushed = tokenizers[kind], 0
    ids = tokenizer.encode("the house keeps 鬱 warm " * 200 + "鬱")
    prompt = ids[: len(ids) - cut]
    expected = "".join(map(Detokenizer(tokenizer).push, prompt))
    push = Detokenizer.push

    def counted(detokenizer: Detokenizer, token_id: int) -> str:
        nonlocal num_pushed
        num_pushed += 1
        return push(detokenizer, token_id)

    monkeypatch.setattr(Detokenizer, "push", counted)

    assert prompt_text(tokenizer, prompt) == expected
    assert num_pushed <= 64


@pytest.mark.parametrize("kind", sorted(SPOILS_RUNS))
@given(prompt=random_ids, output=random_ids)
def test_the_end_of_a_prompt_is_all_that_its_output_depends_on(
    tokenizers: dict[str, Tokenizer], kind: str, prompt: list[int], output: list[int]
) -> None:
    tokenizer = tokenizers[kind]
    whole = [token_id for token_id in prompt if not (tokenizer.token(token_id) or "").startswith("<0x")]
    read_all = Detokenizer(tokenizer)
    for token_id in whole:
        read_all.push(token_id)

    answer = pieces(Detokenizer(tokenizer, prompt=whole), output)

    assert answer == pieces(read_all, output)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"byte_level"}))
def test_the_first_word_of_an_output_keeps_its_space(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    prompt = tokenizer.encode("the house")
    output = tokenizer.encode("the house warm")[len(prompt) :]

    assert tokenizer.decode(output) == "warm"
    assert "".join(pieces(Detokenizer(tokenizer, prompt=prompt), output)) == " warm"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_with_metaspace"])
def test_half_a_character_is_never_sent(
    tokenizers: dict[str, Tokenizer], texts: list[str], kind: str
) -> None:
    ids = [token_id for text in texts for token_id in tokenizers[kind].encode(text)]

    sent = pieces(Detokenizer(tokenizers[kind]), ids)

    assert not any(REPLACEMENT in piece for piece in sent)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_with_metaspace"])
def test_a_character_is_sent_with_its_last_byte(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = byte_ids(tokenizer, "🤦🏽".encode())

    sent = pieces(Detokenizer(tokenizer), ids)

    assert sent == ["", "", "", "🤦", "", "", "", "🏽", ""]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(data=st.binary(max_size=30))
def test_bytes_that_are_not_utf8_become_one_mark_per_broken_character(
    tokenizers: dict[str, Tokenizer], kind: str, data: bytes
) -> None:
    ids = byte_ids(tokenizers[kind], b"x" + data)

    streamed = "".join(pieces(Detokenizer(tokenizers[kind]), ids))

    assert streamed == "x" + data.decode(errors="replace")


def test_a_wrong_byte_does_not_take_back_the_characters_before_it(tokenizers: dict[str, Tokenizer]) -> None:
    ids = byte_ids(tokenizers["byte_fallback"], "你".encode() + b"\xff" + "好".encode())

    sent = pieces(Detokenizer(tokenizers["byte_fallback"]), ids)

    assert sent == ["", "", "你", REPLACEMENT, "", "", "好", ""]


def test_wrong_bytes_are_not_held_back_for_ever(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback_with_metaspace"]
    detokenizer = Detokenizer(tokenizer)

    sent = [detokenizer.push(token_id) for token_id in byte_ids(tokenizer, b"\xff" * 8)]

    assert "".join(sent) == REPLACEMENT * 8


def test_flush_marks_a_character_that_was_never_completed(tokenizers: dict[str, Tokenizer]) -> None:
    detokenizer = Detokenizer(tokenizers["byte_level"])
    for token_id in byte_ids(tokenizers["byte_level"], "€".encode()[:2]):
        detokenizer.push(token_id)

    assert detokenizer.flush() == REPLACEMENT


def test_the_first_word_loses_its_space_and_the_others_keep_theirs(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]

    sent = pieces(Detokenizer(tokenizer), tokenizer.encode("the house the", add_special_tokens=False))

    assert "".join(sent) == "the house the"
    assert not sent[0].startswith(" ")


def test_special_and_unknown_ids_have_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["word_piece"]
    words = tokenizer.encode("the house", add_special_tokens=False)

    sent = pieces(Detokenizer(tokenizer), [1, *words, 2, 100_000])

    assert "".join(sent) == "the house"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [200, 2_000])
def test_the_cost_of_a_token_does_not_grow_with_the_output(
    directories: dict[str, Path], tokenizers: dict[str, Tokenizer], kind: str, num_tokens: int
) -> None:
    meter = Meter(Backend.from_file(str(directories[kind] / "tokenizer.json")))
    tokenizer = replace(tokenizers[kind], _backend=meter)  # type: ignore[arg-type] # a stand-in that counts
    text_ids = tokenizers[kind].encode("the 鬱 house 👩‍👩‍👧‍👦 warm.")
    garbage_ids = byte_ids(tokenizer, b"\xff\xe4") if "byte" in kind else []
    ids = (text_ids * num_tokens)[:num_tokens] + (garbage_ids * num_tokens)[:num_tokens]

    pieces(Detokenizer(tokenizer), ids)

    assert meter.num_decoded <= 16 * len(ids)


def test_a_token_is_spelled_once_for_all_answers(tokenizers: dict[str, Tokenizer]) -> None:
    asked: list[int] = []

    def name_of(token_id: int) -> str | None:
        asked.append(token_id)
        return tokenizers["byte_level"].token(token_id)

    plain = tokenizers["byte_level"].spelled
    assert plain is not None
    tokenizer = replace(tokenizers["byte_level"], spelled=SpelledTokens(plain.spelling, name_of))
    ids, unknown_id = tokenizer.encode("the warm house, the 鬱 house"), 1_000_000

    texts = [Detokenizer(tokenizer).push_all([*ids, unknown_id]) for _ in range(3)]

    assert texts == ["the warm house, the 鬱 house"] * 3
    assert sorted(asked) == sorted({*ids, unknown_id})


@dataclass(slots=True)
class Meter:
    """Counts the ids that it decodes. Mutable; written by `decode`."""

    backend: Backend
    num_decoded: int = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return a token per byte."""
    if tokenizer.spelled is None:
        names = {bytes([byte]): f"<0x{byte:02X}>" for byte in range(256)}
        id_by_name = {tokenizer.token(i): i for i in range(700)}
        return [id_by_name[names[bytes([byte])]] for byte in data]
    tokens = ((i, tokenizer.token(i)) for i in reversed(range(700)))
    id_by_bytes = {tokenizer.spelled[i]: i for i, token in tokens if token is not None}
    return [id_by_bytes[bytes([byte])] for byte in data]


def test_tokens_without_text_are_not_decoded_again_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Backend(models.WordPiece({"<unk>": 0, "warm": 1, "##": 2}, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    decode, sizes = Tokenizer.decode, []

    def recorded(self: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        sizes.append(len(ids))
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", recorded)

    streamed = pieces(Detokenizer(Tokenizer.load(tmp_path)), [1, *[2] * 100, 1])

    assert "".join(streamed) == "warm warm"
    assert max(sizes) < 20
