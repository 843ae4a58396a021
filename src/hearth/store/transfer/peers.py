"""Reads chunks from the stores of other nodes: finds out which have them, and chooses among those.

A chunk is asked of the node that will have sent it first, by the speed of the link and what is in flight on
it. Several nodes send at once. A node that fails or stalls is left out for a while, and its chunks are asked
elsewhere. A chunk that no node has is asked of the head, which may fetch it from object storage.

Files are compared with their digests here, chunks by the caller (`chunk_reader.py`).
"""

from __future__ import annotations

import logging
import math
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hearth.core.errors import (
    BadCheckpoint,
    ChunkCorrupt,
    ChunkMissing,
    LoadCancelled,
    StoreError,
    Unreachable,
)
from hearth.core.model_files import MAX_JSON_BYTES
from hearth.core.node_messages import LinkSpeed
from hearth.core.types import LOCAL, Digest, NodeId, Rung
from hearth.policy.memory.reload_cost import PRIOR_BYTES_PER_S, RunningRate
from hearth.store.format.description import parse_description
from hearth.store.format.manifest import MANIFEST, StoredManifest, digest_of
from hearth.store.tiers.model import ChunkArrival
from hearth.store.transfer.peer_stream import AgentClient, PeerStream

#: For so long it is believed that a node has a chunk in host memory, when the own disk has it as well.
FRESH_S = 10.0
#: How often a reader that waits for a node looks whether it is still wanted.
LOOK_S = 0.25
#: A node has chunks of so many seconds in flight, within limits: one at a time leaves gaps, and on a slow
#: link many at once delay the chunk that is needed first.
IN_FLIGHT_S = 0.5
MIN_STREAMS, MAX_STREAMS = 2, 8
#: The sender closes a connection that has been idle for twice as long.
IDLE_S = 30.0

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    stall_s: float = 5.0  #: without a byte
    left_out_s: float = 5.0  #: after a failure
    distrusted_s: float = 60.0  #: after wrong bytes
    give_up_s: float = 15.0  #: without a node that can be asked
    #: How long it is taken to hold which nodes have which chunks. They may be receiving them at this moment.
    sources_s: float = 1.0


@dataclass(slots=True, eq=False)
class _Node:
    """Another node, as far as it is known. Mutable; guarded by the lock of `Peers`."""

    name: NodeId
    rate: RunningRate = field(default_factory=RunningRate)
    latency_s: float = 0.0
    num_in_flight: int = 0
    in_flight_bytes: int = 0
    last_done_s: float = -math.inf
    left_out_until_s: float = -math.inf
    failure: str = ""  #: why it was left out last
    idle: list[tuple[float, PeerStream]] = field(default_factory=list)  #: and since when

    def has_room(self, num_bytes: int) -> bool:
        wanted = (self.rate.bytes_per_s or 0.0) * IN_FLIGHT_S / num_bytes
        return self.num_in_flight < min(max(wanted, MIN_STREAMS), MAX_STREAMS)


@dataclass(frozen=True, slots=True)
class _Holder:
    node: NodeId
    host: int  #: bit i is chunk i
    disk: int


@dataclass(slots=True, eq=False)
class _Want:
    """A reader that waits for a node to ask. Mutable; guarded by the lock of `Peers`."""

    model: PeerModel
    index: int
    num_bytes: int
    refused: set[NodeId] = field(default_factory=set)  #: nodes that do not have the chunk after all
    node: _Node | None = None
    assigned: threading.Event = field(default_factory=threading.Event)


class Peers:
    """The other nodes of the cluster, as sources of chunks. Any thread may call it."""

    def __init__(
        self, agent_socket: Path, credentials: Path | None = None, patience: Patience = Patience()
    ) -> None:
        """`credentials`: the directory of this node's certificate; needed where data is encrypted."""
        self.agent = AgentClient(agent_socket)
        self._credentials, self.patience = credentials, patience
        self._nodes: dict[NodeId, _Node] = {}
        self._wants: list[_Want] = []  #: in the order in which they are served
        self._lock = threading.Lock()  #: guards nodes and wants, for readers on many threads

    def links(self) -> tuple[LinkSpeed, ...]:
        """Return how fast nodes have sent to this one."""
        with self._lock:
            return tuple(
                LinkSpeed(node.name, node.rate.bytes_per_s, node.latency_s)
                for node in self._nodes.values()
                if node.rate.bytes_per_s is not None
            )

    def is_faster(self, name: NodeId, bytes_per_s: float) -> bool:
        """True if chunks have come faster from a node. Takes no lock: the fetcher asks under its own."""
        node = self._nodes.get(name)
        if node is None or node.left_out_until_s > time.monotonic():
            return False
        return (node.rate.bytes_per_s or 0.0) > bytes_per_s

    def leave_out(self, name: NodeId, seconds: float, reason: object) -> None:
        """Do not ask a node for so long."""
        log.warning("peer_left_out node=%s for_s=%g reason=%s", name, seconds, reason)
        with self._lock:
            node = self._node(name)
            node.left_out_until_s = time.monotonic() + seconds
            node.failure = str(reason)
            idle, node.idle = node.idle, []
        for _, stream in idle:
            stream.close()

    def read_file(self, model: PeerModel, name: str, max_bytes: int) -> bytes:
        failures: list[StoreError] = []
        for node in dict.fromkeys((*model.holders(), LOCAL)):
            try:
                content = self._use(node, lambda stream: stream.read_file(model.digest, name, max_bytes))
                model.check_file(name, content)
                return content
            except (ChunkMissing, Unreachable) as error:
                failures.append(error)
            except (ChunkCorrupt, BadCheckpoint) as error:
                self.leave_out(node, self.patience.distrusted_s, error)
                failures.append(ChunkCorrupt(f"node `{node}`: {error}"))
        raise _none_has(f"`{name}` of {model.url}", failures)

    def read_chunk(
        self, model: PeerModel, index: int, buffer: memoryview, is_wanted: Callable[[], bool]
    ) -> ChunkArrival:
        """Raises ChunkMissing, Unreachable and LoadCancelled."""
        want, failures = _Want(model, index, len(buffer)), list[StoreError]()
        while True:
            node = self._wait_for_node(want, is_wanted, failures)
            seconds = None
            try:
                read = self._use(
                    node.name, lambda stream: stream.read_chunk(model.digest, index, buffer, is_wanted)
                )
                seconds = read.seconds
                return ChunkArrival(read.digest, read.hash_s, node.name)
            except ChunkMissing as error:
                failures.append(error)
                want.refused.add(node.name)
                model.expire_sources()
            except Unreachable as error:
                failures.append(error)
            finally:
                self._done(node, want, seconds)

    def _wait_for_node(self, want: _Want, is_wanted: Callable[[], bool], failures: list[StoreError]) -> _Node:
        """Wait until a node that has the chunk has room for another. Raises StoreError if there is none."""
        give_up_s = time.monotonic() + self.patience.give_up_s
        want.node = None
        want.assigned.clear()
        with self._lock:
            self._wants.append(want)
        try:
            while True:
                want.model.look_for_sources(failures)
                with self._lock:
                    self._match()
                    can_be_asked = want.node is not None or bool(self._candidates(want))
                    are_left = not want.refused.issuperset((*want.model.holders(want.index), LOCAL))
                if want.assigned.wait(LOOK_S):
                    assert want.node is not None, "assigned together"
                    return want.node
                if can_be_asked:
                    give_up_s = time.monotonic() + self.patience.give_up_s
                if not are_left or time.monotonic() > give_up_s:
                    failures += self._failures_of(want)
                    raise _none_has(f"chunk {want.index} of {want.model.url}", failures)
                if not is_wanted():
                    raise LoadCancelled(f"chunk {want.index} of {want.model.url} is not needed any more")
        except BaseException:
            with self._lock:
                if want in self._wants:
                    self._wants.remove(want)
            if want.node is not None:
                self._done(want.node, want, None)
            raise

    def _failures_of(self, want: _Want) -> list[StoreError]:
        """Return why the nodes that have a chunk are left out."""
        with self._lock:
            nodes = map(self._node, (*want.model.holders(want.index), LOCAL))
            return [Unreachable(f"node `{node.name}`: {node.failure}") for node in nodes if node.failure]

    def _done(self, node: _Node, want: _Want, seconds: float | None) -> None:
        """`seconds` from the request to the last byte; None: it did not come."""
        now_s = time.monotonic()
        with self._lock:
            node.num_in_flight -= 1
            node.in_flight_bytes -= want.num_bytes
            if seconds is not None:  # the time since another chunk came: streams share the link
                node.rate.add(want.num_bytes, min(seconds, now_s - node.last_done_s))
                node.last_done_s = now_s
            self._match()

    def _use(self, name: NodeId, act: Callable[[PeerStream], T]) -> T:
        """Call `act` with a connection to a node, which is left out if that fails. Raises Unreachable."""
        while True:
            stream = self._take_idle(name)
            is_new = stream is None
            try:
                if stream is None:
                    stream = self._open(name)
                result = act(stream)
            except ChunkMissing:
                assert stream is not None, "it has answered"
                self._put_idle(name, stream)
                raise
            except (OSError, Unreachable) as error:
                if stream is not None:
                    stream.close()
                if isinstance(error, ConnectionError | ssl.SSLEOFError) and not is_new:
                    continue  # the other side has closed it, or was started again
                self.leave_out(name, self.patience.left_out_s, error)
                raise Unreachable(f"node `{name}`: {error}") from error
            except BaseException:
                if stream is not None:
                    stream.close()
                raise
            self._put_idle(name, stream)
            return result

    def _open(self, name: NodeId) -> PeerStream:
        ticket = self.agent.ticket(name)
        stream = PeerStream.open(name, ticket, self._credentials, self.patience.stall_s)
        with self._lock:
            self._node(name).latency_s = stream.latency_s
        return stream

    def _take_idle(self, name: NodeId) -> PeerStream | None:
        with self._lock:
            idle = self._node(name).idle
            while idle:
                since_s, stream = idle.pop()
                if time.monotonic() - since_s < IDLE_S:
                    return stream
                stream.close()
            return None

    def _put_idle(self, name: NodeId, stream: PeerStream) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._node(name).idle.append((now_s, stream))
            for node in self._nodes.values():  # also of nodes that are gone
                while node.idle and now_s - node.idle[0][0] > IDLE_S:
                    node.idle.pop(0)[1].close()

    def close(self) -> None:
        with self._lock:
            idle = [stream for node in self._nodes.values() for _, stream in node.idle]
            self._nodes.clear()
        for stream in idle:
            stream.close()

    # Below here the lock is held.

    def _node(self, name: NodeId) -> _Node:
        return self._nodes.setdefault(name, _Node(name))

    def _match(self) -> None:
        """Assign nodes to readers, in the order in which these came. One may wait for a node that is full."""
        rates = [node.rate.bytes_per_s for node in self._nodes.values() if node.rate.bytes_per_s]
        guess = sum(rates) / len(rates) if rates else PRIOR_BYTES_PER_S[Rung.PEER]
        ahead = Counter[_Node]()  # bytes that earlier readers wait for
        for want in list(self._wants):
            if not (candidates := self._candidates(want)):
                continue
            node = min(
                candidates,
                key=lambda node: (
                    (node.in_flight_bytes + ahead[node] + want.num_bytes) / (node.rate.bytes_per_s or guess)
                ),
            )
            if not node.has_room(want.num_bytes):
                ahead[node] += want.num_bytes
            else:
                node.num_in_flight += 1
                node.in_flight_bytes += want.num_bytes
                self._wants.remove(want)
                want.node = node
                want.assigned.set()

    def _candidates(self, want: _Want) -> list[_Node]:
        """Return the nodes to choose from: those that have the chunk, else the head."""
        return self._usable(want, want.model.holders(want.index)) or self._usable(want, [LOCAL])

    def _usable(self, want: _Want, names: Sequence[NodeId]) -> list[_Node]:
        nodes = [self._node(name) for name in names if name not in want.refused]
        return [node for node in nodes if node.left_out_until_s < time.monotonic()]


class PeerModel:
    """A model on other nodes: `RemoteFiles`. Many threads may read."""

    rung = Rung.PEER

    def __init__(self, peers: Peers, digest: Digest) -> None:
        self.digest = digest
        self.url = f"hearth://{digest}"
        self._peers = peers
        self._holders: tuple[_Holder, ...] = ()  #: replaced as a whole
        self._file_digests: Mapping[str, Digest] = {}  #: replaced as a whole
        self._looked_s = -math.inf
        self._looking = threading.Lock()  #: one thread asks the agent, the others wait for its answer

    def holders(self, index: int | None = None) -> list[NodeId]:
        """Return the nodes that have a chunk, or any, those first that have it in host memory."""
        if index is None:
            return [holder.node for holder in self._holders]
        holders = [holder for holder in self._holders if (holder.host | holder.disk) >> index & 1]
        return [holder.node for holder in sorted(holders, key=lambda one: not one.host >> index & 1)]

    def look_for_sources(self, failures: list[StoreError] | None = None) -> None:
        """Ask which nodes have what, if the answer is too old. A failure changes nothing."""
        with self._looking:
            if time.monotonic() - self._looked_s < self._peers.patience.sources_s:
                return
            try:
                self._holders = tuple(
                    _Holder(given.node, _mask(given.host), _mask(given.disk))
                    for given in self._peers.agent.sources(self.digest)
                )
            except (Unreachable, ValueError) as error:
                log.warning("sources_unknown model=%s reason=%s", self.digest, error)
                if failures is not None and isinstance(error, StoreError):
                    failures.append(error)
            self._looked_s = time.monotonic()

    def expire_sources(self) -> None:
        self._looked_s = -math.inf

    def read_file(self, name: str, max_bytes: int = MAX_JSON_BYTES) -> bytes:
        self.look_for_sources()
        return self._peers.read_file(self, name, max_bytes)

    def check_file(self, name: str, content: bytes) -> None:
        """Compare a manifest with the model's digest, and other files with theirs, once it is known."""
        if name == MANIFEST:
            manifest = parse_description(content.decode(errors="replace"), f"{self.url}/{name}")
            if manifest.digest != self.digest:
                raise ChunkCorrupt(f"it sent the manifest of {manifest.digest} for {self.url}")
            self._file_digests = {file.name: file.digest for file in manifest.files}
        elif (wanted := self._file_digests.get(name)) and (found := digest_of(content)) != wanted:
            raise ChunkCorrupt(f"`{name}` of {self.url} hashes to {found}, its manifest says {wanted}")

    def read_chunk(
        self, manifest: StoredManifest, index: int, buffer: memoryview, is_wanted: Callable[[], bool]
    ) -> ChunkArrival:
        return self._peers.read_chunk(self, index, buffer, is_wanted)

    def prepare(self, bytes_per_s: float) -> None:
        """Look for sources before a load, if any node has been faster than this."""
        if any(link.bytes_per_s > bytes_per_s for link in self._peers.links()):
            self.look_for_sources()

    def is_faster(self, index: int, bytes_per_s: float) -> bool:
        if time.monotonic() - self._looked_s > FRESH_S:
            return False
        return any(
            holder.host >> index & 1 and self._peers.is_faster(holder.node, bytes_per_s)
            for holder in self._holders
        )

    def distrust(self, source: str) -> None:
        self._peers.leave_out(
            NodeId(source), self._peers.patience.distrusted_s, f"it sent wrong bytes of {self.url}"
        )
        self.expire_sources()


def _mask(text: str) -> int:
    return int.from_bytes(bytes.fromhex(text), "little")


def _none_has(what: str, failures: list[StoreError]) -> StoreError:
    tried = "; ".join(dict.fromkeys(str(failure) for failure in failures)) or "no node says that it has it"
    kind = type(failures[-1]) if failures else Unreachable
    return kind(f"no node can send {what}: {tried}")
