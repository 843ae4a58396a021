"""Pipelines for models that no worker can hold whole: which workers, which layers, how much KV. Pure.

A pipeline has the fewest stages that fit, all on workers of one pool that have the head's version of Hearth.
Workers of one node come before those of several, then the fewest nodes, and of these the ones with the
fastest links. Layers are shared out so that the slowest stage is as fast as it can be: by the times of the
model's last pipeline, at first by bytes. Members are in the order of their ids.

A pipeline takes no turns: it is formed only if the promises of all its members fit at once. So no two models
wait for each other's workers, and it needs no more room later. One full context of KV is promised on every
member; more is lent, as `policy/memory/stage_kv.py` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

from hearth.core.types import Hold, NodeId, WorkerId
from hearth.policy.fleet.capacity import BUSY, PAUSED, RETAINED, WARM, CapacityIndex, Promises
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.profile import MAX_STAGES, MIN_STAGES, Footprint, ModelProfile, StageSizes
from hearth.policy.fleet.ranking import Ranking
from hearth.policy.fleet.records import Worker
from hearth.policy.fleet.replica_evictions import Victim, choose_fewest, find_idle, price_victim

#: Workers that are considered, those with the most room.
MAX_CANDIDATES = 64

#: Whether a stage fits on a worker. A smaller stage fits wherever a larger one does.
Fits = Callable[[Worker, Footprint], bool]


@dataclass(frozen=True, slots=True)
class PlannedStage:
    worker: Worker
    begin: int  #: its first layer
    end: int  #: the first layer behind it
    footprint: Footprint
    num_bytes: int  #: of its weights, as stored


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    stages: tuple[PlannedStage, ...]
    victims: tuple[Victim, ...]  #: to be evicted, each once
    num_blocks: int  #: of KV promised on every member, without the sink
    takes_turns: bool = False  #: other models on its workers do not fit together


def could_hold(fleet: Fleet, profile: ModelProfile, most: Hold) -> bool:
    """True if a model would fit without replicas of a hold up to `most`, whole or in stages."""
    if fleet.capacity.has_fitting(profile, most):
        return True
    if not fleet.capacity.must_stage(profile):
        return False

    def fits(worker: Worker, footprint: Footprint) -> bool:
        return worker.promises.has_room(footprint, most)

    return find_stages(fleet, profile, lambda index: index.without[most], fits) is not None


def share_layers(fleet: Fleet, profile: ModelProfile) -> tuple[int, ...]:
    """Return the layers of each stage of a model: of its pipeline, or else of the one on empty workers.

    Empty: some worker could hold it whole, or it fits in no stages.
    """
    model = fleet.models.get(profile.model)
    replicas = () if model is None else model.replicas.values()
    if staged := next((one.stages for one in replicas if one.stages), None):
        return tuple(stage.end - stage.begin for stage in staged)
    return tuple(stage.end - stage.begin for stage in find_on_empty_workers(fleet, profile) or ())


def find_on_empty_workers(fleet: Fleet, profile: ModelProfile) -> tuple[PlannedStage, ...] | None:
    """Return the stages that a model would have on workers without others; None: it needs or fits none."""

    def fits(worker: Worker, footprint: Footprint) -> bool:
        return footprint.least_bytes <= worker.promises.budget_bytes

    if not fleet.capacity.must_stage(profile):
        return None
    return find_stages(fleet, profile, lambda index: index.budget, fits)


def plan_pipeline(fleet: Fleet, profile: ModelProfile, is_open: Fits, most: Hold) -> PipelinePlan | None:
    """Return how to form a pipeline where `is_open` says so; None: not now.

    Replicas with a hold up to `most` may be evicted; busy ones are not, but those that take turns may be out
    of turn.
    """
    goings = [going for going in (None, RETAINED, WARM, BUSY) if going is None or going <= most]
    plans = (_plan_without(fleet, profile, is_open, going) for going in goings)
    return next((plan for plan in plans if plan is not None), None)


def _plan_without(
    fleet: Fleet, profile: ModelProfile, is_open: Fits, going: Hold | None
) -> PipelinePlan | None:
    def fits(worker: Worker, footprint: Footprint) -> bool:
        return _could_take(worker, footprint, going) and is_open(worker, footprint)

    stages = find_stages(fleet, profile, lambda index: index.without[going], fits)
    if stages is None:
        return None
    return _plan_in_room(fleet, profile.stages[stages[0].worker.kind], stages, going)


def _plan_in_room(
    fleet: Fleet, sizes: StageSizes, stages: tuple[PlannedStage, ...], going: Hold | None
) -> PipelinePlan:
    chosen = [victim for stage in stages for victim in _choose_victims(fleet, stage, going)]
    victims = tuple({victim.replica: victim for victim in chosen}.values())
    return PipelinePlan(stages, victims, sizes.context_blocks, takes_turns=going is BUSY)


def plan_over(fleet: Fleet, profile: ModelProfile, workers: list[Worker]) -> PipelinePlan | None:
    """Return a pipeline of these workers of one kind, in free memory; None: they have too little."""

    def fits(worker: Worker, footprint: Footprint) -> bool:
        return worker.promises.has_room(footprint)

    sizes, head_layers = profile.stages[workers[0].kind], fleet.estimates.head_layers.get(profile.model)
    shares = sizes.split([partial(fits, worker) for worker in workers], head_layers)
    return None if shares is None else _plan_in_room(fleet, sizes, plan_stages(sizes, workers, shares), None)


def find_stages(
    fleet: Fleet, profile: ModelProfile, rank: Callable[[CapacityIndex], Ranking[WorkerId, int]], fits: Fits
) -> tuple[PlannedStage, ...] | None:
    """Return the stages of the best pipeline; `rank` has those workers last that have the most room."""
    for kind, index in fleet.capacity.by_kind.items():
        if (sizes := profile.stages.get(kind)) is None:
            continue
        one_layer = sizes.footprint(1, is_first=False, is_last=False)
        workers = (fleet.workers[name] for name in rank(index).down_to_rank(0))
        fitting = (one for one in workers if one.runs_stages and fits(one, one_layer))
        able = list(islice(fitting, MAX_CANDIDATES))
        head_layers = fleet.estimates.head_layers.get(profile.model)
        if (stages := _find_in_pool(fleet, sizes, able, fits, head_layers)) is not None:
            return stages
    return None


def _find_in_pool(
    fleet: Fleet, sizes: StageSizes, workers: list[Worker], fits: Fits, head_layers: float | None
) -> tuple[PlannedStage, ...] | None:
    most = {
        worker.name: sizes.most_layers(partial(fits, worker), is_first=False, is_last=False)
        for worker in workers
    }
    able = sorted(workers, key=lambda one: (-most[one.name], one.name))
    for num_stages in range(MIN_STAGES, min(MAX_STAGES, len(able)) + 1):
        if sum(most[one.name] for one in able[:num_stages]) < sizes.num_layers:
            continue
        for group in _group_by_nodes(fleet, able, num_stages):
            members = sorted(group[:num_stages], key=lambda one: one.name)
            if len(members) < num_stages:
                continue
            shares = sizes.split([partial(fits, worker) for worker in members], head_layers)
            if shares is not None:
                return plan_stages(sizes, members, shares)
    return None


def _group_by_nodes(fleet: Fleet, able: list[Worker], num_stages: int) -> Iterator[list[Worker]]:
    """Yield workers of one node, then of more, those with the most room first."""
    nodes = list(dict.fromkeys(worker.node for worker in able))
    for num_nodes in range(1, min(num_stages, len(nodes)) + 1):
        for first in nodes:
            near = sorted((one for one in nodes if one != first), key=lambda one: -_speed(fleet, first, one))
            chosen = {first, *near[: num_nodes - 1]}
            yield [worker for worker in able if worker.node in chosen]


def _speed(fleet: Fleet, one: NodeId, other: NodeId) -> float:
    links = fleet.estimates.links
    both = links.get(one, {}).get(other), links.get(other, {}).get(one)
    return max((link.bytes_per_s for link in both if link is not None), default=0.0)


def plan_stages(sizes: StageSizes, members: list[Worker], shares: list[int]) -> tuple[PlannedStage, ...]:
    stages: list[PlannedStage] = []
    for worker, share in zip(members, shares, strict=True):
        begin = stages[-1].end if stages else 0
        stages.append(_stage(sizes, worker, begin, begin + share))
    return tuple(stages)


def _stage(sizes: StageSizes, worker: Worker, begin: int, end: int) -> PlannedStage:
    is_first, is_last = begin == 0, end == sizes.num_layers
    footprint = sizes.footprint(end - begin, is_first=is_first, is_last=is_last)
    num_bytes = sizes.stored.of(end - begin, is_first=is_first, is_last=is_last)
    return PlannedStage(worker, begin, end, footprint, num_bytes)


def _could_take(worker: Worker, footprint: Footprint, going: Hold | None) -> bool:
    if going is not BUSY:
        return worker.promises.has_room(footprint, going)
    if not worker.promises.can_take_turns(footprint, without=WARM):
        return False
    promises = worker.promises.copy()
    for replica in find_idle(worker):
        promises.release(replica.promise_on(worker), replica.booked_hold)
    return _has_room_now(promises, footprint, _lent_bytes(worker))


def _has_room_now(promises: Promises, footprint: Footprint, lent_bytes: int) -> bool:
    """True if a stage has room beside models in turn: it cannot wait until a turn ends."""
    promise = promises.booked(footprint.promise)
    workspace_bytes = max(promise.workspace_bytes, promises.workspace_bytes_from[0])
    needed_bytes = promise.own_bytes + promises.own_bytes_from[0] + workspace_bytes
    return needed_bytes <= promises.budget_bytes + lent_bytes


def _lent_bytes(worker: Worker) -> int:
    """Return what models out of turn do not keep of their promises."""
    paused = (replica.promise for replica in worker.replicas.values() if replica.hold is PAUSED)
    booked = map(worker.promises.booked, paused)
    return sum(promise.own_bytes - promise.standing_bytes for promise in booked)


def _choose_victims(fleet: Fleet, stage: PlannedStage, going: Hold | None) -> tuple[Victim, ...]:
    if going is None:
        return ()
    worker, footprint = stage.worker, stage.footprint
    victims = [price_victim(one, worker, fleet.estimates, fleet.now_s) for one in find_idle(worker)]
    if going is not BUSY:
        return choose_fewest(worker.promises, victims, lambda left: left.has_room(footprint))
    lent_bytes = _lent_bytes(worker)
    return choose_fewest(
        worker.promises,
        victims,
        lambda left: left.can_take_turns(footprint) and _has_room_now(left, footprint, lent_bytes),
    )
