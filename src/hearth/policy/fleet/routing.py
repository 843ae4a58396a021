"""Where a request goes, or a model is loaded: the worker with the least routing cost.

A free slot is always taken before a model is loaded a second time. Of workers without the model, those that
need not evict come first, then those that evict retained models, then warm ones, then, if models take turns,
those whose busy models leave no room; the cost decides among equals. Workers that still have bytes of the
model compete with the first of these, if evicting retained models costs less than the bytes save. At most
`MAX_OPTIONS` workers are compared: those with most of the model, with the least sufficient room, and with the
most. Of replicas the least busy are compared, half of them with the request's adapter if possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import chain, islice

from hearth.core.types import Hold, RequestId, WorkerId
from hearth.policy.fleet.device_bytes import count_missing_bytes
from hearth.policy.fleet.events import BrainConfig, Option
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.profile import Footprint, ModelProfile
from hearth.policy.fleet.records import Model, Replica, Request, Worker
from hearth.policy.fleet.refusals import explain_shortage
from hearth.policy.fleet.replica_evictions import EvictionPlan, plan_evictions, plan_turn_evictions
from hearth.policy.fleet.reserved_workers import MAX_OPTIONS, ReservedWorkers

#: Other workers that are shown beside the replicas when one of them has a free slot.
MAX_BESIDE = 2


def routing_cost(
    config: BrainConfig, queue_s: float, load_s: float, utilisation: float, evict_s: float
) -> float:
    """Return what it costs to serve a request on a worker, in seconds.

    `queue_s`: what the request loses by sharing the device. `load_s`: to load the missing bytes.
    `utilisation`: of the worker's budget, from 0 to 1: a full worker is preferred.
    `evict_s`: reload costs of all replicas that must go.
    """
    return (
        config.queue_weight * queue_s
        + config.load_weight * load_s
        + config.packing_s * (1.0 - utilisation)
        + evict_s
    )


@dataclass(frozen=True, slots=True)
class FreeReplica:
    replica: Replica
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    worker: Worker
    footprint: Footprint
    evictions: EvictionPlan
    options: tuple[Option, ...]
    takes_turns: bool = False  #: busy models leave no room for it there


def choose_replica(fleet: Fleet, request: Request) -> FreeReplica | None:
    model = request.model
    free = (model.replicas[name] for name in model.with_free_slot)
    open_ = (replica for replica in free if replica.has_slot_for(request, fleet.now_s))
    replicas = _likely_replicas(request, open_)
    if not replicas:
        return None
    options = [
        _price_option(
            fleet, model, replica.worker, adapter_bytes=_missing_adapter_bytes(request, replica.worker)
        )
        for replica in replicas
    ]
    best = min(range(len(options)), key=lambda at: (options[at].cost_s, options[at].worker))
    num_beside = min(MAX_BESIDE, MAX_OPTIONS - len(options))
    beside = _show_others(fleet, model, {option.worker for option in options}, num_beside)
    return FreeReplica(replicas[best], (*options, *beside))


def choose_place(
    fleet: Fleet,
    model: Model,
    *,
    most: Hold = Hold.WARM,
    reserved: ReservedWorkers | None = None,
) -> ReplicaPlace | None:
    """Return where to load a model.

    Replicas with a hold up to `most` may be evicted; busy ones are not, but take turns with it. None if no
    other worker that is not reserved has room, or could make it.
    """
    profile, reserved = model.profile, reserved or ReservedWorkers(fleet)
    if profile is None or not fleet.capacity.has_fitting(profile, most):
        return None
    barred = model.replicas.keys()
    place = _choose_unbarred(fleet, model, profile, barred | model.failed_on.keys(), reserved, most)
    if place is None and model.failed_on and not model.usable:
        place = _choose_unbarred(fleet, model, profile, barred, reserved, most)
    return place


def has_untried_place(fleet: Fleet, model: Model) -> bool:
    """True if a model could be loaded now where it has not failed, and no other one waits for room."""
    if model.profile is None or len(fleet.queues.for_room) > (model.name in fleet.queues.for_room):
        return False
    most = Hold.BUSY if fleet.config.takes_turns else Hold.WARM
    if model.profile.is_pinned:
        most = Hold.RETAINED
    barred = model.replicas.keys() | model.failed_on.keys()
    return _choose_unbarred(fleet, model, model.profile, barred, ReservedWorkers(fleet), most) is not None


def _choose_unbarred(
    fleet: Fleet,
    model: Model,
    profile: ModelProfile,
    barred: Set[WorkerId],
    reserved: ReservedWorkers,
    most: Hold,
) -> ReplicaPlace | None:
    for candidates, going in _classify_workers(fleet, profile, barred, reserved, most):
        if not candidates:
            continue
        plans = _plan_where_bytes_are(fleet, model, profile, barred, reserved, going)
        for name in islice((name for name in candidates if name not in plans), MAX_OPTIONS - len(plans)):
            plans[name] = _plan_evictions(fleet, profile, fleet.workers[name], going)
        options = [
            _price_option(fleet, model, fleet.workers[name], evictions=evictions)
            for name, evictions in plans.items()
        ]
        best = min(options, key=lambda option: (option.cost_s, option.worker))
        worker = fleet.workers[best.worker]
        beside = _show_others(fleet, model, plans.keys(), MAX_OPTIONS - len(options))
        footprint = profile.footprints[worker.kind]
        takes_turns = going is Hold.BUSY
        return ReplicaPlace(worker, footprint, plans[best.worker], (*options, *beside), takes_turns)
    return None


def _plan_where_bytes_are(
    fleet: Fleet,
    model: Model,
    profile: ModelProfile,
    barred: Set[WorkerId],
    reserved: ReservedWorkers,
    most: Hold,
) -> dict[WorkerId, EvictionPlan]:
    """Plan evictions on some workers that retain bytes of a model and could take it.

    Only replicas with a hold up to `most` are evicted, and only if that costs less than the bytes save.
    """
    plans: dict[WorkerId, EvictionPlan] = {}
    for name in islice(model.retired.down_to_rank(1), MAX_OPTIONS // 2):
        worker = fleet.workers[name]
        footprint = profile.footprints.get(worker.kind)
        if footprint is None or not _could_take(worker, footprint, most):
            continue
        if name in barred or worker.is_draining or reserved.bars(worker, footprint, model.name):
            continue
        evictions = _plan_evictions(fleet, profile, worker, most)
        saved_s = fleet.estimates.load_s(profile.num_bytes, model, worker.node)
        saved_s -= fleet.estimates.load_s(count_missing_bytes(model, worker), model, worker.node)
        if not evictions.victims or evictions.evict_s < fleet.config.load_weight * saved_s:
            plans[name] = evictions
    return plans


def _could_take(worker: Worker, footprint: Footprint, most: Hold) -> bool:
    """True if a model has room without replicas of a hold up to `most`; busy ones take turns with it."""
    if most is Hold.BUSY:
        return worker.promises.can_take_turns(footprint, without=Hold.WARM)
    return worker.promises.has_room(footprint, most)


def _plan_evictions(fleet: Fleet, profile: ModelProfile, worker: Worker, most: Hold) -> EvictionPlan:
    plan_of = plan_turn_evictions if most is Hold.BUSY else plan_evictions
    plan = plan_of(worker, profile.footprints[worker.kind], fleet.estimates, fleet.now_s)
    assert plan is not None, f"worker `{worker.name}` is ranked by room it has not: {worker.promises=}"
    return plan


def _classify_workers(
    fleet: Fleet,
    profile: ModelProfile,
    barred: Set[WorkerId],
    reserved: ReservedWorkers,
    most: Hold,
) -> Iterator[tuple[list[WorkerId], Hold]]:
    """Yield workers that could take a model, from those that lose nothing to those that lose most."""
    kinds = [kind for kind in fleet.capacity.by_kind if kind in profile.footprints]

    def find_few(going: Hold | None) -> list[WorkerId]:
        found: dict[WorkerId, None] = {}
        for kind in kinds:
            footprint = profile.footprints[kind]
            for roomiest_first in (False, True):
                names = reserved.find_open(
                    kind, footprint, going, profile.model, roomiest_first=roomiest_first
                )
                others = (n for n in names if n not in barred)
                if going is Hold.BUSY:
                    others = (n for n in others if _could_take(fleet.workers[n], footprint, going))
                found.update(dict.fromkeys(islice(others, MAX_OPTIONS // 2)))
        return list(islice(found, MAX_OPTIONS))

    yield find_few(None), Hold.RETAINED
    yield find_few(Hold.RETAINED), Hold.RETAINED
    if most >= Hold.WARM:
        yield find_few(Hold.WARM), Hold.WARM
    if most is Hold.BUSY:
        yield find_few(Hold.BUSY), Hold.BUSY


def _price_option(
    fleet: Fleet,
    model: Model,
    worker: Worker,
    *,
    obstacle: str | None = None,
    evictions: EvictionPlan | None = None,
    adapter_bytes: int = 0,
) -> Option:
    queue_s = _estimate_queue_s(fleet, model, worker)
    missing_bytes = count_missing_bytes(model, worker)
    load_s = fleet.estimates.load_s(missing_bytes, model, worker.node)
    load_s += fleet.estimates.reload.load_s(adapter_bytes, None)
    evict_s = 0.0 if evictions is None else evictions.evict_s
    utilisation = worker.promises.utilisation
    cost_s = routing_cost(fleet.config, queue_s, load_s, utilisation, evict_s)
    if evictions is not None and len(fleet.num_workers_by_node) > 1:
        num_beside = sum(one.worker.node == worker.node for one in model.replicas.values())
        cost_s += fleet.config.spread_s * num_beside
    missing_bytes += adapter_bytes
    return Option(worker.name, queue_s, load_s, utilisation, cost_s, obstacle, evict_s, missing_bytes)


def _likely_replicas(request: Request, replicas: Iterable[Replica]) -> list[Replica]:
    if request.adapter is None:
        return list(islice(replicas, MAX_OPTIONS))
    having, lacking = list[Replica](), list[Replica]()
    for replica in replicas:
        (lacking if _missing_adapter_bytes(request, replica.worker) else having).append(replica)
    del having[max(MAX_OPTIONS // 2, MAX_OPTIONS - len(lacking)) :]
    return [*having, *lacking[: MAX_OPTIONS - len(having)]]


def _missing_adapter_bytes(request: Request, worker: Worker) -> int:
    adapter = request.adapter
    return 0 if adapter is None or adapter.adapter in worker.adapters else adapter.num_bytes


def _estimate_queue_s(fleet: Fleet, model: Model, worker: Worker) -> float:
    estimates = fleet.estimates
    own_s = estimates.run_s(model.name)
    replica = worker.busy.get(model.name)
    own_queue_s = 0.0 if replica is None else own_s * len(replica.running) / replica.max_seqs
    others_s = (min(own_s, estimates.run_s(other)) for other in worker.busy if other != model.name)
    return math.fsum((own_queue_s, *others_s))  # the same in any order of `busy`


def _show_others(fleet: Fleet, model: Model, shown: Iterable[WorkerId], max_options: int) -> Iterator[Option]:
    done = set(shown)
    roomiest = chain.from_iterable(
        index.idle.down_to_rank(index.idle.lowest or 0) for index in fleet.capacity.by_kind.values()
    )
    names = (name for name in chain(model.replicas, roomiest) if name not in done)
    for name in islice(names, max_options):
        done.add(name)
        worker = fleet.workers[name]
        yield _price_option(fleet, model, worker, obstacle=_explain_obstacle(model, worker))


def explain_wait(fleet: Fleet, request_id: RequestId) -> str | None:
    """Say why a request waits for a slot or for room; None if it does not."""
    request = fleet.queues.requests.get(request_id)
    if request is None or request.replica is not None:
        return None
    model = request.model
    option = next(_show_others(fleet, model, (), max_options=1), None)
    if option is None:
        return "no worker is up"
    worker, obstacle = fleet.workers[option.worker], option.obstacle
    replica = worker.replicas.get(model.name)
    if replica is not None and replica.has_free_slot and not replica.has_slot_for(request, fleet.now_s):
        obstacle = "its free slots are kept for interactive requests"
    footprint = None if model.profile is None else model.profile.footprints.get(worker.kind)
    if footprint is not None and replica is None and worker.name not in model.failed_on:
        takes_turns = fleet.config.takes_turns
        if _could_take(worker, footprint, Hold.BUSY if takes_turns else Hold.WARM):
            obstacle = "its room is kept for requests that came first"
        elif takes_turns:
            obstacle = f"{obstacle}; too large to take turns with them"
    return f"{worker.name}: {obstacle}"


def _explain_obstacle(model: Model, worker: Worker) -> str:
    replica = worker.replicas.get(model.name)
    if worker.is_draining:
        return f"node `{worker.node}` is being drained"
    if replica is not None:
        if replica.is_stale:
            return "holds an older version, which still runs"
        if replica.drain is not None:
            return f"makes room for `{replica.drain.model.name}`"
        if not replica.has_free_slot:
            return f"all {replica.max_seqs} slots are in use"
        return "has more requests than others with a free slot"
    footprint = None if model.profile is None else model.profile.footprints.get(worker.kind)
    if footprint is None:
        return f"it cannot run on `{worker.kind}`"
    if worker.name in model.failed_on:
        return "it failed here before"
    if model.with_free_slot:
        return explain_shortage(worker, footprint) or "a free slot elsewhere comes before a second replica"
    return explain_shortage(worker, footprint) or "would lose more, or is no better than those considered"
