"""Graphs of engines as parts of snapshots: packed when one is made, restored when one is used.

Another thread restores them while models step. It gives way to first tokens, and to launches of steps unless
these lack the graph. Kernels that it finds serve every model of the worker.
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
from hearth.engine.layer_runner import LayerRunner
from hearth.kernels.variants import loaded_functions
from hearth.memory.cuda_pages import FIXED_ADDRESSES
from hearth.snapshot.graph_names import graph_names, is_for_adapters
from hearth.snapshot.kernel_handles import KernelHandles
from hearth.snapshot.native_rebuild import NativeRebuild
from hearth.snapshot.restored_graphs import RestoredGraphs, pack_graphs
from hearth.snapshot.trial_mark import TrialMark
from hearth.system.cuda.driver import CudaDriver
from hearth.system.cuda.graphs import CudaGraphs
from hearth.worker.background import FirstTokens, StepLaunches

#: How long the graphs of a new model give way, in all. Steps without them take longer.
MAX_PAUSE_S = 2.0
#: Graphs that are destroyed behind one launch, 0.3 ms each. Those of a new model wait for all of them.
NUM_DESTROYED = 4

log = logging.getLogger(__name__)


class SnapshotGraphs:
    """Graphs in snapshots of one CUDA device. Any thread may call it."""

    def __init__(
        self,
        device: torch.device,
        first_tokens: FirstTokens,
        kernel_cache: Path | None,
        launches: StepLaunches | None = None,
    ) -> None:
        """`kernel_cache`: directory of native code; None: not kept. Raises DeviceError if unsupported."""
        self._first_tokens, self._launches = first_tokens, launches or StepLaunches()
        self._driver = CudaGraphs(CudaDriver(device.index or 0))
        self._handles = KernelHandles(self._driver, loaded_functions)
        self._rebuild: NativeRebuild | None = None  #: written and used by the thread alone
        self._thread = ThreadPoolExecutor(1, "hearth-graphs", lambda: torch.cuda.set_device(device))
        self._thread.submit(self._load_native_code, kernel_cache)

    def learn(self, graph: CapturedGraph) -> None:
        self._handles.learn(graph.raw_cuda_graph())

    def give_way(self, most_s: float) -> Callable[[], None]:
        """Return a function that waits for restores and first tokens, until `most_s` from now."""
        until_s, tokens = time.monotonic() + most_s, self._first_tokens.give_way(most_s)

        def wait() -> None:
            if (left_s := until_s - time.monotonic()) > 0.0:
                with suppress(TimeoutError):
                    self._thread.submit(int).result(left_s)  # behind all work of the thread
            tokens()

        return wait

    def parts_of(self, engine: Engine) -> EngineGraphs | None:
        layers = engine.runner.layers
        return None if layers.graphs is None else EngineGraphs(self, layers, layers.graphs)

    def pack(self, graphs: StepGraphs) -> dict[str, bytes]:
        """Return sections of all captured graphs. Raises GraphUnreadable."""
        captured = dict(graphs.captured)  # a copy: the step thread may add some, or drop all
        handles = {key.name: graph.raw_cuda_graph() for key, graph in captured.items()}
        binaries = {function: binary for binary, function in loaded_functions().items()}
        return pack_graphs(self._driver, handles, binaries, FIXED_ADDRESSES)

    def restored(
        self,
        sections: Mapping[str, memoryview],
        mark: TrialMark,
        discard: Callable[[str], None],
        layers: LayerRunner,
    ) -> RestoredGraphs:
        """Return the graphs of a snapshot, none of them restored yet. Raises GraphUnreadable.

        Graphs of steps with adapters follow once there is one: they take as much memory as the others.
        """
        go_on = partial(self._go_on, weakref.ref(layers))  # graphs do not own their owner
        return RestoredGraphs(
            self._handles,
            sections,
            mark,
            discard,
            is_later=is_for_adapters,
            go_on=go_on,
            destroy=self._destroy,
        )

    def start(self, graphs: RestoredGraphs, layers: LayerRunner) -> None:
        self._thread.submit(self._restore, graphs, layers)

    def _destroy(self, graphs: list[object]) -> None:
        """Destroy graphs on the thread: destroying 80 of them would stop all steps for 30 ms."""
        self._thread.submit(self._empty, graphs)

    def _empty(self, graphs: list[object]) -> None:
        while graphs:
            self._launches.get_behind()
            del graphs[-NUM_DESTROYED:]

    def _go_on(self, layers: weakref.ref[LayerRunner], graphs: RestoredGraphs) -> None:
        if (found := layers()) is not None:
            self.start(graphs, found)

    def _load_native_code(self, kernel_cache: Path | None) -> None:
        try:
            self._rebuild = NativeRebuild.load(self._driver, kernel_cache)
        except Exception:  # the thread's top: graphs are captured as without snapshots
            log.exception("fallback graphs=captured")

    def _restore(self, graphs: RestoredGraphs, layers: LayerRunner) -> None:
        tokens = self._first_tokens.give_way(MAX_PAUSE_S)

        def give_way() -> None:
            tokens()
            if not graphs.is_any_wanted:  # else steps run without their graph, which costs more
                self._launches.get_behind()

        def between_layers() -> None:
            if not graphs.is_any_wanted:
                self._launches.give_way()

        def rehearse(name: str) -> None:
            # Each with its own memory: torch refuses to reuse that of a dropped graph.
            graph = layers.rehearse(name, GraphCapture(), between_layers)
            if graph is not None:
                between_layers()
                self.learn(graph)

        try:
            graphs.restore(self._rebuild, rehearse, give_way)
        except Exception:  # the thread's top: go on with the next model
            log.exception("graphs_not_restored")
            graphs.stop()


class EngineGraphs:
    def __init__(self, shared: SnapshotGraphs, layers: LayerRunner, graphs: StepGraphs) -> None:
        self._shared, self._layers, self._graphs = shared, layers, graphs

    def save(self) -> Mapping[str, bytes]:
        return self._shared.pack(self._graphs)

    def lacks_adapters(self, sections: Collection[str]) -> bool:
        return not self._layers.sizes.all_names(has_adapters=True) <= set(graph_names(sections))

    def restore(
        self, sections: Mapping[str, memoryview], mark: TrialMark, discard: Callable[[str], None]
    ) -> None:
        restored = self._shared.restored(sections, mark, discard, self._layers)
        self._graphs.restore_from(restored)
        self._shared.start(restored, self._layers)
