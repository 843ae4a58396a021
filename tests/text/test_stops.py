from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.text.stops import StopMatch, StopStrings

letters = st.text("ab ", max_size=12)
stop_lists = st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3)


@dataclass(frozen=True, slots=True)
class Outcome:
    text: str
    is_stopped: bool


def stream(stops: StopStrings, pieces: list[str]) -> Outcome:
    sent = ""
    for piece in pieces:
        match = stops.push(piece)
        sent += match.text
        if match.stop is not None:
            return Outcome(sent + stops.flush(), True)
    return Outcome(sent + stops.flush(), False)


def oracle(text: str, stops: list[str], include: bool, num_skipped: int = 0) -> Outcome:
    """Read the whole text letter by letter until a stop string ends there, behind the skipped letters."""
    for end in range(num_skipped + 1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            start = end - max(map(len, ended))
            return Outcome(text[: end if include else start], True)
    return Outcome(text, False)


@given(pieces=st.lists(letters, max_size=6), stops=stop_lists, include=st.booleans())
def test_a_stream_ends_where_the_whole_text_would(pieces: list[str], stops: list[str], include: bool) -> None:
    outcome = stream(StopStrings(stops, include), pieces)

    assert outcome == oracle("".join(pieces), stops, include)


@given(pieces=st.lists(letters, max_size=6), stops=stop_lists)
def test_holds_back_only_what_may_begin_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher, sent, seen = StopStrings(stops), "", ""
    for piece in pieces:
        match = matcher.push(piece)
        sent, seen = sent + match.text, seen + piece
        if match.stop is not None:
            return
        held = seen.removeprefix(sent)
        assert sent + held == seen
        assert not held or any(stop.startswith(held) for stop in stops)


@given(skipped=letters, pieces=st.lists(letters, max_size=6), stops=stop_lists, include=st.booleans())
def test_a_stop_string_counts_if_it_ends_after_the_skipped_text(
    skipped: str, pieces: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopStrings(stops, include)
    begin = matcher.skip(skipped)
    outcome = stream(matcher, pieces)

    assert Outcome(begin + outcome.text, outcome.is_stopped) == oracle(
        skipped + "".join(pieces), stops, include, num_skipped=len(skipped)
    )


def test_a_piece_costs_the_same_however_many_and_long_the_stop_strings_are() -> None:
    """To compare every piece with every beginning of every stop string would take many minutes."""
    stops = StopStrings(["a" * 8_000 + "b", *(letter * 8_000 for letter in "bcdefghijklmnop")])
    num_pieces = 20_000

    sent = "".join(stops.push("aaaa").text for _ in range(num_pieces))

    assert sent + stops.flush() == "aaaa" * num_pieces
    assert len(sent) == 4 * num_pieces - 8_000


def test_a_stop_string_split_across_pieces_is_never_sent() -> None:
    stops = StopStrings(["</answer>"])

    matches = [stops.push(piece) for piece in ("42 <", "/ans", "wer", "> more")]

    assert matches == [
        StopMatch("42 "),
        StopMatch(""),
        StopMatch(""),
        StopMatch("", "</answer>"),
    ]


def test_a_false_start_is_sent_as_soon_as_it_cannot_match() -> None:
    stops = StopStrings(["</answer>"])
    stops.push("a </ans")

    match = stops.push("i")

    assert match == StopMatch("</ansi")


def test_the_stop_string_that_is_complete_first_wins() -> None:
    match = StopStrings(["abcd", "bc"]).push("xabcd")

    assert match == StopMatch("xa", "bc")


def test_the_longest_of_stop_strings_that_end_together_wins() -> None:
    match = StopStrings(["bc", "abc"]).push("xabcd")

    assert match == StopMatch("x", "abc")


def test_a_kept_stop_string_ends_the_text() -> None:
    match = StopStrings(["\n\n"], include=True).push("one\n\ntwo")

    assert match == StopMatch("one\n\n", "\n\n")


def test_flush_gives_what_was_held_back() -> None:
    stops = StopStrings(["STOP"])
    stops.push("full ST")

    assert stops.flush() == "ST"


def test_text_after_a_stop_string_is_a_bug_of_the_caller() -> None:
    stops = StopStrings(["."])
    stops.push("end.")

    with pytest.raises(AssertionError, match="after a stop string"):
        stops.push("more")
