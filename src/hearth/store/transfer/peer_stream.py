"""One data connection from the store of a node to that of another, and the questions to this node's agent.

    receiver                                   sender (`peer_server.py`)
    (a ticket, and TLS: `data_connection.py`)
    {"file": [DIGEST, NAME]}\n                 header, bytes
    {"chunk": [DIGEST, INDEX]}\n               header, bytes; with `is_host_only` only from host memory;
                                               those with a `turn` one at a time, in that order
    \n, after a `turn`                         the receiver gets no other planned chunk: this one may begin
    {"url": DIGEST}\n                          header, a URL of weights.bin in object storage, from the head
    \n, after a chunk                          the sender may reuse its memory: `sendfile` copies nothing

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
from hearth.core.node_messages import (
    Answer,
    AskSources,
    AskTicket,
    Question,
    QuestionRefused,
    Sources,
    TicketGranted,
)
from hearth.core.types import Digest, NodeId, WorkerId
from hearth.store.transfer.data_connection import set_patience, show_ticket

HEADER = struct.Struct("!iq")
FAILED, WAIT = -1, -2
MAX_LINE_BYTES = 64 << 10
#: Received, hashed and checked for cancellation at a time; hashing begins while the rest arrives.
PIECE_BYTES = 2 << 20
#: A sender that says `WAIT` for longer is of no use.
MAX_WAIT_S = 60.0
#: Each of several streams has a share of the link. A slower one is as good as stalled.
MIN_BYTES_PER_S = 64 << 10
ANSWER_S = 5.0

T = TypeVar("T")

_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


class PeerRequest(msgspec.Struct, omit_defaults=True):
    """A file, a chunk or a URL."""

    file: tuple[Digest, str] | None = None
    chunk: tuple[Digest, int] | None = None
    is_host_only: bool = False
    turn: int | None = None
    url: Digest | None = None


class _PeerFailure(msgspec.Struct, frozen=True):
    error: str


class AgentClient:
    """Asks the agent of this machine, over a connection for each question. Any thread may call it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def sources(self, digest: Digest) -> Sources:
        """Return which other nodes have chunks of a model. Raises Unreachable."""
        return self._ask(AskSources(0, digest), Sources)

    def ticket(self, node: NodeId, worker: WorkerId | None = None) -> TicketGranted:
        """Return a ticket to the store of a node, or to one of its workers. Raises Unreachable."""
        return self._ask(AskTicket(0, node, worker), TicketGranted)

    def _ask(self, question: Question, kind: type[T]) -> T:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                set_patience(connection, ANSWER_S)  # it blocks: else it would fail while the agent is busy
                connection.connect(str(self._path))
                connection.sendall(msgspec.json.encode(question) + b"\n")
                with connection.makefile("rb") as lines:
                    answer = _answers.decode(lines.readline())
        except (OSError, msgspec.MsgspecError) as error:
            raise Unreachable(
                f"the agent at `{self._path}` gave no usable answer: {error}; check that it runs"
            ) from error
        if isinstance(answer, QuestionRefused):
            raise Unreachable(answer.reason)
        assert isinstance(answer, kind), f"{answer=}"
        return answer


@dataclass(frozen=True, slots=True)
class ChunkRead:
    digest: Digest  #: of the bytes that came
    seconds: float  #: from the request to the last byte, with hashing; of planned ones from the first byte
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
    def open(node: NodeId, ticket: TicketGranted, credentials: Path | None, stall_s: float) -> PeerStream:
        began_s = time.perf_counter()
        connection = socket.create_connection((ticket.host, ticket.port), stall_s)
        latency_s = time.perf_counter() - began_s
        return PeerStream(show_ticket(connection, node, ticket, credentials), stall_s, latency_s)

    def read_file(self, digest: Digest, name: str, max_bytes: int) -> bytes:
        return self._read(PeerRequest(file=(digest, name)), f"`{name}`", max_bytes)

    def read_url(self, digest: Digest) -> str:
        return self._read(PeerRequest(url=digest), "a URL", MAX_LINE_BYTES).decode(errors="replace")

    def _read(self, request: PeerRequest, what: str, max_bytes: int) -> bytes:
        self._ask(request)
        num_bytes = self._header(0)
        if num_bytes > max_bytes:
            raise BadCheckpoint(f"{what} is too large, limit: {max_bytes} bytes, given: {num_bytes}")
        content = bytearray(num_bytes)
        self._fill(memoryview(content))
        return bytes(content)

    def read_chunk(
        self,
        digest: Digest,
        index: int,
        buffer: memoryview,
        is_wanted: Callable[[], bool],
        *,
        is_host_only: bool = False,
        turn: int | None = None,
        wait_for_others: Callable[[], None] = lambda: None,
        is_late: Callable[[], bool] = lambda: False,
    ) -> ChunkRead:
        """Fill the buffer.

        `turn`: that of a planned fetch, which is announced to the other node before `wait_for_others` is
        called. `is_late`: asked while that node waits.
        """
        began_s, hash_s, hasher = time.perf_counter(), 0.0, blake3()
        self._ask(PeerRequest(chunk=(digest, index), is_host_only=is_host_only, turn=turn))
        if turn is not None:
            wait_for_others()
            self._socket.sendall(b"\n")
        num_bytes = self._header(index, is_wanted, is_late)
        if turn is not None:
            began_s = time.perf_counter()  # the time before says nothing of the link
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

    def _header(
        self,
        index: int,
        is_wanted: Callable[[], bool] = lambda: True,
        is_late: Callable[[], bool] = lambda: False,
    ) -> int:
        """Return the length of what follows.

        Raises ChunkMissing if the other node cannot send it, LoadCancelled if that is not wanted any more.
        """
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
            if not is_wanted():
                raise LoadCancelled(f"chunk {index} is not needed any more")
            if is_late():
                raise TimeoutError(f"chunk {index} is late: others take far less time")
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
