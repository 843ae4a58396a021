"""Turns over random models, requests and times: nobody starves, and nothing is promised twice."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import ModelId, Pace, RequestId, TurnEnd
from hearth.policy.batch.step_sharing import StepSharing
from hearth.policy.fleet.profile import Promise
from hearth.policy.turns.paced_request import BATCH_PATIENCE_S
from hearth.policy.turns.turn_policy import (
    BeginTurn,
    EndTurn,
    TurnChange,
    TurnPolicy,
    TurnRules,
    WeightsView,
)

BUDGET_BYTES = 100
KEPT_BYTES = 10  #: at most, by six models out of turn and for the workspace
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
    standing_bytes: int = 0
    workspace_bytes: int = 0
    adapter_bytes: int = 0  #: of requests that run
    there: float = 0.0  #: share of its weights
    left: dict[RequestId, int] = field(default_factory=dict)
    loads_until_s: float | None = None

    @property
    def promise(self) -> Promise:
        return Promise(self.num_bytes, self.workspace_bytes, self.standing_bytes)


class TurnWorld:
    """A worker that does what the policy says, in virtual time; checks it after every decision."""

    def __init__(
        self, models: list[SteppedModel], pinned: int | None, *, shares_workspace: bool = True
    ) -> None:
        self.models = {ModelId(f"m{number}"): model for number, model in enumerate(models)}
        self.policy = TurnPolicy(
            BUDGET_BYTES,
            shares_workspace=shares_workspace,
            adapter_bytes=lambda name: self.models[name].adapter_bytes,
        )
        self.shares_workspace = shares_workspace
        self.sharing = StepSharing()
        self.now_s = 0.0
        self.pinned = None if pinned is None else ModelId(f"m{pinned}")
        for name, model in self.models.items():
            self.policy.hosted(name, model.promise)
        if self.pinned is not None:
            self.policy.pin(self.pinned, 0.0, is_pinned=True)
        self.sent_in_turn: dict[ModelId, int] = {}
        self.began_s: dict[ModelId, float] = {}
        self.paces: dict[RequestId, Pace] = {}
        self.num_ended: dict[RequestId, int] = {}
        #: By request: until when its next token may be due; and how much later tokens were sent.
        self.latest_s: dict[RequestId, float] = {}
        self.lateness_s: list[float] = []
        self.has_changed = True  #: since the last decision, by more than tokens that change nothing

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
        pace = self.paces[request_id] = arrival.pace
        self.latest_s[request_id] = self.now_s + (
            pace.first_token_s if pace.tokens_per_s else BATCH_PATIENCE_S
        )
        self.models[name].left[request_id] = arrival.num_tokens
        self.policy.arrived(name, request_id, arrival.pace, self.now_s, 0.0, 0)
        self.has_changed = True
        return request_id

    def _end(self, request_id: RequestId) -> None:
        name = ModelId(request_id.split("/")[0])
        if self.models[name].left.pop(request_id, None) is not None:
            self.num_ended[request_id] = self.num_ended.get(request_id, 0) + 1
            self.policy.ended(name, request_id)
            self.has_changed = True

    def _end_loads(self) -> None:
        for name, model in self.models.items():
            if model.loads_until_s is not None and model.loads_until_s <= self.now_s:
                model.loads_until_s, model.there = None, 1.0
                self.policy.loaded(name, self.now_s)
                self.has_changed = True

    def _weights(self, name: ModelId) -> WeightsView:
        model = self.models[name]
        return WeightsView((1.0 - model.there) * model.load_s, model.load_s)

    def _decide(self) -> None:
        """Have the policy decide until it is done: one decision may allow another."""
        begun: list[ModelId] = []
        may_change, self.has_changed = self.has_changed or self.now_s >= self.policy.stands_s, False
        while changes := self.policy.decide(self.now_s, self._weights):
            assert may_change, f"a decision that was to stand did not: {changes}"
            self._follow(changes)
            begun += [change.model for change in changes if isinstance(change, BeginTurn)]
        assert len(begun) == len(set(begun)), f"they take turns in no time: {begun}"

    def _follow(self, changes: list[TurnChange]) -> None:
        for change in changes:
            model = self.models[change.model]
            match change:
                case EndTurn(name, why):
                    assert name != self.pinned, "a pinned model gives way"
                    assert model.loads_until_s is None or why is TurnEnd.IDLE, "a load is thrown away"
                    assert bool(model.left) is (why is not TurnEnd.IDLE)
                    assert why is TurnEnd.IDLE or self.sent_in_turn[name], "a turn that brought nobody on"
                    model.loads_until_s = None
                case BeginTurn(name):
                    self.sent_in_turn[name], self.began_s[name] = 0, self.now_s
                    self._take_room(name)
                    if model.there < 1.0:
                        model.loads_until_s = self.now_s + (1.0 - model.there) * model.load_s
        self._check_bound()
        assert sum(self._is_on_bus(name) for name in self.models) <= 1

    def _is_on_bus(self, name: ModelId) -> bool:
        is_loading = self.models[name].loads_until_s is not None
        return is_loading and self.now_s < self.began_s[name] + RULES.max_turn_s

    def _check_bound(self) -> None:
        """Check what is bound, and would be, against plain sums."""
        in_turn = {name for name in self.models if self.policy.is_in_turn(name)}
        assert self.policy.memory.bound_bytes() == self._bound_of(in_turn) <= BUDGET_BYTES
        self._check_adapters(in_turn)
        first, *_, last = [*self.models, *self.models]
        assert self.policy.memory.bound_bytes((first,), (last,)) == self._bound_of(
            (in_turn - {last}) | {first}
        )

    def _check_adapters(self, in_turn: set[ModelId]) -> None:
        """Check that adapters fit beside what is bound, unless one model is alone or beside a pinned one."""
        if len(in_turn - {self.pinned}) > 1:
            adapter_bytes = sum(self.models[name].adapter_bytes for name in in_turn)
            assert self._bound_of(in_turn) + adapter_bytes <= BUDGET_BYTES

    def _bound_of(self, in_turn: set[ModelId]) -> int:
        kept = {*self.sent_in_turn, *in_turn}
        own_bytes = sum(self.models[name].num_bytes for name in in_turn)
        standing_bytes = sum(self.models[name].standing_bytes for name in kept - in_turn)
        workspaces = [self.models[name].workspace_bytes for name in kept]
        if not self.shares_workspace:
            workspaces = [sum(self.models[name].workspace_bytes for name in in_turn)]
        return own_bytes + standing_bytes + max(workspaces, default=0)

    def _come_early(self) -> None:
        """Have bytes of the next in line come that fit into what is free, in no time."""
        line = self.policy.next_in_line(self.now_s)
        name = self.policy.next_prefetch(line, lambda name: self.models[name].there < 1.0)
        if name is None:
            return
        model = self.models[name]
        assert not self.policy.is_in_turn(name)
        assert self.policy.wants_turn(name)
        assert all(one.loads_until_s is None for one in self.models.values()), "two loads at a time"
        free_bytes = BUDGET_BYTES - sum(self._has_bytes(other) for other in self.models)
        there, model.there = model.there, min(1.0, model.there + max(0.0, free_bytes) / model.num_bytes)
        self.has_changed |= model.there != there

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
        self.has_changed |= self.policy.sent(name, list(model.left), self.now_s)
        self.sent_in_turn[name] += len(model.left)
        for request_id in model.left:
            pace = self.paces[request_id]
            self.lateness_s.append(self.now_s - self.latest_s[request_id])
            pause_s = pace.max_pause_s if pace.tokens_per_s else BATCH_PATIENCE_S
            self.latest_s[request_id] = self.now_s + pause_s
        for request_id in list(model.left):
            model.left[request_id] -= 1
            if not model.left[request_id]:
                self._end(request_id)
        return True


paces = st.sampled_from((Pace(), Pace(), Pace(0.2, 20.0, 0.5), Pace(2.0, 5.0, 3.0), Pace(tokens_per_s=0.0)))
stepped_models = st.builds(
    SteppedModel,
    num_bytes=st.integers(5, 90),
    standing_bytes=st.integers(0, 1),
    workspace_bytes=st.integers(0, 4),
    adapter_bytes=st.sampled_from((0, 0, 5, 20, 200)),
    step_s=st.sampled_from((0.01, 0.05, 0.2)),
    load_s=st.sampled_from((0.01, 0.05, 0.3, 1.0, 3.0)),
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


@given(st.lists(stepped_models, min_size=1, max_size=6), arrivals_of, st.booleans(), st.booleans())
def test_every_request_ends_once_and_promises_are_kept(
    models: list[SteppedModel], arrivals: list[Arrival], is_pinned: bool, shares_workspace: bool
) -> None:
    """Checked by the world after each decision; what is pinned leaves room for every other model."""
    largest = max((one.num_bytes for one in models[1:]), default=0)
    has_room = is_pinned and models[0].num_bytes + largest <= BUDGET_BYTES - KEPT_BYTES
    world = TurnWorld(models, 0 if has_room else None, shares_workspace=shares_workspace)
    world.run(arrivals)
    assert len(world.num_ended) == len(arrivals)
    assert set(world.num_ended.values()) <= {1}


def test_on_an_arena_three_busy_models_that_fit_one_at_a_time_all_have_turns_within_the_bound() -> None:
    """Weights are a sixth of the budget and a workspace a third; requests keep all models busy."""
    models = [SteppedModel(18, 0.02, 0.05, standing_bytes=1, workspace_bytes=60) for _ in range(3)]
    clients = (0, 0, 0, 0, 0, 0, 1, 1, 2, 2)
    arrivals = [Arrival(at_s / 2, model, 40, Pace(), None) for at_s in range(40) for model in clients]
    world = TurnWorld(models, None, shares_workspace=False)
    world.run(arrivals)
    assert len(world.num_ended) == len(arrivals)
    bound_s = sum(RULES.max_turn_s + one.load_s + one.step_s for one in models)
    assert max(world.lateness_s) <= bound_s


@given(st.lists(stepped_models, min_size=2, max_size=5), arrivals_of)
def test_no_token_comes_later_than_the_bound(models: list[SteppedModel], arrivals: list[Arrival]) -> None:
    """The bound that `turn_policy.py` states; a step of these models sends a token to everyone who waits."""
    world = TurnWorld(models, None)
    world.run(arrivals)
    bound_s = sum(RULES.max_turn_s + one.load_s + one.step_s for one in models)
    assert max(world.lateness_s, default=0.0) <= bound_s


happenings = st.lists(
    st.tuples(
        st.sampled_from(("come", "go", "pin", "unpin", "ask", "end", "load", "send", "wait")),
        st.integers(0, 3),
        st.floats(0.0, 0.5),
    ),
    max_size=120,
)


@given(happenings)
def test_whatever_happens_what_is_pinned_stays_and_nobody_is_woken_for_nothing(
    happenings: list[tuple[str, int, float]],
) -> None:
    """Models come, go and are pinned, one at a time; requests end and loads take as long as they like."""
    adapter_bytes = dict(zip(map(ModelId, ("m0", "m1", "m2", "m3")), (0, 2, 4, 200), strict=True))
    policy, now_s, number = TurnPolicy(BUDGET_BYTES, adapter_bytes=adapter_bytes.__getitem__), 0.0, 0
    requests: dict[ModelId, list[RequestId]] = {}
    pinned, whole = set[ModelId](), set[ModelId]()

    def weights_of(name: ModelId) -> WeightsView:
        return WeightsView(0.0 if name in whole else 0.2, 0.2)

    for what, which, seconds in happenings:
        name = ModelId(f"m{which}")
        is_hosted, number = name in requests, number + 1
        match what:
            case "come" if not is_hosted:
                policy.hosted(name, Promise(45, 4, 1))
                requests[name] = []
            case "go" if is_hosted:
                policy.forget(name)
                del requests[name]
                pinned.discard(name)
                whole.discard(name)
            case "pin" if is_hosted and len(pinned | {name}) <= 1:
                policy.pin(name, now_s, is_pinned=True)
                pinned.add(name)
            case "unpin" if is_hosted:
                policy.pin(name, now_s, is_pinned=False)
                pinned.discard(name)
            case "ask" if is_hosted:
                requests[name].append(RequestId(str(number)))
                policy.arrived(name, requests[name][-1], Pace(), now_s, seconds, 0)
            case "end" if is_hosted and requests[name]:
                policy.ended(name, requests[name].pop(0))
            case "load" if policy.is_in_turn(name):
                whole.add(name)
                policy.loaded(name, now_s)
            case "send" if policy.is_in_turn(name) and name in whole:
                policy.sent(name, requests[name], now_s)
            case "wait":
                now_s += seconds
            case _:
                pass
        while changes := policy.decide(now_s, weights_of):
            for change in changes:
                assert isinstance(change, BeginTurn) or change.model not in pinned
                if isinstance(change, EndTurn) and change.why is not TurnEnd.IDLE:
                    whole.discard(change.model)
        assert policy.memory.bound_bytes() <= BUDGET_BYTES
        assert policy.wake_s > now_s, "woken for nothing"
        is_free = not any(policy.is_in_turn(name) for name in requests)
        assert not (is_free and any(policy.wants_turn(name) for name in requests)), "nobody has the turn"
