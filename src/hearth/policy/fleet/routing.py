"""Where a request goes, or a model is loaded: the worker with the least routing cost.

A free slot is always taken before a model is loaded a second time. Of workers without the model, those that
need not evict come first, then those that evict retained models, then warm ones, then, if models take turns,
those whose busy models leave no room; the cost decides among equals. Workers that still have bytes of the
model compete with the first of these, if evicting retained models costs less than the bytes save. At most
`MAX_OPTIONS` workers are compared: those with most of the model, with the least sufficient room, and with the
most. Of replicas those are compared that have most of the prompt, or the adapter, and the least busy ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain, islice

from hearth.core.types import Hold, RequestId, WorkerId
from hearth.policy.fleet.capacity import BUSY, RETAINED, WARM
from hearth.policy.fleet.device_bytes import count_missing_bytes
from hearth.policy.fleet.events import BrainConfig, Option
from hearth.policy.fleet.first_tokens import expect_first_s, prefer_on_time
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.pipelines import PipelinePlan, plan_pipeline
from hearth.policy.fleet.prefixes import count_tokens
from hearth.policy.fleet.profile import Footprint, ModelProfile
from hearth.policy.fleet.records import Model, Replica, Request, Worker
from hearth.policy.fleet.refusals import explain_shortage, explain_stages, explain_unsuited
from hearth.policy.fleet.replica_evictions import EvictionPlan, plan_evictions, plan_turn_evictions
from hearth.policy.fleet.reserved_workers import MAX_OPTIONS, ReservedWorkers

#: Other workers that are shown beside the replicas when one of them has a free slot.
MAX_BESIDE = 2


def routing_cost(
    config: BrainConfig,
    queue_s: float,
    load_s: float,
    utilisation: float,
    evict_s: float,
    prompt_s: float = 0.0,
) -> float:
    """Return what it costs to serve a request on a worker, in seconds.

    `queue_s`: what the request loses by sharing the device. `load_s`: to load the missing bytes.
    `utilisation`: of the worker's budget, from 0 to 1: a full worker is preferred.
    `evict_s`: reload costs of all replicas that must go. `prompt_s`: to compute what is not cached of the
    prompt.
    """
    return (
        config.queue_weight * queue_s
        + config.load_weight * load_s
        + config.packing_s * (1.0 - utilisation)
        + evict_s
        + prompt_s
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
    pipeline: PipelinePlan | None = None  #: None: the worker gets the whole model

    @property
    def start_s(self) -> float:
        """How long the load takes, with the reload costs of what is evicted. Stages load at a time."""
        is_whole = self.pipeline is None  # else all options are its stages
        parts = [one for one in self.options if not is_whole or one.worker == self.worker.name]
        return max(one.load_s for one in parts) + self.evictions.evict_s


def choose_replica(fleet: Fleet, request: Request) -> FreeReplica | None:
    model = request.model
    if fleet.loading_pipelines and (staged := _choose_loading_pipeline(fleet, request)) is not None:
        return staged
    if not model.with_free_slot:
        return None
    free = (model.replicas[name] for name in model.with_free_slot)
    replicas = _likely_replicas(request, (one for one in free if one.has_slot_for(request, fleet.now_s)))
    if not replicas:
        return None
    if len(replicas) > 1 and fleet.config.first_token_s is not None:
        replicas = prefer_on_time(fleet, request, replicas, fleet.config.first_token_s)
    options = [_price_replica(fleet, request, replica) for replica in replicas]
    best = 0
    if len(options) > 1:
        _, _, best = min([(one.cost_s, one.worker, at) for at, one in enumerate(options)])
    num_beside = min(MAX_BESIDE, MAX_OPTIONS - len(options))
    if num_beside:
        options += _show_others(fleet, model, [option.worker for option in options], num_beside)
    return FreeReplica(replicas[best], tuple(options))


def _choose_loading_pipeline(fleet: Fleet, request: Request) -> FreeReplica | None:
    """Return the pipeline of workers that load a request's model; None: a whole replica comes first, or no
    pipeline has a slot."""
    model = request.model
    whole = [
        one
        for one in (model.replicas[name] for name in model.with_free_slot)
        if one.has_slot_for(request, fleet.now_s)
    ]
    if request.adapter is not None or any(one.is_ready for one in whole):
        return None
    for replica in fleet.pipelines_of(model):
        if replica.takes_requests and replica.has_slot_for(request, fleet.now_s):
            if fleet.config.first_token_s is not None and _is_sooner(fleet, request, whole, replica):
                continue
            missing_bytes = max(one.total_bytes - one.loaded_bytes for one in replica.stages)
            option = _price_option(fleet, model, replica.worker, missing_bytes=missing_bytes)
            return FreeReplica(replica, (option,))
    return None


def _is_sooner(fleet: Fleet, request: Request, replicas: Sequence[Replica], than: Replica) -> bool:
    """True if a first token comes sooner on one of several replicas."""
    limit_s = expect_first_s(fleet, request, than)
    return any(expect_first_s(fleet, request, one) < limit_s for one in replicas)


def choose_place(
    fleet: Fleet,
    model: Model,
    *,
    most: Hold = WARM,
    reserved: ReservedWorkers | None = None,
    barred: Set[WorkerId] = frozenset(),
) -> ReplicaPlace | None:
    """Return where to load a model, but not on `barred` workers.

    Replicas with a hold up to `most` may be evicted; busy ones are not, but take turns with it. None if no
    other worker that is not reserved has room, or could make it.
    """
    profile, reserved = model.profile, reserved or ReservedWorkers(fleet)
    if profile is None:
        return None
    choose = _choose_unbarred
    if not fleet.capacity.has_fitting(profile, most):
        if not fleet.capacity.must_stage(profile):
            return None
        choose = _choose_pipeline
    barred = _hosting(model) | barred
    place = choose(fleet, model, profile, barred | model.failed_on.keys(), reserved, most)
    if place is None and model.failed_on and not model.usable:
        place = choose(fleet, model, profile, barred, reserved, most)
    return place


def has_untried_place(fleet: Fleet, model: Model) -> bool:
    """True if a model could be loaded now where it has not failed, and no other one waits for room."""
    if model.profile is None or len(fleet.queues.for_room) > (model.name in fleet.queues.for_room):
        return False
    most = BUSY if fleet.config.takes_turns else WARM
    if model.profile.is_pinned:
        most = RETAINED
    barred = _hosting(model) | model.failed_on.keys()
    choose = _choose_pipeline if fleet.capacity.must_stage(model.profile) else _choose_unbarred
    return choose(fleet, model, model.profile, barred, ReservedWorkers(fleet), most) is not None


def _hosting(model: Model) -> Set[WorkerId]:
    """Return the workers that have a replica of a model, or a stage of one."""
    names = set(model.replicas)
    for replica in model.replicas.values():
        if replica.stages:
            names.update(worker.name for worker in replica.workers)
    return names


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
        takes_turns = going is BUSY
        return ReplicaPlace(worker, footprint, plans[best.worker], (*options, *beside), takes_turns)
    return None


def _choose_pipeline(
    fleet: Fleet,
    model: Model,
    profile: ModelProfile,
    barred: Set[WorkerId],
    reserved: ReservedWorkers,
    most: Hold,
) -> ReplicaPlace | None:
    def is_open(worker: Worker, footprint: Footprint) -> bool:
        return worker.name not in barred and not reserved.bars(worker, footprint, model.name)

    is_too_soon = fleet.now_s < fleet.no_pipeline_until_s
    plan = None if is_too_soon else plan_pipeline(fleet, profile, is_open, most)
    if plan is None:
        return None
    options = [
        _price_option(fleet, model, stage.worker, missing_bytes=stage.num_bytes) for stage in plan.stages
    ]
    first, evictions = plan.stages[0], EvictionPlan(plan.victims)
    return ReplicaPlace(
        first.worker, first.footprint, evictions, tuple(options), plan.takes_turns, pipeline=plan
    )


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
    if most is BUSY:
        return worker.promises.can_take_turns(footprint, without=WARM)
    return worker.promises.has_room(footprint, most)


def _plan_evictions(fleet: Fleet, profile: ModelProfile, worker: Worker, most: Hold) -> EvictionPlan:
    plan_of = plan_turn_evictions if most is BUSY else plan_evictions
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
                if going is BUSY:
                    others = (n for n in others if _could_take(fleet.workers[n], footprint, going))
                found.update(dict.fromkeys(islice(others, MAX_OPTIONS // 2)))
        return list(islice(found, MAX_OPTIONS))

    yield find_few(None), RETAINED
    yield find_few(RETAINED), RETAINED
    if most >= WARM:
        yield find_few(WARM), WARM
    if most is BUSY:
        yield find_few(BUSY), BUSY


def _price_option(
    fleet: Fleet,
    model: Model,
    worker: Worker,
    *,
    obstacle: str | None = None,
    evictions: EvictionPlan | None = None,
    adapter_bytes: int = 0,
    missing_bytes: int | None = None,
    prompt_s: float = 0.0,
    cached_tokens: int = 0,
) -> Option:
    queue_s = _estimate_queue_s(fleet, model, worker) if worker.busy else 0.0
    if missing_bytes is None:
        missing_bytes = count_missing_bytes(model, worker)
    load_s = fleet.estimates.load_s(missing_bytes, model, worker.node) if missing_bytes else 0.0
    if adapter_bytes:
        load_s += fleet.estimates.reload.load_s(adapter_bytes, None)
    evict_s = 0.0 if evictions is None else evictions.evict_s
    utilisation = worker.promises.utilisation
    cost_s = routing_cost(fleet.config, queue_s, load_s, utilisation, evict_s, prompt_s)
    if evictions is not None and len(fleet.num_workers_by_node) > 1:
        num_beside = sum(one.worker.node == worker.node for one in model.replicas.values())
        cost_s += fleet.config.spread_s * num_beside
    missing_bytes += adapter_bytes
    return Option(
        worker.name,
        queue_s,
        load_s,
        utilisation,
        cost_s,
        obstacle,
        evict_s,
        missing_bytes,
        prompt_s,
        cached_tokens,
    )


def _price_replica(fleet: Fleet, request: Request, replica: Replica) -> Option:
    cached_tokens = replica.prefixes.count_cached(request.prefixes)
    num_tokens = count_tokens(len(request.prefixes)) - cached_tokens
    return _price_option(
        fleet,
        request.model,
        replica.worker,
        adapter_bytes=_missing_adapter_bytes(request, replica.worker),
        prompt_s=fleet.estimates.prompt_s(request.model.name, num_tokens),
        cached_tokens=cached_tokens,
    )


def _likely_replicas(request: Request, replicas: Iterable[Replica]) -> list[Replica]:
    if request.adapter is None and not request.prefixes:
        return list(islice(replicas, MAX_OPTIONS))
    least_busy = list(replicas)
    if len(least_busy) <= MAX_OPTIONS:
        return least_busy

    def rate(replica: Replica) -> tuple[int, bool]:
        cached_tokens = replica.prefixes.count_cached(request.prefixes)
        return cached_tokens, not _missing_adapter_bytes(request, replica.worker)

    having = nlargest(MAX_OPTIONS // 2, least_busy, key=rate)
    return [*having, *islice((one for one in least_busy if one not in having), MAX_OPTIONS - len(having))]


def _missing_adapter_bytes(request: Request, worker: Worker) -> int:
    adapter = request.adapter
    return 0 if adapter is None or adapter.adapter in worker.adapters else adapter.num_bytes


def _estimate_queue_s(fleet: Fleet, model: Model, worker: Worker) -> float:
    run_s_by_model, mean_s = fleet.estimates.run_s_by_model, fleet.estimates.run_s()
    own_s = run_s_by_model.get(model.name, mean_s)
    replica = worker.busy.get(model.name)
    own_queue_s = 0.0 if replica is None else own_s * replica.load / replica.max_seqs
    if replica is not None and len(worker.busy) == 1:
        return own_queue_s
    others_s = [min(own_s, run_s_by_model.get(one, mean_s)) for one in worker.busy if one != model.name]
    return math.fsum((own_queue_s, *others_s))  # the same in any order of `busy`


def _show_others(fleet: Fleet, model: Model, shown: Iterable[WorkerId], max_options: int) -> Iterator[Option]:
    done = set(shown)
    roomiest = chain.from_iterable(reversed(index.idle) for index in fleet.capacity.by_kind.values())
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
    if model.profile is not None and not model.usable and fleet.capacity.must_stage(model.profile):
        return f"no worker can hold it: {explain_stages(fleet, model.profile, WARM)}"
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
        if _could_take(worker, footprint, BUSY if takes_turns else WARM):
            obstacle = "its room is kept for requests that came first"
        elif takes_turns:
            obstacle = f"{obstacle}; too large to take turns with them"
    return f"{worker.name}: {obstacle}"


def explain_unplaced(fleet: Fleet) -> Iterator[str]:
    """Say which models have fewer replicas than should be kept loaded, and why."""
    for model in fleet.unplaced.values():
        workers = (one for one in fleet.workers.values() if model.name not in one.replicas)
        found = [f"{one.name}: {_explain_unplaced_on(model, one)}" for one in islice(workers, MAX_OPTIONS)]
        yield (
            f"model `{model.name}` has {len(model.pinned_replicas)} of {model.num_pinned} replicas that "
            f"should be kept loaded: {'; '.join(found) or 'no other worker is up'}"
        )


def _explain_unplaced_on(model: Model, worker: Worker) -> str:
    footprint = None if model.profile is None else model.profile.footprints.get(worker.kind)
    if worker.is_draining or footprint is None or worker.name in model.failed_on:
        return _explain_obstacle(model, worker)
    return explain_shortage(worker, footprint) or "models with requests come first"


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
        return "it was removed" if model.profile is None else explain_unsuited(model.profile, [worker.kind])
    if worker.name in model.failed_on:
        return "it failed here before"
    if model.has_all_replicas:
        return f"has as many replicas as `max_replicas` allows: {len(model.usable)}"
    if model.with_free_slot:
        return explain_shortage(worker, footprint) or "a free slot elsewhere comes before a second replica"
    return explain_shortage(worker, footprint) or "would lose more, or is no better than those considered"
