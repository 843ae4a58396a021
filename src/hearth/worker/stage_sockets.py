"""Connections between workers, for the stages of a pipeline. Knows nothing of what they carry.

Each worker listens on a Unix socket of its own (`stage_socket`). A worker of the same machine connects to it
directly, and may send descriptors then. The connection of a worker on another machine comes to the port of
the agent with a ticket and is handed over (`store/transfer/data_connection.py`). The listener confirms both
with a byte, when it has checked them.

The agent also tells a worker which nodes were lost or removed: what came from them is closed here. What was
opened to them ends with the pipeline, of which the head orders the end when a member is lost.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary

from hearth.core.errors import ServiceError, Unreachable
from hearth.core.node_messages import DropPeer
from hearth.core.types import NodeId, WorkerId, node_of, stage_socket
from hearth.store.transfer.data_connection import call, receive, show_ticket
from hearth.store.transfer.peer_stream import AgentClient
from hearth.store.transfer.session_server import Session, SessionServer

#: Time for each step until a connection is confirmed.
CONNECT_S = 10.0
#: The class of low-latency data (RFC 4594) for switches, and the highest priority that needs no privilege for
#: this machine's own queue: activations go before weights.
_LOW_LATENCY, _PRIORITY = 0x48, 6
_CONFIRMED = b"\n"

log = logging.getLogger(__name__)


def connect_to_worker(
    worker: WorkerId, own: WorkerId, stages_path: Path, agent_socket: Path | None, credentials: Path | None
) -> socket.socket:
    """Return a connection that the worker has confirmed; its calls block. Raises ServiceError.

    `own` is the worker that connects. Others as in `WorkerSetup`. No two threads may use an encrypted
    connection at once, not even to send and to receive: OpenSSL forbids it.
    """
    node = node_of(worker)
    remedy = f"check that other nodes reach the port of `{node}` (`cluster.listen`, `cluster.address`)"
    try:
        if node == node_of(own):
            remedy = "the log says why it takes none"
            connection = call(stage_socket(stages_path, worker), CONNECT_S)
        else:
            connection = _connect_to_node(worker, agent_socket, credentials)
        try:
            if connection.recv(1) != _CONFIRMED:
                raise ConnectionError("it was closed unconfirmed; the log of that node says why")
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
    except (OSError, Unreachable) as error:
        raise ServiceError(
            f"worker `{own}` cannot connect to worker `{worker}`: {error}; if that worker is up, {remedy}"
        ) from error
    return connection


def _connect_to_node(worker: WorkerId, agent_socket: Path | None, credentials: Path | None) -> socket.socket:
    if agent_socket is None:
        raise Unreachable("this node is in no cluster")
    node = node_of(worker)
    ticket = AgentClient(agent_socket).ticket(node, worker)
    connection = socket.create_connection((ticket.host, ticket.port), CONNECT_S)
    _prefer(connection)
    return show_ticket(connection, node, ticket, credentials)


class StageListener:
    """Takes connections of other workers until it is closed."""

    def __init__(
        self,
        stages_path: Path,
        own: WorkerId,
        credentials: Path | None,
        taken: Callable[[socket.socket, NodeId | None], None],
    ) -> None:
        """Listen for the worker `own`, in the place of a process that is gone. Raises StoreError.

        `taken` gets each connection, which it then owns, and the node that it comes from, None for this
        machine; several threads call it. Others as in `WorkerSetup`.
        """
        self._credentials, self._taken = credentials, taken
        self._lock = threading.Lock()  #: guards these three: threads end handshakes in any order
        self._sources: WeakKeyDictionary[socket.socket, NodeId] = WeakKeyDictionary()  #: of other machines
        self._dropped: set[NodeId] = set()  #: lost or removed; ids of nodes are never used again
        self._is_closing = False
        self._server = SessionServer[Session](stage_socket(stages_path, own), "hearth-stages")
        self._server.start(self._check)

    def close(self) -> None:
        """Take no more connections, also none that is being checked. Closing again is harmless."""
        with self._lock:
            self._is_closing = True
        self._server.close()

    def _check(self, caller: socket.socket) -> None:
        threading.Thread(target=self._serve, args=(caller,), name="hearth-stage-caller", daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        try:
            caller.settimeout(CONNECT_S)
            told = receive(caller)
            if told is None:
                self._take(caller, None)
                return
            caller.close()
            if isinstance(told, DropPeer):
                self._drop(told.node)
                return
            connection = told.connection
            _prefer(connection)
            connection.settimeout(CONNECT_S)
            self._take(told.encrypt(self._credentials, CONNECT_S), told.source)
        except (OSError, ValueError) as error:
            caller.close()
            log.warning("stage_refused path=%s reason=%s", self._server.path, error)

    def _take(self, connection: socket.socket, source: NodeId | None) -> None:
        """`source` None: this machine."""
        with self._lock:
            is_refused = self._is_closing or source in self._dropped
            if source is not None and not is_refused:
                self._sources[connection] = source
        try:
            if is_refused:
                raise ConnectionError("the worker ends" if self._is_closing else f"{source} was lost")
            connection.sendall(_CONFIRMED)
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        self._taken(connection, source)

    def _drop(self, node: NodeId) -> None:
        with self._lock:
            self._dropped.add(node)
            dropped = [connection for connection, source in self._sources.items() if source == node]
        for connection in dropped:
            with suppress(OSError):  # not that of SSLSocket, after which its owner would send in clear
                socket.socket.shutdown(connection, socket.SHUT_RDWR)


def give_way(connection: socket.socket) -> None:
    """Let what is sent here wait for activations."""
    _classify(connection, 0, 0)


def _prefer(connection: socket.socket) -> None:
    _classify(connection, _LOW_LATENCY, _PRIORITY)


def _classify(connection: socket.socket, traffic_class: int, priority: int) -> None:
    for level, option, value in (
        (socket.IPPROTO_IP, socket.IP_TOS, traffic_class),
        (socket.IPPROTO_IPV6, socket.IPV6_TCLASS, traffic_class),
        (socket.SOL_SOCKET, socket.SO_PRIORITY, priority),  # last: the others change it
    ):
        with suppress(OSError):  # of the other version of IP, or not permitted
            connection.setsockopt(level, option, value)
