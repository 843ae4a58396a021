"""The order in which memory on a worker is freed. Pure: yields `reclaim_orders.py`.

    free memory, unused cached KV, idle adapters, weights of retained models, of warm ones, of paused ones,
    and only for promised memory: KV of paused models, KV of running requests, workspaces of idle and paused
    models in an arena, pinned adapters, sampler tables

Each is touched only when all before it is used up. A later stage of a pipeline uses the blocks that the first
one does, so that one is asked for them, and they come later. It is asked for unused ones behind the weights:
a step that is promised KV waits for these before any request is preempted. It is asked for used ones when all
else is used up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hearth.core.types import Hold, ModelId, SamplingTable
from hearth.policy.memory.adapter_residency import AdapterResidency
from hearth.policy.memory.reclaim_orders import (
    AskKvBack,
    ClearKv,
    DropAdapter,
    Orders,
    SpillTable,
    TakeWeights,
    TakeWorkspaces,
)


@dataclass(frozen=True, slots=True)
class KvView:
    """The KV of one hosted model between two steps, the sink left out."""

    hold: Hold  #: BUSY while the model has requests and its turn, or is being loaded
    has_work: bool
    block_bytes: int
    floor_blocks: int  #: promised to the model; 0 while it is paused
    max_blocks: int
    num_blocks: int
    num_available: int  #: of `num_blocks`: free or cached
    reserve_blocks: int  #: that running requests will fill next; 0 while the model is paused
    shared_max_blocks: int = 0  #: of the first stage of a pipeline: up to how many it may ask the others for
    due_in_s: float = 0.0  #: of a paused model: until its next token is due


@dataclass(frozen=True, slots=True)
class TablesView:
    needed: Mapping[SamplingTable, int]  #: by requests that run or wait
    pooled: Mapping[SamplingTable, int]  #: tables that lie in the pool, needed or not
    spilled: Collection[SamplingTable]  #: needed tables that lie outside of the pool


class ModelBooks(Protocol):
    def models(self) -> Collection[ModelId]:
        """Return the hosted models with an engine, which may have KV."""

    def later_stages(self) -> Collection[ModelId]:
        """Return the hosted stages whose KV follows that of the first stage, on another worker."""

    def returning_bytes(self) -> int:
        """Return the KV that first stages were asked for and have not refused, if none need be preempted."""

    def kv_of(self, model: ModelId) -> KvView: ...

    def growth_bytes(self, model: ModelId, num_blocks: int) -> int:
        """Return the free memory that `num_blocks` more would take."""

    def extents(self, model: ModelId) -> Sequence[range]:
        """Return the runs of blocks that can be taken back next, best first."""

    def cached_to_spare(self, model: ModelId) -> int:
        """Return how many cached blocks the next step may reuse: no waiting request would read them."""

    def tables_of(self, model: ModelId) -> TablesView: ...


@dataclass(frozen=True, slots=True)
class DeviceEviction:
    """Reads the books and changes nothing; the orders do."""

    books: ModelBooks
    keeps_addresses: bool  #: the pool maps pages: all models share one workspace
    adapters: AdapterResidency | None

    def free(
        self, num_bytes: int, *, may_preempt: bool, beside: ModelId | None = None, keeps_floor: bool = False
    ) -> Orders:
        """Free at least `num_bytes`, or as many as possible; return how many.

        `may_preempt`: the memory is promised. `keeps_floor`: it is not, and every model keeps its promised
        KV. `beside`: the model that takes nothing from itself.
        """
        freed = yield from self.free_kv(num_bytes, beside, may_preempt=False, keeps_floor=keeps_floor)
        if freed < num_bytes:
            freed += yield from self.free_adapters(num_bytes - freed)
        if freed < num_bytes:
            freed += yield TakeWeights(num_bytes - freed)
        if freed < num_bytes and may_preempt:
            freed += yield from self.free_kv(
                num_bytes - freed, beside, may_preempt=True, keeps_floor=keeps_floor
            )
        is_promised = may_preempt and not keeps_floor
        if freed < num_bytes and is_promised and not self.keeps_addresses:
            freed += yield TakeWorkspaces()
        if freed < num_bytes and is_promised:
            freed += yield from self.free_adapters(num_bytes - freed, is_promised=True)
        if freed < num_bytes and may_preempt:
            freed += yield from self._spill_tables(num_bytes - freed)
        if freed < num_bytes:
            yield from self._ask_back(num_bytes - freed, beside, is_promised=may_preempt)
        return freed

    def _ask_back(self, num_bytes: int, beside: ModelId | None, *, is_promised: bool) -> Orders:
        for model in self.books.later_stages():
            kv = self.books.kv_of(model)
            num_lent = kv.num_blocks - kv.floor_blocks
            num_blocks = min(num_lent, -(-num_bytes // kv.block_bytes))
            if model != beside and num_blocks > 0:
                yield AskKvBack(model, kv.num_blocks - num_blocks, is_promised)
                num_bytes -= num_blocks * kv.block_bytes
        return 0

    def _spill_tables(self, num_bytes: int) -> Orders:
        """Move tables out of the pool, also those of the model that memory is freed for."""
        freed = 0
        for model in sorted(self.books.models()):
            for table in self.books.tables_of(model).pooled:
                if freed < num_bytes:
                    freed += yield SpillTable(model, table)
        return freed

    def free_kv(
        self, num_bytes: int, beside: ModelId | None, *, may_preempt: bool, keeps_floor: bool = False
    ) -> Orders:
        """Clear KV: of the least held models first, and of paused ones of those that are due last."""
        freed = 0
        models = [model for model in self.books.models() if model != beside and self.books.extents(model)]
        views = {model: self.books.kv_of(model) for model in models}
        for model, kv in sorted(views.items(), key=lambda item: (item[1].hold, -item[1].due_in_s, item[0])):
            while freed < num_bytes:
                clearing = self.clear_one(model, kv, may_preempt=may_preempt, keeps_floor=keeps_floor)
                if not (num_blocks := (yield from clearing)):
                    break
                freed += num_blocks * kv.block_bytes
                kv = self.books.kv_of(model)
        return freed

    def clear_one(
        self, model: ModelId, kv: KvView, *, may_preempt: bool, keeps_floor: bool = False
    ) -> Orders:
        """Take back one extent of a model; return its blocks, or 0 if none can go.

        Without preemption a busy model keeps the blocks that it will fill next: two full models would take
        the same blocks from each other over and over. Running requests lose only KV beyond the promise;
        with `keeps_floor` free and cached blocks as well.
        """
        num_spare = kv.num_blocks if may_preempt else kv.num_available - kv.reserve_blocks
        for extent in self.books.extents(model):
            is_lent = kv.num_blocks - len(extent) >= kv.floor_blocks
            if len(extent) > num_spare or (keeps_floor and not is_lent):
                continue
            may_end = may_preempt and (is_lent or not kv.has_work)
            is_promised = kv.floor_blocks > 0
            if num_blocks := (
                yield ClearKv(model, extent, may_end, keeps_floor=is_promised, may_forget=True)
            ):
                return num_blocks
        return 0

    def free_adapters(self, num_bytes: int, *, is_promised: bool = False) -> Orders:
        """Drop idle adapters, the cheapest to reload first; return how many bytes came free."""
        freed = 0
        for adapter in () if self.adapters is None else self.adapters.idle(is_promised=is_promised):
            if freed >= num_bytes:
                break
            freed += yield DropAdapter(adapter)
        return freed
