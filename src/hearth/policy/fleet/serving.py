"""Which waiting request is served next, and for which others are drained.

Room goes to the first model that waits for some; no later one may take any on workers that could ever hold
it, so that it cannot starve. After `patience_s` busy models of one worker are drained for it (`drain.py`),
and only that worker stays reserved. A model that no worker can hold gets a pipeline (`pipelines.py`), for
which all its workers are drained. A model without a drainable worker reserves room for `max_drain_s` more.
A model whose worker was lost waits up to `REPLACED_S` for the next one of that node, if that has it sooner.

Slots go in the same order. One in four of a replica is kept for interactive requests, until the waiting batch
request has been queued for `BATCH_PATIENCE_S`.

The rest goes to further replicas of full models, as many as pay off (`demand.py`) without evicting warm
models, by turns one for each model, up to its `max_replicas`. If none of a model is loading, it gets one that
does not pay off, too: for a request that has waited for `patience_s`, or if the queue is filling. Last come
models that are deployed as pinned and on too few workers, if possible on nodes that do not have them yet.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import islice, takewhile

from hearth.core.types import LOCAL, Member, ModelId, Pipeline, RequestId
from hearth.policy.fleet.capacity import BUSY, PAUSED, RETAINED, WARM
from hearth.policy.fleet.demand import expect_ends, pays_off
from hearth.policy.fleet.drain import begin_drain, is_done, is_in_vain, is_needless, may_give_room, plan_drain
from hearth.policy.fleet.events import Action, CancelRun, Dispatch, LoadModel, Option, SetTimer, Why
from hearth.policy.fleet.first_tokens import expect_soonest_s
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.pipelines import PipelinePlan, could_hold
from hearth.policy.fleet.prefixes import MAX_DIGESTS, PREFIX_TOKENS
from hearth.policy.fleet.profile import Footprint
from hearth.policy.fleet.records import Drain, Model, PrewarmHold, Replica, ReplicaStage, Request, Worker
from hearth.policy.fleet.replica_evictions import order_evictions
from hearth.policy.fleet.reserved_workers import ReservedWorkers
from hearth.policy.fleet.room_candidates import FIRST_PLACE, RoomCandidates, keeps_room, kept_until_s
from hearth.policy.fleet.routing import ReplicaPlace, choose_place, choose_replica

#: Models that are looked at behind those without a drainable worker; full ones that may be loaded again.
MAX_BEHIND, MAX_FULL = 8, 64


def serve_queues(fleet: Fleet) -> list[Action]:
    actions = _end_drains(fleet) + _fill_kept_slots(fleet) + _share_out(fleet)
    while fleet.queues.for_room and _drain_for_overdue(fleet):  # From now on only that worker is kept for it.
        actions += _share_out(fleet)
    fleet.queues.must_serve = False
    return actions


def _fill_kept_slots(fleet: Fleet) -> list[Action]:
    kept = fleet.queues.for_kept_slot
    return [action for name in kept for action in fill_slots(fleet, fleet.models[name])]


def _share_out(fleet: Fleet) -> list[Action]:
    reserved = ReservedWorkers(fleet)
    fleet.kept_until_s = math.inf
    actions = _serve_room_queue(fleet, reserved) if fleet.queues.for_room else []
    if (fleet.queues.for_slot or fleet.unplaced) and not reserved.has_all:
        actions += _serve_slot_queue(fleet, reserved)
        actions += _load_unasked(fleet, reserved)
    return actions


def _serve_room_queue(fleet: Fleet, reserved: ReservedWorkers) -> list[Action]:
    actions: list[Action] = []
    candidates = RoomCandidates(fleet, reserved)
    while (model := candidates.next()) is not None:
        if not _could_fit(fleet, model):
            candidates.pass_over(model)
            continue
        most = BUSY if fleet.config.takes_turns else WARM
        if (place := choose_place(fleet, model, most=most, reserved=reserved)) is not None:
            if (until_s := awaited_until_s(fleet, model, place)) is not None:
                fleet.kept_until_s = min(fleet.kept_until_s, until_s)
                continue
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


def awaited_until_s(fleet: Fleet, model: Model, place: ReplicaPlace) -> float | None:
    """Return how long a model awaits the successor of its lost worker; None: a place on another node is as
    good, or there is no successor."""
    replacement = fleet.replaced.get(model.name)
    if replacement is None or model.profile is None or place.worker.node == replacement.node:
        return None
    if not fleet.starts_workers(replacement.node):
        return None
    load_s = fleet.estimates.load_s(model.profile.num_bytes, model, replacement.node)
    return replacement.until_s if replacement.until_s - fleet.now_s + load_s < place.start_s else None


def reserve_room(fleet: Fleet, model: Model, reserved: ReservedWorkers) -> None:
    if (drain := fleet.drains.get(model.name)) is not None:
        reserved.add_drain(drain)
    elif model.profile is not None and keeps_room(fleet, model):
        reserved.add_suited(model.profile)


def _serve_slot_queue(fleet: Fleet, reserved: ReservedWorkers) -> list[Action]:
    actions: list[Action] = []
    names = islice(fleet.queues.for_slot.from_rank(FIRST_PLACE), MAX_FULL)
    models = [fleet.models[name] for name in names]
    while models:
        growing = []
        for model in models:
            if loads := _load_further(fleet, model, reserved):
                actions += loads
                growing.append(model)
        models = growing
    return actions


def _load_further(fleet: Fleet, model: Model, reserved: ReservedWorkers) -> list[Action]:
    if not needs_replica(fleet, model):
        return []
    is_overdue = not model.loading and _is_overdue(fleet, model)
    place = choose_place(fleet, model, most=WARM if is_overdue else RETAINED, reserved=reserved)
    if place is None or not (is_overdue or needs_replica(fleet, model, place)):
        return []
    return _load(fleet, model, place, int(expect_ends(model, fleet.estimates, place.start_s)))


def load_beside_paused(fleet: Fleet, model: Model) -> list[Action]:
    """Load a model again for waiting requests, if its replicas have had no turn for too long.

    Only if there is room without evicting warm models and without turns, and no model waits for it.
    """
    if not fleet.config.takes_turns or not model.usable or fleet.queues.for_room or not model.waiting:
        return []
    overdue_s = fleet.now_s - fleet.config.patience_s
    if model.has_all_replicas or not all(
        one.is_ready and one.hold is PAUSED and one.turn_changed_s <= overdue_s
        for one in model.usable.values()
    ):
        return []
    place = choose_place(fleet, model, most=RETAINED)
    return [] if place is None else _load(fleet, model, place)


def load_for_late(fleet: Fleet, model: Model) -> list[Action]:
    """Load a model again for the first waiting request, if its first token comes much sooner there.

    Only if there is room without evicting warm models, and no model waits for it.
    """
    target_s, request = fleet.config.first_token_s, model.first_waiting
    if target_s is None or request is None or request.gives_way(fleet.now_s) or fleet.queues.for_room:
        return []
    if model.has_all_replicas or model.failed_on or model.num_deadly_loads:
        return []
    soonest_s = expect_soonest_s(fleet, request)
    if soonest_s is None or soonest_s <= target_s:
        return []
    place = choose_place(fleet, model, most=RETAINED)
    prompt_s = fleet.estimates.least_prompt_s(model.name, request.num_prompt_tokens)
    if place is None or soonest_s <= place.start_s + prompt_s + target_s:
        return []
    return _load(fleet, model, place)


def load_for_pressure(fleet: Fleet, model: Model) -> list[Action]:
    """Load a model again because its replicas run out of KV memory.

    Only if none is loading, if there is room without evicting warm models, and no model waits for it.
    """
    if model.loading or model.has_all_replicas or fleet.queues.for_room:
        return []
    if model.failed_on or model.num_deadly_loads:
        return []
    place = choose_place(fleet, model, most=RETAINED)
    return [] if place is None else _load(fleet, model, place)


def load_ahead(fleet: Fleet, model: Model, place: ReplicaPlace, hold: PrewarmHold) -> list[Action]:
    """Load a model before it is asked for, and keep it for as long as a forecast expects requests."""
    return _load(fleet, model, place, prewarmed=hold)


def needs_replica(fleet: Fleet, model: Model, place: ReplicaPlace | None = None) -> bool:
    """True if a full model should be loaded once more, at a place; None: where that is fastest."""
    profile, estimates = model.profile, fleet.estimates
    if profile is None or not model.usable or model.has_all_replicas:
        return False
    if model.loading and (model.failed_on or model.num_deadly_loads):  # It may fail again.
        return False
    if model.waiting and not model.loading:
        is_queue_filling = 2 * fleet.queues.num_waiting >= fleet.config.max_queue
        if is_queue_filling or _is_overdue(fleet, model):
            return True
    # The first of several is judged by the fastest load: how long others take is often unknown until then.
    if place is None or not model.loading:
        nodes = model.largest_holders or (LOCAL,)
        start_s = min([estimates.load_s(profile.num_bytes, model, node) for node in nodes])
        start_s += 0.0 if place is None else place.evictions.evict_s
    else:
        start_s = place.start_s
    return pays_off(model, estimates, start_s, fleet.now_s)


def _load_unasked(fleet: Fleet, reserved: ReservedWorkers) -> list[Action]:
    actions: list[Action] = []
    for model in list(fleet.unplaced.values()):
        is_failing = model.failure is not None and fleet.now_s < model.failure.until_s
        if is_failing or model.num_deadly_loads > fleet.config.max_resumes:
            continue
        while model.name in fleet.unplaced and (place := _choose_apart(fleet, model, reserved)) is not None:
            actions += _load(fleet, model, place)
    return actions


def _choose_apart(fleet: Fleet, model: Model, reserved: ReservedWorkers) -> ReplicaPlace | None:
    """Return where to load a model unasked: if possible on a node without it, however long that takes."""
    place = None
    if nodes := {one.worker.node for one in model.replicas.values()}:
        beside = {name for name, worker in fleet.workers.items() if worker.node in nodes}
        place = choose_place(fleet, model, most=RETAINED, reserved=reserved, barred=beside)
    return place or choose_place(fleet, model, most=RETAINED, reserved=reserved)


def _load(
    fleet: Fleet,
    model: Model,
    place: ReplicaPlace,
    num_before: int = 0,
    prewarmed: PrewarmHold | None = None,
) -> list[Action]:
    """Load a model and send it waiting requests.

    Other replicas are expected to serve `num_before` of these first; they wait unless slots would stay free.
    """
    assert model.profile is not None, f"removed: `{model.name}`"
    actions: list[Action] = []
    for victim in place.evictions.victims:
        fleet.remove(victim.replica)
        actions += order_evictions(victim.replica, victim.cost_s)
    worker = place.worker
    reused_bytes = 0 if place.pipeline is not None else model.resident_bytes.get(worker.name, 0)
    replica = new_replica(model, worker, place.footprint, reused_bytes)
    replica.prompts_until_s = fleet.now_s + place.start_s
    replica.prewarmed = prewarmed
    if place.pipeline is not None:
        actions += form_pipeline(fleet, replica, place.pipeline)
    else:
        fleet.add(replica)
        actions.append(order_load(replica))
        if fleet.config.while_loading is not None and len(model.loading) > 1:
            fleet.gathering.setdefault(model.name, fleet.now_s + fleet.config.while_loading.gather_s)
    at = max(0, min(num_before, len(model.waiting) - replica.max_seqs))
    if len(model.usable) > 1:
        for request in list(islice(model.waiting.values(), at, at + replica.max_seqs)):
            if replica.has_slot_for(request, fleet.now_s):
                actions.append(_dispatch(fleet, request, replica, Why.DEMAND, place.options))
    elif (first := model.first_waiting) is not None:
        why = Why.EVICTED if place.evictions.victims else Why.FREE_ROOM
        why = _why_now(fleet, first, Why.TURNS if place.takes_turns else why)
        actions.append(_dispatch(fleet, first, replica, why, place.options))
    return actions + fill_slots(fleet, model)


def new_replica(model: Model, worker: Worker, footprint: Footprint, reused_bytes: int) -> Replica:
    """Return a replica that is not in the books yet."""
    profile = model.profile
    assert profile is not None, f"removed: `{model.name}`"
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
    if footprint.kv_token_bytes:
        replica.max_kv_tokens = _max_kv_bytes(worker, footprint) // footprint.kv_token_bytes
        replica.prefixes.max_digests = min(MAX_DIGESTS, replica.max_kv_tokens // PREFIX_TOKENS)
    return replica


def order_load(replica: Replica) -> LoadModel:
    """Return the order to load a whole replica."""
    model, worker = replica.model, replica.worker
    assert model.profile is not None, f"removed: `{model.name}`"
    footprint = model.profile.footprints[worker.kind]
    max_kv_bytes = _max_kv_bytes(worker, footprint)
    return LoadModel(
        model.name,
        worker.name,
        footprint.min_kv_bytes,
        max_kv_bytes,
        replica.promise,
        is_ahead=replica.prewarmed is not None,
    )


def _max_kv_bytes(worker: Worker, footprint: Footprint) -> int:
    return min(footprint.max_kv_bytes, worker.promises.budget_bytes - footprint.fixed_bytes)


def form_pipeline(fleet: Fleet, replica: Replica, plan: PipelinePlan) -> list[Action]:
    replica.stages = tuple(
        ReplicaStage(one.worker, one.footprint.promise, one.begin, one.end, one.num_bytes)
        for one in plan.stages
    )
    fleet.add(replica)
    name = replica.model.name
    members = tuple(Member(one.worker.name, one.begin, one.end, one.worker.gpu) for one in plan.stages)
    unique = name if replica.is_temporary else f"{name}-{replica.number}"
    pipeline = Pipeline(unique, members, plan.num_blocks)
    needs = [(one.worker, one.footprint) for one in plan.stages]
    return [
        LoadModel(name, worker.name, one.min_kv_bytes, _max_kv_bytes(worker, one), one.promise, pipeline)
        for worker, one in needs
    ]


def take_back(fleet: Fleet, requests: Sequence[Request]) -> list[Action]:
    """Have requests wait again that run."""
    actions: list[Action] = []
    for request in requests:
        assert request.replica is not None, f"waits already: `{request.request_id}`"
        actions.append(CancelRun(request.request_id, request.replica.worker.name))
        fleet.requeue(request, is_at_fault=False)
    return actions


def dissolve(fleet: Fleet, replicas: Sequence[Replica]) -> tuple[list[Action], set[RequestId]]:
    """Remove replicas, whose weights stay where they are. Return the orders, and the requests that move."""
    running = [request for replica in replicas for request in replica.running.values()]
    actions = take_back(fleet, running)
    for replica in replicas:
        fleet.remove(replica)
        actions += order_evictions(replica, 0.0)
    return actions, {one.request_id for one in running}


def fill_slots(
    fleet: Fleet, model: Model, moved: Collection[RequestId] = frozenset(), why_moved: Why = Why.WAITED
) -> list[Action]:
    """Dispatch waiting requests. `moved`: those that ran on replicas which left for the ones they get now."""
    actions: list[Action] = []
    while (first := model.first_waiting) is not None and (chosen := choose_replica(fleet, first)) is not None:
        if chosen.replica.is_temporary:
            why = Why.STAGED
        elif first.request_id in moved:
            why = why_moved
        else:
            why = _why_now(fleet, first, Why.RESIDENT if chosen.replica.is_ready else Why.LOADING)
        actions.append(_dispatch(fleet, first, chosen.replica, why, chosen.options))
    return actions


def _dispatch(
    fleet: Fleet, request: Request, replica: Replica, why: Why, options: tuple[Option, ...]
) -> Dispatch:
    fleet.start(request, replica)
    return Dispatch(
        request_id=request.request_id,
        model=replica.model.name,
        worker=replica.worker.name,
        why=why,
        waited_s=fleet.now_s - request.queued_s,
        options=options,
    )


def _why_now(fleet: Fleet, request: Request, why: Why) -> Why:
    return Why.WAITED if request.queued_step < fleet.step_number else why


def _could_fit(fleet: Fleet, model: Model) -> bool:
    return model.profile is not None and could_hold(fleet, model.profile, BUSY)


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
    while fleet.drains and (drain := _find_ending(fleet)) is not None:
        if not is_needless(fleet, drain):
            until_s = fleet.now_s + fleet.config.max_drain_s
            fleet.resting.update((worker.name, until_s) for worker in drain.workers)
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
            actions += fill_slots(fleet, replica.model)
    return actions


def set_timer(fleet: Fleet) -> SetTimer | None:
    """Order a timer for the next time that matters; None: an earlier one is set, or no time matters."""
    before_s = math.inf if fleet.timer_s is None else fleet.timer_s
    at_s = min(before_s, fleet.kept_until_s, fleet.next_scaling_s)
    if fleet.no_pipeline_until_s > fleet.now_s:
        at_s = min(at_s, fleet.no_pipeline_until_s)
    if fleet.resting:
        at_s = min(at_s, next(iter(fleet.resting.values())))
    if fleet.gathering:
        at_s = min(at_s, next(iter(fleet.gathering.values())))
    if (due_s := fleet.forecasts_due.lowest) is not None:
        at_s = min(at_s, due_s)
    for pipeline in fleet.loading_pipelines.values():
        if pipeline.dissolves_s is not None:
            at_s = min(at_s, pipeline.dissolves_s)
    for model in fleet.dropped.values():
        if model.drop.due_s > fleet.now_s:  # else what stands in the way ends with an event
            at_s = min(at_s, model.drop.due_s)
    for drain in fleet.drains.values():
        if (until_s := drain.began_s + fleet.config.max_drain_s) >= at_s:
            break
        if not is_done(drain):
            at_s = until_s
    if (overdue_s := fleet.queues.next_overdue_s(fleet.now_s, at_s)) is not None:
        at_s = overdue_s
    if (expiry_s := fleet.expiries.next_s(at_s)) is not None:
        at_s = expiry_s
    if at_s >= before_s:
        return None
    fleet.timer_s = at_s
    return SetTimer(at_s)


def _is_overdue(fleet: Fleet, model: Model) -> bool:
    first = model.first_waiting
    return first is not None and fleet.now_s >= first.overdue_s(fleet.config.patience_s)
