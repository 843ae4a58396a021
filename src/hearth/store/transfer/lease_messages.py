"""Messages between the keeper, which owns the host segment, and the workers that lease chunks of it.

    worker                                keeper
    (connects)                            ServerHello, with the segment's file descriptor
    OpenModel                             ModelOpened | Refused
    LeaseChunks                           LeaseGranted, with all chunks that are in host memory; ChunkLeased,
                                          in order, as the others are ready; Refused ends it
    ReleaseChunks, until all are          ...
    CancelLease                           leases no more chunks; leased ones stay leased
    PrefetchModel                         ModelPrefetched | Refused
    CountRequests, KnownModels            Done
    ForgetModel                           Done | Refused
    LookUpstream                          UpstreamSeen | Refused
    AskReport                             KeeperReport
    (closes, or dies)                     takes back all unreleased chunks

A message is a line of JSON: the name of its kind, and its fields. A connection carries one lease at a time,
so its end ends the lease. When all chunks of a lease were leased and released, another lease may follow. A
lease that failed or was cancelled may have copies under way: its connection stays until it has released all
its chunks, and then closes.
"""

from __future__ import annotations

import socket
from collections.abc import Generator
from dataclasses import dataclass
from typing import get_args

import msgspec

from hearth.core.errors import HearthError, StoreError
from hearth.core.node_messages import HeldChunks, LinkSpeed
from hearth.core.types import Digest
from hearth.store.transfer.record import Delivery


@dataclass(frozen=True, slots=True)
class ServerHello:
    num_cells: int
    cell_bytes: int
    keeps_pages: bool  #: pages are never returned to the system, so they may be pinned


@dataclass(frozen=True, slots=True)
class OpenModel:
    where: str  #: a directory or a URL
    weight: float = 1.0  #: see `StoredModel`


@dataclass(frozen=True, slots=True)
class ModelOpened:
    name: str
    directory: str  #: holds its manifest and the files of its tokenizer
    digest: Digest
    host_bytes: int  #: of the model, in host memory now


@dataclass(frozen=True, slots=True)
class LeaseChunks:
    model: Digest  #: opened before, on any connection
    directory: str  #: as `ModelOpened` has it: copies of one model share a digest, and one may be deleted
    chunks: tuple[int, ...]
    #: Chunks read quickly from disk into the first cells need not stay there: see `Fetcher.fetch`.
    pass_through: bool = False


@dataclass(frozen=True, slots=True)
class ChunkLeased:
    index: int
    cell: int
    num_bytes: int
    delivery: Delivery | None
    is_shared: bool


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    is_in_host: bool  #: no chunk has to be read
    #: The first chunks. In one message, because one for each costs more than copying an adapter.
    leased: tuple[ChunkLeased, ...] = ()


@dataclass(frozen=True, slots=True)
class ReleaseChunks:
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelLease:
    """Lease no more chunks."""


@dataclass(frozen=True, slots=True)
class PrefetchModel:
    """Bring a model into host memory, without a lease. Closing the connection cancels it."""

    model: Digest  #: as in `LeaseChunks`
    directory: str


@dataclass(frozen=True, slots=True)
class ModelPrefetched:
    host_bytes: int  #: of the model, in host memory now


@dataclass(frozen=True, slots=True)
class CountRequests:
    """Requests since the last message of this kind: they price chunks."""

    num_by_model: dict[Digest, int]


@dataclass(frozen=True, slots=True)
class ForgetModel:
    """A model is no longer deployed, so its chunks lose their price."""

    where: str  #: as in `OpenModel`


@dataclass(frozen=True, slots=True)
class LookUpstream:
    source: str  #: a URL, or hf:ORG/NAME[:FILE][@REVISION]


@dataclass(frozen=True, slots=True)
class UpstreamSeen:
    version: str


@dataclass(frozen=True, slots=True)
class KnownModels:
    """Where the models are that other nodes may ask for, in the place of all told before."""

    models: dict[Digest, str]  #: a directory or a URL


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to messages that ask for nothing."""


@dataclass(frozen=True, slots=True)
class AskReport:
    """Ask what the store has."""


@dataclass(frozen=True, slots=True)
class KeeperReport:
    used_bytes: int  #: of host memory: cells that hold a chunk, or are being filled
    capacity_bytes: int  #: of host memory
    models: tuple[HeldChunks, ...] = ()  #: that are opened, or described on disk
    links: tuple[LinkSpeed, ...] = ()  #: how fast chunks have come from other nodes
    num_not_kept: int = 0  #: chunks that the disk had no room for, or that could not be written


@dataclass(frozen=True, slots=True)
class Refused:
    error: str  #: the label of the error
    reason: str


Message = (
    ServerHello
    | OpenModel
    | ModelOpened
    | LeaseChunks
    | LeaseGranted
    | ChunkLeased
    | ReleaseChunks
    | CancelLease
    | PrefetchModel
    | ModelPrefetched
    | CountRequests
    | ForgetModel
    | LookUpstream
    | UpstreamSeen
    | KnownModels
    | Done
    | AskReport
    | KeeperReport
    | Refused
)
#: A switch of models waits for these messages, one for each chunk.
_ENCODER = msgspec.json.Encoder()
_LINE = msgspec.json.Decoder(tuple[str, msgspec.Raw])
_FIELDS = {kind.__name__: msgspec.json.Decoder(kind) for kind in get_args(Message)}


def send(connection: socket.socket, *messages: Message) -> None:
    """Send messages. Threads that share a connection need a lock: a message may go out in parts."""
    connection.sendall(b"".join(map(encode, messages)))


def encode(message: Message) -> bytes:
    return _ENCODER.encode((type(message).__name__, message)) + b"\n"


def received(connection: socket.socket) -> Generator[Message]:
    """Yield messages until the other side closes, or dies in the middle of one. Raises as `parse`."""
    with connection.makefile("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield parse(line)


def refusal(error: HearthError) -> Refused:
    return Refused(error.label, str(error))


def parse(line: bytes) -> Message:
    """Raises StoreError for a line that is no message."""
    try:
        kind, fields = _LINE.decode(line)
        message: Message = _FIELDS[kind].decode(fields)
    except (msgspec.MsgspecError, KeyError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"not a message between keeper and worker: {line[:80]!r}") from error
    return message
