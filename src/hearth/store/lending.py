"""What the owner of a host segment and the processes that borrow from it say to each other. Opens no socket.

    borrower                              lender
    (connects)                            Hello, with the segment's file descriptor
    OpenModel                             ModelOpened | Refused
    FetchChunks                           ChunkLent, in order, as they are ready; Refused ends it
    ReleaseChunk, one for each            ...
    CancelLoad                            sends no more; what is lent stays lent
    CountBytes                            BytesCounted
    CountRequests                         RequestsCounted
    ForgetModel                           ModelForgotten
    (closes, or dies)                     takes back whatever was not released

A message is a line of JSON. A connection carries one load, so the end of the connection is the end of its
leases, however it comes about. A load that failed or was called off may have copies under way: its connection
stays until it has released all that it was given.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import get_args

from hearth import errors
from hearth.errors import BadCheckpoint, HearthError, StoreError
from hearth.store.record import Delivery
from hearth.store.schema import decode
from hearth.types import Digest


@dataclass(frozen=True, slots=True)
class Hello:
    num_slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class OpenModel:
    where: str  #: a directory or a URL
    weight: float = 1.0  #: how much a second of its start matters (T2's alpha)


@dataclass(frozen=True, slots=True)
class ModelOpened:
    name: str
    directory: str  #: holds its manifest and the files of its tokenizer
    digest: Digest
    host_bytes: int  #: of it that are in host memory now


@dataclass(frozen=True, slots=True)
class FetchChunks:
    model: Digest  #: of a model that was opened before, on this connection or another
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkLent:
    index: int
    slot: int
    num_bytes: int
    delivery: Delivery | None
    is_shared: bool


@dataclass(frozen=True, slots=True)
class ReleaseChunk:
    index: int


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """No more chunks are wanted."""


@dataclass(frozen=True, slots=True)
class CountBytes:
    """How much of these models lies on which rung?"""

    models: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """A chunk that lies on both rungs counts on both."""

    model: Digest
    host_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class BytesCounted:
    """Of those that were opened so far; the others are left out."""

    models: tuple[ModelBytes, ...]


@dataclass(frozen=True, slots=True)
class ModelRequests:
    """How many requests have come for a model."""

    model: Digest
    num_requests: int


@dataclass(frozen=True, slots=True)
class CountRequests:
    """Requests that came since the last message of this kind, loads or not: they price chunks."""

    models: tuple[ModelRequests, ...]


@dataclass(frozen=True, slots=True)
class RequestsCounted:
    """The answer to `CountRequests`."""


@dataclass(frozen=True, slots=True)
class ForgetModel:
    """It is no longer deployed: its chunks are worth nothing of their own any more."""

    where: str  #: as it was opened


@dataclass(frozen=True, slots=True)
class ModelForgotten:
    pass


@dataclass(frozen=True, slots=True)
class Refused:
    error: str  #: its class
    reason: str


_Load = OpenModel | ModelOpened | FetchChunks | ChunkLent | ReleaseChunk | CancelLoad
_Question = CountBytes | BytesCounted | CountRequests | RequestsCounted | ForgetModel | ModelForgotten
Message = Hello | _Load | _Question | Refused
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def send(connection: socket.socket, *messages: Message) -> None:
    """Whole, if no other thread sends on the connection meanwhile: threads that share one share a lock."""
    connection.sendall(b"".join(map(encode, messages)))


def encode(message: Message) -> bytes:
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"


def received(connection: socket.socket) -> Generator[Message]:
    """Messages until the other side closes. Raises StoreError for what is none."""
    with connection.makefile("rb") as lines:
        for line in lines:
            yield parse(line)


def refusal(error: HearthError) -> Refused:
    return Refused(type(error).__name__, str(error))


def error_of(refused: Refused) -> HearthError:
    """The error that the lender met, for the borrower to raise."""
    kind = getattr(errors, refused.error, None)
    if isinstance(kind, type) and issubclass(kind, HearthError):
        return kind(refused.reason)
    return StoreError(refused.reason)


def parse(line: bytes) -> Message:
    try:
        fields = json.loads(line)
        kind = _KINDS[fields.pop("kind")]
        return decode(kind, fields, kind.__name__)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, BadCheckpoint) as error:
        raise StoreError(f"no message of the host segment's owner or borrower: {line[:80]!r}") from error
