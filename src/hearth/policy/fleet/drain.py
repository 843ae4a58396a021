"""Which busy models give way to one that has waited too long for room. Plans only; `brain.py` carries it out.

A request that has waited for its patience gets the cheapest set of models on one worker drained: they take
no new requests, and when the last of their running ones has ended there is room. It contains idle models too,
for they would have to go anyway and must not become busy meanwhile. A loading model is not drained: those who
wait for it have waited as well, so they are served first, and the load is not wasted. Nor is one for which
somebody waits who came earlier.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from hearth.policy.fleet.capacity import Victim, fewest, victim
from hearth.policy.fleet.events import Footprint
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.replica import Drain, Model, Replica, Worker
from hearth.types import Hold

#: Workers that are compared: those that lack the least.
MAX_WORKERS = 8


def plan_drain(fleet: Fleet, model: Model) -> Drain | None:
    """None: it would help on no worker, or there is room already and the model waits for its turn only."""
    assert model.profile is not None, f"nobody can wait for a removed model: `{model.name}`"
    plans: list[tuple[Victim, ...]] = []
    for kind, rooms in fleet.capacity_by_kind.items():
        footprint = model.profile.footprints.get(kind)
        if footprint is not None:
            workers = (fleet.workers[name] for name in rooms.idle.down_to_rank(0))
            suited = (worker for worker in workers if _is_suited(worker, model, footprint))
            plans += [_plan(fleet, worker, model, footprint) for worker in islice(suited, MAX_WORKERS)]
    if not plans or not all(_is_needed(plan) for plan in plans):
        return None
    best = min(plans, key=lambda plan: (sum(victim.cost_s for victim in plan), plan[0].replica.worker.name))
    return Drain(model, best[0].replica.worker, tuple(victim.replica for victim in best))


def is_done(drain: Drain) -> bool:
    return not any(replica.running for replica in drain.victims)


def is_spoilt(drain: Drain) -> bool:
    """One of those that were to go has been pinned meanwhile, or must serve somebody earlier first."""
    return not all(_may_go(replica, drain.model) for replica in drain.victims)


def _is_suited(worker: Worker, model: Model, footprint: Footprint) -> bool:
    if worker.drain is not None or model.name in worker.replicas:
        return False
    drainable_bytes = sum(replica.num_bytes for replica in _drainable(worker, model))
    return worker.free_bytes + drainable_bytes >= footprint.least_bytes


def _drainable(worker: Worker, model: Model) -> Iterator[Replica]:
    for replica in worker.replicas.values():
        if _may_go(replica, model) and (replica.is_ready or not replica.running):
            yield replica


def _may_go(replica: Replica, model: Model) -> bool:
    """Whether the replica may give way to the model at all."""
    own, other = replica.model.head, model.head
    is_earlier = own is not None and other is not None and own.number < other.number
    return replica.hold is not Hold.PINNED and not is_earlier


def _is_needed(plan: tuple[Victim, ...]) -> bool:
    return any(victim.replica.running for victim in plan)


def _plan(fleet: Fleet, worker: Worker, model: Model, footprint: Footprint) -> tuple[Victim, ...]:
    victims = [_priced(fleet, replica) for replica in _drainable(worker, model)]
    return fewest(victims, footprint.least_bytes - worker.free_bytes)


def _priced(fleet: Fleet, replica: Replica) -> Victim:
    """T2's cost to have it back, and the time until its requests have ended."""
    priced = victim(replica, fleet.estimates, fleet.now_s)
    if not replica.running:
        return priced
    return Victim(replica, priced.cost_s + fleet.estimates.run_s(replica.model.name))
