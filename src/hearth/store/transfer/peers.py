"""Reads chunks from the stores of other nodes: finds out which have them, and chooses among those.

A chunk is asked of the node that will have sent it first, by the speed of the link and what is in flight on
it, or of the one that the head's plan names (`fetch_plan.py`). Several nodes send at once. A node that fails
or stalls is left out for a while, and its chunks are asked elsewhere. Object storage that the head gives out
URLs of is one more source. A chunk that no other source has is asked of the head, which may fetch it from
object storage itself.

Files are compared with their digests here, chunks by the caller (`chunk_reader.py`).
"""

from __future__ import annotations

import logging
import math
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
from hearth.core.node_messages import LinkSpeed, PlannedFetch
from hearth.core.types import LOCAL, Digest, NodeId, Rung, name_of
from hearth.policy.memory.reload_cost import PRIOR_BYTES_PER_S, RunningRate
from hearth.store.format.manifest import StoredManifest
from hearth.store.tiers.model import ChunkArrival
from hearth.store.transfer.peer_model import PeerModel
from hearth.store.transfer.peer_stream import AgentClient, PeerStream

#: How often a reader that waits for a node looks whether it is still wanted.
LOOK_S = 0.25
#: A node has chunks of so many seconds in flight, within limits: one at a time leaves gaps, and on a slow
#: link many at once delay the chunk that is needed first.
IN_FLIGHT_S = 0.5
MIN_STREAMS, MAX_STREAMS = 2, 8
#: For one chunk. Nodes that fail come back after a while, and may fail again.
MAX_TRIES = 8
#: Between two questions to a node that does not know yet what it is to send.
RETRY_S = 0.1
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
    #: Until the head's store must know of a model: it was just deployed, or the store replaced.
    unknown_s: float = 5.0
    #: After object storage has failed: many nodes cannot reach it at all.
    store_s: float = 600.0
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

    @property
    def is_store(self) -> bool:
        return "://" in self.name

    def has_room(self, num_bytes: int) -> bool:
        if self.is_store and self.rate.bytes_per_s is not None:  # it answers, and is made for many requests
            return True
        wanted = (self.rate.bytes_per_s or 0.0) * IN_FLIGHT_S / num_bytes
        return self.num_in_flight < min(max(wanted, MIN_STREAMS), MAX_STREAMS)


@dataclass(slots=True, eq=False)
class _Want:
    """A reader that waits for a node to ask. Mutable; guarded by the lock of `Peers`."""

    model: PeerModel
    index: int
    num_bytes: int
    is_host_only: bool  #: this node's disk has the chunk, too
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
                if node.rate.bytes_per_s is not None and not node.is_store
            )

    def is_faster(self, name: NodeId, bytes_per_s: float) -> bool:
        """True if chunks have come faster from a node. Takes no lock: the fetcher asks under its own."""
        node = self._nodes.get(name)
        if node is None or node.left_out_until_s > time.monotonic():
            return False
        return (node.rate.bytes_per_s or 0.0) > bytes_per_s

    def suspend(self, name: NodeId, seconds: float, reason: object) -> None:
        """Do not ask a node for so long."""
        log.warning("peer_left_out node=%s for_s=%g reason=%s", name, seconds, reason)
        with self._lock:
            if (node := self._nodes.get(name)) is None:  # it has another life now
                return
            node.left_out_until_s = time.monotonic() + seconds
            node.failure = str(reason)
            idle, node.idle = node.idle, []
        for _, stream in idle:
            stream.close()

    def read_file(self, model: PeerModel, name: str, max_bytes: int) -> bytes:
        until_s = time.monotonic() + self.patience.unknown_s
        while True:
            try:
                return self._read_file(model, name, max_bytes)
            except ChunkMissing:
                if time.monotonic() > until_s:
                    raise
            time.sleep(RETRY_S)

    def _read_file(self, model: PeerModel, name: str, max_bytes: int) -> bytes:
        failures: list[StoreError] = []
        for node in dict.fromkeys((*model.holders(), LOCAL)):
            try:
                content = self._use(node, lambda stream: stream.read_file(model.digest, name, max_bytes))
                model.check_file(name, content)
                return content
            except (ChunkMissing, Unreachable) as error:
                failures.append(error)
            except (ChunkCorrupt, BadCheckpoint) as error:
                self.suspend(node, self.patience.distrusted_s, error)
                failures.append(ChunkCorrupt(f"node `{node}`: {error}"))
        raise _none_has(f"`{name}` of {model.url}", failures)

    def read_url(self, digest: Digest) -> str:
        """Return the head's URL for a model in object storage. Raises ChunkMissing and Unreachable."""
        return self._use(LOCAL, lambda stream: stream.read_url(digest))

    def read_chunk(
        self,
        model: PeerModel,
        manifest: StoredManifest,
        index: int,
        buffer: memoryview,
        is_wanted: Callable[[], bool],
        *,
        is_host_only: bool,
    ) -> ChunkArrival:
        """Raises ChunkMissing, Unreachable and LoadCancelled."""
        while (planned := model.plan.source_of(index)) is not None:
            if (arrival := self._read_planned(model, planned, index, buffer, is_wanted)) is not None:
                return arrival
        want, failures = _Want(model, index, len(buffer), is_host_only), list[StoreError]()
        known_by_s = time.monotonic() + self.patience.unknown_s
        for _ in range(MAX_TRIES):
            node = self._wait_for_node(want, is_wanted, failures)
            seconds, began_s = None, time.monotonic()
            try:
                if node.is_store:
                    arrival = model.read_from_store(manifest, index, buffer, is_wanted)
                    seconds = time.monotonic() - began_s
                    return arrival
                read = self._use(
                    node.name,
                    lambda stream: stream.read_chunk(
                        model.digest, index, buffer, is_wanted, is_host_only=is_host_only
                    ),
                )
                seconds = read.seconds
                return ChunkArrival(read.digest, read.hash_s, Rung.PEER, node.name)
            except ChunkMissing as error:
                failures.append(ChunkMissing(f"node `{node.name}`: {error}"))
                if not is_host_only:  # chunks come and go in host memory
                    model.expire_sources()
                if node.name == LOCAL and not is_host_only and time.monotonic() < known_by_s:
                    time.sleep(self.patience.unknown_s / MAX_TRIES)
                else:
                    want.refused.add(node.name)
            except Unreachable as error:
                failures.append(error)
                if model.origin is not None and node.is_store:  # which has tried again
                    want.refused.add(node.name)
                elif node.is_store:
                    self.suspend(node.name, self.patience.store_s, error)
            finally:
                self._done(node, want.num_bytes, seconds)
        raise _none_has(f"chunk {index} of {model.url} within {MAX_TRIES} tries", failures)

    def _read_planned(
        self,
        model: PeerModel,
        planned: PlannedFetch,
        index: int,
        buffer: memoryview,
        is_wanted: Callable[[], bool],
    ) -> ChunkArrival | None:
        """Read a chunk from the node that is to send it, when that has it. None: ask the plan again."""
        name, plan, asked_s, seconds = planned.node, model.plan, time.monotonic(), None
        began_s = asked_s

        def begin() -> None:
            nonlocal began_s
            plan.begin(index, is_wanted)
            began_s = time.monotonic()

        with self._lock:
            node = self._node(name)
            is_usable = node.left_out_until_s < asked_s
            self._assign(node, len(buffer))
        try:
            if not is_usable:
                raise Unreachable(f"node `{name}` is left out: {node.failure}")
            read = self._use(
                name,
                lambda stream: stream.read_chunk(
                    model.digest,
                    index,
                    buffer,
                    is_wanted,
                    turn=planned.turn,
                    wait_for_others=begin,
                    is_late=lambda: plan.is_late(began_s),
                ),
            )
            seconds = read.seconds
            plan.came(index)
            return ChunkArrival(read.digest, read.hash_s, Rung.PEER, name)
        except StoreError as error:
            if not is_wanted():
                raise LoadCancelled(f"chunk {index} of {model.url} is not needed any more") from error
            if isinstance(error, ChunkMissing) and plan.is_starting(asked_s):
                plan.end(index)  # for another one, as this one waits
                time.sleep(RETRY_S)
                return None
            log.warning("plan_left node=%s model=%s chunk=%d reason=%s", name, model.digest, index, error)
            plan.leave_out(name)
            return None
        finally:
            plan.end(index)
            self._done(node, len(buffer), seconds)

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
                if not want.is_host_only:
                    want.model.look_for_store()
                with self._lock:
                    self._match()
                    can_be_asked = want.node is not None or bool(self._candidates(want))
                    are_left = not want.refused.issuperset(_sources_of(want))
                if can_be_asked:
                    give_up_s = time.monotonic() + self.patience.give_up_s
                elif want.is_host_only or not are_left or time.monotonic() > give_up_s:
                    failures += self._failures_of(want)
                    raise _none_has(f"chunk {want.index} of {want.model.url}", failures)
                if want.assigned.wait(LOOK_S):
                    assert want.node is not None, "assigned together"
                    return want.node
                if not is_wanted():
                    raise LoadCancelled(f"chunk {want.index} of {want.model.url} is not needed any more")
        except BaseException:
            with self._lock:
                if want in self._wants:
                    self._wants.remove(want)
            if want.node is not None:
                self._done(want.node, want.num_bytes, None)
            raise

    def _failures_of(self, want: _Want) -> list[StoreError]:
        """Return why the nodes that have a chunk are left out."""
        with self._lock:
            nodes = [self._nodes[name] for name in _sources_of(want) if name in self._nodes]
            return [Unreachable(f"node `{node.name}`: {node.failure}") for node in nodes if node.failure]

    def _done(self, node: _Node, num_bytes: int, seconds: float | None) -> None:
        """`seconds` from the request to the last byte; None: it did not come."""
        now_s = time.monotonic()
        with self._lock:
            node.num_in_flight -= 1
            node.in_flight_bytes -= num_bytes
            if seconds is not None:  # the time since another chunk came: streams share the link
                node.rate.add(num_bytes, min(seconds, now_s - node.last_done_s))
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
                self.suspend(name, self.patience.left_out_s, error)
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
            if (node := self._nodes.get(name)) is not None:
                node.latency_s = stream.latency_s
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
            if (used := self._nodes.get(name)) is None:
                stream.close()
            else:
                used.idle.append((now_s, stream))
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
        """Return a node or an object storage. A new node takes the place of its earlier lives."""
        if name not in self._nodes:
            lives = [old for old in self._nodes if "://" not in name and name_of(old) == name_of(name)]
            for old in lives:
                for _, stream in self._nodes.pop(old).idle:
                    stream.close()
            self._nodes[name] = _Node(name)
        return self._nodes[name]

    def _match(self) -> None:
        """Assign nodes to readers, in the order in which these came. One may wait for a node that is full."""
        nodes = [node for node in self._nodes.values() if not node.is_store]
        rates = [node.rate.bytes_per_s for node in nodes if node.rate.bytes_per_s]
        guess = sum(rates) / len(rates) if rates else PRIOR_BYTES_PER_S[Rung.PEER]
        guesses = {False: guess, True: PRIOR_BYTES_PER_S[Rung.OBJECT]}  # by `is_store`
        ahead = Counter[_Node]()  # bytes that earlier readers wait for
        for want in list(self._wants):
            if not (candidates := self._candidates(want)):
                continue
            node = min(
                candidates,
                key=lambda node: (
                    (node.in_flight_bytes + ahead[node] + want.num_bytes)
                    / (node.rate.bytes_per_s or guesses[node.is_store])
                ),
            )
            if not node.has_room(want.num_bytes):
                ahead[node] += want.num_bytes
            else:
                self._assign(node, want.num_bytes)
                self._wants.remove(want)
                want.node = node
                want.assigned.set()

    def _assign(self, node: _Node, num_bytes: int) -> None:
        node.num_in_flight += 1
        node.in_flight_bytes += num_bytes

    def _candidates(self, want: _Want) -> list[_Node]:
        """Return the sources to choose from: those that have the chunk, else the head."""
        return self._usable(want, _holders_of(want)) or self._usable(want, _sources_of(want))

    def _usable(self, want: _Want, names: Sequence[NodeId]) -> list[_Node]:
        nodes = [self._node(name) for name in names if name not in want.refused]
        return [node for node in nodes if node.left_out_until_s < time.monotonic()]


def _holders_of(want: _Want) -> list[NodeId]:
    """Return the nodes that have the chunk, and object storage."""
    holders, store = want.model.holders(want.index, is_host_only=want.is_host_only), want.model.store
    return holders if want.is_host_only or store is None else [*holders, store]


def _sources_of(want: _Want) -> list[NodeId]:
    """Return what has the chunk, and the head, which may fetch it, unless this is the head."""
    has_head = not want.is_host_only and want.model.origin is None
    return [*_holders_of(want), LOCAL] if has_head else _holders_of(want)


def _none_has(what: str, failures: list[StoreError]) -> StoreError:
    tried = "; ".join(dict.fromkeys(str(failure) for failure in failures)) or "no node says that it has it"
    kind = type(failures[-1]) if failures else Unreachable
    return kind(f"no node can send {what}: {tried}")
