"""Where does the time of a worker go, call by call, while models take turns? To hold simulations against.

python -m bench.turns.calls [--out FILE] [--small]

Three models of `bench.turns` in memory for one or two of them, asked as its trace has it at 3x, through a
worker's step loop in this process: no gateway, no HTTP. Every call of an engine is noted: what its
step holds, how long launching it took the host, how long the call waited, how long the device took, and what
came before and behind; every load and every turn, too. `--small` is to see that everything runs: tiny models
on a CPU, whose numbers mean nothing.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import gc
import json
import random
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from unittest.mock import patch

import torch

from bench.profile.scale import GPU
from bench.random_model import write_random
from bench.report import HERE, environment, step, tell
from bench.reuse.parts import device_pages, host_pages
from bench.reuse.setting import Scale, Setting
from bench.reuse.worker import WorkerClient, working
from bench.shape import Shape
from bench.turns.host_time import shape_of
from hearth.config import EngineConfig
from hearth.engine.assemble import ModelSpec, tables_bytes, workspace_bytes
from hearth.engine.engine import Engine
from hearth.engine.runner import PendingStep, Runner
from hearth.engine.step_timer import StepTimer
from hearth.messages import HostModel, ModelLoaded, ModelTurn, Sampling, StartRequest, StepDone
from hearth.models.dtypes import DTYPES
from hearth.policy.batch.plan import StepPlan
from hearth.policy.turns.turn_policy import TurnRules
from hearth.sim.arrivals import Lengths
from hearth.sim.trace_files import read_trace
from hearth.sim.traces import TracedRequest
from hearth.sizes import StepLimits
from hearth.store.loader import Loader
from hearth.store.manifest import CHUNK_BYTES, read_manifest
from hearth.types import ModelId
from hearth.worker.hosted_models import HostedModels
from hearth.worker.reclaimer import Reclaimer

TRACE = HERE / "data" / "lmsys_arena" / "requests.csv"
GIB = 1 << 30
CONTEXT = 2048
MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 1500, 300
#: As a service whose device has so much memory takes them.
LIMITS = StepLimits(max_batch_tokens=2048, max_seqs=256, block_tokens=16)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the trace, in its own time, and how fast it comes."""

    begin_s: float
    window_s: float
    speed: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    shapes: Mapping[str, Shape]  #: by name of the model
    limits: StepLimits
    page_bytes: int
    budget_bytes: int
    host_bytes: int
    warm_rows: int
    warm: Phase
    phases: Sequence[Phase]


@dataclass(slots=True)
class Note:
    """A call of an engine. Mutable; the thread that steps fills it in as the call goes on. Seconds."""

    model: str
    began_s: float
    num_ready: int = 0
    before_s: float = 0.0  #: room for KV
    launch_s: float = 0.0
    wait_s: float = 0.0
    engine_s: float = 0.0  #: with launching and waiting
    after_s: float = 0.0
    launched: tuple[int, int, int, int] | None = None  #: tokens, rows, tokens of prompts, context
    awaited: tuple[int, int, int, int] | None = None
    device_s: float | None = None  #: of the step that was waited for
    total_s: float = 0.0


@dataclass(slots=True)
class Log:
    """All that was noted. Mutable; written by the thread that steps."""

    calls: list[Note] = field(default_factory=list)
    loads: list[tuple[str, float, float]] = field(default_factory=list)  #: model, began, took of the thread
    now: Note | None = None


def plan_of(plan: StepPlan) -> tuple[int, int, int, int]:
    return (plan.num_tokens, plan.num_rows, plan.num_prompt_tokens, plan.context_tokens)


@contextmanager
def noting(log: Log) -> Iterator[None]:
    """Have the worker of this process note its calls."""

    def timed(owner: type, name: str, note: Callable[[Note, float], None]) -> object:
        act = getattr(owner, name)

        def wrapper(*args: object, **options: object) -> object:
            began_s = time.perf_counter()
            try:
                return act(*args, **options)
            finally:
                if log.now is not None:
                    note(log.now, time.perf_counter() - began_s)

        return patch.object(owner, name, wrapper)

    step_of, launch, take_in, load = HostedModels.step, Runner.launch, Engine._take_in, HostedModels.load
    seconds = StepTimer.seconds

    def noted_step(models: HostedModels, model: ModelId, served: object) -> object:
        log.now = note = Note(str(model), time.perf_counter())
        try:
            return step_of(models, model, served)
        finally:
            note.total_s = time.perf_counter() - note.began_s
            log.calls.append(note)
            log.now = None

    def noted_launch(runner: Runner, plan: StepPlan) -> object:
        began_s = time.perf_counter()
        pending = launch(runner, plan)
        if log.now is not None:
            log.now.launch_s, log.now.launched = time.perf_counter() - began_s, plan_of(plan)
        return pending

    def noted_take_in(engine: Engine, previous: object, launched: object) -> object:
        if log.now is not None and previous is not None:
            log.now.awaited = plan_of(previous.plan)
        return take_in(engine, previous, launched)

    def noted_seconds(timer: StepTimer) -> float:
        found = seconds(timer)
        if log.now is not None:
            log.now.device_s = found
        return found

    def noted_load(models: HostedModels, hosted: object) -> object:
        began_s = time.perf_counter()
        try:
            return load(models, hosted)
        finally:
            log.loads.append((str(hosted.model), began_s, time.perf_counter() - began_s))

    def add(name: str) -> Callable[[Note, float], None]:
        return lambda note, took_s: setattr(note, name, getattr(note, name) + took_s)

    with ExitStack() as patches:
        for one in (
            timed(Reclaimer, "before_step", add("before_s")),
            timed(Reclaimer, "after_step", add("after_s")),
            timed(Engine, "step", add("engine_s")),
            timed(PendingStep, "wait", add("wait_s")),
            patch.object(HostedModels, "step", noted_step),
            patch.object(Runner, "launch", noted_launch),
            patch.object(Engine, "_take_in", noted_take_in),
            patch.object(StepTimer, "seconds", noted_seconds),
            patch.object(HostedModels, "load", noted_load),
        ):
            patches.enter_context(one)
        yield


def orders_of(plan: Plan, place: Path, device: torch.device) -> dict[ModelId, HostModel]:
    def in_pages(num_bytes: int) -> int:
        return -(-num_bytes // plan.page_bytes) * plan.page_bytes

    orders, context = {}, CONTEXT if device.type == "cuda" else 512
    for slot, (name, shape) in enumerate(plan.shapes.items()):
        directory = write_random(place / name, shape.config, shape.dtype, slot, device)
        spec = ModelSpec(shape.arch, DTYPES[shape.dtype], context, plan.limits, frozenset())
        block_bytes = shape.kv_bytes_per_token * plan.limits.block_tokens
        floor_bytes = in_pages((1 + context // plan.limits.block_tokens) * block_bytes)
        standing_bytes = in_pages(tables_bytes(spec)) + in_pages(block_bytes)
        most_blocks = plan.limits.max_seqs * context // plan.limits.block_tokens
        most_bytes = min(in_pages(most_blocks * block_bytes), plan.budget_bytes)
        orders[ModelId(name)] = HostModel(
            model=ModelId(name),
            hosting=0,
            where=str(directory),
            digest=read_manifest(directory).digest,
            weight=1.0,
            max_context=context,
            limits=plan.limits,
            kv_floor_bytes=floor_bytes,
            max_kv_bytes=most_bytes,
            eos_ids=(),
            own_bytes=in_pages(shape.weights_bytes) + floor_bytes + standing_bytes,
            workspace_bytes=in_pages(workspace_bytes(spec, device)),
            standing_bytes=standing_bytes,
            slot=slot,
        )
    return orders


class Asking:
    """Asks a worker as a trace has it. Mutable; one thread has it."""

    def __init__(self, worker: WorkerClient, plan: Plan) -> None:
        self._worker, self._plan = worker, plan
        self._draw = random.Random(7)
        self._num_asked = 0
        self._facts: list[tuple[float, object]] = []

    def question(self, model: str, num_prompt: int, num_output: int) -> StartRequest:
        self._num_asked += 1
        vocab_size = self._plan.shapes[model].arch.vocab_size
        prompt = tuple(self._draw.randrange(vocab_size) for _ in range(num_prompt))
        sampling = Sampling(seed=0, temperature=0.0, max_tokens=num_output, ignore_eos=True)
        return StartRequest(self._num_asked, ModelId(model), prompt, (), sampling, salt=b"")

    def ask(self, model: str, num_prompt: int, num_output: int) -> int:
        question = self.question(model, num_prompt, num_output)
        self._worker.send(question)
        return question.run

    def replay(self, requests: Sequence[TracedRequest]) -> dict[str, object]:
        """Ask each request at its time, wait for all answers, and return what came of it."""
        questions = [
            self.question(one.tenant, max(1, one.num_input_tokens), max(1, one.num_output_tokens))
            for one in requests
        ]
        began_s, asked = time.perf_counter() + 0.1, {}
        for one, question in zip(requests, questions, strict=True):
            time.sleep(max(0.0, began_s + one.arrival_s - time.perf_counter()))
            at_s = time.perf_counter()
            self._worker.send(question)
            asked[question.run] = [at_s - began_s, one.tenant, one.num_input_tokens, one.num_output_tokens]
        left, first, last = set(asked), {}, {}
        loads, turns = [], []
        while left:
            heard = self._worker.until(StepDone, ModelLoaded, ModelTurn)
            at_s, fact = heard.at_s - began_s, heard.fact
            match fact:
                case StepDone(runs=runs, finished=finished):
                    for run in runs:
                        first.setdefault(run, at_s)
                        last[run] = at_s
                    left -= set(finished)
                case ModelLoaded():
                    num_bytes = sum(use.num_bytes for use in fact.rungs)
                    loads.append(
                        [
                            *(at_s, fact.model, num_bytes, fact.ahead_bytes, fact.open_s, fact.assemble_s),
                            *(fact.place_s, fact.first_layer_s, fact.total_s),
                        ]
                    )
                case ModelTurn():
                    turns.append([at_s, fact.model, None if fact.ended is None else fact.ended.value])
        return {
            "began_s": began_s,
            "requests": [[*asked[run], first[run], last[run]] for run in asked],
            "loads": loads,
            "turns": turns,
        }


def the_trace(plan: Plan, phase: Phase) -> Sequence[TracedRequest]:
    lengths = Lengths.fixed(MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS)
    mapped = read_trace(TRACE, lengths, random.Random(0)).mapped(list(plan.shapes))
    most = plan.limits.max_batch_tokens
    window = mapped.window(phase.begin_s, phase.window_s)
    return window.cut(min(MAX_PROMPT_TOKENS, most // 2), MAX_OUTPUT_TOKENS).at_speed(phase.speed).requests


def measured(plan: Plan, device: torch.device) -> dict[str, object]:
    log = Log()
    setting = Setting(
        Scale(EngineConfig(**asdict(plan.limits)), host_bytes=plan.host_bytes, chunk_bytes=plan.page_bytes),
        device,
        Loader(device),
        device_pages if device.type == "cuda" else host_pages,
    )
    memory = "/dev/shm" if device.type == "cuda" else None
    phases = []
    with tempfile.TemporaryDirectory(prefix="hearth-calls-", dir=memory) as place, noting(log):
        with step("writing models"):
            orders = orders_of(plan, Path(place), device)
        with working(setting, Path(place), orders, plan.budget_bytes, TurnRules(), is_mapped=True) as worker:
            with step("host memory"):
                worker.segment.wait_pinned()
            asking = Asking(worker, plan)
            with step("warming up"):
                for model in orders:
                    worker.host(model)
                for model in orders:
                    runs = {asking.ask(str(model), 8 * at, 2 * at) for at in range(1, plan.warm_rows + 1)}
                    while runs:
                        heard = worker.until(StepDone).fact
                        runs -= set(heard.finished)
                asking.replay(the_trace(plan, plan.warm))
            log.calls.clear()
            log.loads.clear()
            gc.collect()
            gc.freeze()  # as a worker's process does not look at all that torch has brought along
            for phase in plan.phases:
                with step(f"{phase}"):
                    phases.append({**asdict(phase), **asking.replay(the_trace(plan, phase))})
                time.sleep(0.5)
    return {"phases": phases, "calls": [list(asdict(one).values()) for one in log.calls], "loads": log.loads}


def summary(found: Mapping[str, object]) -> None:
    calls = [Note(*one) for one in found["calls"]]
    for phase in found["phases"]:
        begin_s, requests = phase["began_s"], phase["requests"]
        end_s = begin_s + max(one[-1] for one in requests)
        own = [one for one in calls if begin_s <= one.began_s <= end_s]
        if not own:
            continue
        first = sorted(one[4] - one[0] for one in requests)
        tell(
            f"speed {phase['speed']}: {len(requests)} requests, first p50 {first[len(first) // 2]:.4f} s, "
            f"p90 {first[int(0.9 * len(first))]:.4f} s, {len(own)} calls, {len(phase['loads'])} loads, "
            f"{len(phase['turns'])} turns"
        )
        gaps = [late.began_s - early.began_s - early.total_s for early, late in pairwise(own)]
        tell(
            "  mean ms a call: "
            + ", ".join(
                f"{name} {1e3 * fmean(getattr(one, name) for one in own):.3f}"
                for name in ("total_s", "engine_s", "before_s", "launch_s", "wait_s", "after_s")
            )
            + f", gap p50 {1e3 * median(gaps):.3f}, mean {1e3 * fmean(gaps):.3f}"
        )
        for kind in ("decode", "prompts"):
            chosen = [o for o in own if o.launched and (o.launched[2] > 0) == (kind == "prompts")]
            if chosen:
                before, launch = ([getattr(o, name) for o in chosen] for name in ("before_s", "launch_s"))
                tell(
                    f"  {kind}: {len(chosen)} calls, before p50 {1e3 * median(before):.3f}, mean "
                    f"{1e3 * fmean(before):.3f}, launch p50 {1e3 * median(launch):.3f} ms"
                )


def main() -> None:
    parser = ArgumentParser(
        "python -m bench.turns.calls", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/calls.json"))
    parser.add_argument("--small", action="store_true", help="tiny models on a CPU")
    options = parser.parse_args()
    if options.small:
        device, sizes = torch.device("cpu"), (("m0-1b", "1B"), ("m2-3b", "3B"))
        limits = StepLimits(max_batch_tokens=256, max_seqs=64, block_tokens=16)
        shapes = {name: shape_of(kind, {"1B": 2 << 30, "3B": 6 << 30}[kind]) for name, kind in sizes}
        plan = Plan(
            shapes,
            limits,
            16 << 10,
            24 << 20,
            160 << 20,
            4,
            Phase(60.0, 3.0, 3.0),
            [Phase(0.0, 3.0, 1.0)],
        )
    else:
        device = torch.device("cuda", 0)
        one, three, _ = GPU.shapes
        shapes = {"m0-1b": one, "m1-3b": three, "m2-1b": one}
        phases = [Phase(0.0, 30.0, 3.0)]
        plan = Plan(shapes, LIMITS, CHUNK_BYTES, 17 * GIB // 2, 13 * GIB, 24, Phase(180.0, 12.0, 8.0), phases)
    found = measured(plan, device)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"environment": dict(environment()), **found}, default=str))
    summary(found)


if __name__ == "__main__":
    main()
