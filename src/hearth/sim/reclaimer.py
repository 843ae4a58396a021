"""Carries out the orders of `policy/memory/reclaim.py` on a simulated worker. Decides nothing.

The counterpart of `worker/reclaimer.py` and a pool of mapped pages on a live worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from hearth.core.types import Hold, ModelId
from hearth.policy.fleet.footprint import PAGE_BYTES
from hearth.policy.memory.byte_eviction import TAKEABLE, Tail, effective_hold, plan_takes
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
from hearth.policy.turns.turn_policy import TurnPolicy
from hearth.sim.device import DeviceMemory
from hearth.sim.stepped_engine import StepSeconds
from hearth.sim.stepped_model import SteppedModel

_NO_TABLES = TablesView({}, {}, ())


class SimulatedBooks:
    """`ModelBooks` of a simulated worker, which sets `now_s`."""

    def __init__(self, hosted: Mapping[ModelId, SteppedModel], turns: TurnPolicy | None) -> None:
        self.now_s = 0.0
        self._hosted, self._turns = hosted, turns

    def models(self) -> list[ModelId]:
        return [model for model, hosted in self._hosted.items() if hosted.is_assembled]

    def returning_bytes(self) -> int:
        return 0

    def later_stages(self) -> list[ModelId]:
        return []  # they are assumed to have as much memory for KV as the first one

    def kv_of(self, model: ModelId) -> KvView:
        engine, hold = self._hosted[model].engine, self.hold(model)
        blocks, is_paused = engine.batcher.blocks, hold is Hold.PAUSED
        return KvView(
            hold=hold,
            has_work=engine.has_work,
            block_bytes=engine.kv.range.block_bytes,
            floor_blocks=0 if is_paused else blocks.floor_blocks,
            max_blocks=engine.kv.range.max_blocks - 1,  # the sink is no block of the book
            num_blocks=blocks.num_blocks,
            num_available=blocks.num_available,
            reserve_blocks=0 if is_paused else engine.elastic.reserve_blocks(engine.batcher.num_running),
            due_in_s=self.due_in_s(model) if is_paused else 0.0,
        )

    def growth_bytes(self, model: ModelId, num_blocks: int) -> int:
        return num_blocks * self._hosted[model].engine.kv.range.block_bytes

    def extents(self, model: ModelId) -> list[range]:
        return self._hosted[model].engine.kv.extents()

    def cached_to_spare(self, model: ModelId) -> int:
        return self._hosted[model].engine.batcher.kv.cached_to_spare()

    def tables_of(self, _: ModelId) -> TablesView:
        return _NO_TABLES

    def hold(self, model: ModelId) -> Hold:
        hosted = self._hosted.get(model)
        if hosted is None:
            return Hold.RETAINED
        if hosted.order.is_stage:
            return Hold.PINNED  # it keeps its memory until its pipeline is dissolved
        return effective_hold(
            hosted.hold,
            is_loading=hosted.load is not None and not hosted.load.is_front,
            has_requests=bool(hosted.requests),
            has_turn=self._turns is None or self._turns.is_in_turn(model),
        )

    def due_in_s(self, model: ModelId) -> float:
        due_s = math.inf if self._turns is None else self._turns.due_s(model)
        return 0.0 if math.isinf(due_s) else max(0.0, due_s - self.now_s)


class SimulatedReclaimer:
    """Mutable; only its worker calls it."""

    def __init__(
        self, budget_bytes: int, hosted: Mapping[ModelId, SteppedModel], turns: TurnPolicy | None
    ) -> None:
        self.device = DeviceMemory(budget_bytes, PAGE_BYTES)
        self.books = SimulatedBooks(hosted, turns)
        self.policy = ReclaimPolicy(self.books, keeps_addresses=True)
        self.costs = DeviceReloadCosts()
        self._hosted = hosted

    # Weights.

    def missing_bytes(self, model: ModelId) -> int:
        num_bytes = self.device.rounded(self._hosted[model].order.profile.num_bytes)
        return num_bytes - self.device.count_bytes(model)

    def is_incomplete(self, model: ModelId) -> bool:
        hosted = self._hosted[model]
        return not hosted.is_assembled or not hosted.engine.kv.is_placed or self.missing_bytes(model) > 0

    def place(self, model: ModelId) -> int | None:
        """Place a model, evicting others; return how many bytes must be loaded.

        None: it must wait for the load of a model whose turn is over.
        """
        hosted = self._hosted[model]
        profile, promise, engine = hosted.order.profile, hosted.order.load.promise, hosted.engine
        begin_bytes = hosted.order.begin_bytes
        there_bytes = self.device.place_weights(model, profile.digest, profile.num_bytes, begin_bytes)
        was_placed = engine.kv.is_placed
        engine.kv.place_sink()
        tables_bytes = hosted.order.tables_bytes(engine.kv.range.sink_pages * PAGE_BYTES)
        self.device.place_other(model, tables_bytes + engine.kv.num_bytes, promise.workspace_bytes)
        lack_bytes = self._run(self.policy.make_room(model, lambda: max(0, -self.device.free_bytes)))
        if not lack_bytes:
            return self.device.count_bytes(model) - there_bytes
        is_any_loading = any(one.load is not None for one in self._hosted.values())
        is_deferred = self.policy.defer(model, is_any_loading=is_any_loading)
        assert is_deferred, f"the promise to `{model}` cannot be kept: {lack_bytes=}"
        self.device.truncate(model, there_bytes)
        if not was_placed:
            engine.kv.clear_all()
            self.device.free_other(model)
        return None

    def place_front(self, model: ModelId, front_bytes: Callable[[int, int], int]) -> int:
        """Place the first missing bytes of a model, evicting cheaper ones; return how many.

        `front_bytes` returns how many, given the missing and the free bytes.
        """
        missing_bytes, cost_s_per_byte = self.missing_bytes(model), self._price(model, Hold.PAUSED)
        lack_bytes = front_bytes(missing_bytes, missing_bytes) - self.device.free_bytes
        if lack_bytes > 0:
            self._run(self.policy.make_room_early(model, lack_bytes, cost_s_per_byte))
        num_bytes = front_bytes(missing_bytes, self.device.free_bytes)
        if not num_bytes:
            return 0
        profile = self._hosted[model].order.profile
        return self.device.place_front(model, profile.digest, profile.num_bytes, num_bytes)

    def retire(self, model: ModelId, hosted: SteppedModel) -> None:
        if hosted.load is not None:
            self.device.truncate(model, self.device.count_bytes(model) - hosted.load.num_bytes)
        hosted.engine.kv.clear_all()
        self.device.free_other(model)
        self.policy.stop_deferring(model)
        self.policy.note_freed()

    def drop(self, model: ModelId) -> None:
        self.device.drop(model)
        self.policy.forget(model)
        self.policy.note_freed()
        self.costs.forget(model)

    def count_device_bytes(self) -> dict[ModelId, int]:
        """Return the loaded bytes of each model, hosted or evicted, as a worker reports them."""
        coming = {name: one.load.num_bytes for name, one in self._hosted.items() if one.load is not None}
        there = {name: self.device.count_bytes(name) - coming.get(name, 0) for name in self.device.weights}
        return {name: num_bytes for name, num_bytes in there.items() if num_bytes}

    # KV.

    def room_blocks(self, model: ModelId) -> int:
        """Return how many blocks a model has, or could have in memory that is free or idle."""
        kv, room_bytes = self.books.kv_of(model), self.device.free_bytes
        for other in self.device.weights:
            if other != model and self.books.hold(other) <= Hold.WARM:
                room_bytes += self.device.count_bytes(other)
        return min(kv.max_blocks, kv.num_blocks + room_bytes // kv.block_bytes)

    def make_kv_room(self, model: ModelId, num_tokens: int) -> None:
        """Have blocks available for a request whose KV has come, as `Reclaimer.make_kv_room`."""
        blocks = self._hosted[model].engine.batcher.blocks
        num_lacking = blocks.num_blocks_of(num_tokens) - blocks.num_available
        if num_lacking > 0:
            self._run(self.policy.take(model, num_lacking, num_lacking, is_promised=False))

    def before_step(self, model: ModelId) -> None:
        engine = self._hosted[model].engine
        self._run(self.policy.before_step(model, engine.elastic, engine.batcher.kv.use()))

    def after_step(self, model: ModelId, *, has_let_go: bool) -> None:
        engine = self._hosted[model].engine
        use, has_work = engine.batcher.kv.use(), engine.has_work
        self._run(
            self.policy.after_step(model, engine.elastic, use, has_work=has_work, has_let_go=has_let_go)
        )

    def skip(self, model: ModelId, steps: Sequence[StepSeconds], flight_end_s: float) -> None:
        engine = self._hosted[model].engine
        before_bytes = engine.kv.num_bytes
        engine.skip(steps, self.device.free_bytes, flight_end_s)
        self.device.resize_other(model, engine.kv.num_bytes - before_bytes)

    def _run(self, orders: Orders) -> int:
        return carry_out(orders, self._act)

    def _act(self, order: ReclaimOrder) -> int:
        match order:
            case GrowKv(model, num_blocks, _):
                engine = self._hosted[model].engine
                before_bytes = engine.kv.num_bytes
                num_got = engine.kv.grow(num_blocks, self.device.free_bytes)
                self.device.resize_other(model, engine.kv.num_bytes - before_bytes)
                return num_got
            case ClearKv():
                return self._clear(order)
            case TakeWeights():
                return self._take(order)
            case (
                AskForKv()
                | AskKvBack()
                | TakeWorkspaces()
                | PlaceTable()
                | SpillTable()
                | DropTable()
                | PlaceAdapter()
                | DropAdapter()
            ):
                raise AssertionError(f"not simulated: {order}")
            case _:
                assert_never(order)

    def _clear(self, order: ClearKv) -> int:
        engine = self._hosted[order.model].engine
        if not order.may_forget and engine.batcher.blocks.cached.among(order.extent):
            return 0
        before_bytes = engine.kv.num_bytes
        if not engine.kv.clear(order.extent, may_preempt=order.may_preempt, keeps_floor=order.keeps_floor):
            return 0
        self.device.resize_other(order.model, engine.kv.num_bytes - before_bytes)
        return len(order.extent)

    def _take(self, order: TakeWeights) -> int:
        coming = {self.policy.placing, *(name for name, one in self._hosted.items() if one.load is not None)}
        tails = [
            Tail(model, hold, cost_s_per_byte, weights.tail)
            for model, weights in self.device.weights.items()
            if model not in coming
            and (hold := self.books.hold(model)) in TAKEABLE
            and (cost_s_per_byte := self._price(model, hold)) < order.below_s_per_byte
        ]
        before_bytes = self.device.free_bytes
        for take in plan_takes(tails, order.num_bytes):
            self.device.take_units(take.model, take.num_units)
        return self.device.free_bytes - before_bytes

    def _price(self, model: ModelId, hold: Hold) -> float:
        if hold is Hold.PAUSED:
            return self.costs.paused_cost_s_per_byte(model, self.books.due_in_s(model))
        return self.costs.cost_s_per_byte(model, self.books.now_s)
