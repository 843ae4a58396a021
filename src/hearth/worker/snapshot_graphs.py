"""The graphs of engines as parts of snapshots: packed where one is made, restored by a thread where one is used.

Kernels are found once for all models of a worker: those of libraries by a few products that are captured
before the worker says that it is ready, and never run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from hearth.cuda_driver import CudaDriver
from hearth.cuda_graphs import CudaGraphs
from hearth.engine.engine import Engine
from hearth.engine.graph_capture import GraphCapture
from hearth.engine.graphs import StepGraphs
from hearth.kernels.variants import loaded_functions
from hearth.memory.cuda_pages import FIXED_ADDRESSES
from hearth.snapshot.kernel_handles import KernelHandles
from hearth.snapshot.restored_graphs import RestoredGraphs, pack_graphs

#: Rows of the products that bring libraries up, of a square of so many columns.
_TRIGGER_ROWS, _TRIGGER_COLUMNS = (8, 64, 256), 512

log = logging.getLogger(__name__)


class SnapshotGraphs:
    """Graphs in snapshots of the models on one CUDA device. Any thread calls it."""

    def __init__(self, device: torch.device) -> None:
        """Find the kernels of libraries. Raises DeviceError where the driver cannot tell of graphs."""
        self._driver = CudaGraphs(CudaDriver(device.index or 0))
        self._handles = KernelHandles(self._driver, loaded_functions)
        self._handles.learn(GraphCapture().capture(_use_libraries).raw_cuda_graph())
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self._thread = ThreadPoolExecutor(1, "hearth-graphs", lambda: torch.cuda.set_device(device))

    def parts_of(self, engine: Engine, on_discard: Callable[[str], None]) -> EngineGraphs | None:
        """Return the graphs of an engine; None: it runs none. `on_discard` is as in `RestoredGraphs`."""
        graphs = engine.runner.graphs
        return None if graphs is None else EngineGraphs(self, graphs, on_discard)

    def pack(self, graphs: StepGraphs) -> dict[str, bytes]:
        handles = {key.name: graph.raw_cuda_graph() for key, graph in graphs.captured.items()}
        binaries = {function: binary for binary, function in loaded_functions().items()}
        return pack_graphs(self._driver, handles, binaries, FIXED_ADDRESSES)

    def restored(
        self, sections: Mapping[str, memoryview], on_discard: Callable[[str], None]
    ) -> RestoredGraphs:
        """Return graphs that the thread will restore. Raises GraphUnreadable."""
        return RestoredGraphs(self._driver, self._handles, sections, on_discard)

    def start(self, graphs: RestoredGraphs) -> None:
        self._thread.submit(self._restore, graphs)

    def _restore(self, graphs: RestoredGraphs) -> None:
        try:
            graphs.restore(self._stream.cuda_stream)
        except Exception:  # the thread's top: steps are captured where graphs are missing
            log.exception("graphs_not_restored")
            graphs.give_up()


class EngineGraphs:
    """The graphs of one engine, as `SnapshotParts`."""

    def __init__(self, shared: SnapshotGraphs, graphs: StepGraphs, on_discard: Callable[[str], None]) -> None:
        self._shared, self._graphs, self._on_discard = shared, graphs, on_discard

    def save(self) -> Mapping[str, bytes]:
        return self._shared.pack(self._graphs)

    def restore(self, sections: Mapping[str, memoryview]) -> None:
        restored = self._shared.restored(sections, self._on_discard)
        self._graphs.restore_from(restored)
        self._shared.start(restored)


def _use_libraries() -> None:
    """Queue products and what else steps leave to torch, of small matrices in each dtype of a model."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        size = _TRIGGER_COLUMNS
        weight = torch.empty(size, size, dtype=dtype, device="cuda")
        x, out = torch.empty(2, max(_TRIGGER_ROWS), size, dtype=dtype, device="cuda")
        rows = torch.empty(8, dtype=torch.int32, device="cuda")
        for num_rows in _TRIGGER_ROWS:
            torch.mm(x[:num_rows], weight.t(), out=out[:num_rows])
            torch.addmm(weight[0], x[:num_rows], weight.t(), out=out[:num_rows])
        torch.index_select(x, 0, rows, out=out[: len(rows)])
        out.add_(x)
        torch.empty_like(out, dtype=torch.float32).copy_(out)
