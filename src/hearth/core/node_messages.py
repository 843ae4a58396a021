"""The messages between the head and the nodes of a cluster. Opens no socket.

    node                                      head
    AskAuthority                              AuthorityCertificate
    Join                                      Joined | NodeRefused
    NodeHello                                 NodeWelcome | NodeRefused; then, at any time:
    NodePulse, twice a second                 HeadPulse, for each
    ChunkReport, LinkReport                   RequestCounts, ForgetChunks, DropPeer; NodeRefused ends it
    AskSources                                Sources | QuestionRefused
    AskTicket                                 TicketGranted | QuestionRefused
    WorkerOpened, on a connection of its own  frames of `core/messages.py`, in both directions

The first two need no certificate of the node. Connections are TLS 1.3.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hearth.core.messages import WorkerHello
from hearth.core.types import Digest, NodeId, WorkerId

#: Begins a data connection; a ticket in hexadecimal and a line feed follow.
DATA_MAGIC = b"HEARTH1 "
#: Raise it with every change of this file, of `core/messages.py` or of the requests between stores. The head
#: also serves nodes of the version before: new fields have defaults, and new kinds of messages are sent to
#: nodes of this version alone.
VERSION = 2


class AskAuthority(Struct, frozen=True, tag=True):
    """Ask for the certificate of the authority, which the node compares with the hash in its token."""


class AuthorityCertificate(Struct, frozen=True, tag=True):
    certificate: bytes  #: PEM


class Join(Struct, frozen=True, tag=True):
    token_id: str
    secret: str
    name: str
    request: bytes  #: to sign a certificate, PEM

    def __repr__(self) -> str:
        """Leave out the secret: a repr may be logged."""
        return f"<Join name={self.name} token_id={self.token_id}>"


class Joined(Struct, frozen=True, tag=True):
    certificate: bytes  #: PEM


class NodeRefused(Struct, frozen=True, tag=True):
    reason: str
    is_final: bool = True  #: False: it may be admitted later


class NodeHello(Struct, frozen=True, tag=True):
    version: int
    name: str
    kind: Literal["cpu", "cuda"]
    devices: tuple[str, ...]  #: for people, one per worker
    host_bytes: int  #: of the host tier
    port: int  #: where other nodes open data connections, as is the host
    host: str | None = None  #: None: that of this connection
    labels: dict[str, str] = {}
    num_sharing: int = 1  #: workers on each device, at most


class NodeWelcome(Struct, frozen=True, tag=True):
    """The node is a member. What it had of an earlier life ends."""

    node: NodeId
    ticket_key: bytes  #: of this life; see `node/tickets.py`
    engine: dict[str, int | float | str | None]  #: the fields of EngineConfig
    turns: bool
    is_encrypted: bool  #: data connections

    def __repr__(self) -> str:
        return f"<NodeWelcome node={self.node}>"


class WorkerStatus(Struct, frozen=True):
    worker: WorkerId
    state: Literal["starting", "failing", "ready"]
    pid: int  #: 0: no process
    num_restarts: int
    hello: WorkerHello | None  #: None: not ready
    reason: str | None  #: why it is not ready; None: it is, or starts for the first time


class NodePulse(Struct, frozen=True, tag=True):
    workers: tuple[WorkerStatus, ...]
    host_used_bytes: int
    trouble: str | None = None  #: why workers are not up; None: they are, or start
    num_not_kept: int = 0  #: chunks that its keeper could not keep on disk


class HeadPulse(Struct, frozen=True, tag=True):
    """The answer to each pulse of a node."""


class WorkerOpened(Struct, frozen=True, tag=True):
    """The first message of a worker's own connection, when the worker has proven itself to its node."""

    node: NodeId
    hello: WorkerHello


class HeldChunks(Struct, frozen=True, array_like=True):
    """Which chunks of a model a node has: bit i of a mask, the lowest of the first byte first, is chunk i."""

    model: Digest
    host: bytes
    disk: bytes


class ChunkReport(Struct, frozen=True, tag=True):
    """Tells what a node has of models, for those that changed since the last message of this kind."""

    models: tuple[HeldChunks, ...]


class LinkSpeed(Struct, frozen=True, array_like=True):
    source: NodeId
    bytes_per_s: float
    latency_s: float


class LinkReport(Struct, frozen=True, tag=True):
    """How fast chunks have come from other nodes."""

    links: tuple[LinkSpeed, ...]


class RequestCounts(Struct, frozen=True, tag=True):
    """Requests since the last message of this kind: stores price chunks by demand."""

    num_by_model: dict[Digest, int]
    #: Models whose requests are forecast, to bring into host memory, with their latency weights.
    expected: dict[Digest, float] = {}


class ForgetChunks(Struct, frozen=True, tag=True):
    model: Digest


class DropPeer(Struct, frozen=True, tag=True):
    """End the data connections of a node that was lost or removed, and admit no more."""

    node: NodeId


class AskSources(Struct, frozen=True, tag=True):
    number: int
    model: Digest


class Source(Struct, frozen=True):
    node: NodeId
    held: HeldChunks


class PlannedFetch(Struct, frozen=True, array_like=True):
    """Chunks that a node is to fetch from a certain other one, which may still be receiving them itself."""

    begin: int  #: the first chunk
    end: int  #: the first chunk behind them
    node: NodeId
    turn: int  #: of two nodes that ask the same one, the lower goes first


class Sources(Struct, frozen=True, tag=True):
    number: int  #: of the question
    sources: tuple[Source, ...]  #: nodes that have at least one chunk, without the one that asked
    plan: tuple[PlannedFetch, ...] = ()  #: how to fetch the model while others do, too; in this order


class AskTicket(Struct, frozen=True, tag=True):
    number: int
    node: NodeId  #: to connect to
    worker: WorkerId | None = None  #: of that node; None: its store


class TicketGranted(Struct, frozen=True, tag=True):
    number: int
    host: str  #: empty: the head, whose address the node knows
    port: int
    ticket: bytes
    is_encrypted: bool

    def __repr__(self) -> str:
        return f"<TicketGranted number={self.number} host={self.host} port={self.port}>"


class QuestionRefused(Struct, frozen=True, tag=True):
    number: int
    reason: str


#: Of a node's store or workers, which its agent passes on to the head under a number of its own.
Question = AskSources | AskTicket
Answer = Sources | TicketGranted | QuestionRefused

FromNode = AskAuthority | Join | NodeHello | NodePulse | WorkerOpened | ChunkReport | LinkReport | Question
FromHead = (
    AuthorityCertificate
    | Joined
    | NodeRefused
    | NodeWelcome
    | HeadPulse
    | RequestCounts
    | ForgetChunks
    | DropPeer
    | Answer
)
NodeMessage = FromNode | FromHead
