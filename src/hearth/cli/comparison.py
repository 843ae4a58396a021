"""`hearth simulate --compare`: a workload without each mechanism and in simpler systems, as a table."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from hearth.cli.console import out, print_columns
from hearth.cli.figures import duration, precise
from hearth.cli.progress import step_bar
from hearth.cli.sizing import describe
from hearth.policy.fleet.events import DemandForecast
from hearth.policy.fleet.gpu_time import cost_of
from hearth.sim.profile import Profile
from hearth.sim.sampling import SampledWindow, TraceSample
from hearth.sim.setting import SimulationSetting
from hearth.sim.sizing import SizingPool, Tried
from hearth.sim.traces import Trace
from hearth.sim.variants import variants
from hearth.system.cpus import num_usable_cores


def compare(
    trace: Trace,
    setting: SimulationSetting,
    profile: Profile,
    forecasts: tuple[DemandForecast, ...],
    *,
    as_json: bool,
) -> None:
    systems = variants(setting)
    whole = SampledWindow(trace, forecasts=forecasts)
    sampled = TraceSample((whole,), 1, trace.requests[-1].arrival_s, len(trace.requests))
    with step_bar("simulating") as advance, SizingPool(sampled, profile, num_usable_cores(), advance) as pool:
        advance(0, None, f"trying {len(systems)} systems")
        tried = dict(zip(systems, pool.simulate(list(systems.values())), strict=True))
    if as_json:
        shown = {name: asdict(one) for name, one in tried.items()}
        typer.echo(json.dumps({"trace": trace.name, "is_estimate": profile.is_estimate, "systems": shown}))
        return
    out.print(f"Setting: {describe(setting, profile)}.", soft_wrap=True)
    out.print()
    print_columns(
        ["SYSTEM", "ON TIME", "FIRST TOKEN P99", "COLD STARTS", "GPU TIME", "OF IT IDLE", "COST"],
        [[name, *_cells(one, setting.device_hour_price)] for name, one in tried.items()],
    )


def _cells(one: Tried, hour_price: float | None) -> list[str]:
    cost = cost_of(one.gpu_s, hour_price)
    return [
        f"{one.requests_on_time:.2%}",
        "-" if one.first_token_p99_s is None else precise(one.first_token_p99_s),
        str(one.cold_starts),
        duration(one.gpu_s),
        duration(one.idle_gpu_s),
        "-" if cost is None else f"{cost:,.2f}",
    ]
