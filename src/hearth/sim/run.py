"""A workload in, its figures out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hearth.policy.fleet.events import DemandForecast, RequestFinished
from hearth.sim.profile import Profile
from hearth.sim.report import SimulationReport, report_of
from hearth.sim.service import SimulatedService
from hearth.sim.setting import SimulationSetting
from hearth.sim.stepped_model import WorkerFact
from hearth.sim.traces import Trace


def simulate(trace: Trace, setting: SimulationSetting, profile: Profile) -> SimulationReport:
    """Answer all requests of a trace and return the figures. Arguments as of `serve_trace`."""
    return report_of(serve_trace(trace, setting, profile))


def serve_trace(
    trace: Trace,
    setting: SimulationSetting,
    profile: Profile,
    on_progress: Callable[[int], None] | None = None,
    forecasts: Sequence[DemandForecast] = (),
) -> SimulatedService:
    """Answer all requests of a trace, whose tenants are models. Deterministic.

    `on_progress` gets the number of answered requests.

    Raises:
        ConfigError: a tenant is no model, or a model has no shape in the profile.
    """
    num_ended = 0

    def watch(fact: WorkerFact) -> None:
        nonlocal num_ended
        if on_progress is not None and isinstance(fact, RequestFinished):
            num_ended += 1
            on_progress(num_ended)

    service = SimulatedService(setting, profile, watch)
    service.ask(trace.requests)
    for forecast in forecasts:
        service.schedule(forecast)
    service.run()
    service.check()
    return service
