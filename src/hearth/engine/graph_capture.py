"""Captures work on a CUDA device as graphs, and the steps of all sizes while weights arrive.

Capturing one size takes the host 5 to 20 ms and may stop the device, which requests of many lengths would
wait for. While weights arrive the host has little to do.
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

#: torch allows one capture at a time in a process.
_CAPTURE = threading.Lock()


class GraphCapture:
    """Captures the graphs of one engine, which share memory. Mutable; any thread captures, one at a time."""

    def __init__(self) -> None:
        #: Memory that libraries allocate during a capture; one pool, since graphs run one at a time.
        self._pool = torch.cuda.graph_pool_handle()
        _capture_stream(torch.cuda.current_device())

    def capture(self, work: Work) -> torch.cuda.CUDAGraph:
        """Return a graph of `work` without running it. Nodes are kept, so that a snapshot can be made."""
        graph, stream = torch.cuda.CUDAGraph(keep_graph=True), _capture_stream(torch.cuda.current_device())
        replays = torch.cuda.current_stream()
        # `torch.cuda.graph` would wait for the device and empty torch's cache.
        with _CAPTURE, torch.cuda.stream(stream):
            # cuBLAS takes a stream's workspace with a thread's first product, which must not come from graph
            # memory. Replayed graphs use the same workspace, so they are ordered with the product.
            stream.wait_stream(replays)
            _multiply()
            replays.wait_stream(stream)
            # Other threads use the device meanwhile, and this one may load kernels at a first launch:
            # stricter modes would refuse both.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def forget(self) -> None:
        # The old pool may outlive its graphs, and torch refuses to fill it again.
        self._pool = torch.cuda.graph_pool_handle()


def use_library_memory(pool: torch.cuda.MemPool) -> None:
    """Have cuBLAS take its workspaces for captures on the current device from `pool`.

    Call this before any capture, on the thread that captures: cuBLAS has a workspace per thread and stream.
    Memory is taken from `pool` once, in the same order in every process.
    """
    with torch.cuda.use_mem_pool(pool):
        _capture_stream(torch.cuda.current_device())


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all captures on a device. Its one cuBLAS workspace serves all graphs."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch leaves it untyped
    with torch.cuda.stream(stream):
        _multiply()  # loads the library, which takes 0.1 s
    return stream


def _multiply() -> None:
    """Have cuBLAS take all workspaces: products with a bias use another path, which may have its own."""
    x, y, out = torch.zeros(3, 128, 128, dtype=torch.bfloat16, device="cuda")
    torch.mm(x, y, out=out)
    torch.addmm(x[0], x, y, out=out)


log = logging.getLogger(__name__)


def capture_sizes(layers: LayerRunner, goes_on: Callable[[], bool] = lambda: True) -> int:
    """Capture all sizes without a graph, smallest first, while `goes_on`; return how many.

    Any one thread may call this while steps run, once the model's kernels are on the device.
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
    """Captures the sizes of an engine on its own thread. Any thread may stop it."""

    def __init__(self, layers: LayerRunner, goes_on: Callable[[], bool]) -> None:
        """Start; end at the latest when `goes_on` returns False."""
        self._is_stopped = False
        self._goes_on = goes_on
        # A daemon: a process need not wait for captures when it ends.
        self._thread = threading.Thread(
            target=self._capture, args=(layers,), name="hearth-capture", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current size, and wait for that. May be called repeatedly."""
        self._is_stopped = True
        self._thread.join()

    def _capture(self, layers: LayerRunner) -> None:
        try:
            capture_sizes(layers, lambda: not self._is_stopped and self._goes_on())
        except Exception:  # the thread's top: a step captures what is missing
            log.exception("sizes_not_captured")
