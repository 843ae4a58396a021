"""Lends the chunks of this process's tiers to others, over a Unix socket. Copies nothing to a device."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hearth.errors import ChunkMissing, HearthError, StoreError
from hearth.store.fetch import Fetch, HostChunk
from hearth.store.lending import (
    ChunkLent,
    FetchChunks,
    Hello,
    Message,
    ModelOpened,
    OpenModel,
    ReleaseChunk,
    encode,
    received,
    refusal,
    send,
)
from hearth.store.manifest import Digest
from hearth.store.model import StoredModel
from hearth.store.tiers import Tiers

log = logging.getLogger(__name__)


class Lender:
    """Serves until it is closed; the tiers stay open. The socket's permissions are the owner's alone."""

    def __init__(self, tiers: Tiers, path: Path) -> None:
        self._tiers = tiers
        self._path = path
        #: Opened by anyone so far. A dict's single operations are atomic, so it needs no lock.
        self._models: dict[Digest, StoredModel] = {}
        self._sessions: set[_Session] = set()
        self._lock = threading.Lock()  #: guards the set: sessions end on threads of their own
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with suppress(FileNotFoundError):
            path.unlink()  # of an owner that is gone
        mask = os.umask(0o177)
        try:
            self._listener.bind(str(path))
        finally:
            os.umask(mask)
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept, name="hearth-lend", daemon=True)
        self._thread.start()

    @property
    def num_sessions(self) -> int:
        with self._lock:
            return len(self._sessions)

    def close(self) -> None:
        """Take everything back and tell the borrowers by closing their connections."""
        with suppress(OSError):  # it may be that nobody has connected
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.hang_up()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            session = _Session(self._tiers, self._models, connection)
            with self._lock:
                self._sessions.add(session)
            threading.Thread(target=self._serve, args=(session,), name="hearth-lend", daemon=True).start()

    def _serve(self, session: _Session) -> None:
        try:
            session.run()
        finally:
            with self._lock:
                self._sessions.discard(session)


class _Session:
    """One connection. Its own thread receives; while a load is under way another one sends."""

    def __init__(self, tiers: Tiers, models: dict[Digest, StoredModel], connection: socket.socket) -> None:
        self._tiers, self._models, self._connection = tiers, models, connection
        self._fetch: Fetch | None = None
        #: Sent and not released yet. Guarded by the lock: one thread adds, another takes away.
        self._lent: dict[int, HostChunk] = {}
        self._lock = threading.Lock()
        self._sender: threading.Thread | None = None

    def run(self) -> None:
        segment = self._tiers.segment
        try:
            hello = encode(Hello(segment.num_slots, segment.slot_bytes))
            socket.send_fds(self._connection, [hello], [segment.fd])
            for message in received(self._connection):
                self._handle(message)
        except OSError:
            pass  # the borrower is gone; that is how every session ends
        except StoreError as error:
            log.warning("borrower_dropped reason=%s", error)
        finally:
            self._end()

    def hang_up(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _handle(self, message: Message) -> None:
        match message:
            case OpenModel(where):
                self._open(where)
            case FetchChunks(digest, chunks):
                self._start(digest, chunks)
            case ReleaseChunk(index):
                self._release(index)
            case _:
                raise StoreError(f"a borrower does not say {type(message).__name__}")

    def _open(self, where: str) -> None:
        try:
            model = self._tiers.open(where)
        except HearthError as error:
            send(self._connection, refusal(error))
            return
        self._models[model.manifest.digest] = model
        send(self._connection, ModelOpened(model.name, str(model.directory), model.manifest.digest))

    def _start(self, digest: Digest, chunks: tuple[int, ...]) -> None:
        model = self._models.get(digest)
        if self._fetch is not None:
            raise StoreError("a second load on one connection; open another for it")
        if model is None or not set(chunks) <= set(range(len(model.manifest.chunks))):
            raise StoreError(f"a load of what was not opened, or of chunks it does not have: {digest}")
        fetch = self._fetch = self._tiers.fetch(model, chunks)
        self._sender = threading.Thread(target=self._lend, args=(fetch,), name="hearth-lend", daemon=True)
        self._sender.start()

    def _lend(self, fetch: Fetch) -> None:
        try:
            for chunk in fetch:
                with self._lock:
                    self._lent[chunk.index] = chunk
                send(self._connection, ChunkLent(chunk.index, chunk.slot, len(chunk.data), chunk.delivery))
        except StoreError as error:
            with suppress(OSError):
                send(self._connection, refusal(error))
        except OSError:
            self.hang_up()

    def _release(self, index: int) -> None:
        with self._lock:
            chunk = self._lent.pop(index, None)
        if chunk is None or self._fetch is None:
            raise ChunkMissing(f"a borrower gave back chunk {index}, which it does not have")
        self._fetch.release(chunk)

    def _end(self) -> None:
        """Whatever the borrower still had is taken back, whether it closed or died."""
        if self._fetch is not None:
            self._fetch.cancel()
            self.hang_up()
            if self._sender is not None:
                self._sender.join()
            for chunk in self._remaining():
                self._fetch.release(chunk)
        self._connection.close()

    def _remaining(self) -> Iterator[HostChunk]:
        with self._lock:
            chunks, self._lent = list(self._lent.values()), {}
        yield from chunks
