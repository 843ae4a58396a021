"""The graphs of engines as parts of snapshots: packed where one is made, restored where one is used.

They are restored by a thread of their own, beside the steps of all models, which gives way to whoever waits
for a first token, and to launches of steps, unless these lack the graph. What it finds of kernels serves
every model of the worker.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from hearth.engine.engine import Engine
from hearth.engine.graph_capture import GraphCapture
from hearth.engine.graphs import CapturedGraph, StepGraphs
from hearth.engine.runner import Runner
from hearth.kernels.variants import loaded_functions
from hearth.memory.cuda_pages import FIXED_ADDRESSES
from hearth.snapshot.graph_names import graph_names, is_for_adapters
from hearth.snapshot.kernel_handles import KernelHandles
from hearth.snapshot.native_rebuild import NativeRebuild
from hearth.snapshot.restored_graphs import RestoredGraphs, pack_graphs
from hearth.snapshot.trial_mark import TrialMark
from hearth.system.cuda.driver import CudaDriver
from hearth.system.cuda.graphs import CudaGraphs
from hearth.worker.first_tokens import FirstTokens
from hearth.worker.step_launches import StepLaunches

#: For so long graphs of a model that has just come give way, in all. A step without them takes longer.
MAX_PAUSE_S = 2.0
#: Graphs that are destroyed behind one launch, 0.3 ms each: those of a model that comes wait for all of them.
NUM_DESTROYED = 4

log = logging.getLogger(__name__)


class SnapshotGraphs:
    """Graphs in snapshots of the models on one CUDA device. Any thread calls it."""

    def __init__(
        self,
        device: torch.device,
        first_tokens: FirstTokens,
        kernel_cache: Path | None,
        launches: StepLaunches | None = None,
    ) -> None:
        """`kernel_cache`: where native code is kept; None: nowhere. `launches`: that graphs give way to.

        Raises:
            DeviceError: the driver cannot tell of graphs.
        """
        self._first_tokens, self._launches = first_tokens, launches or StepLaunches()
        self._driver = CudaGraphs(CudaDriver(device.index or 0))
        self._handles = KernelHandles(self._driver, loaded_functions)
        self._rebuild: NativeRebuild | None = None  #: written and used by the thread alone
        self._thread = ThreadPoolExecutor(1, "hearth-graphs", lambda: torch.cuda.set_device(device))
        self._thread.submit(self._load_native_code, kernel_cache)

    def learn(self, graph: CapturedGraph) -> None:
        """Find the kernels of libraries that a graph is made of, captured here and never to be run."""
        self._handles.learn(graph.raw_cuda_graph())

    def give_way(self, most_s: float) -> Callable[[], None]:
        """Return what waits while graphs are to come, or somebody waits for a first token.

        All of its calls together wait for at most so long from now on.
        """
        until_s, tokens = time.monotonic() + most_s, self._first_tokens.give_way(most_s)

        def wait() -> None:
            if (left_s := until_s - time.monotonic()) > 0.0:
                with suppress(TimeoutError):
                    self._thread.submit(int).result(left_s)  # behind all that the thread is to do
            tokens()

        return wait

    def parts_of(self, engine: Engine) -> EngineGraphs | None:
        """Return the graphs of an engine; None: it runs none."""
        runner = engine.runner
        return None if runner.graphs is None else EngineGraphs(self, runner, runner.graphs)

    def pack(self, graphs: StepGraphs) -> dict[str, bytes]:
        """Return sections of all captured graphs. Raises GraphUnreadable."""
        captured = dict(graphs.captured)  # at once, and kept: the steps' thread may add some, or drop all
        handles = {key.name: graph.raw_cuda_graph() for key, graph in captured.items()}
        binaries = {function: binary for binary, function in loaded_functions().items()}
        return pack_graphs(self._driver, handles, binaries, FIXED_ADDRESSES)

    def restored(
        self,
        sections: Mapping[str, memoryview],
        mark: TrialMark,
        discard: Callable[[str], None],
        runner: Runner,
    ) -> RestoredGraphs:
        """Return the graphs of a snapshot for a runner, none of them restored yet. Raises GraphUnreadable.

        Those of steps with adapters come once the runner has one: they take as much memory as the others.
        """
        go_on = partial(self._go_on, weakref.ref(runner))  # the runner has the graphs, not they the runner
        return RestoredGraphs(
            *(self._handles, sections, mark, discard, is_for_adapters, go_on), destroy=self._destroy
        )

    def start(self, graphs: RestoredGraphs, runner: Runner) -> None:
        """Have the thread restore graphs."""
        self._thread.submit(self._restore, graphs, runner)

    def _destroy(self, graphs: list[object]) -> None:
        """Have the thread destroy graphs: 80 of them would hold up the steps of all models for 30 ms."""
        self._thread.submit(self._empty, graphs)

    def _empty(self, graphs: list[object]) -> None:
        while graphs:
            self._launches.get_behind()
            del graphs[-NUM_DESTROYED:]

    def _go_on(self, runner: weakref.ref[Runner], graphs: RestoredGraphs) -> None:
        if (found := runner()) is not None:
            self.start(graphs, found)

    def _load_native_code(self, kernel_cache: Path | None) -> None:
        """Compile what makes graphs, or find it compiled, while a worker starts and before any graph."""
        try:
            self._rebuild = NativeRebuild.load(self._driver, kernel_cache)
        except Exception:  # the thread's top: graphs are captured as without snapshots
            log.exception("fallback graphs=captured")

    def _restore(self, graphs: RestoredGraphs, runner: Runner) -> None:
        tokens = self._first_tokens.give_way(MAX_PAUSE_S)

        def give_way() -> None:
            tokens()
            if not graphs.is_any_wanted:  # else steps run without their graph, which costs them more
                self._launches.get_behind()

        def between_layers() -> None:
            if not graphs.is_any_wanted:
                self._launches.give_way()

        def rehearse(name: str) -> None:
            # Each with memory of its own: torch refuses to fill that of a graph which is gone.
            graph = runner.rehearse(name, GraphCapture(), between_layers)
            if graph is not None:
                between_layers()
                self.learn(graph)

        try:
            graphs.restore(self._rebuild, rehearse, give_way)
        except Exception:  # the thread's top: the next model may do better
            log.exception("graphs_not_restored")
            graphs.stop()


class EngineGraphs:
    """The graphs of one engine, as `SnapshotParts`."""

    def __init__(self, shared: SnapshotGraphs, runner: Runner, graphs: StepGraphs) -> None:
        self._shared, self._runner, self._graphs = shared, runner, graphs

    def save(self) -> Mapping[str, bytes]:
        return self._shared.pack(self._graphs)

    def lacks_adapters(self, sections: Collection[str]) -> bool:
        return not self._runner.sizes.all_names(has_adapters=True) <= set(graph_names(sections))

    def restore(
        self, sections: Mapping[str, memoryview], mark: TrialMark, discard: Callable[[str], None]
    ) -> None:
        restored = self._shared.restored(sections, mark, discard, self._runner)
        self._graphs.restore_from(restored)
        self._shared.start(restored, self._runner)
