"""Messages between the owner of a host segment and the processes that borrow from it. Opens no socket.

    lease_client                              lender
    (connects)                            ServerHello, with the segment's file descriptor
    OpenModel                             ModelOpened | Refused
    LeaseChunks                           LeaseGranted, with all chunks that are there at once; ChunkLeased, in
                                          order, as they are ready; Refused ends it
    ReleaseChunks, until all are          ...
    CancelLease                            sends no more; what is lent stays lent
    CountBytes                            BytesCounted
    MeasureHost                           HostMeasured
    CountRequests                         RequestsCounted
    ForgetModel                           ModelForgotten
    LookUpstream                          UpstreamSeen | Refused
    (closes, or dies)                     takes back whatever was not released

A message is a line of JSON: the name of its kind, and its fields. A connection carries one load at a time, so
the end of the connection is the end of its leases, however it comes about; when all of a load was lent and
released, another may follow. A load that failed or was called off may have copies under way: its connection
stays until it has released all that it was given, and then ends.
"""

from __future__ import annotations

import socket
from collections.abc import Generator
from dataclasses import dataclass
from typing import get_args

import msgspec

from hearth.core import errors
from hearth.core.errors import HearthError, StoreError
from hearth.core.types import Digest
from hearth.store.transfer.record import Delivery


@dataclass(frozen=True, slots=True)
class ServerHello:
    """The shape of the segment whose file descriptor comes along."""

    num_cells: int
    cell_bytes: int
    keeps_pages: bool  #: pages of the segment are never given back to the system, so they may be pinned


@dataclass(frozen=True, slots=True)
class OpenModel:
    """Open a converted model and say where its description lies."""

    where: str  #: a directory or a URL
    weight: float = 1.0  #: see `StoredModel`


@dataclass(frozen=True, slots=True)
class ModelOpened:
    """The answer to `OpenModel`."""

    name: str
    directory: str  #: holds its manifest and the files of its tokenizer
    digest: Digest
    host_bytes: int  #: bytes of the model that are in host memory now


@dataclass(frozen=True, slots=True)
class LeaseChunks:
    """Begin a load: lend these chunks, in this order."""

    model: Digest  #: of a model that was opened before, on this connection or another
    directory: str  #: as `ModelOpened` has it: copies of one model share a digest, and one may be deleted
    chunks: tuple[int, ...]
    #: Of chunks from disk, those that come through the first cells need not stay: see `Fetcher.fetch`.
    pass_through: bool = False


@dataclass(frozen=True, slots=True)
class ChunkLeased:
    """A chunk of the load, which lies in a cell of the segment until it is released."""

    index: int
    cell: int
    num_bytes: int
    delivery: Delivery | None
    is_shared: bool


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """The first answer to `LeaseChunks`."""

    is_in_host: bool  #: nothing has to be read for this load
    #: The first chunks, as if they came behind this: a message of each costs more than an adapter's copies.
    lent: tuple[ChunkLeased, ...] = ()


@dataclass(frozen=True, slots=True)
class ReleaseChunks:
    """The lease_client no longer needs some chunks."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelLease:
    """The load wants no more chunks."""


@dataclass(frozen=True, slots=True)
class PrefetchModel:
    """Bring a model into host memory, and lend nothing of it. Hanging up calls it off."""

    model: Digest  #: as in `LeaseChunks`
    directory: str


@dataclass(frozen=True, slots=True)
class ModelPrefetched:
    """The answer to `PrefetchModel`, when no more of the model is on its way."""

    host_bytes: int  #: bytes of the model that are in host memory now


@dataclass(frozen=True, slots=True)
class CountBytes:
    """Say how much of these models lies on which rung."""

    models: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """How much of a model lies on which rung; a chunk that lies on both counts on both."""

    model: Digest
    host_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class BytesCounted:
    """The answer to `CountBytes`; models that were not opened so far are left out."""

    models: tuple[ModelBytes, ...]


@dataclass(frozen=True, slots=True)
class MeasureHost:
    """Say how much host memory holds chunks."""


@dataclass(frozen=True, slots=True)
class HostMeasured:
    """The answer to `MeasureHost`."""

    used_bytes: int  #: of cells that hold a chunk, or are being filled
    capacity_bytes: int


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
    """A model is no longer deployed: its chunks are worth nothing of their own any more."""

    where: str  #: as it was opened


@dataclass(frozen=True, slots=True)
class ModelForgotten:
    """The answer to `ForgetModel`."""


@dataclass(frozen=True, slots=True)
class LookUpstream:
    """Say which version the source of a model has now."""

    source: str  #: a URL, or hf:ORG/NAME[@REVISION]


@dataclass(frozen=True, slots=True)
class UpstreamSeen:
    """The answer to `LookUpstream`."""

    version: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The lender cannot do what was asked."""

    error: str  #: the class of the error
    reason: str


_Load = OpenModel | ModelOpened | LeaseChunks | LeaseGranted | ChunkLeased | ReleaseChunks | CancelLease
_Prefetch = PrefetchModel | ModelPrefetched
_Question = (
    CountBytes
    | BytesCounted
    | MeasureHost
    | HostMeasured
    | CountRequests
    | RequestsCounted
    | ForgetModel
    | ModelForgotten
)
_Look = LookUpstream | UpstreamSeen
Message = ServerHello | _Load | _Prefetch | _Question | _Look | Refused
#: These stand between a switch and its bytes, a message for each chunk.
_ENCODER = msgspec.json.Encoder()
_LINE = msgspec.json.Decoder(tuple[str, msgspec.Raw])
_FIELDS = {kind.__name__: msgspec.json.Decoder(kind) for kind in get_args(Message)}


def send(connection: socket.socket, *messages: Message) -> None:
    """Send messages; threads that share a connection share a lock, for a message may go out in parts."""
    connection.sendall(b"".join(map(encode, messages)))


def encode(message: Message) -> bytes:
    return _ENCODER.encode((type(message).__name__, message)) + b"\n"


def received(connection: socket.socket) -> Generator[Message]:
    """Yield messages until the other side closes, or dies in the middle of one.

    Raises StoreError for a line that is no message.
    """
    with connection.makefile("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield parse(line)


def refusal(error: HearthError) -> Refused:
    return Refused(type(error).__name__, str(error))


def error_of(refused: Refused) -> HearthError:
    """Return the error that the lender met, for the lease_client to raise."""
    kind = getattr(errors, refused.error, None)
    if isinstance(kind, type) and issubclass(kind, HearthError):
        return kind(refused.reason)
    return StoreError(refused.reason)


def parse(line: bytes) -> Message:
    try:
        kind, fields = _LINE.decode(line)
        message: Message = _FIELDS[kind].decode(fields)
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"no message of the host segment's owner or lease_client: {line[:80]!r}") from error
    return message
