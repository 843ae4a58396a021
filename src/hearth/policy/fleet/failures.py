"""Models that failed: how long they are not retried, and which requests are refused meanwhile.

A model has failed on a worker if it failed before it had served a request. It is tried on other workers with
room. If there are none, it is not loaded for a while, which doubles each time until it has served.

A model that kills its worker costs all other models there theirs. Once may be chance; from the second time in
a row it is not loaded anywhere for a while. A loss only counts against requests of suspected models.
"""

from __future__ import annotations

import math

from hearth.core.types import ModelId
from hearth.policy.fleet.events import Action, RejectReason
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.records import LoadFailure, Model, Replica, Worker
from hearth.policy.fleet.refusals import reject
from hearth.policy.fleet.routing import has_untried_place

FIRST_DELAY_S, MAX_DELAY_S = 2.0, 60.0
#: A replica that fails after being ready for this long counts as proven.
PROVEN_S = 60.0
#: Workers that a model may kill in a row, before it has served a request, until it is held back.
MAX_DEADLY_LOADS = 1
#: Limits of the retry delay that a refused client is told; many ignore longer ones.
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


def clamp_retry_s(seconds: float) -> float:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds))


def is_proven(replica: Replica, now_s: float) -> bool:
    return replica.is_ready and (replica.has_served or now_s >= replica.ready_s + PROVEN_S)


def back_off(fleet: Fleet, model: Model, message: str) -> None:
    if not (model.usable or has_untried_place(fleet, model)):
        hold_back(fleet, model, message, is_deadly=False)


def hold_back(fleet: Fleet, model: Model, message: str, *, is_deadly: bool) -> None:
    before = model.failure
    delay_s = FIRST_DELAY_S if before is None else min(MAX_DELAY_S, 2 * before.delay_s)
    model.failure = LoadFailure(message, delay_s, fleet.now_s + delay_s, is_deadly)


def find_suspects(worker: Worker, culprit: ModelId | None) -> list[Replica]:
    """Return the replicas that may have killed a worker: the one whose step was running; without one, those
    being loaded, else all."""
    replicas = list(worker.replicas.values())
    if culprit is not None:
        return [replica for replica in replicas if replica.model.name == culprit]
    return [one for one in replicas if not one.is_ready and one.is_in_turn] or replicas


def record_loss(
    fleet: Fleet, suspect: Replica, message: str, *, is_certain: bool, has_answered: bool
) -> None:
    """Record that a worker was lost, perhaps because of a replica.

    `is_certain`: the replica was at work, not just there. `has_answered`: its steps had produced tokens, so
    the loss was chance or caused by one request.
    """
    model = suspect.model
    if suspect.is_stale or not (suspect.is_ready or suspect.is_in_turn):
        return  # Nothing was loaded for it, or it is of another version.
    if has_answered or is_proven(suspect, fleet.now_s):
        model.num_deadly_loads = 0
        return
    model.num_deadly_loads += 1
    if is_certain and model.num_deadly_loads > MAX_DEADLY_LOADS:
        hold_back(fleet, model, message, is_deadly=True)


def find_retry_s(fleet: Fleet, model: Model) -> float | None:
    failure = model.failure
    if failure is None or fleet.now_s >= failure.until_s or model.usable:
        return None
    if not failure.is_deadly and has_untried_place(fleet, model):
        return None
    return clamp_retry_s(failure.until_s - fleet.now_s)


def explain_failure(failure: LoadFailure, retry_s: float) -> str:
    return f"{failure.message}; it is tried again in {math.ceil(retry_s)} s"


def failure_reason(failure: LoadFailure) -> RejectReason:
    return RejectReason.WORKERS_LOST if failure.is_deadly else RejectReason.LOAD_FAILED


def refuse_failing(fleet: Fleet, model: Model) -> list[Action]:
    failure, retry_s = model.failure, find_retry_s(fleet, model)
    if failure is None or retry_s is None:
        return []
    message, reason = explain_failure(failure, retry_s), failure_reason(failure)
    waiting = list(model.waiting.values())
    return [reject(fleet, request, reason, message, retry_s) for request in waiting]
