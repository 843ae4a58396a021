"""Tickets, and the window of their numbers against a plain set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import LOCAL, NodeId, WorkerId
from hearth.node.tickets import (
    STORE_TICKET_BYTES,
    WINDOW,
    WORKER_TICKET_BYTES,
    TicketCheck,
    TicketClaim,
    TicketIssuer,
)

SOURCE = NodeId("a" * 48 + ".123456789012345")
WORKER = WorkerId(f"{SOURCE}/w123456.123456789")


def test_a_ticket_admits_its_node_once() -> None:
    issuer = TicketIssuer()
    check = TicketCheck(issuer.key)
    first, second = issuer.issue(SOURCE), issuer.issue(LOCAL)
    assert {len(first), len(second)} == {STORE_TICKET_BYTES}

    assert [check.admit(ticket) for ticket in (second, first)] == [TicketClaim(LOCAL), TicketClaim(SOURCE)]
    assert [check.admit(ticket) for ticket in (second, first)] == [None, None]


def test_a_ticket_to_a_worker_admits_to_no_other_and_not_to_the_store() -> None:
    issuer = TicketIssuer()
    check = TicketCheck(issuer.key)
    ticket, other = issuer.issue(SOURCE, WORKER), issuer.issue(SOURCE, WorkerId("w0"))
    assert len(ticket) == WORKER_TICKET_BYTES
    begin, end = STORE_TICKET_BYTES - 32, WORKER_TICKET_BYTES - 32
    of_store = ticket[:begin] + ticket[end:]
    of_other = ticket[:begin] + other[begin:end] + ticket[end:]

    assert [check.admit(forged) for forged in (of_store, of_other)] == [None, None]
    assert check.admit(ticket) == TicketClaim(SOURCE, WORKER)
    assert check.admit(ticket) is None


def test_a_ticket_for_another_life_is_refused() -> None:
    earlier, issuer = TicketIssuer(), TicketIssuer()
    check = TicketCheck(issuer.key)
    assert check.admit(earlier.issue(SOURCE)) is None


def test_tickets_of_a_lost_node_are_void() -> None:
    issuer = TicketIssuer()
    check = TicketCheck(issuer.key)
    check.refuse(SOURCE)
    assert check.admit(issuer.issue(SOURCE)) is None
    assert check.admit(issuer.issue(LOCAL)) == TicketClaim(LOCAL)


@given(st.integers(0, STORE_TICKET_BYTES - 1), st.integers(1, 255))
def test_a_changed_ticket_is_refused_and_uses_nothing_up(at: int, change: int) -> None:
    issuer = TicketIssuer()
    check = TicketCheck(issuer.key)
    ticket = issuer.issue(SOURCE)
    forged = bytearray(ticket)
    forged[at] ^= change

    for bad in (bytes(forged), ticket[:at], ticket + b"\0", b""):
        assert check.admit(bad) is None
    assert check.admit(ticket) == TicketClaim(SOURCE)


@given(st.lists(st.integers(-2 * WINDOW, 2 * WINDOW), max_size=200), st.data())
def test_each_number_is_accepted_once_within_the_window(steps: list[int], data: st.DataObject) -> None:
    check = TicketCheck(b"k" * 32)
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
    issuer = TicketIssuer()
    check = TicketCheck(issuer.key)
    tickets = [issuer.issue(SOURCE) for _ in range(WINDOW + 1)]
    assert check.admit(tickets[-1]) == TicketClaim(SOURCE)
    assert check.admit(tickets[1]) == TicketClaim(SOURCE)
    assert check.admit(tickets[0]) is None
