"""The copies of one load's chunks to their places, in order. Knows no model, and reads no chunk.

On a CUDA device they are queued on the copy stream, by the batch (`BatchedCopies`) or here one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch

from hearth.store.transfer.copy_stream import CopyStream
from hearth.system.cuda.batches import BatchedCopies, ByteCopy

#: Chunks of one load whose copies are queued at a time. Behind them the step's inputs and other loads get in,
#: for all copies to a device pass one engine; with fewer, the engine would run dry when their thread is late.
MAX_QUEUED_CHUNKS = 16


class ChunkCopies(Protocol):
    """One thread queues, any may stop it, or wait for what was queued until it is closed.

    Chunks are named by their place among those that were queued.
    """

    @property
    def max_batch(self) -> int:
        """Chunks that may be queued at once: whoever waits for one of them is told behind the last."""

    @property
    def num_queued(self) -> int: ...

    def queue(self, chunks: Sequence[Sequence[ByteCopy]]) -> None:
        """Queue the copies of the next chunks, as there is room; fewer of them once it is stopped.

        Raises:
            DeviceError: the device refused it. Of a chunk that does not count as queued no copy is under way.
        """

    def stop(self) -> None: ...

    def wait(self, position: int) -> None:
        """Return when the copies of a chunk have passed."""

    def has_passed(self, position: int) -> bool: ...

    def have_stream_wait(self, position: int) -> None:
        """Have the calling thread's current stream wait for the copies of a chunk."""

    def close(self) -> None:
        """Give back what it took to wait. Everything has passed, and is not waited for any more."""


def copies_of(num_chunks: int, stream: CopyStream | None) -> ChunkCopies:
    """Return the copies of a load; `stream`: None for a device whose memory the host writes itself."""
    if stream is None or stream.batches is None:
        return SingleCopies(stream)
    return BatchedCopies(
        stream.batches, stream.handle, stream.current_handle, num_chunks, max_queued=MAX_QUEUED_CHUNKS
    )


class SingleCopies:
    """`ChunkCopies` that are made or queued one by one. Mutable, as those are."""

    max_batch = 1

    def __init__(self, stream: CopyStream | None) -> None:
        self.num_queued = 0
        self._stream = stream
        self._events: list[torch.cuda.Event] = []  #: by chunk, where there is a stream
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
                    self._stream.drain()  # some of the chunk's copies may be queued, and it is given back
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
