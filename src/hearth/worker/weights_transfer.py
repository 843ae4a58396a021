"""The transfer of a model's missing weights to its memory, on threads that post news. Computes nothing."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hearth.core.errors import HearthError, LoadCancelled
from hearth.memory.pool import Gap, Space
from hearth.models.layout import Layout
from hearth.models.weights import WeightGate
from hearth.policy.batch.step_sharing import MAX_HOLD_S
from hearth.store.format.manifest import Manifest
from hearth.store.format.widen_dtype import tell_widening, widen_in_place
from hearth.store.transfer.destination import Destination, LoadPiece, PageMapping
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.lease import Lease
from hearth.store.transfer.record import LoadRecord
from hearth.store.transfer.transfer import Loader, Transfer, TransferGate, TransferHooks
from hearth.worker.failure import Failure, failure_of

#: Progress is posted at most this often, and for at least this share of the missing bytes.
PROGRESS_INTERVAL_S = 0.05
PROGRESS_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Progressed:
    num_bytes: int
    num_layers: int  #: that can run


@dataclass(frozen=True, slots=True)
class AlmostLoaded:
    """A step that follows the transfer should block its thread for `MAX_HOLD_S` at most."""


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    record: LoadRecord
    widen_s: float | None  #: time for widening after that; None: served in the stored dtype


@dataclass(frozen=True, slots=True)
class ModelBroken:
    failure: Failure


LoadNews = Progressed | AlmostLoaded | WeightsLoaded | ModelBroken


class WeightsTransfer:
    """The lease, the mapped pages and the copies of a model's missing weights.

    One thread starts it; the thread that owns the model cancels it.
    """

    def __init__(
        self,
        lease: Lease,
        manifest: Manifest,
        space: Space,
        layout: Layout,
        map_pages: Callable[[], PageMapping],
        loader: Loader,
        post: Callable[[LoadNews], None],
    ) -> None:
        """`lease` has the model's `missing_chunks`; `layout` is how the model is served.

        `map_pages` begins to map the parts of the space. `post` is called by other threads.
        """
        self._lease, self._manifest, self._space, self._layout = lease, manifest, space, layout
        self._map_pages, self._loader, self._post = map_pages, loader, post
        self._is_widened = _is_widened(manifest, layout)
        self._is_cancelled = threading.Event()
        self._lock = threading.Lock()  #: keeps starting and cancelling apart; guards the fields below
        self.mapping: PageMapping | None = None  #: None: it is not started, or was cancelled before
        self._transfer: Transfer | None = None

    def start(self) -> None:
        """Start it, unless it was cancelled, once a keeper grants the lease. Raises as `Lease.begin`."""
        self._lease.begin()
        with self._lock:
            if not self._is_cancelled.is_set():
                # Not before the lease has begun: a thread that maps keeps the interpreter from one that asks.
                self.mapping = self._map_pages()
                transfer = self._new_transfer(self.mapping)
                transfer.start(self._loader.threads)
                self._transfer = transfer  # behind the start: a transfer that cannot start never ends

    def _new_transfer(self, mapping: PageMapping) -> Transfer:
        lease, manifest, space, layout = self._lease, self._manifest, self._space, self._layout
        post, is_widened, is_cancelled = self._post, self._is_widened, self._is_cancelled
        progress = _Progress(
            manifest, missing_chunks(manifest, space.gaps), lease, post, is_widened=is_widened
        )

        # Closures and no methods: the transfer must not hold this object, which holds the transfer, or both
        # would keep the memory until the next garbage collection.
        def arriving(_: Transfer) -> None:
            progress.almost_loaded()

        def ended(outcome: LoadRecord | HearthError) -> None:
            try:
                if isinstance(outcome, HearthError):
                    raise outcome
                mapping.wait()
                widen_s = _widen(manifest, layout, space, is_cancelled) if is_widened else None
            except Exception as error:  # the thread's top: the thread that owns the model is told
                post(ModelBroken(failure_of(error)))
                return
            post(WeightsLoaded(outcome, widen_s))

        pieces = [LoadPiece.to(gap.part, gap.destination) for gap in space.gaps]
        hooks = TransferHooks(progress.leased, arriving, progress.released, ended)
        return self._loader.transfer(lease.name, lease, Destination(manifest, pieces, mapping), hooks)

    def gate(self) -> WeightGate | None:
        """Return what steps wait for; None: it is not started, or none can run before all is widened."""
        if self._is_widened or self._transfer is None or self.mapping is None:
            return None
        return TransferGate(self._transfer, self._manifest, self.mapping)

    def cancel(self) -> None:
        """Cancel the transfer, if it is not over, and wait until no thread touches the memory."""
        with self._lock:
            self._is_cancelled.set()
            if self.mapping is not None:
                self.mapping.stop()
            self._lease.cancel()
            if self._transfer is not None:
                self._transfer.cancel()


def missing_chunks(manifest: Manifest, gaps: Sequence[Gap]) -> list[int]:
    return sorted({index for gap in gaps for index in manifest.chunks_of(gap.part)})


def _is_widened(manifest: Manifest, layout: Layout) -> bool:
    dtypes = {spec.name: spec.dtype for spec in manifest.tensors}
    return any(spec.dtype != dtypes[spec.name] for spec in layout.tensors)


def _widen(manifest: Manifest, layout: Layout, space: Space, is_cancelled: threading.Event) -> float:
    began_s = time.perf_counter()
    tell_widening(manifest)
    begins = {gap.part.begin for gap in space.gaps}
    served_by_name = {spec.name: spec for spec in layout.tensors}
    for stored in manifest.tensors:
        if is_cancelled.is_set():
            raise LoadCancelled("the load was cancelled")
        if stored.offset in begins:
            served = served_by_name[stored.name]
            place = space.places[served.name]
            widen_in_place(place.base[place.offset : place.offset + served.nbytes], stored, served)
    return time.perf_counter() - began_s


class _Progress:
    """Posts how far a transfer is. Mutable; of its two threads, one calls `leased`, the other `released`."""

    def __init__(
        self,
        manifest: Manifest,
        chunks: Sequence[int],
        lease: Lease,
        post: Callable[[LoadNews], None],
        *,
        is_widened: bool,
    ) -> None:
        self._manifest, self._lease, self._post, self._is_widened = manifest, lease, post, is_widened
        self._layer_ends = [layer.end for layer in manifest.layers]
        sizes = [manifest.chunks[index].num_bytes for index in chunks]
        self._num_bytes = sum(sizes)
        #: By chunk: how many of the missing bytes come before it.
        self._before = dict(zip(chunks, accumulate(sizes, initial=0), strict=False))
        self._is_almost_loaded = False
        self._posted_bytes = 0
        self._began_s = self._posted_s = time.monotonic()

    def leased(self, chunk: HostChunk) -> None:
        """Foresee the end: what is in host memory comes as fast as the chunks before."""
        if not self._is_almost_loaded and self._lease.is_in_host:
            elapsed_s, done_bytes = time.monotonic() - self._began_s, self._before[chunk.index]
            left_s = elapsed_s * (self._num_bytes - done_bytes) / done_bytes if done_bytes else math.inf
            if left_s <= MAX_HOLD_S:
                self.almost_loaded()

    def almost_loaded(self) -> None:
        if not self._is_almost_loaded and not self._is_widened:
            self._post(AlmostLoaded())
        self._is_almost_loaded = True

    def released(self, chunk: HostChunk) -> None:
        now_s, num_bytes = time.monotonic(), self._before[chunk.index] + len(chunk.data)
        is_due = now_s - self._posted_s >= PROGRESS_INTERVAL_S
        if is_due and num_bytes - self._posted_bytes >= PROGRESS_SHARE * self._num_bytes:
            self._posted_s, self._posted_bytes = now_s, num_bytes
            end = self._manifest.chunk_range(chunk.index).end
            num_layers = 0 if self._is_widened else bisect_right(self._layer_ends, end)
            self._post(Progressed(num_bytes, num_layers))
