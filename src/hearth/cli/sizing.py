"""`hearth simulate --find`: how many devices a workload needs, in a sentence, a table and a cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import typer

from hearth.cli.console import out, print_columns
from hearth.cli.figures import duration, precise
from hearth.cli.progress import step_bar
from hearth.policy.fleet.gpu_time import SECONDS_PER_HOUR, cost_of
from hearth.sim.profile import Profile
from hearth.sim.sampling import TraceSample, sample
from hearth.sim.setting import SimulationSetting
from hearth.sim.sizing import SizingPool, Tried, find_num_gpus, least_gpus, load_s
from hearth.sim.traces import Trace
from hearth.system.cpus import num_usable_cores

DAY_S = 24 * SECONDS_PER_HOUR


def find(
    trace: Trace,
    setting: SimulationSetting,
    profile: Profile,
    gpus_per_node: int,
    target: float,
    max_requests: int,
    *,
    as_json: bool,
) -> None:
    busy_s = load_s(setting, profile)
    sampled = sample(trace, busy_s, max_requests)
    first, width = least_gpus(sampled, busy_s), num_usable_cores()
    with (
        step_bar("simulating") as advance,
        SizingPool(sampled, setting, profile, gpus_per_node, width, advance) as pool,
    ):

        def attempt(nums: Sequence[int]) -> list[Tried]:
            advance(0, None, f"trying {' and '.join(map(str, nums))} GPUs")
            return pool.attempt(nums)

        tried = find_num_gpus(attempt, target, first, len(setting.shapes), width)
    found = next((one for one in tried if one.requests_on_time >= target), None)
    price = setting.device_hour_price
    if as_json:
        shown = {
            "trace": trace.name,
            "target": target,
            "num_gpus": None if found is None else found.num_gpus,
            "cost_per_day": None if found is None else cost_of(found.num_gpus * DAY_S, price),
            "num_requests": sampled.num_requests,
            "num_counted": sampled.num_counted,
            "windows": [len(sampled.parts), sampled.num_windows, sampled.window_s],
            "tried": [asdict(one) for one in tried],
        }
        typer.echo(json.dumps(shown))
        return
    out.print(_answer(tried, found, target, setting), soft_wrap=True)
    out.print(_about(sampled), soft_wrap=True)
    out.print()
    print_columns(
        ["GPUS", "MACHINES", "ON TIME", "FIRST TOKEN P99", "GPUS HELD", "COST PER DAY"],
        [
            [
                f"{one.num_gpus}{' *' if one is found else ''}",
                str(one.num_nodes),
                f"{one.requests_on_time:.2%}",
                "-" if one.first_token_p99_s is None else precise(one.first_token_p99_s),
                f"{one.gpus_held:.1f}",
                _per_day(one.num_gpus, price),
            ]
            for one in tried
        ],
    )


def _answer(tried: Sequence[Tried], found: Tried | None, target: float, setting: SimulationSetting) -> str:
    on_time, price = setting.on_time, setting.device_hour_price
    due = f"arrival + {on_time.first_token_s:g} s + i / {on_time.tokens_per_s:g}"
    if found is not None:
        return (
            f"{_gpus(found.num_gpus)} serve {found.requests_on_time:.1%} of the requests with every token on "
            f"time ({due}), for {_per_day(found.num_gpus, price)} a day."
        )
    most = tried[-1]
    refused = "".join(f", {num} refused: {why}" for why, num in most.refusals.items())
    return (
        f"More GPUs do not help: {_gpus(most.num_gpus)} serve {most.requests_on_time:.1%} of the requests "
        f"with every token on time ({due}), less than {100 * target:.4g}%{refused}."
    )


def _about(sampled: TraceSample) -> str:
    num, window = sampled.num_requests, duration(sampled.window_s)
    if sampled.is_whole:
        return f"Simulated: all {num:,} requests, beginning with empty devices."
    return (
        f"Simulated: {len(sampled.parts)} of {sampled.num_windows} windows of {window}, with "
        f"{sampled.num_counted:,} of {num:,} requests. The busiest windows are among them; each stands for "
        "less busy ones, and begins with empty devices half its length earlier."
    )


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _per_day(num_gpus: int, price: float | None) -> str:
    cost = cost_of(num_gpus * DAY_S, price)
    return f"{num_gpus * 24:,} GPU hours" if cost is None else f"{cost:,.2f}"
