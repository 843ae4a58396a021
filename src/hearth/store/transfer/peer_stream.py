"""One data connection from the store of a node to that of another, and the questions to this node's agent.

    receiver                                   sender (`peer_server.py`)
    HEARTH1 TICKET\n                           its agent checks the ticket and hands the connection over
    (TLS 1.3 with both nodes' certificates, if data is encrypted)
    {"file": [DIGEST, NAME]}\n                 header, bytes
    {"chunks": [DIGEST, [INDEX, ...]]}\n       header, bytes; for each chunk, in this order
    \n, after each chunk                       the sender may reuse its memory: `sendfile` copies nothing

A header is an index and a length. A negative length says that no bytes follow: `FAILED`, that a line of JSON
with the error ends the answer; `WAIT`, that the chunk is still being read and another header follows.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from blake3 import blake3

from hearth.core.errors import BadCheckpoint, ChunkMissing, LoadCancelled, Unreachable
from hearth.core.types import LOCAL, Digest, NodeId

HEADER = struct.Struct("!iq")
FAILED, WAIT = -1, -2
MAGIC = b"HEARTH1 "
MAX_LINE_BYTES = 64 << 10
#: Received, hashed and checked for cancellation at a time; hashing begins while the rest arrives.
PIECE_BYTES = 2 << 20
#: A sender that says `WAIT` for longer is of no use.
MAX_WAIT_S = 60.0
#: Each of several streams has a share of the link. A slower one is as good as stalled.
MIN_BYTES_PER_S = 64 << 10
ANSWER_S = 5.0

T = TypeVar("T")


class PeerRequest(msgspec.Struct, omit_defaults=True):
    """One of them is given."""

    file: tuple[Digest, str] | None = None
    chunks: tuple[Digest, tuple[int, ...]] | None = None


class PeerTicket(msgspec.Struct, frozen=True):
    """Where a node's store is reached, for one connection."""

    host: str
    port: int
    ticket: str
    is_encrypted: bool


class NodeChunks(msgspec.Struct, frozen=True):
    """The chunks of a model that a node has, as hexadecimal masks: bit i, little endian, is chunk i."""

    node: NodeId
    host: str
    disk: str


class _Sources(msgspec.Struct, frozen=True):
    sources: tuple[NodeChunks, ...]


class _PeerFailure(msgspec.Struct, frozen=True):
    error: str


class AgentClient:
    """Asks the agent of this machine, over a connection for each question. Any thread may call it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def sources(self, digest: Digest) -> tuple[NodeChunks, ...]:
        """Return the nodes that have chunks of a model, without this one. Raises Unreachable."""
        return self._ask({"sources": digest}, _Sources).sources

    def ticket(self, node: NodeId) -> PeerTicket:
        """Raises Unreachable."""
        return self._ask({"ticket": node}, PeerTicket)

    def _ask(self, question: dict[str, str], answer: type[T]) -> T:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                set_patience(connection, ANSWER_S)  # it blocks: else it would fail while the agent is busy
                connection.connect(str(self._path))
                connection.sendall(msgspec.json.encode(question) + b"\n")
                with connection.makefile("rb") as lines:
                    line = lines.readline()
            if b'"error"' in line[:16]:
                raise Unreachable(msgspec.json.decode(line, type=_PeerFailure).error)
            return msgspec.json.decode(line, type=answer)
        except (OSError, msgspec.MsgspecError) as error:
            raise Unreachable(
                f"the agent at `{self._path}` gave no usable answer: {error}; check that it runs"
            ) from error


@dataclass(frozen=True, slots=True)
class ChunkRead:
    digest: Digest  #: of the bytes that came
    seconds: float  #: from the request to the last byte, with hashing
    hash_s: float


class PeerStream:
    """A connection to the store of another node. One thread at a time. Failures are OSErrors."""

    def __init__(self, connection: socket.socket, stall_s: float, latency_s: float) -> None:
        self.latency_s = latency_s
        self._socket = connection
        if isinstance(connection, ssl.SSLSocket):
            self._flags = 0
        else:
            # Blocking, so that the kernel fills a whole piece without a return to the interpreter.
            connection.settimeout(None)
            set_patience(connection, stall_s)
            self._flags = socket.MSG_WAITALL

    @staticmethod
    def open(node: NodeId, ticket: PeerTicket, credentials: Path | None, stall_s: float) -> PeerStream:
        began_s = time.perf_counter()
        connection = socket.create_connection((ticket.host, ticket.port), stall_s)
        latency_s = time.perf_counter() - began_s
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(MAGIC + ticket.ticket.encode() + b"\n")
            if ticket.is_encrypted:
                context = tls_context(credentials, ssl.PROTOCOL_TLS_CLIENT)
                connection = context.wrap_socket(connection, server_hostname=certificate_name(node))
            return PeerStream(connection, stall_s, latency_s)
        except BaseException:
            connection.close()
            raise

    def read_file(self, digest: Digest, name: str, max_bytes: int) -> bytes:
        self._ask(PeerRequest(file=(digest, name)))
        num_bytes = self._header(0)
        if num_bytes > max_bytes:
            raise BadCheckpoint(f"`{name}` is too large, limit: {max_bytes} bytes, given: {num_bytes}")
        content = bytearray(num_bytes)
        self._fill(memoryview(content))
        return bytes(content)

    def read_chunk(
        self, digest: Digest, index: int, buffer: memoryview, is_wanted: Callable[[], bool]
    ) -> ChunkRead:
        began_s, hash_s, hasher = time.perf_counter(), 0.0, blake3()
        self._ask(PeerRequest(chunks=(digest, (index,))))
        num_bytes = self._header(index)
        if num_bytes != len(buffer):
            raise ConnectionError(f"chunk {index} has {num_bytes} bytes there, wanted: {len(buffer)}")
        until_s = time.perf_counter() + ANSWER_S + num_bytes / MIN_BYTES_PER_S
        for begin in range(0, num_bytes, PIECE_BYTES):
            piece = buffer[begin : begin + PIECE_BYTES]
            self._fill(piece)
            came_s = time.perf_counter()
            hasher.update(piece)
            hashed_s = time.perf_counter()
            hash_s += hashed_s - came_s
            if hashed_s > until_s:
                raise TimeoutError(f"less than {MIN_BYTES_PER_S} bytes came per second")
            if not is_wanted():
                raise LoadCancelled(f"chunk {index} is not needed any more")
        self._socket.sendall(b"\n")
        return ChunkRead(Digest(hasher.hexdigest()), time.perf_counter() - began_s, hash_s)

    def close(self) -> None:
        self._socket.close()

    def _ask(self, request: PeerRequest) -> None:
        self._socket.sendall(msgspec.json.encode(request) + b"\n")

    def _header(self, index: int) -> int:
        """Return the length of what follows. Raises ChunkMissing if the other node cannot send it."""
        until_s = time.perf_counter() + MAX_WAIT_S
        header = bytearray(HEADER.size)
        while True:
            self._fill(memoryview(header))
            given, num_bytes = HEADER.unpack(header)
            if num_bytes == FAILED:
                raise ChunkMissing(self._error_line())
            if given != index or num_bytes < WAIT:
                raise ConnectionError(f"{index} was asked for, {given} came, with {num_bytes} bytes")
            if num_bytes != WAIT:
                return int(num_bytes)
            if time.perf_counter() > until_s:
                raise TimeoutError(f"its store has not read chunk {index} for {MAX_WAIT_S:g} s")

    def _error_line(self) -> str:
        line = bytearray()
        while not line.endswith(b"\n"):
            if len(line) == MAX_LINE_BYTES:
                raise ConnectionError("an error without an end came")
            if not (part := self._socket.recv(1)):
                raise ConnectionError("it closed in the middle of an error")
            line += part
        try:
            return msgspec.json.decode(line, type=_PeerFailure).error
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"no error came: {error}") from error

    def _fill(self, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            try:
                num_bytes = self._socket.recv_into(piece[done:], 0, self._flags)
            except BlockingIOError as error:
                raise TimeoutError("no byte came") from error
            if num_bytes == 0:
                raise ConnectionResetError("it closed the connection")
            done += num_bytes


def failure_line(reason: str) -> bytes:
    return msgspec.json.encode(_PeerFailure(reason)) + b"\n"


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
    context.load_verify_locations(credentials / "ca.pem")
    context.load_cert_chain(credentials / "node.pem", credentials / "node.key")
    return context


def certificate_name(node: NodeId) -> str:
    """Return the name in a node's certificate, which is the same for all of its lives: `gpu-2`, `gpu-2.1`."""
    name, _, life = node.rpartition(".")
    return f"{'head' if node == LOCAL else name if name and life.isdecimal() else node}.node.hearth"
