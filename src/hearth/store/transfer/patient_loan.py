"""Loads that outlive their lender: one that dies is started anew, and the load goes on with the next.

Starts no lender, and reads and copies nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from hearth.core.errors import KeeperGone, LoadCancelled
from hearth.store.format.manifest import StoredManifest
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.lease_client import LeaseClient, LeaseRequest, Opened
from hearth.store.transfer.staged_loan import LeasedChunks, borrow_chunks

T = TypeVar("T")

#: How long a lender that is not there is waited for, and how long between two looks.
KEEPER_WAIT_S, KEEPER_RETRY_S = 15.0, 0.25

log = logging.getLogger(__name__)


class PatientLease:
    """The opened chunks of one load, of one lender after the other: a `ChunkSource`.

    One thread iterates, one releases, any cancels. Chunks of a lender that is gone stay as they are until
    they are released: its segment lives on while this process maps it.
    """

    def __init__(
        self,
        lease_client: LeaseClient,
        model: Opened[StoredManifest],
        chunks: Sequence[int],
        is_given_up: Callable[[], bool] = lambda: False,
        asked: LeaseRequest | None = None,
    ) -> None:
        """Begin the load. `is_given_up`: nobody wants it any more, asked only until it has begun.

        `asked`: as for `LeaseClient.fetch`.

        Raises:
            KeeperGone: no lender comes, as `await_keeper`.
            StoreError: as `LeaseClient.fetch`.
        """
        self._lease_client, self._model, self._chunks = lease_client, model, chunks
        #: Guards the fields below: one thread goes on to the next lease, others release and cancel.
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._lease = await_keeper(lambda: borrow_chunks(lease_client, model, chunks, asked), is_given_up)
        self._loan_by_chunk: dict[int, LeasedChunks] = {}  #: of the chunks that are lent

    @property
    def is_in_host(self) -> bool:
        """True if all chunks that the present lender was asked for were in host memory."""
        return self._lease.is_in_host

    @property
    def release_batch(self) -> int:
        """See `ChunkSource`."""
        return self._lease.release_batch

    def __iter__(self) -> Iterator[HostChunk]:
        """Yield the chunks in order, as `batches`."""
        for batch in self.batches(1):
            yield from batch

    def batches(self, most: int) -> Generator[list[HostChunk]]:
        """Yield the chunks in order, from whoever lends, as `Grant.batches`.

        Raises what the lender met, LoadCancelled after `cancel`, KeeperGone if no other lender comes in time.
        """
        num_yielded = 0
        give_up_s = 0.0  #: by when the next chunk has to come, if its lender dies
        while True:
            num_before = num_yielded
            try:
                for batch in self._lease.batches(most):
                    with self._lock:
                        self._loan_by_chunk.update((chunk.index, self._lease) for chunk in batch)
                    num_yielded += len(batch)
                    yield batch
                return
            except KeeperGone as gone:
                if num_yielded > num_before or not give_up_s:
                    give_up_s = time.monotonic() + KEEPER_WAIT_S
                if time.monotonic() > give_up_s:
                    raise
                log.warning(
                    "load_waits model=%s chunks=%d of=%d reason=`%s`",
                    *(self._model.name, num_yielded, len(self._chunks), str(gone).replace("`", "")),
                )
                self._go_on(self._chunks[num_yielded:], give_up_s)

    def release(self, *chunks: HostChunk) -> None:
        """Give back chunks, each to the lease that it came by."""
        with self._lock:
            loans = [self._loan_by_chunk.pop(chunk.index) for chunk in chunks]
        for lease in dict.fromkeys(loans):
            lease.release(*(chunk for chunk, lent in zip(chunks, loans, strict=True) if lent is lease))

    def cancel(self) -> None:
        """Ask for no more chunks, and wake the thread that iterates."""
        with self._lock:
            self._cancelled.set()
            self._lease.cancel()

    def _go_on(self, chunks: Sequence[int], give_up_s: float) -> None:
        """Borrow the missing chunks from the next lender. Raises KeeperGone if none comes in time."""
        try:
            lease = await_keeper(
                lambda: borrow_chunks(self._lease_client, self._model, chunks),
                self._cancelled.is_set,
                give_up_s=give_up_s,
                pause=self._cancelled.wait,  # who cancels waits for this thread, and may have steps to make
            )
        except KeeperGone:
            if self._cancelled.is_set():
                raise LoadCancelled(f"the load of `{self._model.name}` was called off") from None
            raise
        with self._lock:
            self._lease = lease
            if self._cancelled.is_set():
                lease.cancel()


def await_keeper(
    ask: Callable[[], T],
    is_given_up: Callable[[], bool],
    *,
    give_up_s: float | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Return what the lender answers; one that died is started anew within seconds.

    `give_up_s`: until when it is waited for, on the clock of `time.monotonic`; None: for the usual time.
    `pause` waits for that many seconds, or for less if nobody wants the answer any more.

    Raises:
        KeeperGone: the lender does not come back, or nobody wants its answer any more.
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
