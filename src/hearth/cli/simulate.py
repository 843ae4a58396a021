"""`hearth simulate`: how a service would fare with a workload, by its own policies. Starts no service."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from hearth.cli.console import DEFAULT_DATA_DIR, AsJson, DataDirectory, app, err, print_table
from hearth.cli.figures import precise, size
from hearth.cli.snapshot import cost_profile
from hearth.core.config import parse_bytes
from hearth.core.errors import ConfigError
from hearth.core.types import Pace
from hearth.sim.arrivals import Lengths, draw_trace, steady
from hearth.sim.profile import Profile
from hearth.sim.report import Percentiles, SimulationReport
from hearth.sim.run import simulate as run_simulation
from hearth.sim.setting import OnTime, Policy, SimulationSetting, parse_models
from hearth.sim.trace_files import is_counted, read_lengths, read_trace
from hearth.sim.traces import Trace

#: Of requests whose lengths nobody tells.
DEFAULT_LENGTHS = Lengths.fixed(512, 128)
#: How long arrivals are drawn for where no window is given.
DRAWN_S = 600.0


@app.command(rich_help_panel="This machine")
def simulate(
    trace: Annotated[
        str,
        typer.Option("--trace", metavar="TRACE", help="What arrives: a file, poisson:RATE or gamma:RATE:CV."),
    ],
    models: Annotated[
        str, typer.Option("--models", metavar="SHAPES", help="Such as 1b,7b,3b or 7b*40.")
    ] = "7b",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Devices.")] = 1,
    memory: Annotated[str, typer.Option("--memory", metavar="SIZE", help="Of each worker.")] = "24GiB",
    policy: Annotated[
        Policy,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="How models that do not fit together share a worker: turns, drain or one-at-a-time.",
        ),
    ] = Policy.TURNS,
    profile: Annotated[
        str,
        typer.Option(
            "--profile",
            metavar="NAME|FILE",
            help="The machine: h200, cpu2, a measured file, or snapshot:MODEL for this one.",
        ),
    ] = "h200",
    context: Annotated[int, typer.Option("--context", min=2, help="Tokens of prompt and answer.")] = 2048,
    begin_s: Annotated[float, typer.Option("--begin", min=0, metavar="SECONDS", help="Of the trace.")] = 0.0,
    length_s: Annotated[
        float | None, typer.Option("--length", metavar="SECONDS", help="Of the trace, at its own speed.")
    ] = None,
    speed: Annotated[float, typer.Option("--speed", help="Arrivals come so many times as fast.")] = 1.0,
    max_input: Annotated[
        int | None, typer.Option("--max-input", metavar="TOKENS", help="Longer prompts are cut.")
    ] = None,
    max_output: Annotated[
        int | None, typer.Option("--max-output", metavar="TOKENS", help="Longer answers are cut.")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option("--lengths", metavar="FILE", help="Draw lengths from it where the trace has none."),
    ] = None,
    first_token_target: Annotated[
        float, typer.Option("--first-token-target", min=0, metavar="SECONDS")
    ] = 0.5,
    pace: Annotated[
        float, typer.Option("--pace", min=0, metavar="TOKENS/S", help="0: nobody reads along.")
    ] = 10.0,
    on_time_s: Annotated[
        float,
        typer.Option("--on-time", min=0, metavar="SECONDS", help="The first token counts as late after it."),
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of what is drawn.")] = 0,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Say how a service would fare with a workload, in virtual time.

    The brain, the turns, the batcher and the policies of memory are those of a service; only the device is
    simulated, by a measured profile of a machine. With --profile snapshot:MODEL that is what a worker here
    has measured of a model, which is the one shape of the profile, under its name: see `hearth snapshot`. A
    shape is one of the profile, or a size such as 13b. The
    tenants of a trace are mapped to the models by how busy they are, the busiest to the first, and behind the
    last model from the first again. Lengths that a trace does not tell are drawn from --lengths, or are 512
    tokens of prompt and 128 of answer. Token i is on time if it comes by the arrival + --on-time + i / 10 s.

    [bold]Examples[/bold]

      hearth simulate --trace arena.csv --models 1b,7b,3b --length 240 --speed 3

      hearth simulate --trace poisson:2 --models "7b*10" --policy drain

      hearth simulate --trace gamma:2:4 --models "3b*20" --workers 4 --json

      hearth simulate --trace poisson:1 --profile snapshot:mine --models "mine*4"
    """
    setting = SimulationSetting(
        shapes=parse_models(models),
        memory_bytes=parse_bytes(memory),
        num_workers=workers,
        policy=policy,
        context=context,
        pace=Pace(first_token_target, pace),
        on_time=OnTime(on_time_s),
    )
    chooser, drawn = Random(seed), DEFAULT_LENGTHS if lengths is None else read_lengths(lengths)
    names = [str(model) for model in setting.shapes]
    window_s = math.inf if length_s is None else length_s
    workload = _workload(trace, names, drawn, chooser, begin_s, window_s)
    workload = workload.at_speed(speed).cut(max_input, max_output)
    if not workload.requests:
        raise ConfigError(f"no request of `{trace}` is in the window from {begin_s:g} s for {window_s:g} s")
    if num_idle := len(names) - len(workload.tenants):
        err.print(
            f"{num_idle} of {len(names)} models get no request: the trace has too few tenants in its window"
        )
    machine = _machine(profile, data_dir)
    columns = ("simulating", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as shown:
        task = shown.add_task("", total=len(workload.requests))
        report = run_simulation(
            workload, setting, machine, lambda num_answered: shown.update(task, completed=num_answered)
        )
    if as_json:
        typer.echo(json.dumps({"trace": workload.name, "seed": seed, "profile": profile, **asdict(report)}))
    else:
        print_table(f"{workload.name} at {speed:g}x, {policy}", _facts(report, setting.on_time))


def _machine(profile: str, data_dir: Path) -> Profile:
    kind, _, model = profile.partition(":")
    return Profile.of(cost_profile(data_dir, model), profile) if kind == "snapshot" else Profile.load(profile)


def _workload(
    text: str, models: list[str], lengths: Lengths, chooser: Random, begin_s: float, length_s: float
) -> Trace:
    """Return the requests of a file or drawn ones, for models."""
    kind, *numbers = text.split(":")
    if kind not in ("poisson", "gamma"):
        path = Path(text)
        if is_counted(path):
            return read_trace(path, lengths, chooser, begin_s, length_s).mapped(models)
        return read_trace(path, lengths, chooser).mapped(models).window(begin_s, length_s)
    try:
        rate, cv = map(float, numbers if kind == "gamma" else (*numbers, "1"))
    except ValueError as error:
        raise ConfigError(f"`--trace` takes poisson:RATE or gamma:RATE:CV, given: `{text}`") from error
    length_s = DRAWN_S if math.isinf(length_s) else length_s
    rates = dict.fromkeys(models, rate / len(models))
    return draw_trace(text, steady(rates, begin_s + length_s, cv), lengths, chooser).window(begin_s, length_s)


def _facts(report: SimulationReport, on_time: OnTime) -> dict[str, object]:
    return {
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
        "turns": report.num_turns,
        "pauses": f"{report.pauses_per_request:.2f} a request",
        "moved": f"{size(report.bytes_moved)} by {report.num_loads} loads, bus in use {report.bus_share:.1%}",
        "steps": f"{report.num_steps:,}, device in use {report.step_share:.1%}",
        "recomputed": f"{report.num_preempted} requests lost their KV",
    }


def _spread(values: Percentiles | None) -> str:
    if values is None:
        return "-"
    return (
        f"p50 {precise(values.p50)}, p90 {precise(values.p90)}, p99 {precise(values.p99)}, "
        f"max {precise(values.max)}"
    )
