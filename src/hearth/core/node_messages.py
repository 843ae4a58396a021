"""The messages between the head and the nodes of a cluster. Opens no socket.

    node                                      head
    AskAuthority                              AuthorityIs
    Join                                      Joined | NodeRefused
    NodeHello                                 NodeWelcome | NodeRefused; then, at any time:
    NodePulse, twice a second                 HeadPulse, for each
    ChunksHeld, LinksMeasured                 RequestsCame, ForgetChunks; NodeRefused ends it
    AskSources                                Sources
    AskTicket                                 TicketGranted | TicketRefused
    WorkerOpened, on a connection of its own  frames of `core/messages.py`, in both directions

The first two need no certificate of the node. Connections are TLS 1.3.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hearth.core.messages import WorkerHello
from hearth.core.types import Digest, NodeId, WorkerId

#: Raise it with every change of this file or of `core/messages.py`; the head also speaks the version before.
VERSION = 1


class AskAuthority(Struct, frozen=True, tag=True):
    """Ask for the certificate of the authority, which the node compares with the hash in its token."""


class AuthorityIs(Struct, frozen=True, tag=True):
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


class NodeWorker(Struct, frozen=True):
    """The state of a worker, as `hearth ps` shows it."""

    worker: WorkerId
    state: Literal["starting", "failing", "ready"]
    pid: int
    num_restarts: int
    reason: str | None


class NodePulse(Struct, frozen=True, tag=True):
    number: int
    workers: tuple[NodeWorker, ...]
    host_used_bytes: int
    trouble: str | None = None  #: why workers are not up; None: they are, or start


class HeadPulse(Struct, frozen=True, tag=True):
    number: int  #: of the pulse that it answers


class WorkerOpened(Struct, frozen=True, tag=True):
    """The first message of a worker's own connection, when the worker has proven itself to its node."""

    node: NodeId
    hello: WorkerHello


class HeldChunks(Struct, frozen=True, array_like=True):
    """Which chunks of a model a node has: bit i of a mask, the lowest of the first byte first, is chunk i."""

    model: Digest
    host: bytes
    disk: bytes


class ChunksHeld(Struct, frozen=True, tag=True):
    """Tells what a node has of models, for those that changed since the last message of this kind."""

    models: tuple[HeldChunks, ...]


class LinkSpeed(Struct, frozen=True, array_like=True):
    source: NodeId
    bytes_per_s: float
    latency_s: float


class LinksMeasured(Struct, frozen=True, tag=True):
    """How fast chunks have come from other nodes."""

    links: tuple[LinkSpeed, ...]


class RequestsCame(Struct, frozen=True, tag=True):
    """Requests since the last message of this kind: stores price chunks by demand."""

    num_by_model: dict[Digest, int]


class ForgetChunks(Struct, frozen=True, tag=True):
    model: Digest


class AskSources(Struct, frozen=True, tag=True):
    number: int
    model: Digest


class Source(Struct, frozen=True):
    node: NodeId
    held: HeldChunks


class Sources(Struct, frozen=True, tag=True):
    number: int  #: of the question
    sources: tuple[Source, ...]  #: nodes that have at least one chunk, without the one that asked


class AskTicket(Struct, frozen=True, tag=True):
    number: int
    node: NodeId  #: to connect to


class TicketGranted(Struct, frozen=True, tag=True):
    number: int
    host: str
    port: int
    ticket: bytes
    is_encrypted: bool

    def __repr__(self) -> str:
        return f"<TicketGranted number={self.number} host={self.host} port={self.port}>"


class TicketRefused(Struct, frozen=True, tag=True):
    number: int
    reason: str


FromNode = (
    AskAuthority
    | Join
    | NodeHello
    | NodePulse
    | WorkerOpened
    | ChunksHeld
    | LinksMeasured
    | AskSources
    | AskTicket
)
FromHead = (
    AuthorityIs
    | Joined
    | NodeRefused
    | NodeWelcome
    | HeadPulse
    | RequestsCame
    | ForgetChunks
    | Sources
    | TicketGranted
    | TicketRefused
)
