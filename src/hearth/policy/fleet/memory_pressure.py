"""Replicas that run out of KV memory: what the brain does about it. Pure.

Replicas report how much KV they will need in a second and how much they can have. If together they need more,
the model gets a further replica where there is room without evicting warm models. Else, if it may, groups of
its replicas become pipelines: each member keeps some layers, and the memory of the others is for KV
(`drop_plan.py`, `drop_group.py`). Their requests continue there like those of a lost worker: prompt and
tokens are computed again. When the demand has been low for long enough, they become whole replicas again.
"""

from __future__ import annotations

from hearth.policy.fleet.capacity import RETAINED
from hearth.policy.fleet.drop_group import DropState, Groups
from hearth.policy.fleet.drop_plan import plan_drop, restorable
from hearth.policy.fleet.events import Action, PressureReported, Why
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.records import Model
from hearth.policy.fleet.serving import (
    dissolve,
    fill_slots,
    form_pipeline,
    load_for_pressure,
    new_replica,
    order_load,
)


def record_pressure(fleet: Fleet, event: PressureReported) -> list[Action]:
    worker = fleet.workers.get(event.worker)
    replica = None if worker is None else worker.replicas.get(event.model)
    if replica is None:  # It was evicted meanwhile.
        return []
    replica.demand_tokens, replica.room_tokens = event.demand_tokens, event.room_tokens
    model = fleet.served_by(replica)
    if model is None or not is_short(model):
        return []
    return load_for_pressure(fleet, model) or _drop(fleet, model)


def is_short(model: Model) -> bool:
    """True if the replicas of a model together need more KV than they can have, and none has much to spare.

    One that has not reported yet is loading, or has had no request: new requests go there. So they do to one
    that is half empty, and no further replica would take those that run.
    """
    replicas = model.usable.values()
    if not all(one.room_tokens and 2 * one.demand_tokens > one.room_tokens for one in replicas):
        return False
    return sum(one.demand_tokens for one in replicas) > sum(one.room_tokens for one in replicas)


def follow_drops(fleet: Fleet) -> list[Action]:
    """Follow the groups of all models that have any, and restore those that are no longer needed."""
    actions: list[Action] = []
    for name, model in list(fleet.dropped.items()):
        if fleet.models.get(name) is not model:  # It was removed.
            del fleet.dropped[name]
            continue
        model.drop.observe(_groups_of(model), fleet.now_s)
        if model.drop.may_restore(fleet.now_s):
            actions += _restore(fleet, model)
        if model.drop.state is DropState.WHOLE:
            del fleet.dropped[name]
    return actions


def _groups_of(model: Model) -> Groups:
    groups = [one for one in model.replicas.values() if one.is_dropped]
    others = [one for one in model.usable.values() if not one.is_dropped]
    return Groups(
        num_groups=len(groups),
        num_ready=sum(one.is_ready for one in groups),
        num_loading=sum(not one.is_ready for one in others),
        demand_tokens=sum(one.demand_tokens for one in (*groups, *others)),
        room_tokens=sum(one.whole_tokens for one in groups) + sum(one.room_tokens for one in others),
    )


def _drop(fleet: Fleet, model: Model) -> list[Action]:
    profile, groups = model.profile, _groups_of(model)
    if profile is None or not profile.may_drop or fleet.now_s < fleet.no_pipeline_until_s:
        return []
    if not model.drop.may_drop(groups, fleet.now_s):
        return []
    planned = plan_drop(fleet, model, profile)
    if not planned:
        return []
    model.drop.drop(fleet.now_s)
    fleet.dropped[model.name] = model
    actions, moved = dissolve(fleet, [replica for group in planned for replica in group.replicas])
    for group in planned:
        first = group.pipeline.stages[0]
        pipeline = new_replica(model, first.worker, first.footprint, 0)
        pipeline.is_dropped, pipeline.kv_share = True, group.kv_share
        pipeline.whole_tokens = sum(one.room_tokens for one in group.replicas)
        actions += form_pipeline(fleet, pipeline, group.pipeline)
    return actions + fill_slots(fleet, model, moved, Why.DROPPED)


def _restore(fleet: Fleet, model: Model) -> list[Action]:
    """Load whole replicas in place of all groups. Groups stay if a member of one has no room, or if one
    is about to leave."""
    profile, groups = model.profile, [one for one in model.replicas.values() if one.is_dropped]
    if profile is None or any(one.hold is RETAINED or not one.takes_requests for one in groups):
        return []
    workers = [list(restorable(one, profile)) for one in groups]
    if not all(workers):
        return []
    model.drop.restore(fleet.now_s)
    actions, moved = dissolve(fleet, groups)
    for worker in (one for members in workers for one in members):
        there_bytes = model.resident_bytes.get(worker.name, 0)
        replica = new_replica(model, worker, profile.footprints[worker.kind], there_bytes)
        fleet.add(replica)
        actions.append(order_load(replica))
    return actions + fill_slots(fleet, model, moved, Why.RESTORED)
