"""Stores of several nodes on one machine, with agents that hand out addresses and tickets. Measures nothing.

The agents here speak the protocols of real ones towards their keepers: JSON lines on the agent's socket, and
descriptors of admitted connections. They know what all nodes hold, as the head does.
"""

from __future__ import annotations

import secrets
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hearth.core.node_messages import (
    DATA_MAGIC,
    Answer,
    AskSources,
    AskTicket,
    HeldChunks,
    PlannedFetch,
    Question,
    QuestionRefused,
    Source,
    Sources,
    TicketGranted,
)
from hearth.core.types import Digest, NodeId, server_name
from hearth.store.transfer.data_connection import hand_over

#: What a node holds of a model.
Held = Callable[[Digest], Iterable[HeldChunks]]


@dataclass
class Cluster:
    """Nodes under a folder. Mutable; tests change what is in it while agents answer."""

    folder: Path
    is_encrypted: bool = False
    nodes: dict[NodeId, Node] = field(default_factory=dict)
    #: What nodes are said to hold, instead of what they do.
    said: dict[NodeId, Held] = field(default_factory=dict)
    #: From where nodes are to fetch.
    plans: dict[NodeId, tuple[PlannedFetch, ...]] = field(default_factory=dict)
    num_tickets: int = 0

    def __post_init__(self) -> None:
        self._tickets: dict[bytes, NodeId] = {}
        self._authority = _Authority()

    def add(self, name: str, listener: socket.socket | None = None) -> Node:
        """Make a node without a store: `Node.held` says what it has, `Node.take` gets its connections."""
        listener = socket.create_server(("127.0.0.1", 0)) if listener is None else listener
        node = Node(self, NodeId(name), self.folder / name, listener)
        self._authority.certify(node.folder, node.name)
        self.nodes[node.name] = node
        return node

    def sources(self, asker: NodeId, digest: Digest) -> Sources:
        found = []
        for name, node in list(self.nodes.items()):
            if name == asker:
                continue
            for held in self.said.get(name, node.held)(digest):
                if any(held.host) or any(held.disk):
                    found.append(Source(name, held))
        return Sources(0, tuple(found), self.plans.get(asker, ()))

    def ticket(self, name: NodeId, source: NodeId) -> TicketGranted | QuestionRefused:
        node = self.nodes.get(name)
        if node is None:
            return QuestionRefused(0, f"no node {name} is in the cluster")
        ticket = secrets.token_bytes(16)
        self._tickets[ticket] = source
        self.num_tickets += 1
        return TicketGranted(0, node.host, node.port, ticket, self.is_encrypted)

    def admit(self, ticket: bytes) -> NodeId | None:
        return self._tickets.pop(ticket, None)

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()


class Node:
    """The agent of one node: its port, and the socket for its keeper's questions."""

    def __init__(self, cluster: Cluster, name: NodeId, folder: Path, listener: socket.socket) -> None:
        folder.mkdir(parents=True)
        self.cluster, self.name, self.folder = cluster, name, folder
        self.agent_socket, self.peers_socket = folder / "agent.sock", folder / "peers.sock"
        self.held: Held = lambda _: ()
        self.take: Callable[[socket.socket], None] | None = None  #: None: they are the store's
        self._listener = listener
        self.host, self.port = listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()
        self._agent = _AgentServer(self)
        threading.Thread(target=self._agent.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._agent.shutdown()
        self._agent.server_close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        with closing(connection), suppress(OSError):
            line = connection.recv(len(DATA_MAGIC) + 33, socket.MSG_WAITALL)
            source = self.cluster.admit(bytes.fromhex(line.removeprefix(DATA_MAGIC).decode()))
            if source is None:
                return
            if self.take is not None:
                self.take(connection)
            else:
                hand_over(self.peers_socket, connection, source, is_encrypted=self.cluster.is_encrypted)


class _AgentServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, node: Node) -> None:
        self.node = node
        super().__init__(str(node.agent_socket), _Questions)


class _Questions(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _AgentServer)
        node = self.server.node
        for line in self.rfile:
            answer: Answer
            match msgspec.json.decode(line, type=Question):
                case AskSources(_, digest):
                    answer = node.cluster.sources(node.name, digest)
                case AskTicket(_, name):
                    answer = node.cluster.ticket(name, node.name)
            self.wfile.write(msgspec.json.encode(answer) + b"\n")


class _Authority:
    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self._certificate = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def certify(self, folder: Path, node: NodeId) -> None:
        """Write ca.pem, node.pem and node.key."""
        key, dns_name = ec.generate_private_key(ec.SECP256R1()), server_name(node)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, dns_name.partition(".")[0])])
        certificate = (
            self._builder(name, key)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name)]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        (folder / "ca.pem").write_bytes(self._certificate.public_bytes(pem))
        (folder / "node.pem").write_bytes(certificate.public_bytes(pem))
        plain = serialization.NoEncryption()
        (folder / "node.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
        )
