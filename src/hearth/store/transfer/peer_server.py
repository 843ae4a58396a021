"""Sends this node's chunks to the stores of other nodes. The protocol is in `peer_stream.py`.

The agent admits connections by their tickets and hands them over by a Unix socket (`hand_over`). A chunk is
leased until the receiver has it. Chunks in host memory are sent at once; others are read behind this node's
own loads. What a node receives from others it sends on from host memory and disk alone.
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
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from hearth.core.errors import ChunkMissing, HearthError, LoadCancelled, StoreError
from hearth.core.types import Digest, Rung
from hearth.store.format.manifest import MANIFEST
from hearth.store.tiers.model import StoredModel
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.keeper_socket import KeeperSocket
from hearth.store.transfer.peer_stream import (
    FAILED,
    HEADER,
    MAX_LINE_BYTES,
    WAIT,
    PeerRequest,
    failure_line,
    set_patience,
    tls_context,
)

MAX_CONNECTIONS = 256
#: After this a receiver needs another ticket.
MAX_SESSION_S = 300.0
#: A receiver that takes no bytes for so long is cut off. It is told ten times in this time that its chunk is
#: still being read.
STALL_S = 10.0
IDLE_S = 60.0
HAND_OVER_S = 1.0
#: A write of TLS has one limit of time, so it must not be long.
PIECE_BYTES = 1 << 20
_PLAIN, _ENCRYPTED = b"P", b"T"
_RESET = struct.pack("ii", 1, 0)

log = logging.getLogger(__name__)


def hand_over(path: Path, connection: socket.socket, *, is_encrypted: bool) -> None:
    """Give an admitted connection, read up to the end of its ticket, to the keeper that listens at `path`.

    The caller closes its own copy. Raises OSError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as keeper:
        set_patience(keeper, HAND_OVER_S)
        keeper.connect(str(path))
        socket.send_fds(keeper, [_ENCRYPTED if is_encrypted else _PLAIN], [connection.fileno()])


class PeerServer:
    """Serves the connections that it is given until it is closed; the tiers stay open."""

    def __init__(
        self, tiers: Tiers, path: Path, credentials: Path | None = None, stall_s: float = STALL_S
    ) -> None:
        """Take connections at `path`; raises as `KeeperSocket`.

        `credentials`: the directory of this node's certificate, for connections that are encrypted.
        """
        self._tiers, self._credentials, self._stall_s = tiers, credentials, stall_s
        #: Chunks leased at once. This node's own loads need cells, too.
        self._slots = threading.BoundedSemaphore(max(1, tiers.segment.num_cells // 4))
        self._sessions: dict[_Receiver, threading.Thread] = {}
        self._lock = threading.Lock()  #: guards the sessions, which end on their own
        self._is_closing = False
        self._listener = KeeperSocket(path)
        self._thread = threading.Thread(target=self._accept, name="hearth-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut off all receivers and release their chunks. Closing again is harmless."""
        if self._is_closing:
            return
        self._is_closing = True
        self._listener.stop()
        self._thread.join()
        self._listener.close()
        with self._lock:
            sessions = dict(self._sessions)
        for session in sessions:
            session.hang_up()
        for thread in sessions.values():
            thread.join()

    def _accept(self) -> None:
        while not self._is_closing:
            try:
                with self._listener.accept() as agent:
                    agent.settimeout(self._stall_s)
                    kind, fds, _, _ = socket.recv_fds(agent, 1, 1)
                for fd in fds:
                    self._start(socket.socket(fileno=fd), is_encrypted=kind == _ENCRYPTED)
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                if not self._is_closing:
                    log.error("peer_not_accepted path=%s reason=%s", self._listener.path, error)

    def _start(self, connection: socket.socket, *, is_encrypted: bool) -> None:
        credentials = self._credentials if is_encrypted else None
        session = _Receiver(self._tiers, self._slots, connection, self._stall_s)
        thread = threading.Thread(
            target=self._run, args=(session, is_encrypted, credentials), name="hearth-peer", daemon=True
        )
        with self._lock:
            is_full = len(self._sessions) >= MAX_CONNECTIONS
            if not is_full:
                self._sessions[session] = thread
        if is_full:
            connection.close()
            raise OSError(f"{MAX_CONNECTIONS} connections of other nodes are open, which is the limit")
        try:
            thread.start()
        except RuntimeError:
            self._forget(session)
            connection.close()
            raise

    def _run(self, session: _Receiver, is_encrypted: bool, credentials: Path | None) -> None:
        try:
            if is_encrypted:
                session.encrypt(tls_context(credentials, ssl.PROTOCOL_TLS_SERVER))
            session.run()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, StoreError) as error:
            if not self._is_closing:
                log.warning("peer_dropped reason=%s", error)
        finally:
            session.end()
            self._forget(session)

    def _forget(self, session: _Receiver) -> None:
        with self._lock:
            del self._sessions[session]


class _Receiver:
    """The connection of a receiver. One thread runs it; another may hang up."""

    def __init__(
        self, tiers: Tiers, slots: threading.BoundedSemaphore, connection: socket.socket, stall_s: float
    ) -> None:
        self._tiers, self._slots, self._socket, self._stall_s = tiers, slots, connection, stall_s
        connection.settimeout(None)  # the agent's descriptor does not block
        set_patience(connection, stall_s)
        self._received = b""
        self._model: StoredModel | None = None

    def encrypt(self, context: ssl.SSLContext) -> None:
        self._socket.settimeout(self._stall_s)
        self._socket = context.wrap_socket(self._socket, server_side=True)

    def run(self) -> None:
        """Answer requests until the other side closes, or needs another ticket: it may have been removed."""
        until_s = time.monotonic() + MAX_SESSION_S
        while True:
            set_patience(self._socket, IDLE_S)
            line = self._read_line()
            set_patience(self._socket, self._stall_s)
            if line is None or time.monotonic() > until_s:
                return
            request = msgspec.json.decode(line, type=PeerRequest)
            try:
                self._answer(request)
            except HearthError as error:
                self._socket.sendall(HEADER.pack(0, FAILED) + failure_line(str(error)))

    def hang_up(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        # What was not received lies in cells that now hold other chunks soon.
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._socket.close()

    def _answer(self, request: PeerRequest) -> None:
        if request.file is not None:
            digest, name = request.file
            self._send_file(self._find(digest), name)
        elif request.chunks is not None:
            digest, indices = request.chunks
            model = self._find(digest)
            for index in indices:
                self._send_chunk(model, index)

    def _find(self, digest: Digest) -> StoredModel:
        if self._model is None or self._model.manifest.digest != digest:
            model = self._tiers.find(digest)
            is_from_peers = model.remote is not None and model.remote.rung is Rung.PEER
            self._model = replace(model, remote=None) if is_from_peers else model
        return self._model

    def _send_file(self, model: StoredModel, name: str) -> None:
        if name not in {MANIFEST, *(file.name for file in model.manifest.files)}:
            raise ChunkMissing(f"`{model.name}` has no file {name!r:.80}")
        try:
            content = (model.directory / name).read_bytes()
        except OSError as error:
            raise ChunkMissing(f"`{name}` of `{model.name}` cannot be read: {error.strerror}") from error
        self._socket.sendall(HEADER.pack(0, len(content)) + content)

    def _send_chunk(self, model: StoredModel, index: int) -> None:
        if not 0 <= index < len(model.manifest.chunks):
            raise ChunkMissing(f"`{model.name}` has {len(model.manifest.chunks)} chunks, wanted: {index}")
        with self._leased(model, index) as chunk:
            self._socket.sendall(HEADER.pack(index, len(chunk.data)))
            if isinstance(self._socket, ssl.SSLSocket):
                for begin in range(0, len(chunk.data), PIECE_BYTES):
                    self._socket.sendall(chunk.data[begin : begin + PIECE_BYTES])
            else:
                self._send_pages(self._tiers.segment.offset(chunk.cell), len(chunk.data))
            if self._read_line() != b"":
                raise ConnectionError(f"the receiver did not confirm chunk {index}")

    def _send_pages(self, offset: int, num_bytes: int) -> None:
        end = offset + num_bytes
        while offset < end:
            offset += os.sendfile(self._socket.fileno(), self._tiers.segment.fd, offset, end - offset)

    @contextmanager
    def _leased(self, model: StoredModel, index: int) -> Iterator[HostChunk]:
        """Lease a chunk, and tell the receiver meanwhile that it is being read."""
        wait, sign_s = HEADER.pack(index, WAIT), self._stall_s / 10
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
