"""Who gives way when a model on a worker needs memory. Pure: it yields the orders of `reclaim_orders.py`.

    free memory, KV that nobody reads, idle adapters, weights of retained models, of warm, of paused ones,
    and for what is promised alone: KV of paused models, KV of running requests, workspaces of idle and paused
    models in an arena, pinned adapters, tables of samplers

Each is touched only when all before it is used up. Models are promised no more than there is, so whatever is
promised can be had: what a model has beyond its promise is lent, and comes back in this order. A paused model
is promised nothing: its requests wait for its turn, and lose their KV only when nothing else is left.
Tables of a sampler are lent as well. Requests that need one must not wait for it, so where the pool has no
room it lies outside, in memory that nobody promised: the last resort, and a fallback that is counted.
Adapters are promised nothing either, and never get what a model is still owed of its KV. Whoever waits for
one is served before who came later, so running requests give way to one beyond what their model is promised.
Those that steps use cannot give way at once: while they keep from a model what it is promised, `is_short`
says so, and no other comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hearth.core.types import AdapterId, Hold, ModelId, SamplingTable
from hearth.policy.batch.elastic import Elastic, KvUse
from hearth.policy.memory.adapter_residency import AdapterResidency
from hearth.policy.memory.reclaim_orders import (
    ClearKv,
    DropAdapter,
    DropTable,
    GrowKv,
    Orders,
    PlaceAdapter,
    PlaceTable,
    SpillTable,
    TakeWeights,
    TakeWorkspaces,
)

#: How often memory may come free without being of use before a model gives up what it is not promised.
MAX_USELESS = 2


@dataclass(frozen=True, slots=True)
class KvView:
    """The KV of one hosted model between two steps, the sink left out."""

    hold: Hold  #: BUSY while the model has requests and its turn, or is being loaded
    has_work: bool
    block_bytes: int
    floor_blocks: int  #: that the model is promised; none while it is paused
    max_blocks: int
    num_blocks: int
    num_available: int  #: of `num_blocks`: free, or only cached
    reserve_blocks: int  #: that running requests will fill next; none while the model is paused
    due_in_s: float = 0.0  #: of paused ones those give way first that are due last


@dataclass(frozen=True, slots=True)
class TablesView:
    """The tables of one model's sampler between two steps, with their bytes."""

    needed: Mapping[SamplingTable, int]  #: by requests that run or wait
    pooled: Mapping[SamplingTable, int]  #: tables that lie in the pool, needed or not
    spilled: Collection[SamplingTable]  #: needed tables that lie outside of the pool


class ModelBooks(Protocol):
    """KV and tables on a worker as they are at the moment, for the policy to read."""

    def models(self) -> Collection[ModelId]:
        """Return the hosted models that have an engine, and so may have KV."""

    def kv_of(self, model: ModelId) -> KvView:
        """Return one model's KV in numbers."""

    def growth_bytes(self, model: ModelId, num_blocks: int) -> int:
        """Return the free memory that so many blocks more would take."""

    def extents(self, model: ModelId) -> Sequence[range]:
        """Return the runs of blocks that could be given back next, best first."""

    def cached_to_spare(self, model: ModelId) -> int:
        """Return how many cached blocks the model's next step could use: nobody who waits would read them."""

    def tables_of(self, model: ModelId) -> TablesView:
        """Return the tables of one model's sampler."""


class FutileTries:
    """Mutable; written by the `ReclaimPolicy` that owns it. Which models have looked for memory in vain.

    Until something may have made room another look would be in vain as well, and one before every step would
    cost more than it ever brings.
    """

    def __init__(self) -> None:
        self._generation_by_model: dict[ModelId, int] = {}

    def __bool__(self) -> bool:
        return bool(self._generation_by_model)

    def note(self, model: ModelId, generation: int) -> None:
        self._generation_by_model[model] = generation

    def is_known(self, model: ModelId, generation: int) -> bool:
        """True if the model has tried in this generation."""
        return self._generation_by_model.get(model) == generation

    def outdated(self, generation: int) -> list[ModelId]:
        """Return the models whose last try was in an earlier generation."""
        return [model for model, then in self._generation_by_model.items() if then != generation]

    def forget(self, model: ModelId) -> None:
        self._generation_by_model.pop(model, None)


class ReclaimPolicy:
    """Mutable; written by the one thread that calls it and carries out its orders."""

    def __init__(
        self, books: ModelBooks, *, keeps_addresses: bool, adapters: AdapterResidency | None = None
    ) -> None:
        """`keeps_addresses`: the pool maps pages, so any free memory fits anywhere.

        `adapters`: None where there are none.
        """
        self._books, self._keeps_addresses, self._adapters = books, keeps_addresses, adapters
        #: Counts what may have made room: memory given back, requests that ended, a model that is held less.
        self.generation = 0
        #: The model that room is being made for: nothing is taken from a model for itself.
        self.placing: ModelId | None = None
        #: Tries to grow that found no free memory, and those for which nobody could give way. What a model is
        #: promised is had all the same.
        self._without_free = FutileTries()
        self._refused = FutileTries()
        #: By model that asked for blocks to lie ready: the generation, its blocks then, and how many more.
        self._asked_ahead: dict[ModelId, tuple[int, int, int]] = {}
        #: Models that have no place because one that is being loaded lies in the way.
        self._deferred = FutileTries()
        #: Models that wait for their turn, and for which nobody gives way before that.
        self._early = FutileTries()
        #: Models that were not given all the KV that they are promised when they asked last.
        self._owed: set[ModelId] = set()

    @property
    def is_short(self) -> bool:
        """True while a model waits for room that it is promised."""
        return bool(self._deferred) or any(map(self._is_owed, self._owed))

    def _is_owed(self, model: ModelId) -> bool:
        """True if a model which waited for KV still does: its requests may have ended, or its turn.

        One that lacks an adapter makes no step before that is there, and asks again then: the adapter, which
        leaves to models what they are promised, must not wait for it.
        """
        if model not in self._books.models():
            return False
        if self._adapters is not None and self._adapters.lacking(model):
            return False
        kv = self._books.kv_of(model)
        return kv.has_work and kv.num_blocks < kv.floor_blocks

    def room_may_have_come(self) -> None:
        """Have all models that looked for memory in vain look again."""
        self.generation += 1

    def forget(self, model: ModelId) -> None:
        """Forget a model that is gone."""
        self._without_free.forget(model)
        self._refused.forget(model)
        self._asked_ahead.pop(model, None)
        self._deferred.forget(model)
        self._early.forget(model)
        self._owed.discard(model)

    # Weights.

    def make_room(self, model: ModelId, missing_bytes: Callable[[], int]) -> Orders:
        """Have others give way until the model can be placed, which it is promised.

        `missing_bytes` says how much has to come free. Returns what it said last: 0 unless nobody could give
        way any more.
        """
        self._deferred.forget(model)
        self.placing = model
        try:
            while (num_bytes := missing_bytes()) > 0:
                if not (yield from self._free(num_bytes, may_preempt=True)):
                    break
        finally:
            self.placing = None
        return num_bytes

    def make_room_early(self, model: ModelId, num_bytes: int, cost_s_per_byte: float) -> Orders:
        """Have weights go that cost less than those of a model that waits for its turn.

        Nothing is promised yet, so KV and dearer weights stay. Returns how many bytes came free.
        """
        if self._early.is_known(model, self.generation):
            return 0
        self.placing, freed = model, 0
        try:
            freed += yield from self._free_adapters(num_bytes)
            if freed < num_bytes:
                freed += yield TakeWeights(num_bytes - freed, cost_s_per_byte)
        finally:
            self.placing = None
        if freed < num_bytes:
            self._early.note(model, self.generation)
        return freed

    def defer(self, model: ModelId, *, is_any_loading: bool) -> bool:
        """Note that a model found no place; False if it never will.

        What is being loaded can be neither taken nor moved. In an arena it may cut the room for another model
        in pieces, and anywhere it may be of a model whose turn is over: then that one has to wait for it.
        """
        if not is_any_loading:
            return False
        self._deferred.note(model, self.generation)
        return True

    def deferred(self) -> list[ModelId]:
        """Return the models that found no place and may find one now."""
        return self._deferred.outdated(self.generation)

    def stop_deferring(self, model: ModelId) -> None:
        """Have a model wait for a place no more."""
        self._deferred.forget(model)

    # KV.

    def before_step(self, model: ModelId, elastic: Elastic, use: KvUse) -> Orders:
        """Give a model the tables and the KV that its next step wants, as far as KV can be had without harm.

        Returns how many blocks it got.
        """
        yield from self._place_tables(model)
        self._owed.discard(model)
        growth = elastic.growth(use)
        asked = (self.generation, use.num_blocks, growth.ahead_blocks)
        if not growth.now_blocks and (not growth.ahead_blocks or self._asked_ahead.get(model) == asked):
            return 0  # also where it would only be told once more what lies ready
        self._asked_ahead[model] = asked
        kv = self._books.kv_of(model)
        wanted, growth = growth.now_blocks, growth.within(kv.max_blocks - kv.num_blocks)
        short, ahead = growth.now_blocks, growth.ahead_blocks
        if (short or ahead) and not self._without_free.is_known(model, self.generation):
            short -= yield GrowKv(model, short, ahead)
        if short > 0:
            self._without_free.note(model, self.generation)
            # Its own cached blocks go before those of others, first in place of those beyond its ceiling.
            short = min(short, wanted - (growth.now_blocks - short) - self._books.cached_to_spare(model))
            if short > 0 and not self._refused.is_known(model, self.generation):
                short -= yield from self._grow_by_force(model, short, ahead, is_promised=False)
            promised = min(short, kv.floor_blocks - self._books.kv_of(model).num_blocks)
            if promised > 0:
                num_got = yield from self._grow_by_force(model, promised, 0, is_promised=True)
                short -= num_got
                if num_got < promised:
                    self._owed.add(model)
            if short > 0:
                self._refused.note(model, self.generation)
        return growth.now_blocks - short

    def after_step(
        self, model: ModelId, elastic: Elastic, use: KvUse, *, has_work: bool, has_let_go: bool
    ) -> Orders:
        """Take back the KV that a model has not used for long, or does not use now that it is idle.

        `has_let_go`: requests of the model ended with the step, or were preempted for it.
        """
        num_surplus = elastic.surplus_blocks(use) if has_work else use.num_free
        num_given = (yield from self._give_back(model, num_surplus)) if num_surplus > 0 else 0
        if num_given or has_let_go or not has_work:
            self.room_may_have_come()
        return num_given

    def _give_back(self, model: ModelId, num_blocks: int) -> Orders:
        """Take back up to so many blocks, none of them cached: nobody needs them yet."""
        num_given = 0
        while extents := tuple(self._books.extents(model)):
            for extent in extents:
                if len(extent) <= num_blocks - num_given:
                    num_given += yield ClearKv(
                        model, extent, may_preempt=False, keeps_floor=True, may_forget=False
                    )
            if extents == tuple(self._books.extents(model)):
                break  # else there may be one that is known only now that the one before it has gone
        return num_given

    def _grow_by_force(
        self, model: ModelId, num_blocks: int, ahead_blocks: int, *, is_promised: bool
    ) -> Orders:
        """Have others give way until a model has so many blocks more, or nobody can; return how many it got.

        With those that it will want next, so that it does not come again for every step. Not all that comes
        free need be of use: in an arena a block has to lie at a multiple of its size. Others are not stripped
        for that: what is not promised is given up when what came free was of no use twice.
        """
        block_bytes = self._books.kv_of(model).block_bytes
        num_given = num_useless = 0
        while num_given < num_blocks and (is_promised or num_useless < MAX_USELESS):
            num_wanted = num_blocks - num_given
            num_bytes = (num_wanted + ahead_blocks) * block_bytes
            if not (yield from self._free(num_bytes, may_preempt=is_promised, beside=model)):
                break
            num_got = yield GrowKv(model, num_wanted, ahead_blocks)
            if not num_got and self._keeps_addresses:  # any page fits, and there are not enough of them
                break
            num_given += num_got
            num_useless = 0 if num_got else num_useless + 1
        return num_given

    # Tables.

    def _place_tables(self, model: ModelId) -> Orders:
        """Have a model get the tables that its requests need; return how many bytes of the pool they take.

        Nobody is preempted for one, for none is promised. Who has no room in the pool gets it elsewhere.
        """
        placed_bytes = 0
        tables = self._books.tables_of(model)
        for table, num_bytes in tables.needed.items():
            if table in tables.spilled or tables.pooled.get(table, 0) >= num_bytes:
                continue
            order = PlaceTable(model, table, num_bytes)
            got_bytes = yield order
            num_tries = 0
            while not got_bytes and num_tries < MAX_USELESS:
                if not (yield from self._free_for_table(model, num_bytes)):
                    break
                got_bytes = yield order
                num_tries += 1
            if not got_bytes:
                yield SpillTable(model, table)
            placed_bytes += got_bytes
        return placed_bytes

    def _free_for_table(self, model: ModelId, num_bytes: int) -> Orders:
        """Have so many bytes come free, as far as nobody is preempted; the model's own lent KV goes first."""
        freed = 0
        while freed < num_bytes:
            kv = self._books.kv_of(model)
            clearing = self._clear_one(model, kv, may_preempt=False, keeps_floor=True)
            if not (num_blocks := (yield from clearing)):
                break
            freed += num_blocks * kv.block_bytes
        if freed < num_bytes:
            freed += yield from self._free(num_bytes - freed, may_preempt=False, beside=model)
        return freed

    def drop_tables(self, model: ModelId) -> Orders:
        """Take back the tables that no request of a model needs any more; return how many bytes came free."""
        freed = 0
        tables = self._books.tables_of(model)
        for table in tables.pooled:
            if table not in tables.needed:
                freed += yield DropTable(model, table)
        if freed:
            self.room_may_have_come()
        return freed

    # Adapters.

    def place_adapter(self, adapter: AdapterId, sizes: Sequence[int], *, may_take: bool) -> Orders:
        """Give an adapter pieces; returns their bytes, or 0: it has none. `may_take`: others may give way.

        What models are owed of their KV is left to them, so clearing it is of no use.
        """

        def place() -> PlaceAdapter:
            return PlaceAdapter(adapter, tuple(sizes), self.owed_bytes())

        num_bytes = sum(sizes)
        got_bytes = yield place()
        if got_bytes or not may_take:
            return got_bytes
        if (yield from self._free_kv(num_bytes, None, may_preempt=False, keeps_floor=True)):
            got_bytes = yield place()
        for other in () if got_bytes or self._adapters is None else self._adapters.idle():
            yield DropAdapter(other)
            if got_bytes := (yield place()):
                break
        for may_preempt in (False, True):
            num_tries = 0
            while not got_bytes and num_tries < MAX_USELESS:
                num_tries += 1
                if not (yield from self._free(num_bytes, may_preempt=may_preempt, keeps_floor=True)):
                    break
                got_bytes = yield place()
        self.room_may_have_come()
        return got_bytes

    def owed_bytes(self) -> int:
        """Return the free memory that models are promised as KV and have not got."""
        views = {model: self._books.kv_of(model) for model in self._books.models()}
        missing = {model: kv.floor_blocks - kv.num_blocks for model, kv in views.items()}
        return sum(self._books.growth_bytes(model, blocks) for model, blocks in missing.items() if blocks > 0)

    def _free_adapters(self, num_bytes: int, *, is_promised: bool = False) -> Orders:
        """Have idle adapters go, those first that are cheapest to have back; return how many bytes came."""
        freed = 0
        for adapter in () if self._adapters is None else self._adapters.idle(is_promised=is_promised):
            if freed >= num_bytes:
                break
            freed += yield DropAdapter(adapter)
        return freed

    # Making room.

    def _free(
        self, num_bytes: int, *, may_preempt: bool, beside: ModelId | None = None, keeps_floor: bool = False
    ) -> Orders:
        """Have at least so many bytes come free, or as many as can; return how many.

        `may_preempt`: somebody is promised it, unless `keeps_floor`: then every model keeps the KV that it is
        promised.
        """
        freed = yield from self._free_kv(num_bytes, beside, may_preempt=False, keeps_floor=keeps_floor)
        if freed < num_bytes:
            freed += yield from self._free_adapters(num_bytes - freed)
        if freed < num_bytes:
            freed += yield TakeWeights(num_bytes - freed)
        if freed < num_bytes and may_preempt:
            freed += yield from self._free_kv(
                num_bytes - freed, beside, may_preempt=True, keeps_floor=keeps_floor
            )
        is_promised = may_preempt and not keeps_floor
        if freed < num_bytes and is_promised and not self._keeps_addresses:
            freed += yield TakeWorkspaces()
        if freed < num_bytes and is_promised:
            freed += yield from self._free_adapters(num_bytes - freed, is_promised=True)
        if freed < num_bytes and may_preempt:
            freed += yield from self._spill_tables(num_bytes - freed)
        if freed:
            self.room_may_have_come()  # it may be more than whoever asked makes use of
        return freed

    def _spill_tables(self, num_bytes: int) -> Orders:
        """Have tables leave the pool for what somebody is promised, also those of the one who is."""
        freed = 0
        for model in sorted(self._books.models()):
            for table in self._books.tables_of(model).pooled:
                if freed < num_bytes:
                    freed += yield SpillTable(model, table)
        return freed

    def _free_kv(
        self, num_bytes: int, beside: ModelId | None, *, may_preempt: bool, keeps_floor: bool = False
    ) -> Orders:
        """Clear KV of the models that are held least, first; of paused ones, of those that are due last."""
        freed = 0
        models = [model for model in self._books.models() if model != beside and self._books.extents(model)]
        views = {model: self._books.kv_of(model) for model in models}
        for model, kv in sorted(views.items(), key=lambda item: (item[1].hold, -item[1].due_in_s, item[0])):
            while freed < num_bytes:
                clearing = self._clear_one(model, kv, may_preempt=may_preempt, keeps_floor=keeps_floor)
                if not (num_blocks := (yield from clearing)):
                    break
                freed += num_blocks * kv.block_bytes
                kv = self._books.kv_of(model)
        return freed

    def _clear_one(
        self, model: ModelId, kv: KvView, *, may_preempt: bool, keeps_floor: bool = False
    ) -> Orders:
        """Have a model give back one extent; return its blocks, or 0 if it can give back none.

        What a busy model will fill next it keeps, as long as nobody has to be preempted for it: two that are
        full would take the same blocks from each other over and over. Running requests lose only what the
        model has beyond its promise. `keeps_floor`: so does whatever is free or cached.
        """
        num_spare = kv.num_blocks if may_preempt else kv.num_available - kv.reserve_blocks
        for extent in self._books.extents(model):
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
