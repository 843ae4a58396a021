"""A pool, with KV and tables of models and adapters, as plain numbers: what a `ReclaimPolicy` decides about.

Every order is checked when it is carried out: nobody gives way before all who come first have nothing left.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hearth.core.types import AdapterId, Hold, ModelId, SamplingTable
from hearth.policy.batch.elastic import Elastic, KvUse
from hearth.policy.memory.adapter_residency import AdapterResidency
from hearth.policy.memory.byte_eviction import TAKEABLE
from hearth.policy.memory.device_eviction import KvView, TablesView
from hearth.policy.memory.reclaim import ReclaimPolicy
from hearth.policy.memory.reclaim_orders import (
    AskForKv,
    AskKvBack,
    ClearKv,
    DropAdapter,
    DropTable,
    GrowKv,
    Orders,
    PlaceAdapter,
    PlaceTable,
    ReclaimOrder,
    SpillTable,
    TakeWeights,
    TakeWorkspaces,
    carry_out,
)

EXTENT_BLOCKS = 2  #: KV comes and goes by so many
BLOCK_TOKENS = 8


@dataclass(slots=True)
class SimulatedModel:
    """Mutable; written by the pool and by tests."""

    weights_bytes: int
    block_bytes: int
    floor_blocks: int
    max_blocks: int
    hold: Hold = Hold.WARM  #: while it has no requests
    is_hosted: bool = False
    has_turn: bool = True
    due_in_s: float = 0.0
    there_bytes: int = 0  #: of its weights
    num_blocks: int = 0
    num_cached: int = 0
    #: Blocks of each running request, the oldest first.
    running: list[int] = field(default_factory=list)
    num_waiting: int = 0
    #: Bytes of the tables that requests need, and of those that lie in the pool.
    needed: dict[SamplingTable, int] = field(default_factory=dict)
    pooled: dict[SamplingTable, int] = field(default_factory=dict)
    spilled: set[SamplingTable] = field(default_factory=set)
    elastic: Elastic = field(default_factory=lambda: Elastic(BLOCK_TOKENS))
    shared_max_blocks: int = 0  #: of the first stage of a pipeline
    is_later_stage: bool = False
    gives_back: bool = False  #: a later stage whose first member will give back what it is asked for

    @property
    def promise_bytes(self) -> int:
        return self.weights_bytes + self.floor_blocks * self.block_bytes

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.num_waiting)

    @property
    def used_bytes(self) -> int:
        return self.there_bytes + self.num_blocks * self.block_bytes + sum(self.pooled.values())

    @property
    def effective_hold(self) -> Hold:
        if not self.is_hosted:
            return Hold.RETAINED
        if not self.has_work or (self.has_turn and self.hold is Hold.PINNED):
            return self.hold
        return Hold.BUSY if self.has_turn else Hold.PAUSED

    @property
    def is_paused(self) -> bool:
        return self.effective_hold is Hold.PAUSED

    @property
    def promised_blocks(self) -> int:
        return 0 if self.is_paused else self.floor_blocks

    @property
    def num_live(self) -> int:
        return sum(self.running)

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_live - self.num_cached

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_cached

    @property
    def reserve_blocks(self) -> int:
        return 0 if self.is_paused else self.elastic.reserve_blocks(len(self.running))

    def use(self, num_wanted: int) -> KvUse:
        return KvUse(self.num_blocks, self.num_live, self.num_cached, num_wanted, len(self.running))

    def check(self) -> None:
        assert 0 <= self.num_free <= self.num_blocks <= self.max_blocks, f"{self}"
        assert self.num_cached >= 0, f"{self}"
        assert 0 <= self.there_bytes <= self.weights_bytes, f"{self}"
        assert not self.pooled.keys() & self.spilled, f"{self}"


@dataclass(slots=True)
class SimulatedPool:
    """Mutable. `ModelBooks` for the policy, and whoever carries its orders out."""

    budget_bytes: int
    models_by_id: dict[ModelId, SimulatedModel]
    keeps_addresses: bool = True
    #: Times that free memory of an arena is in pieces which are too small.
    num_useless: int = 0
    orders: list[ReclaimOrder] = field(default_factory=list)  #: all that were carried out
    num_preempted: int = 0
    needed_bytes: int = 0  #: what the model that room is made for is promised, and has not got
    stepping: ModelId | None = None  #: the model that KV or a table is wanted for
    adapter_bytes: dict[AdapterId, int] = field(default_factory=dict)  #: of those that are there
    num_asked: int = 0  #: requests for adapters
    placing_adapter: bool = False  #: room is being made for one, which gets none that is promised
    adapters: AdapterResidency = field(init=False)
    policy: ReclaimPolicy = field(init=False)

    def __post_init__(self) -> None:
        self.adapters = AdapterResidency(
            lambda adapter: float(len(adapter)), lambda base: True, lambda: self.policy.is_short
        )
        self.policy = ReclaimPolicy(self, keeps_addresses=self.keeps_addresses, adapters=self.adapters)

    @property
    def free_bytes(self) -> int:
        used_bytes = sum(one.used_bytes for one in self.models_by_id.values())
        return self.budget_bytes - used_bytes - sum(self.adapter_bytes.values())

    def bring_adapter(
        self, adapter: AdapterId, num_bytes: int, *, may_take: bool = True, is_pinned: bool = False
    ) -> int | None:
        """Have an adapter come for a request; return that, or None: there is no room, and it has ended."""
        self.num_asked += 1
        run = self.num_asked
        self.adapters.asked(adapter, run, ModelId("base"), float(run), is_pinned=is_pinned)
        if adapter not in self.adapter_bytes:
            self.needed_bytes, self.placing_adapter = num_bytes + self._owed_bytes(), True
            got_bytes = self.run(self.policy.place_adapter(adapter, [num_bytes], may_take=may_take))
            self.placing_adapter = False
            if not got_bytes:
                self.adapters.ended(run)
                return None
            self.adapters.placed(adapter, num_bytes)
            self.adapters.loaded(adapter)
        self.adapters.started(run)
        return run

    def run(self, orders: Orders) -> int:
        self.orders.clear()
        return carry_out(orders, self._act)

    def place(self, model: ModelId) -> int:
        """Have all weights of a hosted model there; returns how many bytes could not be had."""
        one = self.models_by_id[model]
        self.needed_bytes = self._missing_bytes(one)
        missing_bytes = self.run(
            self.policy.make_room(model, lambda: max(0, self._missing_bytes(one) - self.free_bytes))
        )
        if not missing_bytes:
            one.there_bytes = one.weights_bytes
        return missing_bytes

    def before_step(self, model: ModelId, num_wanted: int) -> int:
        one = self.models_by_id[model]
        self.needed_bytes = max(0, one.floor_blocks - one.num_blocks) * one.block_bytes
        self.stepping = model
        num_got = self.run(self.policy.before_step(model, one.elastic, one.use(num_wanted)))
        self.stepping = None
        return num_got

    def after_step(self, model: ModelId, *, has_let_go: bool = False) -> int:
        one = self.models_by_id[model]
        orders = self.policy.after_step(
            model, one.elastic, one.use(0), has_work=one.has_work, has_let_go=has_let_go
        )
        num_given = self.run(orders)
        self.drop_tables(model)
        return num_given

    def drop_tables(self, model: ModelId) -> int:
        """The engine lets go of tables that nobody needs by itself, so those outside are gone."""
        one = self.models_by_id[model]
        one.spilled &= one.needed.keys()
        return carry_out(self.policy.drop_tables(model), self._act)

    def check(self) -> None:
        assert self.free_bytes >= 0, f"{self}"
        for one in self.models_by_id.values():
            one.check()

    # What the policy reads.

    def models(self) -> list[ModelId]:
        hosted = self.models_by_id.items()
        return [model for model, one in hosted if one.is_hosted and not one.is_later_stage]

    def kv_of(self, model: ModelId) -> KvView:
        one = self.models_by_id[model]
        return KvView(
            hold=one.effective_hold,
            has_work=one.has_work,
            block_bytes=one.block_bytes,
            floor_blocks=one.promised_blocks,
            max_blocks=one.max_blocks,
            num_blocks=one.num_blocks,
            num_available=one.num_available,
            reserve_blocks=one.reserve_blocks,
            due_in_s=one.due_in_s,
            shared_max_blocks=one.shared_max_blocks,
        )

    def later_stages(self) -> list[ModelId]:
        return [model for model, one in self.models_by_id.items() if one.is_later_stage]

    def returning_bytes(self) -> int:
        asked = {one.model: one for one in self.orders if isinstance(one, AskKvBack) and not one.is_promised}
        given = [(self.models_by_id[model], one) for model, one in asked.items()]
        return sum((to.num_blocks - one.num_blocks) * to.block_bytes for to, one in given if to.gives_back)

    def extents(self, model: ModelId) -> list[range]:
        """The last one, as with mapped pages; all of them on an arena."""
        num_blocks = self.models_by_id[model].num_blocks
        starts = range(0, num_blocks, EXTENT_BLOCKS)
        extents = [range(start, start + EXTENT_BLOCKS) for start in starts]
        return extents[-1:] if self.keeps_addresses else extents

    def growth_bytes(self, model: ModelId, num_blocks: int) -> int:
        return num_blocks * self.models_by_id[model].block_bytes

    def cached_to_spare(self, model: ModelId) -> int:
        return self.models_by_id[model].num_cached

    def tables_of(self, model: ModelId) -> TablesView:
        one = self.models_by_id[model]
        return TablesView(dict(one.needed), dict(one.pooled), set(one.spilled))

    # What it orders.

    def _act(self, order: ReclaimOrder) -> int:
        self.orders.append(order)
        match order:
            case GrowKv(model, num_blocks):
                brought = self._grow(self.models_by_id[model], num_blocks)
            case ClearKv(model):
                brought = self._clear(self.models_by_id[model], order)
            case AskForKv() | AskKvBack():
                brought = 0
            case TakeWeights():
                brought = self._take(order)
            case TakeWorkspaces():
                assert not self.keeps_addresses, f"{order} where models share one workspace"
                assert not self._takeable(), f"{order} before weights that may go"
                brought = 0
            case PlaceTable(model, table, num_bytes):
                brought = self._place_table(self.models_by_id[model], table, num_bytes)
            case SpillTable(model, table):
                brought = self._spill_table(model, table)
            case DropTable(model, table):
                assert table not in self.models_by_id[model].needed, f"{order} takes what requests need"
                brought = self.models_by_id[model].pooled.pop(table)
            case PlaceAdapter(adapter, (num_bytes,), owed_bytes):
                assert owed_bytes == self._owed_bytes(), f"{order} forgets what models are owed"
                is_there = self.free_bytes >= num_bytes + owed_bytes
                brought = num_bytes if is_there else 0
                self.adapter_bytes |= {adapter: num_bytes} if is_there else {}
            case DropAdapter(adapter):
                assert not self._idle_kv(), f"{order} before KV that nobody reads: {self._idle_kv()}"
                brought = self.adapter_bytes.pop(adapter)
                self.adapters.left(adapter)
        self.check()
        return brought

    def _grow(self, one: SimulatedModel, num_blocks: int) -> int:
        if self.num_useless and not self.keeps_addresses:
            self.num_useless -= 1
            return 0
        num_got = 0
        while num_got < num_blocks and one.num_blocks + EXTENT_BLOCKS <= one.max_blocks:
            if self.free_bytes < EXTENT_BLOCKS * one.block_bytes:
                break
            one.num_blocks += EXTENT_BLOCKS
            num_got += EXTENT_BLOCKS
        return num_got

    def _clear(self, one: SimulatedModel, order: ClearKv) -> int:
        """Free blocks go first, then cached ones, as if blocks had moved."""
        num_blocks = len(order.extent)
        is_lent = one.num_blocks - num_blocks >= one.promised_blocks
        assert is_lent or not order.may_preempt or not one.has_work, f"{order} takes what is promised"
        assert order.keeps_floor or one.is_paused, f"{order} takes what is promised"
        num_more = num_blocks - one.num_free
        if num_more > 0 and not order.may_forget:
            return 0
        if num_more > one.num_cached:
            if not order.may_preempt:
                return 0
            self._check_nothing_else_is_left(order.model)
            self._check_paused_kv_goes_first(order.model)
            while one.num_available < num_blocks:
                one.running.pop()
                one.num_waiting += 1
                self.num_preempted += 1
        one.num_cached -= max(0, num_blocks - one.num_free)
        one.num_blocks -= num_blocks
        return num_blocks

    def _place_table(self, one: SimulatedModel, table: SamplingTable, num_bytes: int) -> int:
        assert table in one.needed, f"nobody needs {table}: {one}"
        assert one.pooled.pop(table, 0) < num_bytes, f"{table} is there already: {one}"
        assert table not in one.spilled, f"{table} is there already: {one}"
        if self.num_useless and not self.keeps_addresses:
            self.num_useless -= 1
            return 0
        if num_bytes > self.free_bytes:
            return 0
        one.pooled[table] = num_bytes
        return num_bytes

    def _spill_table(self, model: ModelId, table: SamplingTable) -> int:
        """For what is promised after all else; for a table that has no room once nobody can give way."""
        one = self.models_by_id[model]
        assert table not in one.spilled, f"{table} is outside already: {one}"
        if table in one.pooled:
            self._check_nothing_else_is_left(model)
            assert not self._lent(), f"`{model}` gives way before KV beyond a promise: {self._lent()}"
        elif self.keeps_addresses:
            assert self.free_bytes < one.needed[table], f"{table} has room: {one}"
            assert not self._takeable(), f"{table} is outside, and weights that may go are not"
            assert not self._idle_kv(), f"{table} is outside, and KV that nobody reads is not"
        one.spilled.add(table)
        return one.pooled.pop(table, 0)

    def _lent(self) -> list[ModelId]:
        """Models with KV beyond their promise, beside the one that grows."""
        return [
            model
            for model, one in self.models_by_id.items()
            if model != self.stepping
            and one.is_hosted
            and one.num_blocks >= EXTENT_BLOCKS
            and (not one.has_work or one.num_blocks - EXTENT_BLOCKS >= one.promised_blocks)
        ]

    def _take(self, order: TakeWeights) -> int:
        assert not self._idle_kv(), f"{order} before KV that nobody reads: {self._idle_kv()}"
        assert not self.adapters.idle(), f"{order} before idle adapters: {self.adapters.idle()}"
        num_left = order.num_bytes
        for one in self._takeable():
            taken = min(num_left, one.there_bytes)
            one.there_bytes -= taken
            num_left -= taken
        return order.num_bytes - num_left

    def _check_nothing_else_is_left(self, victim: ModelId) -> None:
        """Before a running request is preempted."""
        spare_bytes = EXTENT_BLOCKS * max(one.block_bytes for one in self.models_by_id.values())
        assert self.free_bytes < self.needed_bytes + spare_bytes, f"`{victim}` gives way beyond need"
        assert not self._takeable(), f"`{victim}` gives way before weights that may go"
        assert not self._idle_kv(), f"`{victim}` gives way before KV that nobody reads"
        assert not self.adapters.idle(), f"`{victim}` gives way before idle adapters"

    def _check_paused_kv_goes_first(self, victim: ModelId) -> None:
        """Before a request loses its KV: none of a paused model is left that is due later."""
        one = self.models_by_id[victim]
        for model, other in self.models_by_id.items():
            is_later = other.is_paused and (not one.is_paused or other.due_in_s > one.due_in_s)
            if is_later and model != self.stepping:
                assert other.num_blocks < EXTENT_BLOCKS, f"`{victim}` gives way before `{model}`"

    def _takeable(self) -> list[SimulatedModel]:
        """Return the models that have weights which may go, those that are held least first."""
        takeable = [
            one
            for model, one in self.models_by_id.items()
            if one.there_bytes and one.effective_hold in TAKEABLE and model != self.policy.placing
        ]
        return sorted(takeable, key=lambda one: one.effective_hold)

    def _idle_kv(self) -> list[ModelId]:
        """Models that could give back an extent without anybody noticing, beside the one that grows."""
        return [
            model
            for model, one in self.models_by_id.items()
            if model != self.stepping
            and one.is_hosted
            and not one.is_later_stage
            and one.num_blocks >= EXTENT_BLOCKS + (one.promised_blocks if self.placing_adapter else 0)
            and one.num_available - one.reserve_blocks >= EXTENT_BLOCKS
        ]

    def _owed_bytes(self) -> int:
        """Bytes of KV that models are promised and have not got."""
        hosted = [one for one in self.models_by_id.values() if one.is_hosted]
        return sum(max(0, one.promised_blocks - one.num_blocks) * one.block_bytes for one in hosted)

    @staticmethod
    def _missing_bytes(one: SimulatedModel) -> int:
        return one.weights_bytes - one.there_bytes
