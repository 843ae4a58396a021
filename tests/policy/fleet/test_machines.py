"""When machines are added and given back."""

from __future__ import annotations

import math

from hearth.core.types import LOCAL, ModelId, NodeId, RequestId, WorkerId
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import (
    AddWorkers,
    BrainConfig,
    Dispatch,
    Event,
    ModelDeployed,
    ModelReady,
    NodeLost,
    ReleaseWorkers,
    RequestArrived,
    RequestFinished,
    Scaling,
    SetTimer,
    TimerFired,
    TurnBegan,
    WorkerJoined,
    WorkerLost,
)
from hearth.policy.fleet.fleet import Fleet
from tests.policy.fleet.world import profile

A, B = ModelId("a"), ModelId("b")
ONE, TWO = NodeId("one"), NodeId("two")


class Machines:
    """A fleet, and the orders about machines that it has given. Mutable."""

    def __init__(
        self, *nodes: NodeId, min_nodes: int = 0, takes_turns: bool = False, scales: bool = True
    ) -> None:
        scaling = Scaling(out_after_s=5.0, in_after_s=300.0, min_nodes=min_nodes) if scales else None
        self.fleet = Fleet(BrainConfig(scaling=scaling, takes_turns=takes_turns))
        self.orders: list[tuple[float, AddWorkers | ReleaseWorkers]] = []
        for model in (A, B):
            self.post(ModelDeployed(0.0, profile(model, fixed_bytes=60, max_seqs=1)))
        for node in nodes:
            self.join(0.0, node)

    def post(self, event: Event) -> None:
        self.orders += [
            (event.now_s, action)
            for action in step(self.fleet, event)
            if isinstance(action, AddWorkers | ReleaseWorkers)
        ]

    def run_until(self, until_s: float) -> None:
        """Fire the timers that come until then."""
        while self.fleet.timer_s is not None and self.fleet.timer_s <= until_s:
            self.post(TimerFired(self.fleet.timer_s))

    def join(self, now_s: float, node: NodeId) -> None:
        self.post(WorkerJoined(now_s, worker_of(node), "cuda", 100, node=node))

    def ask(self, now_s: float, model: ModelId, name: str, *, is_batch: bool = False) -> None:
        self.post(RequestArrived(now_s, RequestId(name), model, 10, None, is_batch=is_batch))

    def finish(self, now_s: float, name: str) -> None:
        self.post(RequestFinished(now_s, RequestId(name), 5))


def worker_of(node: NodeId) -> WorkerId:
    return WorkerId("w0" if node == LOCAL else f"{node}/w0")


def test_a_machine_is_ordered_while_a_request_has_no_room() -> None:
    machines = Machines(ONE)
    machines.ask(10.0, A, "long")
    machines.post(ModelReady(11.0, worker_of(ONE), A, (), 1.0))
    machines.ask(20.0, B, "waits")
    machines.run_until(29.0)
    assert machines.orders == [(25.0, AddWorkers(B))]
    machines.run_until(31.0)
    assert machines.orders[1:] == [(30.0, AddWorkers(B))], "again, as long as it waits"
    machines.join(32.0, TWO)
    machines.run_until(100.0)
    assert len(machines.orders) == 2


def test_the_first_machine_is_ordered_without_any_worker() -> None:
    machines = Machines()
    machines.ask(20.0, B, "waits")
    machines.run_until(25.0)
    assert machines.orders == [(25.0, AddWorkers(B))]


def test_waiting_for_a_slot_or_a_turn_counts_too() -> None:
    full = Machines(ONE)
    full.ask(10.0, A, "long")
    full.post(ModelReady(11.0, worker_of(ONE), A, (), 1.0))
    full.ask(20.0, A, "behind it")
    full.run_until(25.0)
    assert full.orders == [(25.0, AddWorkers(A))]
    turns = Machines(ONE, takes_turns=True)
    turns.ask(10.0, A, "long")
    turns.post(TurnBegan(10.0, worker_of(ONE), A))
    turns.post(ModelReady(11.0, worker_of(ONE), A, (), 1.0))
    turns.ask(20.0, B, "hosted beside it")
    turns.run_until(25.0)
    assert turns.orders == [(25.0, AddWorkers(B))]


def test_a_load_is_waited_for() -> None:
    machines = Machines(ONE)
    machines.ask(10.0, A, "loads")
    machines.ask(11.0, A, "waits for its slot")
    machines.run_until(60.0)
    assert machines.orders == []


def test_a_lost_worker_is_replaced_first() -> None:
    machines = Machines(ONE)
    machines.post(WorkerLost(10.0, worker_of(ONE)))
    machines.ask(11.0, A, "waits")
    machines.run_until(60.0)
    assert machines.orders == []
    machines.post(NodeLost(60.0, ONE))
    machines.run_until(65.0)
    assert machines.orders, "its machine is gone"


def test_batch_requests_wait_longer() -> None:
    machines = Machines(ONE)
    machines.ask(10.0, A, "long")
    machines.post(ModelReady(11.0, worker_of(ONE), A, (), 1.0))
    machines.ask(20.0, B, "waits", is_batch=True)
    machines.run_until(40.0)
    assert machines.orders == []


def test_an_idle_machine_is_given_back_and_takes_no_more_requests() -> None:
    machines = Machines(ONE, TWO)
    machines.ask(10.0, A, "one")
    machines.post(ModelReady(11.0, worker_of(ONE), A, (), 1.0))
    machines.finish(100.0, "one")
    machines.run_until(350.0)
    assert machines.orders == [(300.0, ReleaseWorkers(TWO))]
    machines.run_until(401.0)
    assert machines.orders[1:] == [(400.0, ReleaseWorkers(ONE))]
    actions = step(machines.fleet, RequestArrived(402.0, RequestId("two"), A, 10, None))
    assert not any(isinstance(action, Dispatch) for action in actions), "both go"


def test_the_minimum_stays_and_is_the_last_used() -> None:
    machines = Machines(ONE, TWO, min_nodes=1)
    machines.ask(10.0, A, "one")
    machines.post(ModelReady(11.0, worker_of(ONE), A, (), 1.0))
    machines.finish(12.0, "one")
    machines.run_until(5000.0)
    assert [order for _, order in machines.orders] == [ReleaseWorkers(TWO)]


def test_nodes_that_run_load_or_pin_stay() -> None:
    machines = Machines(ONE, TWO)
    machines.ask(10.0, A, "runs for long")
    machines.post(RequestArrived(11.0, RequestId("pins"), B, 10, None, keep_alive_s=math.inf))
    (pinned,) = machines.fleet.models[B].replicas
    machines.post(ModelReady(12.0, pinned, B, (), 1.0))
    machines.finish(13.0, "pins")
    machines.run_until(5000.0)
    assert machines.orders == []


def test_the_head_stays() -> None:
    machines = Machines(LOCAL)
    machines.run_until(5000.0)
    assert machines.orders == []


def test_nothing_is_ordered_and_no_timer_set_without_machines_to_be_had() -> None:
    machines = Machines(ONE, scales=False)
    machines.ask(10.0, A, "long")
    machines.ask(20.0, B, "waits")
    machines.run_until(1000.0)
    assert machines.orders == []
    idle = Fleet(BrainConfig())
    actions = step(idle, WorkerJoined(0.0, worker_of(ONE), "cuda", 100, node=ONE))
    assert not any(isinstance(action, SetTimer) for action in actions)


def test_a_model_that_fits_no_worker_of_the_head_waits_for_a_machine() -> None:
    machines = Machines()
    machines.post(WorkerJoined(0.0, worker_of(LOCAL), "cuda", 20, node=LOCAL))
    machines.ask(0.0, A, "r")
    machines.run_until(6.0)
    assert [order for _, order in machines.orders] == [AddWorkers(A)]
    machines.join(7.0, ONE)
    assert A in machines.fleet.workers[worker_of(ONE)].replicas
