"""The stream of a CUDA device on which weights come from host memory. Knows nothing of loads.

Copies are queued by threads that share the interpreter with the one that steps. So those of many chunks are
queued by one call, without the interpreter, where there is a C compiler. Else one by one, with it: a copy by
torch lets go of it each time, and while a model computes each chunk of a load would wait longer for the
interpreter than for the bus.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from hearth.system.cuda.batches import ByteCopy, batches_of
from hearth.system.cuda.driver import CudaDriver


class CopyStream:
    """Mutable; any thread may call it. Copies are done in the order in which they were queued."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self._driver = CudaDriver(self._stream.device.index)
        self.batches = batches_of(self._driver)  #: None: copies are queued one by one

    @property
    def handle(self) -> int:
        """The stream, as the driver knows it."""
        return int(self._stream.cuda_stream)

    @property
    def device(self) -> torch.device:
        """The device, with its index."""
        return self._stream.device

    def current_handle(self) -> int:
        """Return the calling thread's stream on this device, as the driver knows it."""
        return int(torch.cuda.current_stream(self._stream.device).cuda_stream)

    def wait_for_current(self) -> None:
        """Have copies to come wait for what is queued now on the calling thread's stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def queue(self, copy: ByteCopy) -> None:
        """Queue a copy; its bytes have to stay until it has passed."""
        self._driver.copy_from_host(copy.destination, copy.source, copy.num_bytes, self.handle)

    def drain(self) -> None:
        """Return when nothing that was queued is under way, whatever came of it."""
        with suppress(RuntimeError):  # torch's, of a device that is broken: nothing is under way there
            self._stream.synchronize()

    def record(self) -> torch.cuda.Event:
        """Return an event behind all copies that are queued; waiting for it costs no core."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # as above
        event.record(self._stream)
        return event
