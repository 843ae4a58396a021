"""A batcher whose KV grows and shrinks between steps, against a device that knows which blocks are there."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from hearth.core.types import RequestId
from hearth.policy.batch.batch_limits import BatchLimits
from hearth.policy.batch.blocks import BlockBook, BlockMove
from tests.policy.batch.device import (
    Driven,
    Loop,
    launched,
    names,
    request,
)


def elastic(*extents: range, floor_blocks: int = 8, max_batch_tokens: int = 64, max_seqs: int = 8) -> Loop:
    """Blocks of 4 tokens."""
    book = BlockBook(block_tokens=4, floor_blocks=floor_blocks)
    for extent in extents:
        book.add(extent)
    return Loop(BatchLimits(max_batch_tokens, max_seqs, max_context=64), book)


def clear(engine: Loop, extent: range, may_move: bool = True, may_preempt: bool = True) -> int | None:
    """How many blocks have moved; None if it was refused."""
    moves = engine.batcher.kv.clear(extent, may_move=may_move, may_preempt=may_preempt)
    engine.batcher.check()
    if moves is None:
        return None
    engine.device.copy(moves)
    return len(moves)


# --- wanted ---


def test_whoever_waits_wants_blocks_for_all_of_its_prompt() -> None:
    engine = elastic(max_batch_tokens=8)
    engine.add(request("a", range(10)))
    assert engine.batcher.kv.wanted_blocks() == 3
    engine.batcher.kv.add(range(1, 4))
    assert launched(engine).table_writes.counts == [2]
    assert engine.batcher.kv.wanted_blocks() == 1


def test_a_prefix_that_is_known_is_not_wanted() -> None:
    engine = elastic(range(1, 5))
    engine.add(request("a", range(10)))
    engine.drain()
    engine.add(request("b", [*range(9), 1, 1]))
    assert engine.batcher.kv.wanted_blocks() == 1


def test_a_running_sequence_wants_a_block_where_its_next_token_begins_one() -> None:
    engine = elastic(range(1, 9))
    engine.add(request("a", [1] * 3, max_tokens=8))
    wanted = []
    for _ in range(6):
        wanted.append(engine.batcher.kv.wanted_blocks())
        engine.step()
    assert wanted == [1, 0, 1, 0, 0, 0]


def test_nobody_wants_blocks_without_a_slot_or_a_share_of_the_step() -> None:
    for engine in (elastic(max_seqs=2), elastic(max_batch_tokens=8)):
        for name in ("a", "b", "c"):
            engine.add(request(name, [int(name, 16)] * 4))
        assert engine.batcher.kv.wanted_blocks() == 2


def test_the_longest_request_is_bounded_by_what_is_promised() -> None:
    engine = elastic(range(1, 60), floor_blocks=3)
    engine.add(request("a", [1] * 5, max_tokens=None))
    engine.drain()
    assert len(engine.outputs[RequestId("a")]) == 3 * 4 - 5


def test_without_blocks_nothing_is_planned_until_some_are_given() -> None:
    engine = elastic()
    engine.add(request("a", [1, 2, 3]))
    assert engine.step() is None
    engine.batcher.kv.add(range(40, 48))
    engine.drain()


# --- clearing ---


def crowd() -> Loop:
    """Two sequences with two blocks each, [1, 2] and [3, 4], of 8; a token of each is in flight."""
    engine = elastic(range(1, 5), range(11, 15), floor_blocks=4)
    engine.add(request("old", [1] * 7, max_tokens=6))
    engine.add(request("young", [2] * 7, max_tokens=6))
    launched(engine)
    return engine


def test_an_extent_without_live_blocks_goes_and_its_prefixes_with_it() -> None:
    engine = elastic(range(1, 5))
    engine.add(request("a", range(10)))
    engine.drain()
    assert clear(engine, range(2, 4), may_move=False, may_preempt=False) == 0
    engine.add(request("b", range(10)))
    assert engine.batcher.blocks.num_blocks == 2
    assert len(engine.batcher.blocks.cached) == 1


def test_live_blocks_move_to_the_lowest_free_ones_and_tables_follow() -> None:
    engine = crowd()
    moves = engine.batcher.kv.clear(range(1, 3), may_move=True, may_preempt=False)
    assert moves == [BlockMove(1, 11), BlockMove(2, 12)]
    engine.device.copy(moves)
    plan = launched(engine)
    assert [(write.slot, write.begin, write.blocks) for write in plan.table_writes] == [
        (0, 0, (11,)),
        (0, 1, (12,)),
    ]
    engine.drain()


def test_blocks_that_move_twice_before_a_step_are_written_once() -> None:
    engine = crowd()
    assert clear(engine, range(1, 3)) == 2
    engine.batcher.kv.add(range(1, 3))
    assert clear(engine, range(11, 13)) == 2
    assert [write.blocks for write in launched(engine).table_writes] == [(1,), (2,)]
    engine.drain()


def test_a_shared_block_moves_for_all_its_holders() -> None:
    engine = elastic(range(1, 9))
    engine.add(request("a", range(8), max_tokens=8))
    launched(engine)
    engine.commit()
    engine.add(request("b", range(8), max_tokens=8))
    launched(engine)
    assert engine.batcher.blocks.num_holders[1] == 2
    assert clear(engine, range(1, 2)) == 1
    assert len(launched(engine).table_writes) >= 2
    engine.drain()


def test_a_moved_prefix_is_still_found_and_one_that_was_moved_over_is_not() -> None:
    engine = elastic(range(1, 5))
    engine.add(request("before", [5] * 8, max_tokens=1))
    engine.drain()
    engine.add(request("moved", [6] * 6, max_tokens=2))
    launched(engine)
    engine.commit()
    book = engine.batcher.blocks
    assert (book.num_live, len(book.cached), len(book.free)) == (2, 2, 0)
    assert clear(engine, range(3, 5)) == 2
    engine.drain()
    engine.batcher.kv.add(range(30, 38))
    for name, token in (("after", 6), ("late", 5)):
        engine.add(request(name, [token] * 8, max_tokens=1))
    found = {a.request_id: a.num_cached_tokens for a in launched(engine).admissions}
    assert found == {"after": 4, "late": 0}


def test_what_may_neither_move_nor_give_way_stays_and_nothing_has_changed() -> None:
    engine = crowd()
    assert clear(engine, range(1, 3), may_move=False, may_preempt=False) is None
    assert engine.batcher.blocks.num_blocks == 8
    assert not launched(engine).table_writes


def test_the_youngest_give_way_where_live_blocks_may_not_move() -> None:
    engine = crowd()
    assert clear(engine, range(3, 5), may_move=False) == 0
    assert engine.batcher.take_preempted() == ("young",)
    assert names(launched(engine)) == ["old"]
    engine.drain()


def test_the_oldest_moves_when_only_what_is_promised_is_left() -> None:
    engine = crowd()
    assert clear(engine, range(11, 15)) == 0
    assert clear(engine, range(1, 3)) is None  # two blocks are less than promised
    engine = crowd()
    engine.batcher.kv.clear(range(13, 15), may_move=True, may_preempt=True)
    assert clear(engine, range(1, 3)) == 2
    assert engine.batcher.take_preempted() == ()
    engine.drain()


def test_nobody_is_preempted_for_what_is_promised() -> None:
    engine = crowd()
    assert clear(engine, range(1, 5), may_move=False) == 0
    assert engine.batcher.take_preempted() == ("young", "old")
    engine.drain()
    engine = crowd()
    assert clear(engine, range(11, 15)) == 0
    assert clear(engine, range(3, 5), may_move=False) is None
    engine.drain()


def test_whoever_is_promised_nothing_loses_all_and_goes_on_with_new_blocks() -> None:
    engine = crowd()
    engine.commit()  # as when it was flushed
    for extent in (range(11, 15), range(3, 5), range(1, 3)):
        moves = engine.batcher.kv.clear(extent, may_move=True, may_preempt=True, keeps_floor=False)
        assert moves is not None
        engine.device.copy(moves)
        engine.batcher.check()
    assert set(engine.batcher.take_preempted()) == {"young", "old"}
    assert engine.batcher.blocks.num_blocks == 0

    engine.batcher.kv.add(range(1, 9))
    engine.drain()


def test_a_cancelled_sequence_leaves_no_write_to_the_slot_of_the_next() -> None:
    engine = crowd()
    assert clear(engine, range(1, 3)) == 2
    engine.cancel(RequestId("old"))
    engine.add(request("new", [4] * 5))
    plan = launched(engine)
    assert [write.slot for write in plan.table_writes] == [0]
    engine.drain()


# --- any schedule ---

EXTENT_BLOCKS = 3


class ElasticSchedules(Driven):
    """Any order of arrivals, steps up to two ahead, growing, clearing and cancelling.

    Extents come at any place, as on an arena; the sink and blocks between them are never there.
    """

    @initialize(
        max_batch_tokens=st.integers(1, 16),
        max_seqs=st.integers(1, 5),
        block_tokens=st.integers(1, 4),
        spare_blocks=st.integers(0, 4),
    )
    def start(self, max_batch_tokens: int, max_seqs: int, block_tokens: int, spare_blocks: int) -> None:
        book = BlockBook(block_tokens, floor_blocks=-(-13 // block_tokens) + spare_blocks)
        self.engine = Loop(BatchLimits(max_batch_tokens, max_seqs, max_context=30), book)
        self.extents: list[range] = []
        self.num_added = 0

    @rule(place=st.integers(0, 8))
    def grow(self, place: int) -> None:
        extent = range(2 + 4 * place, 2 + 4 * place + EXTENT_BLOCKS)
        if extent not in self.extents:
            self.extents.append(extent)
            self.engine.batcher.kv.add(extent)

    @rule()
    def grow_as_wanted(self) -> None:
        """After which the next plan preempts nobody and forgets no prefix, but for who is in the way.

        That is one who stands behind the next, and has the slot that it needs or is in the midst of a prompt.
        """
        batcher, book = self.engine.batcher, self.engine.batcher.blocks
        wanted = batcher.kv.wanted_blocks()
        place = 9
        while len(book.free) < wanted:
            if range(2 + 4 * place, 2 + 4 * place + EXTENT_BLOCKS) not in self.extents:
                self.grow(place)
            place += 1
        if len(self.engine.in_flight) < 2:
            num_free, num_blocks = len(book.free), book.num_blocks
            in_the_way = tuple(one.request_id for one in batcher._in_the_way())
            assert len(in_the_way) <= 1
            batcher.take_preempted()
            plan = self.engine.launch()
            written = 0 if plan is None else num_free - len(book.free)
            assert written <= wanted
            assert in_the_way or written >= 0
            assert (batcher.take_preempted(), book.num_blocks) == (in_the_way, num_blocks)

    @precondition(lambda self: self.extents)
    @rule(data=st.data(), may_move=st.booleans(), may_preempt=st.booleans())
    def clear(self, data: st.DataObject, may_move: bool, may_preempt: bool) -> None:
        extent = data.draw(st.sampled_from(self.extents))
        batcher, book = self.engine.batcher, self.engine.batcher.blocks
        num_live, num_available, num_blocks = len(book.live_in(extent)), book.num_available, book.num_blocks
        num_running = batcher.num_running
        batcher.take_preempted()
        num_moved = clear(self.engine, extent, may_move, may_preempt)
        preempted = batcher.take_preempted()
        if num_moved is None:
            assert (book.num_available, book.num_blocks, preempted) == (num_available, num_blocks, ())
            assert num_live
            assert not may_preempt or num_blocks - len(extent) < book.floor_blocks
            return
        self.extents.remove(extent)
        assert book.num_blocks == num_blocks - len(extent)
        assert not num_moved or may_move
        if preempted:
            assert may_preempt
            assert book.num_blocks >= book.floor_blocks
            assert not may_move or len(preempted) < num_running, "the oldest could have moved"

    @invariant()
    def every_request_is_live_or_ended(self) -> None:
        if hasattr(self, "engine"):
            assert len(self.engine.live) + len(self.engine.reasons) == self.num_added

    def teardown(self) -> None:
        """With what is promised, and no more, everything ends."""
        if hasattr(self, "engine"):
            book = self.engine.batcher.blocks
            if (num_lacking := book.floor_blocks - book.num_blocks) > 0:
                self.engine.batcher.kv.add(range(1000, 1000 + num_lacking))
            self.engine.drain()
            assert len(self.engine.reasons) == self.num_added


ElasticSchedules.TestCase.settings = settings(derandomize=True, stateful_step_count=40)
TestAnyElasticSchedule = ElasticSchedules.TestCase
