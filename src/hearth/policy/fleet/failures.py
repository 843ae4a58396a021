"""Models that failed: for how long they are not tried again, and who is refused meanwhile. Loads nothing.

A model has failed on a worker if it could not be loaded there, or broke before it had served anybody: a load
proves little, since what breaks a model may be its first step. While a worker has room for it where it has
not failed, it is tried there. Else it is loaded nowhere for a while, which doubles each time until it has
served: every try costs a load, and others their room.

A model that takes its worker along, by its first step or by its load, costs all others of that worker theirs.
Once may have been chance; from the second time in a row on it is loaded nowhere for a while, room or not.
A loss counts only against requests of models that are suspected: others go on as often as it takes.
"""

from __future__ import annotations

import math

from hearth.core.types import ModelId
from hearth.policy.fleet.events import Action, RejectReason
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.records import LoadFailure, Model, Replica, Worker
from hearth.policy.fleet.refusals import reject
from hearth.policy.fleet.routing import has_untried_place

#: How long a model that failed is not tried again at first; then twice as long, up to a limit.
FIRST_DELAY_S, MAX_DELAY_S = 2.0, 60.0
#: A replica that breaks after it was ready for so long does not count as one that could not be loaded.
PROVEN_S = 60.0
#: Workers that are lost in a row because of a model before it has served anybody, until it is held back.
MAX_DEADLY_LOADS = 1
#: A client that was refused is told to come back no sooner and no later; many ignore longer times.
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


def clamp_retry_s(seconds: float) -> float:
    """Return what a client is told that should come back in so many seconds."""
    return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds))


def is_proven(replica: Replica, now_s: float) -> bool:
    """True if a replica has served somebody, or was ready for so long that it counts as if it had."""
    return replica.is_ready and (replica.has_served or now_s >= replica.ready_s + PROVEN_S)


def back_off(fleet: Fleet, model: Model, message: str) -> None:
    """Have a model that failed not be tried again for a while, unless it is served or has room elsewhere."""
    if not (model.usable or has_untried_place(fleet, model)):
        _hold_back(fleet, model, message, is_deadly=False)


def _hold_back(fleet: Fleet, model: Model, message: str, *, is_deadly: bool) -> None:
    before = model.failure
    delay_s = FIRST_DELAY_S if before is None else min(MAX_DELAY_S, 2 * before.delay_s)
    model.failure = LoadFailure(message, delay_s, fleet.now_s + delay_s, is_deadly)


def find_suspects(worker: Worker, culprit: ModelId | None) -> list[Replica]:
    """Return the replicas because of which a worker may have been lost.

    That is the one whose step was under way; where none was, those that were being loaded, else any of them.
    """
    replicas = list(worker.replicas.values())
    if culprit is not None:
        return [replica for replica in replicas if replica.model.name == culprit]
    return [replica for replica in replicas if _is_loading(replica)] or replicas


def _is_loading(replica: Replica) -> bool:
    """True if bytes of a replica are on their way, which is so in its turn only."""
    return not replica.is_ready and replica.is_in_turn


def record_loss(
    fleet: Fleet, suspect: Replica, message: str, *, is_certain: bool, has_answered: bool
) -> None:
    """Remember that a worker was lost, perhaps because of a replica.

    `is_certain`: the replica was at work, not just there. `has_answered`: its steps had made tokens before,
    so that the loss was chance, or one request's doing.
    """
    model = suspect.model
    if suspect.is_stale or not (suspect.is_ready or suspect.is_in_turn):
        return  # Nothing was loaded for it, or it says nothing of the version that is deployed now.
    if has_answered or is_proven(suspect, fleet.now_s):
        model.num_deadly_loads = 0
        return
    model.num_deadly_loads += 1
    if is_certain and model.num_deadly_loads > MAX_DEADLY_LOADS:
        _hold_back(fleet, model, message, is_deadly=True)


def find_retry_s(fleet: Fleet, model: Model) -> float | None:
    """Return in how many seconds a model that failed is tried again; None if nothing stands against it."""
    failure = model.failure
    if failure is None or fleet.now_s >= failure.until_s or model.usable:
        return None
    if not failure.is_deadly and has_untried_place(fleet, model):
        return None
    return clamp_retry_s(failure.until_s - fleet.now_s)


def explain_failure(failure: LoadFailure, retry_s: float) -> str:
    """Say why a model is not served, and when it is tried again."""
    return f"{failure.message}; it is tried again in {math.ceil(retry_s)} s"


def failure_reason(failure: LoadFailure) -> RejectReason:
    return RejectReason.WORKERS_LOST if failure.is_deadly else RejectReason.LOAD_FAILED


def refuse_failing(fleet: Fleet, model: Model) -> list[Action]:
    """Reject all who wait for a model that is not to be loaded now."""
    failure, retry_s = model.failure, find_retry_s(fleet, model)
    if failure is None or retry_s is None:
        return []
    message, reason = explain_failure(failure, retry_s), failure_reason(failure)
    waiting = list(model.waiting.values())
    return [reject(fleet, request, reason, message, retry_s) for request in waiting]
