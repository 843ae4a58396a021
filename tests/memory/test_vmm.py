"""Mapped pages on real memory of the host: addresses, sharing, and when the driver is called."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.host_pages import Done, HostPages
from hearth.core.errors import DeviceError
from hearth.core.types import AdapterId, Hold, ModelId
from hearth.memory.pages import Mark
from hearth.memory.vmm import MappedPool
from hearth.models.layout import ByteRange
from hearth.policy.memory.kv_range import KvRange
from tests.memory.pool_caller import Holds, PoolCaller, Sample, sample, wipe

PAGE = 4096
A, B, C = (ModelId(name) for name in "abc")
SAMPLES: dict[ModelId, Sample] = {
    A: sample([1, 2, 3, 4, 5], PAGE, digest=1, block_bytes=1500, workspace_bytes=2 * PAGE),
    B: sample([1, 2, 3, 7, 8], PAGE, digest=2, block_bytes=PAGE, workspace_bytes=PAGE),
    C: sample([11, 12, 13], PAGE, digest=6, block_bytes=2 * PAGE, workspace_bytes=0),  # wants the space of A
}


class Watched(HostPages):
    """Notes what happens to pages, and lets tests wait until one is mapped."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages, PAGE, new_mark=self._mark)
        self.story: list[str] = []
        self.mapped_once = threading.Semaphore(0)

    def map(self, address: int, *pages: int) -> None:
        super().map(address, *pages)
        self.story.append(f"map {len(pages)}")
        self.mapped_once.release(len(pages))

    def unmap(self, address: int, num_pages: int = 1) -> None:
        super().unmap(address, num_pages)
        self.story.append(f"unmap {num_pages}")

    def _mark(self) -> Mark:
        return _Noted(self.story)


class _Noted(Done):
    def __init__(self, story: list[str]) -> None:
        self._story = story

    def synchronize(self) -> None:
        self._story.append("wait")


@contextmanager
def hosting(pages: HostPages) -> Iterator[PoolCaller]:
    holds = Holds()
    with closing(MappedPool(pages, holds.eviction_terms, wipe=wipe)) as pool:
        caller = PoolCaller(pool, holds, SAMPLES)
        yield caller
        caller.check()


@pytest.fixture
def pages() -> Watched:
    return Watched(24)


@pytest.fixture
def caller(pages: Watched) -> Iterator[PoolCaller]:
    with hosting(pages) as caller:
        yield caller


def addresses(caller: PoolCaller, model: ModelId) -> tuple[int, ...]:
    space = caller.spaces[model]
    weights = next(iter(space.places.values())).base
    return weights.data_ptr(), space.kv.data_ptr(), space.workspace.data_ptr()


def test_addresses_are_those_of_the_digest_however_often_a_model_goes(
    caller: PoolCaller, pages: Watched
) -> None:
    caller.host(B)
    caller.host(A)
    first = addresses(caller, A)
    caller.retire(A)
    caller.host(A)
    assert addresses(caller, A) == first
    for model in (A, B):
        caller.drop(model)
    caller.host(A)

    assert addresses(caller, A) == first
    assert first[0] == pages.base_address + 1 * pages.space_bytes
    assert caller.pool.usage().fallbacks["address"] == 0


def test_of_two_that_want_one_slot_the_second_is_elsewhere_and_that_is_counted(
    caller: PoolCaller, caplog: pytest.LogCaptureFixture
) -> None:
    caller.host(A)
    caller.host(C)
    caller.retire(C)
    caller.host(C)

    assert caller.pool.usage().fallbacks["address"] == 1
    assert [record.message.split()[0] for record in caplog.records] == ["fallback"]


def test_addresses_are_those_of_the_slot_where_a_model_has_one(caller: PoolCaller, pages: Watched) -> None:
    in_slots = {A: 3, C: 1}  # which A would have without
    for model, slot in in_slots.items():
        caller.samples[model] = replace(
            SAMPLES[model], shape=replace(SAMPLES[model].shape, slot=slot, tables_bytes=100)
        )
        caller.host(model)
        assert addresses(caller, model)[0] == pages.base_address + slot * pages.space_bytes
    assert caller.pool.usage().fallbacks["address"] == 0

    caller.retire(A)
    caller.samples[A] = SAMPLES[A]  # its slot is another one, which C has now
    caller.host(A)
    assert caller.pool.usage().fallbacks["address"] == 1
    caller.drop(C)
    moved = replace(SAMPLES[A].shape, slot=1)
    caller.retire(A)
    caller.samples[A] = replace(SAMPLES[A], shape=moved)
    caller.host(A)
    assert addresses(caller, A)[0] == pages.base_address + 1 * pages.space_bytes


def test_tables_lie_in_pages_of_their_own_behind_kv(pages: Watched) -> None:
    with hosting(pages) as caller:
        caller.samples[A] = replace(SAMPLES[A], shape=replace(SAMPLES[A].shape, tables_bytes=PAGE + 1))
        caller.host(A)
        space = caller.spaces[A]
        offset = space.tables.data_ptr() - addresses(caller, A)[0]
        assert offset == pages.space_bytes // 64 * 59
        assert space.kv.data_ptr() + len(space.kv) <= space.tables.data_ptr()
        assert caller.holdings()[A].tables_bytes == 2 * PAGE

        too_large = replace(SAMPLES[B].shape, tables_bytes=pages.space_bytes // 64 + 1)
        with pytest.raises(DeviceError, match="the tables of `b` could take"):
            caller.pool.place(B, too_large)


def test_a_place_costs_the_thread_of_the_steps_no_call_of_the_driver(pages: Watched) -> None:
    """Another thread maps workspace and tables, beside the first bytes; also one that comes too late."""
    with hosting(pages) as caller:
        num_before = pages.num_calls
        caller.holds.by_model[A] = Hold.BUSY
        space = caller.pool.place(A, SAMPLES[A].shape)
        assert pages.num_calls == num_before
        caller.pool.prepare_rest(A)
        space.workspace.fill_(1)
        num_mapped = pages.num_calls
        caller.pool.prepare_rest(A)
        assert pages.num_calls == num_mapped > num_before, "what is mapped is mapped again"
        caller.pool.load_ended(A, is_whole=False)
        caller.pool.drop(A)
        caller.pool.prepare_rest(A)
        assert pages.num_calls == num_mapped


def test_a_refused_address_costs_nothing_but_the_address(pages: Watched) -> None:
    other = HostPages(1, PAGE)
    wanted = other.base_address + 1 * other.space_bytes
    assert other.reserve(wanted) == wanted
    with hosting(pages) as caller:
        caller.host(A)
        caller.grow(A, 5)
        caller.check()

        assert addresses(caller, A)[0] != wanted
        assert caller.pool.usage().fallbacks["address"] == 1
        for _ in range(3):
            caller.drop(A)
            caller.host(A)
        assert len(pages.reserved) == 1
    other.free(wanted)
    other.close()


def test_where_all_spaces_are_taken_who_has_nothing_left_loses_the_oldest(pages: Watched) -> None:
    names = [ModelId(f"m{number}") for number in range(pages.num_spaces + 1)]
    with hosting(pages) as caller:
        for number, model in enumerate(names):
            caller.samples[model] = sample([50 + number], PAGE, digest=number)
        for model in (*names[1:-1], names[0]):
            caller.host(model)
            caller.retire(model)
        caller.take(2 * PAGE, Hold.RETAINED)
        nothing = {one.model for one in caller.pool.usage().holdings if not one.weights_bytes}
        assert len(nothing) == 2
        first = next(name for name in (*names[1:-1], names[0]) if name in nothing)
        assert caller.pool.take_displaced() == []

        caller.host(names[-1])
        caller.check()
        assert caller.pool.take_displaced() == [first]
        assert caller.pool.take_displaced() == []
        assert len(pages.reserved) == pages.num_spaces
        caller.host(first)  # at the addresses of the other one
        caller.check()
        assert len(pages.reserved) == pages.num_spaces


class Refusing(HostPages):
    """Refuses the call of the driver that `num_calls_left` counts down to."""

    num_calls_left = -1

    def map(self, address: int, *pages: int) -> None:
        self._count()
        super().map(address, *pages)

    def unmap(self, address: int, num_pages: int = 1) -> None:
        self._count()
        super().unmap(address, num_pages)

    def _count(self) -> None:
        self.num_calls_left -= 1
        if self.num_calls_left == 0:
            raise DeviceError("refused")


@pytest.mark.parametrize("num_calls", range(1, 5))
def test_what_the_driver_refuses_is_not_in_the_books(num_calls: int) -> None:
    pages = Refusing(12, PAGE)
    with hosting(pages) as caller:
        caller.host(A)
        caller.retire(A)
        pages.num_calls_left = num_calls
        with pytest.raises(DeviceError, match="refused"):
            caller.host(C)
        if caller.gaps.pop(C, None) is not None:
            caller.holds.loading.discard(C)
            caller.pool.load_ended(C, is_whole=False)
        caller.drop(C)
        for model in (A, C):
            caller.host(model)
            caller.check()


def test_equal_chunks_are_had_once_and_outlive_each_of_their_models(caller: PoolCaller) -> None:
    caller.host(A)
    free_bytes = caller.pool.usage().free_bytes
    caller.begin(B)

    assert [gap.part for gap in caller.gaps[B]] == [ByteRange(3 * PAGE, 5 * PAGE)]
    assert caller.pool.usage().free_bytes == free_bytes - 3 * PAGE  # two of weights, one for the sink
    caller.end(B, is_whole=True)
    assert [one.shared_bytes for one in caller.pool.usage().holdings] == [3 * PAGE, 3 * PAGE]

    caller.drop(A)
    caller.check()  # finds B intact
    caller.begin(A)
    assert [gap.part for gap in caller.gaps[A]] == [ByteRange(3 * PAGE, 5 * PAGE)]
    caller.end(A, is_whole=True)


def test_what_is_shared_with_a_busy_model_frees_nothing(caller: PoolCaller) -> None:
    caller.host(A)
    caller.host(B)
    caller.retire(B)

    assert caller.take(100 * PAGE, Hold.WARM) == 2 * PAGE
    caller.check()  # finds A intact


def test_what_two_idle_models_share_is_taken_from_both(caller: PoolCaller) -> None:
    caller.host(A)
    caller.host(B)
    caller.retire(A)
    caller.retire(B)
    free_bytes = caller.pool.usage().free_bytes

    assert caller.take(5 * PAGE, Hold.RETAINED) == 5 * PAGE
    assert caller.pool.usage().free_bytes == free_bytes + 5 * PAGE


def test_chunks_that_are_still_loading_are_not_shared(caller: PoolCaller) -> None:
    caller.begin(A)
    caller.begin(B)
    assert [gap.part for gap in caller.gaps[B]] == [ByteRange(0, 5 * PAGE)]
    caller.end(A, is_whole=False)
    caller.end(B, is_whole=True)
    caller.check()


def test_all_models_have_one_workspace(caller: PoolCaller) -> None:
    caller.host(B)
    assert caller.pool.usage().workspace_bytes == PAGE
    caller.host(A)
    assert caller.pool.usage().workspace_bytes == 2 * PAGE

    caller.spaces[A].workspace[:PAGE] = 7
    assert (caller.spaces[B].workspace == 7).all()

    caller.retire(A)
    assert caller.pool.usage().workspace_bytes == PAGE


def test_pages_that_come_back_to_their_places_cost_no_call(caller: PoolCaller, pages: Watched) -> None:
    caller.host(A)
    caller.grow(A, 10)
    caller.retire(A)
    caller.take(3 * PAGE, Hold.RETAINED)
    pages.story.clear()

    caller.host(A)
    caller.grow(A, 10)

    assert [one for one in pages.story if one != "wait"] == []  # waits are for what wiped them


class _Held:
    """A `Mark` of a device that is busy until `is_done`."""

    def __init__(self) -> None:
        self.is_waited_for, self.is_done = threading.Event(), threading.Event()

    def synchronize(self) -> None:
        self.is_waited_for.set()
        assert self.is_done.wait(timeout=30), "nobody ended it"

    def has_passed(self) -> bool:
        return self.is_done.is_set()


def test_nothing_is_unmapped_that_the_device_still_uses() -> None:
    mark = _Held()
    pages = HostPages(8, PAGE, new_mark=lambda: mark)
    with hosting(pages) as caller:
        caller.samples[A] = sample([1, 2], PAGE, digest=1, workspace_bytes=0)
        caller.samples[B] = sample([7, 8, 9, 10], PAGE, digest=2, workspace_bytes=0)
        caller.host(A)
        caller.grow(A, 4)
        caller.shrink(A)
        caller.shrink(A)
        before = dict(pages.mapped)
        placing = threading.Thread(target=caller.host, args=(B,))
        placing.start()
        assert mark.is_waited_for.wait(timeout=30)

        during = dict(pages.mapped)
        mark.is_done.set()
        placing.join()
        assert before.items() <= during.items()
        assert not before.items() <= pages.mapped.items()
        assert B in caller.holdings()


class _InFlight:
    """A device on which a step is in flight: mutable, for the test to end it."""

    def __init__(self) -> None:
        self.is_done, self.num_marks = False, 0

    def mark(self) -> Mark:
        self.num_marks += 1
        return self

    def synchronize(self) -> None:
        assert self.is_done, "somebody waits for a step that nobody ends"

    def has_passed(self) -> bool:
        return self.is_done


@pytest.mark.parametrize("is_computing", [False, True])
def test_who_gets_weights_waits_for_the_step_that_reads_them(is_computing: bool) -> None:
    step = _InFlight()
    holds, pages = Holds(), HostPages(6, PAGE, new_mark=step.mark)
    with closing(MappedPool(pages, holds.eviction_terms)) as pool:
        caller = PoolCaller(pool, holds, SAMPLES)
        caller.samples[A] = sample([1, 2], PAGE, digest=1, workspace_bytes=0)
        caller.host(A)
        caller.holds.by_model[A] = Hold.PAUSED
        caller.holds.computing = {A} if is_computing else set()

        pool.take_weights(2 * PAGE, Hold.PAUSED)

        assert pool.free_bytes > 0, "it is free in the books at once"
        assert step.num_marks == is_computing
        step.is_done = True


@pytest.mark.parametrize("others_stay", [False, True])
def test_who_gets_the_place_of_pieces_waits_for_the_steps_that_read_them(others_stay: bool) -> None:
    step = _InFlight()
    old, other, new = (AdapterId(name * 64) for name in "abc")
    with closing(MappedPool(HostPages(1, PAGE, new_mark=step.mark), Holds().eviction_terms)) as pool:
        pool.pieces.place(old, [256])
        pool.pieces.prepare(old)
        if others_stay:
            pool.pieces.place(other, [256])
        pool.pieces.drop(old)

        assert pool.pieces.place(new, [256]) is not None, "it is free in the books at once"
        with pytest.raises(AssertionError, match="waits for a step"):
            pool.pieces.prepare(new)
        step.is_done = True
        pool.pieces.prepare(new)


@pytest.mark.parametrize("others_stay", [False, True])
@pytest.mark.parametrize("has_passed", [False, True])
def test_who_gets_the_place_of_pieces_that_no_step_in_flight_reads_waits_for_none(
    others_stay: bool, has_passed: bool
) -> None:
    step, last_read = _InFlight(), _InFlight()
    last_read.is_done = has_passed
    old, other, new = (AdapterId(name * 64) for name in "abc")
    with closing(MappedPool(HostPages(1, PAGE, new_mark=step.mark), Holds().eviction_terms)) as pool:
        pool.pieces.place(old, [256])
        pool.pieces.prepare(old)
        if others_stay:
            pool.pieces.place(other, [256])
        pool.pieces.drop(old, last_read)
        pool.pieces.place(new, [256])

        with pytest.raises(AssertionError, match="waits for a step") if not has_passed else nullcontext():
            pool.pieces.prepare(new)
        step.is_done = True
        pool.check()


def test_pieces_that_were_given_up_under_a_step_are_waited_for_though_others_of_their_page_are_not() -> None:
    step, done = _InFlight(), _InFlight()
    done.is_done = True
    read, rested, new = (AdapterId(name * 64) for name in "abc")
    for order in ((read, rested), (rested, read)):
        step.is_done = False
        with closing(MappedPool(HostPages(1, PAGE, new_mark=step.mark), Holds().eviction_terms)) as pool:
            for owner in order:
                pool.pieces.place(owner, [256])
                pool.pieces.prepare(owner)
            for owner in order:  # the page goes with the last of them
                pool.pieces.drop(owner, done if owner == rested else None)
            pool.pieces.place(new, [512])
            with pytest.raises(AssertionError, match="waits for a step"):
                pool.pieces.prepare(new)
            step.is_done = True


def test_pieces_lie_in_a_space_of_their_own_which_is_no_model_s(pages: Watched) -> None:
    with hosting(pages) as caller:
        assert caller.place_pieces(AdapterId("a" * 64), [PAGE, 1])
        spaces = {pages.base_address + index * pages.space_bytes for index in range(pages.num_spaces)}
        assert not pages.reserved & spaces
        assert caller.host(A)
        assert caller.pool.usage().fallbacks["address"] == 0


def test_the_books_change_without_the_driver_and_a_load_waits_for_the_device(pages: Watched) -> None:
    with hosting(pages) as caller:
        caller.host(A)
        caller.grow(A, 1000)  # all there is
        pages.story.clear()
        for _ in range(8):
            caller.shrink(A)
        assert pages.story == []
        caller.begin(C)  # maps its sink, of two pages
        assert pages.story == ["wait", "wait", "unmap 2", "map 2"]
        pages.story.clear()
        caller.end(C, is_whole=True)

        assert pages.story == ["wait", "unmap 1", "map 1"] * 3  # chunk by chunk, as this test prepares them


def test_kv_is_mapped_ahead_and_given_without_a_call(caller: PoolCaller, pages: Watched) -> None:
    caller.host(B)
    while pages.mapped_once.acquire(blocking=False):
        pass
    caller.grow(B, 1, ahead_blocks=3)
    for _ in range(4):
        assert pages.mapped_once.acquire(timeout=60)
    caller.pool.check()  # returns when the mapping under way is in the books
    pages.story.clear()

    caller.grow(B, 3)

    assert pages.story == []
    assert caller.blocks[B] == {1, 2, 3, 4}


def test_what_is_only_ready_goes_first_when_others_need_it(caller: PoolCaller) -> None:
    caller.host(B)
    caller.grow(B, 1, ahead_blocks=1000)
    assert caller.pool.usage().free_bytes == 0
    assert caller.holdings()[B].kv_bytes > 10 * PAGE

    assert caller.pool.missing_bytes(C, SAMPLES[C].shape) == 0
    caller.host(C)
    caller.grow(C, 2)

    assert len(caller.blocks[C]) == 2
    caller.check()


def test_loads_and_growth_go_on_side_by_side(caller: PoolCaller) -> None:
    caller.host(B)
    caller.begin(A)
    loading = threading.Thread(target=caller.fill, args=(A, caller.gaps[A]))
    loading.start()
    for _ in range(50):
        caller.grow(B, 4, ahead_blocks=4)
        while caller.shrink(B):
            pass
    loading.join()
    caller.end(A, is_whole=True)
    caller.check()


def test_a_model_beyond_the_addresses_of_a_space_is_refused(caller: PoolCaller) -> None:
    huge = sample([1], PAGE, digest=1, max_blocks=10**9)
    with pytest.raises(DeviceError, match=r"the KV of `a` could take 4096000000000 bytes"):
        caller.pool.missing_bytes(A, huge.shape)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 60))
def test_extents_cover_all_blocks_and_are_taken_back_as_they_were_given(
    block_bytes: int, page_bytes: int, max_blocks: int
) -> None:
    kv = KvRange(block_bytes, page_bytes, max_blocks)
    num_pages = [kv.sink_pages]
    while (more := kv.one_more(num_pages[-1])) is not None:
        assert kv.num_blocks(more) > kv.num_blocks(num_pages[-1])
        assert more * page_bytes >= kv.num_blocks(more) * block_bytes
        num_pages.append(more)

    assert kv.num_blocks(num_pages[-1]) == max_blocks
    for before, after in pairwise(num_pages):
        assert kv.one_less(after) == before
    assert kv.one_less(num_pages[0]) is None


def test_views_of_unmapped_memory_can_be_made(pages: Watched) -> None:
    address = pages.reserve(None)
    view = pages.bytes_at(address, pages.space_bytes)
    pages.map(address + PAGE, 3)
    pages.map(address + 5 * PAGE, 3)
    view[PAGE : 2 * PAGE] = torch.arange(PAGE, dtype=torch.int64).to(torch.uint8)

    assert torch.equal(view[5 * PAGE : 6 * PAGE], view[PAGE : 2 * PAGE])
    for place in (address + PAGE, address + 5 * PAGE):
        pages.unmap(place)
    pages.free(address)
    pages.close()


def test_the_first_bytes_of_a_model_come_ahead_of_the_rest_and_into_free_pages_only(
    caller: PoolCaller,
) -> None:
    assert caller.front(A, 2 * PAGE) == 2 * PAGE
    assert caller.front(A, PAGE + 1) == 2 * PAGE
    holding = caller.holdings()[A]
    assert (holding.weights_bytes, holding.kv_bytes) == (4 * PAGE, 0)
    assert caller.pool.usage().workspace_bytes == 0

    caller.begin(A)
    (gap,) = caller.gaps[A]
    assert (gap.part.begin, gap.part.end) == (4 * PAGE, 5 * PAGE)
    caller.end(A, is_whole=True)
    assert caller.front(A, PAGE) == 0, "nothing is missing"


def test_bytes_that_came_ahead_may_be_taken_and_those_that_did_not_come_are_given_back(
    caller: PoolCaller,
) -> None:
    free_bytes = caller.pool.free_bytes
    assert caller.front(A, 3 * PAGE, is_whole=False) == 0
    assert caller.pool.free_bytes == caller.pool.usage().free_bytes == free_bytes
    assert caller.front(A, 3 * PAGE) == 3 * PAGE
    assert caller.take(PAGE, Hold.RETAINED) == PAGE
    assert caller.front(A, 5 * PAGE) == 3 * PAGE


def test_no_more_comes_ahead_than_is_free_and_nobody_loses_an_address_for_it() -> None:
    with hosting(HostPages(3, PAGE, num_spaces=1)) as caller:
        assert caller.front(A, 5 * PAGE) == 3 * PAGE
        assert caller.front(A, 5 * PAGE) == 0, "nothing is free"
        caller.take(3 * PAGE, Hold.RETAINED)
        assert caller.front(C, PAGE) == 0, "its addresses are another model's"
        assert caller.pool.take_displaced() == []
