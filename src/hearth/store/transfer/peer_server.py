"""Sends this node's chunks to the stores of other nodes. The protocol is in `peer_stream.py`.

The agent admits connections by their tickets and hands them over (`data_connection.py`). A chunk is
leased until the receiver has it. Chunks in host memory are sent at once; others are read behind this node's
own loads. No node fetches from nodes to serve a node. The head also gives out presigned URLs, by which
nodes read object storage without its credentials.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from hearth.core.errors import ChunkMissing, HearthError, LoadCancelled, StoreError
from hearth.core.node_messages import DropPeer
from hearth.core.types import Digest, NodeId
from hearth.store.format.manifest import MANIFEST
from hearth.store.tiers.model import StoredModel
from hearth.store.tiers.remote import RemoteModel
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.data_connection import HandedOver, receive, set_patience
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.peer_model import PeerModel
from hearth.store.transfer.peer_stream import (
    FAILED,
    HEADER,
    MAX_LINE_BYTES,
    MIN_BYTES_PER_S,
    WAIT,
    PeerRequest,
    failure_line,
)
from hearth.store.transfer.send_turns import SendLimit, SendTurns
from hearth.store.transfer.session_server import SessionServer

MAX_CONNECTIONS = 256
#: After this a receiver needs another ticket.
MAX_SESSION_S = 300.0
#: A receiver that takes no bytes for so long is cut off, as is one that is slower than `MIN_BYTES_PER_S`. It
#: is told ten times in this time that its chunk is still being read.
STALL_S = 10.0
IDLE_S = 60.0
#: How long a presigned URL is valid. A load that takes longer asks for another.
SIGNED_S = 600.0
#: Sent at a time. The limit of time for a write holds for all of it with TLS, for each 64 KiB without.
PIECE_BYTES = 1 << 20
MAX_UNSENT_BYTES = 256 << 10  #: of a connection, in the kernel
#: Bulk data (TC_PRIO_BULK): in this machine's queue, tokens, activations and control go first.
_BULK_PRIORITY = 2
#: Of threads that send: eight, the most connections of a receiver, get a tenth of a core that a worker uses.
_NICENESS = 19
_SO_MAX_PACING_RATE, _UNPACED = 47, 0xFFFFFFFF  # the socket module has no names for them
_RESET = struct.pack("ii", 1, 0)

log = logging.getLogger(__name__)


class PeerServer:
    """Serves the connections that it is given until it is closed; the tiers stay open."""

    def __init__(
        self,
        tiers: Tiers,
        path: Path,
        credentials: Path | None = None,
        limit: SendLimit | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        """Take connections at `path`; raises as `SessionServer`.

        `credentials`: the directory of this node's certificate, for connections that are encrypted.
        """
        #: Chunks leased at once. This node's own loads need cells, too.
        slots = threading.BoundedSemaphore(max(1, tiers.segment.num_cells // 4))
        self._session_of = partial(_PeerSession, tiers, slots, SendTurns(), limit, credentials, stall_s)
        self._stall_s = stall_s
        tiers.fetcher.start_far_readers()  # started by a thread that sends, they would be as nice
        self._server = SessionServer[_PeerSession](path, "hearth-peer")
        self._server.start(self._welcome)

    def close(self) -> None:
        """Cut off all receivers and release their chunks. Closing again is harmless."""
        self._server.close()

    def _welcome(self, agent: socket.socket) -> _PeerSession | None:
        with agent:
            agent.settimeout(self._stall_s)
            told = receive(agent)
        match told:
            case DropPeer(node):
                self._drop(node)
                return None
            case None:
                raise ConnectionError("the keeper serves processes of this machine elsewhere")
        if len(self._server.sessions) >= MAX_CONNECTIONS:
            told.connection.close()
            raise OSError(f"{MAX_CONNECTIONS} connections of other nodes are open, which is the limit")
        return self._session_of(told)

    def _drop(self, node: NodeId) -> None:
        for session in self._server.sessions:
            if session.source == node:
                session.hang_up()


class _PeerSession:
    """The connection of a receiver. One thread runs it; another may hang up."""

    def __init__(
        self,
        tiers: Tiers,
        slots: threading.BoundedSemaphore,
        turns: SendTurns,
        limit: SendLimit | None,
        credentials: Path | None,
        stall_s: float,
        given: HandedOver,
    ) -> None:
        self._tiers, self._slots, self._turns, self._limit = tiers, slots, turns, limit
        self._credentials, self._stall_s, self._given = credentials, stall_s, given
        self._is_hung_up = False
        self.source, self._socket = given.source, given.connection
        self._socket.settimeout(None)  # the agent's descriptor does not block
        set_patience(self._socket, stall_s)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _BULK_PRIORITY)
        # Else a whole chunk may wait in the kernel, and the next one would share the link with it.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        self._received = b""
        self._model: StoredModel | None = None

    def run(self) -> None:
        os.nice(_NICENESS)  # of this thread alone
        try:
            self._answer_all()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, StoreError) as error:
            if not self._is_hung_up:
                log.warning("peer_dropped reason=%s", error)

    def hang_up(self) -> None:
        self._is_hung_up = True
        with suppress(OSError):  # not that of SSLSocket, after which its thread would send in clear
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        # What was not received lies in cells that now hold other chunks soon.
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._socket.close()

    def _answer_all(self) -> None:
        """Answer requests until the other side closes, or needs another ticket: it may have been removed."""
        if self._given.is_encrypted:
            self._socket = self._given.encrypt(self._credentials, self._stall_s)
        until_s = time.monotonic() + MAX_SESSION_S
        while True:
            set_patience(self._socket, IDLE_S)
            line = self._read_line()
            set_patience(self._socket, self._stall_s)
            if line is None or time.monotonic() > until_s:
                return
            if not line:  # the receiver was ready for a chunk that has been refused
                continue
            request = msgspec.json.decode(line, type=PeerRequest)
            try:
                self._answer(request)
            except HearthError as error:
                self._socket.sendall(HEADER.pack(0, FAILED) + failure_line(str(error)))

    def _answer(self, request: PeerRequest) -> None:
        if request.file is not None:
            digest, name = request.file
            self._send_file(self._find(digest), name)
        elif request.chunk is not None:
            digest, index = request.chunk
            self._send_chunk(self._find(digest), index, request)
        elif request.url is not None:
            self._send_url(self._find(request.url))
        else:
            raise ChunkMissing("no such request is known; install the same Hearth on both nodes")

    def _find(self, digest: Digest) -> StoredModel:
        if self._model is None or self._model.manifest.digest != digest:
            model = self._tiers.find(digest)
            remote = model.remote.origin if isinstance(model.remote, PeerModel) else model.remote
            self._model = replace(model, remote=remote)
        return self._model

    def _send_file(self, model: StoredModel, name: str) -> None:
        if name not in {MANIFEST, *(file.name for file in model.manifest.files)}:
            raise ChunkMissing(f"`{model.name}` has no file {name!r:.80}")
        try:
            content = (model.directory / name).read_bytes()
        except OSError as error:
            raise ChunkMissing(f"`{name}` of `{model.name}` cannot be read: {error.strerror}") from error
        self._socket.sendall(HEADER.pack(0, len(content)) + content)

    def _send_url(self, model: StoredModel) -> None:
        if not isinstance(model.remote, RemoteModel):
            raise ChunkMissing(f"`{model.name}` was not deployed from object storage")
        url = model.remote.signed_url(SIGNED_S).encode()
        self._socket.sendall(HEADER.pack(0, len(url)) + url)

    def _send_chunk(self, model: StoredModel, index: int, request: PeerRequest) -> None:
        if not 0 <= index < len(model.manifest.chunks):
            raise ChunkMissing(f"`{model.name}` has {len(model.manifest.chunks)} chunks, wanted: {index}")
        if request.is_host_only and not self._tiers.fetcher.resident([model.manifest.chunk_ids[index]]):
            raise ChunkMissing(f"chunk {index} of `{model.name}` is not in host memory")
        if request.turn is None:
            with self._leased(model, index) as chunk:
                self._pace(None)
                self._send_leased(index, chunk)
                self._await_confirmation(index)
            return
        with ExitStack() as stack:
            with self._turns.announced(request.turn):
                self._await_go(index)
                chunk = stack.enter_context(self._leased(model, index))
                self._send_in_turn(index, chunk, request.turn)
            self._await_confirmation(index)

    def _await_go(self, index: int) -> None:
        set_patience(self._socket, MAX_SESSION_S)  # the receiver may get a slow chunk first
        if self._read_line() != b"":
            raise ConnectionError(f"the receiver does not want chunk {index} any more")
        set_patience(self._socket, self._stall_s)

    def _await_confirmation(self, index: int) -> None:
        if self._read_line() != b"":
            raise ConnectionError(f"the receiver did not confirm chunk {index}")

    def _send_in_turn(self, index: int, chunk: HostChunk, turn: int) -> None:
        wait = HEADER.pack(index, WAIT)
        with self._turns.taken(turn, self._stall_s / 10, lambda: self._socket.sendall(wait)):
            self._pace(self._turns.max_bytes_per_s(self.source))
            began_s = time.monotonic()
            self._send_leased(index, chunk)
            self._turns.sent(self.source, len(chunk.data), time.monotonic() - began_s)

    def _pace(self, max_bytes_per_s: int | None) -> None:
        bounds = (max_bytes_per_s, None if self._limit is None else self._limit.bytes_per_s)
        most = min(one for one in (*bounds, _UNPACED) if one is not None)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("I", most))

    def _send_leased(self, index: int, chunk: HostChunk) -> None:
        self._socket.sendall(HEADER.pack(index, len(chunk.data)))
        self._send_bytes(chunk)

    def _send_bytes(self, chunk: HostChunk) -> None:
        """Raises TimeoutError for a receiver that is too slow to be worth the lease."""
        num_bytes, offset = len(chunk.data), self._tiers.segment.offset(chunk.cell)
        max_s = self._stall_s + num_bytes / MIN_BYTES_PER_S
        began_s, begin = time.monotonic(), 0
        while begin < num_bytes:
            if time.monotonic() - began_s > max_s:
                raise TimeoutError(
                    f"a receiver took {begin} of {num_bytes} bytes of chunk {chunk.index} in {max_s:.3g} s, "
                    f"limit: {MIN_BYTES_PER_S} bytes per second"
                )
            end = min(begin + PIECE_BYTES, num_bytes)
            if self._limit is not None:
                time.sleep(self._limit.book(end - begin, time.monotonic()))
            if isinstance(self._socket, ssl.SSLSocket):
                self._socket.sendall(chunk.data[begin:end])
                begin = end
            else:
                begin += os.sendfile(
                    self._socket.fileno(), self._tiers.segment.fd, offset + begin, end - begin
                )

    @contextmanager
    def _leased(self, model: StoredModel, index: int) -> Iterator[HostChunk]:
        """Lease a chunk, and tell the receiver meanwhile that it is being read, or received."""
        wait, sign_s = HEADER.pack(index, WAIT), self._stall_s / 10
        while not self._tiers.fetcher.wait_for_landing(model.manifest.chunk_ids[index], sign_s):
            self._socket.sendall(wait)
        while not self._slots.acquire(timeout=sign_s):
            self._socket.sendall(wait)
        try:
            fetch = self._tiers.fetcher.refill(model, [index])
            try:
                while not fetch.wait(index, sign_s):
                    self._socket.sendall(wait)
                for chunk in fetch:
                    try:
                        yield chunk
                    finally:
                        fetch.release(chunk)
            except LoadCancelled as error:
                raise ChunkMissing(f"this node's store is closing: {error}") from error
            finally:
                fetch.cancel()
        finally:
            self._slots.release()

    def _read_line(self) -> bytes | None:
        """Return a line without its end; None: the receiver has closed the connection, or was idle."""
        while b"\n" not in self._received:
            if len(self._received) > MAX_LINE_BYTES:
                raise ConnectionError(f"a request of more than {MAX_LINE_BYTES} bytes came")
            try:
                part = self._socket.recv(MAX_LINE_BYTES)
            except (BlockingIOError, TimeoutError):
                part = b""
            if not part:
                return None
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line
