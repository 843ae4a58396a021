"""How an adapter comes to a worker's device: it is looked up, and its bytes are copied. Places nothing.

Threads do both, beside the steps, and post news. The bytes pass the copy stream, as those of models do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hearth.core.errors import HearthError, ModelError, StoreError
from hearth.core.messages import AdapterOrder
from hearth.core.types import AdapterId
from hearth.memory.pool import PieceRun
from hearth.models.layout import ByteRange
from hearth.store.transfer.destination import LoadPiece
from hearth.store.transfer.lease_client import HostPrefetch, LeaseRequest, OpenedAdapter
from hearth.store.transfer.patient_loan import PatientLease, await_keeper
from hearth.store.transfer.record import LoadRecord
from hearth.store.transfer.short_load import MAX_SHORT_CHUNKS, LastCopies, load_here
from hearth.worker.failure import Failure, failure_of
from hearth.worker.runtime import HostingResources


@dataclass(frozen=True, slots=True)
class AdapterFound:
    """The keeper has the adapter, and what it takes is known."""

    opened: OpenedAdapter


@dataclass(frozen=True, slots=True)
class AdapterMissing:
    """The keeper does not have the adapter where it was looked for."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class AdapterArriving:
    """All bytes of the adapter are on the device but the last: who computes with it waits there for those."""

    last: LastCopies


@dataclass(frozen=True, slots=True)
class AdapterFilled:
    """All bytes of the adapter are on the device."""

    record: LoadRecord
    was_arriving: bool  #: `AdapterArriving` was told before


@dataclass(frozen=True, slots=True)
class AdapterBroken:
    """The bytes of the adapter cannot be had."""

    failure: Failure


AdapterNews = AdapterFound | AdapterMissing | AdapterArriving | AdapterFilled | AdapterBroken
PostAdapterNews = Callable[[AdapterId, AdapterNews], None]


def find_adapter(order: AdapterOrder, resources: HostingResources, post: PostAdapterNews) -> None:
    """Have the keeper look an adapter up, on a thread of its own."""

    def look_up() -> None:
        lease_client = resources.lease_client
        opened = await_keeper(lambda: lease_client.open_adapter(order.where, order.weight), lambda: False)
        if AdapterId(opened.manifest.digest) != order.adapter:
            raise ModelError(
                f"the adapter `{order.name}` was changed since it was deployed (manifest "
                f"{opened.manifest.digest}, deployed {order.adapter}); deploy it again"
            )
        post(order.adapter, AdapterFound(opened))

    _start(look_up, resources, lambda failure: post(order.adapter, AdapterMissing(failure)))


class AdapterPrefetch:
    """An adapter on its way to host memory while it has no room on the device. Nobody waits for it."""

    def __init__(self, opened: OpenedAdapter, resources: HostingResources) -> None:
        self._opened, self._resources = opened, resources
        self._lock = threading.Lock()  #: keeps beginning and cancelling apart; guards the fields below
        self._is_cancelled = False
        self._prefetch: HostPrefetch | None = None
        self.is_over = False  #: written by the thread that waits
        resources.loader.threads.start(self._run)

    def cancel(self) -> None:
        """Ask for no more of it: the adapter is loaded now, or nobody wants it."""
        with self._lock:
            self._is_cancelled = True
            if self._prefetch is not None:
                self._prefetch.cancel()

    def _run(self) -> None:
        try:
            with self._lock:
                if self._is_cancelled:
                    return
                self._prefetch = self._resources.lease_client.prefetch(self._opened)
            self._prefetch.wait()
        except HearthError:
            pass  # whoever needs the adapter meets it again, and says so
        finally:
            self.is_over = True


def ask_for_adapter(opened: OpenedAdapter, resources: HostingResources) -> LeaseRequest | None:
    """Ask the keeper for an adapter that `load_adapter` will load, or close it if the adapter gets no place.

    The keeper answers while the place is looked for. None: it has to be asked when that is there.
    """
    return resources.lease_client.ask(opened, range(len(opened.manifest.chunks)))


def load_adapter(
    order: AdapterOrder,
    opened: OpenedAdapter,
    runs: Sequence[PieceRun],
    prepare: Callable[[], None],
    resources: HostingResources,
    post: PostAdapterNews,
    asked: LeaseRequest | None = None,
) -> None:
    """Have the bytes of an adapter copied to its pieces, once `prepare` has made them ready to be written.

    `asked`: what `ask_for_adapter` has returned.
    """
    manifest, adapter = opened.manifest, order.adapter
    pieces = _load_pieces(manifest.layout.layers, runs)
    is_arriving = False  #: that was told

    def arrive(last: LastCopies) -> None:
        nonlocal is_arriving
        is_arriving = True
        post(adapter, AdapterArriving(last))

    def end(outcome: LoadRecord | StoreError) -> None:
        if isinstance(outcome, StoreError):
            post(adapter, AdapterBroken(failure_of(outcome)))
        else:
            post(adapter, AdapterFilled(outcome, was_arriving=is_arriving))

    unread = asked  #: until it is fetched: then its line is the lease's, and may be another's soon

    def fetch(chunks: Sequence[int]) -> PatientLease:
        nonlocal unread
        taken, unread = unread, None
        return PatientLease(resources.lease_client, opened, chunks, asked=taken)

    def fail(failure: Failure) -> None:
        if unread is not None:
            unread.close()
        post(adapter, AdapterBroken(failure))

    def load() -> None:
        prepare()
        loader = resources.loader
        # Who prepared the pieces waited until the device is done with them.
        if len(manifest.chunks) <= MAX_SHORT_CHUNKS:
            load_here(order.name, manifest, pieces, fetch, loader.new_copies, end, arrive)
        else:
            loader.load(order.name, manifest, pieces, fetch, on_end=end, is_idle=True)

    _start(load, resources, fail)


def _load_pieces(layers: Sequence[tuple[int, ByteRange]], runs: Sequence[PieceRun]) -> list[LoadPiece]:
    """Return what goes where: runs of pieces as one, if their layers follow each other in the file too."""
    pieces: list[LoadPiece] = []
    first = 0
    for run in runs:
        end = first + len(run.sizes)
        whole = ByteRange(layers[first][1].begin, layers[end - 1][1].end)
        if whole.end - whole.begin == sum(run.sizes):
            pieces.append(LoadPiece(whole, run.address, run))
        else:
            addresses = accumulate(run.sizes, initial=run.address)
            pieces += [LoadPiece(part, next(addresses), run) for _, part in layers[first:end]]
        first = end
    assert first == len(layers), f"{first} pieces for {len(layers)} layers"
    return pieces


def _start(
    act: Callable[[], object], resources: HostingResources, on_failure: Callable[[Failure], None]
) -> None:
    """Have `act` run beside the steps; `on_failure` is told what it raises."""

    def run() -> None:
        try:
            act()
        except Exception as error:  # the thread's top: whoever waits for the adapter is told
            on_failure(failure_of(error))

    resources.loader.threads.start(run)
