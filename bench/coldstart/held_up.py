"""What holds up a model that runs while another one is restored, and its own first steps? Part by part.

    python -m bench.coldstart.held_up [--only cold rehearsed stood_in others] [--tiny]

    cold        64 requests at once to a 7B that is restored in a new process: every long step by its parts
    rehearsed   the same, with the kernels of trials loaded ahead
    stood_in    the same, with a graph of the first decode steps captured before, as beside a load
    others      16 streams of a 7B, beside each part of restoring a 4B alone: by a thread, or between steps

Each is a process of its own, which prints as it goes; what fails costs nothing else. Every part notes when it
began and ended, so that each gap of more than twice the median is told with what happened in it, by thread.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.coldstart.graph_process import SPARE_BYTES, GraphTask, hosting_of, placed, worker_setup
from bench.coldstart.ring import Noted, Ring
from bench.coldstart.shapes import SHAPES, TINY_SHAPES
from bench.report import percentiles, tell
from hearth.core.config import EngineConfig, StoreConfig
from hearth.core.types import Hold, ModelId, RequestId, SamplingParams
from hearth.engine.assemble import Memory, ModelSpec, assemble, block_bytes, own_limits
from hearth.engine.dry_run import KernelNeeds
from hearth.engine.engine import Engine
from hearth.engine.graph_capture import GraphCapture
from hearth.engine.graph_trial import GraphTrial, rehearse_trial
from hearth.engine.graphs import StepGraphs
from hearth.engine.kernel_warmup import KernelWarmup
from hearth.engine.layer_runner import LayerRunner
from hearth.engine.pending_step import PendingStep
from hearth.engine.runner import Runner
from hearth.engine.step_shape import StepShape
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.kernel_cache import KernelCache
from hearth.kernels.variants import loaded_functions
from hearth.memory.pool import EvictionTerms
from hearth.models.dtypes import DTYPES
from hearth.models.weights import bind
from hearth.snapshot.graph_nodes import ALIGNMENT, GraphNodes
from hearth.snapshot.kernel_handles import KernelHandles
from hearth.snapshot.native_rebuild import CALLS, NativeRebuild, RestoredGraph, _Rebuilt
from hearth.snapshot.restored_graphs import RestoredGraphs
from hearth.snapshot.trial_mark import TrialMark
from hearth.system.cuda.driver import CudaDriver
from hearth.system.cuda.graphs import CudaGraphs
from hearth.worker.__main__ import SWITCH_S
from hearth.worker.background import FirstTokens
from hearth.worker.runtime import StartTimes, start
from hearth.worker.snapshot_graphs import SnapshotGraphs

RUNNING, OTHER = "7B", "4B"
LONG = 2.0  #: times the median
_TOLD = 4  #: long gaps of a part
PARTS = ("cold", "rehearsed", "stood_in", "others")
PATIENCE_S = 90.0  #: for one of them, with kernels to compile


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done."""

    streams: int = 16
    steps: int = 170  #: beside each part
    every: int = 40  #: steps between two rounds of what is done between steps
    burst: int = 64
    burst_tokens: int = 48
    prompt: int = 128


@dataclass(frozen=True, slots=True)
class Hosted:
    """A model with random weights, and its engine."""

    model: ModelId
    spec: ModelSpec
    engine: Engine
    assemble: Callable[[], Engine]  #: another engine over the same memory

    @property
    def runner(self) -> Runner:
        return self.engine.runner

    def ask(self, num_requests: int, num_prompt: int, num_new: int, seed: int = 0) -> None:
        draw = Random(seed)
        for _ in range(num_requests):
            prompt = [draw.randrange(self.spec.arch.vocab_size) for _ in range(num_prompt)]
            params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
            request_id = RequestId(f"{self.model}-{seed}-{draw.random()}")
            self.engine.add(self.engine.request(request_id, prompt, params))

    def drain(self) -> None:
        while self.engine.has_work:
            self.engine.step()
        self.engine.flush()


class Rig:
    """A device that is up, with some models. Mutable, as their engines are."""

    def __init__(self, scale: Scale, tokens_by_model: dict[str, int], *, is_tiny: bool) -> None:
        """`tokens_by_model`: the KV of each, by the name of its shape."""
        shapes, kind, config = (
            TINY_SHAPES if is_tiny else SHAPES,
            "cpu" if is_tiny else "cuda",
            EngineConfig(),
        )
        kernels = Path(StoreConfig().path).expanduser() / "kernels"
        device = torch.device("cpu") if is_tiny else torch.device("cuda", 0)
        specs, num_bytes = dict[str, ModelSpec](), 0
        for name, num_tokens in tokens_by_model.items():
            shape = shapes[name]
            dtype = DTYPES[shape.dtype]
            limits = own_limits(config, shape.arch, dtype, device)
            specs[name] = ModelSpec(shape.arch, dtype, shape.arch.max_positions, limits, frozenset())
            num_bytes += shape.weights_bytes + (limits.num_blocks(num_tokens) + 2) * block_bytes(specs[name])
        first = shapes[next(iter(tokens_by_model))]
        plain = asdict(next(iter(specs.values())).limits)
        task = GraphTask(True, first.config, first.dtype, kind, plain, str(kernels), "", 1, 1)
        num_bytes += SPARE_BYTES if not is_tiny else 64 << 20
        self.runtime = start(worker_setup(task, config, num_bytes), config, StartTimes())
        self.device, self.ring, self.hosted = self.runtime.device, Ring(), dict[str, Hosted]()
        self.pool = self.runtime.new_pool(lambda _: EvictionTerms(Hold.BUSY, 0.0, is_loading=False))
        for slot, (name, num_tokens) in enumerate(tokens_by_model.items()):
            shape, spec = shapes[name], specs[name]
            if not is_tiny:
                COMPILATIONS.watch()
                needs = KernelNeeds.on(self.device, shape.arch, shape.dtype, shape.quant, spec.limits)
                KernelWarmup(KernelCache.open(kernels)).compile(needs)
            num_blocks, model = spec.limits.num_blocks(num_tokens), ModelId(name)
            hosting = hosting_of(shape, spec, num_blocks, self.device, slot)
            space = placed(self.pool, hosting, model)
            memory = Memory(space.workspace, space.tables, space.kv, space.sink, num_blocks)

            def new_engine(
                spec: ModelSpec = spec, hosting: Any = hosting, space: Any = space, memory: Memory = memory
            ) -> Engine:
                weights = bind(spec.arch, hosting.layout, space.places)
                return assemble(spec, weights, config, self.device, memory)

            engine = new_engine()
            engine.runner.fill_tables()
            for extent in self.pool.kv.grow(model, num_blocks, 0):
                engine.add_blocks(extent)
            self.hosted[name] = Hosted(model, spec, engine, new_engine)
            tell(f"{name}: up, {num_blocks} blocks of KV")
        self.first_tokens = FirstTokens()
        self.graphs = None if is_tiny else SnapshotGraphs(self.device, self.first_tokens, kernels)
        for owner, function, what in (
            *((Runner, "launch", "launch"), (PendingStep, "wait", "wait"), (Runner, "settle", "settle")),
            *((GraphTrial, "begin", "trial begin"), (GraphTrial, "step_done", "trial step_done")),
            *((GraphTrial, "replay", "trial replay"), (GraphTrial, "end", "trial end")),
            *((GraphTrial, "__init__", "trial pinned number"), (TrialMark, "set", "trial mark")),
            *((LayerRunner, "rehearse", "rehearse"), (NativeRebuild, "__call__", "native graph")),
            *((KernelHandles, "learn", "learn"), (KernelHandles, "resolve", "resolve")),
            *((RestoredGraphs, "_functions", "functions"), (GraphCapture, "capture", "capture")),
        ):
            self.ring.trace(owner, function, what)

    def sections(self, name: str) -> dict[str, memoryview]:
        """Capture all graphs of a model, and return them as a mapped file would have them."""
        runner, found = self.hosted[name].runner, dict[str, memoryview]()
        if self.graphs is None or runner.layers.graphs is None:
            return found
        began_s = time.perf_counter()
        runner.capture_all()
        for key, packed in self.graphs.pack(runner.layers.graphs).items():
            room = np.empty(len(packed) + ALIGNMENT, np.uint8)
            begin = -room.ctypes.data % ALIGNMENT
            room[begin : begin + len(packed)] = np.frombuffer(packed, np.uint8)
            found[key] = memoryview(room)[begin : begin + len(packed)]  # type: ignore[arg-type] # as it is
        tell(f"{name}: {len(found)} graphs captured and packed in {time.perf_counter() - began_s:.2f} s")
        return found


def tell_steps(
    ring: Ring, name: str, ends_s: Sequence[float], *, long: float = LONG, most: int = _TOLD
) -> None:
    """Print how even steps were, and what happened in those that took `long` times the median, at `most`."""
    steps_s = np.diff(np.array(ends_s))
    found = percentiles(steps_s.tolist())
    are_long = [at for at in range(len(steps_s)) if steps_s[at] > long * found["p50"]]
    num_twice = sum(step_s > LONG * found["p50"] for step_s in steps_s)
    figures = " ".join(f"{key}={1e3 * found[key]:.2f}" for key in ("p50", "p90", "p99", "max"))
    tell(f"{name}: ms {figures} over_twice={num_twice} steps={len(steps_s)}")
    for at in sorted(are_long, key=lambda at: -steps_s[at])[:most]:
        tell(f"    step {at}: {1e3 * steps_s[at]:.1f} ms, in which")
        tell_parts(ring.during(ends_s[at], ends_s[at + 1]), ends_s[at], ends_s[at + 1])


def tell_parts(notes: Sequence[Noted], begin_s: float, end_s: float) -> None:
    """Print what was done in a step, by thread; `notes` are those that it meets."""
    merged = dict[tuple[str, str], list[Noted]]()
    for one in notes:
        merged.setdefault((one.thread, one.what), []).append(one)
    for (thread, what), all_of in sorted(merged.items(), key=lambda item: item[1][0].begin_s):
        took_s = sum(min(one.end_s, end_s) - max(one.begin_s, begin_s) for one in all_of)
        since_ms = 1e3 * (all_of[0].begin_s - begin_s)
        longest_ms = 1e3 * max(one.end_s - one.begin_s for one in all_of)
        tell(
            f"        {thread:<18} {what:<20} {1e3 * took_s:7.2f} ms in {len(all_of):3}, "
            f"from {since_ms:+.2f}, longest {longest_ms:.2f}"
        )


# The first steps of a model's own.


def burst(scale: Scale, part: str, *, is_tiny: bool) -> None:
    """Ask for many streams at once of a model that is restored: its first time in the process, and again."""
    tokens = scale.burst * (scale.prompt + scale.burst_tokens + 64)
    rig = Rig(scale, {RUNNING: tokens}, is_tiny=is_tiny)
    hosted, sections = rig.hosted[RUNNING], rig.sections(RUNNING)
    if part != "cold" and not is_tiny:
        began_s = time.perf_counter()
        rehearse_trial(hosted.runner.layers, hosted.runner.sampler, GraphCapture())
        tell(f"trial rehearsed in {time.perf_counter() - began_s:.3f} s")
    with tempfile.TemporaryDirectory() as place:
        for number in range(3):
            graphs = hosted.runner.layers.graphs
            if rig.graphs is not None and graphs is not None:
                graphs.forget()
                rig.first_tokens.awaited(number)
                parts = rig.graphs.parts_of(hosted.engine)
                assert parts is not None
                parts.restore(
                    sections, TrialMark(Path(place) / "graphs.snapshot"), lambda reason: tell(reason)
                )
                if part == "stood_in":
                    size = next(size for size in hosted.runner.layers.sizes.decode if size >= scale.burst)
                    hosted.runner.layers.capture_substitutes(StepShape.decode(size), GraphCapture)
            hosted.ask(scale.burst, scale.prompt, scale.burst_tokens, seed=number)
            ends_s = list[float]()
            while hosted.engine.has_work:
                outputs = hosted.engine.step().outputs
                if len(outputs):
                    rig.first_tokens.served(number)
                if len(outputs) == scale.burst:
                    ends_s.append(time.perf_counter())
            hosted.engine.flush()
            tell_steps(rig.ring, f"burst, time {number + 1} in the process", ends_s)
            if graphs is not None:
                tell(f"    graphs tried: {graphs.num_restored}, captured: {len(graphs.captured)}")


# Others.


@dataclass(frozen=True, slots=True)
class PackedGraph:
    """A graph as a snapshot has it, and the functions of its kernels in this process."""

    data: memoryview
    functions: npt.NDArray[np.uint64]


class Beside:
    """The 4B's parts of restoring. Mutable; a thread or the step thread calls one part at a time."""

    def __init__(
        self, rig: Rig, driver: CudaGraphs, handles: KernelHandles, sections: dict[str, memoryview]
    ) -> None:
        """`handles` know all kernels of the graphs in `sections`."""
        self._rig, self._driver, self._handles, self._sections = rig, driver, handles, sections
        self._ring, self._other = rig.ring, rig.hosted[OTHER]
        self._captured = self._other.runner.layers.graphs
        native = NativeRebuild.load(driver, None)
        if native is None:
            raise RuntimeError("there is no C compiler (cc)")
        self._native = native
        self._packed = [
            PackedGraph(data, handles.resolve(GraphNodes.unpack(data).kernels)) for data in sections.values()
        ]
        self._made = list[RestoredGraph]()
        self.launched = threading.Event()  #: not set while a step of the other model is launched
        self.launched.set()
        self._nothing = _library_that_does_nothing()

    @staticmethod
    def of(rig: Rig) -> Beside:
        """Capture all graphs of the 4B, so that all of its kernels are known."""
        driver, graphs = CudaGraphs(CudaDriver(0)), rig.hosted[OTHER].runner.layers.graphs
        handles, sections = KernelHandles(driver, loaded_functions), rig.sections(OTHER)
        assert graphs is not None, "graphs are off"
        for graph in graphs.captured.values():
            handles.learn(graph.raw_cuda_graph())
        return Beside(rig, driver, handles, sections)

    def rehearsals(self) -> None:
        sizes = self._other.runner.layers.sizes
        for name in (f"decode-{sizes.decode[0]}", f"tail-{sizes.samples[0]}", f"mixed-{sizes.mixed[0]}"):
            graph = self._other.runner.layers.rehearse(name, GraphCapture())
            if graph is not None:
                self._handles.learn(graph.raw_cuda_graph())

    def nodes_only(self) -> None:
        """Make all nodes and edges, and nothing executable of them."""
        calls = (ctypes.c_void_p * len(CALLS))(*map(self._driver.driver.address, CALLS))
        calls[CALLS.index("cuGraphInstantiateWithFlags")] = self._nothing
        context = self._driver.driver.enter_context()
        for one in self._packed:
            data, result = np.frombuffer(one.data, np.uint8), _Rebuilt()
            with self._ring.span("nodes"):
                outcome = self._native._function(
                    *(calls, context, data.ctypes.data, len(data)),
                    *(one.functions.ctypes.data, len(one.functions), ctypes.byref(result)),
                )
            assert outcome == 0, f"{outcome=}"

    def graphs(self) -> None:
        self._made = [self._native(one.data, one.functions) for one in self._packed]
        with self._ring.span("destroy all"):
            self._made.clear()

    def graphs_between_launches(self) -> None:
        """Make graphs, each behind the launch of a step."""
        for one in self._packed:
            self.launched.wait(0.02)
            self._made.append(self._native(one.data, one.functions))
        while self._made:
            self.launched.wait(0.02)
            with self._ring.span("destroy one"):
                self._made.pop()

    def make(self) -> None:
        self._made = [self._native(one.data, one.functions) for one in self._packed]

    def destroy(self) -> None:
        with self._ring.span("destroy all"):
            self._made.clear()

    def assemble(self) -> None:
        with self._ring.span("assemble"):
            self._other.assemble()

    def capture_first(self) -> None:
        """Capture all graphs of a first step and of the one behind it, as could be done during a load."""
        runner = self._other.runner
        runner.layers.graphs = StepGraphs(GraphCapture())
        for shape in (StepShape(True, runner.layers.sizes.mixed[0], 1), StepShape.decode(1)):
            with self._ring.span("capture ahead"):
                runner.layers.capture_ahead(shape)

    def first_step(self) -> None:
        """Launch a first step, which is taken in behind the next one of the other model (`finish`)."""
        with self._ring.span("first step"):
            self._other.ask(1, 1, 1, seed=time.perf_counter_ns())
            self._other.engine.step()

    def finish(self) -> None:
        if self._other.engine.has_work:
            with self._ring.span("first step taken in"):
                self._other.drain()

    def eager_first_step(self) -> None:
        self._other.runner.layers.graphs = None
        self.first_step()

    def captured_first_step(self) -> None:
        self._other.runner.layers.graphs = self._captured
        self.first_step()

    def whole(self) -> None:
        """Restore as a worker does: behind a first step that runs without graphs."""
        graphs = StepGraphs(GraphCapture())
        self._other.runner.layers.graphs = graphs
        assert self._rig.graphs is not None
        parts = self._rig.graphs.parts_of(self._other.engine)
        assert parts is not None
        with tempfile.TemporaryDirectory() as place:
            parts.restore(
                self._sections, TrialMark(Path(place) / "graphs.snapshot"), lambda reason: tell(reason)
            )
            self._rig.graphs.give_way(2.0)()  # behind all of them
        with self._ring.span("drop restored"):
            graphs.drop_restored()


def others(scale: Scale, *, is_tiny: bool) -> None:
    """Have streams of one model run beside each part of restoring another."""
    num_new = (2 if is_tiny else 15) * (scale.steps + 10) + 100
    running_tokens = scale.streams * (num_new + scale.prompt + 64)
    rig = Rig(scale, {RUNNING: running_tokens, OTHER: 4096}, is_tiny=is_tiny)
    running, ring = rig.hosted[RUNNING], rig.ring
    running.runner.capture_all()
    running.ask(scale.streams, min(scale.prompt, 64), num_new)
    for _ in range(10):
        running.engine.step()
    beside = None if is_tiny else Beside.of(rig)
    none: Callable[[], None] = lambda: None  # noqa: E731 - shorter
    ways: list[tuple[str, Callable[[], None], Callable[[], None]]] = [("nothing", none, none)]
    if beside is not None:
        ways += [
            ("thread: assemble the engine", beside.assemble, none),
            ("thread: three rehearsals", beside.rehearsals, none),
            ("thread: nodes and edges only", beside.nodes_only, none),
            ("thread: graphs, instantiated and destroyed", beside.graphs, none),
            ("thread: the same, each behind a launch", beside.graphs_between_launches, none),
            ("thread: a first step captured", beside.capture_first, none),
            ("steps: a first step without graphs", none, beside.eager_first_step),
            ("steps: a first step by captured graphs", none, beside.captured_first_step),
            ("thread: whole restore", beside.whole, none),
            ("nothing, again", none, none),
        ]
    for name, by_thread, between in ways:
        try:
            ends_s = _steps_beside(scale, running, beside, by_thread, between)
            tell_steps(ring, name, ends_s)
        except Exception:  # the other parts may do better
            tell(f"{name}: FAILED")
            traceback.print_exc()
    if beside is not None:  # what a drop does on the step thread where graphs go with their last owner
        beside.make()
        began_s = time.perf_counter()
        beside.destroy()
        tell(
            f"steps: destroy all graphs of one model: {1e3 * (time.perf_counter() - began_s):.1f} ms at once"
        )


def _steps_beside(
    scale: Scale,
    running: Hosted,
    beside: Beside | None,
    by_thread: Callable[[], None],
    between: Callable[[], None],
) -> list[float]:
    """Make steps, and return when each was over."""
    is_over, failures, ends_s = threading.Event(), list[Exception](), list[float]()

    def work() -> None:
        if torch.cuda.is_available():
            torch.cuda.set_device(0)
        try:
            while not is_over.wait(0.05):
                by_thread()
        except Exception as error:  # told when the thread is joined
            failures.append(error)

    launch = running.runner.launch
    if beside is not None:
        launched = beside.launched

        def noted(plan: Any) -> PendingStep:
            launched.clear()
            try:
                return launch(plan)
            finally:
                launched.set()

        running.runner.launch = noted  # type: ignore[method-assign] # for these steps
    thread = threading.Thread(target=work, name="restores")
    thread.start()
    try:
        for number in range(scale.steps):
            running.engine.step()
            ends_s.append(time.perf_counter())
            if number % scale.every == scale.every - 2:
                between()
            elif beside is not None:
                beside.finish()
    finally:
        is_over.set()
        thread.join()
        running.runner.launch = launch  # type: ignore[method-assign]
    if failures:
        raise failures[0]
    return ends_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU, without graphs")
    parser.add_argument("--here", action="store_true", help="one part, in this process")
    chosen = parser.parse_args()
    if not chosen.here:
        tiny = ["--tiny"] if chosen.tiny else []
        for part in chosen.only:
            began_s = time.perf_counter()
            tell(f"=== {part}")
            command = [sys.executable, "-m", "bench.coldstart.held_up", "--here", "--only", part, *tiny]
            try:
                subprocess.run(command, timeout=PATIENCE_S, check=False)
            except subprocess.TimeoutExpired as error:  # the other parts may do better
                tell(str(error))
            tell(f"=== {part}: {time.perf_counter() - began_s:.1f} s in all")
        return
    sys.setswitchinterval(SWITCH_S)
    scale = Scale(2, 12, 5, 3, 6, 8) if chosen.tiny else Scale()
    (part,) = chosen.only
    if part == "others":
        others(scale, is_tiny=chosen.tiny)
    else:
        burst(scale, part, is_tiny=chosen.tiny)
    sys.stdout.flush()
    os._exit(0)  # as a worker: what the device has goes with the process


def _library_that_does_nothing() -> int:
    """Return the address of a function of C that returns 0."""
    place = Path(tempfile.mkdtemp())
    source, library = place / "nothing.c", place / "nothing.so"
    source.write_text("int nothing(void) { return 0; }\n")
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, source], check=True)
    found = ctypes.cast(ctypes.CDLL(str(library)).nothing, ctypes.c_void_p).value
    assert found is not None
    return found


if __name__ == "__main__":
    main()
