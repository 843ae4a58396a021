"""What the owner of a host segment and the processes that borrow from it say to each other. Opens no socket.

    borrower                              lender
    (connects)                            Hello, with the segment's file descriptor
    OpenModel                             ModelOpened | Refused
    FetchChunks                           ChunkLent, in order, as they are ready; Refused ends it
    ReleaseChunk, one for each            ...
    CancelLoad                            sends no more; what is lent stays lent
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

from hearth import errors
from hearth.errors import BadCheckpoint, HearthError, StoreError
from hearth.store.climb import Delivery
from hearth.store.manifest import Digest
from hearth.store.schema import decode


@dataclass(frozen=True, slots=True)
class Hello:
    num_slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class OpenModel:
    where: str  #: a directory or a URL


@dataclass(frozen=True, slots=True)
class ModelOpened:
    name: str
    directory: str  #: holds its manifest and the files of its tokenizer
    digest: Digest


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
class Refused:
    error: str  #: its class
    reason: str


Message = Hello | OpenModel | ModelOpened | FetchChunks | ChunkLent | ReleaseChunk | CancelLoad | Refused
_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (Hello, OpenModel, ModelOpened, FetchChunks, ChunkLent, ReleaseChunk, CancelLoad, Refused)
}


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
