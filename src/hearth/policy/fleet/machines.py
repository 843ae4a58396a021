"""When machines are added and given back, if `BrainConfig.scaling` says that there are any to be had.

Looks at all requests and workers, but rarely: every `out_after_s` while requests wait, else when the next
node may have been idle for long enough.
"""

from __future__ import annotations

import math

from hearth.core.types import LOCAL, Hold, NodeId
from hearth.policy.fleet.deployment import evict_pipelines
from hearth.policy.fleet.events import Action, AddWorkers, ReleaseWorkers, Scaling
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.records import Request, Worker


def scale(fleet: Fleet) -> list[Action]:
    scaling = fleet.config.scaling
    if scaling is None:
        return []
    num_nodes = sum(node != LOCAL and node not in fleet.draining for node in fleet.num_workers_by_node)
    if has_waiting := fleet.queues.num_waiting + fleet.queues.num_awaiting_turn > 0:
        wait_s = scaling.out_after_s
    else:
        wait_s = scaling.in_after_s if num_nodes > scaling.min_nodes else math.inf
    fleet.next_scaling_s = min(fleet.next_scaling_s, fleet.now_s + wait_s)
    if fleet.now_s < fleet.next_scaling_s:
        return []
    fleet.next_scaling_s = fleet.now_s + wait_s
    return _add(fleet, scaling) if has_waiting else _release(fleet, scaling)


def _add(fleet: Fleet, scaling: Scaling) -> list[Action]:
    if sum(fleet.most_by_node.values()) > len(fleet.workers):  # a lost worker is being replaced
        return []
    for request in fleet.queues.requests.values():
        if _lacks_room(request) and request.overdue_s(scaling.out_after_s) <= fleet.now_s:
            return [AddWorkers(request.model.name)]
    return []


def _lacks_room(request: Request) -> bool:
    if request.replica is None:
        return not request.model.loading
    return request.awaits_turn and request.replica.worker.promises.must_take_turns


def _release(fleet: Fleet, scaling: Scaling) -> list[Action]:
    used_s: dict[NodeId, float] = {}
    for worker in fleet.workers.values():
        if worker.node != LOCAL and not worker.is_draining:
            used_s[worker.node] = max(used_s.get(worker.node, -math.inf), _used_s(fleet, worker))
    by_use = sorted(used_s, key=lambda node: (used_s[node], node))
    spare = by_use[: max(0, len(by_use) - scaling.min_nodes)]
    idle = [node for node in spare if used_s[node] + scaling.in_after_s <= fleet.now_s]
    if len(idle) < len(spare):
        fleet.next_scaling_s = used_s[spare[len(idle)]] + scaling.in_after_s
    actions: list[Action] = []
    for node in idle:
        fleet.drain_node(node, is_draining=True)
        actions += evict_pipelines(fleet, node)
        fleet.queues.must_serve = False  # no request waits
    return actions + [ReleaseWorkers(node) for node in idle]


def _used_s(fleet: Fleet, worker: Worker) -> float:
    replicas = worker.replicas.values()
    if any(one.running or not one.is_ready or one.hold is Hold.PINNED for one in replicas):
        return fleet.now_s
    return max((worker.used_s, *(one.ready_s for one in replicas)))
