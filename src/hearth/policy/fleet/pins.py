"""Which replicas that should be pinned are, if models take turns.

A replica is pinned only if all others on its worker still fit, each in its turn; idle ones that do not are
evicted. One that cannot be pinned is reported once, and pinned as soon as possible.
"""

from __future__ import annotations

from hearth.policy.fleet.capacity import Promises
from hearth.policy.fleet.events import Action, RefusePin
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.records import Replica, Worker
from hearth.policy.fleet.refusals import explain_refused_pin
from hearth.policy.fleet.replica_evictions import choose_fewest, find_idle, order_evictions, price_victim


def grant_pins(fleet: Fleet) -> list[Action]:
    actions: list[Action] = []
    for replica in list(fleet.refused_pins):
        if replica not in fleet.refused_pins:  # It was evicted for another one.
            continue
        promises = fleet.with_pin(replica)
        idle = [one for one in find_idle(replica.worker) if one is not replica]
        if _can_pin_without(replica.worker, promises, idle):
            victims = [price_victim(one, replica.worker, fleet.estimates, fleet.now_s) for one in idle]
            for victim in choose_fewest(promises, victims, lambda left: left.can_all_take_turns):
                fleet.remove(victim.replica)
                actions += order_evictions(victim.replica, victim.cost_s)
            fleet.reindex(replica)
        elif not replica.is_pin_refused:
            replica.is_pin_refused = True
            actions.append(RefusePin(replica.model.name, replica.worker.name, explain_refused_pin(replica)))
    return actions


def _can_pin_without(worker: Worker, promises: Promises, idle: list[Replica]) -> bool:
    promises = promises.copy()
    for replica in idle:
        promises.release(replica.promise_on(worker), replica.booked_hold)
    return promises.can_all_take_turns
