"""Eight models of 47.8 GB in 24 GiB of one device, asked as a real trace has it: who waits, and for how long?

python -m bench.turns [--save] [--arms ARM ...] [--speeds X ...] [--seconds S] [--merge FILE ...] [--small]
                      [--journal FILE]

    turns           models take turns
    drain           a busy model ends what it has for those that have waited too long
    one-at-a-time   one model at a time, in order of arrival

Every arm has a service of its own, in which each model is asked before anything is measured, and every speed
is a run. A run is a line in the file of `--runs` as soon as it has ended. Runs in the files of `--merge` are
not repeated and are part of the result, so that what takes long can be measured in several calls: with
`--limit-s` no run begins that might end later.

The models need 48 GB in /dev/shm, where they are kept for the next call until `--clean`, and as much again of
host memory. `--small` is to see that everything runs: tiny models on a CPU, whose numbers mean nothing.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.report import HERE, arguments, emit, keep_journal, step, tell
from bench.turns.arms import Run, Traffic, arm_service, copy_rate
from bench.turns.models import Library
from bench.turns.outcome import measures
from bench.turns.setting import H200, H200_CURVE, SMALL, WARM_SPEED, Arm, Setting
from bench.turns.simulated import (
    SimulatedRun,
    TraceSimulator,
    compared,
    curve_lines,
    fastest,
    simulated_runs,
)
from bench.turns.table import Judged, Line, document, judge, measured_lines
from bench.turns.workload import load_trace, questions, warm_batches
from hearth.control.datadir import DataDir
from hearth.sim.arrivals import Lengths, RequestLength
from hearth.sim.profile import Profile
from hearth.sim.traces import Trace

#: What the simulator can tell.
SIMULATIONS = {
    "runs": "what was measured",
    "speeds": "the highest speeds",
    "models": "how many models a device serves",
}
TRACE = HERE / "data" / "lmsys_arena" / "requests.csv"


def main() -> None:
    began_s = time.perf_counter()
    options = parsed()
    setting = SMALL if options.small else H200
    library = Library(options.place, setting)
    if options.clean:
        library.clear()
        return
    runs = merged(options)
    todo = missing(options, runs)
    if todo:
        runs += measured(library, todo, options, began_s + options.limit_s)
        if options.journal is not None:
            keep_journal(DataDir(library.data_dir).journal_path, options.journal)
    if not runs and options.simulate is None:
        raise SystemExit("nothing was measured: raise --limit-s, or give earlier runs by --merge")
    judged = judge(runs)
    lines, simulated = list(measured_lines(judged)), []
    if options.simulate is not None:
        simulation = Simulation.of(setting, options)
        simulated = simulation.runs(judged)
        lines += [*compared(simulated), *simulation.lines()]
    result = {**document(judged, lines), "simulated": [each.as_json() for each in simulated]}
    emit("turns", {"is_small": options.small, **result}, save=options.save)


def parsed() -> Namespace:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument(
        "--arms",
        nargs="*",
        type=Arm,
        choices=list(Arm),
        default=list(Arm),
        metavar="ARM",
        help="none: measure nothing, only put results together",
    )
    parser.add_argument("--speeds", nargs="+", type=float, default=[3.0, 2.0, 1.0], metavar="X")
    parser.add_argument(
        "--seconds",
        nargs="+",
        type=float,
        default=[240.0],
        help="of the trace, in its own time; one for each speed, or one for all",
    )
    parser.add_argument("--cutoff-s", type=float, default=60.0, help="after the last arrival a run ends")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="by when this call is to have ended")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--runs", type=Path, default=Path("build/turns.jsonl"), help="gets a line per run")
    parser.add_argument("--merge", nargs="*", type=Path, default=[], metavar="FILE", help="earlier runs")
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"), help="where the models are kept")
    parser.add_argument("--clean", action="store_true", help="only remove the models")
    parser.add_argument(
        "--simulate",
        nargs="*",
        choices=list(SIMULATIONS),
        metavar="PART",
        help=f"also simulate, which needs no device: {', '.join(SIMULATIONS)}; by default all of them",
    )
    parser.add_argument("--profile", default="h200", help="of the simulator: a name or a file")
    parser.add_argument("--small", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keep that of the last arm, compressed")
    options = parser.parse_args()
    if len(options.seconds) == 1:
        options.seconds *= len(options.speeds)
    if len(options.seconds) != len(options.speeds):
        parser.error(f"--seconds takes one number, or one for each of {len(options.speeds)} speeds")
    if options.small and options.save:
        parser.error("numbers of a small run mean nothing: leave out --save")
    if options.small and options.simulate is not None:
        parser.error("there is no profile of the small models: leave out --simulate")
    return options


def missing(options: Namespace, runs: Sequence[Run]) -> dict[Arm, list[Traffic]]:
    """Return what is asked for and has not been measured before, by arm."""
    traffics = [
        Traffic(trace_name(options.trace), seconds, speed, options.cutoff_s)
        for speed, seconds in zip(options.speeds, options.seconds, strict=True)
    ]
    done = {(run.arm, run.traffic) for run in runs}
    by_arm = {arm: [each for each in traffics if (arm, each) not in done] for arm in options.arms}
    return {arm: left for arm, left in by_arm.items() if left}


def measured(
    library: Library, todo: Mapping[Arm, Sequence[Traffic]], options: Namespace, until_s: float
) -> Iterator[Run]:
    """Yield the runs that are sure to end in time; each is in the file of runs by then."""
    start_s = library.setting.start_s
    for arm, traffics in todo.items():
        most_s = [f"{traffic.most_s:.0f} s at {traffic.speed:g}x" for traffic in traffics]
        tell(f"{arm}: about {start_s:.0f} s to start, then at most {', '.join(most_s)}")
    options.runs.parent.mkdir(parents=True, exist_ok=True)
    setting, measured_s = library.setting, max(options.seconds)
    warm = load_trace(options.trace, setting, setting.warm_window_s, begin_s=measured_s).at_speed(WARM_SPEED)
    library.make()
    with step("the rate to the device"):
        bytes_per_s = copy_rate(library.setting)
    for arm, traffics in todo.items():
        fitting = [each for each in traffics if time.perf_counter() + start_s + each.most_s <= until_s]
        if not fitting:
            tell(f"{arm}: left out, for it would not end in time")
            continue
        with (
            step(f"{arm}, in all"),
            arm_service(arm, library, bytes_per_s, questions(warm, setting)) as service,
        ):
            for traffic in fitting:
                if time.perf_counter() + traffic.most_s > until_s:
                    tell(f"{arm} at {traffic.speed:g}x: left out, for it would not end in time")
                    continue
                trace = load_trace(options.trace, setting, traffic.window_s)
                asked = questions(trace.at_speed(traffic.speed), setting)
                with step(f"{arm} at {traffic.speed:g}x, {len(asked)} requests"):
                    run = service.run(traffic, asked)
                append_run(options.runs, run)
                tell(told(run))
                yield run


@dataclass(frozen=True, slots=True)
class Simulation:
    """What is asked of the simulator, on the trace and the models of the benchmark."""

    setting: Setting
    simulator: TraceSimulator
    trace: Trace
    profile: Profile
    cutoff_s: float
    parts: Sequence[str]  #: of `SIMULATIONS`

    @staticmethod
    def of(setting: Setting, options: Namespace) -> Simulation:
        assert setting.memory_bytes is not None, "only small settings leave it open"
        profile = Profile.load(options.profile)
        return Simulation(
            setting,
            TraceSimulator(
                *(setting.shapes, setting.memory_bytes, options.cutoff_s, profile), warm_batches(setting)
            ),
            load_trace(options.trace, setting, math.inf),  # a short one would end before anybody is late
            profile,
            options.cutoff_s,
            options.simulate or list(SIMULATIONS),
        )

    def runs(self, judged: Sequence[Judged]) -> list[SimulatedRun]:
        """Simulate what was measured, if that is asked for."""
        if "runs" not in self.parts:
            return []
        with step(f"simulating {SIMULATIONS['runs']}"):
            return simulated_runs(judged, self.simulator, self.trace, self.setting.warm_window_s)

    def lines(self) -> Iterator[Line]:
        """Yield what else the simulator is asked for."""
        asked = self.trace.requests
        lengths = Lengths(tuple(RequestLength(one.num_input_tokens, one.num_output_tokens) for one in asked))
        others = {
            "speeds": fastest(self.simulator, self.trace),
            "models": curve_lines(H200_CURVE, lengths, self.cutoff_s, self.profile),
        }
        for name in self.parts:
            if name in others:
                with step(f"simulating {SIMULATIONS[name]}"):
                    yield from others[name]


def read_runs(path: Path) -> list[Run]:
    """Return the runs of a file."""
    return [msgspec.json.decode(line, type=Run) for line in path.read_bytes().splitlines()]


def merged(options: Namespace) -> list[Run]:
    """Return earlier runs; those of another trace must not stand beside the new ones."""
    runs = [run for path in options.merge for run in read_runs(path)]
    wanted = trace_name(options.trace)
    for run in runs:
        if run.traffic.trace != wanted:
            raise SystemExit(f"--merge takes runs of the trace {wanted}, given: {run.traffic.trace}")
    return runs


def append_run(path: Path, run: Run) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(run) + b"\n")


def trace_name(path: Path) -> str:
    """Return the name of a trace: many files are called alike, but not their folders."""
    return f"{path.parent.name}/{path.name}"


def told(run: Run) -> str:
    """Return the most important figures of a run in one line."""
    seen = measures(run.outcomes, run.seconds)
    first = ", ".join(f"{p} {seen.first_token_s[p]:.3f} s" for p in ("p50", "p90", "p99"))
    return (
        f"{run.arm} at {run.traffic.speed:g}x: first token {first}; on time {seen.requests_on_time:.1%} of "
        f"requests, {seen.tokens_on_time:.1%} of tokens; {seen.tokens_per_s:.0f} tokens/s; unfinished: "
        f"{seen.num_unfinished}, errors: {seen.errors or 0}"
    )


if __name__ == "__main__":
    main()
