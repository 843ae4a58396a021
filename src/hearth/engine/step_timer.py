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
        self._began, self._ended = _event(device), _event(device)
        if self._began is not None:
            self._began.record()

    def stop(self) -> None:
        """End, once all of the step is launched."""
        self._ended_s = time.perf_counter()
        if self._ended is not None:
            self._ended.record()

    def seconds(self) -> float:
        """Return how long the step took, which the device has done or is about to."""
        if self._began is None or self._ended is None:
            return self._ended_s - self._began_s
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1000


def _event(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch leaves it untyped
