"""What does scaling out cost, and how soon does it serve? Simulated, with the costs of a measured H200.

    python -m bench.scale_out [--only bursts|staged|multicast|traces] [--save]

Every device is in a machine of its own. Brain, batcher and schedules are those of the service.

- `bursts`: requests for a model that no device has come within a second: 512 prompt tokens, 128 new ones.
  One machine has the model in host memory, all have it on disk (5 GB/s). The peer reads its own disk.
- `staged`: the same where each machine reads its own disk, with `service.staged_start_gain` of 1 s. The peer
  waits for whole replicas.
- `multicast`: a model of 26 GB goes from one machine to N - 1. The bound is b + ceil(log2 N) - 1 part times.
- `traces`: half an hour of Azure's code and conversation traces for one model. An idle device is given
  back after `keep_alive`, and another tenant takes its memory; host memory keeps the model for 15 s more.
  GPU time is the time from the order to load until the device is given back. Each system has the least of all
  pairs of `first_token_target` and `keep_alive` at which the p90 of first tokens meets the target. If none
  does, it has the least of all pairs, and is marked as `late`.

The peers have the same brain and differ in where weights come from (lambda-Scale, section 7.5): FaaSNet
down binary trees and NCCL along chains, after 0.3 s, from devices that have the model, else from disk;
ServerlessLLM from host memory that still has it, else from disk. Two more also have the copy of the first
machine: they differ in the schedule alone. `no load time` has weights at once. `clairvoyant` knows when
that one needs devices: each is loaded ahead, over its bus alone, or kept since it was needed last if that
takes less of its time.
"""

from __future__ import annotations

import math
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from random import Random

import msgspec

from bench.cluster.schedules import chain, tree
from bench.report import HERE, Row, arguments, emit, keep, tell
from hearth.core.sizes import WantedLimits
from hearth.core.types import LOCAL, ModelId, NodeId, Rung
from hearth.policy.multicast.parts import SEND_S
from hearth.policy.multicast.schedules import Schedule, Send
from hearth.sim.arrivals import Lengths
from hearth.sim.network import SimulatedNetwork, Transfers
from hearth.sim.profile import Profile
from hearth.sim.report import SimulationReport, report_of
from hearth.sim.service import SimulatedService
from hearth.sim.setting import Policy, SimulationSetting
from hearth.sim.trace_files import read_trace
from hearth.sim.traces import Trace, TracedRequest

MODEL = ModelId("model")
MEMORY_BYTES, CONTEXT, MAX_QUEUE = 130 << 30, 8192, 10_000
#: As large as Llama-3-70B in 8 bits, with grouped queries.
LARGE, LARGE_BYTES, LARGE_KV_BYTES = "70B, 8 bits", 70 * 10**9, 327_680
GBIT_BYTES, DISK_BYTES_PER_S, KEEP_S = 1e9 / 8, 5e9, 15.0
DEVICE_HOUR_PRICE = 4.0

BURSTS, LINKS, NUM_BURST_GPUS = (50, 200, 700), (25, 100, 400), 8
BURST_SHAPES, BURST_TOKENS = ("7B", "13B", LARGE), (512, 128)
MULTICAST_NODES, MULTICAST_BYTES, NUM_LAYERS = (2, 4, 8, 16, 64), 26 * 10**9, 28
NUM_GPUS, WINDOW_S = 16, 1800.0
#: Pairs of `service.first_token_target` and `keep_alive` for systems that start from a kept copy, for those
#: that start from disk, and without load times.
KEPT_DIALS = tuple(product((0.35, 0.5, 0.75), (0.25,)))
DISK_DIALS = tuple(product((0.35, 0.5, 0.75), (30.0, 60.0, 300.0)))
NO_LOADS_DIALS = tuple(product((0.35, 0.5, 0.75, 1.0, 1.25), (0.0,)))


@dataclass(frozen=True, slots=True)
class Workload:
    trace: str
    begin_s: float
    shape: str
    target_s: float  #: of the p90 of first tokens

    @property
    def name(self) -> str:
        return f"{self.trace}, {self.shape}, p90 at most {self.target_s:g} s"


WORKLOADS = (
    Workload("code", 540.0, "13B", 1.0),
    Workload("conv", 1020.0, LARGE, 1.0),
)


def in_groups(schedule: Callable[[int, int], Schedule]) -> Callable[[int, int, int], Schedule]:
    """Return a schedule in which each source has a group of its own, as `multicast` forms them."""

    def grouped(num_sources: int, num_receivers: int, num_parts: int) -> Schedule:
        num_nodes = num_sources + num_receivers
        groups = [
            (source, *range(num_sources + source, num_nodes, num_sources)) for source in range(num_sources)
        ]
        sends = [
            Send(send.part, group[send.source], group[send.target])
            for group in groups
            for send in schedule(len(group), num_parts).sends
        ]
        return Schedule(num_parts, tuple(groups), tuple(sends))

    return grouped


def hearth(gbit: float = 400) -> Transfers:
    return Transfers(gbit * GBIT_BYTES, DISK_BYTES_PER_S, keep_s=KEEP_S)


OWN_DISK = Transfers(disk_bytes_per_s=DISK_BYTES_PER_S, keep_s=KEEP_S, is_origin_kept=False, uses_peers=False)
SYSTEMS: Mapping[str, Transfers] = {
    "Hearth": hearth(),
    "FaaSNet": replace(hearth(), keep_s=0.0, is_origin_kept=False, schedule=in_groups(tree)),
    "NCCL": replace(hearth(), keep_s=0.0, is_origin_kept=False, schedule=in_groups(chain), setup_s=0.3),
    "ServerlessLLM": OWN_DISK,
    "FaaSNet's tree alone": replace(hearth(), schedule=in_groups(tree)),
    "NCCL's chain alone": replace(hearth(), schedule=in_groups(chain), setup_s=0.3),
}
NO_LOADS, CLAIRVOYANT = "no load time", "clairvoyant"


@dataclass(frozen=True, slots=True)
class Run:
    system: str
    workload: Workload
    first_token_s: float
    keep_alive_s: float

    def simulate(self) -> SimulationReport:
        is_ideal = self.system in (NO_LOADS, CLAIRVOYANT)
        service = _simulate(
            _window(self.workload.trace, self.workload.begin_s),
            self.workload.shape,
            hearth(1e9) if is_ideal else SYSTEMS[self.system],
            NUM_GPUS,
            self.first_token_s,
            self.keep_alive_s,
            is_ideal=is_ideal,
        )
        if self.system == CLAIRVOYANT:
            real = _machine(is_ideal=False)
            load_s = real.shape(self.workload.shape).weights_bytes / real.bytes_per_s[Rung.HOST]
            service.gpu_s += sum(min(gap_s, load_s) for gap_s in service.fleet.gpu_time.gaps_s)
        return report_of(service)


def main() -> None:
    command = arguments(__doc__)
    command.formatter_class = RawDescriptionHelpFormatter
    command.add_argument("--only", choices=["bursts", "staged", "multicast", "traces"], nargs="*")
    command.add_argument("--processes", type=int, default=2)
    options = command.parse_args()
    only = options.only or ["bursts", "staged", "multicast", "traces"]
    rows: list[Row] = []
    details: dict[str, object] = {}
    if "multicast" in only:
        rows += multicasts()
    if "bursts" in only:
        rows += bursts()
    if "staged" in only:
        rows += staged()
    if "traces" in only:
        for workload in WORKLOADS:
            found, details[workload.name] = compare(workload, options.processes)
            rows += found
            if options.save:
                keep("scale_out", {"rows": [asdict(row) for row in rows], "runs": details})
    emit("scale_out", {"rows": [asdict(row) for row in rows], "runs": details}, save=options.save)


def multicasts() -> Iterator[Row]:
    for gbit, num_nodes in product(LINKS, MULTICAST_NODES):
        nodes = [LOCAL, *(NodeId(f"node-{number}") for number in range(1, num_nodes))]
        network = SimulatedNetwork(Transfers(gbit * GBIT_BYTES), NUM_LAYERS)
        network.find(MODEL, LOCAL, 0.0)
        fetched = network.fetch(MODEL, nodes[1:], MULTICAST_BYTES, 0.0)
        num_parts = len(fetched[nodes[1]].parts_s)
        part_s = MULTICAST_BYTES / num_parts / (gbit * GBIT_BYTES) + SEND_S
        bound_s = (num_parts + math.ceil(math.log2(num_nodes)) - 1) * part_s
        measure = f"26 GB, 1 -> {num_nodes - 1} machines, {gbit} Gbit/s, {num_parts} parts"
        yield Row(measure, "s", max(one.arrived_s for one in fetched.values()), bound_s)


def bursts() -> Iterator[Row]:
    for shape, num_requests in product(BURST_SHAPES, BURSTS):
        own_s = _p90_s(_burst(num_requests, shape, OWN_DISK))
        for gbit in LINKS:
            measure = f"{num_requests} requests, {shape}, {gbit} Gbit/s: p90 of first tokens"
            aim = "a fifth of the peer" if gbit == 400 else None
            value_s = _p90_s(_burst(num_requests, shape, hearth(gbit)))
            tell(f"{measure}: {value_s:.2f} s, own disk {own_s:.2f} s, {own_s / value_s:.1f} times")
            yield Row(measure, "s", value_s, aim=aim, peers={"own disk": own_s})


def staged() -> Iterator[Row]:
    for shape, num_requests in product(BURST_SHAPES, BURSTS):
        whole = _burst(num_requests, shape, OWN_DISK)
        stages = _burst(num_requests, shape, OWN_DISK, staged_gain_s=1.0)
        for name, value_of in (("p50", _p50_s), ("p90", _p90_s)):
            measure = f"{num_requests} requests, {shape}, own disks: {name} of first tokens in stages"
            tell(f"{measure}: {value_of(stages):.2f} s, whole replicas {value_of(whole):.2f} s")
            yield Row(measure, "s", value_of(stages), peers={"whole replicas": value_of(whole)})


def _burst(
    num_requests: int, shape: str, transfers: Transfers, staged_gain_s: float | None = None
) -> SimulationReport:
    requests = [TracedRequest(at / num_requests, MODEL, *BURST_TOKENS) for at in range(num_requests)]
    trace = Trace.of("burst", requests)
    service = _simulate(trace, shape, transfers, NUM_BURST_GPUS, 0.5, 60.0, staged_gain_s=staged_gain_s)
    return report_of(service)


def compare(workload: Workload, num_processes: int) -> tuple[list[Row], list[dict[str, object]]]:
    """Simulate all systems with all dials; return the best of each and what all came to."""
    runs = [
        Run(system, workload, *dial)
        for system, transfers in SYSTEMS.items()
        for dial in (KEPT_DIALS if transfers.is_origin_kept else DISK_DIALS)
    ]
    runs += [Run(system, workload, *dial) for system in (NO_LOADS, CLAIRVOYANT) for dial in NO_LOADS_DIALS]
    done: list[tuple[Run, SimulationReport]] = []
    with ProcessPoolExecutor(num_processes) as processes:
        for run, report in zip(runs, processes.map(Run.simulate, runs), strict=True):
            dials = f"{run.first_token_s:g} s, {run.keep_alive_s:g} s"
            tell(f"{workload.name}: {run.system}, {dials}: {_told(report)}")
            done.append((run, report))
    best: dict[str, SimulationReport] = {}
    for system in dict.fromkeys(run.system for run in runs):
        reports = [report for run, report in done if run.system == system]
        on_time = [report for report in reports if _p90_s(report) <= workload.target_s]
        name = system if on_time else f"{system}, late"
        best[name] = min(on_time or reports, key=lambda report: report.gpu_s)
    peers = {system: report.gpu_s for system, report in best.items() if system != "Hearth"}
    ideal_s = peers.pop(CLAIRVOYANT, None)
    rows = [Row(f"{workload.name}: GPU time", "s", best["Hearth"].gpu_s, bound=ideal_s, peers=peers)]
    for what, value_of in (("p90 of first tokens", _p90_s), ("cost at 4 a GPU-hour", _cost)):
        values = {system: value_of(report) for system, report in best.items()}
        value = values.pop("Hearth")
        ideal = values.pop(CLAIRVOYANT, None)
        rows.append(
            Row(
                f"{workload.name}: {what}",
                "s" if value_of is _p90_s else "currency",
                value,
                ideal,
                peers=values,
            )
        )
    return rows, [{**_dials(run), **asdict(report)} for run, report in done]


def _dials(run: Run) -> dict[str, object]:
    return {
        "system": run.system,
        "first_token_target_s": run.first_token_s,
        "keep_alive_s": run.keep_alive_s,
    }


def _told(report: SimulationReport) -> str:
    return f"{report.gpu_s:.0f} GPU-s, p90 {_p90_s(report):.2f} s, at most {report.most_gpus} GPUs"


def _p50_s(report: SimulationReport) -> float:
    assert report.first_token_s is not None, f"no answers: {report}"
    return report.first_token_s.p50


def _p90_s(report: SimulationReport) -> float:
    assert report.first_token_s is not None, f"no answers: {report}"
    return report.first_token_s.p90


def _cost(report: SimulationReport) -> float:
    assert report.cost is not None, f"no price: {report}"
    return report.cost


def _simulate(
    trace: Trace,
    shape: str,
    transfers: Transfers,
    num_gpus: int,
    first_token_s: float,
    keep_alive_s: float,
    *,
    is_ideal: bool = False,
    staged_gain_s: float | None = None,
) -> SimulatedService:
    setting = SimulationSetting(
        {MODEL: shape},
        MEMORY_BYTES,
        num_workers=num_gpus,
        num_nodes=num_gpus,
        transfers=transfers,
        gives_back=True,
        device_hour_price=DEVICE_HOUR_PRICE,
        policy=Policy.DRAIN,
        context=CONTEXT,
        wanted_limits=WantedLimits(None, None, block_tokens=256),
        max_queue=MAX_QUEUE,
        keep_alive_s=keep_alive_s,
        first_token_s=first_token_s,
        staged_start_gain_s=staged_gain_s,
    )
    service = SimulatedService(setting, _machine(is_ideal=is_ideal))
    service.ask(trace.requests)
    service.run()
    service.check()
    return service


@cache
def _machine(*, is_ideal: bool) -> Profile:
    profile = Profile.load("h200")
    if is_ideal:
        measured = profile.measured
        switch = msgspec.structs.replace(measured.switch, give_way_s=0.0)
        speeds = dict.fromkeys(Rung, 1e15)
        profile = Profile(
            msgspec.structs.replace(measured, bytes_per_s=speeds, switch=switch, assemble_s=0.0, return_s=0.0)
        )
    profile.shapes = {**profile.shapes, LARGE: profile.scaled(LARGE, LARGE_BYTES, LARGE_KV_BYTES)}
    return profile


@cache
def _window(name: str, begin_s: float) -> Trace:
    path = HERE / "data" / "azure_llm" / f"{name}.csv.gz"
    return read_trace(path, Lengths.fixed(1, 1), Random(0), begin_s, WINDOW_S).mapped([MODEL])


if __name__ == "__main__":
    main()
