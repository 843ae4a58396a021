"""Borrows chunks from the process that owns this machine's host segment. Reads no disk and copies nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from hearth.errors import HearthError, LoadCancelled, StoreError
from hearth.store.fetch import HostChunk
from hearth.store.lending import (
    ChunkLent,
    FetchChunks,
    Hello,
    Message,
    ModelOpened,
    OpenModel,
    Refused,
    ReleaseChunk,
    encode,
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
        """Have the lender open a converted model; its description is read here."""
        with self._connect() as connection, closing(received(connection)) as messages:
            send(connection, OpenModel(str(where)))
            match next(messages, None):
                case ModelOpened() as opened:
                    return BorrowedModel(opened, read_manifest(Path(opened.directory)))
                case Refused() as refused:
                    raise error_of(refused)
                case other:
                    raise StoreError(f"the lender at `{self._path}` answered {other}")

    def fetch(self, model: BorrowedModel, chunks: Sequence[int]) -> Loan:
        connection = self._connect()
        send(connection, FetchChunks(model.opened.digest, tuple(chunks)))
        return Loan(self.segment, connection, model.opened.name, len(chunks))

    def close(self) -> None:
        self.segment.close()

    def _connect(self) -> socket.socket:
        connection, segment = _introduce(self._path)
        segment.close()
        return connection


class Loan:
    """The chunks of one load, in order: a `ChunkStream`. One thread iterates, one releases, any cancels."""

    def __init__(self, segment: Segment, connection: socket.socket, name: str, num_chunks: int) -> None:
        self._segment, self._connection, self._name = segment, connection, name
        self._num_chunks = self._num_left = num_chunks
        self._is_cancelled = False

    def __iter__(self) -> Iterator[HostChunk]:
        """Raises what the lender met, LoadCancelled after `cancel`, StoreError if the lender is gone."""
        with closing(received(self._connection)) as messages:
            for _ in range(self._num_chunks):
                try:
                    message = next(messages, None)
                except OSError:
                    message = None
                if not isinstance(message, ChunkLent):
                    self._hang_up()
                    raise self._failure(message)
                data = self._segment.tensor(message.slot, message.num_bytes)
                yield HostChunk(message.index, data, message.slot, message.delivery)

    def release(self, *chunks: HostChunk) -> None:
        with suppress(OSError):  # a lender that is gone wants nothing back
            self._connection.sendall(b"".join(encode(ReleaseChunk(chunk.index)) for chunk in chunks))
        self._num_left -= len(chunks)
        if self._num_left == 0:
            self._hang_up()

    def cancel(self) -> None:
        """Break off. The lender takes its chunks back, also those whose copies are still under way."""
        self._is_cancelled = True
        self._hang_up()

    def _failure(self, message: Message | None) -> HearthError:
        if isinstance(message, Refused):
            return error_of(message)
        if self._is_cancelled:
            return LoadCancelled(f"the load of `{self._name}` was called off")
        return StoreError(f"whoever lent the chunks of `{self._name}` is gone; load it again")

    def _hang_up(self) -> None:
        with suppress(OSError):  # it may be over already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _introduce(path: Path) -> tuple[socket.socket, Segment]:
    """A connection to the lender, and its segment, mapped."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
        line, fds, _, _ = socket.recv_fds(connection, MAX_HELLO_BYTES, 1)
    except OSError as error:
        connection.close()
        raise StoreError(f"nobody lends host memory at `{path}`: {error.strerror}") from error
    hello = parse(line)
    if not isinstance(hello, Hello) or len(fds) != 1:
        connection.close()
        raise StoreError(f"`{path}` is no socket of a lender: {line[:80]!r}")
    return connection, Segment(fds[0], hello.num_slots, hello.slot_bytes)
