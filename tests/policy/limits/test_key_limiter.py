from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import RateStatus, WindowStatus
from hearth.policy.limits.key_limiter import (
    MAX_ESTIMATE_TOKENS,
    MIN_KEYS,
    KeyLimiter,
    KeyLimits,
    LimitKind,
    LimitRefusal,
    Ticket,
)
from hearth.policy.limits.sliding_window import WINDOW_S

LIMITS = KeyLimits(requests_per_min=3, tokens_per_min=100, concurrent=2)
NONE = KeyLimits()


def begin(limiter: KeyLimiter[str], now_s: float = 0.0, limits: KeyLimits = LIMITS, key: str = "k") -> Ticket:
    ticket = limiter.begin(key, limits, now_s)
    assert isinstance(ticket, Ticket)
    return ticket


def tokens_left(limiter: KeyLimiter[str], now_s: float = 0.0) -> int:
    status = limiter.status("k", LIMITS, now_s).tokens
    assert status is not None
    return status.remaining


def test_a_request_more_than_the_limit_has_to_wait_until_the_first_is_a_minute_old() -> None:
    limiter = KeyLimiter[str]()
    for now_s in (0.0, 10.0, 20.0):
        limiter.end(begin(limiter, now_s), 0, now_s)
    assert limiter.begin("k", LIMITS, 25.0) == LimitRefusal(LimitKind.REQUESTS, 3, 3, 1, retry_s=35.0)
    assert isinstance(limiter.begin("other", LIMITS, 25.0), Ticket)
    limiter.end(begin(limiter, 60.0), 0, 60.0)
    assert isinstance(limiter.begin("k", LIMITS, 60.0), LimitRefusal)


def test_a_place_among_those_that_run_comes_back_once_however_often_its_request_ends() -> None:
    limiter = KeyLimiter[str]()
    limits = KeyLimits(concurrent=2)
    one, _ = begin(limiter, limits=limits), begin(limiter, limits=limits)
    refused = limiter.begin("k", limits, 0.0)
    assert refused == LimitRefusal(LimitKind.CONCURRENT, 2, 2, 1, retry_s=None)
    for _ in range(3):
        limiter.end(one, 5, 0.0)
        limiter.withdraw(one)
    begin(limiter, limits=limits)
    assert isinstance(limiter.begin("k", limits, 0.0), LimitRefusal)


def test_tokens_are_charged_in_advance_and_settled_to_what_there_was() -> None:
    limiter = KeyLimiter[str]()
    ticket = begin(limiter)
    assert limiter.charge(ticket, LIMITS, 30, 50, 0.0) is None
    assert tokens_left(limiter) == 20
    limiter.end(ticket, 30 + 7, 5.0)
    assert tokens_left(limiter, 5.0) == 63
    assert tokens_left(limiter, WINDOW_S) == 100


def test_tokens_beyond_the_estimate_are_charged_at_the_end_also_beyond_the_limit() -> None:
    limiter = KeyLimiter[str]()
    ticket = begin(limiter)
    assert limiter.charge(ticket, LIMITS, 90, None, 0.0) is None  # which leaves an estimate of 10
    assert tokens_left(limiter) == 0
    limiter.end(ticket, 90 + 500, 30.0)
    assert tokens_left(limiter, 61.0) == 0
    assert tokens_left(limiter, 91.0) == 100


def test_the_estimate_of_a_long_answer_has_an_end() -> None:
    limiter, limits = KeyLimiter[str](), KeyLimits(tokens_per_min=1_000_000)
    ticket = begin(limiter, limits=limits)
    for max_tokens in (None, 100_000):
        assert limiter.charge(ticket, limits, 10, max_tokens, 0.0) is None
    assert ticket.charged_tokens == 2 * (10 + MAX_ESTIMATE_TOKENS)


def test_several_answers_of_one_request_are_never_estimated_at_more_than_the_limit() -> None:
    limiter = KeyLimiter[str]()
    ticket = begin(limiter)
    for num_prompt_tokens in (20, 0, 0, 0):
        assert limiter.charge(ticket, LIMITS, num_prompt_tokens, 60, 0.0) is None
    assert ticket.charged_tokens == 100


def test_a_prompt_that_never_fits_is_refused_without_a_time() -> None:
    limiter = KeyLimiter[str]()
    ticket = begin(limiter)
    assert limiter.charge(ticket, LIMITS, 40, 10, 0.0) is None
    refused = limiter.charge(ticket, LIMITS, 70, 10, 0.0)
    assert refused == LimitRefusal(LimitKind.TOKENS, 100, 0, 120, retry_s=None)


def test_a_request_that_is_refused_for_its_tokens_counts_for_nothing() -> None:
    limiter = KeyLimiter[str]()
    limiter.charge(begin(limiter), LIMITS, 60, 1, 0.0)
    for now_s in (10.0, 20.0, 30.0):
        ticket = begin(limiter, now_s)
        refused = limiter.charge(ticket, LIMITS, 50, 1, now_s)
        assert refused == LimitRefusal(LimitKind.TOKENS, 100, 61, 51, retry_s=WINDOW_S - now_s)
        limiter.withdraw(ticket)
    assert limiter.status("k", LIMITS, 30.0) == RateStatus(
        WindowStatus(3, 2, 30.0), WindowStatus(100, 39, 30.0)
    )


def test_a_changed_limit_counts_what_was_taken_before() -> None:
    limiter = KeyLimiter[str]()
    for _ in range(5):
        begin(limiter, limits=NONE)
    assert isinstance(limiter.begin("k", KeyLimits(concurrent=5), 0.0), LimitRefusal)
    assert isinstance(limiter.begin("k", KeyLimits(requests_per_min=5), 0.0), LimitRefusal)
    assert isinstance(limiter.begin("k", KeyLimits(requests_per_min=6, concurrent=6), 0.0), Ticket)
    assert limiter.status("k", NONE, 0.0) == RateStatus(None, None)


#: (time since the one before, what, which request, tokens)
MOVES = st.lists(
    st.tuples(
        st.floats(0.0, 20.0),
        st.sampled_from(["begin", "begin", "charge", "charge", "end", "end", "withdraw", "status"]),
        st.integers(0, 30),
        st.integers(0, 80),
    ),
    max_size=60,
)


@given(
    MOVES,
    st.builds(
        KeyLimits,
        st.none() | st.integers(1, 6),
        st.none() | st.integers(1, 200),
        st.none() | st.integers(1, 4),
    ),
)
def test_whatever_happens_no_limit_is_passed_and_every_place_comes_back(
    moves: list[tuple[float, str, int, int]], limits: KeyLimits
) -> None:
    limiter, now_s = KeyLimiter[str](), 0.0
    tickets: list[Ticket] = []
    begun: dict[Ticket, float] = {}
    charged: list[tuple[Ticket, float, int]] = []
    for later_s, kind, at, num_tokens in moves:
        now_s += later_s
        if kind == "begin":
            ticket = limiter.begin("k", limits, now_s)
            if isinstance(ticket, Ticket):
                tickets.append(ticket)
                begun[ticket] = now_s
            continue
        limiter.status("k", limits, now_s)
        if not tickets or kind == "status":
            continue
        ticket = tickets[at % len(tickets)]
        if kind == "charge" and ticket.is_open:
            before = ticket.charged_tokens
            if limiter.charge(ticket, limits, num_tokens, 10, now_s) is None:
                charged.append((ticket, now_s, ticket.charged_tokens - before))
        elif kind == "end":
            limiter.end(ticket, min(num_tokens, ticket.charged_tokens), now_s)
        elif kind == "withdraw" and ticket.is_open:
            limiter.withdraw(ticket)
            del begun[ticket]
            charged = [one for one in charged if one[0] is not ticket]
        num_open = sum(one.is_open for one in tickets)
        assert tickets[0].state.num_running == num_open
        assert limits.concurrent is None or num_open <= limits.concurrent
    for from_s in begun.values():
        within = sum(from_s <= at_s < from_s + WINDOW_S for at_s in begun.values())
        assert limits.requests_per_min is None or within <= limits.requests_per_min
    never_ended = [one for one in charged if one[0].is_open]
    for _, from_s, _ in never_ended:  # what ended has given tokens back
        total = sum(amount for _, at_s, amount in never_ended if from_s <= at_s < from_s + WINDOW_S)
        assert limits.tokens_per_min is None or total <= limits.tokens_per_min
    for ticket in tickets:
        limiter.end(ticket, 0, now_s)
    assert not tickets or tickets[0].state.num_running == 0


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 10_000)), max_size=200))
def test_keys_that_have_not_asked_for_a_minute_are_forgotten(asked: list[tuple[float, int]]) -> None:
    limiter, now_s = KeyLimiter[str](), 0.0
    recent: dict[str, float] = {}
    for later_s, number in asked:
        now_s += later_s
        limiter.status(f"unknown {number}", LIMITS, now_s)
        limiter.end(begin(limiter, now_s, NONE, f"k{number}"), 0, now_s)
        recent = {key: at_s for key, at_s in recent.items() if at_s + WINDOW_S > now_s} | {
            f"k{number}": now_s
        }
    assert len(limiter) <= max(MIN_KEYS, 2 * len(asked))
    limiter._max_states = 0
    begin(limiter, now_s, NONE, "another")
    assert len(limiter) == len(recent.keys() | {"another"})
