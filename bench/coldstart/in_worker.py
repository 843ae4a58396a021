"""What does the step thread of a worker do while a model comes beside one that answers, or for many requests?

    python -m bench.coldstart.in_worker [--restores N] [--without PART ...] [--tiny]

    others    16 streams of a 7B, while a 4B is dropped, loaded, asked and restored, again and again
    burst     64 requests at once to a 7B that comes

A worker's step loop on a thread of this process, with a keeper, snapshots and all that a worker has but a
gateway: gaps are those at which it tells of tokens. The longest are told with all that was done in them, by
thread. Each is run with everything, and with each of these left out (`--without`: with those alone):

    behind    what keeps the driver busy waits for the end of a launch
    capture   first steps are captured beside the load
    own end   a model that goes waits for its own steps alone

Steps are not measured for the snapshots. On one H200 it takes 50 s, kernels that were never compiled 20 more.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import argparse
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from queue import Queue, SimpleQueue
from random import Random
from types import FrameType
from unittest.mock import patch

import msgspec
import torch

from bench.coldstart.beside import by_phase
from bench.coldstart.graph_process import GraphTask, worker_setup
from bench.coldstart.held_up import OTHER, RUNNING, tell_steps
from bench.coldstart.ring import Ring
from bench.coldstart.shapes import SHAPES, TINY_SHAPES
from bench.random_model import write_random
from bench.report import step, tell
from bench.reuse.worker import TimedFact, WorkerClient, keeping
from bench.service.gaps import Gap, Window
from hearth.core.config import EngineConfig, StoreConfig
from hearth.core.messages import (
    DropModel,
    HostModel,
    MakeSnapshot,
    ModelLoaded,
    Shutdown,
    SnapshotMade,
    StartRequest,
    StepDone,
)
from hearth.core.types import ModelId, SamplingParams
from hearth.engine.assemble import own_limits
from hearth.engine.dry_run import KernelNeeds
from hearth.engine.engine import Engine, StepOutcome
from hearth.engine.graph_capture import GraphCapture
from hearth.engine.graph_trial import GraphTrial
from hearth.engine.graphs import StepGraphs
from hearth.engine.kernel_warmup import KernelWarmup
from hearth.engine.layer_runner import LayerRunner
from hearth.engine.pending_step import PendingStep
from hearth.engine.runner import Runner
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.kernel_cache import KernelCache
from hearth.memory.page_table import PageTable
from hearth.memory.vmm import MappedPool
from hearth.models.dtypes import DTYPES
from hearth.snapshot.kernel_handles import KernelHandles
from hearth.snapshot.native_rebuild import NativeRebuild
from hearth.snapshot.restored_graphs import RestoredGraphs
from hearth.store.format.manifest import read_manifest
from hearth.store.transfer.lease_client import LeaseClient
from hearth.store.transfer.transfer import Loader, Transfer
from hearth.system.garbage import collect_when_idle
from hearth.worker import __main__ as worker_main
from hearth.worker import snapshot_maker
from hearth.worker.background import FirstTokens, StepLaunches
from hearth.worker.gateway_link import GatewayLink
from hearth.worker.hosted_models import HostedModels
from hearth.worker.model_load import ModelLoad
from hearth.worker.model_marks import WorkerMarks
from hearth.worker.reclaimer import Reclaimer
from hearth.worker.report import Reports
from hearth.worker.runs import Runs
from hearth.worker.runtime import HostingResources, StartTimes, TorchLimit, start
from hearth.worker.snapshot_graphs import SnapshotGraphs
from hearth.worker.steps import ModelSteps
from hearth.worker.worker_loop import Inbox, Message, ModelNews, WorkerLoop

SEVEN, FOUR = ModelId(RUNNING), ModelId(OTHER)
#: How a worker does without a part.
PARTS: dict[str, tuple[type, str, Callable[..., object]]] = {
    "behind": (StepLaunches, "get_behind", StepLaunches.give_way),
    "capture": (ModelLoad, "_next_shape", lambda load, runner, captured: None),
    "own end": (Runner, "close", lambda runner, close=Runner.close: _close_behind_all(runner, close)),
}
TELL = "tell"  #: and the model whose tokens are told
_TRACED = (
    (WorkerLoop, "_send_residency", "tell_residency"),
    *((HostedModels, name, name) for name in ("drop", "found", "engine_ready", "weights_loaded", "load")),
    *((ModelSteps, "settle", "settle step"), (HostedModels, "_announced", "announce load")),
    *((MappedPool, "load_ended", "load_ended"), (Transfer, "_release_copied", "release chunks")),
    *((ModelLoad, "_capture_first", "capture first steps"), (RestoredGraphs, "_functions", "functions")),
    *((Reclaimer, name, name) for name in ("place", "before_step", "after_step")),
    *((Runner, name, name) for name in ("launch", "close", "settle", "fill_tables")),
    *((LayerRunner, name, name) for name in ("rehearse", "capture_substitutes")),
    *((GraphTrial, name, f"trial {name}") for name in ("begin", "replay", "end")),
    *((PendingStep, "wait", "wait"), (Engine, "step", "step"), (TorchLimit, "follow", "torch limit")),
    *((GraphCapture, "capture", "capture"), (StepGraphs, "capture_substitute", "substitute: one part")),
    *((KernelHandles, "learn", "learn"), (NativeRebuild, "__call__", "native graph")),
    *((StepLaunches, "get_behind", "get behind"), (PageTable, "map", "map pages")),
    *((SnapshotGraphs, "_empty", "destroy graphs"), (GatewayLink, "send", "send"), (Reports, "pong", "pong")),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done."""

    kind: str = "cuda"
    streams: int = 16
    restores: int = 6
    burst: int = 64
    burst_tokens: int = 48
    prompt: int = 128
    host_bytes: int = 23 * 10**9
    budget_bytes: int | None = None
    place: str = "/dev/shm"


TINY = Scale("cpu", 2, 2, 3, 6, 8, 1 << 28, 1 << 29, tempfile.gettempdir())


def _close_behind_all(runner: Runner, close: Callable[[Runner], None]) -> None:
    runner._end = None
    close(runner)


class Rig:
    """A worker with two models, and what it was asked. Mutable, as the worker is."""

    def __init__(self, scale: Scale, client: WorkerClient, graphs: SnapshotGraphs | None, ring: Ring) -> None:
        self.scale, self.client, self.graphs, self.ring = scale, client, graphs, ring
        self._draw = Random(4)
        self._ends_s: dict[ModelId, list[float]] = {SEVEN: [], FOUR: []}
        self._num_runs = 1_000_000
        self._hosting = 0
        self.has_failed = False  #: in any of its parts

    def ask(self, model: ModelId, num_requests: int, num_prompt: int, num_new: int) -> None:
        vocab_size = 500 if self.scale.kind == "cpu" else 30_000
        for _ in range(num_requests):
            self._num_runs += 1
            prompt = tuple(self._draw.randrange(vocab_size) for _ in range(num_prompt))
            sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=num_new, ignore_eos=True)
            self.client.send(StartRequest(self._num_runs, model, prompt, (), sampling, salt=b""))

    def host(self, model: ModelId) -> None:
        self._hosting += 1
        self.client.send(msgspec.structs.replace(self.client.orders[model], hosting=self._hosting))

    def until(self, *kinds: type, model: ModelId, num_runs: int = 1) -> float:
        """Return when the worker told such a thing of a model; a step has so many tokens at least."""
        while True:
            heard = self.client.until(*{*kinds, StepDone})
            fact = heard.fact
            if isinstance(fact, StepDone) and fact.runs:
                self._ends_s[fact.model].append(heard.at_s)
            is_long = not isinstance(fact, StepDone) or len(fact.runs) >= num_runs
            if isinstance(fact, kinds) and is_long and getattr(fact, "model", model) == model:
                return heard.at_s

    def make_snapshot(self, model: ModelId) -> None:
        self.host(model)
        self.until(ModelLoaded, model=model)
        self.client.send(MakeSnapshot(model, self._hosting))
        while not isinstance(made := self.client.until(SnapshotMade).fact, SnapshotMade):
            pass
        if made.failure is not None:
            raise RuntimeError(f"no snapshot of {model}: {made.failure}")

    def drop(self, model: ModelId) -> None:
        self.client.send(DropModel(model))
        self.client.rest()

    def wait_for_graphs(self) -> float:
        if self.graphs is not None:
            self.graphs._thread.submit(int).result()
        return time.perf_counter()

    def take_ends(self, model: ModelId) -> list[float]:
        ends_s, self._ends_s[model] = self._ends_s[model], []
        return ends_s

    # Parts.

    def others(self, name: str) -> None:
        """Have the 4B come and go beside streams of the 7B, and tell the gaps of these by phase."""
        scale, num_new = self.scale, 30 if self.scale.kind == "cpu" else 150 * (self.scale.restores + 1)
        self.ask(SEVEN, scale.streams, 64 if scale.kind == "cuda" else 8, num_new)
        for _ in range(10):
            self.until(StepDone, model=SEVEN, num_runs=scale.streams)
        windows: dict[str, list[Window]] = {"drop": [], "load": [], "first step": [], "graphs": []}
        for number in range(scale.restores):
            began_s = time.perf_counter()
            self.client.send(DropModel(FOUR))
            self.host(FOUR)
            self.ask(FOUR, 1, 1, 1)
            loaded_s = self.until(ModelLoaded, model=FOUR)
            first_s = self.until(StepDone, model=FOUR)
            graphs_s = self.wait_for_graphs()
            if not number:  # the first one in its process
                self.take_ends(SEVEN)
                continue
            drops = [one for one in self.ring.during(began_s, loaded_s) if one.what == "drop"]
            dropped_s = drops[-1].end_s if drops else began_s
            windows["drop"].append(Window(began_s, dropped_s))
            windows["load"].append(Window(dropped_s, loaded_s))
            windows["first step"].append(Window(loaded_s, first_s))
            windows["graphs"].append(Window(first_s, graphs_s))
        self.client.send(DropModel(SEVEN))
        self.client.rest()
        ends_s = self.take_ends(SEVEN)
        found = [Gap(begin_s, end_s) for begin_s, end_s in pairwise(ends_s)]
        tell_steps(self.ring, f"others, {name}", ends_s, long=1.4, most=8)
        for phases, figures in by_phase(found, windows).items():
            shown = " ".join(f"{key}={1e3 * figures[key]:.2f}" for key in ("p50", "p90", "p99", "max"))
            tell(f"    {phases}: {shown} n={figures['n']}")
        self.drop(FOUR)
        self.host(SEVEN)
        self.until(ModelLoaded, model=SEVEN)
        self.wait_for_graphs()

    def burst(self, name: str) -> None:
        """Ask for many streams at once of the 7B, which comes for them."""
        scale = self.scale
        self.drop(SEVEN)
        self.wait_for_graphs()
        self.take_ends(SEVEN)
        began_s = time.perf_counter()
        self.host(SEVEN)
        self.ask(SEVEN, scale.burst, scale.prompt, scale.burst_tokens)
        first_s = self.until(StepDone, model=SEVEN, num_runs=scale.burst)
        for _ in range(scale.burst_tokens - 2):
            self.until(StepDone, model=SEVEN, num_runs=scale.burst)
        ends_s = [at_s for at_s in self.take_ends(SEVEN) if at_s >= first_s]
        tell_steps(self.ring, f"burst, {name}: first token after {first_s - began_s:.3f} s", ends_s, long=1.4)
        self.client.rest()
        self.wait_for_graphs()


@contextmanager
def working(scale: Scale, *, is_tiny: bool) -> Iterator[tuple[Rig, WorkerLoop]]:
    """Yield a worker that can host both models, and its loop, which is to be run on this thread."""
    config, shapes = EngineConfig(), TINY_SHAPES if is_tiny else SHAPES
    device, is_cuda = torch.device(scale.kind), scale.kind == "cuda"
    kernels = Path(StoreConfig().path).expanduser() / "kernels"
    with ExitStack() as stack:
        place = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="hearth-bench-", dir=scale.place))
        )

        def end(number: int, frame: FrameType | None) -> None:
            shutil.rmtree(place, ignore_errors=True)
            os._exit(1)

        signal.signal(signal.SIGTERM, end)  # so that no model outlives this
        orders = {}
        with step("models"):
            for slot, model in enumerate((SEVEN, FOUR)):
                shape = shapes[model]
                write_random(place / model, shape.config, shape.dtype, slot, device)
                limits = own_limits(config, shape.arch, DTYPES[shape.dtype], device)
                orders[model] = HostModel(
                    *(model, 0, str(place / model), read_manifest(place / model).digest, 1.0),
                    *(shape.arch.max_positions, limits),
                    kv_floor_bytes=shape.arch.max_positions * shape.kv_bytes_per_token,
                    max_kv_bytes=(scale.host_bytes if is_cuda else scale.host_bytes // 8),
                    eos_ids=(),
                    slot=slot,
                )
        if is_cuda:
            torch.cuda.empty_cache()  # a worker takes nearly all that is free
        first, plain = shapes[SEVEN], asdict(orders[SEVEN].limits)
        task = GraphTask(True, first.config, first.dtype, scale.kind, plain, str(kernels), "", 1, 1)
        setup = msgspec.structs.replace(
            worker_setup(task, config, scale.budget_bytes or 0),
            budget_bytes=scale.budget_bytes,
            snapshots_path=str(place / "snapshots"),
            snapshot_bytes=1 << 30,
        )
        runtime = start(setup, config, StartTimes())
        if is_cuda:
            COMPILATIONS.watch()
            warmup = KernelWarmup(KernelCache.open(kernels))

            def compile_one(model: ModelId) -> None:
                shape = shapes[model]
                needs = (shape.arch, shape.dtype, shape.quant, orders[model].limits)
                warmup.compile(KernelNeeds.on(runtime.device, *needs))

            with step("kernels"), ThreadPoolExecutor(2) as pool:
                list(pool.map(compile_one, orders))
        socket = stack.enter_context(keeping(device, scale.host_bytes, place))
        lease_client = LeaseClient(socket, is_pinned=is_cuda)
        stack.callback(lease_client.close)
        first_tokens, launches = FirstTokens(), StepLaunches()
        cache = KernelCache.open(kernels) if is_cuda else None
        graphs = worker_main._snapshot_graphs(setup, runtime, first_tokens, launches, cache)
        resources = HostingResources(
            *(runtime.device, config, runtime.new_pool, lease_client, Loader(runtime.device)),
            kernels=None
            if cache is None
            else worker_main._kernels(cache, runtime, lease_client, first_tokens, graphs),
            snapshots=worker_main._snapshots(setup, config, runtime, graphs),
            torch_limit=runtime.torch_limit,
            marks=WorkerMarks(None, launches),
            first_tokens=first_tokens,
        )
        ring = Ring()
        trace_worker(ring)
        inbox: Inbox = SimpleQueue()
        facts: Queue[TimedFact | None] = Queue()
        loop = WorkerLoop(resources, inbox, lambda fact: facts.put(TimedFact(time.perf_counter(), fact)))

        yield Rig(scale, WorkerClient(inbox, facts, orders, lease_client.segment), graphs, ring), loop


def hasten_snapshots() -> None:
    """Have this process make snapshots without repeated steps: no benchmark reads their times."""
    snapshot_maker.NUM_RUNS, snapshot_maker.QUIET_S = 1, 0.05


def trace_worker(ring: Ring) -> None:
    """Have all that matters in a worker's process noted from now on."""
    for owner, function, what in _TRACED:
        ring.trace(owner, function, what)
    _trace_by_kind(ring)
    ring.trace_garbage()


def _trace_by_kind(ring: Ring) -> None:
    """Have messages noted by what they are, and tokens by whose they are."""
    handle, tell_step = WorkerLoop._handle, Runs.send_step

    def handle_noted(loop: WorkerLoop, message: Message) -> None:
        kind = message.news if isinstance(message, ModelNews) else message
        with ring.span(f"handle {type(kind).__name__}"):
            handle(loop, message)

    def tell_noted(runs: Runs, model: ModelId, outcome: StepOutcome, step_s: float) -> None:
        with ring.span(f"{TELL} {model}" if outcome.outputs else "tell nothing"):
            tell_step(runs, model, outcome, step_s)

    WorkerLoop._handle = handle_noted  # type: ignore[method-assign]
    Runs.send_step = tell_noted  # type: ignore[method-assign]


def measure(rig: Rig, without: Sequence[str]) -> None:
    """Ask all questions of a worker that runs, and have it end."""
    try:
        with step("snapshots"):
            rig.make_snapshot(FOUR)
            rig.make_snapshot(SEVEN)
            rig.drop(FOUR)
            if rig.scale.kind == "cuda":
                rig.client.segment.wait_pinned()
        rig.burst("the first one in its process")
        for name in ("everything", *(f"without {part}" for part in without)):
            part = name.removeprefix("without ")
            with ExitStack() as stack:
                if part in PARTS:
                    stack.enter_context(patch.object(*PARTS[part]))
                for ask in (rig.others, rig.burst):
                    if ask == rig.burst and part == "own end":
                        continue  # nobody else is there
                    try:
                        ask(name)
                    except Exception:  # the others may do better
                        tell(f"{ask.__name__}, {name}: FAILED")
                        traceback.print_exc()
                        rig.has_failed = True
    except Exception:  # the thread's top
        traceback.print_exc()
        rig.has_failed = True
    finally:
        rig.client.send(Shutdown())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--restores", type=int, default=Scale().restores)
    parser.add_argument("--without", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU, without graphs")
    chosen = parser.parse_args()
    scale = TINY if chosen.tiny else Scale(restores=chosen.restores)
    logging.basicConfig(level="WARNING", format="%(message)s")
    logging.getLogger("hearth.snapshot").setLevel("INFO")  # how long each restore took
    sys.setswitchinterval(worker_main.SWITCH_S)
    hasten_snapshots()
    with working(scale, is_tiny=chosen.tiny) as (rig, loop):
        thread = threading.Thread(target=measure, args=(rig, chosen.without), name="asks")
        thread.start()
        try:
            with collect_when_idle():  # as a worker's process does
                loop.run()  # on the thread that has brought the device up: captures find library memory by it
        finally:
            rig.client.facts.put(None)
            thread.join()
    sys.stdout.flush()
    os._exit(rig.has_failed)  # as a worker: what the device has goes with the process


if __name__ == "__main__":
    main()
