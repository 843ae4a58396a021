"""A workload run through a pool as a worker would do it: room is made, a place taken, what is missing loaded.

Nobody computes: while a request "runs" its model has some KV, which is written to. What is timed is all
between the request and the last byte on the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from bench.reuse.models import Library, LibraryModel
from bench.reuse.workload import Asked
from hearth.core.types import Hold, ModelId
from hearth.memory.pool import EvictionTerms, Pool, Space
from hearth.models.layout import ByteRange
from hearth.policy.memory.reload_cost import DeviceReloadCosts
from hearth.store.transfer.destination import LoadPiece, PageMapping
from hearth.store.transfer.transfer import Loader


class ReplayTerms:
    """On which terms models may be evicted, at a time of the workload. Mutable; written by the replay.

    As a worker does it, but that it never learns how fast loads were: what is taken then depends on the
    sequence alone, and is the same whoever runs it.
    """

    def __init__(self) -> None:
        self.reload_costs = DeviceReloadCosts()
        self.now_s = 0.0
        self.running: ModelId | None = None
        self.is_loading = False

    def of(self, model: ModelId) -> EvictionTerms:
        if model == self.running:
            return EvictionTerms(Hold.BUSY, 0.0, self.is_loading)
        return EvictionTerms(
            Hold.RETAINED, self.reload_costs.cost_s_per_byte(model, self.now_s), is_loading=False
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """How long one request took until its model was there."""

    model: ModelId
    run: int
    missing_bytes: int
    moved_bytes: int  #: to place its weights
    kv_moved_bytes: int  #: then, to place its KV; what that took is not timed
    room_s: float  #: what had to go was taken
    place_s: float  #: a place was found and, on an arena, tensors were moved, as far as this thread waits
    moves_s: float  #: what the moves took on the device
    load_s: float  #: all of it


def map_ahead_of(pool: Pool, model: ModelId, space: Space, loader: Loader) -> PageMapping:
    """Prepare memory as a worker has it done, ahead of the copies."""
    return PageMapping(lambda part: pool.prepare(model, part), space.parts, loader.threads)


@dataclass(slots=True)
class Replay:
    """A workload on its way through a pool. Mutable; one thread calls it."""

    pool: Pool
    terms: ReplayTerms
    library: Library
    loader: Loader
    keeps_nothing: bool = False  #: every request finds an empty device
    verify_every: int = 0  #: loads; 0: never
    num_verified: int = 0
    _num_loads: int = field(default=0, init=False)

    def run(self, asked: Sequence[Asked], kv_bytes: Sequence[int]) -> Iterator[Loaded]:
        """Yield each request's load; `kv_bytes` is what each request's KV grows to while it runs."""
        for one, wanted_bytes in zip(asked, kv_bytes, strict=True):
            model = self.library.models[one.model]
            yield self.request(model, one.at_s, one.run, wanted_bytes)

    def request(self, model: LibraryModel, at_s: float, run: int, kv_bytes: int) -> Loaded:
        terms, pool = self.terms, self.pool
        terms.now_s, terms.running = at_s, model.id
        terms.reload_costs.asked(model.id, at_s)
        moved_bytes = pool.usage().moved_bytes
        synchronize(self.loader.device)
        began_s = time.perf_counter()
        make_room(pool, model)
        room_s = time.perf_counter() - began_s
        timer = _Timer(self.loader.device)
        space = pool.place(model.id, model.shape)
        pool.prepare_rest(model.id)
        pool.take_moved()
        timer.stop()
        place_s = time.perf_counter() - began_s - room_s
        self.load(model, space)
        load_s = time.perf_counter() - began_s
        placed_moved_bytes = pool.usage().moved_bytes
        self._verify(model, space)
        self._use_kv(model, space, kv_bytes)
        pool.retire(model.id)
        terms.running = None
        if self.keeps_nothing:
            pool.drop(model.id)
        return Loaded(
            model=model.id,
            run=run,
            missing_bytes=num_missing(space),
            moved_bytes=placed_moved_bytes - moved_bytes,
            kv_moved_bytes=pool.usage().moved_bytes - placed_moved_bytes,
            room_s=room_s,
            place_s=place_s,
            moves_s=timer.seconds(),
            load_s=load_s,
        )

    def load(self, model: LibraryModel, space: Space) -> None:
        """Load what is missing, through the loader that workers have; where nothing is, none is started."""
        if space.gaps:
            pieces = [LoadPiece.to(gap.part, gap.destination) for gap in space.gaps]
            self.terms.is_loading = True
            mapping = map_ahead_of(self.pool, model.id, space, self.loader)
            self.loader.load(
                model.id,
                model.manifest,
                pieces,
                lambda chunks: self.library.stream(model, chunks, mapping.wait_for),
            ).wait()
            mapping.wait()
            self.terms.is_loading = False
        self.pool.load_ended(model.id, is_whole=True)

    def _verify(self, model: LibraryModel, space: Space) -> None:
        """Now and then compare all tensors on the device with the host's bytes."""
        self._num_loads += 1
        if self.verify_every and self._num_loads % self.verify_every == 0:
            check_bytes(self.library, model, space)
            self.num_verified += 1

    def _use_kv(self, model: LibraryModel, space: Space, kv_bytes: int) -> None:
        wanted = kv_bytes // model.block_bytes
        extents = self.pool.kv.grow(model.id, wanted)
        while (short := wanted - sum(map(len, extents))) > 0:
            # On an arena what comes free may still lie in pieces that are too small: then once more.
            if not self.pool.take_weights(short * model.block_bytes, Hold.RETAINED):
                raise RuntimeError(f"`{model.id}` lacks {short} of {wanted} blocks of KV; raise the budget")
            extents += self.pool.kv.grow(model.id, short)
        self.pool.take_moved()
        for extent in extents:
            space.kv[extent.start * model.block_bytes : extent.stop * model.block_bytes].fill_(0xFF)


def make_room(pool: Pool, model: LibraryModel) -> None:
    while (lack_bytes := pool.missing_bytes(model.id, model.shape)) > 0:
        if not pool.take_weights(lack_bytes, Hold.RETAINED):
            raise RuntimeError(
                f"`{model.id}` lacks {lack_bytes} bytes of {pool.budget_bytes}; raise the budget"
            )


def num_missing(space: Space) -> int:
    return sum(gap.part.end - gap.part.begin for gap in space.gaps)


def check_bytes(library: Library, model: LibraryModel, space: Space) -> None:
    """Raise unless every tensor on the device is what the host has."""
    for spec in model.manifest.tensors:
        place = space.places[spec.name]
        for stored in library.bytes_of(model, ByteRange(spec.offset, spec.offset + spec.nbytes)):
            at = place.offset + stored.begin - spec.offset
            found = place.base[at : at + len(stored.data)]
            if not torch.equal(found, stored.data.to(found.device)):
                raise AssertionError(f"`{model.id}`: {spec.name} is not as stored, from {stored.begin} on")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Timer:
    """A timer of what is queued on the current stream until `stop`; on a CPU, of what is done meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._began_s = self._ended_s = time.perf_counter()
        if self._is_cuda:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call] # torch leaves it untyped
            self._begin.record()

    def stop(self) -> None:
        self._ended_s = time.perf_counter()
        if self._is_cuda:
            self._end.record()

    def seconds(self) -> float:
        """Return the time that was measured, what the device waited for this thread included."""
        if not self._is_cuda:
            return self._ended_s - self._began_s
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1e3
