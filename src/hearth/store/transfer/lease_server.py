"""Leases chunks of the keeper's tiers to workers, over a Unix socket. Copies nothing to a device."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hearth.core.errors import ChunkMissing, HearthError, LoadCancelled, ModelNotOpen, StoreError
from hearth.core.types import Digest
from hearth.store.tiers.model import StoredModel
from hearth.store.tiers.tiers import Tiers
from hearth.store.tiers.upstream import version_now
from hearth.store.transfer.fetch import Fetch, HostChunk
from hearth.store.transfer.lease_messages import (
    AskReport,
    CancelLease,
    ChunkLeased,
    CountRequests,
    Done,
    ForgetModel,
    KeeperReport,
    KnownModels,
    LeaseChunks,
    LeaseGranted,
    LookUpstream,
    Message,
    ModelOpened,
    ModelPrefetched,
    OpenModel,
    PrefetchModel,
    ReleaseChunks,
    ServerHello,
    UpstreamSeen,
    encode,
    received,
    refusal,
    send,
)
from hearth.store.transfer.record import Delivery, totals_by_rung
from hearth.store.transfer.session_server import SessionServer
from hearth.system.standing_threads import StandingThreads, ThreadTask

#: Models that any worker has opened, by digest and directory: copies of a model share a digest. The single
#: operations of a dict are atomic, so it needs no lock.
OpenedModels = dict[tuple[Digest, str], StoredModel]

log = logging.getLogger(__name__)


class LeaseServer:
    """Serves a socket until it is closed; the tiers stay open."""

    def __init__(self, tiers: Tiers, path: Path) -> None:
        """Listen at `path`. Raises as `SessionServer`."""
        models: OpenedModels = {}
        self._senders = StandingThreads("hearth-lease")
        self._server = SessionServer[_Session](path, "hearth-lease")
        if tiers.keeps_chunks:
            tiers.segment.touch_in_background()  # which workers then pin
        self._server.start(lambda connection: _Session(tiers, models, self._senders, connection))

    @property
    def num_sessions(self) -> int:
        return len(self._server.sessions)

    def close(self) -> None:
        """Close all connections and take all chunks back. Closing again is harmless."""
        self._server.close()


class _Session:
    """One worker's connection. Its own thread receives; while a lease is under way another one sends."""

    def __init__(
        self, tiers: Tiers, models: OpenedModels, senders: StandingThreads, connection: socket.socket
    ) -> None:
        self._tiers, self._models, self._senders, self._connection = tiers, models, senders, connection
        self._sending = threading.Lock()  #: one thread sends answers, the other chunks
        self._fetch: Fetch | None = None
        #: Chunks that were sent and not released. Guarded by the lock: one thread adds, another removes.
        self._leased: dict[int, HostChunk] = {}
        self._lock = threading.Lock()
        self._sender: ThreadTask | None = None

    def run(self) -> None:
        segment = self._tiers.segment
        try:
            hello = encode(ServerHello(segment.num_cells, segment.cell_bytes, self._tiers.keeps_chunks))
            socket.send_fds(self._connection, [hello], [segment.fd])
            for message in received(self._connection):
                self._handle(message)
        except OSError:
            pass  # the worker is gone; every session ends so
        except StoreError as error:
            log.warning("lease_client_dropped reason=%s", error)

    def hang_up(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _handle(self, message: Message) -> None:
        match message:
            case OpenModel(where, weight):
                self._send(self._answer(where, lambda: self._open(where, weight)))
            case LeaseChunks(digest, directory, chunks, pass_through):
                if (model := self._model_to_load(digest, directory)) is not None:
                    self._start(model, chunks, pass_through=pass_through)
            case PrefetchModel(digest, directory):
                if (model := self._model_to_load(digest, directory)) is not None:
                    self._start_prefetch(model)
            case ReleaseChunks(indices):
                self._release(indices)
            case CancelLease():
                if self._fetch is not None:
                    self._fetch.cancel()
            case CountRequests(num_by_model):
                self._count_requests(num_by_model)
                self._send(Done())
            case ForgetModel(where):
                self._send(self._answer(where, lambda: self._forget(where)))
            case LookUpstream(source):
                self._send(self._answer(source, lambda: UpstreamSeen(version_now(source))))
            case KnownModels(where_by_digest):
                self._tiers.set_known_models(where_by_digest)
                self._send(Done())
            case AskReport():
                self._send(self._report())
            case _:
                raise StoreError(f"a worker does not send {type(message).__name__}")

    def _send(self, *messages: Message) -> None:
        with self._sending:
            send(self._connection, *messages)

    def _answer(self, where: str, act: Callable[[], Message]) -> Message:
        try:
            return act()
        except HearthError as error:
            return refusal(error)
        except (OSError, ValueError) as error:  # such as a path that no file can have
            return refusal(StoreError(f"{where!r:.200} cannot be opened: {error}"))

    def _open(self, where: str, weight: float) -> ModelOpened:
        model = self._tiers.open(where, weight)
        self._models[_key(model)] = model
        host_bytes = self._tiers.host_bytes(model)
        return ModelOpened(model.name, str(model.directory), model.manifest.digest, host_bytes)

    def _report(self) -> KeeperReport:
        tiers, peers = self._tiers, self._tiers.peers
        return KeeperReport(
            used_bytes=tiers.used_host_bytes,
            capacity_bytes=tiers.segment.num_bytes,
            models=tuple(tiers.held()),
            links=() if peers is None else peers.links(),
            num_not_kept=tiers.disk.counters.num_not_kept,
        )

    def _count_requests(self, num_by_model: Mapping[Digest, int]) -> None:
        for model, num_requests in num_by_model.items():
            if num_requests < 1:
                raise StoreError(
                    f"a count of requests must be at least 1; given: {num_requests} for model {model}"
                )
            self._tiers.prices.requests_came(model, num_requests)

    def _forget(self, where: str) -> Done:
        """Forget a model that is no longer deployed; a load of it keeps what it needs."""
        directory = self._tiers.forget(where)
        for key in list(self._models):
            if key[1] == str(directory):
                self._models.pop(key, None)
        return Done()

    def _model_to_load(self, digest: Digest, directory: str) -> StoredModel | None:
        self._end_load()
        model = self._models.get((digest, directory))
        if model is None:
            self._send(refusal(ModelNotOpen(f"no model {digest} is open here; open it again")))
        return model

    def _end_load(self) -> None:
        if self._fetch is None:
            return
        if not self._fetch.is_finished:
            raise StoreError("a second lease on one connection; open another for it")
        if self._sender is not None:
            self._sender.join()
        self._fetch = self._sender = None

    def _start(self, model: StoredModel, chunks: tuple[int, ...], *, pass_through: bool) -> None:
        num_chunks = len(model.manifest.chunks)
        if len(set(chunks)) < len(chunks) or not set(chunks) <= set(range(num_chunks)):
            what = f"chunks of `{model.name}` must be distinct, and below {num_chunks}"
            self._send(refusal(StoreError(f"{what}; given: {chunks!s:.200}")))
            return
        if (cells := self._tiers.fetcher.lease(model, chunks)) is not None:
            self._grant_at_once(model, chunks, cells)
            return
        chunk_ids = model.manifest.chunk_ids
        wanted = {chunk_ids[index] for index in chunks}
        is_in_host = len(self._tiers.fetcher.resident(wanted)) == len(wanted)
        if not is_in_host:
            self._send(LeaseGranted(is_in_host))  # before the first chunk is read
            self._follow_plan(model)
            self._run(self._send_chunks, self._tiers.fetch(model, chunks, pass_through=pass_through))
            return
        fetch = self._tiers.fetch(model, chunks)
        try:
            self._send(LeaseGranted(is_in_host))
        except OSError:  # the worker is gone, and the session does not own the chunks yet
            fetch.cancel()
            raise
        self._run(self._send_chunks, fetch)

    def _grant_at_once(self, model: StoredModel, chunks: Sequence[int], cells: Sequence[int]) -> None:
        """Grant chunks that are leased, on this thread: waking another takes as long as copying an adapter.

        What only their release needs, which comes to this thread as well, is made behind the answer.
        """
        stored, fetcher = model.manifest.chunks, self._tiers.fetcher
        leased = [
            ChunkLeased(index, cell, stored[index].num_bytes, delivery=None, is_shared=False)
            for index, cell in zip(chunks, cells, strict=True)
        ]
        try:
            self._send(LeaseGranted(True, tuple(leased)))
        finally:  # also if the worker is gone: the end of the session takes them back
            self._fetch = fetcher.leased(model, chunks, cells)
            self._note_leased(self._fetch.taken)

    def _start_prefetch(self, model: StoredModel) -> None:
        fetch = self._tiers.prefetch(model)
        if fetch is None:
            self._send(self._prefetched(model))
        else:
            self._run(self._prefetch, fetch)

    def _run(self, act: Callable[[Fetch], None], fetch: Fetch) -> None:
        try:
            self._fetch, self._sender = fetch, self._senders.start(lambda: act(fetch))
        except RuntimeError as error:
            fetch.cancel()
            self._send(refusal(StoreError(f"the keeper cannot start a thread for this load: {error}")))

    def _send_chunks(self, fetch: Fetch) -> None:
        deliveries: list[Delivery] = []
        try:
            for chunks in fetch.batches():
                self._note_leased(chunks)
                deliveries += [chunk.delivery for chunk in chunks if chunk.delivery is not None]
                self._send(*map(_message, chunks))
        except StoreError as error:
            with suppress(OSError):
                self._send(refusal(error))
        except OSError:
            fetch.cancel()  # the worker listens no more; it may still release chunks
        else:
            self._learn_speeds(deliveries)

    def _note_leased(self, chunks: Sequence[HostChunk]) -> None:
        with self._lock:
            self._leased.update((chunk.index, chunk) for chunk in chunks)

    def _prefetch(self, fetch: Fetch) -> None:
        """Release each chunk as soon as it is there: it stays in host memory by its price."""
        deliveries: list[Delivery] = []
        answer: Message
        try:
            for chunk in fetch:
                if chunk.delivery is not None:
                    deliveries.append(chunk.delivery)
                fetch.release(chunk)
        except StoreError as error:
            answer = refusal(error)
        else:
            self._learn_speeds(deliveries)
            answer = self._prefetched(fetch.model)
        with suppress(OSError):  # the worker may listen no more
            self._send(answer)

    def _prefetched(self, model: StoredModel) -> ModelPrefetched:
        return ModelPrefetched(self._tiers.host_bytes(model))

    def _learn_speeds(self, deliveries: Sequence[Delivery]) -> None:
        for rung, use in totals_by_rung(deliveries).items():
            self._tiers.prices.moved(rung, use.num_bytes, use.seconds)

    def _release(self, indices: Sequence[int]) -> None:
        with self._lock:
            chunks = [self._leased.pop(index, None) for index in indices]
        if (fetch := self._fetch) is not None:
            fetch.release(*(chunk for chunk in chunks if chunk is not None))
            if fetch.passed_through and fetch.is_finished:
                self._refill(fetch)
        if None in chunks:
            raise ChunkMissing(
                f"a worker released chunk {indices[chunks.index(None)]}, which it does not have"
            )

    def _refill(self, load: Fetch) -> None:
        passed_through, load.passed_through = load.passed_through, []
        if not self._is_open(load.model):
            return
        if (fetch := self._tiers.refill(load.model, passed_through)) is None:
            return
        try:
            self._senders.start(lambda: self._let_stay(fetch))
        except RuntimeError as error:
            fetch.cancel()
            log.warning("not_refilled model=%s reason=%s", load.model.name, error)

    def _follow_plan(self, model: StoredModel) -> None:
        """Have the chunks come in the order of the head's plan, if there is one, not in that of the load."""
        if (fetch := self._tiers.fetch_planned(model)) is None:
            return
        log.info("plan_followed model=%s chunks=%d", model.name, len(fetch.todo))
        try:
            self._senders.start(lambda: self._follow(fetch))
        except RuntimeError as error:
            fetch.cancel()
            self._tiers.end_plan(model)
            log.warning("plan_not_followed model=%s reason=%s", model.name, error)

    def _follow(self, fetch: Fetch) -> None:
        """Keep chunks as they come, while the plan says from where. The load then fetches the rest itself."""
        began_s = time.monotonic()
        try:
            for chunk in fetch:
                fetch.release(chunk)
                if not self._is_open(fetch.model) or not self._tiers.has_plan(fetch.model):
                    fetch.cancel()
        except StoreError as error:
            log.warning("plan_given_up model=%s reason=%s", fetch.model.name, error)
        finally:
            self._tiers.end_plan(fetch.model)
        log.info("plan_ended model=%s seconds=%.3f", fetch.model.name, time.monotonic() - began_s)

    def _let_stay(self, fetch: Fetch) -> None:
        try:
            for chunk in fetch:
                fetch.release(chunk)
                if not self._is_open(fetch.model):
                    fetch.cancel()
        except LoadCancelled:  # the tiers are closed, or the model is forgotten
            pass
        except StoreError as error:  # the next load of the model meets it
            log.warning("not_refilled model=%s reason=%s", fetch.model.name, error)

    def _is_open(self, model: StoredModel) -> bool:
        return _key(model) in self._models

    def close(self) -> None:
        """Take back all unreleased chunks, whether the worker closed or died."""
        if self._fetch is not None:
            self._fetch.cancel()
            self.hang_up()
            if self._sender is not None:
                self._sender.join()
            self._fetch.release(*self._leased.values())  # no other thread knows them any more
        self._connection.close()


def _key(model: StoredModel) -> tuple[Digest, str]:
    return model.manifest.digest, str(model.directory)


def _message(chunk: HostChunk) -> ChunkLeased:
    return ChunkLeased(chunk.index, chunk.cell, len(chunk.data), chunk.delivery, chunk.is_shared)
