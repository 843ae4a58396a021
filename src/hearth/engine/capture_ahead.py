"""Captures steps of all sizes while the weights of a model arrive. Runs none of them.

To capture a size takes the host 5 to 20 ms: libraries load kernels for it, and the driver makes the graph
ready, which may stop the device. The first requests of many lengths lost half a second by that. While weights
arrive no step could be replayed anyway, and the host has little to do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

from hearth.engine.runner import Runner

log = logging.getLogger(__name__)


def capture_sizes(runner: Runner, goes_on: Callable[[], bool] = lambda: True) -> int:
    """Capture steps of all sizes that have no graph, the smallest first, while `goes_on`; return how many.

    Any one thread may call it, beside all steps, once the model's own kernels are on the device. Where steps
    are not captured nothing is done.
    """
    if runner.graphs is None:
        return 0
    shapes = runner.sizes.all_shapes()[::-1]
    began_s, num_captured = time.perf_counter(), 0
    with torch.cuda.device(runner.kv.device):
        for shape in shapes:
            if not goes_on():
                break
            runner.capture_ahead(shape)
            num_captured += 1
    seconds = time.perf_counter() - began_s
    log.info("sizes_captured sizes=%d of=%d seconds=%.3f", num_captured, len(shapes), seconds)
    return num_captured


class CaptureAhead:
    """Captures the sizes of an engine on a thread of its own. Any thread may stop it."""

    def __init__(self, runner: Runner, goes_on: Callable[[], bool]) -> None:
        """Begin, and end at the latest when `goes_on` is false."""
        self._is_stopped = False
        self._goes_on = goes_on
        # Daemonic, for a process that ends need not wait for what nobody will use.
        self._thread = threading.Thread(
            target=self._capture, args=(runner,), name="hearth-capture", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Capture no more, and wait for the size at hand. Stopping again is harmless."""
        self._is_stopped = True
        self._thread.join()

    def _capture(self, runner: Runner) -> None:
        try:
            capture_sizes(runner, lambda: not self._is_stopped and self._goes_on())
        except Exception:  # the thread's top: a size that has no graph is captured by the step that needs it
            log.exception("sizes_not_captured")
