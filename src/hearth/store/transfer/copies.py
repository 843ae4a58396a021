"""Copies of chunks to one device, in order. Knows no model, and reads no chunk.

On a CUDA device they are queued on one copy stream: a second one is no faster. The threads that queue share
the interpreter with the one that steps, so the copies of many chunks are queued by one call without the
interpreter lock (`BatchedCopies`). Without a C compiler they are queued one by one, with the lock held: a
copy by torch releases it each time, and while a model computes each chunk would wait longer for the
interpreter than for the bus.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch

from hearth.system.cuda.batches import BatchedCopies, ByteCopy, batches_of
from hearth.system.cuda.driver import CudaDriver

#: Chunks of one transfer whose copies are queued at a time. Step inputs and other transfers queue behind
#: them, because all copies to a device pass one engine; with fewer, that engine would run dry at times.
MAX_QUEUED_CHUNKS = 16


class ChunkCopies(Protocol):
    """One thread queues; any may stop it, or wait for what was queued until it is closed.

    A position counts `queue`d groups of copies, from 0.
    """

    @property
    def max_batch(self) -> int:
        """Groups to queue at once: their waiters are woken behind the last."""

    @property
    def num_queued(self) -> int: ...

    def queue(self, chunks: Sequence[Sequence[ByteCopy]]) -> None:
        """Queue groups of copies as there is room; fewer of them once stopped.

        Raises DeviceError. No copy of a group that does not count as queued is running then.
        """

    def stop(self) -> None: ...

    def wait(self, position: int) -> None:
        """Wait until the copies at a position are done."""

    def has_passed(self, position: int) -> bool: ...

    def have_stream_wait(self, position: int) -> None:
        """Make the calling thread's current stream wait for the copies at a position."""

    def close(self) -> None:
        """Free the events. All copies are done, and no thread waits for them."""


class CopyStream:
    """The stream of a CUDA device for copies from host memory. Any thread may call it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self._driver = CudaDriver(self._stream.device.index)
        self.batches = batches_of(self._driver)  #: None: copies are queued one by one

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)

    @property
    def device(self) -> torch.device:
        return self._stream.device

    def current_handle(self) -> int:
        return int(torch.cuda.current_stream(self._stream.device).cuda_stream)

    def wait_for_current(self) -> None:
        """Make later copies wait for what is queued now on the calling thread's current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def queue(self, copy: ByteCopy) -> None:
        """Queue a copy; its source must stay until it is done."""
        self._driver.copy_from_host(copy.destination, copy.source, copy.num_bytes, self.handle)

    def drain(self) -> None:
        """Wait until no copy is running, whether it succeeded or not."""
        with suppress(RuntimeError):  # torch's, of a broken device: nothing is running there
            self._stream.synchronize()

    def record(self) -> torch.cuda.Event:
        """Return an event behind all queued copies; waiting for it takes no core."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # as above
        event.record(self._stream)
        return event


def copies_of(num_chunks: int, stream: CopyStream | None) -> ChunkCopies:
    """Return the copies of one transfer; `stream`: None for a device whose memory the host writes itself."""
    if stream is None or stream.batches is None:
        return SingleCopies(stream)
    return BatchedCopies(
        stream.batches, stream.handle, stream.current_handle, num_chunks, max_queued=MAX_QUEUED_CHUNKS
    )


class SingleCopies:
    max_batch = 1

    def __init__(self, stream: CopyStream | None) -> None:
        self.num_queued = 0
        self._stream = stream
        self._events: list[torch.cuda.Event] = []  #: by position, where there is a stream
        self._is_stopped = False

    def queue(self, chunks: Sequence[Sequence[ByteCopy]]) -> None:
        for copies in chunks:
            if self._events and self.num_queued >= MAX_QUEUED_CHUNKS:
                self.wait(self.num_queued - MAX_QUEUED_CHUNKS)
            if self._is_stopped:
                return
            try:
                for copy in copies:
                    self._copy(copy)
                if self._stream is not None:
                    self._events.append(self._stream.record())
            except BaseException:
                if self._stream is not None:
                    self._stream.drain()  # of some queued copies, whose chunks are released
                raise
            self.num_queued += 1

    def stop(self) -> None:
        self._is_stopped = True

    def wait(self, position: int) -> None:
        if self._stream is not None:
            self._events[position].synchronize()

    def has_passed(self, position: int) -> bool:
        return self._stream is None or bool(self._events[position].query())  # type: ignore[no-untyped-call] # torch leaves it untyped

    def have_stream_wait(self, position: int) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._events[position])

    def close(self) -> None:
        self._events.clear()

    def _copy(self, copy: ByteCopy) -> None:
        if self._stream is not None:
            self._stream.queue(copy)
        else:
            _bytes_at(copy.destination, copy.num_bytes).copy_(_bytes_at(copy.source, copy.num_bytes))


def _bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
