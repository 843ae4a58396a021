"""How long a simulated load takes, and that a seed always draws the same."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from bench.fleet.costs import CostModel
from hearth.core.types import Rung

SPEEDS = {Rung.HOST: 10.0, Rung.DISK: 2.0}


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_a_load_is_all_bytes_once_from_host_memory_first(num_bytes: int, host_bytes: int) -> None:
    uses = {use.rung: use for use in CostModel(Random(0), SPEEDS, 1.0).plan_load(num_bytes, host_bytes)}
    assert sum(use.num_bytes for use in uses.values()) == num_bytes
    assert all(use.num_bytes > 0 and use.seconds == use.num_bytes / SPEEDS[use.rung] for use in uses.values())
    from_host = uses[Rung.HOST].num_bytes if Rung.HOST in uses else 0
    assert from_host == min(num_bytes, host_bytes)


@given(st.integers(0, 100))
def test_the_same_seed_draws_the_same(seed: int) -> None:
    one, other = (CostModel(Random(seed), SPEEDS, 3.0, 0.5) for _ in range(2))
    draws = [(one.draw_run_s(), one.draw_cancelled()) for _ in range(5)]
    assert draws == [(other.draw_run_s(), other.draw_cancelled()) for _ in range(5)]
    assert all(run_s >= 0.0 for run_s, _ in draws)
