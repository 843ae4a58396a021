"""Looks adapters up and transfers them to a worker's device, on threads that post news. Places nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hearth.core.errors import HearthError, ModelError
from hearth.core.messages import AdapterOrder
from hearth.core.types import AdapterId
from hearth.memory.pool import PieceRun
from hearth.models.layout import ByteRange
from hearth.store.transfer.destination import Destination, LoadPiece
from hearth.store.transfer.lease import Lease, await_keeper
from hearth.store.transfer.lease_client import OpenedAdapter
from hearth.store.transfer.record import LoadRecord
from hearth.store.transfer.transfer import MAX_RUN_CHUNKS, Transfer, TransferHooks
from hearth.worker.failure import Failure, failure_of, start_thread
from hearth.worker.runtime import HostingResources


@dataclass(frozen=True, slots=True)
class AdapterFound:
    opened: OpenedAdapter


@dataclass(frozen=True, slots=True)
class AdapterMissing:
    failure: Failure


@dataclass(frozen=True, slots=True)
class AdapterArriving:
    """All bytes of the adapter are on the device but the last, for which a stream can wait."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class AdapterFilled:
    record: LoadRecord
    was_arriving: bool  #: `AdapterArriving` was posted before


@dataclass(frozen=True, slots=True)
class AdapterBroken:
    failure: Failure


AdapterNews = AdapterFound | AdapterMissing | AdapterArriving | AdapterFilled | AdapterBroken
PostAdapterNews = Callable[[AdapterId, AdapterNews], None]


def find_adapter(order: AdapterOrder, resources: HostingResources, post: PostAdapterNews) -> None:
    def look_up() -> None:
        lease_client = resources.lease_client
        opened = await_keeper(lambda: lease_client.open_adapter(order.where, order.weight), lambda: False)
        if AdapterId(opened.manifest.digest) != order.adapter:
            raise ModelError(
                f"the adapter `{order.name}` was changed since it was deployed (manifest "
                f"{opened.manifest.digest}, deployed {order.adapter}); deploy it again"
            )
        post(order.adapter, AdapterFound(opened))

    start_thread(
        resources.loader.threads, look_up, lambda failure: post(order.adapter, AdapterMissing(failure))
    )


def adapter_lease(opened: OpenedAdapter, resources: HostingResources) -> Lease:
    return Lease(resources.lease_client, opened, range(len(opened.manifest.chunks)))


def load_adapter(
    order: AdapterOrder,
    opened: OpenedAdapter,
    lease: Lease,
    runs: Sequence[PieceRun],
    prepare: Callable[[], None],
    resources: HostingResources,
    post: PostAdapterNews,
) -> None:
    """Transfer an adapter to its pieces, once `prepare` has mapped them and the device is done with them."""
    adapter = order.adapter
    is_arriving = False  #: that was posted

    def arriving(transfer: Transfer) -> None:
        nonlocal is_arriving
        is_arriving = True
        post(adapter, AdapterArriving(transfer))

    def ended(outcome: LoadRecord | HearthError) -> None:
        if isinstance(outcome, HearthError):
            post(adapter, AdapterBroken(failure_of(outcome)))
        else:
            post(adapter, AdapterFilled(outcome, was_arriving=is_arriving))

    def load() -> None:
        prepare()
        loader = resources.loader
        destination = Destination(opened.manifest, _load_pieces(opened.manifest.layout.layers, runs))
        is_short = len(destination.chunks) <= MAX_RUN_CHUNKS
        # Behind the last copies of a long transfer, steps would wait too long on the device.
        hooks = TransferHooks(arriving=arriving, ended=ended) if is_short else TransferHooks(ended=ended)
        transfer = loader.transfer(order.name, lease, destination, hooks)
        lease.begin()
        if is_short:
            transfer.run()
        else:
            transfer.start(loader.threads)

    def fail(failure: Failure) -> None:
        lease.cancel()
        post(adapter, AdapterBroken(failure))

    start_thread(resources.loader.threads, load, fail)


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
