"""What the brain expects of times, before and after it has seen some."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.fleet.estimates import PRIOR_RUN_S, Estimates
from hearth.types import ModelId, Rung

A, B = ModelId("a"), ModelId("b")
PRIORS = {Rung.HOST: 100.0, Rung.DISK: 10.0, Rung.OBJECT: 1.0}
SIZES = st.integers(0, 1000)


def test_a_model_that_has_not_run_is_taken_to_run_like_the_others() -> None:
    estimates = Estimates(PRIORS)
    assert estimates.run_s(A) == PRIOR_RUN_S
    estimates.ran(B, 4.0)
    assert (estimates.run_s(A), estimates.run_s(B), estimates.run_s()) == (4.0, 4.0, 4.0)


def test_what_a_rung_has_shown_replaces_what_was_assumed() -> None:
    estimates = Estimates(PRIORS)
    assert estimates.load_s(50, None) == 5.0
    estimates.moved(Rung.DISK, 100, 2.0)
    assert estimates.load_s(50, None) == pytest.approx(1.0)


def test_nobody_asks_for_a_model_so_it_costs_nothing_to_have_it_back() -> None:
    estimates = Estimates(PRIORS)
    assert estimates.eviction_cost_s(A, 100, 10.0, 1.0, now_s=5.0) == 0.0
    estimates.demand.arrived(A, 5.0)
    assert estimates.eviction_cost_s(A, 100, 10.0, 2.0, now_s=5.0) > 0.0


@given(SIZES, SIZES, SIZES, SIZES)
def test_more_on_a_near_rung_never_makes_a_load_longer(
    num_bytes: int, host_bytes: int, disk_bytes: int, more_bytes: int
) -> None:
    estimates = Estimates(PRIORS)
    load_s = estimates.load_s(num_bytes, {Rung.HOST: host_bytes, Rung.DISK: disk_bytes})
    nearer = estimates.load_s(num_bytes, {Rung.HOST: host_bytes + more_bytes, Rung.DISK: disk_bytes})
    assert 0.0 <= nearer <= load_s + 1e-9
    assert num_bytes / 100.0 - 1e-9 <= load_s <= num_bytes / 1.0
