"""How a data connection between two nodes begins. Knows nothing of what it carries.

    connecting process             agent of the target               process that the connection is for
    HEARTH1 TICKET\\n               checks the ticket (`node/tickets.py`)
                                   hands the connection over  --->   receives its descriptor on a Unix socket
    (TLS 1.3 with both nodes' certificates, if data is encrypted)

On that Unix socket the first byte tells what follows:

    P NODE    with the descriptor of an admitted connection of NODE
    T NODE    likewise, and TLS begins
    D NODE    end all connections of NODE
    L         what follows is of a process of this machine, which keeps the connection
"""

from __future__ import annotations

import socket
import ssl
import struct
from dataclasses import dataclass
from pathlib import Path

from hearth.core.node_messages import DATA_MAGIC, DropPeer, TicketGranted
from hearth.core.types import NodeId, server_name

HAND_OVER_S = 1.0
_PLAIN, _ENCRYPTED, _DROP, _LOCAL = b"P", b"T", b"D", b"L"
_MAX_NODE_BYTES = 256


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A connection that the agent has admitted."""

    connection: socket.socket
    source: NodeId  #: that the ticket was issued to
    is_encrypted: bool

    def encrypt(self, credentials: Path | None, patience_s: float) -> ssl.SSLSocket:
        """Begin TLS; the certificate has to be that of `source`. Raises OSError, with the connection closed.

        `credentials`: the directory of this node's certificate. `patience_s`: for each step of the handshake.
        """
        connection = self.connection
        try:
            context = tls_context(credentials, ssl.PROTOCOL_TLS_SERVER)
            connection.settimeout(patience_s)
            connection = encrypted = context.wrap_socket(connection, server_side=True)
            names = (encrypted.getpeercert() or {}).get("subjectAltName", ())
            if ("DNS", server_name(self.source)) not in names:
                raise ConnectionError(f"the ticket is that of {self.source}, the certificate is not: {names}")
            return encrypted
        except BaseException:
            connection.close()
            raise


def show_ticket(
    connection: socket.socket, node: NodeId, ticket: TicketGranted, credentials: Path | None
) -> socket.socket:
    """Begin a connection to the port of `node`; return it, encrypted if the ticket says so.

    Raises OSError, with the connection closed. The other side may still refuse it: it closes it then.
    """
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(DATA_MAGIC + ticket.ticket.hex().encode() + b"\n")
        if not ticket.is_encrypted:
            return connection
        context = tls_context(credentials, ssl.PROTOCOL_TLS_CLIENT)
        return context.wrap_socket(connection, server_hostname=server_name(node))
    except BaseException:
        connection.close()
        raise


def hand_over(path: Path, connection: socket.socket, source: NodeId, *, is_encrypted: bool) -> None:
    """Give an admitted connection, read up to the end of its ticket, to the process that listens at `path`.

    `source`: the node that the ticket was issued to. The caller closes its own copy. Raises OSError.
    """
    kind = _ENCRYPTED if is_encrypted else _PLAIN
    _tell(path, kind + source.encode(), [connection.fileno()])


def drop_peer(path: Path, node: NodeId) -> None:
    """Have the process that listens at `path` end all connections of a node. Raises OSError."""
    _tell(path, _DROP + node.encode(), [])


def _tell(path: Path, message: bytes, descriptors: list[int]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        set_patience(listener, HAND_OVER_S)
        listener.connect(str(path))
        socket.send_fds(listener, [message], descriptors)


def call(path: Path, patience_s: float) -> socket.socket:
    """Connect to the process of this machine that listens at `path`. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(patience_s)
        connection.connect(str(path))
        connection.sendall(_LOCAL)
        return connection
    except BaseException:
        connection.close()
        raise


def receive(caller: socket.socket) -> HandedOver | DropPeer | None:
    """Read what a caller of the Unix socket tells. Raises OSError and ValueError.

    None: the caller keeps the connection. Of what it sends next, descriptors included, nothing is read.
    """
    kind, descriptors, _, _ = socket.recv_fds(caller, 1, 1, socket.MSG_CMSG_CLOEXEC)
    connections = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    try:
        if kind == _LOCAL:
            return None
        with caller.makefile("rb") as rest:
            node = NodeId(rest.read(_MAX_NODE_BYTES).decode())
        if kind == _DROP:
            return DropPeer(node)
        if kind not in (_PLAIN, _ENCRYPTED) or not connections:
            raise ValueError(f"no connection was handed over: {kind!r}")
        return HandedOver(connections.pop(), node, is_encrypted=kind == _ENCRYPTED)
    finally:
        for connection in connections:
            connection.close()


def set_patience(connection: socket.socket, seconds: float) -> None:
    """Have blocking calls fail that make no progress for so long; a call that makes some returns early."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(seconds)
        return
    duration = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, duration)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, duration)


def tls_context(credentials: Path | None, side: ssl._SSLMethod) -> ssl.SSLContext:
    """Load this node's certificate, anew for each connection: it may have been renewed. Raises OSError."""
    if credentials is None:
        raise OSError("data is encrypted, and this node has no certificate; join the cluster again")
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if side is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no session is resumed, and closing with them unread would reset
    context.load_verify_locations(credentials / "ca.pem")
    context.load_cert_chain(credentials / "node.pem", credentials / "node.key")
    return context
