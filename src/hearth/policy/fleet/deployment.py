"""Models that are deployed, removed and stopped."""

from __future__ import annotations

from hearth.core.types import ModelId
from hearth.policy.fleet.device_bytes import forget_model, free_retired, record_bytes
from hearth.policy.fleet.events import Action, Evict, ModelStopped, RejectReason
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.profile import ModelProfile
from hearth.policy.fleet.records import Model, Replica, Stop
from hearth.policy.fleet.refusals import explain_outdated, explain_removed, refuse_hopeless, reject
from hearth.policy.fleet.replica_evictions import price_victim


def deploy_model(fleet: Fleet, profile: ModelProfile) -> list[Action]:
    """Enter a model or its new profile. Replicas of other bytes or sizes take no new requests."""
    model = fleet.models.setdefault(profile.model, Model(profile.model))
    before, model.profile = model.profile, profile
    model.is_stopped = False
    model.clear_failures()
    fleet.update_unplaced(model)
    fleet.queues.line_up(model)
    fleet.queues.must_serve = True
    is_same = before is not None and (
        (before.digest, before.num_bytes, before.footprints)
        == (profile.digest, profile.num_bytes, profile.footprints)
    )
    if is_same:
        fleet.reindex_model(model)
        return []
    actions: list[Action] = [
        reject(fleet, request, RejectReason.MODEL_REMOVED, why_not)
        for request in list(model.waiting.values())
        if (why_not := explain_outdated(request)) is not None
    ]
    return actions + _outdate(fleet, model, before) + refuse_hopeless(fleet)


def remove_model(fleet: Fleet, name: ModelId) -> list[Action]:
    model = fleet.models.get(name)
    if model is None or model.profile is None:
        return []
    message = explain_removed(model)
    waiting = list(model.waiting.values())
    actions: list[Action] = [reject(fleet, r, RejectReason.MODEL_REMOVED, message) for r in waiting]
    before, model.profile = model.profile, None
    model.named_keep_alive_s, model.largest_holders = None, ()
    model.residency.clear()
    model.clear_failures()
    fleet.update_unplaced(model)
    fleet.estimates.forget(name)
    if not model.replicas:
        del fleet.models[name]
    return actions + _outdate(fleet, model, before)


def stop_model(fleet: Fleet, event: ModelStopped) -> list[Action]:
    """Make all replicas of a model retained when idle, or evict them if they are to be freed."""
    model = fleet.models.get(event.model)
    if model is None:
        return []
    actions = free_retired(model, fleet.workers) if event.is_freed else []
    model.named_keep_alive_s, model.is_stopped = None, True
    fleet.update_unplaced(model)
    for replica in list(model.replicas.values()):
        replica.stop = Stop(fleet.queues.next_number, event.is_freed)
        fleet.reindex(replica)
        actions += evict_if_leaving(fleet, replica)
    return actions


def evict_if_leaving(fleet: Fleet, replica: Replica) -> list[Action]:
    if replica.running or not replica.is_leaving:
        return []
    cost_s, is_freed = price_victim(replica, fleet.estimates, fleet.now_s).cost_s, replica.must_free_bytes
    if is_freed:
        record_bytes(replica.model, replica.worker, 0)
    fleet.remove(replica)
    return [Evict(replica.model.name, replica.worker.name, cost_s, is_freed)]


def _outdate(fleet: Fleet, model: Model, before: ModelProfile | None) -> list[Action]:
    actions: list[Action] = []
    after = model.profile
    if before is not None and (
        after is None or (before.digest, before.num_bytes) != (after.digest, after.num_bytes)
    ):
        actions += free_retired(model, fleet.workers)
        forget_model(model, fleet.workers)
    for replica in list(model.replicas.values()):
        replica.is_stale = True
        fleet.reindex(replica)
        actions += evict_if_leaving(fleet, replica)
    return actions
