"""`hearth simulate --find`: how many devices a workload needs, in a sentence, a table and a cost."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

import typer

from hearth.cli.console import out, print_columns
from hearth.cli.figures import duration, precise, size
from hearth.cli.progress import step_bar
from hearth.core.types import Rung
from hearth.policy.fleet.gpu_time import SECONDS_PER_HOUR, cost_of
from hearth.sim.profile import Profile
from hearth.sim.sampling import TraceSample, sample
from hearth.sim.setting import SimulationSetting
from hearth.sim.sizing import (
    MAX_GPUS,
    Missed,
    Outcome,
    SizingPool,
    Tried,
    find_least,
    is_met,
    least_gpus,
    load_s,
)
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
    """Print the fewest devices, and then the least host memory of their machines unless that is given."""
    busy_s = load_s(setting, profile)
    sampled = sample(trace, busy_s, max_requests)
    width, first = num_usable_cores(), least_gpus(sampled, busy_s)
    plenty = min(MAX_GPUS, max(len(setting.shapes), 4 * first))
    weights_bytes = sum(profile.shape(shape).weights_bytes for shape in setting.shapes.values())
    is_host_given = setting.transfers.host_bytes < math.inf

    def with_gpus(num: int, host_eighths: int = 8) -> SimulationSetting:
        transfers = setting.transfers
        if not is_host_given:
            transfers = replace(transfers, host_bytes=-(-weights_bytes * host_eighths // 8))
        return replace(
            setting, num_workers=num, num_nodes=math.ceil(num / gpus_per_node), transfers=transfers
        )

    with (
        _ended_by_sigterm(),
        step_bar("simulating") as advance,
        SizingPool(sampled, profile, width, advance) as pool,
    ):

        def attempt_gpus(nums: Sequence[int], ends_early: bool) -> list[Outcome | None]:
            advance(0, None, f"trying {' and '.join(map(str, nums))} GPUs")
            return pool.attempt([with_gpus(num) for num in nums], target, ends_early=ends_early)

        def attempt_host(eighths: Sequence[int], ends_early: bool) -> list[Outcome | None]:
            advance(0, None, f"trying {' and '.join(f'{num}/8' for num in eighths)} of the host memory")
            settings = [with_gpus(num_gpus, num) for num in eighths]
            return pool.attempt(settings, target, ends_early=ends_early)

        tried = [*find_least(attempt_gpus, target, first, MAX_GPUS, plenty, width).values()]
        found = next((one for one in tried if is_met(one, target)), None)
        if found is not None and not is_host_given and len(setting.shapes) > 1:
            num_gpus, most = found.num_gpus, found
            hosts = [*find_least(attempt_host, target, 1, 8, 8, width, {8: found}).values()]
            found = next(one for one in hosts if is_met(one, target))
            tried += [one for one in hosts if one is not most]
    price = setting.device_hour_price
    if as_json:
        shown = {
            "trace": trace.name,
            "is_estimate": profile.is_estimate,
            "target": target,
            "num_gpus": None if found is None else found.num_gpus,
            "host_bytes": None if found is None else found.host_bytes,
            "cost_per_day": None if found is None else cost_of(found.num_gpus * DAY_S, price),
            "num_requests": sampled.num_requests,
            "num_counted": sampled.num_counted,
            "windows": [len(sampled.parts), sampled.num_windows, sampled.window_s],
            "tried": [asdict(one) for one in tried],
        }
        typer.echo(json.dumps(shown))
        return
    answer = _answer(tried, found, target, setting)
    out.print(("Estimated: " if profile.is_estimate else "") + answer, soft_wrap=True)
    out.print(_about(sampled), soft_wrap=True)
    out.print(f"Setting: {describe(with_gpus(1), profile)}.", soft_wrap=True)
    out.print()
    print_columns(
        ["GPUS", "MACHINES", "HOST MEMORY", "ON TIME", "FIRST TOKEN P99", "GPUS HELD", "COST PER DAY"],
        [
            [
                f"{one.num_gpus}{' *' if one is found else ''}",
                str(one.num_nodes),
                _host(one),
                *_figures(one, target),
                _per_day(one.num_gpus, price),
            ]
            for one in tried
        ],
    )


def _host(one: Outcome) -> str:
    return "all weights" if one.host_bytes is None else size(one.host_bytes)


def _figures(one: Outcome, target: float) -> list[str]:
    if isinstance(one, Missed):
        return [f"below {100 * target:.4g}%", "-", "-"]
    first_token = "-" if one.first_token_p99_s is None else precise(one.first_token_p99_s)
    return [f"{one.requests_on_time:.2%}", first_token, f"{one.gpus_held:.1f}"]


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end the command as Ctrl-C does: with the processes of the pool."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def describe(setting: SimulationSetting, profile: Profile) -> str:
    """Describe the machines, in which weights come from host memory, disks and links."""
    transfers = setting.transfers
    disk_bytes_per_s = transfers.disk_bytes_per_s
    from_disk = "no disk" if disk_bytes_per_s is None else f"disk {disk_bytes_per_s / 1e9:.1f} GB/s"
    host = "all weights in host memory of the first machine"
    if transfers.host_bytes < math.inf:
        host = f"{size(int(transfers.host_bytes))} of host memory per machine"
    origin = "an estimate from its specification" if profile.is_estimate else "as measured"
    return (
        f"{profile.measured.origin.device}, {origin}; {size(setting.memory_bytes)} per GPU, "
        f"loaded at {profile.bytes_per_s[Rung.HOST] / 1e9:.1f} GB/s; "
        f"{host}; {from_disk}; links {transfers.link_bytes_per_s * 8e-9:g} Gbit/s"
    )


def _answer(tried: Sequence[Outcome], found: Tried | None, target: float, setting: SimulationSetting) -> str:
    on_time, price = setting.on_time, setting.device_hour_price
    due = f"arrival + {on_time.first_token_s:g} s + i / {on_time.tokens_per_s:g}"
    if found is not None:
        return (
            f"{_gpus(found.num_gpus)} with {_host(found)} of host memory per machine serve "
            f"{found.requests_on_time:.1%} of the requests with every token on time ({due}), for "
            f"{_per_day(found.num_gpus, price)} a day."
        )
    most = tried[-1]
    assert isinstance(most, Tried), f"ended early: {most}"
    refused = "".join(f", {num} refused: {why}" for why, num in most.refusals.items())
    hint = " With --pack-replicas, they may." if setting.first_token_s is None else ""
    return (
        f"More GPUs do not help: {_gpus(most.num_gpus)} serve {most.requests_on_time:.1%} of the requests "
        f"with every token on time ({due}), less than {100 * target:.4g}%{refused}.{hint}"
    )


def _about(sampled: TraceSample) -> str:
    num, window = sampled.num_requests, duration(sampled.window_s)
    if sampled.is_whole:
        return f"Simulated: all {num:,} requests, beginning with empty devices and full host memory."
    return (
        f"Simulated: {len(sampled.parts)} of {sampled.num_windows} windows of {window}, with "
        f"{sampled.num_counted:,} of {num:,} requests. The busiest window is among them; the others "
        "stand for some each. Each begins half its length earlier with empty devices and full host memory."
    )


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _per_day(num_gpus: int, price: float | None) -> str:
    cost = cost_of(num_gpus * DAY_S, price)
    return f"{num_gpus * 24:,} GPU hours" if cost is None else f"{cost:,.2f}"
