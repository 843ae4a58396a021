"""What does a worker's loop take of each step besides its engine, while models take turns? Needs no GPU.

python -m bench.turns.host_time [--requests N] [--pages N] [--seconds S] [--profile]

Eight models as those of `bench.turns`, with as many pages of weights in as many pages of memory, but pages of
16 KiB of host memory and engines that compute nothing: a step takes as long as the kept profile of an H200
says, by a clock that is set on instead of waiting. All else is a worker's own: its loop, its policies, its
books of pages, its loads. So many requests are there at any time, in the shares of the trace. What is told is
processor time of the thread that steps, so that others on the machine matter less; telling parts apart takes
some microseconds each.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import cProfile
import itertools
import json
import pstats
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from unittest.mock import patch

import torch

from bench.random_model import TINY, write_random
from bench.reuse.parts import host_pages
from bench.reuse.setting import Scale, Setting
from bench.reuse.worker import WorkerClient, working
from bench.shape import Shape
from bench.turns.setting import H200
from hearth.core.config import EngineConfig
from hearth.core.messages import HostModel, ModelTurn, StartRequest, StepDone
from hearth.core.sizes import StepLimits
from hearth.core.types import ModelId, SamplingParams
from hearth.engine.assemble import ModelSpec, tables_bytes, workspace_bytes
from hearth.engine.engine import Engine
from hearth.engine.pending_step import StepResult
from hearth.engine.runner import Runner
from hearth.models.dtypes import DTYPES
from hearth.policy.batch.plan import StepPlan
from hearth.policy.turns.turn_policy import TurnRules
from hearth.sim.profile import Profile, ShapeProfile
from hearth.store.format.manifest import read_manifest
from hearth.store.transfer.transfer import Loader
from hearth.worker.hosted_models import HostedModels
from hearth.worker.reclaimer import Reclaimer
from hearth.worker.runs import Runs
from hearth.worker.steps import ModelSteps
from hearth.worker.turns import Turns
from hearth.worker.worker_loop import WorkerLoop

CPU = torch.device("cpu")
PAGE_BYTES = 16 << 10
GPU_PAGE_BYTES = 16 << 20
MIB, GIB = 1 << 20, 1 << 30
NUM_PAGES = 24 * GIB // GPU_PAGE_BYTES
LIMITS = StepLimits(max_batch_tokens=256, max_seqs=64, block_tokens=16)
CONTEXT = 512
PROMPT_TOKENS, OUTPUT_TOKENS = (16, 160), (20, 300)
#: Layers and dimensions of a head by shape: as many blocks of KV lie on a page as with the real ones.
_KV = {"1B": (1, 8), "3B": (2, 8), "7B": (4, 16)}
_WARM_S = 2.0
SIZES = {"host_bytes": 160 * MIB, "chunk_bytes": PAGE_BYTES}
#: Of the worker, that look at the time.
TIMED_MODULES = ("turns", "worker_loop", "runs", "reclaimer", "report")
#: Parts of the loop whose time is told apart, none within another, by the name that they have here.
PARTS: Mapping[str, tuple[type, str]] = {
    "engine": (Engine, "step"),
    "flush": (Engine, "flush"),
    "decide": (Turns, "decide"),
    "load": (HostedModels, "load"),
    "look_ahead": (HostedModels, "prefetch"),
    "ready": (ModelSteps, "ready"),
    "before_step": (Reclaimer, "before_step"),
    "after_step": (Reclaimer, "after_step"),
    "tell_step": (Runs, "send_step"),
    "tell_residency": (WorkerLoop, "_send_residency"),
    "orders": (WorkerLoop, "_handle"),
}


@dataclass(slots=True)
class Spent:
    """Processor seconds of the thread that steps, in all and by part, and calls. Mutable; written by it."""

    all_s: float = 0.0
    told_s: float = 0.0  #: of all parts
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    def copy(self) -> Spent:
        return Spent(self.all_s, self.told_s, dict(self.seconds), dict(self.calls))

    def since(self, before: Spent) -> Spent:
        return Spent(
            self.all_s - before.all_s,
            self.told_s - before.told_s,
            {part: self.seconds[part] - before.seconds[part] for part in PARTS},
            {part: self.calls[part] - before.calls[part] for part in PARTS},
        )


@dataclass(frozen=True, slots=True)
class HostTime:
    """Processor time of the thread that steps, in microseconds a step. All parts make up the first two."""

    beside_us: float  #: besides engines
    engine_us: float
    us_per_step: Mapping[str, float]  #: by part
    us_per_call: Mapping[str, float]
    calls: Mapping[str, int]
    num_turns: int  #: that began, also before it was measured

    @staticmethod
    def of(spent: Spent, num_turns: int) -> HostTime:
        num_steps = spent.calls["engine"]
        us_per_step = {part: 1e6 * part_s / num_steps for part, part_s in spent.seconds.items()}
        us_per_step["rest"] = 1e6 * (spent.all_s - spent.told_s) / num_steps
        engine_us = us_per_step["engine"] + us_per_step["flush"]
        return HostTime(
            beside_us=sum(us_per_step.values()) - engine_us,
            engine_us=engine_us,
            us_per_step=us_per_step,
            us_per_call={part: 1e6 * spent.seconds[part] / max(1, spent.calls[part]) for part in PARTS},
            calls=spent.calls,
            num_turns=num_turns,
        )


class SkippingClock:
    """The time of a worker that never waits for a device: it is later at once. Stands in for `time`."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._skipped_s

    perf_counter = monotonic

    def skip_to(self, at_s: float) -> None:
        self._skipped_s += max(0.0, at_s - self.monotonic())


class MadeUpStep:
    """A step that only takes its time. Has what an engine asks a `PendingStep` for."""

    is_computed, end = False, None

    def __init__(self, plan: StepPlan, end_s: float, clock: SkippingClock) -> None:
        self._plan, self._end_s, self._clock = plan, end_s, clock

    @property
    def is_done(self) -> bool:
        return self._clock.monotonic() >= self._end_s

    def wait(self) -> StepResult:
        self._clock.skip_to(self._end_s)
        return StepResult([7] * self._plan.num_samples, None, [])


@dataclass(slots=True)
class MadeUpDevice:
    """Computes one step after the other. Mutable; the thread that steps calls it."""

    shapes: Mapping[int, ShapeProfile]  #: by layers of the small model that stands for one
    spent: Spent = field(default_factory=Spent)
    clock: SkippingClock = field(default_factory=SkippingClock)
    free_s: float = 0.0

    def launch(self, runner: Runner, plan: StepPlan) -> MadeUpStep:
        shape = self.shapes[len(runner.layers.decoder.layers)]
        step_s = shape.step_s(plan.num_tokens, plan.num_rows, plan.context_tokens)
        self.free_s = max(self.free_s, self.clock.monotonic()) + step_s
        return MadeUpStep(plan, self.free_s, self.clock)

    def timed(self, part: str) -> Callable[..., object]:
        """Return a part of the loop whose time is counted; not that of other parts within it."""
        act, spent = getattr(*PARTS[part]), self.spent

        def timed(*args: object, **options: object) -> object:
            told_s, began_s = spent.told_s, time.thread_time()
            try:
                return act(*args, **options)
            finally:
                spent.all_s = time.thread_time()
                own_s = spent.all_s - began_s - (spent.told_s - told_s)
                spent.told_s += own_s
                spent.seconds[part] += own_s
                spent.calls[part] += 1

        return timed


def shape_of(name: str, weights_bytes: int) -> Shape:
    """Return a small model with as many pages of weights as one of so many bytes has."""
    num_layers, head_dim = _KV[name]
    hidden = 256
    sizes = {"hidden_size": hidden, "num_hidden_layers": num_layers, "head_dim": head_dim, "vocab_size": 256}
    num_floats = weights_bytes // GPU_PAGE_BYTES * PAGE_BYTES // 4
    rest = num_floats - 2 * 256 * hidden - num_layers * 6 * hidden * head_dim
    config = {
        **TINY,
        **sizes,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "intermediate_size": max(8, rest // (3 * hidden * num_layers) // 8 * 8),
    }
    return Shape(name, name, config, "float32")


def orders_of(place: Path, profile: Profile) -> dict[ModelId, HostModel]:
    orders = {}
    for seed, (name, kind) in enumerate(H200.shapes.items()):
        shape = shape_of(kind, profile.shape(kind).weights_bytes)
        directory = write_random(place / name, shape.config, shape.dtype, seed, CPU)
        spec = ModelSpec(shape.arch, DTYPES[shape.dtype], CONTEXT, LIMITS, frozenset())
        block_bytes = shape.kv_bytes_per_token * LIMITS.block_tokens
        floor_bytes = _in_pages((1 + CONTEXT // LIMITS.block_tokens) * block_bytes)
        standing_bytes = _in_pages(tables_bytes(spec))
        orders[ModelId(name)] = HostModel(
            model=ModelId(name),
            hosting=0,
            where=str(directory),
            digest=read_manifest(directory).digest,
            weight=1.0,
            max_context=CONTEXT,
            limits=LIMITS,
            kv_floor_bytes=floor_bytes,
            max_kv_bytes=_in_pages(LIMITS.max_seqs * CONTEXT // LIMITS.block_tokens * block_bytes),
            eos_ids=(),
            own_bytes=_in_pages(shape.weights_bytes) + floor_bytes + standing_bytes,
            workspace_bytes=_in_pages(workspace_bytes(spec, CPU)),
            standing_bytes=standing_bytes,
        )
    return orders


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class Clients:
    """Keeps so many requests with a worker. Mutable; one thread has it."""

    #: Requests of each model of 553, as `bench.turns` has them at 3x.
    SHARES = (152, 32, 188, 79, 45, 19, 29, 9)

    def __init__(self, worker: WorkerClient, num_requests: int) -> None:
        self._worker, self._draw = worker, Random(1)
        self._runs = itertools.count(1)
        self.num_turns = 0
        self._num_asked = 0  #: requests that have not ended
        for _ in range(num_requests):
            self._ask()

    def serve(self, clock: SkippingClock, seconds: float) -> None:
        """Ask anew whenever an answer has ended, for so long."""
        until_s = clock.monotonic() + seconds
        while clock.monotonic() < until_s:
            for _ in range(self._hear()):
                self._ask()

    def finish(self) -> None:
        """Wait for all answers."""
        while self._num_asked:
            self._hear()

    def _hear(self) -> int:
        """Return how many answers have ended with what is told next."""
        match self._worker.until(StepDone, ModelTurn).fact:
            case StepDone(finished=finished):
                self._num_asked -= len(finished)
                return len(finished)
            case ModelTurn(ended=None):
                self.num_turns += 1
        return 0

    def _ask(self) -> None:
        self._num_asked += 1
        model = self._draw.choices(list(self._worker.orders), self.SHARES)[0]
        prompt = tuple(self._draw.randrange(1, 250) for _ in range(self._draw.randint(*PROMPT_TOKENS)))
        num_tokens = self._draw.randint(*OUTPUT_TOKENS)
        sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self._worker.send(StartRequest(next(self._runs), model, prompt, (), sampling, salt=b""))


@contextmanager
def made_up(device: MadeUpDevice, profiler: cProfile.Profile | None) -> Iterator[None]:
    """Have engines of this process compute nothing, and their time be counted."""
    run = WorkerLoop.run

    def profiled(loop: WorkerLoop) -> None:
        if profiler is None:
            run(loop)
        else:
            profiler.runcall(run, loop)

    with ExitStack() as patches:
        patches.enter_context(patch.object(Runner, "launch", lambda *of: device.launch(*of)))
        patches.enter_context(patch.object(Runner, "is_warm", lambda *_: False))
        patches.enter_context(patch.object(WorkerLoop, "run", profiled))
        for module in TIMED_MODULES:
            patches.enter_context(patch(f"hearth.worker.{module}.time", device.clock))
        for part, (owner, name) in PARTS.items() if profiler is None else [("engine", PARTS["engine"])]:
            patches.enter_context(patch.object(owner, name, device.timed(part)))
        yield


def measured(
    num_requests: int, num_pages: int, seconds: float, profiler: cProfile.Profile | None = None
) -> HostTime:
    """Return what each step took of the thread that steps; with a profiler, parts are not told apart."""
    profile = Profile.load("h200")
    shapes = {_KV[kind][0]: profile.shape(kind) for kind in _KV}
    device, scale = MadeUpDevice(shapes), Scale(EngineConfig(**asdict(LIMITS)), **SIZES)
    setting = Setting(scale, CPU, Loader(CPU), host_pages)
    rules = TurnRules(front_bytes=2 * GIB // GPU_PAGE_BYTES * PAGE_BYTES)
    with tempfile.TemporaryDirectory(prefix="hearth-host-") as place, made_up(device, profiler):
        orders = orders_of(Path(place), profile)
        # Workspace and tables are far larger beside these than beside real models, where tables take a page.
        budget_bytes = num_pages * PAGE_BYTES + max(one.workspace_bytes for one in orders.values())
        budget_bytes += sum(one.standing_bytes - PAGE_BYTES for one in orders.values())
        with working(setting, Path(place), orders, budget_bytes, rules, is_mapped=True) as worker:
            for model in orders:
                worker.host(model)
            clients = Clients(worker, num_requests)
            clients.serve(device.clock, _WARM_S)
            before = device.spent.copy()
            clients.serve(device.clock, seconds)
            spent = device.spent.copy().since(before)
            clients.finish()
    return HostTime.of(spent, clients.num_turns)


def main() -> None:
    parser = ArgumentParser(
        "python -m bench.turns.host_time",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=64, help="at any time")
    parser.add_argument("--pages", type=int, default=NUM_PAGES, help="of the device")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead")
    options = parser.parse_args()
    profiler = cProfile.Profile(time.thread_time) if options.profile else None
    found = measured(options.requests, options.pages, options.seconds, profiler)
    if profiler is None:
        print(json.dumps(asdict(found)))
    else:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
