"""The facts of a fleet as plain values, and the fleet rebuilt from them.

Stored are all fields of requests, models and replicas except those in `_REBUILT`, and the order of records
where a decision depends on it. Promises, capacity, rankings, queues and expiries are rebuilt. A replica is
referred to by its number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

import msgspec

from hearth.core.types import ModelId, NodeId, WorkerId, model_of
from hearth.policy.fleet.capacity import CapacityIndex
from hearth.policy.fleet.device_bytes import record_bytes
from hearth.policy.fleet.drop_group import DropState
from hearth.policy.fleet.estimates import Estimates
from hearth.policy.fleet.events import BrainConfig, WorkerJoined
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.prewarm_budget import PrewarmBudget
from hearth.policy.fleet.profile import Promise
from hearth.policy.fleet.records import (
    Drain,
    KnownAdapters,
    Model,
    Replacement,
    Replica,
    ReplicaStage,
    Request,
    Worker,
)

Facts = Mapping[str, object]  #: the stored fields of a record, by name

_REBUILT: Mapping[type[Request | Model | Replica], set[str]] = {
    Request: {"model", "replica"},
    Model: {"retired", "replicas", "usable", "loading", "with_free_slot", "failed_on", "waiting", "queue"},
    Replica: {"model", "worker", "running", "drain", "hold", "expiry_entry_s", "stages"},
}
STORED = {
    kind: tuple(one.name for one in fields(kind) if one.name not in rebuilt)
    for kind, rebuilt in _REBUILT.items()
}


@dataclass(frozen=True, slots=True)
class ModelState:
    facts: Facts
    waiting: list[Facts]
    failed_on: list[WorkerId]


@dataclass(frozen=True, slots=True)
class StageState:
    worker: WorkerId
    promise: Promise
    begin: int
    end: int
    total_bytes: int
    loaded_bytes: int
    is_ready: bool


@dataclass(frozen=True, slots=True)
class ReplicaState:
    model: ModelId
    worker: WorkerId
    facts: Facts
    running: list[Facts]  #: in the order in which they were started
    stages: list[StageState] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DrainState:
    model: ModelId
    worker: WorkerId  #: the first
    began_s: float
    victims: list[int]  #: that are still there
    gone: list[ModelId]  #: models of other victims: the drain ends if one has to be served first
    more: list[WorkerId] = field(default_factory=list)  #: the other workers of a pipeline


@dataclass(frozen=True, slots=True)
class FleetState:
    now_s: float
    step_number: int
    num_added: int
    most_by_node: dict[NodeId, int]
    next_number: int  #: of requests
    timer_s: float | None
    kept_until_s: float
    estimates: Estimates
    resting: dict[WorkerId, float]
    draining: list[NodeId]
    kinds: list[str]  #: of devices, in the order in which they are considered
    workers: list[WorkerJoined]
    adapters: dict[WorkerId, KnownAdapters]
    models: list[ModelState]
    replicas: list[ReplicaState]  #: in the order in which they were added
    drains: list[DrainState]
    unplaced: list[ModelId]
    refused_pins: list[int]
    next_scaling_s: float = math.inf
    used_s: dict[WorkerId, float] = field(default_factory=dict)
    no_pipeline_until_s: float = -math.inf
    gathering: dict[ModelId, float] = field(default_factory=dict)
    replaced: dict[ModelId, Replacement] = field(default_factory=dict)
    prewarm_budget: PrewarmBudget = field(default_factory=PrewarmBudget)


def save(fleet: Fleet) -> FleetState:
    """Return the facts of a fleet. They change with the fleet: encode them before the next step."""
    fleet.rank_workers()
    fleet.queues.rank_waiting()
    return FleetState(
        now_s=fleet.now_s,
        step_number=fleet.step_number,
        num_added=fleet.num_added,
        most_by_node=fleet.most_by_node,
        next_number=fleet.queues.next_number,
        timer_s=fleet.timer_s,
        kept_until_s=fleet.kept_until_s,
        estimates=fleet.estimates,
        resting=fleet.resting,
        draining=list(fleet.draining),
        kinds=list(fleet.capacity.by_kind),
        workers=[_joined(one) for one in fleet.workers.values()],
        adapters={name: one.adapters for name, one in fleet.workers.items()},
        models=[
            ModelState(_facts(one), _all_facts(one.waiting.values()), list(one.failed_on))
            for one in fleet.models.values()
        ],
        replicas=[
            ReplicaState(
                one.model.name,
                one.worker.name,
                _facts(one),
                _all_facts(one.running.values()),
                [_stage(stage) for stage in one.stages],
            )
            for one in sorted(fleet.replicas(), key=lambda replica: replica.number)
        ],
        drains=[
            DrainState(
                model=one.model.name,
                worker=one.workers[0].name,
                began_s=one.began_s,
                victims=[victim.number for victim in one.victims if victim.hold is not None],
                gone=[
                    victim.model.name
                    for victim in one.victims
                    if victim.hold is None and fleet.models.get(victim.model.name) is victim.model
                ],
                more=[worker.name for worker in one.workers[1:]],
            )
            for one in fleet.drains.values()
        ],
        unplaced=list(fleet.unplaced),
        refused_pins=[replica.number for replica in fleet.refused_pins],
        next_scaling_s=fleet.next_scaling_s,
        no_pipeline_until_s=fleet.no_pipeline_until_s,
        used_s={name: one.used_s for name, one in fleet.workers.items()},
        gathering=fleet.gathering,
        replaced=fleet.replaced,
        prewarm_budget=fleet.prewarm_budget,
    )


def _facts(record: Request | Model | Replica) -> Facts:
    return {name: getattr(record, name) for name in STORED[type(record)]}


def _all_facts(requests: Iterable[Request]) -> list[Facts]:
    return [_facts(request) for request in requests]


def _stage(stage: ReplicaStage) -> StageState:
    return StageState(
        worker=stage.worker.name,
        promise=stage.promise,
        begin=stage.begin,
        end=stage.end,
        total_bytes=stage.total_bytes,
        loaded_bytes=stage.loaded_bytes,
        is_ready=stage.is_ready,
    )


def _restore_stage(fleet: Fleet, state: StageState) -> ReplicaStage:
    return ReplicaStage(
        fleet.workers[state.worker],
        state.promise,
        state.begin,
        state.end,
        state.total_bytes,
        state.loaded_bytes,
        state.is_ready,
    )


def _joined(worker: Worker) -> WorkerJoined:
    promises = worker.promises
    return WorkerJoined(
        now_s=0.0,
        worker=worker.name,
        kind=worker.kind,
        budget_bytes=promises.budget_bytes,
        shares_workspace=promises.shares_workspace,
        node=worker.node,
        gpu=worker.gpu,
        runs_stages=worker.runs_stages,
        device_share=worker.device_share,
    )


def restore(config: BrainConfig, state: FleetState) -> Fleet:
    """Return a fleet that decides as the saved one would have.

    Raises:
        ValueError, KeyError, AssertionError: a record has wrong facts or refers to a missing one.
    """
    fleet, replicas = Fleet(config), dict[int, Replica]()
    fleet.now_s, fleet.step_number, fleet.num_added = state.now_s, state.step_number, state.num_added
    fleet.most_by_node, fleet.queues.next_number = dict(state.most_by_node), state.next_number
    fleet.timer_s, fleet.kept_until_s, fleet.next_scaling_s = (
        state.timer_s,
        state.kept_until_s,
        state.next_scaling_s,
    )
    fleet.estimates, fleet.resting = state.estimates, state.resting
    fleet.no_pipeline_until_s, fleet.gathering = state.no_pipeline_until_s, state.gathering
    fleet.replaced, fleet.prewarm_budget = state.replaced, state.prewarm_budget
    fleet.capacity.by_kind.update((kind, CapacityIndex()) for kind in state.kinds)
    fleet.draining = dict.fromkeys(state.draining)
    for joined in state.workers:
        fleet.join(joined)
        worker = fleet.workers[joined.worker]
        worker.adapters = state.adapters[joined.worker]
        worker.used_s = state.used_s.get(joined.worker, fleet.now_s)
    for one in state.models:
        model = msgspec.convert(one.facts, Model)
        fleet.models[model.name] = model
        if model.forecast_due_s < math.inf:
            fleet.forecasts_due.put(model.name, model.forecast_due_s)
        for facts in one.waiting:
            request = _restore_request(fleet, model, facts)
            fleet.queues.enqueue(request, request.queued_s, request.queued_step)
        fleet.queues.line_up(model)
        for name in one.failed_on:
            model.record_failure(fleet.workers[name])
    for each in state.replicas:
        model, worker = fleet.models[each.model], fleet.workers[each.worker]
        replica = msgspec.convert({**each.facts, "model": model, "worker": worker}, Replica)
        replica.stages = tuple(_restore_stage(fleet, stage) for stage in each.stages)
        model.replicas[worker.name] = replicas[replica.number] = replica
        for host in replica.workers:
            host.replicas[model.name] = replica
        if replica.is_temporary:
            fleet.loading_pipelines[model.name] = replica
        served = fleet.served_by(replica) or Model(model_of(model.name))  # that was removed
        for facts in each.running:
            request = _restore_request(fleet, served, facts)
            request.replica = replica
            replica.running[request.request_id] = request
            fleet.gpu_time.start(request, fleet.now_s)
            fleet.queues.num_awaiting_turn += request.awaits_turn
    for begun in state.drains:
        model, names = fleet.models[begun.model], (begun.worker, *begun.more)
        workers = tuple(fleet.workers[name] for name in names)
        victims = [replicas[number] for number in begun.victims]
        victims += [Replica(fleet.models[name], workers[0], Promise(0, 0), 0, "") for name in begun.gone]
        fleet.begin_drain(Drain(model, workers, tuple(victims), begun.began_s))
    fleet.dropped = {
        name: model for name, model in fleet.models.items() if model.drop.state is not DropState.WHOLE
    }
    fleet.unplaced = {name: fleet.models[name] for name in state.unplaced}
    fleet.refused_pins = {replicas[number]: None for number in state.refused_pins}
    for replica in replicas.values():
        fleet.update_indexes(replica)
    for model in fleet.models.values():
        for name, num_bytes in list(model.resident_bytes.items()):
            record_bytes(model, fleet.workers[name], num_bytes)
    requests = fleet.queues.requests
    fleet.queues.requests = dict(sorted(requests.items(), key=lambda item: item[1].number))
    fleet.rank_workers()
    fleet.queues.rank_waiting()
    fleet.queues.must_serve = fleet.queues.must_refuse = False
    for worker in fleet.workers.values():
        fleet.gpu_time.note(worker, fleet.now_s)
    return fleet


def _restore_request(fleet: Fleet, model: Model, facts: Facts) -> Request:
    request = msgspec.convert({**facts, "model": model}, Request)
    fleet.queues.requests[request.request_id] = request
    return request
