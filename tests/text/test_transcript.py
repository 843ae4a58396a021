from __future__ import annotations

from collections.abc import Sequence

import pytest

from hearth.core.types import FinishReason, SamplingParams
from hearth.text.tokenizer import Tokenizer
from hearth.text.transcript import TextDelta, Transcript

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
TEXT = "The hearth keeps the house warm; the house keeps the hearth."


@pytest.fixture(scope="session")
def tokenizer(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte_level"]


def read(
    tokenizer: Tokenizer,
    ids: list[int],
    params: SamplingParams,
    last: FinishReason | None = LENGTH,
    prompt: Sequence[int] = (),
) -> list[TextDelta]:
    """The pieces of an answer, the engine giving `last` with its last token; ends where a piece does."""
    transcript, pieces = Transcript(tokenizer, params, prompt), []
    for at, token in enumerate(ids, start=1):
        pieces.append(transcript.push(token, last if at == len(ids) else None))
        if pieces[-1].finish_reason is not None:
            break
    return pieces


def text_of(pieces: list[TextDelta]) -> str:
    return "".join(piece.text for piece in pieces)


def test_the_pieces_are_the_text_and_only_the_last_has_a_finish_reason(tokenizer: Tokenizer) -> None:
    pieces = read(tokenizer, tokenizer.encode(TEXT), SamplingParams())

    assert text_of(pieces) == TEXT
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [LENGTH]


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("last", [STOP, LENGTH])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(include_stop_str_in_output=True)])
def test_an_answer_read_in_parts_has_the_text_of_its_pieces(
    tokenizers: dict[str, Tokenizer], kind: str, last: FinishReason, params: SamplingParams
) -> None:
    tokenizer = tokenizers[kind]
    prompt, ids = tokenizer.encode("a鬱")[:-1], tokenizer.encode("鬱 the hearth \u00e9 keeps")
    for end in range(1, len(ids) + 1):
        for answer in (ids[:end], [*ids[-end:], 10**6, 0]):
            pieces = read(tokenizer, answer, params, last, prompt)

            for cut in range(len(answer)):
                transcript = Transcript(tokenizer, params, prompt)
                begun = transcript.push_all(answer[:cut], None) if cut else ""
                assert begun + transcript.push_all(answer[cut:], last) == text_of(pieces)


def test_no_piece_holds_half_a_character(tokenizer: Tokenizer) -> None:
    pieces = read(tokenizer, tokenizer.encode("a鬱b"), SamplingParams())

    assert [piece.text for piece in pieces if piece.text] == ["a", "鬱", "b"]


@pytest.mark.parametrize("end", range(1, len(TEXT)))
def test_a_cancelled_answer_has_what_was_held_back_for_a_stop_string(tokenizer: Tokenizer, end: int) -> None:
    ids = tokenizer.encode(f"{TEXT[:end]}鬱")[:-1]
    transcript = Transcript(tokenizer, SamplingParams(stop=("house keeps the hearth. ",)), ())
    text = "".join(transcript.push(token, None).text for token in ids)

    assert text + transcript.flush() == f"{TEXT[:end]}\ufffd"


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer: Tokenizer) -> None:
    pieces = read(tokenizer, tokenizer.encode("a鬱")[:-1], SamplingParams())

    assert text_of(pieces) == "a\ufffd"


@pytest.mark.parametrize(("include", "expected"), [(False, "The hearth keeps the "), (True, TEXT[:26])])
def test_a_stop_string_ends_the_answer_where_it_begins(
    tokenizer: Tokenizer, include: bool, expected: str
) -> None:
    params = SamplingParams(stop=["house", "nowhere"], include_stop_str_in_output=include)
    pieces = read(tokenizer, tokenizer.encode(TEXT), params, last=None)

    assert text_of(pieces) == expected
    assert (pieces[-1].finish_reason, pieces[-1].stop) == (STOP, "house")


def test_a_stop_string_that_the_last_token_completes_is_a_stop(tokenizer: Tokenizer) -> None:
    pieces = read(tokenizer, tokenizer.encode("warm;"), SamplingParams(stop=";"), last=LENGTH)

    assert (text_of(pieces), pieces[-1].finish_reason) == ("warm", STOP)


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace", "word_piece"])
@pytest.mark.parametrize(("stop", "expected"), [((), " warm"), (("m",), " war"), ((" ",), "")])
def test_an_answer_begins_with_the_space_that_divides_it_from_its_prompt(
    tokenizers: dict[str, Tokenizer], kind: str, stop: tuple[str, ...], expected: str
) -> None:
    tokenizer = tokenizers[kind]
    prompt = tokenizer.encode("the house")
    output = tokenizer.encode("the house warm")[len(prompt) :]

    pieces = read(tokenizer, output, SamplingParams(stop=stop), prompt=prompt)

    assert text_of(pieces) == expected


def test_an_offset_is_where_a_tokens_own_text_begins(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("ho"), *tokenizer.encode("ho"), *tokenizer.encode("鬱"), *tokenizer.encode("x")]
    starts = [len(tokenizer.decode(ids[:at]).rstrip("\ufffd")) for at in range(len(ids))]

    pieces = read(tokenizer, ids, SamplingParams(stop=["hoho!", "鬱xx"]))

    assert text_of(pieces) == "hoho鬱x"
    assert not text_of(pieces[:3])
    assert [piece.offset for piece in pieces] == starts


def test_half_a_stop_string_is_held_back_and_given_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("warm") + tokenizer.encode("ho")
    pieces = read(tokenizer, ids, SamplingParams(stop="house"))

    assert text_of(pieces) == "warmho"
    assert text_of(pieces[:-1]) == "warm"[: len(text_of(pieces[:-1]))]


@pytest.mark.parametrize(("include", "expected"), [(False, "warm"), (True, "warm;")])
def test_a_stop_token_is_shown_only_if_asked_for(tokenizer: Tokenizer, include: bool, expected: str) -> None:
    params = SamplingParams(include_stop_str_in_output=include)
    pieces = read(tokenizer, tokenizer.encode("warm;"), params, last=STOP)

    assert text_of(pieces) == expected


@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, "a<|tool|>b")])
def test_special_tokens_are_skipped_unless_wanted(tokenizer: Tokenizer, skip: bool, expected: str) -> None:
    pieces = read(tokenizer, tokenizer.encode("a<|tool|>b"), SamplingParams(skip_special_tokens=skip))

    assert text_of(pieces) == expected


def test_stop_strings_do_not_count_within_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("z;z;z;z;")
    params = SamplingParams(stop=";", min_tokens=4)

    pieces = read(tokenizer, ids, params)

    assert len(ids) == 8
    assert (text_of(pieces), pieces[-1].finish_reason) == ("z;z;z", STOP)


def test_the_last_token_of_min_tokens_is_no_exception(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("z;")
    pieces = read(tokenizer, ids, SamplingParams(stop=";", min_tokens=len(ids)), last=LENGTH)

    assert (text_of(pieces), pieces[-1].finish_reason) == ("z;", LENGTH)


def test_a_stop_string_may_begin_before_min_tokens_and_end_after(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("stop it, stop it")
    num_before = next(at for at in range(1, len(ids)) if "it" in tokenizer.decode(ids[:at])) - 1
    params = SamplingParams(stop=["stop it"], min_tokens=num_before)

    pieces = read(tokenizer, ids, params)

    assert (text_of(pieces), pieces[-1].finish_reason) == ("", STOP)


def test_a_stop_string_within_min_tokens_does_not_count(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("stop it, stop it")
    num_first = next(at for at in range(1, len(ids)) if "it" in tokenizer.decode(ids[:at]))
    params = SamplingParams(stop=["stop it"], min_tokens=num_first)

    pieces = read(tokenizer, ids, params)

    assert (text_of(pieces), pieces[-1].finish_reason) == ("stop it, ", STOP)
