"""How long a worker may be silent: a slow step lives, one that hangs is found in a time that is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.batch.prompt_allowance import GROWTH
from hearth.policy.fleet.liveness import (
    MAX_SILENCE_S,
    TIMES_FIRST,
    TIMES_LONGEST,
    Silence,
    max_silence_s,
)

USUAL_S = st.floats(0.1, 3600.0)
LONGEST_S = st.none() | st.floats(1e-6, 1e5)


@pytest.mark.parametrize(
    ("waits_s", "num_missed"),
    [
        pytest.param([0.0, 0.0, 0.0], 3.0, id="it could run and hangs"),
        pytest.param([2.0, 2.0, 2.0], 0.0, id="it never had a core"),
        pytest.param([1.0, 1.5, 0.0], 1.75, id="it had one now and then"),
        pytest.param([9.0, 0.0, 0.0], 2.0, id="the heartbeat itself came late"),
        pytest.param([0.0, 0.0, 5.0], 0.5, id="it waited for several heartbeats"),
    ],
)
def test_a_silent_worker_misses_only_the_heartbeats_that_it_had_a_core_for(
    waits_s: list[float], num_missed: float
) -> None:
    silence, queued_s = Silence(heartbeat_s=2.0, queued_s=40.0), 40.0
    for wait_s in waits_s:
        queued_s += wait_s
        silence.beat(queued_s, was_heard=False)
    assert (silence.num_missed, silence.seconds) == (num_missed, 2.0 * num_missed)
    silence.beat(queued_s, was_heard=True)
    assert silence.num_missed == 0.0


def test_fast_steps_have_what_is_usual_and_slow_ones_more() -> None:
    assert max_silence_s(30.0, 0.02) == 30.0
    assert max_silence_s(30.0, 12.0) == 120.0
    assert max_silence_s(30.0, 90.0) == MAX_SILENCE_S
    assert max_silence_s(30.0, None) == 300.0, "nobody knows how fast the model is"


@given(USUAL_S, LONGEST_S)
def test_whatever_was_measured_a_hang_is_found_and_not_before_what_is_usual(
    usual_s: float, longest_s: float | None
) -> None:
    assert usual_s <= max_silence_s(usual_s, longest_s) <= max(usual_s, MAX_SILENCE_S)


@given(USUAL_S, st.floats(1e-6, 1e5), st.floats(1.0, 10.0))
def test_a_model_that_was_slower_never_has_less_time(usual_s: float, longest_s: float, times: float) -> None:
    assert max_silence_s(usual_s, longest_s) <= max_silence_s(usual_s, times * longest_s)


@given(USUAL_S, st.floats(1e-6, 1.0), st.lists(st.floats(0.1, float(GROWTH)), max_size=40))
def test_a_model_whose_steps_grow_as_they_may_is_never_taken_for_one_that_hangs(
    usual_s: float, first: float, growths: list[float]
) -> None:
    """From the first mark, by which nothing is known, to the last: as long as one mark takes a minute."""
    gap_s = longest_s = first * min(TIMES_FIRST * usual_s, MAX_SILENCE_S / TIMES_LONGEST)
    assert gap_s <= max_silence_s(usual_s, None)
    for growth in growths:
        gap_s = min(gap_s * growth, MAX_SILENCE_S / TIMES_LONGEST)
        assert gap_s < max_silence_s(usual_s, longest_s)
        longest_s = max(longest_s, gap_s)
