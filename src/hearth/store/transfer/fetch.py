"""Fetches chunks into host memory and leases them, in the order in which each load wants them.

    wanted, in order         at most WINDOW of a load                taken, copied, released
    todo | 7 8 9 ...  --->  | 3 reading  4 reading | 5 ready  6 ready | --->  consumer
                   a cell is taken in order,    readers fill cells,
                   loads in rotation            each on a chunk of its own

- Cells are taken in the order of the load, so the chunk that a consumer waits for always has one, and a load
  larger than host memory streams through it. A chunk that two loads want is read once.
- Chunks from object storage have readers of their own and at most half of the cells: a slow store delays no
  load from this machine's disk.
- A released chunk stays for the next load. Without `keeps_chunks` its cell is free at once, and when all are,
  the system gets their pages back.
- A load with `pass_through` goes through the first cells alone, which are pinned, as long as the disk is
  faster than the kernel makes pages. Its chunks are read again to stay when it is over.

The books are `policy/memory/chunk_book.py`, the reading is `chunk_reader.py`. Nothing here touches a device.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from hearth.core.errors import LoadCancelled, StoreError
from hearth.core.types import ChunkId, Rung
from hearth.policy.memory.chunk_book import ChunkBook, Fill, Full, Hit, Pending
from hearth.store.tiers.chunk_prices import ChunkPrices
from hearth.store.tiers.model import StoredModel
from hearth.store.tiers.segment import Segment
from hearth.store.transfer.chunk_reader import ChunkReader
from hearth.store.transfer.record import Delivery

WINDOW = 32
#: The first cells, as many as one load holds. A worker that starts pins these before all others.
NUM_FIRST_CELLS = WINDOW
#: A chunk that took longer to read stays in its cell: making a page takes as long.
MAX_PASS_THROUGH_S = 0.02
REFILL_WINDOW = 4
#: One at a time, or two senders would share the link of this node and leave half of their own idle. The next
#: one is asked for meanwhile.
PLAN_WINDOW = 2
#: Chunks that a load best releases together, a quarter of its cells.
RELEASE_BATCH = WINDOW // 4
#: Disks want several requests at once; from memory, reading and hashing take all cores but two of 16.
NUM_READERS = 14
NUM_FAR_READERS = 14
#: How long closing waits for readers. A read of a disk ends within this; a server may never answer.
PATIENCE_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostChunk:
    """A verified chunk in host memory, leased until it is released."""

    index: int
    data: memoryview  #: a view into the segment
    cell: int
    delivery: Delivery | None  #: None: this load did not have it read
    is_shared: bool = False  #: another load was reading it, and this one waited


@dataclass(slots=True)
class HostCounters:
    num_hits: int = 0
    num_fills: int = 0
    num_failures: int = 0
    num_evictions: int = 0
    num_shared: int = 0  #: chunks that another load was reading


@dataclass(frozen=True, slots=True)
class _Job:
    fetch: Fetch
    index: int
    cell: int

    @property
    def chunk_id(self) -> ChunkId:
        return self.fetch.model.manifest.chunk_ids[self.index]

    @property
    def num_bytes(self) -> int:
        return self.fetch.model.manifest.chunks[self.index].num_bytes


class Fetcher:
    """Fills a segment with the chunks that loads want, and owns its books. Any thread may call it."""

    def __init__(
        self,
        segment: Segment,
        chunk_reader: ChunkReader,
        prices: ChunkPrices,
        num_readers: int = NUM_READERS,
        *,
        keeps_chunks: bool = True,
    ) -> None:
        self.segment = segment
        self.book = ChunkBook(segment.num_cells, keeps_idle=keeps_chunks)
        self.counters = HostCounters()
        self._chunk_reader = chunk_reader
        self._prices = prices
        self._keeps_chunks = keeps_chunks
        self._round_robin: deque[Fetch] = deque()
        #: Loads that wait for a chunk being read; the first one asked for the read.
        self._waiting: dict[ChunkId, list[_Job]] = {}
        #: Chunks that a planned load will take in its own order. Others wait for them until then.
        self._planned: dict[ChunkId, Fetch] = {}
        self._brought: dict[ChunkId, Delivery] = {}  #: by planned loads, until the waiting load takes them
        #: Guards the books, the order of loads and every fetch, for consumers and readers.
        self._lock = threading.Lock()
        self._landed = threading.Condition(self._lock)  #: a chunk came, or will not come
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._far_jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._live: set[Fetch] = set()
        self._is_closed = False
        self._readers = self._start_readers("hearth-read", self._jobs, num_readers)
        self._far_readers: list[threading.Thread] = []
        self._max_far = max(1, min(NUM_FAR_READERS, segment.num_cells // 2))
        self._num_far = 0  #: chunks with a cell that come from object storage

    def fetch(
        self,
        model: StoredModel,
        chunks: Sequence[int],
        *,
        is_prefetch: bool = False,
        pass_through: bool = False,
    ) -> Fetch:
        """Start fetching these chunks, in this order.

        `is_prefetch`: no request waits for them. They come while no other load wants chunks, and take
        neither the first cells nor chunks that such a load is about to take.
        `pass_through`: chunks read quickly into the first cells do not stay there.
        """
        self._prices.load_began(model)
        return self._begin(
            Fetch(self, model, chunks, WINDOW, is_prefetch=is_prefetch, pass_through=pass_through)
        )

    def lease(self, model: StoredModel, chunks: Sequence[int]) -> list[int] | None:
        """Lease chunks at once if all are in host memory; return their cells. None: not all are, or too many.

        `leased` has to follow, behind the answer to the worker. So an adapter, which crosses the bus about
        as fast as a consumer thread wakes up, waits for nothing else.
        """
        if not 0 < len(chunks) <= WINDOW:
            return None
        chunk_ids = model.manifest.chunk_ids
        wanted = [chunk_ids[index] for index in chunks]
        with self._lock:
            return None if self._is_closed else self.book.lease(wanted)

    def leased(self, model: StoredModel, chunks: Sequence[int], cells: Sequence[int]) -> Fetch:
        """Return the load whose cells `lease` has returned. All its chunks are `taken`, to be released."""
        self._prices.load_began(model)
        stored, memory = model.manifest.chunks, self.segment.memory
        fetch = Fetch(self, model, (), WINDOW)
        fetch.taken = [
            HostChunk(index, memory(cell, stored[index].num_bytes), cell, None)
            for index, cell in zip(chunks, cells, strict=True)
        ]
        with self._lock:
            self.counters.num_hits += len(cells)
            fetch.num_open = len(cells)
            self._live.add(fetch)
            self.segment.load_began()
        return fetch

    def refill(self, model: StoredModel, chunks: Sequence[int]) -> Fetch:
        """Start fetching chunks to stay which a load passed through: as a prefetch, and few at a time.

        It does not count as demand for the model: the load did.
        """
        return self._begin(Fetch(self, model, chunks, REFILL_WINDOW, is_prefetch=True))

    def fetch_planned(self, model: StoredModel, chunks: Sequence[int]) -> Fetch:
        """Start fetching chunks in the order of a plan; other loads get them from this one."""
        fetch = Fetch(self, model, chunks, PLAN_WINDOW, is_planned=True)
        with self._lock:
            self._planned.update((model.manifest.chunk_ids[index], fetch) for index in chunks)
        return self._begin(fetch)

    def start_far_readers(self) -> None:
        """Start the readers of object storage, which otherwise start with the first load from there."""
        with self._lock:
            self._start_far_readers()

    def _start_far_readers(self) -> None:
        if not self._far_readers:
            self._far_readers = self._start_readers("hearth-read-far", self._far_jobs, NUM_FAR_READERS)

    def _begin(self, fetch: Fetch) -> Fetch:
        model, chunks = fetch.model, fetch.todo
        too_large = [i for i in chunks if model.manifest.chunks[i].num_bytes > self.segment.cell_bytes]
        assert not too_large, f"chunks {too_large} are larger than a cell: {self.segment.cell_bytes}"
        assert self.segment.num_cells or not chunks, "a segment without cells holds no chunk"
        assert len(set(chunks)) == len(chunks), f"a chunk is wanted twice: {sorted(chunks)}"
        with self._lock:
            if self._is_closed:
                raise StoreError(f"`{model.name}` cannot be fetched: these tiers are closed; open new ones")
            if model.remote is not None:
                self._start_far_readers()
            if chunks:
                self._live.add(fetch)
                self.segment.load_began()
            self._round_robin.append(fetch)
            self._pump()
        return fetch

    def resident(self, chunk_ids: Iterable[ChunkId]) -> list[ChunkId]:
        with self._lock:
            return [chunk_id for chunk_id in chunk_ids if self.book.is_resident(chunk_id)]

    def wait_for_landing(self, chunk_id: ChunkId, timeout_s: float) -> bool:
        """Wait for a chunk that a load is reading, or will by its plan. False: it is still on its way."""
        with self._landed:
            return self._landed.wait_for(
                lambda: chunk_id not in self._planned and chunk_id not in self._waiting, timeout_s
            )

    def close(self) -> None:
        """Cancel all loads and stop the readers. One that waits for a server may outlive this."""
        with self._lock:
            self._is_closed = True
            for fetch in list(self._live):
                self._end(fetch, None)
        for readers, jobs in ((self._readers, self._jobs), (self._far_readers, self._far_jobs)):
            for _ in readers:
                jobs.put(None)
        until_s = time.monotonic() + PATIENCE_S
        for reader in (*self._readers, *self._far_readers):
            reader.join(max(0.0, until_s - time.monotonic()))

    def _pump(self) -> None:
        num_stuck = 0
        while self._round_robin and num_stuck < len(self._round_robin):
            fetch = self._round_robin[0]
            if not fetch.todo:
                self._round_robin.popleft()
                continue
            self._round_robin.rotate(-1)
            has_to_wait = fetch.num_open >= fetch.window or self._gives_way(fetch)
            is_stuck = has_to_wait or not self._take(fetch)
            num_stuck = num_stuck + 1 if is_stuck else 0
        if not self._keeps_chunks and not self._is_closed and self.book.num_free == self.book.capacity:
            self.segment.give_back()

    def _gives_way(self, fetch: Fetch) -> bool:
        if not fetch.is_prefetch or self.book.is_resident(fetch.model.manifest.chunk_ids[fetch.todo[0]]):
            return False
        loads = (one for one in self._round_robin if one.todo and not one.is_prefetch)
        # A load that waits for another node or object storage does not use the disk.
        return any(not self._is_far(one, one.todo[0]) for one in loads)

    def _take(self, fetch: Fetch) -> bool:
        """Schedule the load's next chunk; return False if there is no cell for it now."""
        index = fetch.todo[0]
        chunk_id = fetch.model.manifest.chunk_ids[index]
        if self._planned.get(chunk_id, fetch) is not fetch:
            return False
        if self._num_far >= self._max_far and self._is_far(fetch, index):
            return False
        num_spared = NUM_FIRST_CELLS if fetch.is_prefetch else 0
        match self.book.take(chunk_id, self._prices.of_host_chunk, num_spared=num_spared):
            case Hit(cell):
                self.counters.num_hits += 1
                self._hand_over(fetch, index, cell, self._brought_to(fetch, chunk_id))
            case Fill(cell, evicted):
                self.counters.num_evictions += evicted is not None
                self._brought.pop(chunk_id, None)
                self._waiting[chunk_id] = [_Job(fetch, index, cell)]
                self._have_read(self._waiting[chunk_id][0])
            case Pending():
                self._waiting[chunk_id].append(_Job(fetch, index, self._waiting[chunk_id][0].cell))
            case Full():
                return False
        fetch.todo.popleft()
        fetch.num_open += 1
        if self._planned.pop(chunk_id, None) is not None:
            self._landed.notify_all()
        return True

    def _hand_over(
        self, fetch: Fetch, index: int, cell: int, delivery: Delivery | None, *, is_shared: bool = False
    ) -> None:
        data = self.segment.memory(cell, fetch.model.manifest.chunks[index].num_bytes)
        fetch.ready[index] = HostChunk(index, data, cell, delivery, is_shared)
        if fetch.awaited == index:  # waking the consumer is dear
            fetch.arrived.notify_all()

    def _is_awaited(self, model: StoredModel) -> bool:
        return any(one.is_load and one.model.manifest is model.manifest for one in self._live)

    def _brought_to(self, fetch: Fetch, chunk_id: ChunkId) -> Delivery | None:
        """Return how a planned load brought a chunk, for the first load that takes it."""
        return self._brought.pop(chunk_id, None) if fetch.is_load else None

    def _is_far(self, fetch: Fetch, index: int) -> bool:
        chunk_id = fetch.model.manifest.chunk_ids[index]
        is_coming = chunk_id in self._waiting or self.book.is_resident(chunk_id)
        return not is_coming and self._chunk_reader.is_far(fetch.model, index)

    def _have_read(self, job: _Job) -> None:
        if self._chunk_reader.is_far(job.fetch.model, job.index):
            self._num_far += 1
            self._far_jobs.put(job)
        else:
            self._jobs.put(job)

    def _start_readers(
        self, name: str, jobs: SimpleQueue[_Job | None], num_readers: int
    ) -> list[threading.Thread]:
        """Start readers, fewer if there can be no more threads. Raises StoreError if there can be none."""
        readers: list[threading.Thread] = []
        for number in range(num_readers):
            reader = threading.Thread(
                target=self._read_jobs, args=(jobs,), name=f"{name}-{number}", daemon=True
            )
            try:
                reader.start()
            except RuntimeError as error:
                if not readers:
                    raise StoreError(f"no thread can be started to read chunks with: {error}") from error
                log.warning("fallback %s=%d wanted=%d reason=%s", name, len(readers), num_readers, error)
                break
            readers.append(reader)
        return readers

    def _read_jobs(self, jobs: SimpleQueue[_Job | None]) -> None:
        while (job := jobs.get()) is not None:
            self._read_job(job)
            if jobs is self._far_jobs:
                with self._lock:
                    self._num_far -= 1
                    self._pump()

    def _read_job(self, job: _Job) -> None:
        if job.fetch.is_over and not self._is_wanted(job.chunk_id):
            return
        try:
            self._read(job)
        except StoreError as error:
            self._fail(job, error)
        except Exception as error:  # the thread's top: the load fails, and the reader goes on
            log.exception("reader_broke model=%s chunk=%d", job.fetch.model.name, job.index)
            self._fail(job, StoreError(f"reading chunk {job.index} broke: {error!r}"))

    def _read(self, job: _Job) -> None:
        model, memory = job.fetch.model, self.segment.memory(job.cell, job.num_bytes)
        delivery = self._chunk_reader.deliver(
            model, job.index, memory, lambda: self._has_takers(job.chunk_id)
        )
        is_kept = delivery.rung in (Rung.PEER, Rung.OBJECT)
        self._deliver(job, delivery, is_leased_on=is_kept)
        if is_kept:
            try:
                self._chunk_reader.keep(model, job.index, memory)
            finally:
                self._release(job.chunk_id)

    def _has_takers(self, chunk_id: ChunkId) -> bool:
        with self._lock:
            return any(not waiter.fetch.is_over for waiter in self._waiting[chunk_id])

    def _is_wanted(self, chunk_id: ChunkId) -> bool:
        """Return False, and free the cell, if all loads that waited for the chunk are over."""
        with self._lock:
            if any(not waiter.fetch.is_over for waiter in self._waiting[chunk_id]):
                return True
            del self._waiting[chunk_id]
            self.book.failed(chunk_id)
            self._landed.notify_all()
            self._pump()
            return False

    def _deliver(self, job: _Job, delivery: Delivery, *, is_leased_on: bool) -> None:
        """Hand a chunk to all loads that wait for it; `is_leased_on`: the caller keeps a lease."""
        with self._lock:
            self.counters.num_fills += 1
            self.book.filled(job.chunk_id)  # with a lease, which is released below
            if job.fetch.is_planned and self._is_awaited(job.fetch.model):
                self._brought[job.chunk_id] = delivery
            for waiter in self._waiting.pop(job.chunk_id):
                if waiter.fetch.is_over:
                    continue
                self.book.take(job.chunk_id, self._prices.of_host_chunk)
                self.counters.num_shared += waiter is not job
                is_own = waiter is job
                own = delivery if is_own else self._brought_to(waiter.fetch, job.chunk_id)
                self._hand_over(waiter.fetch, waiter.index, job.cell, own, is_shared=own is None)
            if not is_leased_on:
                self.book.release(job.chunk_id)
            self._landed.notify_all()
            self._pump()

    def _fail(self, job: _Job, error: StoreError) -> None:
        """Fail the load that had a chunk read; the next load that waits tries its own rungs."""
        with self._lock:
            self.counters.num_failures += 1
            self._end(job.fetch, error)
            if job.chunk_id not in self._waiting:
                return  # it was delivered; what broke came after that
            others = [waiter for waiter in self._waiting.pop(job.chunk_id) if not waiter.fetch.is_over]
            if others:
                self._waiting[job.chunk_id] = others
                self._have_read(others[0])
            else:
                self.book.failed(job.chunk_id)
                self._landed.notify_all()
            self._pump()

    def _release(self, chunk_id: ChunkId) -> None:
        with self._lock:
            self.book.release(chunk_id)
            self._pump()

    def _end(self, fetch: Fetch, error: StoreError | None) -> None:
        """End a load. Its consumer still has to release the chunks that it has taken."""
        if fetch.is_over:
            return
        fetch.is_over, fetch.error = True, error
        self._forget(fetch)
        for index in fetch.todo:
            if self._planned.get(chunk_id := fetch.model.manifest.chunk_ids[index]) is fetch:
                del self._planned[chunk_id]
        fetch.todo.clear()
        for index in fetch.ready:
            self.book.release(fetch.model.manifest.chunk_ids[index])
        fetch.ready.clear()
        fetch.arrived.notify_all()
        self._landed.notify_all()

    def _forget(self, fetch: Fetch) -> None:
        if fetch in self._live:
            self._live.remove(fetch)
            self.segment.load_ended()
            if self._brought and fetch.is_load:
                for chunk_id in fetch.model.manifest.chunk_ids:
                    self._brought.pop(chunk_id, None)


class Fetch:
    """The chunks of one load, in order: a `ChunkSource`. One thread iterates; any may release and cancel.

    Its fields belong to the fetcher, and are guarded by its lock.
    """

    release_batch = RELEASE_BATCH

    def __init__(
        self,
        fetcher: Fetcher,
        model: StoredModel,
        chunks: Sequence[int],
        window: int,
        *,
        is_prefetch: bool = False,
        pass_through: bool = False,
        is_planned: bool = False,
    ) -> None:
        self.model, self.window, self.is_planned = model, window, is_planned
        self.is_prefetch, self.pass_through = is_prefetch, pass_through
        self.passed_through: list[int] = []  #: chunks that were released and did not stay
        self.taken: Sequence[HostChunk] = ()  #: chunks that were leased at once: see `Fetcher.lease`
        self.todo = deque(chunks)
        #: How many chunks are scheduled and not released: being read, ready, or taken.
        self.num_open = 0
        #: Chunks leased for the consumer, which has not taken them yet.
        self.ready: dict[int, HostChunk] = {}
        #: The chunk that the consumer sleeps for.
        self.awaited: int | None = None
        self.is_over = False
        self.error: StoreError | None = None
        self.arrived = threading.Condition(fetcher._lock)
        self._order = list(chunks)
        self._fetcher = fetcher

    @property
    def is_load(self) -> bool:
        """True if a worker waits for it."""
        return not self.is_prefetch and not self.is_planned

    def __iter__(self) -> Iterator[HostChunk]:
        taken: deque[HostChunk] = deque()
        try:
            for batch in self.batches():
                taken.extend(batch)
                while taken:
                    if self.is_over:
                        raise self._failure()
                    yield taken.popleft()
        finally:
            self.release(*taken)

    def batches(self, most: int | None = None) -> Generator[list[HostChunk]]:
        """Yield the chunks in order, those together that are ready, at most `most` of them.

        Raises StoreError if one cannot be had, LoadCancelled after `cancel`.
        """
        at = 0
        while at < len(self._order):
            batch = self._wait_for(at, len(self._order) if most is None else at + most)
            if not batch:
                raise self._failure()
            self._fetcher.segment.pin(batch[0].cell)
            at += len(batch)
            yield batch

    def _wait_for(self, at: int, end: int) -> list[HostChunk]:
        """Return the chunk at a place, and those behind it that are ready; nothing if the load is over."""
        can_copy = self._fetcher.segment.can_copy
        batch: list[HostChunk] = []
        with self.arrived:
            self.awaited = self._order[at]
            while self.awaited not in self.ready and not self.is_over:
                self.arrived.wait()
            self.awaited = None
            for index in self._order[at:end]:
                if index not in self.ready or (batch and not can_copy(self.ready[index].cell)):
                    break
                batch.append(self.ready.pop(index))
        return batch

    def wait(self, index: int, timeout_s: float) -> bool:
        """Wait for a chunk that is not taken yet. False: it is still being read. True also on a failure."""
        with self.arrived:
            self.awaited = index
            return self.arrived.wait_for(lambda: index in self.ready or self.is_over, timeout_s)

    def _failure(self) -> StoreError:
        return self.error or LoadCancelled(f"the load of `{self.model.name}` was cancelled")

    @property
    def is_finished(self) -> bool:
        with self.arrived:
            return not self.num_open and not self.todo and not self.is_over

    def release(self, *chunks: HostChunk) -> None:
        if not chunks:
            return
        with self.arrived:
            for chunk in chunks:
                chunk_id = self.model.manifest.chunk_ids[chunk.index]
                self._fetcher.book.release(chunk_id)
                if self.pass_through and _is_quick(chunk) and self._fetcher.book.drop(chunk_id):
                    self.passed_through.append(chunk.index)
            self.num_open -= len(chunks)
            if not self.num_open and not self.todo:
                self._fetcher._forget(self)
            self._fetcher._pump()

    def cancel(self) -> None:
        """Ask for no more chunks. Reads under way finish: other loads may want their chunks."""
        with self.arrived:
            self._fetcher._end(self, None)
            self._fetcher._pump()


def _is_quick(chunk: HostChunk) -> bool:
    """True if a chunk came from disk to one of the first cells faster than pages are made."""
    delivery = chunk.delivery
    if delivery is None or delivery.rung is not Rung.DISK or chunk.cell >= NUM_FIRST_CELLS:
        return False
    return delivery.read_s + delivery.verify_s <= MAX_PASS_THROUGH_S
