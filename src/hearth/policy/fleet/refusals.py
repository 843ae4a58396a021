"""Why a request or a worker is refused, in sentences for people, and the requests that end by it."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.core.types import Hold, labels_of
from hearth.policy.fleet.events import Action, Reject, RejectReason
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.footprint import split_evenly
from hearth.policy.fleet.pipelines import could_hold, find_on_empty_workers
from hearth.policy.fleet.profile import MAX_STAGES, Footprint, ModelProfile
from hearth.policy.fleet.records import Model, Replica, Request, Worker

MAX_NAMES = 3
_AVAILABLE = {None: "memory", Hold.WARM: "beside busy models", Hold.BUSY: "beside pinned ones"}


def reject(
    fleet: Fleet, request: Request, reason: RejectReason, message: str, retry_s: float | None = None
) -> Reject:
    fleet.end(request)
    return Reject(request.request_id, reason, message, retry_s)


def refuse_hopeless(fleet: Fleet) -> list[Action]:
    """Reject requests whose model no worker can ever hold, or none beside what is pinned.

    Rejects none while a worker starts or is being replaced: room may come with it.
    """
    if not fleet.is_complete:
        return []
    actions: list[Action] = []
    for model in [fleet.models[name] for name in fleet.queues.for_room]:
        if model.profile is None:
            continue
        reason, why_not = RejectReason.NEVER_FITS, explain_misfit(fleet, model.profile)
        if why_not is None:
            reason, why_not = RejectReason.PINNED_OUT, explain_pinned_out(fleet, model.profile)
        if why_not is not None:
            actions += [reject(fleet, request, reason, why_not) for request in list(model.waiting.values())]
    return actions


# Why a model has no room.


def explain_misfit(fleet: Fleet, profile: ModelProfile) -> str | None:
    """Say why no worker could ever hold a model; None if one could, or it is too early to say.

    Never with scaling: a machine that is added may hold it.
    """
    if not fleet.is_complete or fleet.config.scaling is not None or fleet.may_return(profile):
        return None
    budgets = {kind: index.budget.highest or 0 for kind, index in fleet.capacity.by_kind.items()}
    for worker in fleet.drained_workers():
        budgets[worker.kind] = max(budgets.get(worker.kind, 0), worker.promises.budget_bytes)
    unsuited = [kind for kind in budgets if kind not in profile.footprints]
    texts = [explain_unsuited(profile, unsuited)] if unsuited else []
    for kind, budget_bytes in budgets.items():
        footprint = profile.footprints.get(kind)
        if footprint is None:
            continue
        if footprint.least_bytes <= budget_bytes:
            return None
        texts.append(
            f"on `{kind}` it needs {_format_bytes(footprint.least_bytes)} "
            f"({_format_bytes(footprint.fixed_bytes)} for weights and workspace, "
            f"{_format_bytes(footprint.min_kv_bytes)} for KV), the largest budget of a worker: "
            f"{_format_bytes(budget_bytes)}"
        )
    advice = "give workers more memory, or deploy it quantised or with a shorter context"
    if fleet.capacity.must_stage(profile):
        if find_on_empty_workers(fleet, profile) is not None:
            return None
        texts.append(explain_stages(fleet, profile, None))
        advice = "add workers, or deploy it quantised or with a shorter context"
    elif profile.footprints and not profile.stages:
        advice += "; if several workers could hold it in stages, deploy it again with `--overwrite`"
    if not profile.footprints:
        advice = "start a node with such `cluster.labels`, or change the labels of the model"
    return f"model `{profile.model}` fits no worker: {'; '.join(texts)}; {advice}"


def explain_stages(fleet: Fleet, profile: ModelProfile, most: Hold | None) -> str:
    """Say how many stages a model needs, and how many workers have room for one.

    `most`: if replicas of a hold up to it were gone; None: all.
    """
    texts = []
    for kind, index in fleet.capacity.by_kind.items():
        if (sizes := profile.stages.get(kind)) is None:
            continue
        shares = split_evenly(sizes, index.budget.highest or 0)
        num_stages = MAX_STAGES if shares is None else len(shares)
        needed_bytes = sizes.smallest(num_stages).least_bytes
        ranking = index.budget if most is None else index.without[most]
        num_able = sum(1 for _ in ranking.down_to_rank(needed_bytes))
        texts.append(
            f"on `{kind}` it needs {num_stages} stages of about {-(-sizes.num_layers // num_stages)} of its "
            f"{sizes.num_layers} layers, each at least {_format_bytes(needed_bytes)}; "
            f"{num_able} of {len(index.budget)} workers have that much {_AVAILABLE[most]}"
        )
    return "; ".join(texts)


def explain_unsuited(profile: ModelProfile, kinds: Sequence[str]) -> str:
    """Say why a model has no footprint for kinds of workers."""
    unlabelled = [kind for kind in kinds if not labels_of(kind).issuperset(profile.labels)]
    if not unlabelled:
        return f"it cannot run on {_list_kinds(kinds)}"
    lacking = (set(profile.labels).difference(labels_of(kind)) for kind in unlabelled)
    missing = set[str]().union(*lacking)
    labels = ", ".join(label for label in profile.labels if label in missing)
    are = "is" if len(unlabelled) == 1 else "are"
    return f"it needs nodes labelled {labels}, which {_list_kinds(unlabelled)} {are} not"


def _list_kinds(kinds: Sequence[str]) -> str:
    return _list_some([f"`{kind}`" for kind in kinds])


def explain_pinned_out(fleet: Fleet, profile: ModelProfile) -> str | None:
    """Say why pinned models leave no room for a model; None if a worker could make some."""
    if fleet.config.scaling is not None or fleet.may_return(profile):
        return None
    if could_hold(fleet, profile, Hold.BUSY):
        return None
    must_stage = fleet.capacity.must_stage(profile)
    texts = [explain_stages(fleet, profile, Hold.BUSY)] if must_stage else []
    for index, footprint in fleet.capacity.find_suited(profile) if not must_stage else ():
        roomiest = next(index.unpinned.down_to_rank(0), None)
        if roomiest is not None:
            worker = fleet.workers[roomiest]
            budget_bytes = worker.promises.budget_bytes
            freeable_bytes = worker.promises.freeable_bytes(Hold.BUSY)
            texts.append(
                f"it needs {_format_bytes(footprint.least_bytes)}, at most {_format_bytes(freeable_bytes)} "
                f"of {_format_bytes(budget_bytes)} can be freed, on worker `{roomiest}`"
            )
    # Without their names: who asks may not know of these models.
    advice = (
        "unpin one that `hearth ps` shows with `hearth stop NAME` or a finite keep_alive, or give workers "
        "more memory"
    )
    return f"model `{profile.model}` has no room beside pinned ones: {'; '.join(texts)}; {advice}"


def explain_refused_pin(replica: Replica) -> str:
    worker, promise = replica.worker, replica.promise
    others = (one for one in worker.replicas.values() if one.running and one is not replica)
    busy = [one.model.name for one in others if not one.has_pin]
    return (
        f"model `{replica.model.name}` cannot be pinned yet: of the "
        f"{_format_bytes(worker.promises.budget_bytes)} of worker `{worker.name}` it would keep "
        f"{_format_bytes(promise.own_bytes)} for ever, and others would have no turn any more"
        f"{_name_some('busy', busy)}{_name_pinned(worker)}; it stays as long as nobody needs its room"
    )


def explain_shortage(worker: Worker, footprint: Footprint) -> str | None:
    """Say why a worker has no room for a model now; None if it has, or could evict idle ones."""
    if worker.promises.has_room(footprint, Hold.WARM):
        return None
    freeable_bytes = worker.promises.freeable_bytes(Hold.WARM)
    busy = [one.model.name for one in worker.replicas.values() if one.hold in (Hold.PAUSED, Hold.BUSY)]
    text = f"needs {_format_bytes(footprint.least_bytes)}, {_format_bytes(freeable_bytes)} can be freed"
    return text + _name_some("busy", busy) + _name_pinned(worker)


def _name_pinned(worker: Worker) -> str:
    pinned = [replica.model.name for replica in worker.replicas.values() if replica.hold is Hold.PINNED]
    return _name_some("pinned", pinned)


def _name_some(what: str, names: Sequence[str]) -> str:
    return f"; {what}: {_list_some(names)}" if names else ""


def _list_some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + rest


def _format_bytes(num_bytes: int) -> str:
    if num_bytes >= 10**9:
        return f"{num_bytes / 1e9:.2f} GB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 10**6 else f"{num_bytes} bytes"


# Why a request cannot go on with its model.


def explain_outdated(request: Request) -> str | None:
    """Say why a request cannot go on: its model was removed or replaced. None if it can."""
    profile = request.model.profile
    if profile is None:
        return explain_removed(request.model)
    return None if profile.digest == request.digest else explain_replaced(request.model)


def explain_removed(model: Model) -> str:
    return f"model `{model.name}` was removed before the request was done"


def explain_replaced(model: Model) -> str:
    return f"model `{model.name}` was replaced by another version before the request was done; ask again"
