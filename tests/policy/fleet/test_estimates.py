"""What the brain expects of times, before and after it has seen some. Loads: tests/policy/memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import ModelId, Rung
from hearth.policy.fleet.estimates import PRIOR_RUN_S, PRIOR_TOKEN_S, Estimates
from hearth.policy.fleet.events import ComputedPrompt
from hearth.policy.memory.reload_cost import ReloadCosts

A, B = ModelId("a"), ModelId("b")
PRIORS = {Rung.HOST: 100.0, Rung.DISK: 10.0, Rung.OBJECT: 1.0}


def test_a_model_that_has_not_run_is_taken_to_run_like_the_others() -> None:
    estimates = Estimates(ReloadCosts(PRIORS))
    assert estimates.run_s(A) == PRIOR_RUN_S
    estimates.ran(B, 4.0)
    assert (estimates.run_s(A), estimates.run_s(B), estimates.run_s()) == (4.0, 4.0, 4.0)


def test_the_time_of_prompts_is_learnt_from_long_ones() -> None:
    estimates = Estimates(ReloadCosts(PRIORS))
    assert estimates.prompt_s(A, 1000) == 1000 * PRIOR_TOKEN_S
    estimates.computed(A, ComputedPrompt(10, 10.0))
    assert estimates.prompt_s(A, 1000) == 1000 * PRIOR_TOKEN_S
    estimates.computed(A, ComputedPrompt(1000, 2.0))
    assert estimates.prompt_s(A, 500) == 1.0
    estimates.forget(A)
    assert estimates.prompt_s(A, 1000) == 1000 * PRIOR_TOKEN_S


def test_loads_are_expected_from_the_brains_own_priors() -> None:
    assert Estimates(ReloadCosts(PRIORS)).reload.load_s(50, None) == 5.0


def test_a_removed_model_is_forgotten() -> None:
    estimates = Estimates(ReloadCosts(PRIORS))
    estimates.ran(A, 4.0)
    estimates.ran(B, 1.0)
    estimates.reload.asked(A, 0.0)
    estimates.forget(A)
    assert estimates.run_s(A) == estimates.run_s()
    assert estimates.reload.p_wanted(A, 0.0) == 0.0


@given(st.lists(st.floats(0.0, 1e6), min_size=1))
def test_a_mean_run_lies_between_the_shortest_and_the_longest(runs_s: list[float]) -> None:
    estimates = Estimates(ReloadCosts(PRIORS))
    for run_s in runs_s:
        estimates.ran(A, run_s)
    assert min(runs_s) * (1 - 1e-9) <= estimates.run_s(A) <= max(runs_s) * (1 + 1e-9)
