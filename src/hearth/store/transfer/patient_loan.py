"""Loads that outlive their lender: one that dies is started anew, and the load goes on with the next.

Starts no lender, and reads and copies nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from hearth.core.errors import LenderGone, LoadCancelled
from hearth.store.format.manifest import StoredManifest
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.lease_client import AskedLoan, Borrowed, Borrower
from hearth.store.transfer.staged_loan import BorrowedChunks, borrow_chunks

T = TypeVar("T")

#: How long a lender that is not there is waited for, and how long between two looks.
LENDER_PATIENCE_S, LENDER_DELAY_S = 15.0, 0.25

log = logging.getLogger(__name__)


class PatientLoan:
    """The borrowed chunks of one load, of one lender after the other: a `ChunkStream`.

    One thread iterates, one releases, any cancels. Chunks of a lender that is gone stay as they are until
    they are released: its segment lives on while this process maps it.
    """

    def __init__(
        self,
        borrower: Borrower,
        model: Borrowed[StoredManifest],
        chunks: Sequence[int],
        is_given_up: Callable[[], bool] = lambda: False,
        asked: AskedLoan | None = None,
    ) -> None:
        """Begin the load. `is_given_up`: nobody wants it any more, asked only until it has begun.

        `asked`: as for `Borrower.fetch`.

        Raises:
            LenderGone: no lender comes, as `patiently`.
            StoreError: as `Borrower.fetch`.
        """
        self._borrower, self._model, self._chunks = borrower, model, chunks
        #: Guards the fields below: one thread goes on to the next loan, others release and cancel.
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._loan = patiently(lambda: borrow_chunks(borrower, model, chunks, asked), is_given_up)
        self._loan_by_chunk: dict[int, BorrowedChunks] = {}  #: of the chunks that are lent

    @property
    def is_in_host(self) -> bool:
        """True if all chunks that the present lender was asked for were in host memory."""
        return self._loan.is_in_host

    @property
    def release_batch(self) -> int:
        """See `ChunkStream`."""
        return self._loan.release_batch

    def __iter__(self) -> Iterator[HostChunk]:
        """Yield the chunks in order, as `batches`."""
        for batch in self.batches(1):
            yield from batch

    def batches(self, most: int) -> Generator[list[HostChunk]]:
        """Yield the chunks in order, from whoever lends, as `Loan.batches`.

        Raises what the lender met, LoadCancelled after `cancel`, LenderGone if no other lender comes in time.
        """
        num_yielded = 0
        give_up_s = 0.0  #: by when the next chunk has to come, if its lender dies
        while True:
            num_before = num_yielded
            try:
                for batch in self._loan.batches(most):
                    with self._lock:
                        self._loan_by_chunk.update((chunk.index, self._loan) for chunk in batch)
                    num_yielded += len(batch)
                    yield batch
                return
            except LenderGone as gone:
                if num_yielded > num_before or not give_up_s:
                    give_up_s = time.monotonic() + LENDER_PATIENCE_S
                if time.monotonic() > give_up_s:
                    raise
                log.warning(
                    "load_waits model=%s chunks=%d of=%d reason=`%s`",
                    *(self._model.opened.name, num_yielded, len(self._chunks), str(gone).replace("`", "")),
                )
                self._go_on(self._chunks[num_yielded:], give_up_s)

    def release(self, *chunks: HostChunk) -> None:
        """Give back chunks, each to the loan that it came by."""
        with self._lock:
            loans = [self._loan_by_chunk.pop(chunk.index) for chunk in chunks]
        for loan in dict.fromkeys(loans):
            loan.release(*(chunk for chunk, lent in zip(chunks, loans, strict=True) if lent is loan))

    def cancel(self) -> None:
        """Ask for no more chunks, and wake the thread that iterates."""
        with self._lock:
            self._cancelled.set()
            self._loan.cancel()

    def _go_on(self, chunks: Sequence[int], give_up_s: float) -> None:
        """Borrow the missing chunks from the next lender. Raises LenderGone if none comes in time."""
        try:
            loan = patiently(
                lambda: borrow_chunks(self._borrower, self._model, chunks),
                self._cancelled.is_set,
                give_up_s=give_up_s,
                pause=self._cancelled.wait,  # who cancels waits for this thread, and may have steps to make
            )
        except LenderGone:
            if self._cancelled.is_set():
                raise LoadCancelled(f"the load of `{self._model.opened.name}` was called off") from None
            raise
        with self._lock:
            self._loan = loan
            if self._cancelled.is_set():
                loan.cancel()


def patiently(
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
        LenderGone: the lender does not come back, or nobody wants its answer any more.
    """
    if give_up_s is None:
        give_up_s = time.monotonic() + LENDER_PATIENCE_S
    while True:
        try:
            return ask()
        except LenderGone:
            if time.monotonic() > give_up_s or is_given_up():
                raise
            pause(LENDER_DELAY_S)
