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

    Work is given with each call and kept only until it is captured: it belongs to the runner, which owns the
    graphs, and the two would keep each other and all their memory alive.
    """

    def __init__(self, *, captures_first: bool = True) -> None:
        """Capture work instead of running it first, or else behind its first run, which loads its kernels."""
        self._captures_first = captures_first
        self._captured: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        #: Work that has run, and is captured when its step is queued.
        self._due: dict[GraphKey, Work] = {}
        #: Memory for what libraries allocate while they are captured; one for all graphs, as they take turns.
        self._pool = torch.cuda.graph_pool_handle()

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: GraphKey, work: Work) -> None:
        """Replay a graph. Where there is none yet, capture it, or run the work and capture it later."""
        if key not in self._captured:
            if not self._captures_first:
                work()
                self._due[key] = work
                return
            self._captured[key] = self._capture(work)
        self.replay(key)

    def replay(self, key: GraphKey) -> None:
        """Queue what was captured, on the inputs that are in place."""
        self._captured[key].replay()

    def capture_due(self) -> None:
        """Capture what has run for the first time; the device may still compute it."""
        while self._due:
            key, work = self._due.popitem()
            self._captured[key] = self._capture(work)

    def forget(self) -> None:
        """Drop every graph, because what they point at has moved."""
        self._captured.clear()
        self._due.clear()
        # The old pool may outlive its graphs, and torch refuses to fill such a one again.
        self._pool = torch.cuda.graph_pool_handle()

    def _capture(self, work: Work) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(torch.cuda.current_device())
        # Recording waits for nothing. `torch.cuda.graph` would wait for the device, and empty torch's cache.
        with _CAPTURE, torch.cuda.stream(stream):
            # cuBLAS takes its workspace of a stream with the first product: not from the memory of a graph.
            # A worker has run one like this when it started, so no kernel has to be loaded for it.
            torch.mm(*torch.zeros(2, 128, 128, dtype=torch.bfloat16, device="cuda"))
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
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch leaves it untyped
