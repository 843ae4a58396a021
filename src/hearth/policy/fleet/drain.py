"""Which busy models are drained for one that has waited too long for room. `serving.py` ends drains.

The cheapest set of models on one worker takes no new requests, and when the last running one has ended there
is room. For a pipeline, sets of models on all its workers are drained. A set includes idle models, which must
not become busy meanwhile. A loading model is not drained, because its requests have waited as well, nor is
one with a request that came earlier.

The length of running requests is unknown. So a drain that is not done after `max_drain_s` is given up: its
worker takes requests again, and is not drained for as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice

from hearth.core.types import Hold
from hearth.policy.fleet.capacity import Promises
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.pipelines import find_stages
from hearth.policy.fleet.profile import Footprint, ModelProfile
from hearth.policy.fleet.records import Drain, Model, Replica, Worker
from hearth.policy.fleet.replica_evictions import Victim, choose_fewest, price_victim

#: Workers that are compared.
MAX_WORKERS = 8


def plan_drain(fleet: Fleet, model: Model) -> Drain | None:
    """Return the cheapest drain that gives a model room.

    None if no drain helps, or there is room already and the model only waits behind others.
    """
    assert model.profile is not None, f"removed: `{model.name}`"
    if fleet.capacity.must_stage(model.profile):
        return _plan_for_pipeline(fleet, model, model.profile)
    plans: dict[Worker, tuple[Victim, ...]] = {}
    fleet.rank_workers()
    for index, footprint in fleet.capacity.find_suited(model.profile):
        ranking = index.unpinned if fleet.config.takes_turns else index.idle
        names = index.roomiest_first(ranking, index.drainable, footprint.promise.own_bytes)
        workers = (fleet.workers[name] for name in names)
        suited = (worker for worker in workers if _is_suited(fleet, worker, model, footprint))
        for worker in islice(suited, MAX_WORKERS):
            plans[worker] = _choose_victims(fleet, worker, model, footprint)
    if not plans or not all(any(victim.replica.running for victim in plan) for plan in plans.values()):
        return None
    best = min(plans, key=lambda worker: (sum(victim.cost_s for victim in plans[worker]), worker.name))
    return Drain(model, (best,), tuple(victim.replica for victim in plans[best]), fleet.now_s)


def _plan_for_pipeline(fleet: Fleet, model: Model, profile: ModelProfile) -> Drain | None:
    """Return a drain of all workers of a pipeline. It needs its room at once, so none of it by turns."""
    emptied: dict[Worker, Promises] = {}

    def fits(worker: Worker, footprint: Footprint) -> bool:
        if worker not in emptied:
            emptied[worker] = _without_drainable(worker, model)
        return _may_drain(fleet, worker, model) and emptied[worker].has_room(footprint)

    stages = find_stages(fleet, profile, lambda index: index.unpinned, fits)
    victims: dict[Replica, None] = {}
    for stage in stages or ():
        priced = [_price(fleet, replica, stage.worker) for replica in _find_drainable(stage.worker, model)]
        has_room = partial(Promises.has_room, footprint=stage.footprint)
        chosen = choose_fewest(stage.worker.promises, priced, has_room)
        victims.update((victim.replica, None) for victim in chosen)
    if stages is None or not any(replica.running for replica in victims):
        return None
    return Drain(model, tuple(stage.worker for stage in stages), tuple(victims), fleet.now_s)


def begin_drain(fleet: Fleet, drain: Drain) -> None:
    fleet.begin_drain(drain)
    for replica in drain.victims:
        fleet.reindex(replica)


def is_done(drain: Drain) -> bool:
    return not any(replica.running for replica in drain.victims)


def may_give_room(fleet: Fleet, drain: Drain) -> bool:
    """True if the waiting model has room on the drained worker, or will not have any by the drain.

    Of several workers, only after the drain: a pipeline needs all of them.
    """
    profile, worker = drain.model.profile, drain.workers[0]
    footprint = None if profile is None else profile.footprints.get(worker.kind)
    if footprint is None or is_done(drain):
        return True
    if len(drain.workers) > 1:
        return False
    promises = worker.promises
    if fleet.config.takes_turns and promises.can_take_turns(footprint, without=Hold.WARM):
        return True
    return promises.has_room(footprint, Hold.WARM)


def is_in_vain(fleet: Fleet, drain: Drain) -> bool:
    return fleet.now_s >= drain.began_s + fleet.config.max_drain_s and not is_done(drain)


def leaves_room(fleet: Fleet, drain: Drain, footprint: Footprint) -> bool:
    """True if the waiting model has room after its drain, also if another model is loaded meanwhile.

    Drains for a pipeline leave none.
    """
    profile, worker = drain.model.profile, drain.workers[0]
    if profile is None or len(drain.workers) > 1:
        return profile is None
    promises = worker.promises.copy()
    for replica in drain.victims:
        if replica.hold is not None:
            promises.release(replica.promise_on(worker), replica.hold)
    promises.add(footprint.promise, Hold.BUSY)
    return _has_room(fleet, promises, profile.footprints[worker.kind])


def is_needless(fleet: Fleet, drain: Drain) -> bool:
    return drain.model.name not in fleet.queues.for_room or not all(
        _may_go(replica, drain.model) for replica in drain.victims
    )


def _has_room(fleet: Fleet, promises: Promises, footprint: Footprint) -> bool:
    return promises.can_take_turns(footprint) if fleet.config.takes_turns else promises.has_room(footprint)


def _is_suited(fleet: Fleet, worker: Worker, model: Model, footprint: Footprint) -> bool:
    if not _may_drain(fleet, worker, model):
        return False
    return _has_room(fleet, _without_drainable(worker, model), footprint)


def _may_drain(fleet: Fleet, worker: Worker, model: Model) -> bool:
    is_taken = worker.drain is not None or worker.name in fleet.resting
    return not is_taken and model.name not in worker.replicas


def _without_drainable(worker: Worker, model: Model) -> Promises:
    promises = worker.promises.copy()
    for replica in _find_drainable(worker, model):
        promises.release(replica.promise_on(worker), replica.booked_hold)
    return promises


def _find_drainable(worker: Worker, model: Model) -> Iterator[Replica]:
    for replica in worker.replicas.values():
        is_free = replica.drain is None  # else a pipeline, one of whose other workers is drained
        if is_free and _may_go(replica, model) and (replica.is_ready or not replica.running):
            yield replica


def _may_go(replica: Replica, model: Model) -> bool:
    own, other = replica.model.first_waiting, model.first_waiting
    is_earlier = own is not None and other is not None and own.place < other.place
    return replica.hold is not Hold.PINNED and not is_earlier


def _choose_victims(fleet: Fleet, worker: Worker, model: Model, footprint: Footprint) -> tuple[Victim, ...]:
    victims = [_price(fleet, replica, worker) for replica in _find_drainable(worker, model)]
    return choose_fewest(worker.promises, victims, lambda left: _has_room(fleet, left, footprint))


def _price(fleet: Fleet, replica: Replica, worker: Worker) -> Victim:
    priced = price_victim(replica, worker, fleet.estimates, fleet.now_s)
    if not replica.running:
        return priced
    cost_s = priced.cost_s + fleet.estimates.run_s(replica.model.name)
    return Victim(replica, cost_s, priced.promise)
