"""When a model on a worker gets memory, and whether others give way for it. Pure: yields `reclaim_orders.py`.

Models are promised no more than there is, so a promise can always be kept: memory beyond it is lent. A paused
model is promised nothing. Sampler tables are lent too; if the pool has no room for one it lies outside, which
is counted.

Adapters are promised nothing, and never get KV that a model is owed. Adapters in use cannot give way at once:
while they keep a model from its promise `is_short` is set, and no other is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hearth.core.types import AdapterId, ModelId
from hearth.policy.batch.elastic import Elastic, KvUse
from hearth.policy.memory.adapter_residency import AdapterResidency
from hearth.policy.memory.device_eviction import DeviceEviction, ModelBooks
from hearth.policy.memory.reclaim_orders import (
    AskForKv,
    ClearKv,
    DropAdapter,
    DropTable,
    GrowKv,
    Orders,
    PlaceAdapter,
    PlaceTable,
    SpillTable,
    TakeWeights,
)

#: How often freed memory may turn out useless before a model gives up what it is not promised.
MAX_USELESS = 2


class FutileTries:
    """Which models found no memory, and in which generation. Mutable; written by the `ReclaimPolicy`."""

    def __init__(self) -> None:
        self._generation_by_model: dict[ModelId, int] = {}

    def __bool__(self) -> bool:
        return bool(self._generation_by_model)

    def note(self, model: ModelId, generation: int) -> None:
        self._generation_by_model[model] = generation

    def is_known(self, model: ModelId, generation: int) -> bool:
        return self._generation_by_model.get(model) == generation

    def outdated(self, generation: int) -> list[ModelId]:
        return [model for model, then in self._generation_by_model.items() if then != generation]

    def forget(self, model: ModelId) -> None:
        self._generation_by_model.pop(model, None)


class ReclaimPolicy:
    """Mutable; one thread calls it and carries out its orders."""

    def __init__(
        self, books: ModelBooks, *, keeps_addresses: bool, adapters: AdapterResidency | None = None
    ) -> None:
        """`keeps_addresses`: the pool maps pages, so any free memory fits anywhere."""
        self._books, self._keeps_addresses, self._adapters = books, keeps_addresses, adapters
        self._order = DeviceEviction(books, keeps_addresses, adapters)
        #: Counts what may have freed memory: KV or tables given back, requests that ended, lower holds.
        self.generation = 0
        self.placing: ModelId | None = None
        #: Tries to grow that found no free memory, and those for which none could be freed. Promised memory
        #: is tried all the same.
        self._without_free = FutileTries()
        self._refused = FutileTries()
        #: By model that asked for blocks ahead: the generation, its blocks then, and how many more.
        self._asked_ahead: dict[ModelId, tuple[int, int, int]] = {}
        #: Models without a place because one that is being loaded is in the way.
        self._deferred = FutileTries()
        #: Models that wait for their turn and could not be prefetched.
        self._early = FutileTries()
        #: Models that did not get all of their promised KV when they last asked.
        self._owed: set[ModelId] = set()

    @property
    def is_short(self) -> bool:
        return bool(self._deferred) or any(map(self._is_owed, self._owed))

    def _is_owed(self, model: ModelId) -> bool:
        """True if a model still waits for promised KV.

        One that lacks an adapter does not count: the adapter must not wait for it.
        """
        if model not in self._books.models():
            return False
        if self._adapters is not None and self._adapters.lacking(model):
            return False
        kv = self._books.kv_of(model)
        return kv.has_work and kv.num_blocks < kv.floor_blocks

    def note_freed(self) -> None:
        self.generation += 1

    def _free(
        self, num_bytes: int, *, may_preempt: bool, beside: ModelId | None = None, keeps_floor: bool = False
    ) -> Orders:
        freed = yield from self._order.free(
            num_bytes, may_preempt=may_preempt, beside=beside, keeps_floor=keeps_floor
        )
        if freed:
            self.note_freed()  # it may be more than this model uses
        return freed

    def forget(self, model: ModelId) -> None:
        self._without_free.forget(model)
        self._refused.forget(model)
        self._asked_ahead.pop(model, None)
        self._deferred.forget(model)
        self._early.forget(model)
        self._owed.discard(model)

    # Weights.

    def make_room(self, model: ModelId, missing_bytes: Callable[[], int]) -> Orders:
        """Free memory until a model can be placed, which is promised.

        `missing_bytes` returns how much must still be freed. Returns the last such number: 0 on success.
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
        """Take weights with a lower reload cost than those of a model that waits for its turn.

        Nothing is promised yet, so KV and more expensive weights stay. Returns how many bytes came free.
        """
        if self._early.is_known(model, self.generation):
            return 0
        self.placing, freed = model, 0
        try:
            freed += yield from self._order.free_adapters(num_bytes)
            if freed < num_bytes:
                freed += yield TakeWeights(num_bytes - freed, cost_s_per_byte)
        finally:
            self.placing = None
        if freed < num_bytes:
            self._early.note(model, self.generation)
        return freed

    def defer(self, model: ModelId, *, is_any_loading: bool) -> bool:
        """Note that a model found no place; False if it never will."""
        if not is_any_loading:
            return False
        self._deferred.note(model, self.generation)
        return True

    def deferred(self) -> list[ModelId]:
        return self._deferred.outdated(self.generation)

    def stop_deferring(self, model: ModelId) -> None:
        self._deferred.forget(model)

    # KV.

    def take(self, model: ModelId, num_blocks: int, needed_blocks: int, *, is_promised: bool) -> Orders:
        """Give a stage KV before its next step; return how many blocks it got.

        `needed_blocks`: for so many of them others give way.
        """
        num_got = yield GrowKv(model, num_blocks, 0)
        num_short = needed_blocks - num_got
        if num_short > 0 and (is_promised or not self._refused.is_known(model, self.generation)):
            num_more = yield from self._grow_by_force(model, num_short, 0, is_promised=is_promised)
            num_got += num_more
            if num_more < num_short:
                self._refused.note(model, self.generation)
        return num_got

    def give_back(self, model: ModelId, num_blocks: int, *, may_preempt: bool) -> Orders:
        """Take blocks of the first stage of a pipeline until it has `num_blocks`, for another stage."""
        kv, num_given = self._books.kv_of(model), 0
        if not may_preempt:
            num_spare = max(0, kv.num_available - kv.reserve_blocks)
            num_blocks = max(num_blocks, kv.num_blocks - num_spare)
        for preempts in (False, True) if may_preempt else (False,):
            while num_taken := (
                yield from self._give_tail(model, kv.num_blocks - num_blocks - num_given, preempts)
            ):
                num_given += num_taken
        self.note_freed()
        return num_given

    def _give_tail(self, model: ModelId, most_blocks: int, may_preempt: bool) -> Orders:
        """Take one extent, or up to `most_blocks` of it; return how many blocks, or 0 if none can go."""
        for extent in self._books.extents(model) if most_blocks > 0 else ():
            tail = extent[-most_blocks:]
            if num_taken := (yield ClearKv(model, tail, may_preempt, keeps_floor=True, may_forget=True)):
                return num_taken
        return 0

    def before_step(self, model: ModelId, elastic: Elastic, use: KvUse) -> Orders:
        """Give a model the tables and, as far as possible, the KV that its next step wants.

        Returns how many blocks it got.
        """
        yield from self._place_tables(model)
        self._owed.discard(model)
        growth = elastic.growth(use)
        asked = (self.generation, use.num_blocks, growth.ahead_blocks)
        if not growth.now_blocks and (not growth.ahead_blocks or self._asked_ahead.get(model) == asked):
            return 0
        self._asked_ahead[model] = asked
        kv = self._books.kv_of(model)
        wanted_blocks = kv.num_blocks + growth.now_blocks + growth.ahead_blocks
        is_refused = self._refused.is_known(model, self.generation)
        if kv.max_blocks < min(wanted_blocks, kv.shared_max_blocks) and not is_refused:
            needed_blocks = kv.num_blocks + growth.now_blocks - self._books.cached_to_spare(model)
            yield AskForKv(model, min(wanted_blocks + kv.reserve_blocks, kv.shared_max_blocks), needed_blocks)
        wanted, growth = growth.now_blocks, growth.within(kv.max_blocks - kv.num_blocks)
        short, ahead = growth.now_blocks, growth.ahead_blocks
        if (short or ahead) and not self._without_free.is_known(model, self.generation):
            short -= yield GrowKv(model, short, ahead)
        if short > 0:
            self._without_free.note(model, self.generation)
            # Its own cached blocks are reused before others give way, first for blocks beyond its ceiling.
            short = min(short, wanted - (growth.now_blocks - short) - self._books.cached_to_spare(model))
            if short > 0 and not self._refused.is_known(model, self.generation):
                short -= yield from self._grow_by_force(model, short, ahead, is_promised=False)
            promised = min(short, kv.floor_blocks - self._books.kv_of(model).num_blocks)
            if promised > 0 and promised * kv.block_bytes <= self._books.returning_bytes():
                # Waiting for what stages do not use costs less than preempting requests.
                self._owed.add(model)
            elif promised > 0:
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
        """Take back KV that a model has not used for long, or does not use now that it is idle.

        `has_let_go`: requests of the model ended in the step or were preempted for it.
        """
        num_surplus = elastic.surplus_blocks(use) if has_work else use.num_free
        num_given = (yield from self._give_back(model, num_surplus)) if num_surplus > 0 else 0
        if num_given or has_let_go or not has_work:
            self.note_freed()
        return num_given

    def _give_back(self, model: ModelId, num_blocks: int) -> Orders:
        """Take back up to `num_blocks`, none of them cached."""
        num_given = 0
        while extents := tuple(self._books.extents(model)):
            for extent in extents:
                if len(extent) <= num_blocks - num_given:
                    num_given += yield ClearKv(
                        model, extent, may_preempt=False, keeps_floor=True, may_forget=False
                    )
            if extents == tuple(self._books.extents(model)):
                break  # else a further extent may be available now
        return num_given

    def _grow_by_force(
        self, model: ModelId, num_blocks: int, ahead_blocks: int, *, is_promised: bool
    ) -> Orders:
        """Free memory until a model has `num_blocks` more, or no more can be freed; return how many it got.

        Frees `ahead_blocks` too. Growth that is not promised ends after `MAX_USELESS` useless tries.
        """
        block_bytes = self._books.kv_of(model).block_bytes
        num_given = num_useless = 0
        while num_given < num_blocks and (is_promised or num_useless < MAX_USELESS):
            num_wanted = num_blocks - num_given
            num_bytes = (num_wanted + ahead_blocks) * block_bytes
            if not (yield from self._free(num_bytes, may_preempt=is_promised, beside=model)):
                break
            num_got = yield GrowKv(model, num_wanted, ahead_blocks)
            if not num_got and self._keeps_addresses:  # any page fits, so there are too few
                break
            num_given += num_got
            num_useless = 0 if num_got else num_useless + 1
        return num_given

    # Tables.

    def _place_tables(self, model: ModelId) -> Orders:
        """Place the tables that a model's requests need; return how many bytes of the pool they take.

        No request is preempted for a table. Without room in the pool it is placed elsewhere.
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
        freed = 0
        while freed < num_bytes:
            kv = self._books.kv_of(model)
            clearing = self._order.clear_one(model, kv, may_preempt=False, keeps_floor=True)
            if not (num_blocks := (yield from clearing)):
                break
            freed += num_blocks * kv.block_bytes
        if freed < num_bytes:
            freed += yield from self._free(num_bytes - freed, may_preempt=False, beside=model)
        return freed

    def drop_tables(self, model: ModelId) -> Orders:
        """Take back the tables that no request of a model needs; return how many bytes came free."""
        freed = 0
        tables = self._books.tables_of(model)
        for table in tables.pooled:
            if table not in tables.needed:
                freed += yield DropTable(model, table)
        if freed:
            self.note_freed()
        return freed

    # Adapters.

    def place_adapter(self, adapter: AdapterId, sizes: Sequence[int], *, may_take: bool) -> Orders:
        """Place an adapter; returns its bytes, or 0: no room. `may_take`: free memory for it.

        KV that models are owed is left to them.
        """

        def place() -> PlaceAdapter:
            return PlaceAdapter(adapter, tuple(sizes), self.owed_bytes())

        num_bytes = sum(sizes)
        got_bytes = yield place()
        if got_bytes or not may_take:
            return got_bytes
        if (yield from self._order.free_kv(num_bytes, None, may_preempt=False, keeps_floor=True)):
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
        self.note_freed()
        return got_bytes

    def owed_bytes(self) -> int:
        views = {model: self._books.kv_of(model) for model in self._books.models()}
        missing = {model: kv.floor_blocks - kv.num_blocks for model, kv in views.items()}
        return sum(self._books.growth_bytes(model, blocks) for model, blocks in missing.items() if blocks > 0)
