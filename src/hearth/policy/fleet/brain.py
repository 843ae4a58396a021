"""All decisions of the control plane: an event goes in, actions come out. Pure: no clock, no randomness.

A request runs where its model has a free slot; else its model is loaded where there is room or idle models
can be evicted (`routing.py`, `replica_evictions.py`); else it waits (`serving.py`). All consequences of an
event follow in the same step.

Models that do not fit together may take turns on a worker. The worker decides the turns (`policy/turns`); the
brain decides which models are hosted where, so that every turn can come.

The books hold promises: what the hosted models of a worker, or those in turn, are promised never exceeds its
budget. What its memory holds at a moment is the worker's own affair (`device_bytes.py` knows a little of it).
A worker carries out orders in sequence. So the books count an evicted model as gone and a loading one as
there at once, and requests follow directly behind the order to load.
"""

from __future__ import annotations

import math
from typing import assert_never

from hearth.core.types import Hold, ModelId, WorkerId, model_of
from hearth.policy.fleet.deployment import (
    deploy_model,
    evict_if_leaving,
    evict_pipelines,
    remove_model,
    stop_model,
)
from hearth.policy.fleet.device_bytes import record_bytes, record_report
from hearth.policy.fleet.events import (
    Action,
    CancelRun,
    ComputedPrompt,
    DemandForecast,
    DeviceReported,
    End,
    Event,
    LinkMeasured,
    LoadProgressed,
    ModelDeployed,
    ModelFailed,
    ModelReady,
    ModelRemoved,
    ModelStopped,
    NodeDraining,
    NodeLost,
    PressureReported,
    Reject,
    RejectReason,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    ResidencyReported,
    SetHold,
    StagesMeasured,
    TimerFired,
    TurnBegan,
    TurnEnded,
    WorkerJoined,
    WorkerLost,
    WorkersExpected,
)
from hearth.policy.fleet.failures import (
    back_off,
    clamp_retry_s,
    explain_failure,
    failure_reason,
    find_retry_s,
    find_suspects,
    hold_back,
    is_proven,
    record_loss,
    refuse_failing,
)
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.loading_pipelines import serve_while_loading
from hearth.policy.fleet.machines import scale
from hearth.policy.fleet.memory_pressure import follow_drops, record_pressure
from hearth.policy.fleet.pins import grant_pins
from hearth.policy.fleet.prewarm import follow_forecasts, record_forecast
from hearth.policy.fleet.profile import ModelProfile
from hearth.policy.fleet.records import Model, Replica, Request, Worker, share_for_batch
from hearth.policy.fleet.refusals import (
    explain_misfit,
    explain_outdated,
    explain_pinned_out,
    explain_replaced,
    refuse_hopeless,
    reject,
)
from hearth.policy.fleet.replica_evictions import order_evictions
from hearth.policy.fleet.routing import choose_place
from hearth.policy.fleet.serving import (
    fill_slots,
    load_beside_paused,
    load_for_late,
    needs_replica,
    serve_queues,
    set_timer,
)

#: Retry delay that a client is told while there is no worker.
NO_WORKER_S = 10.0
#: After a pipeline was cut off: the loss of the other member mostly comes within milliseconds.
CUT_OFF_S = 1.0


def step(fleet: Fleet, event: Event) -> list[Action]:
    fleet.advance(event.now_s)
    actions = _apply(fleet, event)
    actions += _serve_waiting(fleet)
    if isinstance(event, RequestArrived) and (refused := _reject_beyond_queue(fleet, event)) is not None:
        actions += [refused, *_serve_waiting(fleet)]
    if fleet.gathering or fleet.loading_pipelines:
        actions += serve_while_loading(fleet)
        actions += _serve_waiting(fleet)
    if fleet.dropped:
        actions += follow_drops(fleet)
        actions += _serve_waiting(fleet)
    if len(fleet.forecasts_due):
        actions += follow_forecasts(fleet)
    actions += scale(fleet)
    for replica in fleet.notices.take():
        actions.append(SetHold(replica.model.name, replica.worker.name, replica.notified_hold))
    if (timer := set_timer(fleet)) is not None:
        actions.append(timer)
    return actions


def _serve_waiting(fleet: Fleet) -> list[Action]:
    queues = fleet.queues
    actions = grant_pins(fleet) if fleet.refused_pins else []
    while queues.must_serve or queues.must_refuse:
        if queues.must_refuse:
            queues.must_refuse = False
            actions += refuse_hopeless(fleet)
        if queues.must_serve:
            actions += serve_queues(fleet)
        actions += grant_pins(fleet)
    return actions


def _apply(fleet: Fleet, event: Event) -> list[Action]:
    match event:
        case RequestArrived():
            return _accept_request(fleet, event)
        case RequestFinished():
            return _finish_request(fleet, event)
        case RequestCancelled():
            return _cancel_request(fleet, event)
        case LoadProgressed(_, worker, model, num_bytes):
            return _record_progress(fleet, worker, model, num_bytes)
        case ModelReady():
            return _record_ready(fleet, event)
        case ModelFailed():
            return _handle_failure(fleet, event)
        case TurnBegan(_, worker, model):
            return _record_turn(fleet, worker, model, is_in_turn=True)
        case TurnEnded(_, worker, model):
            return _record_turn(fleet, worker, model, is_in_turn=False)
        case ResidencyReported(_, name, bytes_by_rung, node):
            if (known := fleet.models.get(name)) is not None:
                known.report(node, bytes_by_rung)
            return []
        case LinkMeasured():
            fleet.estimates.measured(event)
            return []
        case StagesMeasured(_, worker, model, stage_s):
            replica = fleet.workers[worker].replicas.get(model) if worker in fleet.workers else None
            if replica is not None and len(replica.stages) == len(stage_s):
                fleet.estimates.staged(model_of(model), replica.stages, stage_s)
            return []
        case NodeDraining(_, node, is_draining):
            fleet.drain_node(node, is_draining=is_draining)
            return evict_pipelines(fleet, node) + refuse_hopeless(fleet)
        case WorkersExpected(_, node, num_workers):
            fleet.expect(node, num_workers)
            return refuse_hopeless(fleet)
        case NodeLost(_, node):
            fleet.lose_node(node)
            return refuse_hopeless(fleet)
        case DeviceReported(_, worker, bytes_by_model):
            if (reporter := fleet.workers.get(worker)) is not None:
                record_report(fleet.models, reporter, bytes_by_model)
            return []
        case PressureReported():
            return record_pressure(fleet, event)
        case DemandForecast():
            record_forecast(fleet, event)
            return []
        case WorkerJoined():
            fleet.join(event)
            return refuse_hopeless(fleet)
        case WorkerLost():
            return _lose_worker(fleet, event)
        case ModelDeployed(_, profile):
            return deploy_model(fleet, profile)
        case ModelRemoved(_, model):
            return remove_model(fleet, model)
        case ModelStopped():
            return stop_model(fleet, event)
        case TimerFired():
            fleet.timer_s, fleet.queues.must_serve = None, True
            return []
        case _:
            assert_never(event)


# Requests come and go.


def _accept_request(fleet: Fleet, event: RequestArrived) -> list[Action]:
    model = fleet.models.get(event.model)
    if model is None or model.profile is None:
        message = f"no model is deployed as `{event.model}`"
        return [Reject(event.request_id, RejectReason.UNKNOWN_MODEL, message)]
    if event.digest is not None and event.digest != model.profile.digest:
        return [Reject(event.request_id, RejectReason.MODEL_REMOVED, explain_replaced(model))]
    if not model.usable and (refused := _refuse_unusable(fleet, event, model, model.profile)) is not None:
        return [refused]
    if fleet.config.takes_turns and _has_full_queue(fleet, event) and _must_await_turn(fleet, model):
        return [_refuse_for_queue(fleet, event)]
    fleet.estimates.arrived(model.name, fleet.now_s)
    if model.advised is not None:
        fleet.prewarm_budget.give_back(model.advised, fleet.now_s)
        model.advised = None
    request = fleet.accept(event, model)
    actions = load_beside_paused(fleet, model) + load_for_late(fleet, model) + fill_slots(fleet, model)
    fleet.queues.line_up(model)
    # Behind others of its model it changes nothing, unless another replica pays now.
    if model.waiting and (model.first_waiting is request or needs_replica(fleet, model)):
        fleet.queues.must_serve = True
    return actions


def _refuse_unusable(
    fleet: Fleet, event: RequestArrived, model: Model, profile: ModelProfile
) -> Reject | None:
    if (why_not := explain_misfit(fleet, profile)) is not None:
        return Reject(event.request_id, RejectReason.NEVER_FITS, why_not)
    if model.failure is not None and (retry_s := find_retry_s(fleet, model)) is not None:
        message = explain_failure(model.failure, retry_s)
        return Reject(event.request_id, failure_reason(model.failure), message, retry_s)
    if fleet.is_complete and (why_not := explain_pinned_out(fleet, profile)) is not None:
        return Reject(event.request_id, RejectReason.PINNED_OUT, why_not)
    return None


def _must_await_turn(fleet: Fleet, model: Model) -> bool:
    if model.with_free_slot:
        replicas = [model.replicas[name] for name in model.with_free_slot]
        return all(not one.is_in_turn and one.worker.promises.must_take_turns for one in replicas)
    return not model.usable and choose_place(fleet, model, most=Hold.WARM) is None


def _has_full_queue(fleet: Fleet, event: RequestArrived) -> bool:
    return fleet.queues.num_waiting + fleet.queues.num_awaiting_turn >= _max_queue(fleet, event)


def _max_queue(fleet: Fleet, event: RequestArrived) -> int:
    most = fleet.config.max_queue
    return share_for_batch(most) if event.is_batch else most


def _reject_beyond_queue(fleet: Fleet, event: RequestArrived) -> Reject | None:
    request = fleet.queues.requests.get(event.request_id)
    if request is None or request.replica is not None:
        return None
    if fleet.queues.num_waiting + fleet.queues.num_awaiting_turn <= _max_queue(fleet, event):
        return None
    fleet.end(request)
    return _refuse_for_queue(fleet, event)


def _refuse_for_queue(fleet: Fleet, event: RequestArrived) -> Reject:
    queues, max_queue = fleet.queues, _max_queue(fleet, event)
    num_waiting = queues.num_waiting + queues.num_awaiting_turn
    num_running = max(1, queues.num_running - queues.num_awaiting_turn)
    wait_s = fleet.estimates.run_s() * num_waiting / num_running if fleet.workers else NO_WORKER_S
    retry_s = clamp_retry_s(wait_s)
    what = "room, a free slot or their turn" if fleet.config.takes_turns else "room or a free slot"
    limit = "the limit for batch requests" if event.is_batch else "the limit"
    message = (
        f"{num_waiting} requests wait for {what}, {limit}: {max_queue}; try again in {math.ceil(retry_s)} s"
    )
    return Reject(event.request_id, RejectReason.QUEUE_FULL, message, retry_s)


def _finish_request(fleet: Fleet, event: RequestFinished) -> list[Action]:
    request = fleet.queues.requests.get(event.request_id)
    if request is None:  # It was rejected meanwhile.
        return []
    if event.how is not End.FAILED:
        _learn_from_success(fleet, request, event.prompt)
    if event.how is End.STOPPED:
        return _end_and_cancel(fleet, request)
    replica = request.replica
    fleet.end(request)
    return _use_free_slot(fleet, replica)


def _learn_from_success(fleet: Fleet, request: Request, prompt: ComputedPrompt | None) -> None:
    replica = request.replica
    if replica is not None and not replica.is_stale:
        replica.has_served = True
        for worker in replica.workers:
            replica.model.clear_failure(worker)
        since_s = max(request.started_s, replica.ready_s)
        fleet.estimates.ran(request.model.name, fleet.now_s - since_s)
        if prompt is not None:
            fleet.estimates.computed(request.model.name, prompt)


def _cancel_request(fleet: Fleet, event: RequestCancelled) -> list[Action]:
    request = fleet.queues.requests.get(event.request_id)
    return [] if request is None else _end_and_cancel(fleet, request)


def _end_and_cancel(fleet: Fleet, request: Request) -> list[Action]:
    replica = request.replica
    fleet.end(request)
    if replica is None:
        return []
    return [CancelRun(request.request_id, replica.worker.name), *_use_free_slot(fleet, replica)]


def _use_free_slot(fleet: Fleet, replica: Replica | None) -> list[Action]:
    if replica is None:
        return []
    model = fleet.served_by(replica)
    actions = [] if model is None else fill_slots(fleet, model)
    return actions + evict_if_leaving(fleet, replica)


# Loads.


def _record_progress(fleet: Fleet, worker: WorkerId, model: ModelId, num_bytes: int) -> list[Action]:
    replica = _find_replica(fleet, worker, model)
    if replica is not None and not replica.is_ready:
        if (stage := replica.stage_on(fleet.workers[worker])) is not None:
            stage.loaded_bytes = min(num_bytes, stage.total_bytes)
            num_bytes = sum(one.loaded_bytes for one in replica.stages)
        replica.loaded_bytes = min(replica.reused_bytes + num_bytes, replica.total_bytes)
    return []


def _record_ready(fleet: Fleet, event: ModelReady) -> list[Action]:
    bytes_by_rung = {use.rung: use.num_bytes for use in event.rungs}
    busy_s_by_rung = {use.rung: use.seconds for use in event.rungs}
    fleet.estimates.reload.learn_load(bytes_by_rung, busy_s_by_rung, event.whole_s)
    replica = _find_replica(fleet, event.worker, event.model)
    if replica is None:  # It was evicted meanwhile.
        return []
    worker = fleet.workers[event.worker]
    stage = replica.stage_on(worker)
    if not replica.is_outdated:
        record_bytes(replica.model, worker, replica.total_bytes if stage is None else stage.total_bytes)
    if replica.is_ready:  # What others had taken of it has come back.
        return []
    if stage is not None:
        stage.is_ready, stage.loaded_bytes = True, stage.total_bytes
        if not all(one.is_ready for one in replica.stages):
            return []
    replica.is_ready, replica.ready_s = True, fleet.now_s
    replica.loaded_bytes = replica.total_bytes
    if replica.running:
        fleet.reindex(replica)
    else:
        fleet.note_idle(replica)
    for one in replica.workers:
        fleet.rank_room(one)
    fleet.queues.must_serve = True  # A full model may now be loaded a second time, and this one be drained.
    return []


def _record_turn(fleet: Fleet, worker: WorkerId, model: ModelId, *, is_in_turn: bool) -> list[Action]:
    replica = _find_replica(fleet, worker, model)
    if replica is not None and not replica.stages:
        fleet.change_turn(replica, is_in_turn=is_in_turn)
    return []


def _handle_failure(fleet: Fleet, event: ModelFailed) -> list[Action]:
    """Remove a replica. Requests of a proven one go on; those of others would only fail again.

    A pipeline that has lost a member says nothing of its model, but perhaps of a request. One whose members
    did not connect is not formed again at once if no request waits for it.
    """
    replica = _find_replica(fleet, event.worker, event.model)
    if replica is None:
        return []
    worker, model, requests = fleet.workers[event.worker], replica.model, list(replica.running.values())
    message = f"model `{model.name}` failed on worker `{event.worker}`: {event.reason}"
    record_bytes(model, worker, 0)
    is_makeshift = replica.is_temporary or replica.is_dropped
    for request in requests:
        fleet.requeue(request, is_at_fault=not is_makeshift)
    fleet.remove(replica)
    actions = _dissolve(replica, worker)
    if event.is_cut_off and not replica.is_temporary:
        fleet.no_pipeline_until_s = fleet.now_s + CUT_OFF_S
    if is_makeshift:
        if not event.is_cut_off:
            model.drop.fail(fleet.now_s)
        return actions + _resume(fleet, requests, RejectReason.LOAD_FAILED, message)
    if event.is_cut_off:
        if not (replica.is_ready or requests):
            hold_back(fleet, model, message, is_deadly=False)
    elif not replica.is_stale:  # Else it says nothing of the version that is deployed now.
        if was_proven := is_proven(replica, fleet.now_s):
            model.clear_failure(worker)
        model.record_failure(worker)
        if not was_proven:
            back_off(fleet, model, message)
            if refused := refuse_failing(fleet, model):
                return actions + refused
            if not replica.is_ready:
                failed = requests if model.usable else list(model.waiting.values())
                return actions + [reject(fleet, one, RejectReason.LOAD_FAILED, message) for one in failed]
    return actions + _resume(fleet, requests, RejectReason.LOAD_FAILED, message)


def _dissolve(replica: Replica, without: Worker) -> list[Action]:
    """Return orders for the workers of a removed pipeline, except one that has it no more."""
    orders = order_evictions(replica, 0.0) if replica.stages else []
    return [order for order in orders if order.worker != without.name]


# Workers.


def _lose_worker(fleet: Fleet, event: WorkerLost) -> list[Action]:
    """Remove a worker. Its requests go on; suspected models are not retried for ever."""
    worker = fleet.workers.get(event.worker)
    if worker is None:
        return []
    suspects = [] if event.is_with_node else find_suspects(worker, event.culprit)
    is_certain = event.culprit is not None or not any(replica.is_ready for replica in suspects)
    replicas = list(worker.replicas.values())
    requests = fleet.lose(worker, suspects, event.in_step)
    if not event.is_with_node:
        whole = (one.model.name for one in replicas if one.is_ready and not one.stages)
        fleet.await_successor(worker.node, whole)
    actions = [order for replica in replicas for order in _dissolve(replica, worker)]
    message = f"worker `{event.worker}` {event.reason} under it"
    for suspect in suspects:
        record_loss(fleet, suspect, message, is_certain=is_certain, has_answered=event.has_answered)
    return actions + _resume(fleet, requests, RejectReason.WORKERS_LOST, message)


def _resume(fleet: Fleet, requests: list[Request], reason: RejectReason, message: str) -> list[Action]:
    actions: list[Action] = []
    models: dict[ModelId, Model] = {}
    for request in requests:
        model, most = request.model, fleet.config.max_resumes
        if (why_not := explain_outdated(request)) is not None:
            actions.append(reject(fleet, request, RejectReason.MODEL_REMOVED, why_not))
        elif request.num_losses > most:
            text = f"{message}; that was the loss number {request.num_losses}, the limit: {most}"
            actions.append(reject(fleet, request, reason, text, find_retry_s(fleet, model)))
        else:
            models[model.name] = model
    for model in models.values():
        actions += refuse_failing(fleet, model) or fill_slots(fleet, model)
    return actions + refuse_hopeless(fleet)  # It may have been redeployed as a larger one.


def _find_replica(fleet: Fleet, worker: WorkerId, model: ModelId) -> Replica | None:
    known = fleet.workers.get(worker)
    return None if known is None else known.replicas.get(model)
