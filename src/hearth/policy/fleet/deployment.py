"""Models that are deployed, removed and stopped, and what has to leave for that. Loads nothing."""

from __future__ import annotations

from hearth.policy.fleet.affinity import forget_bytes, free_retired, note
from hearth.policy.fleet.capacity import victim
from hearth.policy.fleet.events import Action, Evict, ModelProfile, ModelStopped, RejectReason
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.refusals import gone, outdated, refuse_hopeless, reject
from hearth.policy.fleet.replica import Model, Replica, Stop
from hearth.types import ModelId


def deployed(fleet: Fleet, profile: ModelProfile) -> list[Action]:
    """What is resident of other bytes, or was promised memory for other sizes, serves nobody new."""
    model = fleet.models.setdefault(profile.model, Model(profile.model))
    before, model.profile = model.profile, profile
    model.is_stopped = False
    fleet.forgive_all(model)
    fleet.place_pinned(model)
    fleet.is_changed = True
    is_other = before is None or (before.digest, before.num_bytes, before.footprints) != (
        *(profile.digest, profile.num_bytes, profile.footprints),
    )
    if not is_other:
        fleet.settle_all(model)
        return []
    actions: list[Action] = [
        reject(fleet, request, RejectReason.MODEL_REMOVED, why_not)
        for request in list(model.waiting.values())
        if (why_not := outdated(request)) is not None
    ]
    return actions + _outdate(fleet, model, before) + refuse_hopeless(fleet)


def removed(fleet: Fleet, name: ModelId) -> list[Action]:
    model = fleet.models.get(name)
    if model is None or model.profile is None:
        return []
    message = gone(model)
    waiting = list(model.waiting.values())
    actions: list[Action] = [reject(fleet, r, RejectReason.MODEL_REMOVED, message) for r in waiting]
    before, model.profile = model.profile, None
    model.named_keep_alive_s = model.bytes_by_rung = None
    fleet.forgive_all(model)
    fleet.place_pinned(model)
    fleet.estimates.forget(name)
    if not model.replicas:
        del fleet.models[name]
    return actions + _outdate(fleet, model, before)


def _outdate(fleet: Fleet, model: Model, before: ModelProfile | None) -> list[Action]:
    """Replicas of an old version: idle ones leave, busy ones when they are idle. So does what is left of
    earlier ones, unless its bytes are those of the new version."""
    actions: list[Action] = []
    after = model.profile
    if before is not None and (
        after is None or (before.digest, before.num_bytes) != (after.digest, after.num_bytes)
    ):
        actions += free_retired(model, fleet.workers)
        forget_bytes(model, fleet.workers)
    for replica in list(model.replicas.values()):
        replica.is_stale = True
        fleet.settle(replica)
        actions += leave_if_idle(fleet, replica)
    return actions


def stopped(fleet: Fleet, event: ModelStopped) -> list[Action]:
    model = fleet.models.get(event.model)
    if model is None:
        return []
    actions = free_retired(model, fleet.workers) if event.is_freed else []
    model.named_keep_alive_s, model.is_stopped = None, True
    fleet.place_pinned(model)
    for replica in list(model.replicas.values()):
        replica.stop = Stop(fleet.next_number, event.is_freed)
        fleet.settle(replica)
        actions += leave_if_idle(fleet, replica)
    return actions


def leave_if_idle(fleet: Fleet, replica: Replica) -> list[Action]:
    """Of those that are not to stay."""
    if replica.running or not replica.is_leaving:
        return []
    cost_s, is_freed = victim(replica, fleet.estimates, fleet.now_s).cost_s, replica.is_freed
    if is_freed:
        note(replica.model, replica.worker, 0)
    fleet.remove(replica)
    return [Evict(replica.model.name, replica.worker.name, cost_s, is_freed)]
