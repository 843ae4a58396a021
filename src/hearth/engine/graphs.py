"""Parts of steps captured as CUDA graphs, by part and padded size. Fills no inputs and samples nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

import torch

from hearth.engine.step_shape import GraphKey

#: torch allows one capture at a time in a process, whichever thread asks.
_CAPTURE = threading.Lock()

#: Queues a part of a step on the current stream. All that it reads and writes lies at fixed addresses.
Work = Callable[[], None]


class StepGraphs:
    """Captured parts of steps. Mutable; written only by the runner.

    Work is given with each call and not kept: it belongs to the runner, which owns the graphs, and the two
    would keep each other and all their memory alive.
    """

    def __init__(self) -> None:
        self._captured: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        #: Memory for what libraries allocate while they are captured; one for all graphs, as they take turns.
        self._pool = torch.cuda.graph_pool_handle()
        _capture_stream(torch.cuda.current_device())

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: GraphKey, work: Work) -> None:
        """Replay a graph on the inputs that are in place, captured from the work where there is none yet."""
        if key not in self._captured:
            self._captured[key] = self._capture(work)
        self._captured[key].replay()

    def forget(self) -> None:
        """Drop every graph, because what they point at has moved."""
        self._captured.clear()
        # The old pool may outlive its graphs, and torch refuses to fill such a one again.
        self._pool = torch.cuda.graph_pool_handle()

    def _capture(self, work: Work) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(torch.cuda.current_device())
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
    torch.mm(*torch.zeros(2, 128, 128, dtype=torch.bfloat16, device="cuda"))
