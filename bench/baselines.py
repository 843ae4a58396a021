"""What do Hearth's mechanisms save, and is loading ahead worth it? Simulated, with costs of a measured H200.

    python -m bench.baselines TRACES [--only functions servegen] [--models 24] [--processes 2] [--save]

TRACES is a folder with `servegen_client_rate_10min.csv.gz`, `azure_llm_2023_conv.csv.gz` and
`azure_functions_2019_1250f_1day_permin.csv.gz`. Brain, batcher, turns and memory policies are those of the
service, of all systems (`sim/variants.py`). Requests are drawn from the rates or counts of a trace, with
Azure's lengths of conversations, answers cut to `MAX_OUTPUT` tokens: starts are compared. A tenant has
`REQUESTS_PER_DAY` on average, as its trace spreads them.

- `functions`: the last 6 of 24 hours, forecast from the 18 hours before, of functions drawn at random. One
  that has fewer requests keeps all.
- `servegen`: the last of 14 days, forecast from the 13 days before. Clients drawn at random are the tenants.

A device without warm models is given back, with all weights on it, and costs nothing until it is needed
again. On time are requests with every token by arrival + 1 s + i / 10 s.

- Rows `at an equal target` have the least GPU time of all values of `keep_alive` at which `ON_TIME` of the
  requests are on time. A system that reaches that with none has the one that comes closest, and is marked as
  `late`.
- Rows `at no more GPU time` have the fewest cold starts of all values of `keep_alive` at which a system holds
  GPUs no longer than Hearth does at the default. Systems that need more with all of them are left out.
- All other rows are at the default `keep_alive`. `with pre-warming` has the default budget.
"""

from __future__ import annotations

import csv
import gzip
import math
from argparse import RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random

import numpy as np

from bench.report import Row, arguments, emit, step, tell
from hearth.core.forecast_messages import LONG_STEP_S
from hearth.core.sizes import WantedLimits
from hearth.core.types import ModelId, Rung
from hearth.forecast.replay import replay
from hearth.forecast.series import DAY_S
from hearth.policy.fleet.events import DemandForecast, Prewarming
from hearth.sim.arrivals import CountedPeriod, Lengths, Period, RatedPeriod
from hearth.sim.network import Transfers
from hearth.sim.profile import Profile
from hearth.sim.report import SimulationReport, report_of
from hearth.sim.service import SimulatedService
from hearth.sim.setting import SimulationSetting
from hearth.sim.trace_files import HOUR_S, MINUTE_S, SERVEGEN_S, read_lengths
from hearth.sim.traces import Trace, TracedRequest
from hearth.sim.variants import OWN, variants

REQUESTS_PER_DAY = {"functions": 200.0, "servegen": 100.0}
BEGIN_S = {"functions": 18 * HOUR_S, "servegen": 13 * DAY_S}
LENGTH_S = {"servegen": DAY_S, "functions": 6 * HOUR_S}
SHAPES = ("7B", "13B")
MEMORY_BYTES, CONTEXT, HOST_BYTES = 126 << 30, 8192, 256 << 30
GPUS_PER_NODE, LINK_BYTES_PER_S = 8, 25e9 / 8
KEEP_ALIVES_S, DEFAULT_KEEP_ALIVE_S = (60.0, 150.0, 220.0, 300.0), 300.0
FIRST_TOKEN_S, ON_TIME, MAX_OUTPUT = 0.5, 0.95, 32
KEPT, STATIC, PREWARMED = "keep-alive", "static", "with pre-warming"
#: Systems that are simulated with all values of `keep_alive`; static ones have none, others the ends.
DIALLED = (OWN, PREWARMED, KEPT)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    trace: Trace
    shapes: Mapping[ModelId, str]
    forecasts: tuple[DemandForecast, ...]


@dataclass(frozen=True, slots=True)
class Run:
    workload: str
    system: str
    keep_alive_s: float


def main() -> None:
    command = arguments(__doc__)
    command.formatter_class = RawDescriptionHelpFormatter
    command.add_argument("traces", type=Path, metavar="TRACES")
    command.add_argument("--only", choices=list(BEGIN_S), nargs="+", default=list(BEGIN_S))
    command.add_argument("--models", type=int, default=24)
    command.add_argument("--processes", type=int, default=2)
    options = command.parse_args()
    for name in options.only:
        with step(f"{name}: forecasts"):
            workload = read_workload(options.traces, name, options.models)
        done = simulate_all(workload, options.processes)
        runs = [{**asdict(run), **figures(report)} for run, report in done.items()]
        rows = [asdict(row) for row in rows_of(name, done)]
        emit(f"baselines_{name}", {"rows": rows, "runs": runs}, save=options.save)


# Workloads.


def read_workload(traces: Path, name: str, num_models: int) -> Workload:
    chooser = Random(0)
    periods = (
        _servegen(traces, num_models, chooser)
        if name == "servegen"
        else _functions(traces, num_models, chooser)
    )
    begin_s, length_s, lengths = BEGIN_S[name], LENGTH_S[name], _lengths(traces)
    shapes, requests = dict[ModelId, str](), list[TracedRequest]()
    before, arrivals_s = dict[ModelId, list[float]](), dict[ModelId, list[float]]()
    num_before = int(begin_s // LONG_STEP_S)
    for number, of_model in enumerate(periods.values()):
        model = ModelId(f"model-{number}")
        shapes[model] = SHAPES[number % len(SHAPES)]
        times_s = sorted(at_s for period in of_model for at_s in period.draw_arrivals(chooser))
        steps = [int(at_s // LONG_STEP_S) for at_s in times_s if at_s < begin_s]
        before[model] = np.bincount(steps, minlength=num_before).tolist()
        arrivals_s[model] = [at_s - begin_s for at_s in times_s if begin_s <= at_s < begin_s + length_s]
        for at_s in arrivals_s[model]:
            length = lengths.draw(chooser)
            requests.append(TracedRequest(at_s, model, length.num_input_tokens, length.num_output_tokens))
    forecasts = tuple(replay(before, arrivals_s, length_s))
    tell(f"{name}: {len(requests)} requests for {len(shapes)} models, {len(forecasts)} forecasts")
    return Workload(name, Trace.of(name, requests).cut(max_output_tokens=MAX_OUTPUT), shapes, forecasts)


def _servegen(traces: Path, num_models: int, chooser: Random) -> Mapping[str, Sequence[Period]]:
    lines = defaultdict[str, list[dict[str, str]]](list)
    for line in _lines(traces / "servegen_client_rate_10min.csv.gz"):
        lines[f"{line['model']}/{line['client']}"].append(line)
    whole = [name for name, of in lines.items() if float(of[-1]["t_s"]) >= BEGIN_S["servegen"]]
    periods = {}
    for name in chooser.sample(sorted(whole), num_models):
        rates = [float(line["rate_rps"]) for line in lines[name]]
        num_days = (BEGIN_S["servegen"] + LENGTH_S["servegen"]) / DAY_S
        scale = REQUESTS_PER_DAY["servegen"] * num_days / (SERVEGEN_S * sum(rates))
        periods[name] = [
            RatedPeriod(name, float(line["t_s"]), SERVEGEN_S, scale * rate, float(line["cv"]))
            for line, rate in zip(lines[name], rates, strict=True)
            if rate
        ]
    return periods


def _functions(traces: Path, num_models: int, chooser: Random) -> Mapping[str, Sequence[Period]]:
    counts = {
        line["func"]: [int(line[str(minute)]) for minute in range(1, 1441)]
        for line in _lines(traces / "azure_functions_2019_1250f_1day_permin.csv.gz")
    }
    asked = sorted(name for name, of in counts.items() if sum(map(bool, of)) >= 12)
    return {
        name: [
            CountedPeriod(name, minute * MINUTE_S, MINUTE_S, num)
            for minute, count in enumerate(counts[name])
            if (num := _thinned(count, sum(counts[name]), chooser))
        ]
        for name in chooser.sample(asked, num_models)
    }


def _thinned(count: int, total: int, chooser: Random) -> int:
    """Return how many of the requests of a minute are left; functions that have few keep all."""
    share = min(1.0, REQUESTS_PER_DAY["functions"] / total)
    whole, part = divmod(count * share, 1.0)
    return int(whole) + (chooser.random() < part)


def _lengths(traces: Path) -> Lengths:
    return read_lengths(traces / "azure_llm_2023_conv.csv.gz")


def _lines(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt") as file:
        yield from csv.DictReader(file)


# Runs.


def setting_of(workload: Workload, keep_alive_s: float) -> SimulationSetting:
    num_gpus = len(workload.shapes) + GPUS_PER_NODE  # as many as any system may need
    disk_bytes_per_s = _machine().bytes_per_s[Rung.DISK]
    return SimulationSetting(
        workload.shapes,
        MEMORY_BYTES,
        num_workers=num_gpus,
        num_nodes=-(-num_gpus // GPUS_PER_NODE),
        transfers=Transfers(LINK_BYTES_PER_S, disk_bytes_per_s, host_bytes=HOST_BYTES),
        gives_back=True,
        context=CONTEXT,
        wanted_limits=WantedLimits(None, None, block_tokens=256),
        keep_alive_s=keep_alive_s,
        first_token_s=FIRST_TOKEN_S,
    )


def systems_of(workload: Workload, keep_alive_s: float) -> Mapping[str, SimulationSetting]:
    setting = setting_of(workload, keep_alive_s)
    return {**variants(setting), PREWARMED: replace(setting, prewarming=Prewarming())}


def simulate_all(workload: Workload, num_processes: int) -> dict[Run, SimulationReport]:
    systems = systems_of(workload, DEFAULT_KEEP_ALIVE_S)
    runs = [
        Run(workload.name, system, seconds)
        for seconds, system in product(KEEP_ALIVES_S, systems)
        if seconds == DEFAULT_KEEP_ALIVE_S
        or system in DIALLED
        or (seconds == KEEP_ALIVES_S[0] and system != STATIC)
    ]
    done = {}
    with ProcessPoolExecutor(num_processes, initializer=_begin, initargs=(workload,)) as processes:
        for run, report in zip(runs, processes.map(_simulate, runs), strict=True):
            tell(f"{len(done) + 1} of {len(runs)}: {run}: {told(report)}")
            done[run] = report
    return done


_workload: Workload


def _begin(workload: Workload) -> None:
    global _workload
    _workload = workload


def _simulate(run: Run) -> SimulationReport:
    setting = systems_of(_workload, run.keep_alive_s)[run.system]
    service = SimulatedService(setting, _machine())
    service.ask(_workload.trace.requests)
    for event in _workload.forecasts if setting.prewarming is not None else ():
        service.schedule(event)
    service.run()
    service.check()
    return report_of(service)


@cache
def _machine() -> Profile:
    return Profile.load("h200")


# Figures.


def figures(report: SimulationReport) -> dict[str, object]:
    return {
        "num_requests": report.num_requests,
        "num_refused": report.num_refused,
        "on_time": report.requests_on_time,
        "first_token_s": None if report.first_token_s is None else asdict(report.first_token_s),
        "cold_starts": report.cold_starts,
        "num_prewarmed": report.num_prewarmed,
        "gpu_s": report.gpu_s,
        "idle_gpu_s": report.idle_gpu_s,
        "most_gpus": report.most_gpus,
        "bytes_read": report.bytes_read,
        "bytes_fetched": report.bytes_fetched,
    }


def told(report: SimulationReport) -> str:
    return (
        f"{report.gpu_s:.0f} GPU-s, {report.idle_gpu_s:.0f} idle, {report.requests_on_time:.2%} on time, "
        f"{cold_starts(report)} cold, {report.num_prewarmed} ahead, at most {report.most_gpus} GPUs"
    )


def cold_starts(report: SimulationReport) -> int:
    return sum(report.cold_starts.values())


def cold_percent(report: SimulationReport) -> float:
    return 100 * cold_starts(report) / report.num_requests


def rows_of(name: str, done: Mapping[Run, SimulationReport]) -> Iterator[Row]:
    best: dict[str, SimulationReport] = {}
    for system in dict.fromkeys(run.system for run in done):
        reports = [report for run, report in done.items() if run.system == system]
        on_time = [report for report in reports if report.requests_on_time >= ON_TIME]
        if on_time:
            best[system] = min(on_time, key=lambda report: report.gpu_s)
        else:
            best[f"{system}, late"] = max(reports, key=lambda report: report.requests_on_time)
    target = f"{name}: {{}} at an equal target"
    yield _row(target.format("GPU time"), "s", {system: one.gpu_s for system, one in best.items()})
    yield _row(target.format("idle GPU time"), "s", {system: one.idle_gpu_s for system, one in best.items()})
    most_s = done[Run(name, OWN, DEFAULT_KEEP_ALIVE_S)].gpu_s
    fewest: dict[str, float] = {}
    for run, report in done.items():
        if report.gpu_s <= most_s:
            fewest[run.system] = min(fewest.get(run.system, math.inf), cold_percent(report))
    yield _row(f"{name}: requests that meet a cold start at no more GPU time", "%", fewest)
    alike = {run.system: report for run, report in done.items() if run.keep_alive_s == DEFAULT_KEEP_ALIVE_S}
    for measure, unit, value_of in MEASURES:
        yield _row(f"{name}: {measure}", unit, {system: value_of(one) for system, one in alike.items()})


MEASURES: tuple[tuple[str, str, Callable[[SimulationReport], float]], ...] = (
    ("requests that meet a cold start", "%", cold_percent),
    ("requests on time", "%", lambda one: 100 * one.requests_on_time),
    ("GPU time", "s", lambda one: one.gpu_s),
)


def _row(measure: str, unit: str, values: Mapping[str, float]) -> Row:
    own = next(system for system in (OWN, f"{OWN}, late") if system in values)
    peers = {system: value for system, value in values.items() if system != own}
    return Row(measure, unit, values[own], peers=peers, is_comparable=False)


if __name__ == "__main__":
    main()
