"""Loads models ahead of the requests that forecasts expect, if `BrainConfig.prewarming` says so.

`keep_alive` is the price of a cold start: a user would rather keep a model loaded for so long than start it
again. So a model is worth loading when the next request is expected within its `keep_alive`, at the time when
the load would end. From then on it is kept as long as that holds, even if no request has come. A model is
worth several replicas when the upper bound of its forecast fills the slots of all but the last one (Little's
law): N = ceil(rate x run time / (slots x utilisation)).

A model whose device has no room, or that is expected later, comes to host memory if that shortens its start.

A prewarmed replica takes free memory or that of retained models whose reload costs less than the start that
it saves. No request waits for it: it gives way to any request as an idle model does. What it costs if no
request comes is reserved before, in `PrewarmBudget`, and no budget means no prewarming.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hearth.core.types import LOCAL, ModelId, Rung, kind_of
from hearth.policy.fleet.capacity import RETAINED, WARM
from hearth.policy.fleet.device_bytes import count_missing_bytes
from hearth.policy.fleet.events import Action, AddWorkers, DemandForecast, Prewarm, Prewarming
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.profile import ModelProfile
from hearth.policy.fleet.records import Model, PrewarmHold, Worker
from hearth.policy.fleet.routing import ReplicaPlace, choose_place
from hearth.policy.fleet.serving import load_ahead

#: A load may take so many times as long as estimated, and so much longer.
LEAD_FACTOR, LEAD_MARGIN_S = 1.25, 0.5
#: The share of a model's slots that should be in use.
UTILISATION = 0.75
#: Time between two looks at a model that should be prewarmed and cannot be.
RETRY_S = 10.0
#: Between any two looks at a model.
MIN_LOOK_S = 0.1
#: A model expected within this time is worth its place in host memory, if it starts so much sooner there.
HOST_HORIZON_S, MIN_HOST_GAIN_S = 1800.0, 0.25


def record_forecast(fleet: Fleet, event: DemandForecast) -> None:
    model = fleet.models.get(event.model)
    if model is None or model.profile is None or fleet.config.prewarming is None:
        return
    model.forecast = event
    _look_again(fleet, model, fleet.now_s)


def follow_forecasts(fleet: Fleet) -> list[Action]:
    """Do what is due for models with a forecast."""
    prewarming = fleet.config.prewarming
    if prewarming is None:
        return []
    actions: list[Action] = []
    while (due_s := fleet.forecasts_due.lowest) is not None and due_s <= fleet.now_s:
        fleet.prewarm_budget.grow(fleet.now_s, prewarming.budget * len(fleet.workers))
        model = fleet.models[next(iter(fleet.forecasts_due))]
        assert model.profile is not None, f"removed: `{model.name}`"
        assert model.forecast is not None, f"due without a forecast: `{model.name}`"
        actions += _follow(fleet, model, model.profile, model.forecast, prewarming)
    return actions


def expected_demand(fleet: Fleet, name: ModelId) -> ExpectedDemand | None:
    """Return what the forecast of a model says as of the last event; None: it has none."""
    model = fleet.models.get(name)
    if model is None or model.profile is None or model.forecast is None:
        return None
    return _expect(fleet, model, model.profile, model.forecast)


def _follow(
    fleet: Fleet, model: Model, profile: ModelProfile, forecast: DemandForecast, prewarming: Prewarming
) -> list[Action]:
    actions: list[Action] = []
    expected = _expect(fleet, model, profile, forecast)
    while _may_prewarm(fleet, model) and _num_held(fleet, model) < expected.num_replicas:
        ordered = _prewarm(fleet, model, profile, expected, prewarming)
        if not ordered:
            break
        actions += ordered
        if prewarming.is_advice:  # about one replica at a time
            break
    is_short = _num_held(fleet, model) < expected.num_replicas
    if is_short and not actions:
        actions += _add_machine(fleet, model, prewarming)
    if not model.usable and not actions and _may_prewarm(fleet, model):
        actions += _bring_to_host(fleet, model, profile, expected, prewarming)
    _look_again(fleet, model, _next_look_s(fleet, model, forecast, expected, is_short=is_short))
    return actions


@dataclass(frozen=True, slots=True)
class ExpectedDemand:
    lead_s: float  #: how long before its requests a model must begin to load
    per_s: float  #: then
    num_replicas: int  #: that are worth it then
    num_soon: float  #: requests within `HOST_HORIZON_S`


def _expect(fleet: Fleet, model: Model, profile: ModelProfile, forecast: DemandForecast) -> ExpectedDemand:
    missing_bytes = profile.num_bytes - max(model.resident_bytes.values(), default=0)
    nodes = model.largest_holders or (LOCAL,)
    load_s = min(fleet.estimates.load_s(missing_bytes, model, node) for node in nodes)
    lead_s = LEAD_FACTOR * load_s + LEAD_MARGIN_S
    at = _interval(forecast, fleet.now_s + lead_s)
    is_known = at < len(forecast.mean_per_s)
    mean_per_s, high_per_s = (forecast.mean_per_s[at], forecast.high_per_s[at]) if is_known else (0.0, 0.0)
    num_replicas = int(mean_per_s * model.unpinned_s >= 1.0)
    if (run_s := fleet.estimates.run_s_by_model.get(model.name)) is not None:
        slots = min((one.max_seqs for one in profile.footprints.values()), default=1)
        num_running = math.ceil(high_per_s * run_s / (slots * UTILISATION))
        num_replicas = num_running if num_running > 1 else num_replicas
    first = _interval(forecast, fleet.now_s)
    num_steps = math.ceil(HOST_HORIZON_S / forecast.step_s)
    num_soon = sum(forecast.mean_per_s[first : first + num_steps]) * forecast.step_s
    most = num_replicas if profile.max_replicas is None else profile.max_replicas
    return ExpectedDemand(lead_s, mean_per_s, min(num_replicas, most), num_soon)


def _interval(forecast: DemandForecast, at_s: float) -> int:
    """Return the number of the interval at a time; one that begins within a millisecond has begun."""
    return int((at_s - forecast.begin_s + 0.001) / forecast.step_s)


def _may_prewarm(fleet: Fleet, model: Model) -> bool:
    """Return False while requests wait for it, or for room, and for a model that failed or was stopped."""
    if model.waiting or fleet.queues.for_room or model.is_stopped:
        return False
    return not (model.failure or model.failed_on or model.num_deadly_loads)


def _num_held(fleet: Fleet, model: Model) -> int:
    is_advised = model.advised is not None and fleet.now_s < model.advised.until_s
    return is_advised + model.num_held


def _prewarm(
    fleet: Fleet, model: Model, profile: ModelProfile, expected: ExpectedDemand, prewarming: Prewarming
) -> list[Action]:
    """Return the orders for one more replica; empty: none is possible, or worth it."""
    idle = next((one for one in model.usable.values() if one.hold is RETAINED and not one.is_unwanted), None)
    place = None
    if idle is not None:
        worker, own_bytes, seconds = idle.worker, idle.promise.own_bytes, model.unpinned_s
    else:
        place = _choose_place(fleet, model, profile, expected)
        if place is None:
            return []
        worker, own_bytes = place.worker, place.footprint.promise.own_bytes
        seconds = expected.lead_s + model.unpinned_s
    cost_s = seconds * own_bytes / worker.promises.budget_bytes
    hold = PrewarmHold(fleet.now_s + seconds, cost_s)
    if hold.until_s <= fleet.now_s or not fleet.prewarm_budget.take(cost_s):  # `keep_alive` may be 0
        return []
    told = Prewarm(
        model.name,
        worker.name,
        to_host=False,
        lead_s=expected.lead_s,
        expected_per_s=expected.per_s,
        cost_s=cost_s,
        is_advice=prewarming.is_advice,
    )
    if prewarming.is_advice:
        model.advised = hold
        return [told]
    if place is not None:
        return [told, *load_ahead(fleet, model, place, hold)]
    assert idle is not None, f"neither kept nor loaded: `{model.name}`"
    idle.prewarmed = hold
    fleet.reindex(idle)
    return [told]


def _choose_place(
    fleet: Fleet, model: Model, profile: ModelProfile, expected: ExpectedDemand
) -> ReplicaPlace | None:
    """Return a place on one worker, without loss of anything that is worth more than the start."""
    place = choose_place(fleet, model, most=RETAINED)
    if place is None or place.pipeline is not None:
        return None
    p_asked = -math.expm1(-expected.per_s * model.unpinned_s)
    saved_s = p_asked * expected.lead_s * profile.weight
    return place if place.evictions.evict_s <= saved_s else None


def _bring_to_host(
    fleet: Fleet, model: Model, profile: ModelProfile, expected: ExpectedDemand, prewarming: Prewarming
) -> list[Action]:
    if expected.num_soon < 1.0 or fleet.now_s < model.host_prewarmed_s + HOST_HORIZON_S:
        return []

    def load_s_on(worker: Worker) -> float:
        return fleet.estimates.load_s(count_missing_bytes(model, worker), model, worker.node)

    # On a CPU, host memory only buffers reads.
    workers = (one for one in fleet.workers.values() if kind_of(one.kind) == "cuda" and not one.is_draining)
    usable = (one for one in workers if one.kind in profile.footprints)
    # The head comes first: models that spread over machines took more GPU time in simulations.
    worker = min(usable, key=lambda one: (one.node != LOCAL, load_s_on(one)), default=None)
    if worker is None:
        return []
    num_bytes, load_s = count_missing_bytes(model, worker), load_s_on(worker)
    saved_s = load_s - num_bytes / fleet.estimates.reload.bytes_per_s(Rung.HOST)
    if saved_s < MIN_HOST_GAIN_S or not fleet.prewarm_budget.take(load_s):
        return []
    model.host_prewarmed_s = fleet.now_s
    return [
        Prewarm(
            model.name,
            worker.name,
            to_host=True,
            lead_s=load_s,
            expected_per_s=expected.per_s,
            cost_s=load_s,
            is_advice=prewarming.is_advice,
        )
    ]


def _add_machine(fleet: Fleet, model: Model, prewarming: Prewarming) -> list[Action]:
    """Order a machine for a model that has no room. One that stays idle is given back as any other."""
    scaling, budget = fleet.config.scaling, fleet.prewarm_budget
    if scaling is None or prewarming.is_advice or not _may_prewarm(fleet, model):
        return []
    if sum(fleet.most_by_node.values()) > len(fleet.workers):  # one is being started
        return []
    if fleet.now_s < budget.machine_s + scaling.in_after_s:
        return []
    num_workers = max(fleet.num_workers_by_node.values(), default=1)
    if not budget.take(scaling.in_after_s * num_workers):
        return []
    budget.machine_s = fleet.now_s
    return [AddWorkers(model.name)]


def _next_look_s(
    fleet: Fleet, model: Model, forecast: DemandForecast, expected: ExpectedDemand, *, is_short: bool
) -> float:
    """Return when what is expected changes, or a replica would no longer be kept."""
    at = _interval(forecast, fleet.now_s + expected.lead_s) + 1
    due_s = math.inf
    if at <= len(forecast.mean_per_s):
        due_s = forecast.begin_s + at * forecast.step_s - expected.lead_s
    if is_short:
        due_s = min(due_s, fleet.now_s + RETRY_S)
    elif expected.num_replicas:
        for replica in model.usable.values():
            is_idle = replica.hold is WARM
            due_s = min(due_s, replica.expires_s if is_idle else fleet.now_s + model.unpinned_s)
        if model.advised is not None and model.advised.until_s > fleet.now_s:
            due_s = min(due_s, model.advised.until_s)
    return max(due_s, fleet.now_s + MIN_LOOK_S)


def _look_again(fleet: Fleet, model: Model, due_s: float) -> None:
    model.forecast_due_s = due_s
    if due_s < math.inf:
        fleet.forecasts_due.put(model.name, due_s)
    else:
        fleet.forecasts_due.drop(model.name)
