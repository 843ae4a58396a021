"""Which waiting request is served next, and for which others are drained.

Room goes to the first model that waits for some; no later one may take any on workers that could ever hold
it, so that it cannot starve. After `patience_s` busy models of one worker are drained for it (`drain.py`),
and only that worker stays reserved. A model without a drainable worker reserves room for `max_drain_s` more.

Slots go in the same order. One in four of a replica is kept for interactive requests, until the waiting batch
request has been queued for `BATCH_PATIENCE_S`.

The rest goes to second replicas, if loading one takes less time than waiting for a slot and no warm model
must go, or if a request has waited for `patience_s`. Last come models that are deployed as pinned and on no
worker.
"""

from __future__ import annotations

import math
from itertools import islice, takewhile

from hearth.core.types import LOCAL, Hold, ModelId
from hearth.policy.fleet.drain import begin_drain, is_done, is_in_vain, is_needless, may_give_room, plan_drain
from hearth.policy.fleet.events import Action, Dispatch, Evict, LoadModel, Option, SetTimer, Why
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.records import Drain, Model, Replica, Request
from hearth.policy.fleet.reserved_workers import ReservedWorkers
from hearth.policy.fleet.room_candidates import FIRST_PLACE, RoomCandidates, keeps_room, kept_until_s
from hearth.policy.fleet.routing import ReplicaPlace, choose_place, choose_replica

#: Models that are looked at behind those without a drainable worker; full ones that may be loaded again.
MAX_BEHIND, MAX_FULL = 8, 64


def serve_queues(fleet: Fleet) -> list[Action]:
    actions = _end_drains(fleet) + _fill_kept_slots(fleet) + _share_out(fleet)
    while _drain_for_overdue(fleet):  # From now on only that worker is kept for it.
        actions += _share_out(fleet)
    fleet.queues.must_serve = False
    return actions


def _fill_kept_slots(fleet: Fleet) -> list[Action]:
    kept = fleet.queues.for_kept_slot
    return [action for name in kept for action in fill_slots(fleet, fleet.models[name])]


def _share_out(fleet: Fleet) -> list[Action]:
    reserved = ReservedWorkers(fleet)
    actions = _serve_room_queue(fleet, reserved)
    if not reserved.has_all:
        actions += _serve_slot_queue(fleet, reserved)
        actions += _load_unasked(fleet, reserved)
    return actions


def _serve_room_queue(fleet: Fleet, reserved: ReservedWorkers) -> list[Action]:
    actions: list[Action] = []
    fleet.kept_until_s = math.inf
    candidates = RoomCandidates(fleet, reserved)
    while (model := candidates.next()) is not None:
        if not _could_fit(fleet, model):
            candidates.pass_over(model)
            continue
        most = Hold.BUSY if fleet.config.takes_turns else Hold.WARM
        if (place := choose_place(fleet, model, most=most, reserved=reserved)) is not None:
            actions += _load(fleet, model, place) + _end_drains(fleet)
            continue
        candidates.pass_over(model)
        if (drain := fleet.drains.get(model.name)) is not None and is_done(drain):
            actions += _end_drain(fleet, drain)  # Another model got its room.
        reserve_room(fleet, model, reserved)
        if model.name not in fleet.drains and keeps_room(fleet, model):
            fleet.kept_until_s = min(fleet.kept_until_s, kept_until_s(fleet, model))
        candidates.count_behind()
    reserved.add_drained()
    return actions


def reserve_room(fleet: Fleet, model: Model, reserved: ReservedWorkers) -> None:
    if (drain := fleet.drains.get(model.name)) is not None:
        reserved.drains[drain.worker.name] = drain
    elif model.profile is not None and keeps_room(fleet, model):
        reserved.add_suited(model.profile)


def _serve_slot_queue(fleet: Fleet, reserved: ReservedWorkers) -> list[Action]:
    actions: list[Action] = []
    for name in list(islice(fleet.queues.for_slot.from_rank(FIRST_PLACE), MAX_FULL)):
        model = fleet.models[name]
        if not is_second_worthwhile(fleet, model):
            continue
        is_overdue = _is_overdue(fleet, model)
        most = Hold.WARM if is_overdue else Hold.RETAINED
        place = choose_place(fleet, model, most=most, reserved=reserved)
        if place is not None and (is_overdue or is_second_worthwhile(fleet, model, place.evictions.evict_s)):
            actions += _load(fleet, model, place)
    return actions


def load_beside_paused(fleet: Fleet, model: Model) -> list[Action]:
    """Load a model again for waiting requests, if its replicas have had no turn for too long.

    Only if there is room without evicting warm models and without turns, and no model waits for it.
    """
    overdue_s = fleet.now_s - fleet.config.patience_s
    replicas = model.usable.values()
    is_stuck = bool(replicas) and all(
        one.is_ready and one.hold is Hold.PAUSED and one.turn_changed_s <= overdue_s for one in replicas
    )
    if not is_stuck or fleet.queues.for_room or model.first_waiting is None:
        return []
    place = choose_place(fleet, model, most=Hold.RETAINED)
    return [] if place is None else _load(fleet, model, place)


def is_second_worthwhile(fleet: Fleet, model: Model, evict_s: float = 0.0) -> bool:
    """True if another replica of a full model would be ready before the last waiting request has a slot."""
    if model.profile is None or model.loading or not model.usable or not model.waiting:
        return False
    is_queue_filling = 2 * fleet.queues.num_waiting >= fleet.config.max_queue
    if is_queue_filling or _is_overdue(fleet, model):
        return True
    load_s = fleet.estimates.load_s(model.profile.num_bytes, model, LOCAL)
    run_s = fleet.estimates.run_s(model.name)
    return load_s + evict_s < run_s * len(model.waiting) / max(1, model.num_running)


def _load_unasked(fleet: Fleet, reserved: ReservedWorkers) -> list[Action]:
    actions: list[Action] = []
    for model in list(fleet.unplaced.values()):
        is_failing = model.failure is not None and fleet.now_s < model.failure.until_s
        if is_failing or model.num_deadly_loads > fleet.config.max_resumes:
            continue
        place = choose_place(fleet, model, most=Hold.RETAINED, reserved=reserved)
        if place is not None:
            actions += _load(fleet, model, place)
    return actions


def _load(fleet: Fleet, model: Model, place: ReplicaPlace) -> list[Action]:
    assert model.profile is not None, f"removed: `{model.name}`"
    actions: list[Action] = []
    for victim in place.evictions.victims:
        fleet.remove(victim.replica)
        actions.append(Evict(victim.replica.model.name, place.worker.name, victim.cost_s, is_freed=False))
    worker, footprint, profile = place.worker, place.footprint, model.profile
    reused_bytes = model.resident_bytes.get(worker.name, 0)
    replica = Replica(
        model,
        worker,
        footprint.promise,
        profile.num_bytes,
        profile.digest,
        max_seqs=footprint.max_seqs,
        reused_bytes=reused_bytes,
        loaded_bytes=reused_bytes,
    )
    fleet.add(replica)
    max_kv_bytes = min(footprint.max_kv_bytes, worker.promises.budget_bytes - footprint.fixed_bytes)
    actions.append(
        LoadModel(model.name, worker.name, footprint.min_kv_bytes, max_kv_bytes, footprint.promise)
    )
    if (first := model.first_waiting) is not None:
        why = Why.EVICTED if place.evictions.victims else Why.FREE_ROOM
        why = Why.TURNS if place.takes_turns else why
        actions.append(_dispatch(fleet, first, replica, why, place.options))
    return actions + fill_slots(fleet, model)


def fill_slots(fleet: Fleet, model: Model) -> list[Action]:
    actions: list[Action] = []
    while (first := model.first_waiting) is not None and (chosen := choose_replica(fleet, first)) is not None:
        why = Why.RESIDENT if chosen.replica.is_ready else Why.LOADING
        actions.append(_dispatch(fleet, first, chosen.replica, why, chosen.options))
    return actions


def _dispatch(
    fleet: Fleet, request: Request, replica: Replica, why: Why, options: tuple[Option, ...]
) -> Dispatch:
    fleet.start(request, replica)
    return Dispatch(
        request_id=request.request_id,
        model=request.model.name,
        worker=replica.worker.name,
        why=Why.WAITED if request.queued_step < fleet.step_number else why,
        waited_s=fleet.now_s - request.queued_s,
        options=options,
    )


def _could_fit(fleet: Fleet, model: Model) -> bool:
    return model.profile is not None and fleet.capacity.has_fitting(model.profile, Hold.BUSY)


def _drain_for_overdue(fleet: Fleet) -> bool:
    """Begin a drain for the first model without one, if it is overdue; False: none was begun.

    Skips models that have reserved room for long enough and can have none.
    """
    fleet.queues.rank_waiting()
    for name in islice(fleet.queues.undrained.from_rank(FIRST_PLACE), MAX_BEHIND):
        model = fleet.models[name]
        if not _could_fit(fleet, model):
            continue
        drain = plan_drain(fleet, model) if _is_overdue(fleet, model) else None
        if drain is not None:
            begin_drain(fleet, drain)
            return True
        if keeps_room(fleet, model):
            return False
    return False


def _end_drains(fleet: Fleet) -> list[Action]:
    """End drains that are needless or in vain; workers of the latter rest."""
    actions: list[Action] = []
    while (drain := _find_ending(fleet)) is not None:
        if not is_needless(fleet, drain):
            fleet.resting[drain.worker.name] = fleet.now_s + fleet.config.max_drain_s
        actions += _end_drain(fleet, drain)
    return actions


def _find_ending(fleet: Fleet) -> Drain | None:
    """Return the first drain that must end; looks at those that have changed or take too long."""
    queues, ending = fleet.queues, dict[ModelId, Drain]()
    for name, drain in list(queues.changed_drains.items()):
        if is_needless(fleet, drain):
            ending[name] = drain
            continue
        del queues.changed_drains[name]
        if may_give_room(fleet, drain):
            queues.done_drains[name] = drain
        else:
            queues.done_drains.pop(name, None)
    due = takewhile(lambda one: fleet.now_s >= one.began_s + fleet.config.max_drain_s, fleet.drains.values())
    ending.update((one.model.name, one) for one in due if is_in_vain(fleet, one))
    if len(ending) > 1:
        return next(one for name, one in fleet.drains.items() if name in ending)
    return next(iter(ending.values()), None)


def _end_drain(fleet: Fleet, drain: Drain) -> list[Action]:
    fleet.end_drain(drain)
    actions: list[Action] = []
    for replica in drain.victims:
        if replica.hold is not None:
            fleet.reindex(replica)
            actions += fill_slots(fleet, replica.model)
    return actions


def set_timer(fleet: Fleet) -> list[Action]:
    """Order a timer for the next time that matters, unless an earlier one is set."""
    at_s = min(
        fleet.expiries.next_s(),
        fleet.queues.next_overdue_s(fleet.now_s),
        fleet.kept_until_s,
        next(iter(fleet.resting.values()), math.inf),
        next((one.began_s for one in fleet.drains.values() if not is_done(one)), math.inf)
        + fleet.config.max_drain_s,
    )
    if at_s >= (math.inf if fleet.timer_s is None else fleet.timer_s):
        return []
    fleet.timer_s = at_s
    return [SetTimer(at_s)]


def _is_overdue(fleet: Fleet, model: Model) -> bool:
    first = model.first_waiting
    assert first is not None, f"no request waits for `{model.name}`"
    return fleet.now_s >= first.overdue_s(fleet.config.patience_s)
