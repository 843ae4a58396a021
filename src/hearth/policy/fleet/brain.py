"""All decisions of the control plane: an event goes in, orders come out. Pure: no clock, no randomness.

A request runs where its model has a free slot, else its model is loaded where there is room or where idle
models can give way (`routing.py`, `capacity.py`), else it waits (`queues.py`). What follows from an event
follows in the same turn.

The books are promises: what hosted models of a worker are promised is never more than its budget, and what
its memory holds at a moment is the worker's own affair (`affinity.py` knows a little of it). Orders to
one worker are carried out in order. So the books count an evicted model as gone and a loading one as there at
once, and requests follow directly behind the order to load.
"""

from __future__ import annotations

from typing import assert_never

from hearth.policy.fleet.affinity import note, note_all
from hearth.policy.fleet.deployment import deployed, leave_if_idle, removed, stopped
from hearth.policy.fleet.events import (
    Action,
    CancelRun,
    DeviceReported,
    End,
    Event,
    LoadProgressed,
    ModelDeployed,
    ModelFailed,
    ModelProfile,
    ModelReady,
    ModelRemoved,
    ModelStopped,
    Reject,
    RejectReason,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    ResidencyReported,
    SetHold,
    TimerFired,
    WorkerJoined,
    WorkerLost,
)
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.queues import fill, is_second_worthwhile, serve, wake_up
from hearth.policy.fleet.refusals import outdated, refuse_hopeless, reject, replaced
from hearth.policy.fleet.replica import LoadFailure, Model, Replica, Request
from hearth.policy.fleet.routing import is_failed_everywhere, misfit, pinned_out
from hearth.types import ModelId, WorkerId

#: A client that was refused is not told to come back sooner.
MIN_RETRY_S = 1.0
#: A model that could be loaded nowhere is not tried again for so long, then twice as long, up to a limit.
FIRST_DELAY_S, MAX_DELAY_S = 2.0, 60.0
#: A worker that is lost sooner after a model was ready may have been lost because of it.
DEADLY_S = 60.0


def step(fleet: Fleet, event: Event) -> list[Action]:
    """One turn: takes note of what happened, and gives all orders that follow from it."""
    fleet.advance(event.now_s)
    actions = _note(fleet, event) + _settle_down(fleet)
    if isinstance(event, RequestArrived) and (refused := _beyond_queue(fleet, event)) is not None:
        actions += [refused, *_settle_down(fleet)]
    return actions + _tell_holds(fleet) + wake_up(fleet)


def _tell_holds(fleet: Fleet) -> list[Action]:
    """Workers see for themselves who is busy, and nothing else of how a model is held."""
    return [SetHold(replica.model.name, replica.worker.name, replica.told) for replica in fleet.take_untold()]


def _settle_down(fleet: Fleet) -> list[Action]:
    """All that follows for those who wait."""
    actions: list[Action] = []
    while fleet.is_changed or fleet.is_pin_new:
        if fleet.is_pin_new:
            fleet.is_pin_new = False
            actions += refuse_hopeless(fleet)
        if fleet.is_changed:
            actions += serve(fleet)
    return actions


def _note(fleet: Fleet, event: Event) -> list[Action]:
    match event:
        case RequestArrived():
            return _arrived(fleet, event)
        case RequestFinished():
            return _finished(fleet, event)
        case RequestCancelled():
            return _cancelled(fleet, event)
        case LoadProgressed(_, worker, model, num_bytes):
            return _progressed(fleet, worker, model, num_bytes)
        case ModelReady():
            return _ready(fleet, event)
        case ModelFailed():
            return _failed(fleet, event)
        case ResidencyReported(_, name, bytes_by_rung):
            if (known := fleet.models.get(name)) is not None:
                known.bytes_by_rung = bytes_by_rung
            return []
        case DeviceReported(_, worker, bytes_by_model):
            if (reporter := fleet.workers.get(worker)) is not None:
                note_all(fleet.models, reporter, bytes_by_model)
            return []
        case WorkerJoined():
            return _joined(fleet, event)
        case WorkerLost(_, worker):
            return _lost(fleet, worker)
        case ModelDeployed(_, profile):
            return deployed(fleet, profile)
        case ModelRemoved(_, model):
            return removed(fleet, model)
        case ModelStopped():
            return stopped(fleet, event)
        case TimerFired():
            fleet.timer_s, fleet.is_changed = None, True
            return []
        case _:
            assert_never(event)


# Requests come and go.


def _arrived(fleet: Fleet, event: RequestArrived) -> list[Action]:
    model = fleet.models.get(event.model)
    if model is None or model.profile is None:
        message = f"no model is deployed as `{event.model}`"
        return [Reject(event.request_id, RejectReason.UNKNOWN_MODEL, message)]
    if event.digest is not None and event.digest != model.profile.digest:
        return [Reject(event.request_id, RejectReason.MODEL_REMOVED, replaced(model))]
    if (why_not := misfit(fleet, model.profile)) is not None:
        return [Reject(event.request_id, RejectReason.NEVER_FITS, why_not)]
    if not model.usable and (refused := _refuse_unusable(fleet, event, model, model.profile)) is not None:
        return [refused]
    fleet.estimates.reload.asked(model.name, fleet.now_s)
    request = fleet.accept(event, model)
    actions = fill(fleet, model)
    # Behind others of its model it changes nothing, unless they are so many now that another replica pays.
    if model.head is request or is_second_worthwhile(fleet, model):
        fleet.is_changed = True
    return actions


def _refuse_unusable(
    fleet: Fleet, event: RequestArrived, model: Model, profile: ModelProfile
) -> Reject | None:
    """Of a model that is on no worker: it was tried in vain a moment ago, or pins leave no room for it."""
    failure = model.failure
    if failure is not None and fleet.now_s < failure.until_s:
        left_s = failure.until_s - fleet.now_s
        message = f"{failure.message}; it is tried again in {left_s:.0f} s at the earliest"
        return Reject(event.request_id, RejectReason.LOAD_FAILED, message, max(MIN_RETRY_S, left_s))
    if fleet.is_complete and (why_not := pinned_out(fleet, profile)) is not None:
        return Reject(event.request_id, RejectReason.PINNED_OUT, why_not)
    return None


def _beyond_queue(fleet: Fleet, event: RequestArrived) -> Reject | None:
    request = fleet.requests.get(event.request_id)
    max_queue = fleet.config.max_queue
    if request is None or request.replica is not None or fleet.num_waiting <= max_queue:
        return None
    turnover_s = fleet.estimates.run_s() * fleet.num_waiting / max(1, fleet.num_running)
    message = f"{max_queue} requests wait for room or a free slot, the limit: {max_queue}; try again later"
    return reject(fleet, request, RejectReason.QUEUE_FULL, message, max(MIN_RETRY_S, turnover_s))


def _finished(fleet: Fleet, event: RequestFinished) -> list[Action]:
    request = fleet.requests.get(event.request_id)
    if request is None:  # It was rejected meanwhile.
        return []
    if event.how is End.STOPPED:
        _learn(fleet, request)
        return _stop_run(fleet, request)
    if event.how is End.DONE:
        _learn(fleet, request)
    replica = request.replica
    fleet.end(request)
    return _after_run(fleet, replica)


def _learn(fleet: Fleet, request: Request) -> None:
    """How long a request runs; not of a model that is gone."""
    replica = request.replica
    if replica is not None and not replica.is_stale:
        since_s = max(request.started_s, replica.ready_s)
        fleet.estimates.ran(request.model.name, fleet.now_s - since_s)


def _cancelled(fleet: Fleet, event: RequestCancelled) -> list[Action]:
    request = fleet.requests.get(event.request_id)
    return [] if request is None else _stop_run(fleet, request)


def _stop_run(fleet: Fleet, request: Request) -> list[Action]:
    """It ends, and its worker does not know."""
    replica = request.replica
    fleet.end(request)
    if replica is None:
        return []
    return [CancelRun(request.request_id, replica.worker.name), *_after_run(fleet, replica)]


def _after_run(fleet: Fleet, replica: Replica | None) -> list[Action]:
    """A slot is free: for the next one of its model, or the replica is idle."""
    if replica is None:
        return []
    return fill(fleet, replica.model) + leave_if_idle(fleet, replica)


# Loads.


def _progressed(fleet: Fleet, worker: WorkerId, model: ModelId, num_bytes: int) -> list[Action]:
    replica = _replica(fleet, worker, model)
    if replica is not None and not replica.is_ready:
        replica.loaded_bytes = min(replica.reused_bytes + num_bytes, replica.total_bytes)
    return []


def _ready(fleet: Fleet, event: ModelReady) -> list[Action]:
    for use in event.rungs:
        fleet.estimates.reload.moved(use.rung, use.num_bytes, use.seconds)
    replica = _replica(fleet, event.worker, event.model)
    if replica is None:  # It was evicted meanwhile.
        return []
    if not replica.is_outdated:
        note(replica.model, replica.worker, replica.total_bytes)
    if replica.is_ready:  # What others had taken of it has come back.
        return []
    replica.is_ready, replica.ready_s = True, fleet.now_s
    fleet.forgive(replica.model, replica.worker)
    replica.loaded_bytes = replica.total_bytes
    if not replica.running:
        replica.idle_since_s = fleet.now_s
    fleet.settle(replica)
    fleet.is_changed = True  # A full model may now be loaded a second time, and this one be drained.
    return []


def _failed(fleet: Fleet, event: ModelFailed) -> list[Action]:
    """What a ready one was doing goes on elsewhere; a load would only fail again."""
    replica = _replica(fleet, event.worker, event.model)
    if replica is None:
        return []
    model = replica.model
    message = f"model `{model.name}` failed on worker `{event.worker}`: {event.reason}"
    fleet.blame(model, replica.worker)
    note(model, replica.worker, 0)
    requests = list(replica.running.values())
    if replica.is_ready:
        for request in requests:
            fleet.requeue(request)
        fleet.remove(replica)
        return _resume(fleet, requests, RejectReason.LOAD_FAILED, message)
    if not model.usable.keys() - {event.worker}:
        requests += model.waiting.values()
        if is_failed_everywhere(fleet, model):
            delay_s = FIRST_DELAY_S if model.failure is None else min(MAX_DELAY_S, 2 * model.failure.delay_s)
            model.failure = LoadFailure(message, delay_s, fleet.now_s + delay_s)
    actions: list[Action] = [reject(fleet, r, RejectReason.LOAD_FAILED, message) for r in requests]
    fleet.remove(replica)
    return actions


# Workers.


def _joined(fleet: Fleet, event: WorkerJoined) -> list[Action]:
    fleet.join(event)
    return refuse_hopeless(fleet)


def _lost(fleet: Fleet, name: WorkerId) -> list[Action]:
    worker = fleet.workers.get(name)
    if worker is None:
        return []
    for replica in worker.replicas.values():
        is_deadly = not replica.is_ready or fleet.now_s < replica.ready_s + DEADLY_S
        replica.model.num_deadly_loads = replica.model.num_deadly_loads + 1 if is_deadly else 0
    requests = fleet.lose(worker)
    return _resume(fleet, requests, RejectReason.WORKERS_LOST, f"worker `{name}` was lost under it")


def _resume(fleet: Fleet, requests: list[Request], reason: RejectReason, message: str) -> list[Action]:
    """Those that lost their replicas and wait again go on where there is a slot, unless they must end."""
    actions: list[Action] = []
    models: dict[ModelId, Model] = {}
    for request in requests:
        model, most = request.model, fleet.config.max_resumes
        if (why_not := outdated(request)) is not None:
            actions.append(reject(fleet, request, RejectReason.MODEL_REMOVED, why_not))
        elif request.num_resumes > most:
            told = f"{message}; that was the loss number {request.num_resumes}, the limit: {most}"
            actions.append(reject(fleet, request, reason, told))
        else:
            models[model.name] = model
    for model in models.values():
        actions += fill(fleet, model)
    return actions + refuse_hopeless(fleet)  # It may have been redeployed as a larger one.


def _replica(fleet: Fleet, worker: WorkerId, model: ModelId) -> Replica | None:
    """None if either is gone, or the model was evicted there: what is said of it comes late."""
    known = fleet.workers.get(worker)
    return None if known is None else known.replicas.get(model)
