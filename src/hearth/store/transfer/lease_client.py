"""A worker's side of the keeper: opens models there, asks for leases, and maps and pins its host segment."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from hearth.core.errors import KeeperGone, LoadCancelled, ModelNotOpen, StoreError, error_of
from hearth.core.types import Digest
from hearth.store.format.adapter_manifest import AdapterManifest, of_adapter
from hearth.store.format.description import Descriptions
from hearth.store.format.manifest import Manifest, StoredManifest, of_model
from hearth.store.tiers.segment import Segment
from hearth.store.transfer.fetch import NUM_FIRST_CELLS
from hearth.store.transfer.lease_connection import Grant, LeaseConnection
from hearth.store.transfer.lease_messages import (
    LeaseChunks,
    LeaseGranted,
    Message,
    ModelOpened,
    ModelPrefetched,
    OpenModel,
    PrefetchModel,
    Refused,
    ServerHello,
    parse,
    received,
    send,
)
from hearth.store.transfer.staging_buffers import StagingBuffers

MAX_HELLO_BYTES = 4096
MAX_IDLE = 4


M = TypeVar("M", bound=StoredManifest, covariant=True)


@dataclass(frozen=True, slots=True)
class Opened(Generic[M]):
    name: str
    manifest: M
    directory: str  #: holds its manifest and the files of its tokenizer
    where: str  #: the path or URL it was opened by
    weight: float
    host_bytes: int  #: bytes of it that were in host memory when it was opened

    @property
    def digest(self) -> Digest:
        return self.manifest.digest

    @property
    def is_in_host(self) -> bool:
        return self.host_bytes >= self.distinct_bytes

    @property
    def distinct_bytes(self) -> int:
        """Bytes of its chunks, counting equal chunks once."""
        return sum({chunk.id: chunk.num_bytes for chunk in self.manifest.chunks}.values())


OpenedModel: TypeAlias = Opened[Manifest]
OpenedAdapter: TypeAlias = Opened[AdapterManifest]


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A lease that was asked for and whose answer is unread. To be passed to `grant`, or closed."""

    connection: LeaseConnection
    model: Opened[StoredManifest]
    question: LeaseChunks

    def close(self) -> None:
        self.connection.close()


class LeaseClient:
    """The keeper's host segment, mapped and, for a CUDA device, pinned. Any thread may call.

    The segment of a keeper that was started again is mapped as well. Connections are reused.
    """

    def __init__(self, path: Path, *, is_pinned: bool = True, is_device_up: bool = True) -> None:
        """`is_pinned`: chunks are copied to a CUDA device, if there is one.

        `is_device_up`: pinning may start now, for the current device. Otherwise `device_is_up` must be
        called before the first lease. Raises KeeperGone, and StoreError if memory cannot be pinned.
        """
        self._path, self._is_pinned, self._is_device_up = path, is_pinned, is_device_up
        connection, segment = _introduce(path, is_pinned=is_pinned)
        connection.close()
        self.segment = self._pinned(segment)
        #: For leases from memory that is not pinned yet; None: they pin it themselves.
        self.staging: StagingBuffers | None = None
        self.descriptions = Descriptions()
        #: Segments of keepers that died, mapped while copies may still read them.
        self._old: list[Segment] = []
        self._grants: list[Grant] = []  #: all that are unfinished, and some that are finished
        self._idle: list[LeaseConnection] = []
        self._is_closed = False
        self._lock = threading.Lock()  #: guards segments, grants and connections: many threads open models

    def device_is_up(
        self,
        staging: StagingBuffers | None = None,
        wait: Callable[[], None] | None = None,
        *,
        pins_first: bool = False,
    ) -> None:
        """Start pinning, for the device that is current for the calling thread.

        `staging` is closed with this client. Until `wait` returns, which a thread calls, only memory that a
        load needs is pinned; and the first cells, before this returns, if `pins_first`: a load from disk
        goes through those alone.
        """
        if staging is not None:
            staging.pin()
        with self._lock:
            self._is_device_up = True
            self.staging = staging
            segment = self.segment
            if wait is not None:
                segment.load_began()  # which holds pinning back
                threading.Thread(
                    target=_after, args=(wait, segment.load_ended), name="hearth-pin-later", daemon=True
                ).start()
            self._pinned(segment)
        if pins_first:
            for cell in range(min(NUM_FIRST_CELLS, segment.num_cells)):
                segment.pin(cell)

    @property
    def is_unstaged(self) -> bool:
        return self._is_pinned and self._is_device_up and self.staging is None

    # Models and adapters.

    def open(self, where: str | Path, weight: float = 1.0) -> OpenedModel:
        """A relative path is relative to this process. Raises KeeperGone and other HearthErrors."""
        opened, where = self._open(where, weight)
        manifest = of_model(self.descriptions.opened(opened.digest, Path(opened.directory)), where)
        return Opened(opened.name, manifest, opened.directory, where, weight, opened.host_bytes)

    def open_adapter(self, where: str | Path, weight: float = 1.0) -> OpenedAdapter:
        """Have the keeper open a converted adapter. Raises as `open`."""
        opened, where = self._open(where, weight)
        manifest = of_adapter(self.descriptions.opened(opened.digest, Path(opened.directory)), where)
        return Opened(opened.name, manifest, opened.directory, where, weight, opened.host_bytes)

    def _open(self, where: str | Path, weight: float) -> tuple[ModelOpened, str]:
        where = str(where) if "://" in str(where) else str(Path(where).absolute())
        connection, answer = self._ask(OpenModel(where, weight))
        if answer is None:
            connection.close()
            raise self._gone()
        self._keep(connection)
        match answer:
            case ModelOpened():
                return answer, where
            case Refused(label, reason):
                raise error_of(label, reason)
            case _:
                raise self._nonsense(answer)

    # Leases.

    def prefetch(self, model: Opened[StoredManifest]) -> HostPrefetch:
        connection, _ = self._connect()
        try:
            send(connection, PrefetchModel(model.digest, model.directory))
        except OSError as error:
            connection.close()
            raise self._gone() from error
        return HostPrefetch(connection, model)

    def request(self, model: Opened[StoredManifest], chunks: Sequence[int]) -> LeaseRequest | None:
        """Ask for a lease without waiting for the answer. None: no connection is idle, so only `grant` can.

        The keeper answers while the caller finds device memory for the chunks.
        """
        if (connection := self._take_idle()) is None:
            return None
        question = self._question(model, chunks)
        try:
            connection.send(question)
        except OSError:  # its keeper is gone
            connection.close()
            return None
        return LeaseRequest(connection, model, question)

    def grant(
        self, model: Opened[StoredManifest], chunks: Sequence[int], request: LeaseRequest | None = None
    ) -> Grant:
        """Wait for the keeper to grant chunks of a model. `request`: what `request` has returned.

        Raises KeeperGone, and StoreError if the keeper has another model in its place, or none.
        """
        if request is not None and (request.model is not model or request.question.chunks != tuple(chunks)):
            request.close()
            request = None
        question = self._question(model, chunks) if request is None else request.question
        try:
            return self._grant(model.name, question, request)
        except ModelNotOpen:  # the keeper was started again, or has forgotten the model
            again, _ = self._open(model.where, model.weight)
        if again.digest != model.digest:
            raise StoreError(f"`{model.name}` is another model by now; open it again")
        return self._grant(model.name, replace(question, directory=again.directory))

    def _grant(self, name: str, question: LeaseChunks, request: LeaseRequest | None = None) -> Grant:
        connection, answer = self._ask(question, request)
        if isinstance(answer, LeaseGranted):
            grant = Grant(connection, name, len(question.chunks), self._keep, answer)
            with self._lock:
                self._grants.append(grant)
            return grant
        connection.close()
        if isinstance(answer, Refused):
            raise error_of(answer.error, answer.reason)
        raise self._gone() if answer is None else self._nonsense(answer)

    def _question(self, model: Opened[StoredManifest], chunks: Sequence[int]) -> LeaseChunks:
        """Chunks may pass through if the first cells are pinned and others are not."""
        segment = self.segment
        first_cells = range(min(NUM_FIRST_CELLS, segment.num_cells))
        may_pass_through = not segment.is_all_pinned and all(map(segment.is_pinned, first_cells))
        return LeaseChunks(model.digest, model.directory, tuple(chunks), may_pass_through)

    # Connections.

    def _ask(
        self, question: Message, request: LeaseRequest | None = None
    ) -> tuple[LeaseConnection, Message | None]:
        """Return the answer, None if the keeper is gone, and the connection that it came over."""
        if request is not None:
            try:
                answer = request.connection.read()
            except StoreError:
                request.close()
                raise
            if answer is not None and self._is_mapped(request.connection.segment):
                return request.connection, answer
            request.close()  # its keeper is gone
        while (connection := self._take_idle()) is not None:
            with suppress(OSError):
                if (answer := _answer(connection, question)) is not None:
                    return connection, answer
            connection.close()  # its keeper is gone
        connection = LeaseConnection(*self._connect())
        try:
            return connection, _answer(connection, question)
        except OSError as error:
            raise self._gone() from error

    def _is_mapped(self, segment: Segment) -> bool:
        """True unless the segment was closed because its keeper is gone and no chunk of it was leased."""
        with self._lock:
            return segment is self.segment or any(segment is old for old in self._old)

    def _take_idle(self) -> LeaseConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _keep(self, connection: LeaseConnection) -> None:
        with self._lock:
            is_current = connection.segment is self.segment and not self._is_closed
            is_kept = is_current and len(self._idle) < MAX_IDLE
            if is_kept:
                self._idle.append(connection)
        if not is_kept:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            unfinished = [grant for grant in self._grants if not grant.is_finished]
        for grant in unfinished:
            grant.connection.close()
        while (connection := self._take_idle()) is not None:
            connection.close()
        if self.staging is not None:
            self.staging.close()  # first: it may still read from the segments
        for segment in (*self._old, self.segment):
            segment.close()

    def _connect(self) -> tuple[socket.socket, Segment]:
        """Raises KeeperGone also when this client is closed."""
        connection, segment = _introduce(self._path, is_pinned=self._is_pinned)
        with self._lock:
            if self._is_closed:  # by another thread, which does not know these two
                connection.close()
                segment.close()
                raise self._gone()
            if os.path.sameopenfile(segment.fd, self.segment.fd):
                segment.close()
            else:
                self._old.append(self.segment)
                self.segment = self._pinned(segment)
            self._close_old()
            return connection, self.segment

    def _pinned(self, segment: Segment) -> Segment:
        if self._is_pinned and self._is_device_up:
            segment.pin_in_background()
        return segment

    def _close_old(self) -> None:
        self._grants = [grant for grant in self._grants if not grant.is_finished]
        leased = {id(grant.segment) for grant in self._grants}
        for segment in self._old:
            if id(segment) not in leased:
                segment.close()
        self._old = [segment for segment in self._old if id(segment) in leased]

    def _nonsense(self, answer: Message) -> StoreError:
        return StoreError(f"the keeper at `{self._path}` sent an unexpected answer: {answer}")

    def _gone(self) -> KeeperGone:
        return KeeperGone(f"the keeper at `{self._path}` is gone; start it again")


class HostPrefetch:
    """A model on its way to host memory. One thread waits, any cancels."""

    def __init__(self, connection: socket.socket, model: Opened[StoredManifest]) -> None:
        self._connection, self._model = connection, model
        self._is_cancelled = False

    def wait(self) -> bool:
        """Return whether all of the model is in host memory. Raises LoadCancelled, or what the keeper met."""
        with self._connection, closing(received(self._connection)) as messages:
            try:
                message = next(messages, None)
            except OSError:
                message = None
        match message:
            case ModelPrefetched(host_bytes):
                return host_bytes >= self._model.distinct_bytes
            case Refused(label, reason):
                raise error_of(label, reason)
        if self._is_cancelled:
            raise LoadCancelled(f"the prefetch of `{self._model.name}` was cancelled")
        raise StoreError(f"the keeper that prefetched `{self._model.name}` is gone; ask again")

    def cancel(self) -> None:
        self._is_cancelled = True
        with suppress(OSError):  # the keeper may be gone, or has answered
            self._connection.shutdown(socket.SHUT_RDWR)


def _after(wait: Callable[[], None], act: Callable[[], None]) -> None:
    wait()
    act()


def _answer(connection: LeaseConnection, question: Message) -> Message | None:
    """Return the answer to a question; None: the keeper is gone. Closes the connection if it raises."""
    try:
        connection.send(question)
        return connection.read()
    except (OSError, StoreError):
        connection.close()
        raise


def _introduce(path: Path, *, is_pinned: bool) -> tuple[socket.socket, Segment]:
    with ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            connection.connect(str(path))
            line, fds, _, _ = socket.recv_fds(connection, MAX_HELLO_BYTES, 1)
        except OSError as error:
            raise KeeperGone(f"no keeper listens at `{path}`: {error.strerror or error}") from error
        if not line:  # it accepted, and died before its hello
            raise KeeperGone(f"no keeper listens at `{path}`: it closed the connection at once")
        for fd in fds:
            undo.callback(os.close, fd)
        hello = parse(line)
        if not isinstance(hello, ServerHello) or len(fds) != 1:
            raise StoreError(f"`{path}` is not the socket of a keeper: {line[:80]!r}")
        if is_pinned and not hello.keeps_pages:
            # A device would go on reading the pages that it knows, which are no longer the segment's.
            raise StoreError(
                f"the keeper at `{path}` returns pages to the system, as suits a CPU, so they cannot be "
                "pinned for a CUDA device; start the keeper for `cuda`"
            )
        try:
            segment = Segment(fds[0], hello.num_cells, hello.cell_bytes)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"the host segment of the keeper at `{path}` cannot be mapped: {error}"
            ) from error
        undo.pop_all()
        return connection, segment
