"""How a model's bytes come to its memory: a load that is transfer, and the news of it. Computes nothing.

Nobody is called back: news are posted, and the thread that owns the model takes them when it comes to it.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

from hearth.core.errors import LoadCancelled, StoreError
from hearth.memory.pool import Gap
from hearth.models.layout import ByteRange, Layout
from hearth.models.weights import TensorPlace, WeightGate
from hearth.policy.batch.step_sharing import MAX_HOLD_S
from hearth.store.format.manifest import Manifest
from hearth.store.format.widen_dtype import tell_widening, widen_in_place
from hearth.store.transfer.destination import LoadPiece
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.lease import Grant
from hearth.store.transfer.lease_client import OpenedModel
from hearth.store.transfer.patient_loan import PatientLease
from hearth.store.transfer.record import LoadRecord
from hearth.store.transfer.transfer import Loader, Transfer, TransferGate, chunks_of
from hearth.worker.failure import Failure, failure_of
from hearth.worker.map_ahead import PageMapping

#: Progress is told at most this often, and for at least this share of the model.
PROGRESS_INTERVAL_S = 0.05
PROGRESS_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Progressed:
    """Some of the missing bytes have come."""

    num_bytes: int  #: of those that were missing
    num_layers: int  #: that can run


@dataclass(frozen=True, slots=True)
class AlmostLoaded:
    """A step that follows the load should hold up its thread for `MAX_HOLD_S` at most."""


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """All of the missing bytes have come."""

    record: LoadRecord
    widen_s: float | None  #: after it; None: it is served as it is stored


@dataclass(frozen=True, slots=True)
class ModelBroken:
    """The model cannot be hosted."""

    failure: Failure


LoadNews = Progressed | AlmostLoaded | WeightsLoaded | ModelBroken


@dataclass(frozen=True, slots=True)
class Destination:
    """Memory that the bytes which a model lacks go to."""

    gaps: Sequence[Gap]
    mapping: PageMapping  #: to be waited for before any of them is written
    places: Mapping[str, TensorPlace]  #: of its tensors, laid out so in the end
    layout: Layout


class WeightsTransfer:
    """A load under way or done. Called by the thread that owns the model; `post` is called by others."""

    def __init__(
        self,
        model: OpenedModel,
        lease: Grant | PatientLease,
        to: Destination,
        loader: Loader,
        post: Callable[[LoadNews], None],
    ) -> None:
        """Start to load. `lease` has the model's `missing_chunks`."""
        manifest = model.manifest
        self._manifest, self._to = manifest, to
        self._is_widened = is_widened = to.layout != manifest.layout
        self._is_cancelled = is_cancelled = threading.Event()
        pieces = [LoadPiece.to(gap.part, gap.destination) for gap in to.gaps]
        watch = _Watch(manifest, missing_chunks(manifest, to.gaps))

        def tell(news: Progressed | AlmostLoaded) -> None:
            # No method: the load would hold this object, and this object the load, and both the memory.
            if not is_widened:
                post(news)
            elif isinstance(news, Progressed):
                post(Progressed(news.num_bytes, num_layers=0))

        def end(outcome: LoadRecord | StoreError) -> None:
            try:
                if isinstance(outcome, StoreError):
                    raise outcome
                to.mapping.wait()
                widen_s = _widen(manifest, to, is_cancelled) if is_widened else None
            except Exception as error:  # the thread's top: whoever owns the model is told
                post(ModelBroken(failure_of(error)))
                return
            post(WeightsLoaded(outcome, widen_s))

        self._load: Transfer = loader.load(
            model.name,
            manifest,
            pieces,
            lambda chunks: _Watched(lease, watch, to.mapping, tell),
            on_end=end,
            is_idle=True,  # whoever makes the places ready waits until the device is done with them
        )

    def gate(self) -> WeightGate | None:
        """Return what the device has to wait for; None if nothing runs before all is there."""
        if self._is_widened:
            return None
        return _MappedGate(TransferGate(self._load, self._manifest), self._to.mapping, self._manifest)

    def cancel(self) -> None:
        """Call the load off, if it is not over, and wait until nobody touches the memory any more."""
        self._is_cancelled.set()
        self._load.cancel()


def missing_chunks(manifest: Manifest, gaps: Sequence[Gap]) -> list[int]:
    """Return the chunks that fill the gaps, in forward order."""
    return chunks_of(manifest, (gap.part for gap in gaps))


def _widen(manifest: Manifest, to: Destination, is_cancelled: threading.Event) -> float:
    """Have what was loaded lie as it is computed; returns how many seconds that took."""
    began_s = time.perf_counter()
    tell_widening(manifest)
    begins = {gap.part.begin for gap in to.gaps}
    for stored, served in zip(manifest.tensors, to.layout.tensors, strict=True):
        if is_cancelled.is_set():
            raise LoadCancelled("the load was called off")
        if stored.offset in begins:
            place = to.places[served.name]
            widen_in_place(place.base[place.offset : place.offset + served.nbytes], stored, served)
    return time.perf_counter() - began_s


class _MappedGate:
    """A `WeightGate` that also waits for bytes that need not come, but have to be mapped."""

    def __init__(self, load: TransferGate, mapping: PageMapping, manifest: Manifest) -> None:
        self._load, self._mapping, self._manifest = load, mapping, manifest

    def is_open(self) -> bool:
        return self._mapping.is_done and self._load.is_open()

    def embed(self) -> None:
        self._mapping.wait_for(ByteRange(0, self._manifest.layers[0].begin))
        self._load.embed()

    def layer(self, layer: int) -> None:
        self._mapping.wait_for(self._manifest.layers[layer])
        self._load.layer(layer)

    def head(self) -> None:
        self._mapping.wait()
        self._load.head()


class _Watch:
    """Which chunks have to come, and in which order. Not changed once it is made."""

    def __init__(self, manifest: Manifest, chunks: Sequence[int]) -> None:
        self.manifest = manifest
        self.layer_ends = [layer.end for layer in manifest.layers]
        sizes = [manifest.chunks[index].num_bytes for index in chunks]
        self.num_bytes = sum(sizes)
        #: By chunk: how many of the missing bytes come before it.
        self.before = dict(zip(chunks, accumulate(sizes, initial=0), strict=False))

    def rest_s(self, chunk: HostChunk, elapsed_s: float) -> float:
        """Return how long the chunks from this one on should take, at the speed of those before."""
        done_bytes = self.before[chunk.index]
        return elapsed_s * (self.num_bytes - done_bytes) / done_bytes if done_bytes else math.inf


class _Watched:
    """A `ChunkSource` whose chunks have places that can be written, and which tells how far it has come."""

    def __init__(
        self,
        stream: Grant | PatientLease,
        watch: _Watch,
        mapping: PageMapping,
        tell: Callable[[Progressed | AlmostLoaded], None],
    ) -> None:
        self._stream, self._watch, self._mapping, self._tell = stream, watch, mapping, tell
        self._told_bytes = 0
        self._began_s = self._told_s = time.monotonic()

    @property
    def release_batch(self) -> int:
        """See `ChunkSource`."""
        return self._stream.release_batch

    def batches(self, most: int) -> Generator[list[HostChunk]]:
        is_almost_loaded, watch = False, self._watch
        for chunks in self._stream.batches(most):
            # Of what is in host memory nothing has to be read: the rest comes as fast as what came before.
            if self._stream.is_in_host and not is_almost_loaded:
                is_almost_loaded = watch.rest_s(chunks[0], time.monotonic() - self._began_s) <= MAX_HOLD_S
                if is_almost_loaded:
                    self._tell(AlmostLoaded())
            try:
                while chunks:
                    mapped = self._mapped(chunks)
                    chunks = chunks[len(mapped) :]
                    yield mapped
            finally:
                if chunks:  # nobody copies them any more
                    self._stream.release(*chunks)
        if not is_almost_loaded:  # every copy is queued
            self._tell(AlmostLoaded())

    def _mapped(self, chunks: Sequence[HostChunk]) -> list[HostChunk]:
        """Return the first of these chunks, once its place can be written, and those behind it whose can.

        Raises as `PageMapping.wait_for`.
        """
        chunk_range, is_ready = self._watch.manifest.chunk_range, self._mapping.is_ready
        self._mapping.wait_for(chunk_range(chunks[0].index))
        return list(takewhile(lambda chunk: is_ready(chunk_range(chunk.index)), chunks))

    def release(self, *chunks: HostChunk) -> None:
        """Give back chunks, in their order, when their copies have passed."""
        self._stream.release(*chunks)
        now_s, last = time.monotonic(), max(chunks, key=lambda chunk: chunk.index)
        num_bytes = self._watch.before[last.index] + len(last.data)
        is_due = now_s - self._told_s >= PROGRESS_INTERVAL_S
        if is_due and num_bytes - self._told_bytes >= PROGRESS_SHARE * self._watch.num_bytes:
            self._told_s, self._told_bytes = now_s, num_bytes
            end = self._watch.manifest.chunk_range(last.index).end
            self._tell(Progressed(num_bytes, bisect_right(self._watch.layer_ends, end)))

    def cancel(self) -> None:
        self._stream.cancel()
