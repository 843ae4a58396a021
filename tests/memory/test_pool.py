"""What every pool promises, whatever it does inside. A new implementation adds a line to POOLS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.host_pages import HostPages
from hearth.core.errors import DeviceError
from hearth.core.types import Hold, ModelId, SamplingTable
from hearth.memory.arena import ArenaPool
from hearth.memory.pool import EvictionTermsOf
from hearth.memory.vmm import MappedPool
from tests.memory.pool_actions import ADAPTERS, Action, actions, carry_out
from tests.memory.pool_caller import Audited, Holds, PoolCaller, Sample, part_of, sample, wipe

PAGE_BYTES = 8 << 10
NUM_PAGES = 20


@contextmanager
def mapped(eviction_terms: EvictionTermsOf) -> Iterator[Audited]:
    with closing(MappedPool(HostPages(NUM_PAGES, PAGE_BYTES), eviction_terms, wipe=wipe)) as pool:
        yield pool


@contextmanager
def arena(eviction_terms: EvictionTermsOf) -> Iterator[Audited]:
    yield ArenaPool(torch.device("cpu"), NUM_PAGES * PAGE_BYTES, eviction_terms, wipe=wipe)


POOLS: dict[str, Callable[[EvictionTermsOf], AbstractContextManager[Audited]]] = {
    "mapped": mapped,
    "arena": arena,
}

A, B, C, D, E = (ModelId(name) for name in "abcde")
SAMPLES: dict[ModelId, Sample] = {
    A: sample([1, 2, 3, 4, 5], PAGE_BYTES, digest=1, block_bytes=3000, tables_bytes=PAGE_BYTES + 100),
    # A fine-tune of the first, which also wants the same addresses.
    B: sample([1, 2, 3, 7, 8, 9], PAGE_BYTES, digest=6, workspace_bytes=3 * PAGE_BYTES, max_blocks=5),
    # Has a block that is larger than a page, and ends within one.
    C: sample(
        [3, 11, 12], PAGE_BYTES, digest=2, cut_bytes=PAGE_BYTES - 4096, block_bytes=10000, tables_bytes=7
    ),
    # Has chunks of another size than a page.
    D: sample([21, 22, 23], 4 * PAGE_BYTES, digest=3, cut_bytes=4096, workspace_bytes=0),
}
#: A stage of the first: a tensor at its beginning, as a tied embedding is, and others at its end.
STAGE = SAMPLES[E] = part_of(SAMPLES[A], lambda at: at < 1000 or at >= 2 * PAGE_BYTES)
CHANGED = sample([1, 2, 1, 31, 5], PAGE_BYTES, digest=9, block_bytes=2500)


@pytest.mark.parametrize("kind", POOLS)
@given(st.lists(actions(tuple(SAMPLES), 12 * PAGE_BYTES), max_size=30))
def test_what_is_there_is_intact_whatever_is_done_around_it(kind: str, done: list[Action]) -> None:
    holds = Holds()
    with POOLS[kind](holds.eviction_terms) as pool:
        caller = PoolCaller(pool, holds, SAMPLES)
        for action in done:
            carry_out(caller, action, CHANGED)
            caller.check()
        for model in SAMPLES:
            caller.end(model, is_whole=False)
            caller.drop(model)
        for adapter in ADAPTERS:
            caller.drop_pieces(adapter)
        usage = pool.usage()
        assert usage.free_bytes + usage.lost_bytes == usage.budget_bytes
        assert usage.holdings == ()


@pytest.fixture(params=POOLS)
def caller(request: pytest.FixtureRequest) -> Iterator[PoolCaller]:
    holds = Holds()
    with POOLS[request.param](holds.eviction_terms) as pool:
        caller = PoolCaller(pool, holds, SAMPLES)
        yield caller
        caller.check()


def test_a_model_that_comes_back_lacks_only_its_tail(caller: PoolCaller) -> None:
    caller.host(A)
    caller.retire(A)
    caller.take(2 * PAGE_BYTES, Hold.RETAINED)

    caller.begin(A)

    layout = SAMPLES[A].shape.stored
    assert caller.gaps[A][0].part.begin > layout.num_bytes / 2
    assert caller.gaps[A][-1].part.end > layout.tensors[-1].offset
    caller.end(A, is_whole=True)


def test_a_stage_takes_memory_for_its_tensors_alone(caller: PoolCaller) -> None:
    caller.begin(E)
    own = STAGE.shape.stored.tensors
    for gap in caller.gaps[E]:
        begin, end = gap.part.begin // PAGE_BYTES * PAGE_BYTES, gap.part.end
        assert any(spec.offset < end and begin < spec.end for spec in own), f"{gap.part} is not needed"
    caller.end(E, is_whole=True)
    holding = caller.holdings()[E]
    assert holding.weights_bytes == holding.total_bytes < SAMPLES[A].shape.stored.num_bytes


def test_a_stage_that_becomes_whole_and_a_smaller_one_again_is_intact(caller: PoolCaller) -> None:
    small = part_of(SAMPLES[A], lambda at: at >= 3 * PAGE_BYTES)
    for wanted in (STAGE, SAMPLES[A], small, STAGE):
        caller.samples[E] = wanted
        caller.retire(E)
        assert caller.host(E)
        caller.check()
        holding = caller.holdings()[E]
        assert holding.weights_bytes == holding.total_bytes


def test_a_load_that_failed_gives_its_gaps_back(caller: PoolCaller) -> None:
    caller.host(A)
    caller.retire(A)
    caller.take(2 * PAGE_BYTES, Hold.RETAINED)
    kept_bytes = caller.holdings()[A].weights_bytes

    caller.host(A, is_whole=False)

    assert caller.holdings()[A].weights_bytes == kept_bytes > 0
    caller.check()
    caller.host(A)
    assert caller.holdings()[A].weights_bytes == caller.holdings()[A].total_bytes


def test_what_is_warm_goes_after_all_that_is_retained(caller: PoolCaller) -> None:
    caller.host(A)
    caller.host(C)
    caller.holds.by_model.update({A: Hold.WARM, C: Hold.RETAINED})

    caller.take(PAGE_BYTES, Hold.WARM)
    assert caller.holdings()[A].weights_bytes == caller.holdings()[A].total_bytes

    caller.take(NUM_PAGES * PAGE_BYTES, Hold.WARM)
    assert not any(holding.weights_bytes for holding in caller.holdings().values())


def test_what_is_paused_goes_after_all_that_is_idle_and_the_cheapest_first(caller: PoolCaller) -> None:
    caller.host(A)
    caller.host(C)
    caller.holds.by_model.update({A: Hold.PAUSED, C: Hold.WARM})

    assert caller.take(NUM_PAGES * PAGE_BYTES, Hold.WARM) > 0
    assert caller.holdings()[A].weights_bytes == caller.holdings()[A].total_bytes

    assert caller.take(PAGE_BYTES, Hold.PAUSED) >= PAGE_BYTES
    assert 0 < caller.holdings()[A].weights_bytes < caller.holdings()[A].total_bytes
    assert caller.pool.resident_bytes(ModelId("unknown")) == 0


def test_only_what_costs_less_is_taken_where_that_is_asked(caller: PoolCaller) -> None:
    caller.host(A)
    caller.holds.by_model[A] = Hold.WARM
    cost_s_per_byte = caller.holds.eviction_terms(A).cost_s_per_byte

    assert caller.pool.take_weights(PAGE_BYTES, Hold.PAUSED, cost_s_per_byte) == 0
    assert caller.pool.take_weights(PAGE_BYTES, Hold.PAUSED, 1.1 * cost_s_per_byte) >= PAGE_BYTES


def test_nothing_is_taken_from_who_is_busy_or_pinned_or_loading(caller: PoolCaller) -> None:
    caller.host(A)
    caller.begin(C)
    caller.holds.by_model.update({A: Hold.PINNED, C: Hold.RETAINED})

    assert caller.take(NUM_PAGES * PAGE_BYTES, Hold.PINNED) == 0


def test_other_bytes_under_the_same_name_are_loaded_whole(caller: PoolCaller) -> None:
    caller.host(A)
    caller.retire(A)
    caller.samples[A] = CHANGED

    caller.begin(A)

    assert sum(gap.part.end - gap.part.begin for gap in caller.gaps[A]) >= 0.9 * len(CHANGED.content)
    caller.end(A, is_whole=True)


def test_kv_grows_into_all_that_is_free_and_no_further(caller: PoolCaller) -> None:
    caller.host(A)
    caller.grow(A, 10_000)

    block_bytes = SAMPLES[A].shape.block_bytes
    assert caller.pool.usage().free_bytes < block_bytes + PAGE_BYTES
    assert len(caller.blocks[A]) * block_bytes > 8 * PAGE_BYTES


def test_a_table_comes_out_of_free_memory_and_goes_with_its_model(caller: PoolCaller) -> None:
    caller.host(A)
    before, always_bytes = caller.pool.usage(), caller.holdings()[A].tables_bytes

    assert caller.place_table(A, SamplingTable.PENALTIES, PAGE_BYTES + 1)
    assert caller.place_table(A, SamplingTable.BIAS, 100)

    tables_bytes = caller.holdings()[A].tables_bytes - always_bytes
    assert tables_bytes >= PAGE_BYTES + 101
    assert caller.pool.usage().free_bytes == before.free_bytes - tables_bytes
    caller.drop_table(A, SamplingTable.PENALTIES)
    caller.check()
    assert 100 <= caller.holdings()[A].tables_bytes - always_bytes < tables_bytes
    caller.retire(A)
    assert caller.holdings()[A].tables_bytes == 0


def test_tables_are_in_the_books_from_placing_to_retiring(caller: PoolCaller) -> None:
    """What they held is lost then: a model that returns finds arbitrary bits there."""
    tables_bytes = SAMPLES[A].shape.tables_bytes
    caller.host(A)
    assert tables_bytes <= caller.holdings()[A].tables_bytes < tables_bytes + PAGE_BYTES
    address = caller.spaces[A].tables.data_ptr()

    free_bytes = caller.pool.usage().free_bytes
    caller.retire(A)
    assert caller.holdings()[A].tables_bytes == 0
    assert caller.pool.usage().free_bytes >= free_bytes + tables_bytes

    caller.host(C)
    caller.grow(C, 10_000)
    caller.begin(A)
    caller.end(A, is_whole=True)
    assert caller.pool.keeps_addresses <= (caller.spaces[A].tables.data_ptr() == address)


def test_a_table_beyond_what_is_free_is_refused_and_changes_nothing(caller: PoolCaller) -> None:
    caller.host(A)
    free_bytes = caller.pool.usage().free_bytes

    assert not caller.place_table(A, SamplingTable.BIAS, free_bytes + 1)
    assert caller.place_table(A, SamplingTable.BIAS, free_bytes)
    assert caller.pool.usage().free_bytes == 0


def test_blocks_that_lie_ready_give_way_to_a_table(caller: PoolCaller) -> None:
    caller.host(A)
    caller.grow(A, 1, ahead_blocks=1000)
    usage = caller.pool.usage()
    given_bytes = (len(caller.blocks[A]) + 1) * SAMPLES[A].shape.block_bytes
    spare_bytes = usage.free_bytes + caller.holdings()[A].kv_bytes - given_bytes - 2 * PAGE_BYTES

    assert caller.place_table(A, SamplingTable.BIAS, spare_bytes)


def test_pieces_come_out_of_free_memory_and_outlive_any_model(caller: PoolCaller) -> None:
    caller.host(A)
    free_bytes = caller.pool.usage().free_bytes

    assert caller.place_pieces(ADAPTERS[0], [100, PAGE_BYTES + 300, 256])

    usage = caller.pool.usage()
    assert usage.pieces_bytes == {ADAPTERS[0]: 256 + PAGE_BYTES + 512 + 256}
    assert free_bytes - 2 * PAGE_BYTES <= usage.free_bytes < free_bytes - PAGE_BYTES
    caller.drop(A)
    caller.check()
    caller.drop_pieces(ADAPTERS[0])
    assert caller.pool.usage().free_bytes == caller.pool.budget_bytes


def test_pieces_beyond_what_is_free_are_refused_and_change_nothing(caller: PoolCaller) -> None:
    caller.host(A)
    free_bytes = caller.pool.usage().free_bytes

    assert not caller.place_pieces(ADAPTERS[0], [free_bytes // 2, free_bytes // 2, 1])
    assert caller.place_pieces(ADAPTERS[0], [free_bytes // 2, free_bytes // 2])
    assert caller.pool.usage().free_bytes == 0


def test_pieces_take_nothing_of_what_is_to_stay_free(caller: PoolCaller) -> None:
    """What lies beside others on their pages takes nothing at all."""
    caller.host(A)
    free_bytes = caller.pool.usage().free_bytes

    assert not caller.place_pieces(ADAPTERS[0], [PAGE_BYTES, 256], free_bytes - PAGE_BYTES)
    assert caller.place_pieces(ADAPTERS[0], [PAGE_BYTES, 256], free_bytes - 2 * PAGE_BYTES)
    rest_bytes = caller.pool.usage().free_bytes
    assert caller.place_pieces(ADAPTERS[1], [256], rest_bytes) == isinstance(caller.pool, MappedPool)


def test_blocks_that_lie_ready_give_way_to_pieces(caller: PoolCaller) -> None:
    caller.host(A)
    caller.grow(A, 1, ahead_blocks=1000)
    usage = caller.pool.usage()
    given_bytes = (len(caller.blocks[A]) + 1) * SAMPLES[A].shape.block_bytes
    spare_bytes = usage.free_bytes + caller.holdings()[A].kv_bytes - given_bytes - 2 * PAGE_BYTES

    assert caller.place_pieces(ADAPTERS[0], [spare_bytes])


def test_a_model_that_lacks_memory_is_refused_with_the_numbers(caller: PoolCaller) -> None:
    huge = sample(range(NUM_PAGES + 1), PAGE_BYTES, digest=5)

    assert caller.pool.missing_bytes(D, huge.shape) >= PAGE_BYTES
    with pytest.raises(DeviceError, match=rf"`d` .* of {NUM_PAGES * PAGE_BYTES} are free"):
        caller.pool.place(D, huge.shape)


def test_dropping_what_is_unknown_changes_nothing(caller: PoolCaller) -> None:
    before = caller.pool.usage()
    caller.pool.drop(D)
    assert caller.pool.usage() == before
