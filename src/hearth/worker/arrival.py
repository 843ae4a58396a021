"""How a model's bytes come to its memory: a load that is watched, and what it has to tell. Computes nothing.

Nobody is called back: news are posted, and the thread that owns the model takes them when it comes to it.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hearth.models.layout import Layout
from hearth.store.borrower import BorrowedModel, Borrower
from hearth.store.fetch import HostChunk
from hearth.store.loader import ChunkStream, Load, Loader, LoadGate, whole
from hearth.store.manifest import Manifest
from hearth.store.record import LoadRecord
from hearth.store.widen import landing, widen
from hearth.worker.failure import Failure, failure_of

#: Progress is told at most this often, and for at least this share of the model.
PROGRESS_INTERVAL_S = 0.05
PROGRESS_SHARE = 0.01
#: A step that follows the load, layer by layer, waits for copies to be queued, and so does whatever comes
#: after it. So it starts when the rest of the load should not take longer than this: enough to have a prompt
#: computed while the last layers arrive, too little to be noticed by another model's request.
MAX_HOLD_S = 0.05


@dataclass(frozen=True, slots=True)
class Progressed:
    num_bytes: int
    num_layers: int  #: that can run


@dataclass(frozen=True, slots=True)
class Near:
    """A step that follows the load should hold up its thread for `MAX_HOLD_S` at most."""


@dataclass(frozen=True, slots=True)
class Loaded:
    record: LoadRecord
    widen_s: float | None  #: after it; None: it is served as it is stored


@dataclass(frozen=True, slots=True)
class Broken:
    failure: Failure


ArrivalNews = Progressed | Near | Loaded | Broken


class Arrival:
    """A load under way or done. Called by the thread that owns the model; `post` is called by others."""

    def __init__(
        self,
        model: BorrowedModel,
        base: torch.Tensor,
        layout: Layout,
        source: Borrower,
        loader: Loader,
        post: Callable[[ArrivalNews], None],
    ) -> None:
        """Start to load into `base`, which is laid out as `layout` in the end.

        Raises:
            StoreError: nobody lends the model's chunks.
        """
        manifest = model.manifest
        self._base, self._manifest, self._layout, self._post = base, manifest, layout, post
        self._is_widened = is_widened = layout != manifest.layout

        def tell(news: Progressed | Near) -> None:
            # No method: the load would hold this object, and this object the load, and both the memory.
            if not is_widened:
                post(news)
            elif isinstance(news, Progressed):
                post(Progressed(news.num_bytes, num_layers=0))

        self._load: Load = loader.load(
            model.opened.name,
            manifest,
            whole(manifest, landing(base, manifest)),
            lambda chunks: _Watched(source.fetch(model, chunks), manifest, model.is_in_host, tell),
        )
        self._thread = threading.Thread(target=self._wait, name="hearth-arrival", daemon=True)
        self._thread.start()

    def gate(self) -> LoadGate | None:
        """What the device has to wait for; None if nothing runs before all is there."""
        return None if self._is_widened else LoadGate(self._load, self._manifest)

    def cancel(self) -> None:
        """Call it off, if it is not over, and wait until nobody touches the memory any more."""
        self._load.cancel()
        self._thread.join()

    def _wait(self) -> None:
        try:
            record = self._load.wait()
            widen_s = self._widen() if self._is_widened else None
        except Exception as error:  # the thread's top: whoever owns the model is told
            self._post(Broken(failure_of(error)))
            return
        self._post(Loaded(record, widen_s))

    def _widen(self) -> float:
        began_s = time.perf_counter()
        widen(self._base, self._manifest, self._layout)
        return time.perf_counter() - began_s


class _Watched:
    """A `ChunkStream` that tells how far it has come."""

    def __init__(
        self,
        stream: ChunkStream,
        manifest: Manifest,
        is_in_host: bool,
        tell: Callable[[Progressed | Near], None],
    ) -> None:
        """`is_in_host`: nothing has to be read, so the rest comes as fast as what came before."""
        self._stream, self._manifest, self._is_in_host, self._tell = stream, manifest, is_in_host, tell
        self._layer_ends = [layer.end for layer in manifest.layers]
        self._told_bytes = 0
        self._began_s = self._told_s = time.monotonic()

    def __iter__(self) -> Iterator[HostChunk]:
        is_near = False
        for chunk in self._stream:
            if self._is_in_host and not is_near and self._rest_s(chunk) <= MAX_HOLD_S:
                is_near = True
                self._tell(Near())
            yield chunk
        if not is_near:  # every copy is queued
            self._tell(Near())

    def release(self, *chunks: HostChunk) -> None:
        """In the order of the chunks, when their copies have passed."""
        self._stream.release(*chunks)
        now_s, end = time.monotonic(), max(self._manifest.chunk_range(chunk.index).end for chunk in chunks)
        is_due = now_s - self._told_s >= PROGRESS_INTERVAL_S
        if is_due and end - self._told_bytes >= PROGRESS_SHARE * self._manifest.num_bytes:
            self._told_s, self._told_bytes = now_s, end
            self._tell(Progressed(end, bisect_right(self._layer_ends, end)))

    def cancel(self) -> None:
        self._stream.cancel()

    def _rest_s(self, chunk: HostChunk) -> float:
        """How long the chunks from this one on should take, at the speed of those before."""
        done_bytes = self._manifest.chunk_range(chunk.index).begin
        if done_bytes == 0:
            return math.inf
        elapsed_s = time.monotonic() - self._began_s
        return elapsed_s * (self._manifest.num_bytes - done_bytes) / done_bytes
