"""Those who wait, for room or for a slot: who is served next, and who has others drained. Hears no events.

Two queues, both in order of arrival: models that wait for *room*, because no worker serves them, and models
that wait for a *slot*, because all their replicas are full. Room goes to the first of the former; nobody
behind it may take any on the workers that could ever hold it, so that it cannot starve. A model that could
not fit even if everything unpinned went holds up nobody.

Whoever has waited for room for `patience_s` has busy models of one worker drained (`drain.py`): so
models that do not fit side by side take turns. From then on only that worker is kept for it.

What is left goes to second replicas, where loading one takes less time than waiting for a slot and no warm
model has to go. Who has waited for a slot for `patience_s` has shown the estimate wrong, and gets one anyway.
Last come models that are deployed as pinned and on no worker: nobody has asked, so nothing warm goes.
"""

from __future__ import annotations

import math

from hearth.policy.fleet.drain import is_done, is_spoilt, plan_drain
from hearth.policy.fleet.events import Action, Dispatch, Evict, LoadModel, Option, SetTimer, Why
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.replica import Drain, Model, Replica, Request
from hearth.policy.fleet.routing import Place, Reserved, choose_place, choose_slot, could_fit


def serve(fleet: Fleet) -> list[Action]:
    """Give all room there is to those who wait, in their order; then see to those who wait too long."""
    actions = _end_drains(fleet) + _share_out(fleet)
    while _drain_for_overdue(fleet):  # From now on only that worker is kept for it.
        actions += _share_out(fleet)
    fleet.is_changed = False
    return actions


def _share_out(fleet: Fleet) -> list[Action]:
    reserved = Reserved()
    actions = _serve_room_queue(fleet, reserved)
    if not reserved.holds_all(fleet):
        actions += _serve_slot_queue(fleet, reserved)
        actions += _load_unasked(fleet, reserved)
    return actions


def _serve_room_queue(fleet: Fleet, reserved: Reserved) -> list[Action]:
    """Notes in `reserved` what is kept for those who get none yet."""
    actions: list[Action] = []
    for name in fleet.room_queue:
        model = fleet.models[name]
        if name not in fleet.room_queue or not _is_possible(fleet, model):
            continue  # A drain has ended and gave it its replica back; or no room would do for it.
        if (place := choose_place(fleet, model, reserved=reserved)) is not None:
            actions += load(fleet, model, place) + _end_drains(fleet)
            continue
        if (drain := fleet.drains.get(name)) is not None and is_done(drain):
            actions += _end_drain(fleet, drain)  # Somebody else got its room: it needs another one.
        reserve(fleet, model, reserved)
        if reserved.holds_all(fleet):
            break
    return actions


def reserve(fleet: Fleet, model: Model, reserved: Reserved) -> None:
    """Keep room for a model that waits for some: of the worker that is drained for it, else of all."""
    if (drain := fleet.drains.get(model.name)) is not None:
        reserved.workers.add(drain.worker.name)
    elif model.profile is not None:
        reserved.put(fleet, model.profile)


def _serve_slot_queue(fleet: Fleet, reserved: Reserved) -> list[Action]:
    """A second replica where all are full and none is on its way."""
    actions: list[Action] = []
    for name in fleet.slot_queue:
        model = fleet.models[name]
        if not is_second_worthwhile(fleet, model):
            continue
        is_overdue = _is_overdue(fleet, model)
        place = choose_place(fleet, model, may_evict_warm=is_overdue, reserved=reserved)
        if place is not None and (is_overdue or is_second_worthwhile(fleet, model, place.room.evict_s)):
            actions += load(fleet, model, place)
    return actions


def is_second_worthwhile(fleet: Fleet, model: Model, evict_s: float = 0.0) -> bool:
    """Whether another replica of a full model would be there before the last one who waits has a slot.

    Also if so many wait that others will soon be refused.
    """
    if model.profile is None or model.loading or not model.usable or not model.waiting:
        return False
    is_queue_filling = 2 * fleet.num_waiting >= fleet.config.max_queue
    if is_queue_filling or _is_overdue(fleet, model):
        return True
    load_s = fleet.estimates.load_s(model.profile.num_bytes, model.bytes_by_rung)
    run_s = fleet.estimates.run_s(model.name)
    return load_s + evict_s < run_s * len(model.waiting) / max(1, model.num_running)


def _load_unasked(fleet: Fleet, reserved: Reserved) -> list[Action]:
    """Models deployed as pinned need nobody to ask for them, unless loading one has proved deadly."""
    actions: list[Action] = []
    for model in list(fleet.unplaced.values()):
        is_failing = model.failure is not None and fleet.now_s < model.failure.until_s
        if is_failing or model.num_deadly_loads > fleet.config.max_resumes:
            continue
        place = choose_place(fleet, model, may_evict_warm=False, reserved=reserved)
        if place is not None:
            actions += load(fleet, model, place)
    return actions


def load(fleet: Fleet, model: Model, place: Place) -> list[Action]:
    """Evict, load, and send those who wait behind the load."""
    assert model.profile is not None, f"removed: `{model.name}`"
    actions: list[Action] = []
    for gone in place.room.victims:
        fleet.remove(gone.replica)
        actions.append(Evict(gone.replica.model.name, place.worker.name, gone.cost_s, is_freed=False))
    worker, footprint, profile = place.worker, place.footprint, model.profile
    reused_bytes = model.resident.get(worker.name, 0)
    replica = Replica(
        *(model, worker, footprint.least_bytes, profile.num_bytes, profile.digest),
        reused_bytes=reused_bytes,
        loaded_bytes=reused_bytes,
    )
    fleet.add(replica)
    max_kv_bytes = min(footprint.max_kv_bytes, worker.budget_bytes - footprint.fixed_bytes)
    actions.append(LoadModel(model.name, worker.name, footprint.min_kv_bytes, max_kv_bytes))
    if (first := model.head) is not None:
        why = Why.EVICTED if place.room.victims else Why.FREE_ROOM
        actions.append(_dispatch(fleet, first, replica, why, place.options))
    return actions + fill(fleet, model)


def fill(fleet: Fleet, model: Model) -> list[Action]:
    """Send those who wait for a model to its free slots."""
    actions: list[Action] = []
    while (first := model.head) is not None and (slot := choose_slot(fleet, model)) is not None:
        why = Why.RESIDENT if slot.replica.is_ready else Why.LOADING
        actions.append(_dispatch(fleet, first, slot.replica, why, slot.options))
    return actions


def _dispatch(
    fleet: Fleet, request: Request, replica: Replica, why: Why, options: tuple[Option, ...]
) -> Dispatch:
    fleet.start(request, replica)
    return Dispatch(
        request_id=request.request_id,
        model=request.model.name,
        worker=replica.worker.name,
        why=Why.WAITED if request.queued_turn < fleet.turn else why,
        waited_s=fleet.now_s - request.queued_s,
        options=options,
    )


def _is_possible(fleet: Fleet, model: Model) -> bool:
    return model.profile is not None and could_fit(fleet, model.profile)


def _drain_for_overdue(fleet: Fleet) -> bool:
    """For the first who has none yet, if that one has waited too long. False: for nobody."""
    for name in fleet.room_queue:
        model = fleet.models[name]
        if name in fleet.drains or not _is_possible(fleet, model):
            continue
        if not _is_overdue(fleet, model) or (drain := plan_drain(fleet, model)) is None:
            return False
        fleet.drains[name] = drain.worker.drain = drain
        for replica in drain.victims:
            replica.drain = drain
            fleet.settle(replica)
        return True
    return False


def _end_drains(fleet: Fleet) -> list[Action]:
    """Those that nobody needs any more. One may give a model its replica back, and so end another."""
    actions: list[Action] = []
    while (drain := next((d for d in fleet.drains.values() if _is_needless(fleet, d)), None)) is not None:
        actions += _end_drain(fleet, drain)
    return actions


def _is_needless(fleet: Fleet, drain: Drain) -> bool:
    return drain.model.name not in fleet.room_queue or is_spoilt(drain)


def _end_drain(fleet: Fleet, drain: Drain) -> list[Action]:
    """Its victims serve everybody again, if they are still there."""
    del fleet.drains[drain.model.name]
    drain.worker.drain = None
    actions: list[Action] = []
    for replica in drain.victims:
        replica.drain = None
        if replica.hold is not None:
            fleet.settle(replica)
            actions += fill(fleet, replica.model)
    return actions


def wake_up(fleet: Fleet) -> list[Action]:
    """A timer for the next one whose patience ends; an earlier one that is set already will do.

    Also for the next warm model that ends being warm: its worker has to know.
    """
    at_s = fleet.expiries.next_s()
    while (first := next(iter(fleet.patient.values()), None)) is not None:
        until_s = first.queued_s + fleet.config.patience_s
        if until_s > fleet.now_s:
            at_s = min(at_s, until_s)
            break
        del fleet.patient[first.number]
    if at_s >= (math.inf if fleet.timer_s is None else fleet.timer_s):
        return []
    fleet.timer_s = at_s
    return [SetTimer(at_s)]


def _is_overdue(fleet: Fleet, model: Model) -> bool:
    head = model.head
    assert head is not None, f"nobody waits for `{model.name}`"
    return fleet.now_s >= head.queued_s + fleet.config.patience_s
