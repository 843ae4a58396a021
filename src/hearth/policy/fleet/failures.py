"""Models that failed: for how long they are not tried again, and who is refused meanwhile. Loads nothing.

A model has failed on a worker if it could not be loaded there, or broke before it had served anybody: a load
proves little, since what breaks a model may be its first step. While a worker has room for it where it has
not failed, it is tried there. Else it is loaded nowhere for a while, which doubles each time until it has
served: every try costs a load, and others their room.
"""

from __future__ import annotations

import math

from hearth.policy.fleet.events import Action, RejectReason
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.records import LoadFailure, Model, Replica
from hearth.policy.fleet.refusals import reject
from hearth.policy.fleet.routing import has_untried_place

#: How long a model that failed is not tried again at first; then twice as long, up to a limit.
FIRST_DELAY_S, MAX_DELAY_S = 2.0, 60.0
#: A replica that breaks after it was ready for so long does not count as one that could not be loaded.
PROVEN_S = 60.0
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
    if model.usable or has_untried_place(fleet, model):
        return
    before = model.failure
    delay_s = FIRST_DELAY_S if before is None else min(MAX_DELAY_S, 2 * before.delay_s)
    model.failure = LoadFailure(message, delay_s, fleet.now_s + delay_s)


def find_retry_s(fleet: Fleet, model: Model) -> float | None:
    """Return in how many seconds a model that failed is tried again; None if nothing stands against it."""
    failure = model.failure
    if failure is None or fleet.now_s >= failure.until_s or model.usable or has_untried_place(fleet, model):
        return None
    return clamp_retry_s(failure.until_s - fleet.now_s)


def explain_failure(failure: LoadFailure, retry_s: float) -> str:
    """Say why a model is not served, and when it is tried again."""
    return f"{failure.message}; it is tried again in {math.ceil(retry_s)} s"


def refuse_failing(fleet: Fleet, model: Model) -> list[Action]:
    """Reject all who wait for a model that is not to be loaded now."""
    failure, retry_s = model.failure, find_retry_s(fleet, model)
    if failure is None or retry_s is None:
        return []
    message = explain_failure(failure, retry_s)
    waiting = list(model.waiting.values())
    return [reject(fleet, request, RejectReason.LOAD_FAILED, message, retry_s) for request in waiting]
