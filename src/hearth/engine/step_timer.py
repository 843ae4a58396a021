"""How long the device takes for a step. Waits for nothing that has not been waited for."""

from __future__ import annotations

import time

import torch


class StepTimer:
    """Measures one step: from when the device has done all before it until it has done all of the step.

    A CPU computes a step while it is launched. On a CUDA device steps queue up, those of other models too, so
    the host's clock would tell the time of several.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin; the step is launched next, on the current stream."""
        self._began_s = self._ended_s = time.perf_counter()
        self._began: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # untyped
            self._began.record()

    def stop(self, end: torch.cuda.Event | None) -> None:
        """End, once all of the step is launched; `end` is the event behind it on a CUDA device."""
        self._ended_s, self._ended = time.perf_counter(), end

    def seconds(self) -> float:
        """Return how long the step took, which the device has done."""
        if self._began is None or self._ended is None:
            return self._ended_s - self._began_s
        return float(self._began.elapsed_time(self._ended)) / 1000
