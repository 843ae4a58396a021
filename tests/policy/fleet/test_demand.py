"""How many replicas a model gets, and how long it keeps them."""

from __future__ import annotations

import heapq
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.core.types import Hold, ModelId, NodeId, RequestId, Rung, WorkerId
from hearth.policy.fleet.estimates import LONG_S, Arrivals
from hearth.policy.fleet.events import (
    Action,
    BrainConfig,
    Dispatch,
    Event,
    Evict,
    LoadModel,
    ModelDeployed,
    ModelReady,
    NodeDraining,
    RequestArrived,
    RequestFinished,
    RungUse,
    TimerFired,
    Why,
    WorkerJoined,
)
from hearth.policy.fleet.records import Model
from tests.policy.fleet.world import World, profile

A, B = ModelId("a"), ModelId("b")
RUN_S = 1.0  #: of every request; the brain expects the same before it has seen one
FIRST, OTHER = NodeId("n1"), NodeId("n2")


class Service:
    """A world with a clock. Each worker has room for one model."""

    def __init__(
        self, num_workers: int, *, load_s: float = 0.5, max_seqs: int = 2, max_replicas: int | None = None
    ) -> None:
        self.world = World(BrainConfig(priors=dict.fromkeys(Rung, 30 / load_s)))
        self.load_s, self.now_s, self.num_asked = load_s, 0.0, 0
        self.loads: list[tuple[float, ModelId]] = []
        self.evicted: list[ModelId] = []
        self.sent: dict[RequestId, Dispatch] = {}
        self._due: list[tuple[float, int, Event]] = []
        self._num_due = 0
        for number in range(num_workers):
            node = OTHER if number else FIRST
            self.tell(WorkerJoined(0.0, WorkerId(f"w{number}"), "cuda", 40, node=node))
        for model in (A, B):
            deployed = profile(model, keep_alive_s=300.0, max_seqs=max_seqs, max_replicas=max_replicas)
            self.tell(ModelDeployed(0.0, deployed))

    @property
    def model(self) -> Model:
        return self.world.fleet.models[A]

    def ask(self, num_requests: int, model: ModelId = A) -> list[Action]:
        actions: list[Action] = []
        for _ in range(num_requests):
            self.num_asked += 1
            arrived = RequestArrived(self.now_s, RequestId(f"r{self.num_asked}"), model, 10, None)
            actions += self.tell(arrived)
        return actions

    def tell(self, event: Event) -> list[Action]:
        actions = self.world.tell(event)
        for action in actions:
            if isinstance(action, LoadModel):
                self.loads.append((self.now_s, action.model))
                use = RungUse(Rung.DISK, 30, self.load_s)
                at_s = self.now_s + self.load_s
                self._put(ModelReady(at_s, action.worker, action.model, (use,), self.load_s))
            elif isinstance(action, Dispatch):
                self.sent[action.request_id] = action
                replica = self.world.fleet.workers[action.worker].replicas[action.model]
                begin_s = self.now_s + (0.0 if replica.is_ready else self.load_s)
                self._put(RequestFinished(begin_s + RUN_S, action.request_id, 5))
            elif isinstance(action, Evict):
                self.evicted.append(action.model)
        return actions

    def play(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while True:
            timer_s = self.world.cluster.timer_s
            due_s = self._due[0][0] if self._due else math.inf
            self.now_s = min(until_s, due_s, math.inf if timer_s is None else timer_s)
            if self.now_s == until_s:
                return
            event = TimerFired(self.now_s) if self.now_s < due_s else heapq.heappop(self._due)[2]
            self.tell(event)

    def _put(self, event: Event) -> None:
        self._num_due += 1
        heapq.heappush(self._due, (event.now_s, self._num_due, event))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 12), st.sampled_from([None, 3]))
def test_a_burst_starts_all_replicas_that_it_needs_before_the_first_is_loaded(
    num_requests: int, max_seqs: int, num_workers: int, max_replicas: int | None
) -> None:
    service = Service(num_workers, max_seqs=max_seqs, max_replicas=max_replicas)
    service.ask(num_requests)
    wanted = math.ceil(num_requests / max_seqs)
    assert len(service.model.loading) == min(wanted, num_workers, max_replicas or num_workers)


def test_one_step_orders_as_many_loads_as_the_queue_needs() -> None:
    service = Service(8)
    service.tell(NodeDraining(0.0, OTHER, is_draining=True))
    service.ask(9)
    service.play(0.6)  # Two run, seven wait.
    actions = service.tell(NodeDraining(service.now_s, OTHER, is_draining=False))
    assert len([one for one in actions if isinstance(one, LoadModel)]) == 4
    assert {one.why for one in actions if isinstance(one, Dispatch)} == {Why.DEMAND}


def test_fewer_replicas_start_than_a_queue_would_fill_if_it_ends_sooner_than_a_load() -> None:
    service = Service(8, load_s=1.5)
    service.ask(1)
    service.play(3.0)
    service.ask(6)  # Three of the four that wait have a slot within a load.
    service.play(10.0)
    assert len(service.loads) == 2


def test_requests_that_other_replicas_will_serve_sooner_wait_for_them() -> None:
    service = Service(2, load_s=1.5)
    service.ask(1)
    service.play(3.0)
    service.ask(6)
    on_new = [name for name, one in service.sent.items() if one.why is Why.DEMAND]
    assert len(on_new) == 2
    assert RequestId("r4") not in service.sent, "the first that waits has a slot after a second"


def test_one_request_that_waits_starts_one_replica() -> None:
    service = Service(12, max_seqs=1)
    service.ask(2)
    assert len(service.loads) == 2


@settings(max_examples=20)
@given(st.integers(2, 12), st.floats(1.0, 60.0), st.integers(1, 3))
def test_replicas_stay_if_the_load_comes_and_goes(num_requests: int, period_s: float, max_seqs: int) -> None:
    service = Service(6, max_seqs=max_seqs)
    for _ in range(10):
        service.ask(num_requests)
        service.play(RUN_S + period_s)
    assert len(service.loads) <= min(6, math.ceil(num_requests / max_seqs))
    assert service.evicted == []


def test_a_burst_of_one_model_leaves_others_no_worse_off_than_their_patience() -> None:
    service = Service(4)
    service.ask(8)
    assert len(service.model.replicas) == 4
    service.ask(1, B)
    for _ in range(8):
        service.play(0.5)
        service.ask(6)
    assert service.sent[RequestId("r9")].waited_s <= service.world.fleet.config.patience_s + RUN_S


def test_a_replica_that_a_burst_left_is_evicted_before_the_only_one_of_another_model() -> None:
    service = Service(3)
    service.ask(1, B)
    service.play(3.0)
    service.ask(4)
    service.play(20.0)
    holds = [replica.hold for replica in service.model.replicas.values()]
    assert sorted(holds, key=str) == sorted([Hold.WARM, Hold.RETAINED], key=str)
    service.tell(ModelDeployed(service.now_s, profile("c")))
    service.ask(1, ModelId("c"))
    assert service.evicted == [A]
    (last,) = service.model.replicas.values()
    assert (last.hold, last.expires_s - last.idle_since_s) == (Hold.WARM, 300.0)


def test_a_model_that_is_used_all_the_time_keeps_its_replicas_for_longer() -> None:
    seldom, often = Service(2), Service(2)
    for service, num_waves in ((seldom, 1), (often, 60)):
        for _ in range(num_waves):
            service.ask(3)
            service.play(2.0)
    warm_s = {
        service: min(one.spare.warm_s for one in service.model.replicas.values() if one.spare is not None)
        for service in (seldom, often)
    }
    assert warm_s[seldom] < 10.0
    assert warm_s[often] > 50.0


@given(st.floats(0.1, 4.0), st.integers(1, 200))
def test_a_burst_is_not_expected_to_go_on(per_s: float, num_requests: int) -> None:
    burst, steady = Arrivals(0.0), Arrivals(0.0)
    for _ in range(num_requests):
        burst.add(0.0)
    assert burst.lasting_per_s(0.0) <= num_requests / LONG_S
    for number in range(int(5 * LONG_S * per_s)):
        steady.add(number / per_s)
    now_s = steady.last_s
    assert steady.lasting_per_s(now_s) == pytest.approx(per_s, rel=0.05, abs=0.1)
    assert steady.lasting_per_s(now_s + 60.0) < 0.01 * per_s + 0.001
