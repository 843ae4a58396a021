"""Tickets, and the window of their numbers against a plain set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import LOCAL, NodeId
from hearth.node.tickets import TICKET_BYTES, WINDOW, TicketCheck, TicketIssuer

TARGET, SOURCE = NodeId("gpu-2.1"), NodeId("a" * 48 + ".123456789012345")


def test_a_ticket_admits_its_node_once() -> None:
    issuer = TicketIssuer(TARGET)
    check = TicketCheck(TARGET, issuer.key)
    first, second = issuer.issue(SOURCE), issuer.issue(LOCAL)
    assert {len(first), len(second)} == {TICKET_BYTES}

    assert [check.admit(ticket) for ticket in (second, first)] == [LOCAL, SOURCE]
    assert [check.admit(ticket) for ticket in (second, first)] == [None, None]


def test_a_ticket_for_another_life_is_refused() -> None:
    earlier, issuer = TicketIssuer(NodeId("gpu-2")), TicketIssuer(TARGET)
    check = TicketCheck(TARGET, issuer.key)
    assert check.admit(earlier.issue(SOURCE)) is None
    assert TicketCheck(NodeId("gpu-2"), issuer.key).admit(issuer.issue(SOURCE)) is None


@given(st.integers(0, TICKET_BYTES - 1), st.integers(1, 255))
def test_a_changed_ticket_is_refused_and_uses_nothing_up(at: int, change: int) -> None:
    issuer = TicketIssuer(TARGET)
    check = TicketCheck(TARGET, issuer.key)
    ticket = issuer.issue(SOURCE)
    forged = bytearray(ticket)
    forged[at] ^= change

    for bad in (bytes(forged), ticket[:at], ticket + b"\0", b""):
        assert check.admit(bad) is None
    assert check.admit(ticket) == SOURCE


@given(st.lists(st.integers(-2 * WINDOW, 2 * WINDOW), max_size=200), st.data())
def test_each_number_is_accepted_once_within_the_window(steps: list[int], data: st.DataObject) -> None:
    check = TicketCheck(TARGET, b"k" * 32)
    used: set[int] = set()
    number = data.draw(st.integers(1, 1 << 40))
    for step in steps:
        number = max(1, data.draw(st.sampled_from(sorted(used))) if used and not step % 3 else number + step)
        highest = max([number, *used])
        expected = number not in used and highest - number < WINDOW
        assert check._use(number) is expected
        if expected:
            used.add(number)
        assert check._used < 1 << WINDOW


def test_the_window_ends_where_it_says() -> None:
    issuer = TicketIssuer(TARGET)
    check = TicketCheck(TARGET, issuer.key)
    tickets = [issuer.issue(SOURCE) for _ in range(WINDOW + 1)]
    assert check.admit(tickets[-1]) == SOURCE
    assert check.admit(tickets[1]) == SOURCE
    assert check.admit(tickets[0]) is None
