"""Models that are deployed, removed and stopped."""

from __future__ import annotations

import math

from hearth.core.types import ModelId, NodeId
from hearth.policy.fleet.device_bytes import forget_model, free_retired, record_bytes
from hearth.policy.fleet.events import Action, ModelStopped, RejectReason
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.profile import Footprint, ModelProfile, StageSizes
from hearth.policy.fleet.records import Model, Replica, Stop
from hearth.policy.fleet.refusals import explain_outdated, explain_removed, refuse_hopeless, reject
from hearth.policy.fleet.replica_evictions import order_evictions, price_victim


def deploy_model(fleet: Fleet, profile: ModelProfile) -> list[Action]:
    """Enter a model or its new profile. Replicas of other bytes or sizes take no new requests.

    So do those on workers where it may no longer run; others stay when a new kind of worker joins.
    """
    model = fleet.models.setdefault(profile.model, Model(profile.model))
    before, model.profile = model.profile, profile
    model.is_stopped = False
    model.clear_failures()
    fleet.update_unplaced(model)
    fleet.queues.line_up(model)
    fleet.queues.must_serve = True
    is_same = before is not None and (
        (before.digest, before.num_bytes, before.footprints, before.stages)
        == (profile.digest, profile.num_bytes, profile.footprints, profile.stages)
    )
    if is_same:
        fleet.reindex_model(model)
        return []
    fleet.estimates.head_layers.pop(model.name, None)  # of other bytes, or of other devices
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
    model.named_keep_alive_s, model.largest_holders, model.forecast = None, (), None
    model.forecast_due_s = math.inf
    fleet.forecasts_due.drop(name)
    model.residency.clear()
    model.clear_failures()
    fleet.update_unplaced(model)
    fleet.estimates.forget(name)
    if not model.replicas:
        del fleet.models[name]
        fleet.gpu_time.forget(name)
    return actions + _outdate(fleet, model, before)


def stop_model(fleet: Fleet, event: ModelStopped) -> list[Action]:
    """Make all replicas of a model retained when idle, or evict them if they are to be freed."""
    model = fleet.models.get(event.model)
    if model is None:
        return []
    actions = free_retired(model, fleet.workers) if event.is_freed else []
    model.named_keep_alive_s, model.is_stopped = None, True
    fleet.update_unplaced(model)
    for replica in [*model.replicas.values(), *fleet.pipelines_of(model)]:
        replica.stop = Stop(fleet.queues.next_number, event.is_freed)
        fleet.reindex(replica)
        actions += evict_if_leaving(fleet, replica)
    return actions


def evict_pipelines(fleet: Fleet, node: NodeId) -> list[Action]:
    """Evict idle pipelines with a member on a drained node, so that their other workers can form new ones."""
    workers = [worker for worker in fleet.workers.values() if worker.node == node]
    hosted = [replica for worker in workers for replica in worker.replicas.values() if replica.stages]
    leaving = dict.fromkeys(hosted)
    return [action for replica in leaving for action in evict_if_leaving(fleet, replica)]


def evict_if_leaving(fleet: Fleet, replica: Replica) -> list[Action]:
    if replica.running or not replica.is_leaving:
        return []
    victim = price_victim(replica, replica.worker, fleet.estimates, fleet.now_s)
    is_freed = replica.must_free_bytes
    for worker in replica.workers if is_freed else ():
        record_bytes(replica.model, worker, 0)
    fleet.remove(replica)
    return [*order_evictions(replica, victim.cost_s, is_freed=is_freed)]


def _outdate(fleet: Fleet, model: Model, before: ModelProfile | None) -> list[Action]:
    actions: list[Action] = []
    after = model.profile
    is_replaced = before is not None and (
        after is None or (before.digest, before.num_bytes) != (after.digest, after.num_bytes)
    )
    if is_replaced:
        actions += free_retired(model, fleet.workers)
        forget_model(model, fleet.workers)
    for replica in [*model.replicas.values(), *fleet.pipelines_of(model)]:
        replica.is_stale |= is_replaced or _footprint(before, replica) != _footprint(after, replica)
        fleet.reindex(replica)
        actions += evict_if_leaving(fleet, replica)
    return actions


def _footprint(profile: ModelProfile | None, replica: Replica) -> Footprint | StageSizes | None:
    kind = replica.worker.kind
    if profile is None:
        return None
    return profile.stages.get(kind) if replica.stages else profile.footprints.get(kind)
