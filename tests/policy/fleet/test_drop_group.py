"""When replicas give up layers for KV, and when they have them back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.fleet.drop_group import HOLD_S, MAX_HOLD_S, RELIEF, DropState, Groups, ParameterDrop

WHOLE = Groups(num_groups=0, num_ready=0, num_loading=0, demand_tokens=120, room_tokens=100)


class Model:
    """A model of two replicas whose every order is carried out at once, unless it is said otherwise."""

    def __init__(self) -> None:
        self.drop, self.groups, self.now_s = ParameterDrop(), WHOLE, 0.0
        self.drops_s: list[float] = []

    def press(self, now_s: float, demand_tokens: int, *, is_slow: bool = False) -> DropState:
        """Report a demand. `is_slow`: what was ordered before has not ended yet."""
        self.now_s = now_s
        if not is_slow:
            self.groups = replace(self.groups, num_ready=self.groups.num_groups, num_loading=0)
        self.groups = replace(self.groups, demand_tokens=demand_tokens)
        self.drop.observe(self.groups, now_s)
        if self.drop.state is DropState.WHOLE and self.drop.may_drop(self.groups, now_s):
            self.drop.drop(now_s)
            self.drops_s.append(now_s)
            self.groups = replace(self.groups, num_groups=1, num_ready=0)
        elif self.drop.may_restore(now_s):
            self.drop.restore(now_s)
            self.groups = replace(self.groups, num_groups=0, num_ready=0, num_loading=2)
        return self.drop.state

    def press_again(self, now_s: float) -> DropState:
        """Form a further group."""
        assert self.drop.may_drop(self.groups, now_s)
        self.drop.drop(now_s)
        self.groups = replace(self.groups, num_groups=self.groups.num_groups + 1)
        self.drop.observe(self.groups, now_s)
        return self.drop.state

    def lose(self, now_s: float) -> DropState:
        self.groups = replace(self.groups, num_groups=0, num_ready=0, num_loading=0)
        self.drop.observe(self.groups, now_s)
        return self.drop.state


def test_a_model_goes_through_all_states_and_is_whole_again() -> None:
    model = Model()
    states = [model.press(0.0, 100), model.press(1.0, 101), model.press(1.1, 120, is_slow=True)]
    states += [model.press(1.5, 130), model.press(2.0, 50), model.press(2.0 + HOLD_S, 50)]
    states += [model.press(12.5, 10, is_slow=True), model.press(13.0, 10)]
    names = "whole preparing preparing dropped dropped restoring restoring whole"
    assert [state.value for state in states] == names.split()


def test_further_replicas_become_groups_if_the_first_ones_are_not_enough() -> None:
    model = Model()
    assert [model.press(0.0, 120), model.press(1.0, 160)] == [DropState.PREPARING, DropState.DROPPED]
    assert model.press_again(2.0) is DropState.PREPARING
    assert model.press(3.0, 90) is DropState.DROPPED


@pytest.mark.parametrize("state", list(DropState)[1:])
def test_a_lost_group_leaves_a_whole_model_in_every_state(state: DropState) -> None:
    model = Model()
    model.press(0.0, 120)
    if state is not DropState.PREPARING:
        model.press(1.0, 50)
    if state is DropState.RESTORING:
        model.press(1.0 + HOLD_S, 50)
    assert model.drop.state is state
    assert model.lose(20.0) is DropState.WHOLE
    assert model.drop.due_s == float("inf")
    assert model.press(21.0, 120) is DropState.PREPARING, "it may drop again"


def test_relief_that_does_not_last_restores_nothing() -> None:
    model = Model()
    model.press(0.0, 120)
    for second in range(1, 60):
        demand = 20 if second % 9 else 51
        assert model.press(float(second), demand) is DropState.DROPPED


def test_a_group_that_failed_is_not_formed_again_for_a_while() -> None:
    model = Model()
    model.press(0.0, 120)
    model.drop.fail(1.0)
    assert model.lose(1.0) is DropState.WHOLE
    assert model.press(MAX_HOLD_S, 120) is DropState.WHOLE
    assert model.press(1.0 + MAX_HOLD_S, 120) is DropState.PREPARING


@given(st.floats(0.5, 2 * HOLD_S), st.floats(0.5, 2 * HOLD_S), st.integers(4, 20))
def test_a_load_that_comes_and_goes_has_layers_come_and_go_ever_more_rarely(
    high_s: float, low_s: float, num_per_s: int
) -> None:
    model, end_s = Model(), 1200.0
    for tick in range(int(end_s * num_per_s)):
        now_s = tick / num_per_s
        model.press(now_s, 120 if now_s % (high_s + low_s) < high_s else 0)
    if low_s < HOLD_S:
        assert len(model.drops_s) == 1, "relief never lasted"
    assert len(model.drops_s) <= 2 + 6 + end_s / MAX_HOLD_S


@given(st.lists(st.tuples(st.floats(0.01, 60.0), st.integers(0, 200), st.booleans()), max_size=200))
def test_it_is_restored_only_after_lasting_relief(reports: list[tuple[float, int, bool]]) -> None:
    model, quiet_since_s = Model(), None
    for wait_s, demand, is_slow in reports:
        before, now_s = model.drop.state, model.now_s + wait_s
        if demand > RELIEF * 100:
            quiet_since_s = None
        after = model.press(now_s, demand, is_slow=is_slow)
        if quiet_since_s is None and after is DropState.DROPPED and demand <= RELIEF * 100:
            quiet_since_s = now_s
        if after is DropState.RESTORING and before is DropState.DROPPED:
            assert quiet_since_s is not None
            assert now_s - quiet_since_s >= HOLD_S
            quiet_since_s = None
        follows = {"whole": "preparing", "preparing": "dropped", "dropped": "restoring", "restoring": "whole"}
        assert after is before or after.value == follows[before.value] or after is DropState.PREPARING
