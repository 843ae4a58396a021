from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.api.connections import ConnectionLimits, Connections


class Line:
    """A connection that remembers whether it was closed from here."""

    def __init__(self) -> None:
        self.is_open = True

    def abort(self) -> None:
        self.is_open = False


@given(max_open_files=st.integers(8, 1 << 20))
def test_all_connections_fit_into_the_descriptors_however_many_come_at_once(max_open_files: int) -> None:
    limits = ConnectionLimits.within(max_open_files)

    assert 1 <= limits.max_strangers <= limits.max_known
    assert 2 * limits.max_strangers + limits.max_known <= max_open_files - min(128, max_open_files // 2)


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["add", "let_in", "answer", "wait", "remove"]), st.integers(0, 9))
    )
)
def test_limits_hold_and_nobody_who_is_being_answered_is_closed(calls: list[tuple[str, int]]) -> None:
    limits = ConnectionLimits(2, 3)
    connections = Connections(limits)
    lines: list[Line] = []  # open ones, oldest first
    known: set[Line] = set()
    answering: set[Line] = set()
    for call, number in calls:
        if call == "add":
            lines.append(Line())
            connections.add(lines[-1])
            assert lines[-1].is_open
        elif lines:
            line = lines[number % len(lines)]
            match call:
                case "let_in":
                    if connections.let_in(line):
                        known.add(line)
                    else:
                        assert len(answering) == limits.max_known
                case "answer":
                    connections.answer(line)
                    answering |= {line} & known
                case "wait":
                    connections.wait(line)
                    answering.discard(line)
                case "remove":
                    connections.remove(line)
                    line.is_open = False
                    answering.discard(line)
        assert all(line.is_open for line in answering)
        lines = [line for line in lines if line.is_open]
        assert sum(line in known for line in lines) <= limits.max_known
        assert sum(line not in known for line in lines) <= limits.max_strangers


def test_those_who_give_way_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    closed: list[None] = []
    connections = Connections(ConnectionLimits(2, 3), lambda: closed.append(None))
    lines = [Line() for _ in range(10)]
    with caplog.at_level(logging.WARNING):
        for line in lines:
            connections.add(line)

    assert [line.is_open for line in lines] == [False] * 8 + [True] * 2
    assert len(closed) == 8
    assert caplog.text.count("connections_closed max_strangers=2 max_known=3") == 1
