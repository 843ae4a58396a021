"""The stream of a CUDA device on which weights come from host memory. Knows nothing of loads.

Copies are queued by threads that share the interpreter with the one that steps. A copy by torch lets go of
it each time, and while a model computes each chunk of a load would wait longer for the interpreter than for
the bus.
"""

from __future__ import annotations

import torch

from hearth.cuda_driver import CudaDriver


class CopyStream:
    """Mutable; any thread may call it. Copies are done in the order in which they were queued."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self._driver = CudaDriver(self._stream.device.index)

    @property
    def device(self) -> torch.device:
        """The device, with its index."""
        return self._stream.device

    def wait_for_current(self) -> None:
        """Have copies to come wait for what is queued now on the calling thread's stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def queue(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of contiguous bytes; both have to stay until it has passed."""
        assert destination.nbytes == source.nbytes, f"{destination.nbytes=} {source.nbytes=}"
        self._driver.copy_from_host(
            destination.data_ptr(), source.data_ptr(), source.nbytes, self._stream.cuda_stream
        )

    def record(self) -> torch.cuda.Event:
        """Return an event behind all copies that are queued; waiting for it costs no core."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # as above
        event.record(self._stream)
        return event
