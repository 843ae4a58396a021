"""Which idle replicas of a worker to evict for a model. Evicts none itself.

Retained replicas go before warm ones; busy and pinned ones stay; no more go than necessary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hearth.core.types import Hold
from hearth.policy.fleet.capacity import RETAINED, WARM, Promises
from hearth.policy.fleet.estimates import Estimates
from hearth.policy.fleet.events import Evict
from hearth.policy.fleet.profile import Footprint, Promise
from hearth.policy.fleet.records import Replica, Worker


@dataclass(frozen=True, slots=True)
class Victim:
    replica: Replica
    cost_s: float  #: the reload cost of its weights
    promise: Promise  #: that its end frees on the worker that needs room

    @property
    def rank(self) -> tuple[Hold | None, float, str]:
        return self.replica.hold, self.cost_s / max(1, self.promise.own_bytes), self.replica.model.name


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    victims: tuple[Victim, ...]

    @property
    def evict_s(self) -> float:
        return sum([victim.cost_s for victim in self.victims])


def plan_evictions(
    worker: Worker, footprint: Footprint, estimates: Estimates, now_s: float
) -> EvictionPlan | None:
    """Return what to evict for a model; None if it has no room without any idle replica."""
    if worker.promises.has_room(footprint):
        return EvictionPlan(())
    if worker.promises.has_room(footprint, RETAINED):
        idle = [replica for replica in worker.replicas.values() if replica.hold is RETAINED]
    elif worker.promises.has_room(footprint, WARM):
        idle = find_idle(worker)
    else:
        return None
    victims = [price_victim(replica, worker, estimates, now_s) for replica in idle]
    return EvictionPlan(choose_fewest(worker.promises, victims, lambda left: left.has_room(footprint)))


def plan_turn_evictions(
    worker: Worker, footprint: Footprint, estimates: Estimates, now_s: float
) -> EvictionPlan | None:
    """Return what to evict for a model that takes turns with the rest; None if it has no turn then."""
    if not worker.promises.can_take_turns(footprint, without=Hold.WARM):
        return None
    victims = [price_victim(replica, worker, estimates, now_s) for replica in find_idle(worker)]
    return EvictionPlan(choose_fewest(worker.promises, victims, lambda left: left.can_take_turns(footprint)))


def find_idle(worker: Worker) -> list[Replica]:
    return [one for one in worker.replicas.values() if one.hold is RETAINED or one.hold is WARM]


def price_victim(replica: Replica, worker: Worker, estimates: Estimates, now_s: float) -> Victim:
    model, promise = replica.model, replica.promise_on(worker)
    if model.profile is None or replica.is_stale:
        return Victim(replica, 0.0, promise)
    load_s = estimates.load_s(replica.total_bytes, model, replica.worker.node)
    cost_s = estimates.reload.cost_s(model.name, load_s, model.profile.weight, now_s)
    return Victim(replica, cost_s if replica.spare is None else replica.spare.need * cost_s, promise)


def order_evictions(replica: Replica, cost_s: float, *, is_freed: bool = False) -> list[Evict]:
    """Return the orders to stop hosting a removed replica, for all of its workers."""
    name, is_freed = replica.model.name, is_freed or replica.is_temporary
    return [Evict(name, worker.name, cost_s, is_freed) for worker in replica.workers]


def choose_fewest(
    promises: Promises, victims: Iterable[Victim], has_room: Callable[[Promises], bool]
) -> tuple[Victim, ...]:
    """Return the victims of lowest rank that make room, without those not needed after all."""
    promises = promises.copy()
    chosen: list[Victim] = []
    for victim in sorted(victims, key=lambda victim: victim.rank):
        if has_room(promises):
            break
        chosen.append(victim)
        promises.release(victim.promise, victim.replica.booked_hold)
    else:
        assert has_room(promises), f"the victims do not suffice: {promises=}"
    spared = set()
    for victim in reversed(chosen[:-1]):  # without the last one there was no room
        promises.add(victim.promise, victim.replica.booked_hold)
        if has_room(promises):
            spared.add(victim.replica)
        else:
            promises.release(victim.promise, victim.replica.booked_hold)
    return tuple([victim for victim in chosen if victim.replica not in spared])
