"""Captures work that is queued on a CUDA device as a graph. Knows neither steps nor sizes.

Captures steps of all sizes while the weights of a model arrive. Runs none of them.

To capture a size takes the host 5 to 20 ms: libraries load kernels for it, and the driver makes the graph
ready, which may stop the device. The first requests of many lengths lost half a second by that. While weights
arrive no step could be replayed anyway, and the host has little to do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import cache

import torch

from hearth.engine.graphs import Work
from hearth.engine.layer_runner import LayerRunner

#: torch allows one capture at a time in a process, whichever thread asks.
_CAPTURE = threading.Lock()


class GraphCapture:
    """Captures the graphs of one engine, which share memory. Mutable; any thread captures, one at a time."""

    def __init__(self) -> None:
        #: Memory for what libraries allocate while they are captured; one for all graphs, as they take turns.
        self._pool = torch.cuda.graph_pool_handle()
        _capture_stream(torch.cuda.current_device())

    def capture(self, work: Work) -> torch.cuda.CUDAGraph:
        """Return a graph of the work, which is not run. Its nodes are kept, to make a snapshot of."""
        graph, stream = torch.cuda.CUDAGraph(keep_graph=True), _capture_stream(torch.cuda.current_device())
        replays = torch.cuda.current_stream()
        # Recording waits for nothing. `torch.cuda.graph` would wait for the device, and empty torch's cache.
        with _CAPTURE, torch.cuda.stream(stream):
            # cuBLAS takes its workspace of a stream with a thread's first product: not from the memory of a
            # graph. Graphs that are replayed use that workspace as well, so they take turns with the product.
            stream.wait_stream(replays)
            _multiply()
            replays.wait_stream(stream)
            # Other threads go on using the device meanwhile, such as a second model's step thread. This one
            # may load kernels, as libraries do at the first launch, which other modes would not let pass.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def forget(self) -> None:
        """Take new memory for the next graphs, because all of the others are dropped."""
        # The old pool may outlive its graphs, and torch refuses to fill such a one again.
        self._pool = torch.cuda.graph_pool_handle()


def use_library_memory(pool: torch.cuda.MemPool) -> None:
    """Have cuBLAS find its workspaces for all captures on the current device in `pool`.

    Called before anything is captured, by the thread that captures: there is one for each thread and stream.
    What `pool` gives is taken here and never again, in the same order in every process.
    """
    with torch.cuda.use_mem_pool(pool):
        _capture_stream(torch.cuda.current_device())


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """The stream of all captures on a device, and so the owner of one cuBLAS workspace for all graphs.

    They may share it, for they are all replayed on one stream, the default one.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch leaves it untyped
    with torch.cuda.stream(stream):
        _multiply()  # the library comes up with the first product, which takes 0.1 s: not in front of a step
    return stream


def _multiply() -> None:
    """Have cuBLAS take all its workspaces: products with a bias go another way, and may have their own."""
    x, y, out = torch.zeros(3, 128, 128, dtype=torch.bfloat16, device="cuda")
    torch.mm(x, y, out=out)
    torch.addmm(x[0], x, y, out=out)


log = logging.getLogger(__name__)


def capture_sizes(layers: LayerRunner, goes_on: Callable[[], bool] = lambda: True) -> int:
    """Capture steps of all sizes that have no graph, the smallest first, while `goes_on`; return how many.

    Any one thread may call it, beside all steps, once the model's own kernels are on the device. Where steps
    are not captured nothing is done.
    """
    if layers.graphs is None:
        return 0
    shapes = layers.sizes.all_shapes()[::-1]
    began_s, num_captured = time.perf_counter(), 0
    with torch.cuda.device(layers.kv.device):
        for shape in shapes:
            if not goes_on():
                break
            layers.capture_ahead(shape)
            num_captured += 1
    seconds = time.perf_counter() - began_s
    log.info("sizes_captured sizes=%d of=%d seconds=%.3f", num_captured, len(shapes), seconds)
    return num_captured


class CaptureAhead:
    """Captures the sizes of an engine on a thread of its own. Any thread may stop it."""

    def __init__(self, layers: LayerRunner, goes_on: Callable[[], bool]) -> None:
        """Begin, and end at the latest when `goes_on` is false."""
        self._is_stopped = False
        self._goes_on = goes_on
        # Daemonic, for a process that ends need not wait for what nobody will use.
        self._thread = threading.Thread(
            target=self._capture, args=(layers,), name="hearth-capture", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Capture no more, and wait for the size at hand. Stopping again is harmless."""
        self._is_stopped = True
        self._thread.join()

    def _capture(self, layers: LayerRunner) -> None:
        try:
            capture_sizes(layers, lambda: not self._is_stopped and self._goes_on())
        except Exception:  # the thread's top: a size that has no graph is captured by the step that needs it
            log.exception("sizes_not_captured")
