"""Decode steps captured as CUDA graphs, one per padded batch size. Fills no inputs and samples nothing."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable

import torch

#: 1, 2, 4, 8, then every 8 up to 256: 35 sizes.
GRAPH_SIZES: tuple[int, ...] = (1, 2, 4, *range(8, 257, 8))

#: torch allows one capture at a time in a process, whichever thread asks.
_CAPTURE = threading.Lock()


#: A function that runs a decode step of so many rows on static buffers and returns its logits.
Forward = Callable[[int], torch.Tensor]


class DecodeGraphs:
    """Captured decode steps by batch size. Mutable; written only by the runner.

    All graphs share one memory pool, for they run one after the other. `Forward` is given with each call and
    not kept: it belongs to the runner, which owns the graphs, and the two would keep each other and all their
    memory alive.
    """

    def __init__(self, max_size: int) -> None:
        #: The sizes; `max_size` itself is one of them, for that many rows are what full load runs.
        self.sizes = (*(size for size in GRAPH_SIZES if size < max_size), max_size)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch leaves it untyped

    def size_for(self, num_rows: int) -> int | None:
        """Return the smallest size that holds so many rows; None if there is none."""
        at = bisect_left(self.sizes, num_rows)
        return self.sizes[at] if at < len(self.sizes) else None

    def replay(self, size: int, forward: Forward) -> torch.Tensor:
        """Run the step whose inputs are in place; the first time, capture it."""
        if size not in self._captured:
            self.capture(size, forward)
        graph, logits = self._captured[size]
        graph.replay()
        return logits

    def capture(self, size: int, forward: Forward) -> None:
        """Capture a size. The inputs in place are run once before, which compiles missing kernels."""
        forward(size)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on using the device meanwhile, such as a second model's step thread.
        with (
            _CAPTURE,
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            logits = forward(size)
        self._captured[size] = (graph, logits)

    def capture_all(self, forward: Forward) -> None:
        for size in reversed(self.sizes):
            if size not in self._captured:
                self.capture(size, forward)

    def forget(self) -> None:
        """Drop every graph, because what they point at has moved."""
        self._captured.clear()
        # The old pool may outlive its graphs, and torch refuses to fill such a one again.
        self._pool = torch.cuda.graph_pool_handle()
