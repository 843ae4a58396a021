"""How many tokens of prompts fit into a step, by steps of devices that are plain formulas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.batch.prompt_allowance import FAIR_SHARE, FIRST_TOKENS, SPREAD_STEPS, PromptAllowance

MANY = 10**9  #: tokens that wait


def allowed(allowance: PromptAllowance, num_waiting_tokens: int = MANY) -> int:
    num_tokens = allowance.num_tokens(num_waiting_tokens)
    assert num_tokens is not None
    return num_tokens


def learned(rows_s: float, token_s: float, max_step_s: float, num_steps: int = 40) -> PromptAllowance:
    """An allowance that has seen steps without prompts, and with as many tokens as it allowed."""
    allowance = PromptAllowance(max_step_s)
    for _ in range(num_steps):
        allowance.measured(8, 0, rows_s)
        num_tokens = allowed(allowance)
        allowance.measured(8, num_tokens, rows_s + token_s * num_tokens)
    return allowance


def test_before_anything_is_measured_there_is_a_first_guess() -> None:
    assert PromptAllowance(0.05).num_tokens(0) == PromptAllowance(0.05).num_tokens(MANY) == FIRST_TOKENS


def test_without_a_limit_there_is_none_whatever_was_measured() -> None:
    allowance = PromptAllowance(math.inf)
    allowance.measured(8, 16, 0.5)
    assert allowance.num_tokens(MANY) is None


def test_a_step_of_prompts_alone_tells_the_price_of_a_token() -> None:
    allowance = PromptAllowance(0.06)
    allowance.measured(0, 2000, 0.04)
    assert allowed(allowance) == pytest.approx(3000, abs=1)


def test_a_few_prompts_have_a_fair_share_of_the_time_of_those_who_decode() -> None:
    allowance = learned(rows_s=0.01, token_s=20e-6, max_step_s=0.06)
    assert allowed(allowance, num_waiting_tokens=1) == pytest.approx(FAIR_SHARE * 0.01 / 20e-6, rel=0.05)


def test_many_prompts_have_all_that_the_longest_step_leaves() -> None:
    allowance = learned(rows_s=0.01, token_s=20e-6, max_step_s=0.06)
    assert allowed(allowance) == pytest.approx(0.05 / 20e-6, rel=0.05)


def test_prompts_that_wait_are_spread_over_steps() -> None:
    allowance = learned(rows_s=0.001, token_s=20e-6, max_step_s=0.06)
    allowed(allowance, num_waiting_tokens=0)  # the crowd that it was learned from is over
    assert allowed(allowance, num_waiting_tokens=2400) == 2400 // SPREAD_STEPS


def test_a_crowd_of_prompts_has_all_that_the_longest_step_leaves() -> None:
    allowance = learned(rows_s=0.001, token_s=20e-6, max_step_s=0.06)
    assert allowed(allowance, num_waiting_tokens=8000) == pytest.approx(0.059 / 20e-6, rel=0.05)


def test_the_first_step_with_prompts_is_not_taken_for_one_of_decode_rows() -> None:
    """What its prompts take is known, so that the rows beside them take next to nothing."""
    allowance = PromptAllowance(max_step_s=0.06)
    allowance.measured(0, 8000, 0.16)
    allowance.measured(2, 2000, 0.042)
    assert allowed(allowance, num_waiting_tokens=100_000) > 2500


def test_on_a_slow_device_prompts_still_have_their_share() -> None:
    """A CPU decodes in 100 ms, longer than the longest step, and takes 5 ms for a token of a prompt."""
    allowance = learned(rows_s=0.1, token_s=0.005, max_step_s=0.06)
    assert allowed(allowance) == pytest.approx(FAIR_SHARE * 20, abs=2)


def test_a_device_that_is_slower_than_it_was_is_found_out_in_a_few_steps() -> None:
    allowance = learned(rows_s=0.004, token_s=5e-6, max_step_s=0.06)
    for _ in range(12):
        num_tokens = allowed(allowance)
        allowance.measured(200, num_tokens, 0.02 + 20e-6 * num_tokens)
    assert 0.02 + 20e-6 * allowed(allowance) < 0.07


def test_small_prompts_that_cost_nothing_do_not_make_large_ones_free() -> None:
    """Where the device waits for weights a few tokens more are free, for minutes of such traffic."""
    allowance = learned(rows_s=0.01, token_s=20e-6, max_step_s=0.06)
    for _ in range(2000):
        allowance.measured(8, 20, 0.01)
    assert 0.01 + 20e-6 * allowed(allowance) < 0.15


DEVICES = {
    "rows_s": st.floats(1e-4, 0.5),
    "token_s": st.floats(1e-6, 0.01),
    "max_step_s": st.floats(0.01, 0.5),
}


@given(**DEVICES, num_waiting_tokens=st.integers(0, 100_000))
def test_a_step_is_as_long_as_it_may_be_on_any_device(
    rows_s: float, token_s: float, max_step_s: float, num_waiting_tokens: int
) -> None:
    """By what the device takes in truth, and not by what the allowance believes; a token less is too few."""
    num_tokens = allowed(learned(rows_s, token_s, max_step_s, num_steps=100), num_waiting_tokens)
    longest_s = max(max_step_s, (1 + FAIR_SHARE) * rows_s)
    assert rows_s + token_s * (num_tokens - 1) <= 1.15 * longest_s
    if num_waiting_tokens > SPREAD_STEPS * longest_s / token_s:
        assert rows_s + token_s * (num_tokens + 1) >= 0.85 * longest_s


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 8192), st.floats(0.0, 100.0)), max_size=60))
def test_whatever_is_measured_prompts_advance_and_more_that_wait_never_get_less(
    steps: list[tuple[int, int, float]],
) -> None:
    allowance = PromptAllowance(0.06)
    for num_rows, num_tokens, seconds in steps:
        if num_rows or num_tokens:
            allowance.measured(num_rows, num_tokens, seconds)
        counts = [allowed(allowance, num_waiting) for num_waiting in (0, 1, 100, 10_000, MANY)]
        assert counts == sorted(counts)
        assert counts[0] >= 1


@given(**DEVICES, times=st.floats(2.0, 1e6))
def test_one_step_that_took_far_too_long_changes_little(
    rows_s: float, token_s: float, max_step_s: float, times: float
) -> None:
    allowance = learned(rows_s, token_s, max_step_s)
    num_before = allowed(allowance)
    predicted_s = allowance.predicted_s(num_before)
    assert predicted_s is not None
    allowance.measured(8, num_before, times * predicted_s)
    after_s = allowance.predicted_s(num_before)
    assert after_s is not None
    assert predicted_s < after_s <= 1.26 * predicted_s
