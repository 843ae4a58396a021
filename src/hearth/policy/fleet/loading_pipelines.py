"""Pipelines of workers that load the same model at once, which serve it before any of them is whole. Pure.

After a burst several workers load a model from its beginning, and none can answer until it has all of it. As
a pipeline each loads the layers of its stage first, and the rest of the model behind them. So together they
have the model after a fraction of that time:

    worker 1  | layers 0-13  | the rest                 |
    worker 2  | layers 14-27 | the rest                 |
                             | they answer in stages    | each answers alone

A stage is hosted beside the whole model, under a name of its own, and has its own promise and KV. A pipeline
is formed over workers that have room for both, `gather_s` after the second load was ordered, and only if it
is ready by `min_gain_s` earlier than the first whole replica. Its members load over different ways: each is
one if they have the model on their own disks, and if k nodes send it to others, these form pipelines of k
stages. More than `MAX_STAGES` ways are several pipelines, and workers that begin later form others. Requests
that wait for the loads go there, and new ones until a whole replica is ready. When no member is loading any
more, requests that still run continue on whole replicas like those of a lost worker. Their KV goes with them
where that is sooner than computing it again (`kv_moves.py`). Then the pipeline is dissolved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise, zip_longest

from hearth.core.types import NodeId, Rung, pipeline_name
from hearth.policy.fleet.events import Action, Dispatch, Evict, Why
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.kv_moves import choose_kv_moves
from hearth.policy.fleet.pipelines import PipelinePlan, PlannedStage, plan_over
from hearth.policy.fleet.profile import MAX_STAGES, MIN_STAGES, ModelProfile
from hearth.policy.fleet.records import Model, Replica, Worker
from hearth.policy.fleet.serving import dissolve, fill_slots, form_pipeline, order_load, take_back


def serve_while_loading(fleet: Fleet) -> list[Action]:
    actions: list[Action] = []
    while fleet.gathering and next(iter(fleet.gathering.values())) <= fleet.now_s:
        name = next(iter(fleet.gathering))
        del fleet.gathering[name]
        if (model := fleet.models.get(name)) is not None:
            actions += _form(fleet, model)
    for replica in list(fleet.loading_pipelines.values()):
        model = fleet.served_by(replica)
        if replica.dissolves_s is not None:
            if replica.dissolves_s <= fleet.now_s:
                actions += dissolve(fleet, [replica])[0]
        elif model is None or replica.is_stale:
            continue  # its requests end there
        elif _is_over(model, replica):
            actions += _switch(fleet, model, replica)
        else:
            actions += fill_slots(fleet, model)
    return actions


def _switch(fleet: Fleet, model: Model, pipeline: Replica) -> list[Action]:
    """Move all requests to whole replicas. The pipeline stays for as long as it may send their KV."""
    running = list(pipeline.running.values())
    cancels = take_back(fleet, running)
    pipeline.dissolves_s = fleet.now_s  # first, so that none comes back
    fleet.reindex(pipeline)
    dispatches = fill_slots(fleet, model, {one.request_id for one in running}, Why.SWITCHED)
    switched = [one for one in dispatches if isinstance(one, Dispatch) and one.why is Why.SWITCHED]
    choices = choose_kv_moves(fleet, pipeline, switched) if pipeline.is_ready else []
    wait_s = max((one.wait_s for one in choices if one.is_moved), default=0.0)
    pipeline.dissolves_s += wait_s
    orders = [] if wait_s else dissolve(fleet, [pipeline])[0]
    return [*choices, *cancels, *orders, *dispatches]


def _form(fleet: Fleet, model: Model) -> list[Action]:
    """Have the workers that load a model load it in stages first, and give these the waiting requests."""
    profile, while_loading = model.profile, fleet.config.while_loading
    if profile is None or while_loading is None or not any(one.running for one in model.loading.values()):
        return []
    plans = _plans(fleet, model, profile)
    sooner = [one for one in plans if _gain_s(fleet, model, one.stages) >= while_loading.min_gain_s]
    actions = [action for plan in sooner for action in _load_in_stages(fleet, model, profile, plan)]
    return actions + fill_slots(fleet, model) if sooner else []


def _load_in_stages(fleet: Fleet, model: Model, profile: ModelProfile, plan: PipelinePlan) -> list[Action]:
    actions: list[Action] = []
    loading = [model.loading[stage.worker.name] for stage in plan.stages]
    for replica in loading:
        actions += take_back(fleet, list(replica.running.values()))
        fleet.remove(replica)
        actions.append(Evict(model.name, replica.worker.name, 0.0, is_freed=False))
        fleet.add(_unloaded(fleet, replica))
    first, name = plan.stages[0], pipeline_name(model.name, fleet.num_added + 1)
    pipeline = Replica(
        Model(name),
        first.worker,
        first.footprint.promise,
        profile.num_bytes,
        profile.digest,
        max_seqs=first.footprint.max_seqs,
        prompts_until_s=fleet.now_s + _load_s(fleet, model, plan.stages),
    )
    actions += form_pipeline(fleet, pipeline, plan)
    return actions + [order_load(model.replicas[stage.worker.name]) for stage in plan.stages]


def _unloaded(fleet: Fleet, replica: Replica) -> Replica:
    """Return a replica whose load begins again behind that of a stage."""
    missing_bytes = replica.total_bytes - replica.reused_bytes
    load_s = fleet.estimates.load_s(missing_bytes, replica.model, replica.worker.node)
    return Replica(
        replica.model,
        replica.worker,
        replica.promise,
        replica.total_bytes,
        replica.digest,
        max_seqs=replica.max_seqs,
        reused_bytes=replica.reused_bytes,
        loaded_bytes=replica.reused_bytes,
        prefixes=replica.prefixes,
        max_kv_tokens=replica.max_kv_tokens,
        prompts_until_s=fleet.now_s + load_s,
        prewarmed=replica.prewarmed,
    )


def _plans(fleet: Fleet, model: Model, profile: ModelProfile) -> list[PipelinePlan]:
    """Return pipelines of workers of one kind that are in none yet, and that all load over different ways."""
    members = {worker for pipeline in fleet.pipelines_of(model) for worker in pipeline.workers}
    workers_by_kind: dict[str, list[Worker]] = defaultdict(list)
    for replica in model.loading.values():
        worker, sizes = replica.worker, profile.stages.get(replica.worker.kind)
        if sizes is None or replica.stages or worker in members or not worker.runs_stages:
            continue
        if worker.promises.has_room(sizes.footprint(1, is_first=False, is_last=False)):
            workers_by_kind[worker.kind].append(worker)
    kind = max(workers_by_kind, key=lambda one: (len(workers_by_kind[one]), one), default=None)
    if kind is None:
        return []
    workers = sorted(workers_by_kind[kind], key=lambda one: one.name)
    most = min(MAX_STAGES, profile.stages[kind].num_layers)
    groups = [part for row in zip_longest(*_by_way(model, profile, workers)) for part in _parts(row, most)]
    plans = (plan_over(fleet, profile, group) for group in groups if len(group) >= MIN_STAGES)
    return [plan for plan in plans if plan is not None]


def _parts(row: Sequence[Worker | None], most: int) -> list[list[Worker]]:
    """Cut a row of workers into the fewest parts of about the same size."""
    workers = sorted((one for one in row if one is not None), key=lambda one: one.name)
    num_parts = -(-len(workers) // most)
    edges = [len(workers) * number // num_parts for number in range(num_parts + 1)]
    return [workers[begin:end] for begin, end in pairwise(edges)]


def _by_way(model: Model, profile: ModelProfile, workers: Sequence[Worker]) -> list[list[Worker]]:
    """Group workers by what limits their loads: their own bus, the disk of their node, or a node that sends.

    Several nodes that have the model send at once, each to its own group (`policy/multicast/schedules.py`).
    """
    found: dict[str, list[Worker]] = defaultdict(list)
    sources = [
        node for node, own in model.residency.items() if max(own.values(), default=0) >= profile.num_bytes
    ]
    receivers: dict[NodeId, NodeId] = {}
    for worker in workers:
        node, own = worker.node, model.residency.get(worker.node, {})
        if own.get(Rung.HOST, 0) >= profile.num_bytes:
            way: str = worker.name
        elif any(own.values()) or not sources:
            way = node
        else:
            way = receivers.setdefault(node, sources[len(receivers) % len(sources)])
        found[way].append(worker)
    return list(found.values())


def _gain_s(fleet: Fleet, model: Model, stages: Sequence[PlannedStage]) -> float:
    """Return how much earlier all stages are loaded than the first whole replica."""
    estimates, loading = fleet.estimates, model.loading.values()
    whole_s = min(
        estimates.load_s(one.total_bytes - one.loaded_bytes, model, one.worker.node) for one in loading
    )
    return whole_s - _load_s(fleet, model, stages)


def _load_s(fleet: Fleet, model: Model, stages: Sequence[PlannedStage]) -> float:
    return max(fleet.estimates.load_s(one.num_bytes, model, one.worker.node) for one in stages)


def _is_over(model: Model, pipeline: Replica) -> bool:
    """True if no member is loading any more, or one was whole before all stages were there."""
    members = [model.usable[one.name] for one in pipeline.workers if one.name in model.usable]
    is_any_ready = any(one.is_ready for one in members)
    return all(one.is_ready for one in members) or (is_any_ready and not pipeline.is_ready)
