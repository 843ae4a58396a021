"""How many tokens of prompts fit into a step, by steps of devices that are plain formulas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.batch.prompt_allowance import (
    FAIR_SHARE,
    FIRST_LONE_TOKENS,
    FIRST_TOKENS,
    GROWTH,
    LONE_STEPS,
    SPREAD_STEPS,
    PromptAllowance,
)

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


def seconds_by(allowance: PromptAllowance, num_prompt_tokens: int) -> float:
    assert allowance._rows_s is not None
    assert allowance._token_s is not None
    return allowance._rows_s + allowance._token_s * num_prompt_tokens


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
    predicted_s = seconds_by(allowance, num_before)
    allowance.measured(8, num_before, times * predicted_s)
    after_s = seconds_by(allowance, num_before)
    assert predicted_s < after_s <= 1.26 * predicted_s


# Where nobody decodes.


def lone(allowance: PromptAllowance) -> int:
    assert allowance.num_lone_tokens is not None
    return allowance.num_lone_tokens


def read_alone(weights_s: float, token_s: float, num_steps: int = 12) -> PromptAllowance:
    """A slow device that has computed a long prompt, each step with as many tokens as it allowed."""
    allowance = PromptAllowance(0.1, is_slow=True)
    for _ in range(num_steps):
        allowance.measured(0, lone(allowance), weights_s + token_s * lone(allowance))
    return allowance


def test_a_slow_device_begins_with_few_tokens_beside_others_too() -> None:
    allowance = PromptAllowance(0.1, is_slow=True)
    assert (lone(allowance), allowed(allowance)) == (FIRST_LONE_TOKENS, FIRST_LONE_TOKENS)
    assert PromptAllowance(0.1).num_lone_tokens is None, "others take all at once in a moment"
    assert PromptAllowance(math.inf, is_slow=True).num_lone_tokens is None, "nothing is held back"


def test_a_large_model_on_few_cores_reads_prompts_in_steps_of_seconds() -> None:
    """A 7B that takes 3 s for its weights and 0.3 s for a token: 512 of them would take 156 s."""
    assert lone(read_alone(3.0, 0.3)) == FIRST_LONE_TOKENS
    assert lone(read_alone(0.4, 0.04)) == pytest.approx(90, abs=5)


def read_beside(rows_s: float, token_s: float, num_steps: int = 12) -> list[int]:
    """Return how many tokens of a crowd each step of a slow device has, the first ones beside no decoding."""
    allowance, num_tokens = PromptAllowance(0.1, is_slow=True), list[int]()
    for step in range(num_steps):
        num_tokens.append(max(FIRST_LONE_TOKENS, allowed(allowance, num_waiting_tokens=1000)))
        allowance.measured(min(step, 1), num_tokens[-1], rows_s + token_s * num_tokens[-1])
    return num_tokens


def test_a_first_step_with_few_tokens_does_not_make_prompts_dear() -> None:
    """A step of 16 tokens takes hardly longer than one without, so 900 tokens must not take 56 steps."""
    fair_tokens = FAIR_SHARE * 0.35 / 0.0016
    assert read_beside(0.35, 0.0016)[3:] == pytest.approx([fair_tokens] * 9, rel=0.05)


def test_tokens_that_are_dear_indeed_stay_few_after_one_try() -> None:
    assert read_beside(0.02, 0.025) == [16, 128, *[16] * 10]
    assert read_beside(4.0, 0.1) == [16] * 12, "eight times as many may take eight times as long"


@given(st.floats(1e-4, 10.0), st.floats(1e-6, 1.0))
def test_the_first_prompts_beside_decoding_never_make_a_step_longer_than_lone_ones(
    rows_s: float, token_s: float
) -> None:
    longest_s = max(LONE_STEPS * 0.1, rows_s + token_s * FIRST_LONE_TOKENS, (1 + FAIR_SHARE) * rows_s)
    assert rows_s + token_s * max(read_beside(rows_s, token_s)) <= 1.1 * longest_s


def test_a_short_prompt_says_nothing_against_long_ones() -> None:
    allowance = read_alone(0.4, 0.04)
    before = lone(allowance)
    allowance.measured(0, 3, 0.52)
    assert lone(allowance) == before


@given(st.floats(1e-4, 10.0), st.floats(1e-6, 1.0))
def test_lone_steps_of_any_slow_device_are_as_long_as_they_may_be(weights_s: float, token_s: float) -> None:
    longest_s = LONE_STEPS * 0.1
    num_tokens = lone(read_alone(weights_s, token_s, num_steps=100))
    assert num_tokens >= FIRST_LONE_TOKENS
    if num_tokens > FIRST_LONE_TOKENS:
        assert weights_s + token_s * num_tokens <= 1.01 * longest_s
        assert weights_s + token_s * (num_tokens + 1) >= 0.85 * longest_s


@given(st.lists(st.tuples(st.integers(1, 8192), st.floats(0.0, 1000.0)), max_size=40))
def test_whatever_is_measured_lone_steps_grow_by_what_was_measured_alone(
    steps: list[tuple[int, float]],
) -> None:
    allowance, most = PromptAllowance(0.1, is_slow=True), FIRST_LONE_TOKENS
    for num_tokens, seconds in steps:
        num_tokens = min(num_tokens, lone(allowance))
        allowance.measured(0, num_tokens, seconds)
        most = max(most, GROWTH * num_tokens)
        assert FIRST_LONE_TOKENS <= lone(allowance) <= most


def test_long_prompts_behind_short_ones_are_given_what_many_tokens_cost() -> None:
    """Few tokens hide behind the weights: by their price a crowd would take twice as long as it may."""
    allowance = PromptAllowance(0.1)
    allowance.measured(0, 8000, 0.16)
    for _ in range(200):
        allowance.measured(64, 0, 0.01)
        allowance.measured(64, 200, 0.01 + 200 * 10e-6)
    num_tokens = allowance.num_tokens(20_000)
    assert num_tokens is not None
    assert 0.01 + 20e-6 * num_tokens == pytest.approx(0.1, rel=0.05)
