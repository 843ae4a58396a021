"""Requests that end before they were served: who cannot be, and what they are told. Places nobody."""

from __future__ import annotations

from hearth.policy.fleet.events import Action, Reject, RejectReason
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.replica import Model, Request
from hearth.policy.fleet.routing import misfit, pinned_out


def refuse_hopeless(fleet: Fleet) -> list[Action]:
    """Those who wait for room that no worker can ever have, or none beside what is pinned.

    While a lost worker is being replaced, nobody is: they may have come from there.
    """
    if not fleet.is_complete:
        return []
    actions: list[Action] = []
    for model in [fleet.models[name] for name in fleet.room_queue]:
        if model.profile is None:
            continue
        reason, why_not = RejectReason.NEVER_FITS, misfit(fleet, model.profile)
        if why_not is None:
            reason, why_not = RejectReason.PINNED_OUT, pinned_out(fleet, model.profile)
        if why_not is not None:
            actions += [reject(fleet, request, reason, why_not) for request in list(model.waiting.values())]
    return actions


def outdated(request: Request) -> str | None:
    """Why a request cannot go on, for people: its model is gone, or not the one that it was accepted for."""
    profile = request.model.profile
    if profile is None:
        return gone(request.model)
    return None if profile.digest == request.digest else replaced(request.model)


def gone(model: Model) -> str:
    return f"model `{model.name}` was removed before the request was done"


def replaced(model: Model) -> str:
    return f"model `{model.name}` was replaced by another version before the request was done; ask again"


def reject(
    fleet: Fleet, request: Request, reason: RejectReason, message: str, retry_s: float | None = None
) -> Reject:
    fleet.end(request)
    return Reject(request.request_id, reason, message, retry_s)
