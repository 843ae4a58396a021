"""Which busy models would be drained, in any world."""

from __future__ import annotations

from hypothesis import given, settings

from hearth.policy.fleet.drain import begin_drain, is_done, is_needless, plan_drain
from hearth.policy.fleet.events import BrainConfig
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.records import Drain, Model
from hearth.types import Hold
from tests.policy.fleet.world import LONG_LIVES, Moves, played


@settings(max_examples=40, deadline=None)
@given(LONG_LIVES)
def test_a_drain_suffices_and_spares_pinned_models_loads_and_those_who_came_earlier(moves: Moves) -> None:
    fleet = played(BrainConfig(patience_s=3.0), moves).fleet
    for model in [fleet.models[name] for name in fleet.queues.for_room if name not in fleet.drains]:
        drain = plan_drain(fleet, model)
        if drain is not None:
            check_drain(fleet, model, drain)


def check_drain(fleet: Fleet, model: Model, drain: Drain) -> None:
    first = model.first_waiting
    assert first is not None
    assert model.profile is not None
    worker, victims = drain.worker, drain.victims
    assert worker.drain is None
    assert model.name not in worker.replicas
    assert any(replica.running for replica in victims), "idle models can be evicted without a drain"
    for replica in victims:
        other = replica.model.first_waiting
        assert replica.worker is worker
        assert replica.hold is not Hold.PINNED
        assert replica.is_ready or not replica.running
        assert other is None or other.number > first.number
    freed_bytes = worker.promises.free_bytes + sum(replica.num_bytes for replica in victims)
    least_bytes = model.profile.footprints[worker.kind].least_bytes
    assert freed_bytes >= least_bytes
    assert all(freed_bytes - replica.num_bytes < least_bytes for replica in victims)
    assert not is_done(drain)
    assert not is_needless(fleet, drain)
    begin_drain(fleet, drain)
    assert all(worker.name not in replica.model.usable for replica in victims)
    assert fleet.drains[model.name] is worker.drain is drain
