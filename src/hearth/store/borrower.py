"""Borrows chunks from the process that owns this machine's host segment. Reads no disk and copies nothing."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from hearth.errors import HearthError, LoadCancelled, StoreError
from hearth.store.fetch import HostChunk
from hearth.store.lending import (
    CancelLoad,
    ChunkLent,
    FetchChunks,
    Hello,
    Message,
    ModelOpened,
    OpenModel,
    Refused,
    ReleaseChunk,
    error_of,
    parse,
    received,
    send,
)
from hearth.store.manifest import Manifest, read_manifest
from hearth.store.segment import Segment

MAX_HELLO_BYTES = 4096


@dataclass(frozen=True, slots=True)
class BorrowedModel:
    opened: ModelOpened
    manifest: Manifest


class Borrower:
    """Maps the segment of the lender at a socket and pins it for this process's device."""

    def __init__(self, path: Path) -> None:
        self._path = path
        connection, self.segment = _introduce(path)
        connection.close()
        self.segment.pin_in_background()

    def open(self, where: str | Path) -> BorrowedModel:
        """Have the lender open a converted model; its description is read here.

        A relative path is one of this process, whatever the lender's directory is.
        """
        is_url = "://" in str(where)
        match self._ask(OpenModel(str(where) if is_url else str(Path(where).absolute()))):
            case ModelOpened() as opened:
                manifest = read_manifest(Path(opened.directory))
            case Refused() as refused:
                raise error_of(refused)
            case None:
                raise self._gone()
            case other:
                raise StoreError(f"the lender at `{self._path}` answered {other}")
        if manifest.digest != opened.digest:
            raise StoreError(f"`{opened.directory}` was replaced while it was opened; open it again")
        return BorrowedModel(opened, manifest)

    def fetch(self, model: BorrowedModel, chunks: Sequence[int]) -> Loan:
        connection = self._connect()
        try:
            send(connection, FetchChunks(model.opened.digest, tuple(chunks)))
        except OSError as error:
            connection.close()
            raise self._gone() from error
        return Loan(self.segment, connection, model.opened.name, len(chunks))

    def close(self) -> None:
        self.segment.close()

    def _connect(self) -> socket.socket:
        connection, segment = _introduce(self._path)
        segment.close()
        return connection

    def _ask(self, message: Message) -> Message | None:
        with self._connect() as connection, closing(received(connection)) as messages:
            try:
                send(connection, message)
                return next(messages, None)
            except OSError as error:
                raise self._gone() from error

    def _gone(self) -> StoreError:
        return StoreError(f"the lender at `{self._path}` is gone; start it again")


class Loan:
    """The chunks of one load, in order: a `ChunkStream`. One thread iterates, one releases, any cancels.

    However it ends, what was yielded stays lent until it is released, for it may still be copied from.
    """

    def __init__(self, segment: Segment, connection: socket.socket, name: str, num_chunks: int) -> None:
        self._segment, self._connection, self._name = segment, connection, name
        self._num_chunks = num_chunks
        #: Guards the fields below and the sending: one thread yields, others release and cancel.
        self._lock = threading.Lock()
        self._num_yielded = 0
        self._num_released = 0
        self._is_over = num_chunks == 0  #: nothing more will be yielded
        self._is_cancelled = False
        self._hang_up_if_done()

    def __iter__(self) -> Iterator[HostChunk]:
        """Raises what the lender met, LoadCancelled after `cancel`, StoreError if the lender is gone."""
        with closing(received(self._connection)) as messages:
            for _ in range(self._num_chunks):
                try:
                    message = next(messages, None)
                except OSError:
                    message = None
                yield self._accept(message)

    def release(self, *chunks: HostChunk) -> None:
        with self._lock:
            with suppress(OSError):  # a lender that is gone wants nothing back
                send(self._connection, *(ReleaseChunk(chunk.index) for chunk in chunks))
            self._num_released += len(chunks)
            self._hang_up_if_done()

    def cancel(self) -> None:
        """Ask for no more, and wake the thread that iterates."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = self._is_cancelled = True
            with suppress(OSError):  # the lender may be gone
                send(self._connection, CancelLoad())
                self._connection.shutdown(socket.SHUT_RD)
            self._hang_up_if_done()

    def _accept(self, message: Message | None) -> HostChunk:
        """The chunk that is yielded next; or the load is over."""
        with self._lock:
            if self._is_over or not isinstance(message, ChunkLent):
                self._is_over = True
                self._hang_up_if_done()
                raise self._failure(message)
            self._num_yielded += 1
            self._is_over = self._num_yielded == self._num_chunks
        data = self._segment.tensor(message.slot, message.num_bytes)
        return HostChunk(message.index, data, message.slot, message.delivery, message.is_shared)

    def _failure(self, message: Message | None) -> HearthError:
        if self._is_cancelled:
            return LoadCancelled(f"the load of `{self._name}` was called off")
        if isinstance(message, Refused):
            return error_of(message)
        return StoreError(f"whoever lent the chunks of `{self._name}` is gone; load it again")

    def _hang_up_if_done(self) -> None:
        if not self._is_over or self._num_released < self._num_yielded:
            return
        with suppress(OSError):  # the lender may be gone, or this said before
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _introduce(path: Path) -> tuple[socket.socket, Segment]:
    """A connection to the lender, and its segment, mapped."""
    with ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            connection.connect(str(path))
            line, fds, _, _ = socket.recv_fds(connection, MAX_HELLO_BYTES, 1)
        except OSError as error:
            raise StoreError(f"nobody lends host memory at `{path}`: {error.strerror or error}") from error
        for fd in fds:
            undo.callback(os.close, fd)
        hello = parse(line)
        if not isinstance(hello, Hello) or len(fds) != 1:
            raise StoreError(f"`{path}` is no socket of a lender: {line[:80]!r}")
        try:
            segment = Segment(fds[0], hello.num_slots, hello.slot_bytes)
        except (OSError, ValueError) as error:
            raise StoreError(f"the host memory lent at `{path}` cannot be mapped: {error}") from error
        undo.pop_all()
        return connection, segment
