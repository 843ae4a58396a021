"""What do requests gain if replicas give up layers for KV in a burst? Simulated, with costs of an H200.

    python -m bench.drop.simulated [--memory 40 20] [--instances 8] [--seconds 300] [--save]

Azure's conversation trace from 1,650 s, its rate raised so that the KV which all requests would have at a
time goes from 0.8 to twice of what the instances have room for. That demand is measured on instances with
ample memory. Brain, batcher and memory policy are those of the service. Every instance is a Llama-2-7B.

- `queueing`: requests wait for KV, and are preempted and computed again if it runs out.
- `static pipeline`: pairs of instances hold the model together all the time.
- `drop`: instances become pipelines under pressure, and whole again. Running requests are computed again.

`late` are requests whose first token takes over five times the median of an idle instance. The time between
tokens is the mean of each request.
"""

from __future__ import annotations

from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate
from random import Random

from bench.report import HERE, Row, arguments, emit, keep, percentiles, tell
from hearth.core.sizes import WantedLimits
from hearth.core.types import ModelId
from hearth.policy.fleet.events import ModelDeployed
from hearth.policy.fleet.profile import ModelProfile
from hearth.sim.arrivals import Lengths
from hearth.sim.profile import Profile
from hearth.sim.service import SimulatedService
from hearth.sim.setting import KIND, Policy, SimulationSetting
from hearth.sim.stepped_model import WorkerFact
from hearth.sim.trace_files import read_trace
from hearth.sim.traces import TracedRequest

MODEL, SHAPE = ModelId("model"), "7B"
GIB = 1 << 30
BEGIN_S, READY_S = 1650.0, 5.0
CONTEXT, BLOCK_TOKENS, BATCH_TOKENS, MAX_SEQS, MAX_QUEUE = 8192, 16, 4096, 256, 1_000_000
#: How many times the rate of the trace one instance gets, by its memory in GiB.
RATES = {40: (0.95, 1.1, 1.2, 1.3, 1.4, 1.5), 20: (0.22, 0.26, 0.3, 0.35, 0.4, 0.47)}
AMPLE_GIB = 139
LATE = 5.0
QUEUEING, STATIC, DROP, AMPLE = "queueing", "static pipeline", "drop", "ample memory"
ARMS = (AMPLE, QUEUEING, STATIC, DROP)


@dataclass(frozen=True, slots=True)
class Run:
    arm: str
    memory_gib: int
    rate: float
    num_instances: int
    seconds: float

    def simulate(self) -> Outcome:
        memory_gib = AMPLE_GIB if self.arm == AMPLE else self.memory_gib
        watch = DropWatch()
        service = watch.service = started(self.arm, memory_gib, self.num_instances, watch.note)
        service.ask(raised(self.rate * self.num_instances, self.seconds))
        service.run()
        service.check()
        return outcome(service, watch)


@dataclass(slots=True)
class DropWatch:
    """When some instances of a service were pipelines. Mutable; told each fact of a worker."""

    service: SimulatedService | None = None
    num_drops: int = 0
    dropped_s: float = 0.0
    _since_s: float | None = None

    def note(self, _: WorkerFact) -> None:
        assert self.service is not None, "set before it runs"
        now_s, is_dropped = self.service.now_s, bool(self.service.fleet.dropped)
        if self._since_s is not None:
            self.dropped_s += now_s - self._since_s
        self.num_drops += is_dropped and self._since_s is None
        self._since_s = now_s if is_dropped else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of a run. Becomes JSON."""

    num_requests: int
    first_token_s: dict[str, float]
    token_s: dict[str, float]  #: mean between tokens of each request
    longest_pause_s: dict[str, float]
    late_share: float
    peak_tokens: int  #: of KV that all requests had at a time
    room_tokens: int  #: of KV that all whole instances have
    num_preempted: int
    num_drops: int
    dropped_s: float  #: during which some instances were pipelines


def main() -> None:
    command = arguments(__doc__)
    command.formatter_class = RawDescriptionHelpFormatter
    command.add_argument(
        "--memory", type=int, nargs="+", choices=list(RATES), default=list(RATES), help="GiB"
    )
    command.add_argument("--rates", type=float, nargs="+", help="of the trace's, for one instance")
    command.add_argument("--instances", type=int, default=8)
    command.add_argument("--seconds", type=float, default=300.0, help="of the trace")
    command.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    command.add_argument("--processes", type=int, default=2)
    options = command.parse_args()
    runs = [
        Run(arm, gib, rate, options.instances, options.seconds)
        for gib in options.memory
        for rate in options.rates or RATES[gib]
        for arm in options.arms
    ]
    done: dict[Run, Outcome] = {}
    content: dict[str, object] = {}
    with ProcessPoolExecutor(options.processes) as processes:
        for run, found in zip(runs, processes.map(Run.simulate, runs), strict=True):
            done[run] = found
            what = f"{run.memory_gib} GiB, {run.rate} times, {run.arm}"
            tell(f"{len(done)} of {len(runs)}: {what}: {told(found)}")
            rows = [asdict(row) for row in rows_of(done)]
            content = {"rows": rows, "runs": [{**asdict(one), **asdict(done[one])} for one in done]}
            if options.save:
                keep("drop", content)
    emit("drop", content, save=options.save)


def told(found: Outcome) -> str:
    first, token = found.first_token_s, found.token_s
    return (
        f"first token p50 {first['p50']:.3f} p99 {first['p99']:.3f} s, between tokens p50 "
        f"{1e3 * token['p50']:.1f} p99 {1e3 * token['p99']:.1f} ms, late {found.late_share:.1%}, peak "
        f"{found.peak_tokens / found.room_tokens:.2f} of the room, {found.num_preempted} preempted, "
        f"{found.num_drops} drops, {found.dropped_s:.0f} s"
    )


def rows_of(done: dict[Run, Outcome]) -> Iterator[Row]:
    for run, drop in done.items():
        others = {arm: done.get(replace(run, arm=arm)) for arm in (AMPLE, QUEUEING, STATIC)}
        ample, queueing = others[AMPLE], others[QUEUEING]
        if run.arm != DROP or ample is None or queueing is None:
            continue
        ratio = ample.peak_tokens / queueing.room_tokens
        where = f"{run.num_instances} instances of {run.memory_gib} GiB, demand {ratio:.2f}"
        peers = {arm: one for arm in (QUEUEING, STATIC) if (one := others[arm]) is not None}
        for what, unit, value in MEASURES:
            values = {arm: value(one) for arm, one in peers.items()}
            yield Row(f"{where}: {what}", unit, value(drop), value(ample), peers=values)


def _first_p99_s(found: Outcome) -> float:
    return found.first_token_s["p99"]


def _token_p50_ms(found: Outcome) -> float:
    return 1e3 * found.token_s["p50"]


def _token_p99_ms(found: Outcome) -> float:
    return 1e3 * found.token_s["p99"]


def _late_percent(found: Outcome) -> float:
    return 100 * found.late_share


#: The bound of each is what instances with ample memory reach.
MEASURES = (
    ("first token p99", "s", _first_p99_s),
    ("between tokens p50", "ms", _token_p50_ms),
    ("between tokens p99", "ms", _token_p99_ms),
    ("late", "%", _late_percent),
)


def started(
    arm: str, memory_gib: int, num_instances: int, watch: Callable[[WorkerFact], None] | None = None
) -> SimulatedService:
    """Return a service that has begun to load all instances."""
    limits = WantedLimits(BATCH_TOKENS, MAX_SEQS, BLOCK_TOKENS)
    setting = SimulationSetting(
        {MODEL: SHAPE},
        memory_gib * GIB,
        num_workers=num_instances,
        policy=Policy.DRAIN,
        context=CONTEXT,
        wanted_limits=limits,
        max_queue=MAX_QUEUE,
    )
    service = SimulatedService(setting, _profile(), watch)
    service.schedule(ModelDeployed(0.0, deployed(setting, arm)))
    return service


def deployed(setting: SimulationSetting, arm: str) -> ModelProfile:
    known = setting.model_profile(MODEL, _profile().shape(SHAPE))
    num_replicas = setting.num_workers
    if arm == STATIC:  # No worker may hold it whole.
        footprint = replace(known.footprints[KIND], fixed_bytes=setting.memory_bytes)
        known = replace(known, footprints={KIND: footprint})
        num_replicas //= 2
    return replace(
        known,
        is_pinned=True,
        min_replicas=num_replicas,
        max_replicas=num_replicas,
        may_drop=arm == DROP,
    )


def raised(rate: float, seconds: float) -> list[TracedRequest]:
    """Return the requests of the trace so many times, each copy up to a second sooner or later."""
    chooser, requests = Random(0), list[TracedRequest]()
    path = HERE / "data" / "azure_llm" / "conv.csv.gz"
    for one in read_trace(path, Lengths.fixed(1, 1), Random(0), BEGIN_S, seconds).mapped([MODEL]).requests:
        num_copies = int(rate) + (chooser.random() < rate % 1)
        for _ in range(num_copies):
            arrival_s = max(0.0, one.arrival_s + chooser.uniform(-1.0, 1.0))
            requests.append(replace(one, arrival_s=READY_S + arrival_s))
    return sorted(requests, key=lambda one: one.arrival_s)


def outcome(service: SimulatedService, watch: DropWatch) -> Outcome:
    answers = list(service.answers.values())
    assert all(one.is_whole for one in answers), "a request was refused"
    first_s = [one.first_token_s for one in answers]
    late_s = LATE * idle_first_token_s()
    many = [one for one in answers if len(one.token_s) > 1]
    footprint = service.setting.model_profile(MODEL, _profile().shape(SHAPE)).footprints[KIND]
    kv_bytes = service.setting.memory_bytes - footprint.fixed_bytes
    return Outcome(
        num_requests=len(answers),
        first_token_s=percentiles(first_s),
        token_s=percentiles([(one.token_s[-1] - one.token_s[0]) / (len(one.token_s) - 1) for one in many]),
        longest_pause_s=percentiles([one.longest_pause_s for one in many]),
        late_share=sum(one > late_s for one in first_s) / len(first_s),
        peak_tokens=_peak_tokens(service),
        room_tokens=service.setting.num_workers * (kv_bytes // footprint.kv_token_bytes),
        num_preempted=sum(one.num_preempted for one in service.workers.values()),
        num_drops=watch.num_drops,
        dropped_s=watch.dropped_s,
    )


def _peak_tokens(service: SimulatedService) -> int:
    changes: list[tuple[float, int]] = []
    for one in service.answers.values():
        assert one.started_s is not None, f"not started: {one}"
        num_tokens = one.num_prompt_tokens + one.num_output_tokens
        changes += [(one.started_s, one.num_prompt_tokens), (one.token_s[-1], -num_tokens)]
        changes += [(at_s, 1) for at_s in one.token_s]
    return max(accumulate(change for _, change in sorted(changes)))


@cache
def idle_first_token_s() -> float:
    """Return the median of first tokens on an instance that has nothing else to do."""
    service = started(QUEUEING, AMPLE_GIB, 1)
    asked = raised(0.1, 300.0)
    service.ask(replace(one, arrival_s=READY_S + 20.0 * at) for at, one in enumerate(asked))
    service.run()
    return percentiles([one.first_token_s for one in service.answers.values()])["p50"]


@cache
def _profile() -> Profile:
    return Profile.load("h200")


if __name__ == "__main__":
    main()
