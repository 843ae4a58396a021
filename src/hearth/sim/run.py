"""`simulate`: a workload in, its figures out. What happens in between is in `service.py`."""

from __future__ import annotations

from collections.abc import Callable

from hearth.sim.profile import Profile
from hearth.sim.report import SimulationReport, report_of
from hearth.sim.service import SimulatedService
from hearth.sim.setting import SimulationSetting
from hearth.sim.traces import Trace

#: Is told how many requests have ended, of how many.
Progress = Callable[[int, int], None]


def simulate(
    trace: Trace, setting: SimulationSetting, profile: Profile, on_progress: Progress | None = None
) -> SimulationReport:
    """Have a service answer all requests of a trace, whose tenants are models; return the figures.

    The same trace, setting and profile give the same report. Raises AssertionError if a request does not end
    exactly once, or books are wrong at the end.

    Raises:
        ConfigError: a tenant is no model, or a model has no shape in the profile.
    """
    service = SimulatedService(setting, profile)
    service.ask(trace.requests)
    num_requests = num_told = service.num_open

    def tell_progress() -> None:
        nonlocal num_told
        if on_progress is not None and service.num_open < num_told:
            num_told = service.num_open
            on_progress(num_requests - num_told, num_requests)

    service.run(tell_progress)
    service.check()
    return report_of(service)
