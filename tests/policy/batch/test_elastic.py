"""When KV grows, and when it shrinks: at once, and after a whole epoch without need."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.policy.batch.elastic import AHEAD_STEPS, WINDOW_STEPS, Elastic, Growth, KvUse

BLOCK_TOKENS = 16


class Kv:
    """A model's KV that follows `Elastic` as a worker does, in extents, out of memory without end."""

    def __init__(self, extent_blocks: int = 1) -> None:
        self.elastic = Elastic(BLOCK_TOKENS)
        self.extent_blocks = extent_blocks
        self.num_blocks = 0
        self.num_live = 0
        self.num_given_back = 0

    def use(self, num_wanted: int, num_running: int) -> KvUse:
        return KvUse(self.num_blocks, self.num_live, 0, num_wanted, num_running)

    def step(self, num_live: int, num_running: int) -> Growth:
        """One in which so many blocks are in use."""
        num_wanted = max(0, num_live - self.num_live)
        growth = self.elastic.growth(self.use(num_wanted, num_running))
        num_extents = -(-growth.now_blocks // self.extent_blocks)
        self.num_blocks += num_extents * self.extent_blocks
        self.num_live = num_live
        assert self.num_live <= self.num_blocks
        surplus = self.elastic.surplus_blocks(self.use(0, num_running))
        self.num_given_back = surplus // self.extent_blocks * self.extent_blocks
        self.num_blocks -= self.num_given_back
        assert self.num_live <= self.num_blocks, "blocks in use were given back"
        return growth


def test_what_a_step_lacks_is_asked_for_at_once() -> None:
    growth = Elastic(BLOCK_TOKENS).growth(KvUse(10, 6, 1, 5, 0))
    assert growth == Growth(now_blocks=2, ahead_blocks=0)


@pytest.mark.parametrize(("num_free", "ahead_blocks"), [(0, 4), (3, 1), (4, 0), (9, 0)])
def test_what_running_sequences_will_fill_soon_is_made_ready_unless_it_is_free(
    num_free: int, ahead_blocks: int
) -> None:
    num_running = 4 * BLOCK_TOKENS // AHEAD_STEPS
    use = KvUse(20 + num_free, 20, 0, 0, num_running)
    assert Elastic(BLOCK_TOKENS).growth(use) == Growth(0, ahead_blocks)


def test_an_idle_model_asks_for_nothing() -> None:
    assert Elastic(BLOCK_TOKENS).growth(KvUse(0, 0, 0, 0, 0)) == Growth(0, 0)


def test_cached_prefixes_are_no_surplus() -> None:
    elastic = Elastic(BLOCK_TOKENS)
    use = KvUse(num_blocks=20, num_live=0, num_cached=15, num_wanted=0, num_running=0)
    assert [elastic.surplus_blocks(use) for _ in range(WINDOW_STEPS)] == [0] * (WINDOW_STEPS - 1) + [5]


def test_after_load_has_fallen_everything_but_the_reserve_goes_back() -> None:
    kv, num_running = Kv(), 3
    kv.step(100, 20)
    for _ in range(2 * WINDOW_STEPS):
        kv.step(10, num_running)
    assert kv.num_blocks == 10 + -(-num_running * AHEAD_STEPS // BLOCK_TOKENS)
    for _ in range(2 * WINDOW_STEPS):
        kv.step(0, 0)
    assert kv.num_blocks == 0


LOADS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=40)


@given(LOADS, st.integers(1, 9))
@settings(derandomize=True)
def test_a_load_that_comes_back_within_an_epoch_finds_its_blocks(
    load: list[tuple[int, int]], extent_blocks: int
) -> None:
    kv = Kv(extent_blocks)
    most = max(num_live for num_live, _ in load)
    for at in range(4 * WINDOW_STEPS):
        kv.step(*load[at % len(load)])
        if at >= len(load):
            assert kv.num_blocks == -(-most // extent_blocks) * extent_blocks


@given(st.integers(0, 60), st.integers(0, 20), st.integers(0, 200), st.integers(1, 9))
@settings(derandomize=True)
def test_under_a_constant_load_kv_settles_and_never_grows_again(
    num_live: int, num_running: int, num_before: int, extent_blocks: int
) -> None:
    kv = Kv(extent_blocks)
    kv.num_blocks = num_before
    for at in range(4 * WINDOW_STEPS):
        growth = kv.step(num_live, num_running)
        assert not (growth != Growth(0, 0) and kv.num_given_back), "it grows and shrinks in one step"
        assert at == 0 or growth.now_blocks == 0
        assert at < 2 * WINDOW_STEPS or kv.num_given_back == 0


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20), st.integers(1, 300)), max_size=8))
@settings(derandomize=True)
def test_a_whole_epoch_lies_between_growing_and_giving_back(phases: list[tuple[int, int, int]]) -> None:
    kv = Kv()
    last_growth = 0
    steps = [(live, running) for live, running, num_steps in phases for _ in range(num_steps)]
    for at, (num_live, num_running) in enumerate(steps):
        if kv.step(num_live, num_running) != Growth(0, 0):
            last_growth = at
        assert not kv.num_given_back or at - last_growth >= WINDOW_STEPS
