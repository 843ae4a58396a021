"""Who gives way when a model needs memory: every rule as an example, then any order of events."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hearth.core.types import AdapterId, Hold, ModelId, SamplingTable
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
from tests.policy.memory.simulated_pool import EXTENT_BLOCKS, SimulatedModel, SimulatedPool

A, B, C = ModelId("a"), ModelId("b"), ModelId("c")
PENALTIES, BIAS = SamplingTable


def hosted(
    weights_bytes: int = 10,
    num_blocks: int = 0,
    running: tuple[int, ...] = (),
    num_cached: int = 0,
    hold: Hold = Hold.WARM,
    floor_blocks: int = 4,
    max_blocks: int = 100,
) -> SimulatedModel:
    return SimulatedModel(
        weights_bytes=weights_bytes,
        block_bytes=1,
        floor_blocks=floor_blocks,
        max_blocks=max_blocks,
        hold=hold,
        is_hosted=True,
        there_bytes=weights_bytes,
        num_blocks=num_blocks,
        num_cached=num_cached,
        running=list(running),
    )


def pool_of(free_bytes: int = 0, *, keeps_addresses: bool = True, **models: SimulatedModel) -> SimulatedPool:
    """A pool with so many bytes free."""
    used_bytes = sum(one.used_bytes for one in models.values())
    by_id = {ModelId(name): one for name, one in models.items()}
    return SimulatedPool(used_bytes + free_bytes, by_id, keeps_addresses)


def kinds(orders: list[ReclaimOrder]) -> list[type[ReclaimOrder]]:
    return [type(order) for order in orders]


# --- Carrying out ---


def test_orders_are_sent_what_came_of_each_and_return_what_came_of_all() -> None:
    def decide() -> Orders:
        first = yield TakeWeights(3)
        second = yield TakeWeights(4)
        return first + 10 * second

    assert carry_out(decide(), lambda order: 5 if order == TakeWeights(3) else 7) == 75


def test_what_breaks_ends_the_decision_and_leaves_no_model_being_placed() -> None:
    pool = pool_of(a=hosted())

    def breaks(order: ReclaimOrder) -> int:
        raise ValueError(f"{order} cannot be carried out")

    with pytest.raises(ValueError, match="cannot be carried out"):
        carry_out(pool.policy.make_room(B, lambda: 5), breaks)

    assert pool.policy.placing is None


def test_before_its_turn_a_model_gets_weights_that_cost_less_and_no_kv() -> None:
    policy, orders = pool_of(a=hosted(num_blocks=8, num_cached=8)).policy, list[ReclaimOrder]()

    def act(order: ReclaimOrder) -> int:
        assert policy.placing == B, "it could be taken from itself"
        orders.append(order)
        return 4

    assert carry_out(policy.make_room_early(B, 10, 0.5), act) == 4
    assert orders == [TakeWeights(10, 0.5)]
    assert policy.placing is None


def test_nobody_looks_again_for_room_before_its_turn_until_some_may_have_come() -> None:
    policy, num_orders = pool_of(a=hosted()).policy, 0

    def refuse(_: ReclaimOrder) -> int:
        nonlocal num_orders
        num_orders += 1
        return 0

    for _ in range(2):
        assert carry_out(policy.make_room_early(B, 10, 0.5), refuse) == 0
    assert num_orders == 1
    policy.note_freed()
    assert carry_out(policy.make_room_early(B, 10, 0.5), refuse) == 0
    assert num_orders == 2


# --- The order of giving way ---


def test_free_memory_goes_first_and_nobody_is_touched() -> None:
    pool = pool_of(free_bytes=8, a=hosted(num_blocks=4, num_cached=4), b=hosted(running=(1,), num_blocks=2))

    pool.before_step(B, num_wanted=4)

    assert kinds(pool.orders) == [GrowKv]
    assert pool.models_by_id[A].num_cached == 4


def test_its_own_cached_blocks_go_before_those_of_others() -> None:
    pool = pool_of(a=hosted(num_blocks=4, num_cached=4), b=hosted(running=(2,), num_blocks=6, num_cached=4))

    pool.before_step(B, num_wanted=4)

    assert kinds(pool.orders) == [GrowKv]
    assert pool.models_by_id[A].num_cached == 4


def test_cached_kv_of_the_least_held_goes_before_weights() -> None:
    retained = hosted(num_blocks=4, num_cached=4, hold=Hold.RETAINED)
    pool = pool_of(a=hosted(num_blocks=4, num_cached=4), b=hosted(running=(2,), num_blocks=2), c=retained)

    pool.before_step(B, num_wanted=2)

    assert pool.orders[1] == ClearKv(C, range(2, 4), may_preempt=False, keeps_floor=True, may_forget=True)
    assert not any(isinstance(order, TakeWeights) for order in pool.orders)
    assert pool.models_by_id[A].num_cached == 4


def test_idle_weights_go_before_running_requests() -> None:
    warm, retained = hosted(weights_bytes=2), hosted(weights_bytes=2, hold=Hold.RETAINED)
    grower = hosted(floor_blocks=8)
    lent = hosted(num_blocks=8, running=(4, 4), floor_blocks=2)
    pool = pool_of(a=warm, b=grower, c=retained, d=lent)
    grower.num_waiting = 1

    pool.before_step(B, num_wanted=6)

    assert (warm.there_bytes, retained.there_bytes) == (0, 0)
    assert pool.num_preempted > 0
    assert grower.num_blocks >= 6


def paused(one: SimulatedModel, due_in_s: float = 1.0) -> SimulatedModel:
    one.has_turn, one.due_in_s = False, due_in_s
    return one


def test_weights_of_paused_models_go_before_their_kv_and_that_before_running_requests() -> None:
    warm, waiting = hosted(weights_bytes=2), paused(hosted(weights_bytes=2, num_blocks=4, running=(4,)))
    lent = hosted(num_blocks=8, running=(4, 4), floor_blocks=2)
    newcomer = hosted(weights_bytes=10)
    newcomer.there_bytes = 0
    pool = pool_of(a=lent, b=newcomer, c=warm, d=waiting)

    assert pool.place(B) == 0

    assert (warm.there_bytes, waiting.there_bytes, waiting.num_blocks) == (0, 0, 0)
    assert (waiting.num_waiting, lent.num_blocks) == (1, 6), "running requests give way last"


def test_of_paused_models_the_one_that_is_due_last_loses_its_kv_first() -> None:
    soon = paused(hosted(weights_bytes=0, num_blocks=4, running=(4,)), due_in_s=0.2)
    late = paused(hosted(weights_bytes=0, num_blocks=4, running=(4,)), due_in_s=1.5)
    newcomer = hosted(weights_bytes=4)
    newcomer.there_bytes = 0
    pool = pool_of(a=soon, b=newcomer, c=late)

    assert pool.place(B) == 0

    assert (soon.num_blocks, late.num_blocks) == (4, 0)


def test_beyond_its_promise_a_model_takes_weights_of_paused_ones_and_not_their_kv() -> None:
    grower = hosted(num_blocks=4, running=(4,), floor_blocks=4)
    waiting = paused(hosted(weights_bytes=2, num_blocks=4, running=(4,)))
    pool = pool_of(a=grower, b=waiting)

    pool.before_step(A, num_wanted=6)

    assert (grower.num_blocks, waiting.there_bytes) == (6, 0)
    assert (waiting.num_blocks, waiting.running) == (4, [4])


def test_what_is_promised_is_had_from_the_kv_of_paused_models_too() -> None:
    grower = hosted(floor_blocks=4)
    grower.num_waiting = 1
    waiting = paused(hosted(weights_bytes=0, num_blocks=4, running=(2, 2), floor_blocks=4))
    pool = pool_of(a=grower, b=waiting)

    assert pool.before_step(A, num_wanted=4) == 4
    assert (grower.num_blocks, waiting.num_blocks, waiting.num_waiting) == (4, 0, 2)


def test_blocks_that_should_lie_ready_are_asked_for_once_until_something_changes() -> None:
    pool = pool_of(a=hosted(num_blocks=4, running=(2, 2)))

    def asks() -> bool:
        pool.before_step(A, num_wanted=0)
        return bool(pool.orders)

    assert [asks(), asks()] == [True, False]
    pool.policy.note_freed()
    assert [asks(), asks()] == [True, False]
    pool.models_by_id[A].running = [1, 2]
    assert [asks(), asks()] == [True, False]


def test_the_first_stage_asks_the_others_for_more_than_all_have() -> None:
    """Idle models give way there for what its own cached blocks do not cover."""
    first = hosted(num_blocks=8, running=(2, 2), num_cached=4, max_blocks=8)
    first.shared_max_blocks = 100
    pool = pool_of(free_bytes=20, a=first)

    pool.before_step(A, num_wanted=2)

    assert pool.orders == [AskForKv(A, 8 + 2 + 4 + 4, needed_blocks=8 + 2 - 4)]
    assert first.num_blocks == 8


def test_a_first_stage_without_memory_of_its_own_asks_for_none() -> None:
    first = hosted(num_blocks=4, running=(4,), max_blocks=20)
    first.shared_max_blocks = 100
    pool = pool_of(a=first)
    assert pool.run(pool.policy.take(A, 4, 4, is_promised=False)) == 0
    first.max_blocks = 4

    pool.before_step(A, num_wanted=2)

    assert not pool.orders
    pool.policy.note_freed()
    pool.before_step(A, num_wanted=2)
    assert kinds(pool.orders) == [AskForKv]


def later_stage(num_blocks: int) -> SimulatedModel:
    one = hosted(num_blocks=num_blocks, hold=Hold.PINNED)
    one.is_later_stage = True
    return one


@pytest.mark.parametrize("is_promised", [True, False])
def test_a_later_stage_is_asked_for_what_it_was_lent_when_all_else_is_used_up(is_promised: bool) -> None:
    grower = hosted(floor_blocks=4 if is_promised else 0)
    grower.num_waiting = 1
    idle = hosted(weights_bytes=2)
    pool = pool_of(a=grower, b=idle, c=later_stage(5), d=later_stage(4))

    assert pool.before_step(A, num_wanted=4) == 2

    asked = [order for order in pool.orders if isinstance(order, AskKvBack)]
    assert {(order.model, order.num_blocks) for order in asked} == {(C, 4)}, "four are promised to each"
    assert asked[-1].is_promised is is_promised
    assert idle.there_bytes == 0


@pytest.mark.parametrize("gives_back", [True, False])
def test_promised_kv_waits_for_what_stages_do_not_use_before_requests_are_preempted(gives_back: bool) -> None:
    grower, lent, stage = hosted(floor_blocks=4), hosted(num_blocks=8, running=(8,)), later_stage(9)
    grower.num_waiting, stage.gives_back = 1, gives_back
    pool = pool_of(a=grower, b=lent, c=stage)

    pool.before_step(A, num_wanted=4)

    asked = [order for order in pool.orders if isinstance(order, AskKvBack)]
    assert (asked[0].model, asked[0].num_blocks, asked[0].is_promised) == (C, 5, False)
    is_preempted = any(isinstance(order, ClearKv) and order.may_preempt for order in pool.orders)
    assert is_preempted is not gives_back
    assert pool.policy.is_short is gives_back, "it waits for its promise"


def test_the_first_stage_gives_back_exactly_what_another_needs() -> None:
    first = hosted(num_blocks=12, running=(3, 3), num_cached=4)
    pool = pool_of(a=first)

    assert pool.run(pool.policy.give_back(A, 11, may_preempt=False)) == 1
    assert pool.run(pool.policy.give_back(A, 7, may_preempt=False)) == 1, "it will fill four next"
    assert pool.run(pool.policy.give_back(A, 7, may_preempt=True)) == 3
    assert (first.num_blocks, first.running, first.num_cached) == (7, [3, 3], 1)


def test_nobody_is_preempted_for_what_is_not_promised() -> None:
    grower, lent = hosted(num_blocks=4, running=(4,), floor_blocks=4), hosted(num_blocks=20, running=(20,))
    pool = pool_of(a=grower, b=lent)

    pool.before_step(A, num_wanted=2)

    assert (grower.num_blocks, lent.running) == (4, [20])
    assert not any(isinstance(order, ClearKv) and order.may_preempt for order in pool.orders)


def test_running_requests_lose_nothing_that_their_model_is_promised() -> None:
    grower, other = hosted(floor_blocks=4), hosted(num_blocks=4, running=(4,), floor_blocks=4)
    grower.num_waiting = 1
    pool = pool_of(a=grower, b=other)

    assert pool.before_step(A, num_wanted=4) == 0
    assert (other.num_blocks, pool.num_preempted) == (4, 0)


def test_what_a_busy_model_will_fill_next_it_keeps() -> None:
    """One block for each two requests, as blocks have 8 tokens and 16 steps are looked ahead: 4 for 2."""
    busy = hosted(num_blocks=8, running=(2, 2), num_cached=4, hold=Hold.PINNED)
    grower = hosted(num_blocks=4, running=(4,), floor_blocks=4)
    pool = pool_of(a=busy, b=grower)
    assert busy.reserve_blocks == 4

    pool.before_step(B, num_wanted=2)

    assert busy.num_blocks == 8


def test_kv_never_grows_beyond_its_ceiling() -> None:
    pool = pool_of(free_bytes=50, a=hosted(num_blocks=4, running=(4,), max_blocks=6))

    pool.before_step(A, num_wanted=20)

    assert pool.models_by_id[A].num_blocks == 6
    assert pool.before_step(A, num_wanted=20) == 0
    assert pool.orders == []


def test_cached_blocks_stand_in_for_what_is_beyond_the_ceiling_before_they_spare_others() -> None:
    """Of 12 blocks it may have it has 8, 4 of them cached, and a prompt wants 11: 3 have to come."""
    waiting = hosted(num_blocks=8, num_cached=4, floor_blocks=12, max_blocks=12)
    waiting.num_waiting = 1
    pool = pool_of(a=waiting, b=hosted(hold=Hold.RETAINED))

    pool.before_step(A, num_wanted=11)

    assert waiting.num_blocks >= 11


# --- Looking again ---


def test_who_was_refused_looks_again_only_when_room_may_have_come() -> None:
    pool = pool_of(a=hosted(num_blocks=4, running=(4,)), b=hosted(num_blocks=4, running=(4,)))
    pool.before_step(A, num_wanted=2)
    assert pool.orders

    pool.before_step(A, num_wanted=2)
    assert pool.orders == []

    pool.policy.note_freed()
    pool.before_step(A, num_wanted=2)
    assert pool.orders


def test_what_is_promised_is_asked_for_in_spite_of_a_refusal() -> None:
    grower = hosted(floor_blocks=4)
    grower.num_waiting = 1
    other = hosted(num_blocks=8, running=(8,), floor_blocks=2)
    pool = pool_of(a=grower, b=other, keeps_addresses=False)
    pool.num_useless = 100
    pool.before_step(A, num_wanted=2)
    pool.num_useless = 0

    pool.before_step(A, num_wanted=2)

    assert grower.num_blocks >= 2


def test_others_are_not_stripped_where_what_comes_free_is_of_no_use() -> None:
    idle = hosted(num_blocks=40, num_cached=40)
    pool = pool_of(a=hosted(num_blocks=4, running=(4,)), b=idle, keeps_addresses=False)
    pool.num_useless = 100

    pool.before_step(A, num_wanted=2)

    assert idle.num_blocks >= 40 - 2 * 6


@pytest.mark.parametrize("keeps_addresses", [True, False])
def test_a_model_is_deferred_only_where_one_that_is_loaded_may_be_in_its_way(keeps_addresses: bool) -> None:
    policy = pool_of(a=hosted(), keeps_addresses=keeps_addresses).policy
    assert not policy.defer(A, is_any_loading=False)
    assert policy.defer(A, is_any_loading=True)
    assert policy.deferred() == []

    policy.note_freed()
    assert policy.deferred() == [A]
    policy.stop_deferring(A)
    assert policy.deferred() == []


# --- After a step ---


def test_an_idle_model_gives_back_its_free_blocks_and_keeps_its_prefixes() -> None:
    pool = pool_of(a=hosted(num_blocks=8, num_cached=3))

    assert pool.after_step(A) == 4
    assert (pool.models_by_id[A].num_blocks, pool.models_by_id[A].num_cached) == (4, 3)
    assert pool.policy.generation == 1


def test_a_busy_model_that_lets_nothing_go_changes_nothing() -> None:
    pool = pool_of(a=hosted(num_blocks=8, running=(2,)))

    assert pool.after_step(A) == 0
    assert pool.policy.generation == 0
    pool.after_step(A, has_let_go=True)
    assert pool.policy.generation == 1


# --- Tables ---


def needing(one: SimulatedModel, **bytes_by_table: int) -> SimulatedModel:
    one.needed = {SamplingTable(table): num_bytes for table, num_bytes in bytes_by_table.items()}
    return one


def test_tables_come_out_of_free_memory_each_when_it_is_needed() -> None:
    one = needing(hosted(num_blocks=4, running=(2,)), bias=3)
    pool = pool_of(free_bytes=10, a=one)

    pool.before_step(A, num_wanted=0)
    assert pool.orders == [PlaceTable(A, BIAS, 3)]
    needing(one, bias=3, penalties=4)
    pool.before_step(A, num_wanted=0)
    assert pool.orders == [PlaceTable(A, PENALTIES, 4)]
    pool.before_step(A, num_wanted=0)
    assert pool.orders == []
    assert pool.free_bytes == 3


def test_a_table_that_has_become_too_small_gets_a_larger_place_for_which_its_own_counts() -> None:
    one = needing(hosted(num_blocks=4, running=(2,)), bias=3)
    pool = pool_of(free_bytes=6, a=one)
    pool.before_step(A, num_wanted=0)

    needing(one, bias=6)
    pool.before_step(A, num_wanted=0)

    assert pool.orders == [PlaceTable(A, BIAS, 6)]
    assert (one.pooled, pool.free_bytes) == ({BIAS: 6}, 0)
    needing(one, bias=3)
    pool.before_step(A, num_wanted=0)
    assert pool.orders == [], "it is not made smaller while somebody needs it"


def test_a_table_that_nobody_needs_any_more_goes_back_at_once_and_others_look_again() -> None:
    one = needing(hosted(num_blocks=4, running=(2,)), bias=3, penalties=4)
    pool = pool_of(free_bytes=10, a=one)
    pool.before_step(A, num_wanted=0)
    generation = pool.policy.generation

    needing(one, penalties=4)
    assert pool.drop_tables(A) == 3

    assert pool.orders[-1] == DropTable(A, BIAS)
    assert one.pooled == {PENALTIES: 4}
    assert pool.policy.generation > generation
    assert pool.drop_tables(A) == 0


def test_room_for_a_table_is_made_in_the_usual_order_and_own_kv_goes_first() -> None:
    one = needing(hosted(num_blocks=8, running=(2,), num_cached=4, floor_blocks=6), bias=6)
    cached, retained = hosted(num_blocks=2, num_cached=2), hosted(weights_bytes=2, hold=Hold.RETAINED)
    pool = pool_of(a=one, b=cached, c=retained)

    pool.before_step(A, num_wanted=0)

    assert kinds(pool.orders) == [PlaceTable, ClearKv, ClearKv, TakeWeights, PlaceTable]
    assert [order.model for order in pool.orders if isinstance(order, ClearKv)] == [A, B]
    assert (one.pooled, one.num_blocks, cached.num_blocks) == ({BIAS: 6}, 6, 0)


def test_nobody_is_preempted_for_a_table_which_lies_outside_then() -> None:
    one = needing(hosted(num_blocks=4, running=(4,)), bias=3)
    lent = hosted(num_blocks=20, running=(20,))
    pool = pool_of(free_bytes=2, a=one, b=lent)

    pool.before_step(A, num_wanted=0)

    assert (one.spilled, one.pooled, lent.running) == ({BIAS}, {}, [20])
    pool.before_step(A, num_wanted=0)
    assert not any(isinstance(order, PlaceTable | SpillTable) for order in pool.orders), "it stays there"


def test_others_are_not_stripped_for_a_table_where_what_comes_free_is_of_no_use() -> None:
    idle = hosted(num_blocks=40, num_cached=40)
    one = needing(hosted(num_blocks=4, running=(4,)), bias=3)
    pool = pool_of(a=one, b=idle, keeps_addresses=False)
    pool.num_useless = 100

    pool.before_step(A, num_wanted=0)

    assert (one.spilled, idle.num_blocks) == ({BIAS}, 40 - 2 * 4)


def test_a_table_leaves_the_pool_for_what_is_promised_after_all_that_is_lent() -> None:
    one = needing(hosted(num_blocks=8, running=(2, 2, 2, 2), floor_blocks=4), bias=6)
    newcomer = hosted(weights_bytes=8)
    newcomer.there_bytes = 0
    pool = pool_of(free_bytes=6, a=one, b=newcomer)
    pool.before_step(A, num_wanted=0)
    assert one.pooled == {BIAS: 6}

    assert pool.place(B) == 0

    assert (one.num_blocks, one.pooled, one.spilled) == (4, {}, {BIAS})
    assert isinstance(pool.orders[-1], SpillTable)


@pytest.mark.parametrize("keeps_addresses", [True, False])
def test_in_an_arena_workspaces_go_for_what_is_promised_after_all_kv_that_is_lent(
    keeps_addresses: bool,
) -> None:
    newcomer = hosted(weights_bytes=8)
    newcomer.there_bytes = 0
    busy = hosted(num_blocks=8, running=(2, 2, 2, 2), floor_blocks=4)
    pool = pool_of(a=busy, b=newcomer, keeps_addresses=keeps_addresses)

    assert pool.place(B) > 0, "there is not so much"

    assert (TakeWorkspaces() in pool.orders) is not keeps_addresses
    assert keeps_addresses or pool.orders.index(TakeWorkspaces()) > max(
        at for at, order in enumerate(pool.orders) if isinstance(order, ClearKv) and order.may_preempt
    )


def test_a_model_s_own_table_leaves_the_pool_for_the_kv_that_it_is_promised() -> None:
    one = needing(hosted(floor_blocks=4), bias=4)
    one.num_waiting = 1
    pool = pool_of(free_bytes=4, a=one)

    pool.before_step(A, num_wanted=4)

    assert (one.num_blocks, one.pooled, one.spilled) == (4, {}, {BIAS})


# --- Adapters ---

#: The longer an id, the more its bytes cost.
CHEAP, DEAR, NEW = AdapterId("x"), AdapterId("xxxx"), AdapterId("n")


def idle(pool: SimulatedPool, *adapters: AdapterId, num_bytes: int = 4) -> None:
    """Have adapters be there that nobody uses any more."""
    for adapter in adapters:
        run = pool.bring_adapter(adapter, num_bytes)
        assert run is not None
        pool.adapters.ended(run)


def test_idle_adapters_go_after_kv_that_nobody_reads_and_before_any_weights() -> None:
    cached = hosted(num_blocks=4, num_cached=4)
    retained = hosted(weights_bytes=10, hold=Hold.RETAINED, floor_blocks=0)
    newcomer = hosted(weights_bytes=13, floor_blocks=0)
    newcomer.there_bytes = 0
    pool = pool_of(free_bytes=8, a=cached, b=newcomer, c=retained)
    idle(pool, DEAR, CHEAP)

    assert pool.place(B) == 0

    assert kinds(pool.orders) == [ClearKv, ClearKv, DropAdapter, DropAdapter, TakeWeights]
    assert [order.adapter for order in pool.orders if isinstance(order, DropAdapter)] == [CHEAP, DEAR]
    assert retained.there_bytes == 9


def test_no_adapter_goes_that_running_requests_use() -> None:
    newcomer = hosted(weights_bytes=4, floor_blocks=0)
    newcomer.there_bytes = 0
    pool = pool_of(free_bytes=4, a=hosted(floor_blocks=0), b=newcomer)
    pool.models_by_id[A].hold = Hold.PINNED
    run = pool.bring_adapter(NEW, 4)
    assert run is not None

    assert pool.place(B) == 4
    pool.adapters.ended(run)
    assert pool.place(B) == 0


def test_a_pinned_adapter_gives_way_to_nothing_but_what_is_promised() -> None:
    newcomer = hosted(weights_bytes=4, floor_blocks=0)
    newcomer.there_bytes = 0
    pool = pool_of(free_bytes=4, a=hosted(num_blocks=2, running=(2,), floor_blocks=2), b=newcomer)
    run = pool.bring_adapter(NEW, 4, is_pinned=True)
    assert run is not None
    pool.adapters.ended(run)

    assert pool.before_step(A, num_wanted=4) == 0, "it is lent, not promised"
    assert pool.bring_adapter(CHEAP, 4) is None
    assert pool.place(B) == 0
    assert not pool.adapter_bytes


def test_adapters_in_use_take_no_requests_until_a_model_has_the_kv_that_it_is_promised() -> None:
    late = hosted(num_blocks=0, floor_blocks=0)
    late.num_waiting = 1
    pool = pool_of(free_bytes=8, a=late)
    run = pool.bring_adapter(NEW, 6)
    assert run is not None
    late.floor_blocks = 4  # which nobody knew when the adapter came

    assert pool.before_step(A, num_wanted=4) == 2
    assert pool.policy.is_short
    assert pool.bring_adapter(CHEAP, 1) is None
    assert pool.adapters.next() is None

    pool.adapters.ended(run)
    assert pool.before_step(A, num_wanted=4) == 2
    assert not pool.policy.is_short


def test_a_model_that_wants_its_kv_no_more_holds_up_no_adapter() -> None:
    late = hosted(num_blocks=0, floor_blocks=0)
    late.num_waiting = 1
    pool = pool_of(free_bytes=8, a=late)
    assert pool.bring_adapter(NEW, 6) is not None
    late.floor_blocks = 4
    pool.before_step(A, num_wanted=4)
    assert pool.policy.is_short

    late.num_waiting = 0
    assert not pool.policy.is_short
    late.num_waiting = 1
    assert pool.policy.is_short
    pool.policy.forget(A)
    assert not pool.policy.is_short


def test_a_model_that_lacks_an_adapter_is_not_waited_for_by_that_adapter() -> None:
    """A model asks for its KV when it steps, which it does not before the adapter is there."""
    late = hosted(num_blocks=0, floor_blocks=0)
    late.num_waiting = 1
    pool = pool_of(free_bytes=8, base=late)
    base = ModelId("base")
    assert pool.bring_adapter(NEW, 6) is not None
    late.floor_blocks = 4
    pool.before_step(base, num_wanted=4)
    assert pool.policy.is_short

    pool.adapters.left(NEW)  # while its base had no turn
    assert pool.adapters.lacking(base)
    assert not pool.policy.is_short


def test_an_adapter_gets_the_room_of_the_cheapest_idle_one_before_any_weights() -> None:
    pool = pool_of(free_bytes=8, c=hosted(hold=Hold.RETAINED, floor_blocks=0))
    idle(pool, DEAR, CHEAP)

    assert pool.bring_adapter(NEW, 4) is not None

    assert kinds(pool.orders) == [PlaceAdapter, DropAdapter, PlaceAdapter]
    assert pool.adapter_bytes.keys() == {DEAR, NEW}


def test_an_adapter_never_gets_the_kv_that_a_model_is_owed() -> None:
    busy = hosted(num_blocks=2, running=(2,), floor_blocks=6)
    pool = pool_of(free_bytes=6, a=busy)

    assert pool.bring_adapter(NEW, 3) is None
    assert pool.bring_adapter(NEW, 2) is not None
    assert pool.before_step(A, num_wanted=4) == 4


def test_no_workspace_is_taken_for_an_adapter_which_is_promised_nothing() -> None:
    pool = pool_of(a=hosted(num_blocks=8, running=(8,), floor_blocks=8), keeps_addresses=False)

    assert pool.bring_adapter(NEW, 5) is None

    assert any(isinstance(order, TakeWeights) for order in pool.orders)
    assert TakeWorkspaces() not in pool.orders


def test_running_requests_give_way_to_an_adapter_beyond_what_their_model_is_promised() -> None:
    busy = hosted(num_blocks=8, running=(2, 2, 2, 2), floor_blocks=4)
    pool = pool_of(a=busy)

    assert pool.bring_adapter(NEW, 5, may_take=False) is None
    assert pool.num_preempted == 0
    assert pool.bring_adapter(NEW, 5) is None, "the rest is promised"
    assert pool.bring_adapter(NEW, 4) is not None
    assert (busy.num_blocks, pool.num_preempted) == (4, 2)


# --- Any order of events ---


class AnyEvents(RuleBasedStateMachine):
    """Models come, take turns, get requests, step, end them and go. What is promised the budget can keep."""

    @initialize(
        weights=st.lists(st.integers(1, 12), min_size=2, max_size=4),
        block_bytes=st.lists(st.integers(1, 3), min_size=4, max_size=4),
        floors=st.lists(st.integers(1, 4), min_size=4, max_size=4),
        spare_bytes=st.integers(0, 20),
        keeps_addresses=st.booleans(),
    )
    def start(
        self,
        weights: list[int],
        block_bytes: list[int],
        floors: list[int],
        spare_bytes: int,
        keeps_addresses: bool,
    ) -> None:
        models = {
            ModelId(f"m{number}"): SimulatedModel(
                weights_bytes=weights[number],
                block_bytes=block_bytes[number],
                floor_blocks=EXTENT_BLOCKS * floors[number],
                max_blocks=EXTENT_BLOCKS * (floors[number] + 8),
            )
            for number in range(len(weights))
        }
        # Not all of them can be hosted at once.
        promises = sorted(one.promise_bytes for one in models.values())
        budget_bytes = sum(promises[1:]) + spare_bytes
        self.pool = SimulatedPool(budget_bytes, models, keeps_addresses)
        self.names = list(models)
        for number in range(len(models)):
            self.host(number)

    def pick(self, number: int, can_be: Callable[[SimulatedModel], bool]) -> ModelId | None:
        """One of the models that something can happen to, if there is one, so that few rules do nothing."""
        names = [name for name in self.names if can_be(self.pool.models_by_id[name])]
        return names[number % len(names)] if names else None

    @rule(number=st.integers(0, 3))
    def host(self, number: int) -> None:
        """Where the promise has no room the model waits for its turn."""
        model = self.pick(number, lambda one: not one.is_hosted)
        if model is None:
            return
        one = self.pool.models_by_id[model]
        one.is_hosted, one.hold, one.has_turn = True, Hold.WARM, False
        if self._promised_bytes(one) <= self.pool.budget_bytes:
            self._begin_turn(model)

    def _promised_bytes(self, *beside: SimulatedModel) -> int:
        in_turn = [one for one in self.pool.models_by_id.values() if one.is_hosted and one.has_turn]
        return sum(one.promise_bytes for one in [*in_turn, *beside])

    def _begin_turn(self, model: ModelId) -> None:
        """What is promised can always be placed."""
        one = self.pool.models_by_id[model]
        one.has_turn = True
        assert self.pool.place(model) == 0
        assert one.there_bytes == one.weights_bytes

    @rule(number=st.integers(0, 3), due_in_s=st.sampled_from([0.0, 0.5, 2.0]))
    def take_turn(self, number: int, due_in_s: float) -> None:
        """Others give way with whatever they are doing, but those that are pinned."""
        model = self.pick(number, lambda one: one.is_hosted and not one.has_turn)
        if model is None:
            return
        for other in self.pool.models_by_id.values():
            is_full = self._promised_bytes(self.pool.models_by_id[model]) > self.pool.budget_bytes
            if is_full and other.is_hosted and other.has_turn and other.hold is not Hold.PINNED:
                other.has_turn, other.due_in_s = False, due_in_s
                self.pool.policy.note_freed()
        if self._promised_bytes(self.pool.models_by_id[model]) <= self.pool.budget_bytes:
            self._begin_turn(model)

    @rule(adapter=st.sampled_from([CHEAP, DEAR, NEW]), num_bytes=st.integers(1, 12), may_take=st.booleans())
    def use_adapter(self, adapter: AdapterId, num_bytes: int, may_take: bool) -> None:
        """A request for an adapter runs, and has ended before anything else happens."""
        run = self.pool.bring_adapter(adapter, num_bytes, may_take=may_take)
        if run is not None:
            self.pool.adapters.ended(run)
        self.pool.adapters.check()

    @rule(number=st.integers(0, 3), table=st.sampled_from(SamplingTable))
    def no_longer_need(self, number: int, table: SamplingTable) -> None:
        if (model := self.pick(number, lambda one: table in one.needed)) is not None:
            del self.pool.models_by_id[model].needed[table]
            self.pool.drop_tables(model)

    @rule(
        number=st.integers(0, 3),
        num_requests=st.integers(0, 3),
        tables=st.dictionaries(st.sampled_from(SamplingTable), st.integers(1, 12)),
        num_wanted=st.integers(0, 9),
    )
    def step(self, number: int, num_requests: int, tables: dict[SamplingTable, int], num_wanted: int) -> None:
        """Requests may have come before it, some of which need tables."""
        model = self.pick(
            number, lambda one: one.is_hosted and one.has_turn and (one.has_work or num_requests > 0)
        )
        if model is None:
            return
        one = self.pool.models_by_id[model]
        one.num_waiting += num_requests
        one.needed |= {table: max(size, one.needed.get(table, 0)) for table, size in tables.items()}
        if one.there_bytes < one.weights_bytes:  # others took from it while it was idle
            assert self.pool.place(model) == 0
        num_before, num_preempted = one.num_blocks, self.pool.num_preempted

        self.pool.before_step(model, num_wanted)

        assert one.needed.keys() == one.pooled.keys() | one.spilled, "a request waits for a table"
        assert all(size >= one.needed[table] for table, size in one.pooled.items()), "one waits for a row"
        is_short = num_wanted > one.num_available
        assert not is_short or one.num_blocks >= one.floor_blocks, "what is promised was not had"
        assert one.num_blocks - num_before <= max(0, num_wanted) + 2 * EXTENT_BLOCKS, (
            "more than was asked for"
        )
        if num_before >= one.floor_blocks:
            assert self.pool.num_preempted == num_preempted, "preempted for what is not promised"
        if is_short:
            generation = self.pool.policy.generation
            self.pool.before_step(model, num_wanted)
            is_short = num_wanted > one.num_available
            if is_short and self.pool.policy.generation == generation:
                self.pool.before_step(model, num_wanted)
                assert not self.pool.orders, f"looked again in the same generation: {self.pool.orders}"
        self._compute(one, num_wanted)

    def _compute(self, one: SimulatedModel, num_wanted: int) -> None:
        """A request starts with the blocks, if there are any; the oldest ends now and then."""
        num_blocks = min(num_wanted, one.num_available)
        one.num_cached -= max(0, num_blocks - one.num_free)
        if num_blocks and one.num_waiting:
            one.num_waiting -= 1
            one.running.append(num_blocks)

    @rule(number=st.integers(0, 3), is_cached=st.booleans())
    def finish(self, number: int, is_cached: bool) -> None:
        model = self.pick(number, lambda one: one.is_hosted)
        if model is None:
            return
        one = self.pool.models_by_id[model]
        if one.running:
            num_blocks = one.running.pop(0)
            one.num_cached += num_blocks if is_cached else 0
        else:
            one.num_waiting = 0
        if not one.has_work:
            one.needed.clear()
        before, num_cached, num_live = one.num_free, one.num_cached, one.num_live
        generation = self.pool.policy.generation

        num_given = self.pool.after_step(model, has_let_go=True)

        assert num_given <= before
        assert (one.num_cached, one.num_live) == (num_cached, num_live)
        assert one.has_work or one.num_free < EXTENT_BLOCKS
        assert self.pool.policy.generation > generation

    @rule(number=st.integers(0, 3), hold=st.sampled_from([Hold.RETAINED, Hold.WARM, Hold.PINNED]))
    def set_hold(self, number: int, hold: Hold) -> None:
        if (model := self.pick(number, lambda one: one.is_hosted and one.has_turn)) is not None:
            one = self.pool.models_by_id[model]
            one.hold = hold
            self.pool.policy.note_freed()
            if hold is Hold.PINNED and one.there_bytes < one.weights_bytes:
                assert self.pool.place(model) == 0

    @rule(number=st.integers(0, 3), keeps_weights=st.booleans())
    def leave(self, number: int, keeps_weights: bool) -> None:
        if (model := self.pick(number, lambda one: one.is_hosted and not one.has_work)) is not None:
            one = self.pool.models_by_id[model]
            one.is_hosted, one.num_blocks, one.num_cached = False, 0, 0
            if keeps_weights:
                self.pool.policy.stop_deferring(model)
            else:
                one.there_bytes = 0
                self.pool.policy.forget(model)
            self.pool.policy.note_freed()

    @invariant()
    def the_books_are_sound(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            for one in self.pool.models_by_id.values():
                pinned = one.is_hosted and one.has_turn and (one.has_work or one.hold is Hold.PINNED)
                assert one.pooled.keys() <= one.needed.keys(), "a table that nobody needs is in the pool"
                assert not pinned or one.there_bytes == one.weights_bytes, (
                    "weights of a busy model were taken"
                )


AnyEvents.TestCase.settings = settings(derandomize=True, stateful_step_count=40)
TestAnyEvents = AnyEvents.TestCase
