"""The lease of one transfer: chunks of the keeper's host segment, ready for a device to copy from.

    nothing asked --request--> LeaseRequest --begin--> Grant --batches--> released
                  `------------ begin ----------------^  `-- keeper died: the next keeper's Grant

A keeper that dies is started again within seconds, and the lease continues with the missing chunks. A chunk
in pinned memory is copied from where it lies. Until all of the segment is pinned, the other chunks are read
into pinned staging buffers, ahead of the copies as far as buffers are free.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TypeVar

from hearth.core.errors import KeeperGone, LoadCancelled, StoreError
from hearth.store.format.manifest import StoredManifest
from hearth.store.transfer.fetch import RELEASE_BATCH, HostChunk
from hearth.store.transfer.lease_client import LeaseClient, LeaseRequest, Opened
from hearth.store.transfer.lease_connection import Grant
from hearth.store.transfer.staging_buffers import StagingBuffers

T = TypeVar("T")

KEEPER_WAIT_S, KEEPER_RETRY_S = 15.0, 0.25
#: Buffers released together: as many are filled meanwhile (`staging_buffers.NUM_SLOTS`).
STAGED_RELEASE_BATCH = 4
#: How long a chunk waits for a buffer. Other loads may hold all of them while they wait for device memory.
SLOT_WAIT_S = 0.05

log = logging.getLogger(__name__)


class Lease:
    """The leased chunks of one transfer: a `ChunkSource`. One thread iterates, one releases, any cancels.

    A yielded chunk stays as it is until released, also when its keeper dies: the segment stays mapped.
    """

    def __init__(
        self,
        client: LeaseClient,
        model: Opened[StoredManifest],
        chunks: Sequence[int],
        *,
        is_prefetch: bool = False,
    ) -> None:
        """`is_prefetch`: no request waits for the chunks, so a begun lease ends with its keeper and takes
        no staging buffers.
        """
        self._client, self._model, self._chunks, self._is_prefetch = client, model, chunks, is_prefetch
        #: None: nothing is asked, or the keeper died and the next one is awaited.
        self.state: LeaseRequest | Grant | None = None
        self._staging: StagingBuffers | None = None  #: None: no chunk was ever staged
        self._is_staged = False  #: chunks of the present grant go by staging buffers unless they are pinned
        self._slot_wait_s = SLOT_WAIT_S  #: 0 after no buffer came free in time
        #: Guards the fields below and changes of the state: one thread yields, others release and cancel.
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._woken: threading.Event | None = None  #: set by `cancel`; made for the first wait for a keeper
        self._grant_by_chunk: dict[int, Grant] = {}  #: of yielded chunks, by index
        self._slot_by_chunk: dict[int, int] = {}  #: of yielded chunks that lie in a staging buffer
        #: Chunks taken but not yielded, each with its buffer; None: it stays in the segment.
        self._staged: deque[tuple[HostChunk, int | None]] = deque()

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def is_in_host(self) -> bool:
        """True if all chunks were in host memory when the present keeper granted them."""
        return isinstance(self.state, Grant) and self.state.is_in_host

    @property
    def release_batch(self) -> int:
        return STAGED_RELEASE_BATCH if self._is_staged else RELEASE_BATCH

    def request(self) -> bool:
        """Ask for the chunks without waiting for the answer. False: only `begin` can, which may connect."""
        self.state = self._client.request(self._model, self._chunks)
        return self.state is not None

    def begin(self) -> None:
        """Wait until a keeper grants the lease, unless one has.

        Raises KeeperGone after `KEEPER_WAIT_S`, LoadCancelled, and StoreError as `LeaseClient.grant`.
        """
        if not isinstance(self.state, Grant):
            self._acquire(self._chunks, time.monotonic() + KEEPER_WAIT_S)

    def batches(self, most: int) -> Generator[list[HostChunk]]:
        """Yield the chunks in order, at most so many at once as can be copied from now.

        Raises as `begin`, and what the keeper met.
        """
        self.begin()
        num_yielded = 0
        give_up_s: float | None = None  #: when to stop waiting for a keeper; None: its keeper lives
        while num_yielded < len(self._chunks):
            try:
                batch = self._next_staged(most) if self._is_staged else self._next_pinned(most)
            except KeeperGone as gone:
                give_up_s = give_up_s or time.monotonic() + KEEPER_WAIT_S
                if self._is_prefetch or time.monotonic() > give_up_s:
                    raise
                log.warning(
                    "load_waits model=%s chunks=%d of=%d reason=`%s`",
                    self._model.name,
                    num_yielded,
                    len(self._chunks),
                    str(gone).replace("`", ""),
                )
                self._acquire(self._chunks[num_yielded:], give_up_s)
                continue
            give_up_s = None
            num_yielded += len(batch)
            yield batch

    def release(self, *chunks: HostChunk) -> None:
        """Release each chunk to the keeper that granted it, and its staging buffer."""
        with self._lock:
            grants = [self._grant_by_chunk.pop(chunk.index) for chunk in chunks]
            slots = [self._slot_by_chunk.pop(chunk.index, None) for chunk in chunks]
        self._give_back(slots)
        for grant in dict.fromkeys(grants):
            grant.release(*(chunk for chunk, own in zip(chunks, grants, strict=True) if own is grant))

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._woken is not None:
                self._woken.set()
            if isinstance(self.state, LeaseRequest):
                self.state.close()
            elif self.state is not None:
                self.state.cancel()
        self._drop_staged()

    def _acquire(self, chunks: Sequence[int], give_up_s: float) -> None:
        """Have a keeper grant chunks; wait for one until `give_up_s`. Raises as `begin`."""
        with self._lock:
            request = self.state if isinstance(self.state, LeaseRequest) else None
            self.state = request
        try:
            grant = await_keeper(
                lambda: self._client.grant(self._model, chunks, request),
                lambda: self._is_cancelled,
                give_up_s=give_up_s,
                pause=self._pause,  # the thread that cancels waits for this one
            )
        except KeeperGone:
            if self._is_cancelled:
                raise LoadCancelled(f"the load of `{self._model.name}` was cancelled") from None
            raise
        staging, segment = self._client.staging, grant.segment
        is_staged = (
            staging is not None
            and not self._is_prefetch
            and segment.cell_bytes <= staging.slot_bytes
            and not segment.is_all_pinned
        )
        with self._lock:
            self.state = grant
            self._is_staged = is_staged
            self._staging = staging or self._staging
            if self._is_cancelled:
                grant.cancel()

    def _pause(self, seconds: float) -> None:
        with self._lock:
            if self._is_cancelled:
                return
            self._woken = self._woken or threading.Event()
        self._woken.wait(seconds)

    @property
    def _grant(self) -> Grant:
        assert isinstance(self.state, Grant), f"no keeper has granted the lease: {self.state}"
        return self.state

    def _next_pinned(self, most: int) -> list[HostChunk]:
        grant = self._grant
        batch = grant.take_pinned(most)
        with self._lock:
            for chunk in batch:
                self._grant_by_chunk[chunk.index] = grant
        return batch

    def _next_staged(self, most: int) -> list[HostChunk]:
        self._stage_ahead()
        batch = [self._take_staged()]
        try:
            while len(batch) < most and self._is_next_filled():
                batch.append(self._take_staged())
        except BaseException:
            self.release(*batch)
            raise
        return batch

    def _stage_ahead(self) -> None:
        """Take all chunks that are here while buffers are free. Waits only for the next one to yield."""
        grant, staging = self._grant, self._staging
        assert staging is not None, "the lease goes without staging buffers"
        while grant.num_to_come and (not self._staged or grant.has_next()):
            slot = staging.take(0.0)
            if slot is None and self._staged:
                return
            try:
                chunk = grant.take()
            except BaseException:
                if slot is not None:
                    staging.give_back(slot)
                self._drop_staged()  # cancelled, or the next keeper grants them again
                raise
            slot = self._fill(grant, chunk, slot, staging)
            with self._lock:
                self._staged.append((chunk, slot))
            if self._is_cancelled:  # after earlier chunks were dropped
                self._drop_staged()
                return

    def _fill(self, grant: Grant, chunk: HostChunk, slot: int | None, staging: StagingBuffers) -> int | None:
        """Return the buffer that a chunk is being read into; None: it is copied from where it lies."""
        segment = grant.segment
        if segment.is_pinned(chunk.cell):
            if slot is not None:
                staging.give_back(slot)
            return None
        if slot is None:
            slot = staging.take(self._slot_wait_s)
        self._slot_wait_s = 0.0 if slot is None else SLOT_WAIT_S
        if slot is None:
            segment.pin(chunk.cell)
            return None
        staging.fill(slot, segment, chunk.cell, len(chunk.data))
        return slot

    def _take_staged(self) -> HostChunk:
        with self._lock:
            if not self._staged:  # another thread has cancelled, and dropped it
                raise LoadCancelled(f"the load of `{self._model.name}` was cancelled")
            chunk, slot = self._staged.popleft()
            self._grant_by_chunk[chunk.index] = self._grant
            if slot is None or self._staging is None:
                return chunk
            self._slot_by_chunk[chunk.index] = slot
        try:
            return replace(chunk, data=self._staging.filled(slot, len(chunk.data)))
        except StoreError:
            self.release(chunk)
            raise

    def _is_next_filled(self) -> bool:
        with self._lock:
            if not self._staged or self._staging is None:
                return False
            _, slot = self._staged[0]
            return slot is None or self._staging.is_filled(slot)

    def _drop_staged(self) -> None:
        with self._lock:
            dropped = list(self._staged)
            self._staged.clear()
        self._give_back([slot for _, slot in dropped])
        for chunk, _ in dropped:
            self._grant.release(chunk)

    def _give_back(self, slots: Sequence[int | None]) -> None:
        if self._staging is not None:
            for slot in slots:
                if slot is not None:
                    self._staging.give_back(slot)


def await_keeper(
    ask: Callable[[], T],
    is_given_up: Callable[[], bool],
    *,
    give_up_s: float | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Return what the keeper answers; one that died is asked again until `give_up_s`, by `time.monotonic`.

    `pause` waits for that many seconds, or less if the answer is no longer wanted.
    Raises KeeperGone if no keeper came in time, or the answer is no longer wanted.
    """
    if give_up_s is None:
        give_up_s = time.monotonic() + KEEPER_WAIT_S
    while True:
        try:
            return ask()
        except KeeperGone:
            if time.monotonic() > give_up_s or is_given_up():
                raise
            pause(KEEPER_RETRY_S)
