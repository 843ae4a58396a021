"""Which busy models would be drained, in any world."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given

from hearth.core.types import Hold, ModelId, RequestId, WorkerId
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.capacity import Promises
from hearth.policy.fleet.drain import begin_drain, is_done, is_needless, plan_drain
from hearth.policy.fleet.events import (
    BrainConfig,
    LoadModel,
    ModelDeployed,
    ModelReady,
    RequestArrived,
    RequestFinished,
    TimerFired,
    WorkerJoined,
)
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.profile import Promise
from hearth.policy.fleet.records import Drain, Model, Replica, Worker
from tests.policy.fleet.world import LONG_LIVES, Moves, played, profile


@given(LONG_LIVES)
def test_a_drain_suffices_and_spares_pinned_models_loads_and_those_who_came_earlier(moves: Moves) -> None:
    fleet = played(BrainConfig(patience_s=3.0), moves).fleet
    for model in [fleet.models[name] for name in fleet.queues.for_room if name not in fleet.drains]:
        drain = plan_drain(fleet, model)
        if drain is not None:
            check_drain(fleet, model, drain)


def test_a_model_is_drained_only_when_nobody_waits_for_it_who_came_earlier() -> None:
    fleet, a, b = Fleet(BrainConfig(patience_s=2.0)), ModelId("a"), ModelId("b")
    for model in (a, b):
        step(fleet, ModelDeployed(0.0, profile(model, fixed_bytes=60, max_seqs=1)))
    step(fleet, WorkerJoined(0.0, WorkerId("w"), "cuda", 100))
    for number, model in enumerate((b, b, a)):
        step(fleet, RequestArrived(1.0, RequestId(f"r{number}"), model, 10, None))
    step(fleet, ModelReady(2.0, WorkerId("w"), b, (), 1.0))
    step(fleet, TimerFired(3.0))
    assert not fleet.drains, "the second request for b came before the one for a"
    step(fleet, RequestFinished(4.0, RequestId("r0"), 5))
    assert list(fleet.drains) == [a]
    actions = step(fleet, RequestFinished(5.0, RequestId("r1"), 5))
    assert LoadModel(a, WorkerId("w"), 5, 10, Promise(65, 0)) in actions


def check_drain(fleet: Fleet, model: Model, drain: Drain) -> None:
    first = model.first_waiting
    assert first is not None
    assert model.profile is not None
    workers, victims = drain.workers, drain.victims
    for worker in workers:
        assert worker.drain is None
        assert model.name not in worker.replicas
    assert any(replica.running for replica in victims), "idle models can be evicted without a drain"
    for replica in victims:
        other = replica.model.first_waiting
        assert set(replica.workers).intersection(workers)
        assert replica.hold is not Hold.PINNED
        assert replica.is_ready or not replica.running
        assert other is None or other.place > first.place
    if len(workers) > 1:  # `test_pipelines.py` has more of it
        return
    (worker,) = workers
    footprint = model.profile.footprints[worker.kind]
    assert without(worker, victims).has_room(footprint)
    for needless in victims:
        others = [replica for replica in victims if replica is not needless]
        assert not without(worker, others).has_room(footprint), f"needless: {needless.model.name}"
    assert not is_done(drain)
    assert not is_needless(fleet, drain)
    begin_drain(fleet, drain)
    assert all(worker.name not in replica.model.usable for replica in victims)
    assert fleet.drains[model.name] is worker.drain is drain


def without(worker: Worker, gone: Iterable[Replica]) -> Promises:
    """What a worker would owe if some replicas were gone."""
    promises = worker.promises.copy()
    for replica in gone:
        promises.release(replica.promise_on(worker), replica.booked_hold)
    return promises
