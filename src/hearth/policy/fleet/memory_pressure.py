"""Replicas that run out of KV memory: what the brain does about it. Pure.

Replicas report how much KV they will need in a second and how much they can have. If together they need more,
the model gets a further replica, provided that there is room without evicting warm models.
"""

from __future__ import annotations

from hearth.policy.fleet.events import Action, PressureReported
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.records import Model
from hearth.policy.fleet.serving import load_for_pressure


def record_pressure(fleet: Fleet, event: PressureReported) -> list[Action]:
    worker = fleet.workers.get(event.worker)
    replica = None if worker is None else worker.replicas.get(event.model)
    if replica is None:  # It was evicted meanwhile.
        return []
    replica.demand_tokens, replica.room_tokens = event.demand_tokens, event.room_tokens
    model = fleet.served_by(replica)
    if model is None or not is_short(model):
        return []
    return load_for_pressure(fleet, model)


def is_short(model: Model) -> bool:
    """True if the replicas of a model together need more KV than they can have."""
    replicas = model.usable.values()
    return sum(one.demand_tokens for one in replicas) > sum(one.room_tokens for one in replicas)
