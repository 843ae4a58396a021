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
from hearth.models.layout import ByteRange, Layout
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
    """A transfer of weights under way or over. Called by the thread that owns the model."""

    def __init__(
        self,
        lease: Lease,
        manifest: Manifest,
        space: Space,
        layout: Layout,
        mapping: PageMapping,
        loader: Loader,
        post: Callable[[LoadNews], None],
    ) -> None:
        """Start it. `lease` has the model's `missing_chunks`; `layout` is how the model is served.

        `mapping` maps the gaps of the space. `post` is called by other threads.
        """
        self._manifest, self._mapping = manifest, mapping
        self._is_widened = is_widened = layout != manifest.layout
        self._is_cancelled = is_cancelled = threading.Event()
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
        self._transfer = loader.transfer(lease.name, lease, Destination(manifest, pieces, mapping), hooks)
        self._transfer.start(loader.threads)

    def gate(self) -> WeightGate | None:
        """Return what steps wait for; None: none can run before all is there, because it is widened then."""
        if self._is_widened:
            return None
        return _MappedGate(TransferGate(self._transfer, self._manifest), self._mapping, self._manifest)

    def cancel(self) -> None:
        """Cancel the transfer, if it is not over, and wait until no thread touches the memory."""
        self._is_cancelled.set()
        self._transfer.cancel()


def missing_chunks(manifest: Manifest, gaps: Sequence[Gap]) -> list[int]:
    return sorted({index for gap in gaps for index in manifest.chunks_of(gap.part)})


def _widen(manifest: Manifest, layout: Layout, space: Space, is_cancelled: threading.Event) -> float:
    began_s = time.perf_counter()
    tell_widening(manifest)
    begins = {gap.part.begin for gap in space.gaps}
    for stored, served in zip(manifest.tensors, layout.tensors, strict=True):
        if is_cancelled.is_set():
            raise LoadCancelled("the load was cancelled")
        if stored.offset in begins:
            place = space.places[served.name]
            widen_in_place(place.base[place.offset : place.offset + served.nbytes], stored, served)
    return time.perf_counter() - began_s


class _MappedGate:
    """A `WeightGate` that also waits for bytes that are there and have only to be mapped."""

    def __init__(self, gate: TransferGate, mapping: PageMapping, manifest: Manifest) -> None:
        self._gate, self._mapping, self._manifest = gate, mapping, manifest

    def is_open(self) -> bool:
        return self._mapping.is_done and self._gate.is_open()

    def embed(self) -> None:
        self._mapping.wait_for(ByteRange(0, self._manifest.layers[0].begin))
        self._gate.embed()

    def layer(self, layer: int) -> None:
        self._mapping.wait_for(self._manifest.layers[layer])
        self._gate.layer(layer)

    def head(self) -> None:
        self._mapping.wait()
        self._gate.head()


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
