"""Borrows chunks from the process that owns this machine's host segment. Reads no disk and copies nothing."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from hearth.core.errors import ChunkCorrupt, KeeperGone, LoadCancelled, ModelNotOpen, StoreError
from hearth.core.types import Digest
from hearth.store.format.adapter_manifest import AdapterManifest, of_adapter
from hearth.store.format.description import read_description
from hearth.store.format.file_stamp import FileStamp, stamp_of
from hearth.store.format.manifest import TOKENIZER, Manifest, StoredManifest, damage_of, of_model
from hearth.store.tiers.segment import Segment
from hearth.store.transfer.fetch import NUM_FIRST_CELLS
from hearth.store.transfer.lease import Grant
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
    encode,
    error_of,
    parse,
    received,
    send,
)
from hearth.store.transfer.lender_line import LeaseConnection
from hearth.store.transfer.staging_buffers import StagingBuffers

MAX_HELLO_BYTES = 4096
#: How many models' descriptions are kept, some 100 KB each.
MAX_MANIFESTS = 256
#: How many questions that were asked ahead are kept encoded: adapters are asked for again and again.
MAX_QUESTIONS = 4096
#: Lines that stand open for the next loads. More of them at once are rare.
MAX_STANDING = 4


#: The kind of description: a model's or an adapter's.
M = TypeVar("M", bound=StoredManifest, covariant=True)


@dataclass(frozen=True, slots=True)
class Opened(Generic[M]):
    """A model or adapter that the keeper has opened, with its manifest."""

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
        """True if all of it was in host memory when it was opened."""
        return self.host_bytes >= self.distinct_bytes

    @property
    def distinct_bytes(self) -> int:
        """Bytes of its chunks, counting equal chunks once."""
        return sum({chunk.id: chunk.num_bytes for chunk in self.manifest.chunks}.values())


OpenedModel: TypeAlias = Opened[Manifest]
OpenedAdapter: TypeAlias = Opened[AdapterManifest]


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A load that the lender was asked for, and whose answer nobody has read: to be fetched, or closed."""

    line: LeaseConnection
    model: Opened[StoredManifest]
    question: LeaseChunks

    def close(self) -> None:
        """Want none of it: the lender takes back what it has lent."""
        self.line.close()


@dataclass(frozen=True, slots=True)
class _Question:
    """A question for chunks, and the line that it is sent as."""

    message: LeaseChunks
    line: bytes

    @staticmethod
    @lru_cache(maxsize=MAX_QUESTIONS)
    def of(digest: Digest, directory: str, chunks: tuple[int, ...], *, pass_through: bool) -> _Question:
        message = LeaseChunks(digest, directory, chunks, pass_through)
        return _Question(message, encode(message))


class LeaseClient:
    """The lender's segment, mapped and, for a CUDA device, pinned. Any thread may ask.

    A lender that died and was started again lends from another segment, which is then mapped as well. What
    asks or loads leaves its line to the next, so that a load has its first chunk after one question.
    """

    def __init__(self, path: Path, *, is_pinned: bool = True, is_device_up: bool = True) -> None:
        """`is_pinned`: what is opened is copied to a CUDA device, if there is any.

        `is_device_up`: it may be pinned at once, for the device that is the current one. Else `device_is_up`
        has to be called, before anything is fetched.

        Raises:
            KeeperGone: nobody lends at `path`.
            StoreError: it is no lender, or one whose memory cannot be pinned and has to be.
        """
        self._path, self._is_pinned, self._is_device_up = path, is_pinned, is_device_up
        connection, segment = _introduce(path, is_pinned=is_pinned)
        connection.close()
        self.segment = self._pinned(segment)
        #: For loads from memory that is not pinned yet; None: they pin it.
        self.staging: StagingBuffers | None = None
        #: Descriptions of models by digest. Single operations of a dict are atomic, so it needs no lock.
        self._manifests: dict[Digest, StoredManifest] = {}
        #: Files beside models that were the stored ones: of which digest, and in which state. As above.
        self._texts: dict[Path, tuple[Digest, FileStamp | None]] = {}
        #: Segments of lenders that are gone, mapped while a lease of theirs may still be copied from.
        self._old: list[Segment] = []
        self._loans: list[Grant] = []  #: loans that are not over, and some that are
        self._standing: list[LeaseConnection] = []  #: lines of loads that are over
        self._is_closed = False
        self._lock = threading.Lock()  #: guards segments, loans and lines: models are opened on many threads

    def device_is_up(
        self,
        staging: StagingBuffers | None = None,
        wait: Callable[[], None] | None = None,
        *,
        pins_first: bool = False,
    ) -> None:
        """Begin to pin, for the device that is current for the calling thread.

        `staging` is for loads from memory that is not pinned yet, and closed with this; None: they pin it.
        Until `wait` returns, which a thread calls, nothing is pinned that no load needs, but for the first
        cells, which are pinned here and now if `pins_first`: a load from disk goes through these alone.
        """
        if staging is not None:
            staging.pin()
        with self._lock:
            self._is_device_up = True
            self.staging = staging
            segment = self.segment
            if wait is not None:
                segment.load_began()  # as it were
                threading.Thread(
                    target=_after, args=(wait, segment.load_ended), name="hearth-pin-later", daemon=True
                ).start()
            self._pinned(segment)
        if pins_first:
            segment.pin_first(NUM_FIRST_CELLS)

    @property
    def is_unstaged(self) -> bool:
        """True if loads have to pin host memory themselves."""
        return self._is_pinned and self._is_device_up and self.staging is None

    def open(self, where: str | Path, weight: float = 1.0) -> OpenedModel:
        """Have the lender open a converted model; its description is read here.

        A relative path is one of this process, whatever the lender's directory is.

        Raises:
            KeeperGone: nobody lends.
            HearthError: there is none, or it cannot be opened.
        """
        found = self._open(where, weight)
        return replace(found, manifest=of_model(found.manifest, found.where))  # type: ignore[return-value]

    def open_adapter(self, where: str | Path, weight: float = 1.0) -> OpenedAdapter:
        """Have the lender open a converted adapter, as `open` does a model."""
        found = self._open(where, weight)
        return replace(found, manifest=of_adapter(found.manifest, found.where))  # type: ignore[return-value]

    def describe(self, directory: Path) -> Manifest:
        """Read a model's description and check its tokenizer, for whoever will open it some day.

        Raises:
            HearthError: there is no such model, or a file of it is damaged.
        """
        manifest = of_model(self._read(directory), str(directory))
        self.text_file(manifest, directory, TOKENIZER)
        return manifest

    def text_file(self, manifest: Manifest, directory: Path, name: str) -> Path | None:
        """Return a file that lies beside a model's weights, if it is the one that was stored; None: none was.

        Read once for each state of the file: one of some MB takes milliseconds, as descriptions do.

        Raises:
            ChunkCorrupt: it is not.
        """
        file = next((file for file in manifest.files if file.name == name), None)
        if file is None:
            return None
        path = directory / name
        checked = (file.digest, stamp_of(path))
        if self._texts.get(path) != checked:
            if damage := damage_of(file, directory):
                raise ChunkCorrupt(f"`{path}` {damage}; convert or fetch the model again")
            self._texts[path] = checked
        return path

    def _open(self, where: str | Path, weight: float) -> Opened[StoredManifest]:
        where = str(where) if "://" in str(where) else str(Path(where).absolute())
        match self._ask(OpenModel(where, weight)):
            case ModelOpened() as opened:
                pass
            case Refused() as refused:
                raise error_of(refused)
            case None:
                raise self._gone()
            case other:
                raise self._nonsense(other)
        manifest = self._description(opened)
        return Opened(opened.name, manifest, opened.directory, where, weight, opened.host_bytes)

    def _description(self, opened: ModelOpened) -> StoredManifest:
        """Return the manifest, read once: that takes milliseconds, which a switch of models does not have."""
        known = self._manifests.get(opened.digest)
        if known is None:
            known = self._read(Path(opened.directory))
            if known.digest != opened.digest:
                raise StoreError(f"`{opened.directory}` was replaced while it was opened; open it again")
        return known

    def _read(self, directory: Path) -> StoredManifest:
        """Read a description, and keep it."""
        found = read_description(directory)
        if len(self._manifests) >= MAX_MANIFESTS:
            self._manifests.clear()
            self._texts.clear()
        self._manifests[found.digest] = found
        return found

    def prefetch(self, model: Opened[StoredManifest]) -> HostPrefetch:
        """Have the lender bring a model into host memory, as far as no load that is waited for is held up."""
        connection, _ = self._connect()
        self._begin(connection, PrefetchModel(model.digest, model.directory))
        return HostPrefetch(connection, model)

    def ask(self, model: Opened[StoredManifest], chunks: Sequence[int]) -> LeaseRequest | None:
        """Ask for a load, to be fetched later, without waiting for the answer; None: only `fetch` can.

        So whoever has something else to do first, such as finding a place for it, does that meanwhile.
        """
        if (line := self._take_standing()) is None:
            return None
        question = _Question.of(
            model.digest, model.directory, tuple(chunks), pass_through=self._may_pass_through()
        )
        try:
            line.send_line(question.line)
        except OSError:  # whoever was at its other end is gone
            line.close()
            return None
        return LeaseRequest(line, model, question.message)

    def fetch(
        self, model: Opened[StoredManifest], chunks: Sequence[int], asked: LeaseRequest | None = None
    ) -> Grant:
        """Begin a load of a model that may have been opened long ago. `asked`: what `ask` has returned.

        Raises:
            KeeperGone: nobody lends.
            StoreError: the lender does not have the model any more, or has another one in its place.
        """
        if asked is not None and asked.model is model and asked.question.chunks == tuple(chunks):
            question = asked.question
        else:
            if asked is not None:
                asked.close()
                asked = None
            question = self._question(model, chunks)
        try:
            return self._fetch(model, question, asked)
        except ModelNotOpen:  # a lender that was started anew, or has forgotten the model
            again = self._open(model.where, model.weight)
        if again.digest != model.digest:
            raise StoreError(f"`{model.name}` is another model by now; open it again")
        return self._fetch(again, replace(question, directory=again.directory))

    def _question(self, model: Opened[StoredManifest], chunks: Sequence[int]) -> LeaseChunks:
        digest, directory = model.digest, model.directory
        return LeaseChunks(digest, directory, tuple(chunks), pass_through=self._may_pass_through())

    def _may_pass_through(self) -> bool:
        """True if only some memory is pinned, and the first cells are."""
        segment = self.segment
        return not segment.is_all_pinned and segment.are_first_pinned(NUM_FIRST_CELLS)

    def _fetch(
        self, model: Opened[StoredManifest], question: LeaseChunks, asked: LeaseRequest | None = None
    ) -> Grant:
        line, answer = self._asked(question, asked)
        match answer:
            case LeaseGranted() as began:
                lease = Grant(line, model.name, len(question.chunks), self._keep, began)
                with self._lock:
                    self._loans.append(lease)
                return lease
            case Refused() as refused:
                line.close()
                raise error_of(refused)
            case other:
                line.close()
                raise self._gone() if other is None else self._nonsense(other)

    def _asked(
        self, question: Message, asked: LeaseRequest | None = None
    ) -> tuple[LeaseConnection, Message | None]:
        """Return a line on which a question was asked, and the answer; None: the lender is gone."""
        if asked is not None:
            try:
                answer = asked.line.read()
            except StoreError:
                asked.close()
                raise
            if answer is not None and self._is_mapped(asked.line.segment):
                return asked.line, answer
            asked.close()  # whoever was at its other end is gone
        while (line := self._take_standing()) is not None:
            with suppress(OSError):
                if (answer := self._answer(line, question)) is not None:
                    return line, answer
            line.close()  # whoever was at its other end is gone
        line = LeaseConnection(*self._connect())
        try:
            return line, self._answer(line, question)
        except OSError as error:
            raise self._gone() from error

    def _answer(self, line: LeaseConnection, question: Message) -> Message | None:
        """Ask on a line, which is closed where that fails."""
        try:
            line.send(question)
            return line.read()
        except (OSError, StoreError):  # the other end is gone, or answers nonsense
            line.close()
            raise

    def _is_mapped(self, segment: Segment) -> bool:
        """True unless a segment was closed, because its lender is gone and nothing was lent of it."""
        with self._lock:
            return segment is self.segment or any(segment is old for old in self._old)

    def _take_standing(self) -> LeaseConnection | None:
        with self._lock:
            return self._standing.pop() if self._standing else None

    def _keep(self, line: LeaseConnection) -> None:
        """Keep the line of a load that is over for the next."""
        with self._lock:
            is_current = line.segment is self.segment and not self._is_closed
            is_kept = is_current and len(self._standing) < MAX_STANDING
            if is_kept:
                self._standing.append(line)
        if not is_kept:
            line.close()

    def _begin(self, connection: socket.socket, message: Message) -> None:
        try:
            send(connection, message)
        except OSError as error:
            connection.close()
            raise self._gone() from error

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        while (line := self._take_standing()) is not None:
            line.close()
        if self.staging is not None:
            self.staging.close()  # first: it may still read from them
        for segment in (*self._old, self.segment):
            segment.close()

    def _connect(self) -> tuple[socket.socket, Segment]:
        """Raises KeeperGone also when this lease_client is closed."""
        connection, segment = _introduce(self._path, is_pinned=self._is_pinned)
        with self._lock:
            if self._is_closed:  # on another thread, meanwhile: nobody would close these
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
        self._loans = [lease for lease in self._loans if not lease.is_finished]
        lent = {id(lease.segment) for lease in self._loans}
        for segment in self._old:
            if id(segment) not in lent:
                segment.close()
        self._old = [segment for segment in self._old if id(segment) in lent]

    def _ask(self, question: Message) -> Message | None:
        """Return the answer to a question; None: the lender is gone. The line stands for the next one."""
        line, answer = self._asked(question)
        if answer is None:
            line.close()
        else:
            self._keep(line)
        return answer

    def _nonsense(self, answer: Message) -> StoreError:
        return StoreError(f"the lender at `{self._path}` answered {answer}")

    def _gone(self) -> KeeperGone:
        return KeeperGone(f"the lender at `{self._path}` is gone; start it again")


class HostPrefetch:
    """A model on its way to host memory. One thread waits, any cancels."""

    def __init__(self, connection: socket.socket, model: Opened[StoredManifest]) -> None:
        self._connection, self._model = connection, model
        self._is_cancelled = False

    def wait(self) -> bool:
        """Return whether all of the model is in host memory, when no more of it is on its way.

        Raises what the lender met, LoadCancelled after `cancel`, StoreError if the lender is gone.
        """
        with self._connection, closing(received(self._connection)) as messages:
            try:
                message = next(messages, None)
            except OSError:
                message = None
        match message:
            case ModelPrefetched(host_bytes):
                return host_bytes >= self._model.distinct_bytes
            case Refused() as refused:
                raise error_of(refused)
        name = self._model.name
        if self._is_cancelled:
            raise LoadCancelled(f"the prefetch of `{name}` was called off")
        raise StoreError(f"whoever was to bring `{name}` into host memory is gone; ask again")

    def cancel(self) -> None:
        """Ask for no more, and wake the thread that waits."""
        self._is_cancelled = True
        with suppress(OSError):  # the lender may be gone, or the answer here
            self._connection.shutdown(socket.SHUT_RDWR)


def _after(wait: Callable[[], None], act: Callable[[], None]) -> None:
    wait()
    act()


def _introduce(path: Path, *, is_pinned: bool) -> tuple[socket.socket, Segment]:
    """Return a connection to the lender, and its segment, mapped. `is_pinned`: the segment will be."""
    with ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            connection.connect(str(path))
            line, fds, _, _ = socket.recv_fds(connection, MAX_HELLO_BYTES, 1)
        except OSError as error:
            raise KeeperGone(f"nobody lends host memory at `{path}`: {error.strerror or error}") from error
        if not line:  # it took the connection, and died before it said anything
            raise KeeperGone(f"nobody lends host memory at `{path}`: it hung up at once")
        for fd in fds:
            undo.callback(os.close, fd)
        hello = parse(line)
        if not isinstance(hello, ServerHello) or len(fds) != 1:
            raise StoreError(f"`{path}` is no socket of a lender: {line[:80]!r}")
        if is_pinned and not hello.keeps_pages:
            # A device would go on reading the pages that it knows, which are no longer those of the segment.
            raise StoreError(
                f"the lender at `{path}` gives pages back to the system, as suits a CPU, so they cannot be "
                "pinned for a CUDA device; start its keeper for `cuda`"
            )
        try:
            segment = Segment(fds[0], hello.num_cells, hello.cell_bytes)
        except (OSError, ValueError) as error:
            raise StoreError(f"the host memory lent at `{path}` cannot be mapped: {error}") from error
        undo.pop_all()
        return connection, segment
