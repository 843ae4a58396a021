"""The device's half of a load: chunks from host memory to their places on the device, in forward order.

    host memory --copy stream--> device        one copy stream per device: a second one is no faster
                                  | event per chunk
    compute stream: wait(layer 0) layer 0 wait(layer 1) layer 1 ...

Copies are queued, not waited for. Whoever computes waits for just the bytes it needs: on the host until their
copies are queued, on the device until they are done. A chunk is given back when its copy has passed.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from hearth.core.errors import LoadCancelled, StoreError
from hearth.models.layout import ByteRange
from hearth.store.format.manifest import Manifest, StoredManifest
from hearth.store.transfer.copies import ChunkCopies, copies_of
from hearth.store.transfer.copy_stream import CopyStream
from hearth.store.transfer.destination import LoadPiece, PieceCopies
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.record import LoadRecord, Tally
from hearth.system.standing_threads import StandingThreads

#: For so long chunks wait for others to be given back with: the next one may come only into a cell of theirs.
GIVE_BACK_S = 0.002

log = logging.getLogger(__name__)


class ChunkSource(Protocol):
    """The chunks of a load in host memory, in the order asked for: in this process's segment or another's.

    One thread iterates, another releases.
    """

    @property
    def release_batch(self) -> int:
        """Chunks that are best given back together: each time costs the interpreter, at both ends."""

    def batches(self, most: int) -> Generator[Sequence[HostChunk]]:
        """Yield the chunks in order, those together that are ready to be copied, at most so many."""

    def release(self, *chunks: HostChunk) -> None: ...

    def cancel(self) -> None: ...


def whole(manifest: StoredManifest, base: torch.Tensor) -> list[LoadPiece]:
    """Return the one piece of a model that goes to a buffer as it lies in its file."""
    return [LoadPiece.to(ByteRange(0, manifest.num_bytes), base)]


def chunks_of(manifest: StoredManifest, parts: Iterable[ByteRange]) -> list[int]:
    """Return the chunks that hold bytes of these parts, in forward order."""
    return sorted({index for part in parts for index in manifest.chunks_of(part)})


class Loader:
    """Starts loads to one device, all on one copy stream. Any thread may call it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = CopyStream(device) if device.type == "cuda" else None
        #: For all that has to be done beside the steps, and at once, on this device.
        self.threads = StandingThreads("hearth-load", begin=self._set_device)

    def _set_device(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)  # which every thread has to say for itself

    def load(
        self,
        name: str,
        manifest: StoredManifest,
        pieces: Sequence[LoadPiece],
        fetch: Callable[[Sequence[int]], ChunkSource],
        on_end: Callable[[LoadRecord | StoreError], None] | None = None,
        *,
        is_idle: bool = False,
    ) -> Transfer:
        """Start a load; `fetch` opens a stream of the chunks that it needs.

        `on_end` is called by the load's own thread, with the record or with why there is none. `is_idle`: the
        device is done with the memory when its chunks come; else copies wait for all that is queued now.
        """
        if self._stream is not None and not is_idle:
            # The memory may have been somebody else's until a moment ago, on the stream of this thread.
            self._stream.wait_for_current()
        return Transfer(name, manifest, pieces, fetch, self.new_copies, on_end, self.threads)

    def new_copies(self, num_chunks: int) -> ChunkCopies:
        """Return the copies of a load of so many chunks, none of which is queued yet."""
        return copies_of(num_chunks, self._stream)


class TransferGate:
    """The `WeightGate` of a load of a whole model."""

    def __init__(self, load: Transfer, manifest: Manifest) -> None:
        self._load = load
        self._layers = manifest.layers
        self._head = ByteRange(manifest.layers[-1].end, manifest.num_bytes)

    def is_open(self) -> bool:
        return self._load.is_done

    def embed(self) -> None:
        self._load.wait_for(ByteRange(0, self._layers[0].begin))

    def layer(self, layer: int) -> None:
        self._load.wait_for(self._layers[layer])

    def head(self) -> None:
        self._load.wait_for(self._head)


class Transfer:
    """A load under way or done. Any thread may wait for parts of it or cancel it."""

    def __init__(
        self,
        name: str,
        manifest: StoredManifest,
        pieces: Sequence[LoadPiece],
        fetch: Callable[[Sequence[int]], ChunkSource],
        new_copies: Callable[[int], ChunkCopies],
        on_end: Callable[[LoadRecord | StoreError], None] | None,
        threads: StandingThreads,
    ) -> None:
        """`new_copies` is asked for the copies of so many chunks."""
        self.name = name
        self._manifest = manifest
        self._on_end = on_end
        self._tally = Tally(time.perf_counter())
        self._plan = PieceCopies(manifest, pieces, self._tally)
        self._chunks = self._plan.chunks
        self._copies = new_copies(len(self._chunks))
        self._num_queued = 0  #: how many of `_chunks`, from the first, have their copies queued
        self._record: LoadRecord | None = None
        self._error: BaseException | None = None
        self._is_over = False  #: nobody waits for a copy any more
        #: Chunks whose copies are queued, in their order; None: there are no more.
        self._copied: SimpleQueue[Sequence[HostChunk] | None] = SimpleQueue()
        self._is_complete = False  #: that was said; of the thread that gives back alone
        #: Guards the fields above: the copying thread writes, whoever computes reads.
        self._progress = threading.Condition()
        self._source = fetch(self._chunks)
        self._threads = threads
        try:
            self._errand = threads.start(self._run)
        except RuntimeError:  # there are too many threads
            self._source.cancel()
            raise

    @property
    def is_done(self) -> bool:
        """True if all bytes are on the device and nobody needs to wait any more."""
        return self._record is not None

    def wait_for(self, part: ByteRange) -> None:
        """Make the current stream wait for these bytes, and this thread until their copies are queued.

        Raises:
            StoreError: a chunk cannot be had, or the load was cancelled.
        """
        wanted = self._manifest.chunks_of(part)
        with self._progress:
            position = self._position_behind(wanted)
            while self._num_queued < position and self._error is None:
                self._progress.wait()
            if self._error is not None:  # also for what was queued: its cell may be somebody else's by now
                raise self._failure()
            if position and not self._is_over:
                self._copies.have_stream_wait(position - 1)

    def wait(self) -> LoadRecord:
        """Wait until all bytes are on the device. Raises StoreError as `wait_for`."""
        self._errand.join()
        if self._record is None:
            raise self._failure()
        return self._record

    def cancel(self) -> None:
        """Call the load off and wait until nothing more is written to its destinations."""
        self._copies.stop()
        self._source.cancel()
        self._errand.join()

    def _position_behind(self, wanted: range) -> int:
        """Return how many of `_chunks` have to be queued until all of `wanted` are."""
        return bisect_left(self._chunks, wanted.stop)

    def _failure(self) -> StoreError:
        if isinstance(self._error, StoreError):
            return self._error
        return LoadCancelled(f"the load of `{self.name}` broke: {self._error!r}")

    def _run(self) -> None:
        try:
            giver = self._threads.start(self._give_back)
            try:
                self._copy_all()
            finally:
                self._copied.put(None)
                giver.join()
        except Exception as error:  # the thread's top: whoever waits is told
            self._fail(error)
        with self._progress:
            self._is_over = True
        try:
            self._copies.close()
        except Exception as error:  # as above: a device that is broken, of which nobody has told so far
            self._fail(error)
        outcome: LoadRecord | StoreError
        with self._progress:
            if self._error is not None:
                outcome = self._failure()
            else:
                outcome = self._record = self._tally.record(self.name, time.perf_counter())
        if self._on_end is not None:
            self._on_end(outcome)

    def _copy_all(self) -> None:
        asked_s = time.perf_counter()
        with closing(self._source.batches(self._copies.max_batch)) as batches:
            for chunks in batches:
                self._tally.waited(time.perf_counter() - asked_s)
                self._copy(chunks)
                asked_s = time.perf_counter()

    def _copy(self, chunks: Sequence[HostChunk]) -> None:
        """Queue the copies of chunks; those of which none is queued are given back at once.

        Raises:
            DeviceError: the device refuses it.
            LoadCancelled: the load was called off.
        """
        num_before = self._copies.num_queued
        try:
            self._copies.queue([self._plan.of(chunk) for chunk in chunks])
        finally:
            num_queued = self._copies.num_queued - num_before
            if num_queued:
                self._copied.put(chunks[:num_queued])
                with self._progress:
                    self._num_queued += num_queued
                    self._progress.notify_all()
            if num_queued < len(chunks):
                self._source.release(*chunks[num_queued:])
        if num_queued < len(chunks):
            raise LoadCancelled(f"the load of `{self.name}` was called off")

    def _give_back(self) -> None:
        """Give back chunks once their copies have passed, while the other thread waits for the next ones.

        It needs a thread of its own: the cells that the copies hold may be all there are, and the next
        chunk, or another load's, can come only into one of them.
        """
        queued: deque[HostChunk] = deque()
        num_passed = 0
        while self._collect(queued):
            num_due = min(len(queued), self._source.release_batch)
            try:
                self._copies.wait(num_passed + num_due - 1)
                # With them go those behind them that have passed as well.
                while num_due < len(queued) and self._copies.has_passed(num_passed + num_due):
                    num_due += 1
                self._note_first_layer(queued[num_due - 1])
            except Exception as error:  # the thread's top, as above
                self._fail(error)
            finally:
                num_passed += num_due
                self._source.release(*(queued.popleft() for _ in range(num_due)))

    def _collect(self, queued: deque[HostChunk]) -> bool:
        """Add chunks whose copies are queued until there are enough, or it takes too long.

        Returns False if there are none, and no more come.
        """
        try:
            while len(queued) < self._source.release_batch and not self._is_complete:
                if (chunks := self._copied.get(timeout=GIVE_BACK_S if queued else None)) is None:
                    self._is_complete = True
                else:
                    queued.extend(chunks)
        except Empty:
            pass
        return bool(queued)

    def _fail(self, error: Exception) -> None:
        self._copies.stop()
        with self._progress:
            self._error = self._error or error
            self._progress.notify_all()
        if not isinstance(error, StoreError):
            log.error("load_broke model=%s", self.name, exc_info=error)
        self._source.cancel()

    def _note_first_layer(self, chunk: HostChunk) -> None:
        if (
            self._tally.first_layer_s is None
            and chunk.index >= self._manifest.chunks_of(self._manifest.first_layer)[-1]
        ):
            self._tally.first_layer_s = time.perf_counter() - self._tally.began_s
