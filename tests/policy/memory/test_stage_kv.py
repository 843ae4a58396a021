"""Members of a pipeline that agree on their KV, by messages that arrive in order and at any time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hearth.policy.memory.stage_kv import PAUSE_S, FirstKv, LaterKv

FLOOR = 4


@dataclass(frozen=True, slots=True)
class Used:
    """The first member uses so many blocks from here on."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Growth:
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Kept:
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Return:
    num_blocks: int
    is_promised: bool


@dataclass(slots=True)
class Later:
    """Mutable; written by the machine."""

    kv: LaterKv = field(default_factory=lambda: LaterKv(FLOOR))
    num_blocks: int = FLOOR
    num_used: int = FLOOR  #: by steps that have arrived
    free_blocks: int = 0
    ordered: deque[Used | Growth | Kept] = field(default_factory=deque)
    returns: deque[Return] = field(default_factory=deque)  #: of members before it


class Members(RuleBasedStateMachine):
    @initialize(num_later=st.integers(1, 3))
    def begin(self, num_later: int) -> None:
        self.now_s, self.num_blocks, self.own_free_blocks = 0.0, FLOOR, 0
        self.first, self.later = FirstKv(FLOOR), [Later() for _ in range(num_later)]
        self.answers = deque[Growth | Return]()
        self.asked_blocks, self.refused_s = 0, -PAUSE_S

    def use(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.later[0].ordered.append(Used(num_blocks))

    def keep(self) -> None:
        if (kept := self.first.keep(self.num_blocks)) is not None:
            self.later[0].ordered.append(Kept(kept))

    def pass_on(self, number: int, message: Used | Growth | Kept | Return) -> None:
        if number + 1 < len(self.later):
            following = self.later[number + 1]
            if isinstance(message, Return):
                following.returns.append(message)
            else:
                following.ordered.append(message)
        elif isinstance(message, Growth | Return):
            self.answers.append(message)

    # What members decide on their own.

    @rule(more=st.integers(1, 10))
    def first_wants_more(self, more: int) -> None:
        wanted = self.num_blocks + more
        if wanted <= self.first.max_blocks:
            self.use(wanted)
        elif self.first.ask(wanted, self.now_s):
            assert self.now_s >= self.refused_s + PAUSE_S, "it was refused a moment ago"
            self.asked_blocks = wanted
            self.later[0].ordered.append(Growth(wanted))

    @rule(less=st.integers(1, 10))
    def first_gives_back(self, less: int) -> None:
        self.use(max(0, self.num_blocks - less))
        self.keep()

    @rule(number=st.integers(0, 2), left=st.integers(FLOOR, 40), is_promised=st.booleans())
    def a_later_member_needs_memory(self, number: int, left: int, is_promised: bool) -> None:
        one = self.later[number % len(self.later)]
        if left < one.num_blocks and one.kv.need(left, self.now_s, is_promised=is_promised):
            self.pass_on(self.later.index(one), Return(left, is_promised))
            assert not one.kv.need(left, self.now_s, is_promised=is_promised), "asked twice"

    @rule(number=st.integers(0, 3), num_blocks=st.integers(0, 40))
    def memory_is_free(self, number: int, num_blocks: int) -> None:
        if number < len(self.later):
            self.later[number].free_blocks = num_blocks
        else:
            self.own_free_blocks = num_blocks

    @rule(seconds=st.sampled_from([0.1, PAUSE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    # Messages.

    @rule(number=st.integers(0, 2))
    def a_later_member_takes_a_message(self, number: int) -> None:
        number %= len(self.later)
        one = self.later[number]
        if not one.ordered:
            return
        match message := one.ordered.popleft():
            case Used(num_blocks):
                one.num_used = num_blocks
            case Growth(num_blocks):
                more = min(one.kv.wanted(num_blocks) - one.num_blocks, one.free_blocks)
                one.num_blocks += max(0, more)
                message = Growth(min(num_blocks, one.num_blocks))
            case Kept(num_blocks):
                one.kv.kept(num_blocks, self.now_s)
                assert not one.kv.is_waiting
                one.num_blocks = min(one.num_blocks, num_blocks)
        self.pass_on(number, message)

    @rule(number=st.integers(1, 2))
    def a_return_is_passed_on(self, number: int) -> None:
        number %= len(self.later)
        if self.later[number].returns:
            self.pass_on(number, self.later[number].returns.popleft())

    @rule(num_spare=st.integers(0, 10))
    def the_first_member_takes_an_answer(self, num_spare: int) -> None:
        if not self.answers:
            return
        match answer := self.answers.popleft():
            case Growth(num_blocks):
                self.first.granted(num_blocks, self.now_s)
                if num_blocks < self.asked_blocks:
                    self.refused_s = self.now_s
                more = min(self.first.max_blocks - self.num_blocks, self.own_free_blocks)
                if more > 0:
                    self.use(self.num_blocks + more)
            case Return(num_blocks, is_promised):
                self.first.return_asked(self.now_s)
                self.refused_s = self.now_s
                kept = num_blocks if is_promised else max(num_blocks, self.num_blocks - num_spare)
                if kept < self.num_blocks:
                    self.use(kept)
        self.keep()
        if isinstance(answer, Return) and answer.is_promised:
            assert self.first.max_blocks <= answer.num_blocks, "it may take back what it gave"

    @rule()
    def everything_arrives(self) -> None:
        """Then all members have as many blocks, and none waits for memory."""
        while self.answers or any(one.ordered or one.returns for one in self.later):
            for number in range(len(self.later)):
                self.a_later_member_takes_a_message(number)
                self.a_return_is_passed_on(number)
            self.the_first_member_takes_an_answer(0)
        assert {one.num_blocks for one in self.later} == {self.first.max_blocks}
        assert not any(one.kv.is_waiting for one in self.later)
        assert self.first.max_blocks == max(FLOOR, self.num_blocks)

    @invariant()
    def every_block_in_use_has_memory(self) -> None:
        if not hasattr(self, "later"):
            return
        for one in self.later:
            assert one.num_used <= one.num_blocks, f"{one}"
            assert one.num_blocks >= max(FLOOR, self.first.max_blocks), f"{one}"
        assert self.num_blocks <= self.first.max_blocks


Members.TestCase.settings = settings(max_examples=120, stateful_step_count=60)
TestMembers = Members.TestCase


def test_a_member_asks_for_promised_memory_at_once_although_it_was_refused_other() -> None:
    later = LaterKv(FLOOR)
    later.wanted(20)
    assert later.need(10, 0.0, is_promised=False)
    later.kept(18, 0.1)
    assert not later.need(10, 0.2, is_promised=False)
    assert later.need(10, 0.2, is_promised=True)
    assert later.is_waiting


def test_unused_blocks_are_expected_until_the_first_member_refuses_them() -> None:
    later = LaterKv(FLOOR)
    later.wanted(20)
    assert later.num_returning(20) == 0
    assert later.need(15, 0.0, is_promised=False)
    assert later.num_returning(20) == 5
    later.kept(18, 0.1)
    assert not later.need(15, 0.2, is_promised=False)
    assert later.num_returning(18) == 0
    assert later.need(15, 0.2, is_promised=True)
    assert later.num_returning(18) == 0, "requests have to be preempted for them"


def test_what_is_given_back_while_a_question_is_open_is_not_retaken() -> None:
    first = FirstKv(FLOOR)
    assert first.ask(10, 0.0)
    first.granted(10, 0.0)
    assert first.keep(10) is None
    assert first.ask(12, 0.0)
    first.return_asked(0.1)
    assert first.keep(6) is None
    assert first.max_blocks == 6
    first.granted(10, 0.2)
    assert (first.max_blocks, first.keep(6)) == (6, 6)


def test_nothing_is_granted_while_memory_is_needed() -> None:
    first, later = FirstKv(FLOOR), LaterKv(FLOOR)
    assert first.ask(12, 0.0)
    assert later.wanted(12) == 12
    assert first.keep(FLOOR) is None, "the members may not free what they are asked for"
    assert later.need(FLOOR, 0.0, is_promised=True)
    first.return_asked(0.1)
    first.granted(12, 0.2)
    assert (first.max_blocks, first.keep(FLOOR)) == (FLOOR, FLOOR)
    assert later.wanted(16) == 12
