"""Turns over random models, requests and times: nobody starves, and nothing is promised twice."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.policy.batch.step_sharing import StepSharing
from hearth.policy.fleet.events import Promise
from hearth.policy.turns.turn_policy import BeginTurn, EndTurn, TurnPolicy, TurnRules, WeightsView
from hearth.types import ModelId, Pace, RequestId, TurnEnd

BUDGET_BYTES = 100
RULES = TurnRules()


@dataclass(frozen=True)
class Arrival:
    at_s: float
    model: int
    num_tokens: int
    pace: Pace
    cancelled_after_s: float | None


@dataclass
class SteppedModel:
    """A model that sends every request a token per step. What it lacks is loaded in no less than its time."""

    num_bytes: int
    step_s: float
    load_s: float
    there: float = 0.0  #: share of its weights
    left: dict[RequestId, int] = field(default_factory=dict)
    loads_until_s: float | None = None


class TurnWorld:
    """A worker that does what the policy says, in virtual time; checks it after every decision."""

    def __init__(self, models: list[SteppedModel], pinned: int | None) -> None:
        self.models = {ModelId(f"m{number}"): model for number, model in enumerate(models)}
        self.policy = TurnPolicy(BUDGET_BYTES)
        self.sharing = StepSharing()
        self.now_s = 0.0
        self.pinned = None if pinned is None else ModelId(f"m{pinned}")
        for name, model in self.models.items():
            self.policy.hosted(name, Promise(model.num_bytes, 0))
        if self.pinned is not None:
            self.policy.pin(self.pinned, 0.0, is_pinned=True)
        self.sent_in_turn: dict[ModelId, int] = {}
        self.num_ended: dict[RequestId, int] = {}
        self.waits_since_s: dict[ModelId, float] = {}
        self.overdue_waits_s: list[float] = []

    def run(self, arrivals: list[Arrival]) -> None:
        todo: list[tuple[float, int, Arrival | RequestId]] = []
        for number, arrival in enumerate(arrivals):
            todo.append((arrival.at_s, number, arrival))
        heapq.heapify(todo)
        for _ in range(20_000):
            while todo and todo[0][0] <= self.now_s:
                _, number, what = heapq.heappop(todo)
                if isinstance(what, Arrival):
                    request_id = self._arrive(number, what)
                    if what.cancelled_after_s is not None:
                        heapq.heappush(todo, (self.now_s + what.cancelled_after_s, number, request_id))
                else:
                    self._end(what)
            self._end_loads()
            self._decide()
            self._come_early()
            if not self._step():
                times = [self.policy.wake_s, *(at_s for at_s, *_ in todo[:1])]
                times += [one.loads_until_s for one in self.models.values() if one.loads_until_s is not None]
                next_s = min(times)
                if math.isinf(next_s):
                    break
                assert next_s > self.now_s, "woken for nothing"
                self.now_s = next_s
        assert not todo, "it does not come to an end"
        assert not any(one.left for one in self.models.values()), f"somebody waits for ever: {self.models}"

    def _arrive(self, number: int, arrival: Arrival) -> RequestId:
        name = list(self.models)[arrival.model % len(self.models)]
        request_id = RequestId(f"{name}/{number}")
        if not self.models[name].left:
            self.waits_since_s[name] = self.now_s
        self.models[name].left[request_id] = arrival.num_tokens
        self.policy.arrived(name, request_id, arrival.pace, self.now_s, 0.0, 0)
        return request_id

    def _end(self, request_id: RequestId) -> None:
        name = ModelId(request_id.split("/")[0])
        if self.models[name].left.pop(request_id, None) is not None:
            self.num_ended[request_id] = self.num_ended.get(request_id, 0) + 1
            self.policy.ended(name, request_id)

    def _end_loads(self) -> None:
        for name, model in self.models.items():
            if model.loads_until_s is not None and model.loads_until_s <= self.now_s:
                model.loads_until_s, model.there = None, 1.0
                self.policy.loaded(name, self.now_s)

    def _weights(self, name: ModelId) -> WeightsView:
        model = self.models[name]
        return WeightsView((1.0 - model.there) * model.load_s, model.load_s)

    def _decide(self) -> None:
        due_s = {name: self.policy.due_s(name) for name in self.models}
        for change in self.policy.decide(self.now_s, self._weights):
            model = self.models[change.model]
            match change:
                case EndTurn(name, why):
                    assert name != self.pinned, "a pinned model gives way"
                    assert model.loads_until_s is None or why is TurnEnd.IDLE, "a load is thrown away"
                    assert bool(model.left) is (why is not TurnEnd.IDLE)
                    assert why is TurnEnd.IDLE or self.sent_in_turn[name], "a turn that brought nobody on"
                    model.loads_until_s = None
                    self.waits_since_s[name] = self.now_s
                case BeginTurn(name):
                    self.sent_in_turn[name] = 0
                    if model.left:
                        self.overdue_waits_s.append(self.now_s - max(due_s[name], self.waits_since_s[name]))
                    self._take_room(name)
                    if model.there < 1.0:
                        model.loads_until_s = self.now_s + (1.0 - model.there) * model.load_s
        assert self.policy.bound_bytes() <= BUDGET_BYTES
        assert sum(one.loads_until_s is not None for one in self.models.values()) <= 1
        assert self.policy.decide(self.now_s, self._weights) == [], "undecided after all"

    def _come_early(self) -> None:
        """Have bytes of the next in line come that fit into what is free, in no time."""
        name = self.policy.early(self.now_s, lambda name: self.models[name].there < 1.0)
        if name is None:
            return
        model = self.models[name]
        assert not self.policy.is_in_turn(name)
        assert self.policy.wants_turn(name)
        assert all(one.loads_until_s is None for one in self.models.values()), "two loads at a time"
        free_bytes = BUDGET_BYTES - sum(self._has_bytes(other) for other in self.models)
        model.there = min(1.0, model.there + max(0.0, free_bytes) / model.num_bytes)

    def _has_bytes(self, name: ModelId) -> float:
        model = self.models[name]
        return model.num_bytes if self.policy.is_in_turn(name) else model.there * model.num_bytes

    def _take_room(self, name: ModelId) -> None:
        """Have models out of turn lose what those in turn are promised, the first one first."""
        bound = sum(one.num_bytes for other, one in self.models.items() if self.policy.is_in_turn(other))
        lent = {other: one for other, one in self.models.items() if not self.policy.is_in_turn(other)}
        for other in lent.values():
            over_bytes = bound + sum(one.there * one.num_bytes for one in lent.values()) - BUDGET_BYTES
            if over_bytes > 0:
                other.there = max(0.0, other.there - over_bytes / other.num_bytes)

    def _step(self) -> bool:
        ready = [
            name
            for name, one in self.models.items()
            if one.left and one.there == 1.0 and one.loads_until_s is None and self.policy.is_in_turn(name)
        ]
        if not ready:
            return False
        name = self.sharing.next(ready)
        model = self.models[name]
        self.now_s += model.step_s
        self.sharing.stepped(name, model.step_s)
        self.policy.sent(name, list(model.left), self.now_s)
        self.sent_in_turn[name] += len(model.left)
        for request_id in list(model.left):
            model.left[request_id] -= 1
            if not model.left[request_id]:
                self._end(request_id)
        return True


paces = st.sampled_from((Pace(), Pace(), Pace(0.2, 20.0, 0.5), Pace(2.0, 5.0, 3.0), Pace(tokens_per_s=0.0)))
stepped_models = st.builds(
    SteppedModel,
    num_bytes=st.integers(5, 95),
    step_s=st.sampled_from((0.01, 0.05, 0.2)),
    load_s=st.sampled_from((0.01, 0.05, 0.3, 1.0)),
)
arrivals_of = st.lists(
    st.builds(
        Arrival,
        at_s=st.floats(0.0, 20.0),
        model=st.integers(0, 7),
        num_tokens=st.integers(1, 60),
        pace=paces,
        cancelled_after_s=st.none() | st.floats(0.0, 3.0),
    ),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(stepped_models, min_size=1, max_size=6), arrivals_of, st.booleans())
def test_every_request_ends_once_and_promises_are_kept(
    models: list[SteppedModel], arrivals: list[Arrival], is_pinned: bool
) -> None:
    """Checked by the world after each decision; what is pinned leaves room for every other model."""
    largest = max((one.num_bytes for one in models[1:]), default=0)
    has_room = is_pinned and models[0].num_bytes + largest <= BUDGET_BYTES
    world = TurnWorld(models, 0 if has_room else None)
    world.run(arrivals)
    assert len(world.num_ended) == len(arrivals)
    assert set(world.num_ended.values()) <= {1}


@settings(max_examples=100, deadline=None)
@given(st.lists(stepped_models, min_size=2, max_size=5), arrivals_of)
def test_whoever_is_overdue_waits_no_longer_than_the_turns_of_all_others(
    models: list[SteppedModel], arrivals: list[Arrival]
) -> None:
    """The bound that `turn_policy.py` states; each other model has its turn at most twice before.

    Once it may have begun just before, and once because it had waited for longer.
    """
    world = TurnWorld(models, None)
    world.run([arrival for arrival in arrivals if arrival.pace.tokens_per_s])
    turns_s = [RULES.max_turn_s + one.load_s + len(models) * 0.2 + one.step_s for one in models]
    assert max(world.overdue_waits_s, default=0.0) <= 2 * sum(turns_s)
