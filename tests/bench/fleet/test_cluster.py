"""A simulated cluster under brains that order nonsense, which it has to notice."""

from __future__ import annotations

import pytest

from bench.fleet.cluster import SimulatedCluster
from hearth.core.types import ModelId, RequestId, WorkerId
from hearth.policy.fleet.events import (
    Action,
    Dispatch,
    Event,
    LoadModel,
    LoadProgressed,
    ModelDeployed,
    ModelReady,
    Reject,
    RejectReason,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    SetTimer,
    TimerFired,
    Why,
    WorkerJoined,
    WorkerLost,
)
from tests.policy.fleet.world import profile

A, R = ModelId("a"), RequestId("r")
W0, W1 = WorkerId("w0"), WorkerId("w1")


class Script:
    """A brain that orders what it was told to, once. Mutable."""

    def __init__(self) -> None:
        self.orders: list[Action] = []

    def __call__(self, event: Event) -> list[Action]:
        orders, self.orders = self.orders, []
        return orders


def begun() -> tuple[Script, SimulatedCluster]:
    """Two workers, of which the first has the model, and a request that waits."""
    script = Script()
    cluster = SimulatedCluster(script)
    for event in (
        ModelDeployed(0.0, profile(A)),
        WorkerJoined(0.0, W0, "cuda", 100),
        WorkerJoined(0.0, W1, "cuda", 100),
        RequestArrived(0.0, R, A, 10, None),
    ):
        cluster.tell(event)
    tell(script, cluster, LoadModel(A, W0, 5, 10))
    return script, cluster


def tell(script: Script, cluster: SimulatedCluster, *orders: Action) -> None:
    script.orders = list(orders)
    cluster.tell(TimerFired(1.0))
    cluster.check()


def dispatch(worker: WorkerId = W0, request: RequestId = R, model: ModelId = A) -> Dispatch:
    return Dispatch(request, model, worker, Why.RESIDENT, 0.0, ())


def test_a_request_that_runs_is_not_dispatched_again() -> None:
    script, cluster = begun()
    tell(script, cluster, dispatch())
    with pytest.raises(AssertionError, match="twice"):
        tell(script, cluster, dispatch())


def test_a_request_that_lost_its_worker_may_be_dispatched_again() -> None:
    script, cluster = begun()
    tell(script, cluster, dispatch())
    cluster.tell(WorkerLost(2.0, W0))
    tell(script, cluster, LoadModel(A, W1, 5, 10), dispatch(W1))
    assert cluster.requests[R].num_dispatches == 2


def test_a_request_ends_once() -> None:
    script, cluster = begun()
    cluster.tell(RequestCancelled(2.0, R))
    with pytest.raises(KeyError):
        tell(script, cluster, Reject(R, RejectReason.QUEUE_FULL, "too late"))


def test_a_request_does_not_go_to_an_old_version() -> None:
    script, cluster = begun()
    cluster.tell(ModelDeployed(2.0, profile(A, digest="new")))
    with pytest.raises(AssertionError, match="old version"):
        tell(script, cluster, dispatch())


def test_a_timer_lies_in_the_future() -> None:
    script, cluster = begun()
    with pytest.raises(AssertionError):
        tell(script, cluster, SetTimer(1.0))


def test_what_is_said_late_changes_nothing() -> None:
    _, cluster = begun()
    gone, nobody = WorkerId("gone"), RequestId("nobody")
    for event in (
        ModelReady(2.0, gone, A, (), 1.0),
        LoadProgressed(2.0, gone, A, 1),
        WorkerLost(2.0, gone),
        RequestFinished(2.0, nobody, 1),
        RequestCancelled(2.0, nobody),
    ):
        assert cluster.tell(event) == []
    cluster.check()
    assert list(cluster.requests) == [R]
