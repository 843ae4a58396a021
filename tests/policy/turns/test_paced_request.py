"""When tokens are due."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import BATCH_PATIENCE_S, Pace
from hearth.policy.turns.paced_request import PacedRequest

PACE = Pace(first_token_s=0.5, tokens_per_s=10.0, max_pause_s=1.5)


def test_the_first_token_is_due_by_its_target() -> None:
    assert PacedRequest(PACE, arrived_s=3.0, num_tokens=0, now_s=99.0).due_s == 3.5


def test_the_next_token_is_due_by_the_pace_of_a_reader() -> None:
    assert PacedRequest(PACE, arrived_s=3.0, num_tokens=5, now_s=3.9).due_s == 4.0


def test_no_pause_is_longer_than_allowed_however_far_ahead() -> None:
    assert PacedRequest(PACE, arrived_s=3.0, num_tokens=500, now_s=4.0).due_s == 5.5


def test_what_nobody_reads_along_with_is_patient_but_not_for_ever() -> None:
    batch = Pace(tokens_per_s=0.0)
    assert PacedRequest(batch, arrived_s=3.0, num_tokens=0, now_s=0.0).due_s == 3.0 + BATCH_PATIENCE_S
    assert PacedRequest(batch, arrived_s=3.0, num_tokens=1, now_s=9.0).due_s == 9.0 + BATCH_PATIENCE_S


@given(
    st.floats(0, 1e6), st.integers(0, 10_000), st.floats(0, 1e3), st.floats(0.01, 100), st.floats(0.01, 1000)
)
def test_a_token_more_never_makes_the_next_one_due_sooner(
    arrived_s: float, num_tokens: int, after_s: float, first_token_s: float, tokens_per_s: float
) -> None:
    pace = Pace(first_token_s, tokens_per_s, max_pause_s=1e9)
    before = PacedRequest(pace, arrived_s, num_tokens, arrived_s)
    after = PacedRequest(pace, arrived_s, num_tokens + 1, arrived_s + after_s)
    assert after.due_s >= before.due_s


@given(
    st.floats(0, 100), st.lists(st.floats(0, 10), min_size=1), st.sampled_from([PACE, Pace(tokens_per_s=0.0)])
)
def test_a_request_that_goes_on_elsewhere_is_due_when_it_would_have_been(
    arrived_s: float, gaps_s: list[float], pace: Pace
) -> None:
    request, now_s = PacedRequest(pace, arrived_s, 0, arrived_s), arrived_s
    for gap_s in gaps_s:
        now_s += gap_s
        request.sent(now_s)
    elsewhere = PacedRequest(pace, arrived_s, len(gaps_s), now_s)
    assert (elsewhere.due_s, elsewhere.num_tokens) == (request.due_s, request.num_tokens)
