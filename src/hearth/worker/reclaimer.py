"""Executes the orders of `policy/memory/reclaim.py` between steps. Decides nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

import msgspec

from hearth.core.errors import DeviceError
from hearth.core.types import AdapterId, Hold, ModelId, SamplingTable
from hearth.engine.engine import Engine, StepOutcome
from hearth.engine.stage_messages import KvMessage, StageKvGrowth, StageKvKept, StageKvReturn
from hearth.memory.pool import EvictionTerms, EvictionTermsOf, Pool, Space
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
from hearth.policy.memory.reload_cost import DeviceReloadCosts
from hearth.policy.memory.stage_kv import FirstKv, LaterKv
from hearth.worker.adapter_pieces import AdapterPieces
from hearth.worker.failure import blaming
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosting_spec import HostingSpec
from hearth.worker.hosting_state import ServedModel
from hearth.worker.stage_member import StageMember

log = logging.getLogger(__name__)


class HostedBooks:
    def __init__(
        self, hosted: Mapping[ModelId, HostedModel], pool: Pool, due_in_s: Callable[[ModelId], float]
    ) -> None:
        self._hosted, self._pool, self._due_in_s = hosted, pool, due_in_s

    def models(self) -> list[ModelId]:
        """Return the models whose KV and tables may change, but for later stages of pipelines."""
        hosted = self._hosted.items()
        return [model for model, one in hosted if one.takes_requests and one.later_stage is None]

    def later_stages(self) -> list[ModelId]:
        hosted = self._hosted.items()
        return [model for model, one in hosted if one.later_stage is not None and one.later_stage.is_started]

    def returning_bytes(self) -> int:
        num_bytes = 0
        for model in self.later_stages():
            kv, member = self.kv_of(model), self._hosted[model].member
            if member is not None and isinstance(member.kv, LaterKv):
                num_bytes += member.kv.num_returning(kv.num_blocks) * kv.block_bytes
        return num_bytes

    def kv_of(self, model: ModelId) -> KvView:
        served = self.served(model)
        engine, spec, blocks = served.engine, served.spec, served.engine.batcher.blocks
        hold = self._hosted[model].effective_hold
        is_paused, member = hold is Hold.PAUSED, self._hosted[model].member
        max_blocks = spec.shape.max_blocks - 1  # without the sink
        return KvView(
            hold=hold,
            has_work=engine.has_work,
            block_bytes=spec.shape.block_bytes,
            floor_blocks=0 if is_paused else spec.floor_blocks,
            max_blocks=max_blocks if member is None else member.kv.max_blocks,
            num_blocks=blocks.num_blocks,
            num_available=blocks.num_available,
            reserve_blocks=0 if is_paused else engine.elastic.reserve_blocks(engine.batcher.num_running),
            due_in_s=self._due_in_s(model) if is_paused else 0.0,
            shared_max_blocks=max_blocks if member is not None and member.is_first else 0,
        )

    def growth_bytes(self, model: ModelId, num_blocks: int) -> int:
        return self._pool.kv.growth_bytes(model, num_blocks)

    def extents(self, model: ModelId) -> list[range]:
        return self._pool.kv.extents(model)

    def cached_to_spare(self, model: ModelId) -> int:
        return self.served(model).engine.batcher.kv.cached_to_spare()

    def tables_of(self, model: ModelId) -> TablesView:
        served = self.served(model)
        tables, pooled = served.engine.tables, dict(served.pooled_tables)
        needed = tables.needed_bytes()
        return TablesView(
            needed, pooled, [table for table in needed if table not in pooled and tables.has(table)]
        )

    def served(self, model: ModelId) -> ServedModel:
        served = self._hosted[model].served
        assert served is not None, f"`{model}` has no engine: {self._hosted[model].state}"
        return served


class Reclaimer:
    """The memory of all models and adapters. Mutable; the step thread alone calls it."""

    def __init__(
        self,
        new_pool: Callable[[EvictionTermsOf], Pool],
        hosted: Mapping[ModelId, HostedModel],
        due_in_s: Callable[[ModelId], float],
        engines: Callable[[], Mapping[ModelId, Engine]] = dict,
    ) -> None:
        """`hosted` is owned by the caller. `engines` returns those of retired models, too."""
        self.pool = new_pool(self.eviction_terms)
        self.adapters = AdapterResidency(
            lambda adapter: self.reload_costs.adapter_cost_per_byte(adapter, time.monotonic()),
            self._is_active,
            lambda: self.policy.is_short,
            self._is_whole,
        )
        self.pieces = AdapterPieces(self.pool, self.adapters, engines)
        self._books = HostedBooks(hosted, self.pool, due_in_s)
        self.policy = ReclaimPolicy(
            self._books, keeps_addresses=self.pool.keeps_addresses, adapters=self.adapters
        )
        self.reload_costs = DeviceReloadCosts()
        self._hosted, self._due_in_s = hosted, due_in_s
        self.num_spilled_tables = 0  #: tables that did not fit the pool, so far
        self.num_dropped_adapters = 0  #: adapters evicted, so far

    def eviction_terms(self, model: ModelId) -> EvictionTerms:
        """Return how the pool treats a model's weights. A model that is not hosted is retained.

        The weights of a paused model are certain to be used, so their cost depends on the time until then.
        """
        hosted = self._hosted.get(model)
        hold, is_loading, is_computing = Hold.RETAINED, False, False
        if hosted is not None:
            hold, is_loading, is_computing = hosted.effective_hold, hosted.is_loading, hosted.is_computing
        if model == self.policy.placing:
            hold, is_loading = Hold.BUSY, False
        if hold is Hold.PAUSED:
            cost_s_per_byte = self.reload_costs.paused_cost_s_per_byte(model, self._due_in_s(model))
        else:
            cost_s_per_byte = self.reload_costs.cost_s_per_byte(model, time.monotonic())
        return EvictionTerms(hold, cost_s_per_byte, is_loading, is_computing)

    # Weights.

    def place(self, model: ModelId, spec: HostingSpec) -> Space:
        """Return a place for all weights of a model. Raises DeviceError if its promise cannot be kept."""
        missing_bytes = self._run(self.policy.make_room(model, lambda: self._missing_bytes(model, spec)))
        if missing_bytes:
            raise DeviceError(self._shortage(model, spec, missing_bytes))
        space = self.pool.place(model, spec.shape)
        self._follow_moves()
        return space

    def _missing_bytes(self, model: ModelId, spec: HostingSpec) -> int:
        """Return the bytes to free before a model is placed: promised KV must fit beside adapters in use."""
        shape = spec.shape
        missing_bytes = self.pool.missing_bytes(model, shape)
        if self.adapters.last_in_use() is None:
            return missing_bytes
        need_bytes = max(0, shape.stored.own_bytes - self.pool.resident_bytes(model))
        need_bytes += self.policy.owed_bytes() + self._unassembled_bytes()
        return max(missing_bytes, need_bytes - self.pool.free_bytes)

    def place_front(
        self, model: ModelId, spec: HostingSpec, front_bytes: Callable[[int, int], int]
    ) -> Space | None:
        """Return a place for the first missing weights of a model before its turn; None: there is no room.

        Only cheaper weights are evicted. `front_bytes(missing, free)` says how many bytes to place.
        """
        missing_bytes = spec.shape.stored.own_bytes - self.pool.resident_bytes(model)
        lack_bytes = front_bytes(missing_bytes, missing_bytes) - self.pool.free_bytes
        if lack_bytes > 0:
            cost_s_per_byte = self.reload_costs.paused_cost_s_per_byte(model, self._due_in_s(model))
            self._run(self.policy.make_room_early(model, lack_bytes, cost_s_per_byte))
        num_bytes = front_bytes(missing_bytes, self.pool.free_bytes)
        return self.pool.place_front(model, spec.shape, num_bytes) if num_bytes else None

    def retire(self, hosted: HostedModel) -> None:
        if (served := hosted.served) is not None:
            served.engine.batcher.kv.remove_all()
            served.pooled_tables.clear()
        self.pool.retire(hosted.model)
        self.policy.stop_deferring(hosted.model)
        self.policy.note_freed()

    def drop(self, model: ModelId) -> None:
        self.pool.drop(model)
        self.policy.forget(model)
        self.policy.note_freed()

    # KV.

    def take_floor(self, model: ModelId) -> None:
        """Take all KV that a model is promised. Raises DeviceError if the promise cannot be kept."""
        served = self._books.served(model)
        num_blocks = served.spec.floor_blocks - served.engine.batcher.blocks.num_blocks
        if self._run(self.policy.take(model, num_blocks, num_blocks, is_promised=True)) < num_blocks:
            raise self.kv_shortage(model, served)

    @property
    def is_any_returning(self) -> bool:
        """True if memory may come back from a stage, whose first member was asked."""
        members = (one.member for one in self._hosted.values())
        return any(isinstance(one.kv, LaterKv) and one.kv.is_waiting for one in members if one is not None)

    def take_stage_kv(self, hosted: HostedModel, message: KvMessage) -> None:
        """Take what another member has told about KV, as in `policy/memory/stage_kv.py`.

        Raises ModelBroke if a model breaks by it: drop that one and take the same message again.
        """
        model, member, now_s = hosted.model, hosted.member, time.monotonic()
        assert member is not None, f"`{model}` is not in stages: {message}"
        blocks = self._books.served(model).engine.batcher.blocks
        match member.kv, message:
            case FirstKv() as kv, StageKvGrowth(num_blocks=num_blocks):
                kv.granted(num_blocks, now_s)
                self._take(model, kv.max_blocks, message.needed_blocks)
                if blocks.num_blocks < kv.max_blocks:  # its own pool has no more
                    kv.pause(now_s)
                self._tell_kept(model)
            case FirstKv() as kv, StageKvReturn(num_blocks=num_blocks, is_promised=is_promised):
                kv.return_asked(now_s)
                self._run(self.policy.give_back(model, num_blocks, may_preempt=is_promised))
                self._tell_kept(model)
            case LaterKv() as kv, StageKvGrowth(num_blocks=num_blocks):
                self._take(model, kv.wanted(num_blocks), message.needed_blocks)
                num_got = min(num_blocks, blocks.num_blocks)
                member.tell(msgspec.structs.replace(message, num_blocks=num_got))
            case LaterKv() as kv, StageKvKept(num_blocks=num_blocks):
                kv.kept(num_blocks, now_s)
                self._trim(model, member, num_blocks)
                member.tell(message)
            case _:
                member.tell(message)

    def make_kv_room(self, model: ModelId, num_blocks: int) -> None:
        """Have so many blocks available for a request that starts next, if there is memory for them."""
        num_lacking = num_blocks - self._books.kv_of(model).num_available
        if num_lacking > 0:
            self._run(self.policy.take(model, num_lacking, num_lacking, is_promised=False))

    def _take(self, model: ModelId, num_blocks: int, needed_blocks: int) -> None:
        own_blocks = self._books.kv_of(model).num_blocks
        if num_blocks > own_blocks:
            needed_blocks = min(num_blocks, needed_blocks) - own_blocks
            self._run(self.policy.take(model, num_blocks - own_blocks, needed_blocks, is_promised=False))

    def _trim(self, model: ModelId, stage: StageMember, num_blocks: int) -> None:
        """Free what a later stage has beyond `num_blocks`."""
        blocks = self._books.served(model).engine.batcher.blocks
        while (num_more := blocks.num_blocks - num_blocks) > 0:
            tail = self.pool.kv.extents(model)[0][-num_more:]
            stage.remove_blocks(tail)
            self.pool.kv.shrink(model, tail)
        self.policy.note_freed()

    def _tell_kept(self, model: ModelId) -> None:
        """Let later stages free what the first has given back."""
        member = self._hosted[model].member
        if member is not None and isinstance(member.kv, FirstKv):
            num_kept = member.kv.keep(self._books.served(model).engine.batcher.blocks.num_blocks)
            if num_kept is not None:
                member.tell(StageKvKept(member.pipeline, num_kept))

    def _ask(self, order: AskForKv | AskKvBack) -> int:
        member, now_s = self._hosted[order.model].member, time.monotonic()
        assert member is not None, f"a model that is not in stages: {order}"
        with blaming(order.model):
            match order, member.kv:
                case AskForKv(_, num_blocks, needed_blocks), FirstKv() as kv if kv.ask(num_blocks, now_s):
                    member.tell(StageKvGrowth(member.pipeline, num_blocks, needed_blocks))
                case AskKvBack(_, num_blocks, is_promised), LaterKv() as kv if kv.need(
                    num_blocks, now_s, is_promised=is_promised
                ):
                    member.tell(StageKvReturn(member.pipeline, num_blocks, is_promised))
        return 0

    def before_step(self, model: ModelId, served: ServedModel) -> None:
        self._run(self.policy.before_step(model, served.engine.elastic, served.engine.batcher.kv.use()))

    def after_step(self, model: ModelId, served: ServedModel, outcome: StepOutcome) -> None:
        """Take back KV that a model has not used for long, or that it does not need while idle."""
        engine = served.engine
        has_ended = bool(outcome.failures or outcome.outputs.finished)
        orders = self.policy.after_step(
            model,
            engine.elastic,
            engine.batcher.kv.use(),
            has_work=engine.has_work,
            has_let_go=has_ended or bool(outcome.preempted),
        )
        self._run(orders)
        self._run(self.policy.drop_tables(model))

    def request_cancelled(self, hosted: HostedModel) -> None:
        if hosted.served is not None:
            self._run(self.policy.drop_tables(hosted.model))
        self.policy.note_freed()

    # Adapters.

    def place_adapter(self, adapter: AdapterId, sizes: Sequence[int], *, may_take: bool) -> bool:
        """Give an adapter pieces of these sizes; False: there is no room.

        `may_take`: evict for it. Else it is a prefetch, and models without a place come first.
        """
        if not may_take and sum(sizes) + self._unplaced_bytes() > self.pool.free_bytes:
            return False
        return self._run(self.policy.place_adapter(adapter, sizes, may_take=may_take)) > 0

    def _is_active(self, model: ModelId) -> bool:
        hosted = self._hosted.get(model)
        return hosted is not None and hosted.takes_requests and hosted.has_turn

    def _is_whole(self, model: ModelId) -> bool:
        hosted = self._hosted.get(model)
        return hosted is not None and (hosted.is_loaded or hosted.is_loading)

    def _unassembled_bytes(self) -> int:
        hosted = self._hosted.values()
        return sum(one.order.kv_floor_bytes for one in hosted if one.has_turn and not one.takes_requests)

    def _unplaced_bytes(self) -> int:
        hosted = [one for one in self._hosted.values() if one.has_turn]
        unplaced = [one.order for one in hosted if not one.takes_requests and not one.is_loading]
        return sum(order.own_bytes + order.workspace_bytes for order in unplaced)

    # What it orders.

    def _run(self, orders: Orders) -> int:
        return carry_out(orders, self._act)

    def _act(self, order: ReclaimOrder) -> int:
        match order:
            case GrowKv(model, num_blocks, ahead_blocks):
                return self._grow(model, num_blocks, ahead_blocks)
            case ClearKv():
                return self._clear(order)
            case AskForKv() | AskKvBack():
                return self._ask(order)
            case TakeWeights() | TakeWorkspaces():
                return self._take_bytes(order)
            case PlaceTable(model, table, num_bytes):
                return self._place_table(model, table, num_bytes)
            case SpillTable(model, table):
                return self._spill_table(model, table)
            case DropTable(model, table):
                self.pool.tables.drop(model, table)
                return self._books.served(model).pooled_tables.pop(table)
            case PlaceAdapter():
                return self._place_adapter(order)
            case DropAdapter(adapter):
                self.num_dropped_adapters += 1
                return self.pieces.drop(adapter)
            case _:
                assert_never(order)

    def _place_adapter(self, order: PlaceAdapter) -> int:
        owed_bytes = order.owed_bytes + self._unassembled_bytes()
        is_placed = self.pieces.place(order.adapter, order.sizes, owed_bytes)
        self._follow_moves()
        return sum(order.sizes) if is_placed else 0

    def _place_table(self, model: ModelId, table: SamplingTable, num_bytes: int) -> int:
        if table in self._books.served(model).pooled_tables:  # too small by now
            self._lift_table(model, table)
        memory = self.pool.tables.place(model, table, num_bytes)
        self._follow_moves()
        if memory is None:
            return 0
        served = self._books.served(model)
        served.engine.runner.place_table(table, memory)
        served.pooled_tables[table] = num_bytes
        return num_bytes

    def _spill_table(self, model: ModelId, table: SamplingTable) -> int:
        self.num_spilled_tables += 1
        if self.num_spilled_tables == 1:
            log.warning("fallback tables=torch model=%s table=%s reason=no_room", model, table)
        return self._lift_table(model, table)

    def _lift_table(self, model: ModelId, table: SamplingTable) -> int:
        served = self._books.served(model)
        with blaming(model):
            served.engine.runner.place_table(table, None)
        num_bytes = served.pooled_tables.pop(table, 0)
        if num_bytes:
            self.pool.tables.drop(model, table)
        return num_bytes

    def _grow(self, model: ModelId, num_blocks: int, ahead_blocks: int) -> int:
        engine = self._books.served(model).engine
        max_blocks = 1 + self._books.kv_of(model).max_blocks  # with the sink
        extents = self.pool.kv.grow(model, num_blocks, ahead_blocks, max_blocks)
        self._follow_moves()
        for extent in extents:
            engine.add_blocks(extent)
        return sum(map(len, extents))

    def _clear(self, order: ClearKv) -> int:
        model, extent = order.model, order.extent
        engine = self._books.served(model).engine
        with blaming(model):
            if not order.may_forget and engine.batcher.blocks.cached.among(extent):
                return 0
            is_cleared = engine.clear(
                extent,
                may_move=self.pool.keeps_addresses,
                may_preempt=order.may_preempt,
                keeps_floor=order.keeps_floor,
            )
            if not is_cleared:
                return 0
            self.pool.kv.shrink(model, extent)
            self._tell_kept(model)
        return len(extent)

    def _take_bytes(self, order: TakeWeights | TakeWorkspaces) -> int:
        """Take memory of idle or paused models, which must be placed again before they can step."""
        match order:
            case TakeWeights(num_bytes, below_s_per_byte):
                freed = self.pool.take_weights(num_bytes, TAKEABLE[-1], below_s_per_byte)
            case TakeWorkspaces():
                freed = self.pool.take_workspaces(TAKEABLE[-1])
        # Also if nothing came free: shared weights are taken from one model and stay with the other.
        for model, hosted in self._hosted.items():
            if self.pool.is_incomplete(model):
                hosted.became_incomplete()
        return freed

    def _follow_moves(self) -> None:
        for model, places in self.pool.take_moved().items():
            with blaming(model):
                self._books.served(model).rebind(places)

    def _shortage(self, model: ModelId, spec: HostingSpec, lack_bytes: int) -> str:
        usage, shape = self.pool.usage(), spec.shape
        others = (one for one in usage.holdings if one.model != model)
        held = ", ".join(
            f"{one.model} {one.weights_bytes + one.kv_bytes + one.tables_bytes}" for one in others
        )
        return (
            f"`{model}` needs {shape.served.own_bytes} bytes for weights, {shape.workspace_bytes} for the "
            f"workspace and {shape.tables_bytes} for tables, {lack_bytes} more than can be freed of "
            f"{usage.budget_bytes}; other models have: {held or 'nothing'}; drop another model, or raise "
            "`service.memory_bytes`"
        )

    def kv_shortage(self, model: ModelId, served: ServedModel) -> DeviceError:
        use, spec, usage = served.engine.batcher.kv.use(), served.spec, self.pool.usage()
        return DeviceError(
            f"`{model}` has {use.num_blocks} blocks of KV of {spec.shape.block_bytes} bytes, wants "
            f"{use.num_wanted} and is promised {spec.floor_blocks} in all, but {usage.free_bytes} "
            f"of {usage.budget_bytes} bytes are free and no model can give way; drop another model, or raise "
            "`service.memory_bytes`"
        )
