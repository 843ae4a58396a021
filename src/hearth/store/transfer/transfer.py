"""Transfers: leased chunks from host memory to their places on the device, in forward order.

    source --batches--> chunks --copy stream--> destination       one copy stream per device
                          |            | event per chunk
                       released   compute stream: wait(layer 0) layer 0 wait(layer 1) layer 1 ...

Copies are queued, not waited for. A step waits only for the bytes it needs: on the host until their copies
are queued, on the device until they are done. A chunk is released when its copy is done.

A transfer runs in one of two ways. `start`: one thread queues copies, another releases chunks. `run`, for
few chunks: the calling thread does both. An adapter crosses the bus faster than another thread wakes up and
gets the interpreter, which the step thread needs as well.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from hearth.core.errors import HearthError, LoadCancelled, StoreError
from hearth.models.layout import ByteRange
from hearth.store.format.manifest import Manifest, StoredManifest
from hearth.store.transfer.copies import ChunkCopies, CopyStream, copies_of
from hearth.store.transfer.destination import Destination, LoadPiece, PageMapping
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.record import LoadRecord, Tally
from hearth.system.cuda.batches import BatchedCopies
from hearth.system.standing_threads import StandingThreads

#: How long copied chunks wait to be released together: the next chunk may need one of their cells.
RELEASE_WAIT_S = 0.002
#: Chunks that `run` suits. More take several driver calls, and a thread that releases meanwhile.
MAX_RUN_CHUNKS = BatchedCopies.max_batch
#: Chunks still being copied when `run` reports that the transfer is arriving. They take about as long as the
#: device needs to wake this thread, this one to wake the step thread, and that one to queue a step.
NUM_LAST = 2

log = logging.getLogger(__name__)


class ChunkSource(Protocol):
    """The chunks of a transfer in host memory, in the order asked for: `Lease`, or `Fetch` in one process.

    One thread iterates, another releases.
    """

    @property
    def release_batch(self) -> int:
        """Chunks that are best released together: each call costs the interpreter, at both ends."""

    def batches(self, most: int) -> Generator[Sequence[HostChunk]]:
        """Yield the chunks in order, those together that are ready to be copied, at most so many."""

    def release(self, *chunks: HostChunk) -> None: ...

    def cancel(self) -> None: ...


class TransferState(StrEnum):
    COPYING = "copying"  #: chunks are awaited and their copies queued
    ARRIVING = "arriving"  #: all copies are queued: steps may be queued behind them
    DONE = "done"
    FAILED = "failed"  #: or cancelled


def _ignore(_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class TransferHooks:
    """Called as a transfer advances, by its threads. A hook that held the transfer would keep its memory."""

    leased: Callable[[HostChunk], None] = _ignore  #: the first chunk of a batch, before its pages are awaited
    arriving: Callable[[Transfer], None] = _ignore  #: not called by `run` if the last copies are done at once
    released: Callable[[HostChunk], None] = _ignore  #: the last chunk of a batch whose copies are done
    #: All bytes are on the device, or why not. Called once; by `run` before the last chunks are released, and
    #: again should the device break while that is done.
    ended: Callable[[LoadRecord | HearthError], None] = _ignore


class Transfer:
    """A transfer under way or over. Any thread may wait for parts of it or cancel it."""

    def __init__(
        self,
        name: str,
        source: ChunkSource,
        destination: Destination,
        copies: ChunkCopies,
        hooks: TransferHooks,
    ) -> None:
        """`copies` has room for all chunks of the destination."""
        self.name = name
        self._source, self._destination, self._copies, self._hooks = source, destination, copies, hooks
        self._tally = Tally(time.perf_counter(), destination.num_bytes)
        #: Guards the fields below: the copying thread writes, threads that compute read.
        self._progress = threading.Condition()
        self.state = TransferState.COPYING
        #: By position among the queued copies: how many chunks, from the first, are queued up to there.
        self._queued_through: list[int] = []
        self._num_queued = 0  #: chunks, from the first
        self._record: LoadRecord | None = None
        self._error: BaseException | None = None
        self._is_closed = False  #: no thread waits for a copy any more
        self._is_over = False  #: no thread works on it any more
        #: Chunks whose copies are queued, in order; None: there are no more. For the releasing thread.
        self._copied: SimpleQueue[Sequence[HostChunk] | None] = SimpleQueue()
        self._is_all_copied = False  #: None has come; of the releasing thread

    # For threads that compute.

    @property
    def is_done(self) -> bool:
        return self.state is TransferState.DONE

    def wait_for(self, part: ByteRange) -> None:
        """Make the current stream wait for these bytes, and this thread until their copies are queued.

        Raises StoreError if a chunk cannot be had, or the transfer was cancelled.
        """
        num_wanted = bisect_left(self._destination.chunks, self._destination.manifest.chunks_of(part).stop)
        with self._progress:
            while self._num_queued < num_wanted and self._error is None:
                self._progress.wait()
            if self._error is not None:  # also for queued bytes: their cell may hold another chunk by now
                raise self._failure()
            if num_wanted and not self._is_closed:
                self._copies.have_stream_wait(bisect_left(self._queued_through, num_wanted))

    def have_stream_wait(self) -> None:
        """Make the current stream wait for all copies queued so far, if they are not over."""
        with self._progress:
            if not self._is_closed:
                self._copies.have_stream_wait(len(self._queued_through) - 1)

    def wait(self) -> LoadRecord:
        """Wait until all bytes are on the device and its threads are done. Raises as `wait_for`."""
        self._wait_until_over()
        if self._error is not None or self._record is None:
            raise self._failure()
        return self._record

    def cancel(self) -> None:
        """Cancel, and wait until nothing more is written to the destination."""
        self._copies.stop()
        self._source.cancel()
        self._wait_until_over()

    def _wait_until_over(self) -> None:
        with self._progress:
            while not self._is_over:
                self._progress.wait()

    # For the threads that copy.

    def start(self, threads: StandingThreads) -> None:
        """Copy on one thread and release on another. Raises RuntimeError if there can be no more threads."""
        try:
            threads.start(lambda: self._run(lambda: self._copy_beside(threads)))
        except RuntimeError:
            self._source.cancel()
            raise

    def run(self) -> None:
        """Copy on the calling thread, to memory that the device is done with."""
        self._run(self._copy_here)

    def _run(self, copy: Callable[[], None]) -> None:
        try:
            copy()
        except Exception as error:  # the thread's top: waiting threads raise it
            self._fail(error)
        with self._progress:
            self._is_closed = True
        try:
            self._copies.close()
        except Exception as error:  # as above: of a device that has just broken
            self._fail(error)
        try:
            self._tell_end()
        finally:
            with self._progress:
                self._is_over = True
                self._progress.notify_all()

    def _copy_beside(self, threads: StandingThreads) -> None:
        releasing = threads.start(self._release_copied)
        try:
            with closing(self._batches()) as batches:
                for chunks in batches:
                    self._queue_batch(chunks)
            self._arrive()
        finally:
            self._copied.put(None)
            releasing.join()

    def _copy_here(self) -> None:
        """Copy and release batch by batch: the cells that chunks are in may be all that there are."""
        num_left = len(self._destination.chunks)
        with closing(self._batches()) as batches:
            for chunks in batches:
                num_left -= len(chunks)
                try:
                    self._copy_few(chunks, is_last=not num_left)
                    if not num_left:
                        self._tell_end()
                finally:
                    self._source.release(*chunks)

    def _batches(self) -> Generator[Sequence[HostChunk]]:
        """Yield chunks whose places are mapped, and count the time in which there were none."""
        asked_s = time.perf_counter()
        with closing(self._source.batches(self._copies.max_batch)) as batches:
            for chunks in batches:
                self._hooks.leased(chunks[0])
                for chunk in chunks:
                    self._tally.took(chunk.delivery, len(chunk.data), is_shared=chunk.is_shared)
                try:
                    while chunks:
                        ready = self._destination.take_mapped(chunks)
                        chunks = chunks[len(ready) :]
                        self._tally.waited(time.perf_counter() - asked_s)
                        yield ready
                        asked_s = time.perf_counter()
                finally:
                    if chunks:  # the transfer ends here
                        self._source.release(*chunks)

    def _queue_batch(self, chunks: Sequence[HostChunk]) -> None:
        """Queue the copies of chunks; release those whose copies are not queued. Raises as `_queue`."""
        num_before = self._num_queued
        try:
            self._queue([[chunk] for chunk in chunks])
        finally:
            num_queued = self._num_queued - num_before
            if num_queued:
                self._copied.put(chunks[:num_queued])
            if num_queued < len(chunks):
                self._source.release(*chunks[num_queued:])

    def _copy_few(self, chunks: Sequence[HostChunk], *, is_last: bool) -> None:
        """Copy chunks and wait; also if that raises, none of their copies is running then.

        They are queued as three groups at most, because the bus rests behind each: the first chunk, which
        is copied while the others are prepared, those between, and the last ones.
        """
        copies, num_before = self._copies, self._copies.num_queued
        others = chunks[1:]
        try:
            self._queue([chunks[:1]])
            if groups := [group for group in (others[:-NUM_LAST], others[-NUM_LAST:]) if group]:
                self._queue(groups)
            if is_last:
                if groups:
                    copies.wait(copies.num_queued - 2)
                if not copies.has_passed(copies.num_queued - 1):
                    self._arrive()
        finally:
            if copies.num_queued > num_before:
                copies.wait(copies.num_queued - 1)

    def _queue(self, groups: Sequence[Sequence[HostChunk]]) -> None:
        """Queue the copies of chunks, those of a group as one, and wake threads that wait for them.

        Raises DeviceError if the device refuses them, and LoadCancelled.
        """
        num_before, copies_of = self._copies.num_queued, self._destination.copies_of
        try:
            self._copies.queue([copies_of(group) for group in groups])
        finally:
            queued = groups[: self._copies.num_queued - num_before]
            with self._progress:
                for group in queued:
                    self._num_queued += len(group)
                    self._queued_through.append(self._num_queued)
                self._progress.notify_all()
        if len(queued) < len(groups):
            raise LoadCancelled(f"the load of `{self.name}` was cancelled")

    def _release_copied(self) -> None:
        """Release copied chunks. Needs its own thread: the next chunk may need their cells."""
        queued: deque[HostChunk] = deque()
        num_done = 0
        while self._collect(queued):
            num_due = min(len(queued), self._source.release_batch)
            try:
                self._copies.wait(num_done + num_due - 1)
                while num_due < len(queued) and self._copies.has_passed(num_done + num_due):
                    num_due += 1
                self._note_first_layer(queued[num_due - 1])
            except Exception as error:  # the thread's top, as above
                self._fail(error)
            finally:
                num_done += num_due
                released = [queued.popleft() for _ in range(num_due)]
                self._source.release(*released)
                self._hooks.released(released[-1])

    def _collect(self, queued: deque[HostChunk]) -> bool:
        """Add chunks whose copies are queued until there are enough, or it takes too long.

        Returns False if there are none, and no more come.
        """
        try:
            while len(queued) < self._source.release_batch and not self._is_all_copied:
                if (chunks := self._copied.get(timeout=RELEASE_WAIT_S if queued else None)) is None:
                    self._is_all_copied = True
                else:
                    queued.extend(chunks)
        except Empty:
            pass
        return bool(queued)

    def _note_first_layer(self, chunk: HostChunk) -> None:
        manifest, tally = self._destination.manifest, self._tally
        if tally.first_layer_s is None and chunk.index >= manifest.chunks_of(manifest.first_layer)[-1]:
            tally.first_layer_s = time.perf_counter() - tally.began_s

    # Changes of state.

    def _arrive(self) -> None:
        with self._progress:
            if self.state is TransferState.COPYING:
                self.state = TransferState.ARRIVING
        self._hooks.arriving(self)

    def _fail(self, error: Exception) -> None:
        self._copies.stop()
        with self._progress:
            self._error = self._error or error
            self.state = TransferState.FAILED
            self._progress.notify_all()
        if not isinstance(error, StoreError):
            log.error("load_broke model=%s", self.name, exc_info=error)
        self._source.cancel()

    def _tell_end(self) -> None:
        outcome: LoadRecord | HearthError
        with self._progress:
            if self._error is not None:
                outcome = self._error if isinstance(self._error, HearthError) else self._failure()
            elif self._record is None:
                outcome = self._record = self._tally.record(self.name, time.perf_counter())
                self.state = TransferState.DONE
            else:
                return
        self._hooks.ended(outcome)

    def _failure(self) -> StoreError:
        if isinstance(self._error, StoreError):
            return self._error
        return LoadCancelled(f"the load of `{self.name}` broke: {self._error!r}")


class Loader:
    """Makes transfers to one device, all on one copy stream. Any thread may call it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = CopyStream(device) if device.type == "cuda" else None
        #: For everything that has to be done beside the steps, and at once, on this device.
        self.threads = StandingThreads("hearth-load", begin=self._set_device)

    def transfer(
        self, name: str, source: ChunkSource, destination: Destination, hooks: TransferHooks
    ) -> Transfer:
        """Return a transfer, to be started or run, to memory that the device is done with by then."""
        return Transfer(name, source, destination, self.new_copies(len(destination.chunks)), hooks)

    def load(
        self,
        name: str,
        manifest: StoredManifest,
        pieces: Sequence[LoadPiece],
        fetch: Callable[[Sequence[int]], ChunkSource],
        on_end: Callable[[LoadRecord | HearthError], None] = _ignore,
    ) -> Transfer:
        """Start a transfer of the chunks that hold the pieces, behind all that the device has queued now."""
        if self._stream is not None:
            self._stream.wait_for_current()
        destination = Destination(manifest, pieces)
        source = fetch(destination.chunks)
        transfer = self.transfer(name, source, destination, TransferHooks(ended=on_end))
        transfer.start(self.threads)
        return transfer

    def new_copies(self, num_chunks: int) -> ChunkCopies:
        return copies_of(num_chunks, self._stream)

    def _set_device(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)  # which every thread has to say for itself


class TransferGate:
    """A `WeightGate`. Bytes that are on the device may have only to be mapped: `mapping` has those, too."""

    def __init__(self, transfer: Transfer, manifest: Manifest, mapping: PageMapping | None = None) -> None:
        self._transfer, self._mapping = transfer, mapping
        self._layers = manifest.layers
        self._head = ByteRange(manifest.layers[-1].end, manifest.num_bytes)

    def is_open(self) -> bool:
        return self._transfer.is_done and (self._mapping is None or self._mapping.is_done)

    def embed(self) -> None:
        self._wait_for(ByteRange(0, self._layers[0].begin))

    def layer(self, layer: int) -> None:
        self._wait_for(self._layers[layer])

    def head(self) -> None:
        self._wait_for(self._head)

    def _wait_for(self, part: ByteRange) -> None:
        if self._mapping is not None:
            self._mapping.wait_for(part)
        self._transfer.wait_for(part)
