"""`hearth simulate`: a workload against Hearth's scheduler, in virtual time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from hearth.cli.comparison import compare
from hearth.cli.console import DEFAULT_DATA_DIR, AsJson, DataDirectory, app, err, print_table
from hearth.cli.figures import precise, size
from hearth.cli.progress import step_bar
from hearth.cli.recorded import read_traffic
from hearth.cli.simulation_page import page
from hearth.cli.sizing import describe, find
from hearth.cli.snapshot import cost_profile
from hearth.core.config import EngineConfig, parse_bytes
from hearth.core.errors import ConfigError
from hearth.core.forecast_messages import LONG_STEP_S
from hearth.core.types import ModelId, Pace, Rung
from hearth.policy.fleet.events import DemandForecast, Prewarming
from hearth.sim.arrivals import Lengths, draw_trace, steady
from hearth.sim.network import Transfers
from hearth.sim.profile import Profile
from hearth.sim.report import Percentiles, SimulationReport, report_of
from hearth.sim.run import serve_trace
from hearth.sim.setting import OnTime, Policy, SimulationSetting, parse_models
from hearth.sim.trace_files import count_requests, is_counted, read_counts, read_lengths, read_trace
from hearth.sim.traces import Trace

#: Used if a trace has no lengths.
DEFAULT_LENGTHS = Lengths.fixed(512, 128)
#: Duration of a random trace without --length.
DRAWN_S = 600.0
#: Models and keys whose GPU time is shown; `--json` has all.
MAX_SHARES = 8


@app.command(rich_help_panel="This machine")
def simulate(
    trace: Annotated[
        str | None,
        typer.Argument(metavar="TRACE", help="Arrivals: a file, poisson:RATE or gamma:RATE:CV."),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            "--journal", metavar="DIR", help="Instead of TRACE: the traffic recorded in a data directory."
        ),
    ] = None,
    models: Annotated[
        str, typer.Option("--models", metavar="SHAPES", help="Model sizes, such as 1b,7b,3b or 7b*40.")
    ] = "7b",
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Number of devices. Default: 1, or as recorded.")
    ] = None,
    gpus_per_node: Annotated[
        int, typer.Option("--gpus-per-node", min=1, metavar="N", help="Devices of each machine, at most.")
    ] = 8,
    link: Annotated[
        float, typer.Option("--link", metavar="GBIT/S", help="Network of each machine, in each direction.")
    ] = 25.0,
    disk: Annotated[
        float | None,
        typer.Option(
            "--disk",
            metavar="GB/S",
            help="Disk of each machine, which has all models. Default: with --host-memory, as measured.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            "--host-memory",
            metavar="SIZE",
            help="Host memory of each machine for weights; without it, the first machine has all in memory.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory per worker. Default: 90% of the profile's device.",
        ),
    ] = None,
    policy: Annotated[
        Policy,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="How models that do not fit in memory share a worker: turns, drain or one-at-a-time.",
        ),
    ] = Policy.TURNS,
    profile: Annotated[
        str,
        typer.Option(
            "--profile",
            metavar="NAME|FILE",
            help=(
                "Machine: h200 or cpu2, measured; a100, h100, l40s, rtx4090 or t4, estimated; a measured "
                "file; or snapshot:MODEL for this machine."
            ),
        ),
    ] = "h200",
    context: Annotated[int, typer.Option("--context", min=2, help="Context length in tokens.")] = 2048,
    begin_s: Annotated[
        float, typer.Option("--begin", min=0, metavar="SECONDS", help="Start of the window in the trace.")
    ] = 0.0,
    length_s: Annotated[
        float | None,
        typer.Option("--length", metavar="SECONDS", help="Length of the window, before --speed."),
    ] = None,
    speed: Annotated[float, typer.Option("--speed", help="Speed up arrivals by this factor.")] = 1.0,
    max_input: Annotated[
        int | None, typer.Option("--max-input", metavar="TOKENS", help="Cut longer prompts.")
    ] = None,
    max_output: Annotated[
        int | None, typer.Option("--max-output", metavar="TOKENS", help="Cut longer answers.")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option("--lengths", metavar="FILE", help="Draw lengths from this file if the trace has none."),
    ] = None,
    first_token_target: Annotated[
        float, typer.Option("--first-token-target", min=0, metavar="SECONDS")
    ] = 0.5,
    pack_replicas: Annotated[
        bool, typer.Option("--pack-replicas", help="As the setting: another replica if tokens would be late.")
    ] = False,
    pace: Annotated[
        float, typer.Option("--pace", min=0, metavar="TOKENS/S", help="Target pace; 0: not interactive.")
    ] = 10.0,
    on_time_s: Annotated[
        float,
        typer.Option("--on-time", min=0, metavar="SECONDS", help="A later first token counts as late."),
    ] = 1.0,
    device_hour_price: Annotated[
        float | None,
        typer.Option("--device-hour-price", min=0, metavar="PRICE", help="Price of a device per hour."),
    ] = None,
    is_find: Annotated[
        bool, typer.Option("--find", help="Find the number of devices that the workload needs.")
    ] = False,
    prewarm: Annotated[
        bool,
        typer.Option(
            "--prewarm",
            help="Load models ahead, as forecast from what TRACE has until then, and before --begin.",
        ),
    ] = False,
    is_compare: Annotated[
        bool,
        typer.Option("--compare", help="Also without each mechanism, and with simpler systems, in a table."),
    ] = False,
    target: Annotated[
        float,
        typer.Option("--target", min=0, metavar="PERCENT", help="Requests on time that --find looks for."),
    ] = 99.0,
    max_requests: Annotated[
        int,
        typer.Option(
            "--sample", min=1, metavar="REQUESTS", help="Requests that --find simulates at a time, about."
        ),
    ] = 6000,
    page_path: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE", help="Write an HTML page with plots; not with --find or --compare."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed.")] = 0,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Simulate a workload against Hearth's scheduler, in virtual time.

    All policies (placement, turns, batching, memory) are those of the service. Only the device is simulated,
    by the profile of a machine: measured, or estimated from the specification of a GPU. --profile
    snapshot:MODEL uses what a worker on this machine measured of a model; use its name in --models (see
    `hearth snapshot`). Other models are named by a shape of the profile, or by a size such as 13b. The
    busiest tenant of a trace is mapped to the first model, and so on, starting over after the last. Lengths
    that a trace lacks are drawn from --lengths; without it, a prompt has 512 tokens and an answer 128. Token
    i is on time if it comes by arrival + --on-time + i / 10 s.

    --find tries numbers of devices on all cores of this machine. Of a long workload it simulates the busiest
    window, and some less busy ones in the place of all others; the answer says how many.

    --compare also simulates the setting without each of its mechanisms, and as simpler systems would run it:
    the least recently used model leaves (LRU), one model per GPU, GPUs that are freed after a time
    (keep-alive), GPUs that are never freed (static).

    --journal repeats the traffic that a service has recorded, with its models, on as many devices as it had,
    or with other settings: what if there were one less?

    [bold]Examples[/bold]

      hearth simulate arena.csv --models 1b,7b,3b --length 240 --speed 3

      hearth simulate poisson:2 --models "7b*10" --policy drain

      hearth simulate gamma:2:4 --models "3b*20" --workers 4 --json

      hearth simulate poisson:9 --models "7b*40" --workers 8 --gpus-per-node 4

      hearth simulate poisson:1 --profile snapshot:mine --models "mine*4"

      hearth simulate arena.csv --models "7b*27" --find

      hearth simulate rates.csv --models "7b*40" --length 3600 --prewarm --compare

      hearth simulate --journal ~/.hearth --workers 1
    """
    if link <= 0:
        raise ConfigError(f"`--link` must be more than 0 Gbit/s, given: {link:g}")
    if prewarm and is_find:
        raise ConfigError("`--find` does not simulate `--prewarm`: its windows are too short")
    if (trace is None) == (journal is None):
        raise ConfigError("simulate needs TRACE or `--journal`, and not both")
    machine = _machine(profile, data_dir)
    if disk is None and (host_memory is not None or is_find):
        disk = machine.bytes_per_s[Rung.DISK] / 1e9
    transfers = Transfers(
        link * 1e9 / 8,
        None if disk is None else disk * 1e9,
        host_bytes=math.inf if host_memory is None else parse_bytes(host_memory),
    )
    chooser, drawn = Random(seed), DEFAULT_LENGTHS if lengths is None else read_lengths(lengths)
    window_s, step_s = math.inf if length_s is None else length_s, LONG_STEP_S * speed
    if journal is None:
        shapes, num_workers, memory_bytes = parse_models(models), 1, _default_memory(machine)
        names = list(map(str, shapes))
        workload, model_by_tenant = _workload(str(trace), names, drawn, chooser, begin_s, window_s)
        before = (
            read_counts(Path(str(trace)), begin_s, step_s) if prewarm and not _is_drawn(str(trace)) else {}
        )
    else:
        traffic = read_traffic(journal.expanduser())
        shapes, num_workers = traffic.add_models(machine), traffic.num_workers
        memory_bytes, workload = traffic.memory_bytes, traffic.trace.window(begin_s, window_s)
        model_by_tenant = {name: name for name in traffic.trace.tenants}
        before = count_requests(begin_s, traffic.trace.requests, step_s)
        recorded = f"{num_workers} workers of {size(memory_bytes)}, {len(traffic.trace.requests)} requests"
        err.print(f"recorded: {recorded}; {traffic.num_unfinished} without an end are left out")
    workload = workload.at_speed(speed).cut(max_input, max_output)
    num_workers = workers or num_workers
    setting = SimulationSetting(
        shapes=shapes,
        memory_bytes=memory_bytes if memory is None else parse_bytes(memory),
        num_workers=num_workers,
        num_nodes=math.ceil(num_workers / gpus_per_node),
        transfers=transfers,
        device_hour_price=device_hour_price,
        policy=policy,
        context=context,
        pace=Pace(first_token_target, pace),
        on_time=OnTime(on_time_s),
        first_token_s=first_token_target if pack_replicas else None,
        prewarming=Prewarming() if prewarm else None,
    )
    if not workload.requests:
        raise ConfigError(
            f"there are no requests in the window from {begin_s:g} s for {window_s:g} s; change `--begin` or "
            "`--length`"
        )
    if num_idle := len(shapes) - len(workload.tenants):
        err.print(f"{num_idle} of {len(shapes)} models get no requests: the window has too few tenants")
    if is_find:
        find(workload, setting, machine, gpus_per_node, target / 100, max_requests, as_json=as_json)
        return
    forecasts = _forecasts(workload, before, model_by_tenant) if prewarm else ()
    if is_compare:
        compare(workload, setting, machine, forecasts, as_json=as_json)
        return
    with step_bar("simulating") as advance:
        total = len(workload.requests)
        service = serve_trace(workload, setting, machine, lambda num: advance(num, total), forecasts)
    report, title = report_of(service), f"{workload.name} at {speed:g}x, {policy}"
    if page_path is not None:
        page_path.write_text(page(title, _facts(report, setting, machine), service), encoding="utf-8")
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "trace": workload.name,
                    "seed": seed,
                    "profile": profile,
                    "is_estimate": machine.is_estimate,
                    **asdict(report),
                }
            )
        )
    else:
        print_table(title, _facts(report, setting, machine))


def _default_memory(machine: Profile) -> int:
    device_bytes = machine.memory_bytes
    return 24 << 30 if device_bytes is None else int(EngineConfig().memory_fraction * device_bytes)


def _machine(profile: str, data_dir: Path) -> Profile:
    kind, _, model = profile.partition(":")
    return Profile.of(cost_profile(data_dir, model), profile) if kind == "snapshot" else Profile.load(profile)


def _is_drawn(trace: str) -> bool:
    return trace.split(":")[0] in ("poisson", "gamma")


def _workload(
    text: str, models: list[str], lengths: Lengths, chooser: Random, begin_s: float, length_s: float
) -> tuple[Trace, dict[str, str]]:
    """Return a workload of models, and the model of each tenant."""
    if not _is_drawn(text):
        path = Path(text)
        if is_counted(path):
            trace = read_trace(path, lengths, chooser, begin_s, length_s)
            return trace.mapped(models), trace.models_by_tenant(models)
        trace = read_trace(path, lengths, chooser)
        return trace.mapped(models).window(begin_s, length_s), trace.models_by_tenant(models)
    kind, *numbers = text.split(":")
    try:
        rate, cv = map(float, numbers if kind == "gamma" else (*numbers, "1"))
    except ValueError as error:
        raise ConfigError(f"a drawn workload is poisson:RATE or gamma:RATE:CV, given: `{text}`") from error
    length_s = DRAWN_S if math.isinf(length_s) else length_s
    rates = dict.fromkeys(models, rate / len(models))
    drawn = draw_trace(text, steady(rates, begin_s + length_s, cv), lengths, chooser)
    return drawn.window(begin_s, length_s), {}


def _forecasts(
    trace: Trace, before: Mapping[str, Sequence[float]], model_by_tenant: Mapping[str, str]
) -> tuple[DemandForecast, ...]:
    from hearth.forecast.replay import replay  # numpy, and perhaps torch

    past: dict[ModelId, list[float]] = {}
    for tenant, counts in before.items():
        if tenant in model_by_tenant:
            model = ModelId(model_by_tenant[tenant])
            past[model] = [
                sum(both) for both in zip(past.get(model, [0.0] * len(counts)), counts, strict=True)
            ]
    arrivals_s: dict[ModelId, list[float]] = {ModelId(name): [] for name in trace.tenants}
    for request in trace.requests:
        arrivals_s[ModelId(request.tenant)].append(request.arrival_s)
    return tuple(replay(past, arrivals_s, trace.requests[-1].arrival_s))


def _facts(report: SimulationReport, setting: SimulationSetting, machine: Profile) -> dict[str, object]:
    on_time, cold = setting.on_time, report.cold_starts
    return {
        "setting": describe(setting, machine),
        "requests": report.num_requests,
        "refused": ", ".join(f"{num} {reason}" for reason, num in report.refusals.items()) or 0,
        "simulated": precise(report.simulated_s),
        "first token": _spread(report.first_token_s),
        "completion": _spread(report.completion_s),
        "longest pause": _spread(report.longest_pause_s),
        "on time": (
            f"{report.requests_on_time:.1%} of requests, {report.tokens_on_time:.2%} of tokens "
            f"(arrival + {on_time.first_token_s:g} s + i / {on_time.tokens_per_s:g})"
        ),
        "output": f"{report.tokens_per_s:,.0f} tokens/s",
        "host memory": f"{size(report.host_bytes)} of weights, on the machine with most",
        "cold starts": (
            f"{sum(cold.values())} requests waited for a load"
            + "".join(f", {num} from {rung}" for rung, num in sorted(cold.items()))
        ),
        "turns": report.num_turns,
        "pauses": f"{report.pauses_per_request:.2f} per request",
        "moved": f"{size(report.bytes_moved)} in {report.num_loads} loads, bus busy {report.bus_share:.1%}",
        "fetched": f"{size(report.bytes_fetched)} from other machines, {size(report.bytes_read)} from disk",
        "GPU time": f"{precise(report.gpu_s)}, at most {report.most_gpus} at a time",
        **({} if report.cost is None else {"cost": f"{report.cost:.2f}"}),
        "GPU time by model": _largest(report.gpu_s_by_model, report.cost_by_model),
        **(
            {"GPU time by key": f"{_largest(report.gpu_s_by_key, report.cost_by_key)}, without idle time"}
            if report.gpu_s_by_key
            else {}
        ),
        "steps": f"{report.num_steps:,}, device busy {report.step_share:.1%}",
        "recomputed": f"{report.num_preempted} requests lost their KV",
    }


def _largest(gpu_s_by: Mapping[str, float], cost_by: Mapping[str, float | None]) -> str:
    """Describe the largest shares of GPU time, and their cost if there is a price."""
    ranked = sorted(gpu_s_by, key=lambda name: -gpu_s_by[name])
    shares = []
    for name in ranked[:MAX_SHARES]:
        cost = cost_by[name]
        shares.append(f"{name} {precise(gpu_s_by[name])}" + ("" if cost is None else f" (cost {cost:.2f})"))
    num_others = len(ranked) - len(shares)
    return ", ".join(shares) + (f", and {num_others} more" if num_others else "")


def _spread(values: Percentiles | None) -> str:
    if values is None:
        return "-"
    return (
        f"p50 {precise(values.p50)}, p90 {precise(values.p90)}, p99 {precise(values.p99)}, "
        f"max {precise(values.max)}"
    )
