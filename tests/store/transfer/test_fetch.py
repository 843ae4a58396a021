"""Chunks into host memory: order, turns, sharing, failing, calling off; deliveries wait for leave."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hearth.core.errors import ChunkMissing, LoadCancelled, StoreError
from hearth.core.types import Rung
from hearth.store.tiers.chunk_prices import ChunkPrices
from hearth.store.tiers.model import StoredModel
from hearth.store.tiers.remote import RemoteModel
from hearth.store.tiers.segment import Segment
from hearth.store.transfer.fetch import NUM_FIRST_CELLS, REFILL_WINDOW, WINDOW, Fetch, Fetcher, HostChunk
from hearth.store.transfer.record import Delivery
from tests.store.stored import (
    CHUNK_BYTES,
    PATIENCE_S,
    Ask,
    Gated,
    Shelf,
    all_chunks,
    consume,
    fetching,
    model_of,
    parts_of,
    until,
)

A, B, C = parts_of(1, 6), parts_of(2, 6), parts_of(3, 6)
LONG, LONGER = parts_of(4, 40), parts_of(5, 45)


def start(fetcher: Fetcher, model: StoredModel) -> Fetch:
    return fetcher.fetch(model, all_chunks(model))


def assert_settled(fetcher: Fetcher) -> None:
    """Nobody holds anything any more."""
    fetcher.book.check()
    assert (fetcher.book.num_leased, fetcher.book.num_filling) == (0, 0)


class Quick(Shelf):
    """Delivers within a moment."""

    def deliver(
        self, model: StoredModel, index: int, buffer: memoryview, is_wanted: Callable[[], bool]
    ) -> Delivery:
        return replace(super().deliver(model, index, buffer, is_wanted), read_s=0.001, verify_s=0.001)


class TestLendingAtOnce:
    def test_chunks_that_are_all_there_are_taken_by_one_call(self) -> None:
        model = model_of("a", A)
        with fetching(Shelf(A), num_cells=8) as fetcher:
            assert consume(start(fetcher, model)) == b"".join(A)
            num_hits = fetcher.counters.num_hits

            cells = fetcher.lease(model, [3, 1])

            assert cells is not None
            assert fetcher.book.num_leased == 2
            lent = fetcher.leased(model, [3, 1], cells)
            assert [chunk.cell for chunk in lent.taken] == cells
            assert [bytes(chunk.data) for chunk in lent.taken] == [A[3], A[1]]
            assert fetcher.counters.num_hits == num_hits + 2
            assert (fetcher.book.num_leased, lent.is_finished) == (2, False)
            lent.release(*lent.taken)
            assert lent.is_finished
            assert_settled(fetcher)

    def test_what_would_have_to_be_waited_for_is_not_lent_and_nothing_is_held(self) -> None:
        a, long = model_of("a", A), model_of("long", LONG)
        with fetching(Shelf(A, LONG), num_cells=64) as fetcher:
            assert fetcher.lease(a, all_chunks(a)) is None
            fetch = fetcher.fetch(a, [0, 1])
            assert consume(fetch) == b"".join(A[:2])
            assert fetcher.lease(a, [0, 1, 2]) is None, "one is missing"
            assert_settled(fetcher)
            assert consume(start(fetcher, long)) == b"".join(LONG)
            assert len(LONG) > WINDOW
            assert fetcher.lease(long, all_chunks(long)) is None, "a load has fewer at a time"
            assert_settled(fetcher)
        assert fetcher.lease(a, [0]) is None, "it is closed"


class TestPassingOn:
    def test_a_load_that_passes_on_goes_through_the_first_cells_and_leaves_nothing(self) -> None:
        model, cells = model_of("long", LONG), set[int]()
        with fetching(Quick(LONG), num_cells=64, num_readers=4) as fetcher:
            fetch = fetcher.fetch(model, all_chunks(model), pass_through=True)
            for chunk in fetch:
                assert bytes(chunk.data) == LONG[chunk.index]
                cells.add(chunk.cell)
                fetch.release(chunk)
            assert (fetch.passed_through, fetcher.book.num_resident) == (list(range(len(LONG))), 0)
        assert max(cells) < NUM_FIRST_CELLS < len(LONG)
        assert_settled(fetcher)

    @pytest.mark.parametrize("shelf", [Shelf(LONG), Quick(LONG, rung=Rung.OBJECT)])
    def test_what_took_long_to_read_or_came_from_afar_stays(self, shelf: Shelf) -> None:
        model = model_of("long", LONG)
        with fetching(shelf, num_cells=64) as fetcher:
            fetch = fetcher.fetch(model, all_chunks(model), pass_through=True)
            assert consume(fetch) == b"".join(LONG)
            until(lambda: fetcher.book.num_resident == len(LONG) and not fetcher.book.num_leased)
            assert not fetch.passed_through

    def test_what_was_there_or_is_in_use_stays(self) -> None:
        model = model_of("a", A)
        with fetching(Quick(A), num_cells=64) as fetcher:
            consume(fetcher.fetch(model, [0]))
            passing = fetcher.fetch(model, all_chunks(model), pass_through=True)
            taken = list(passing)
            other = fetcher.fetch(model, [1])
            held = list(other)
            passing.release(*taken)
            other.release(*held)
            ids = model.manifest.chunk_ids
            assert fetcher.resident(ids) == [ids[0], ids[1]]

    def test_chunks_that_nobody_waits_for_spare_the_first_cells(self) -> None:
        model = model_of("a", A)
        with fetching(Quick(A), num_cells=NUM_FIRST_CELLS + 4) as fetcher:
            fetch = fetcher.fetch(model, all_chunks(model), is_prefetch=True)
            cells = [chunk.cell for chunk in fetch]
            fetch.cancel()
        assert cells == [*range(NUM_FIRST_CELLS, NUM_FIRST_CELLS + 4), 0, 1]

    def test_a_refill_leaves_readers_to_others_and_is_no_demand(self) -> None:
        gated, model = Gated(Shelf(A)), model_of("a", A)
        with fetching(gated, num_cells=64, num_readers=8) as fetcher:
            fetch = fetcher.refill(model, all_chunks(model))
            assert fetcher.book.num_filling == REFILL_WINDOW < len(A)
            gated.open()
            assert consume(fetch) == b"".join(A)
            worth = fetcher._prices.of_host_chunk(model.manifest.chunk_ids[0])
            assert worth == ChunkPrices().of_host_chunk("of nobody")


class TestOrder:
    def test_chunks_come_in_the_order_that_was_asked_for(self) -> None:
        with fetching(Shelf(A), num_cells=8, num_readers=4) as fetcher:
            fetch = fetcher.fetch(model_of("a", A), [4, 0, 5, 2])
            assert consume(fetch) == A[4] + A[0] + A[5] + A[2]
        assert_settled(fetcher)

    def test_a_chunk_that_is_there_is_not_read_again(self) -> None:
        shelf = Shelf(A)
        with fetching(shelf, num_cells=8) as fetcher:
            consume(start(fetcher, model_of("a", A)))
            again = [chunk.delivery for chunk in start(fetcher, model_of("a", A))]
        assert again == [None] * len(A)
        assert (len(shelf.asked), fetcher.counters.num_hits) == (len(A), len(A))

    def test_two_loads_in_short_memory_take_turns_by_chunk(self) -> None:
        gated = Gated(Shelf(A, B))
        order = []
        with fetching(gated, num_cells=2) as fetcher:
            fetches = {name: start(fetcher, model_of(name, parts)) for name, parts in [("a", A), ("b", B)]}
            chunks = {name: iter(fetch) for name, fetch in fetches.items()}
            for _ in range(len(A) + len(B)):
                ask = gated.next()
                order.append((ask.model, ask.index))
                ask.allow()
                fetches[ask.model].release(next(chunks[ask.model]))
        turns = "".join(name for name, _ in order)
        assert turns.startswith("aa")  # it was alone when it took both cells
        assert turns[2:-2] in ("abababab", "babababa")
        assert [at for name, at in order if name == "a"] == [at for name, at in order if name == "b"]

    def test_chunks_that_nobody_waits_for_come_while_no_other_load_wants_any(self) -> None:
        gated = Gated(Shelf(A, B))
        order = ""
        with fetching(gated, num_cells=2) as fetcher:
            ahead = fetcher.fetch(model_of("a", A), all_chunks(model_of("a", A)), is_prefetch=True)
            fetches = {"a": ahead, "b": start(fetcher, model_of("b", B))}
            chunks = {name: iter(fetch) for name, fetch in fetches.items()}
            for _ in range(len(A) + len(B)):
                ask = gated.next()
                order += ask.model
                ask.allow()
                fetches[ask.model].release(next(chunks[ask.model]))
        assert order == "aa" + "b" * len(B) + "aaaa"  # it was alone when it took both cells
        assert_settled(fetcher)

    def test_a_prefetch_takes_chunks_in_host_memory_while_a_load_waits_for_cells(self) -> None:
        gated, model, order = Gated(Shelf(A, B)), model_of("a", A), ""
        with fetching(gated, num_cells=3) as fetcher:
            first = fetcher.fetch(model, [0])
            gated.next().allow()
            (held,) = first
            load = start(fetcher, model_of("b", B))
            ahead = fetcher.refill(model, [0, 1])
            chunks, behind = iter(load), iter(ahead)
            assert ahead.wait(0, PATIENCE_S)
            ahead.release(next(behind))
            assert not ahead.wait(1, 0.0)  # it has to be read, and the load comes first
            for _ in B:
                ask = gated.next()
                order += ask.model
                ask.allow()
                load.release(next(chunks))
            gated.open()
            ahead.release(next(behind))
            first.release(held)
        assert order == "b" * len(B)
        assert_settled(fetcher)

    def test_a_load_that_is_called_off_holds_up_nobody(self) -> None:
        gated = Gated(Shelf(A, B))
        with fetching(gated, num_cells=2) as fetcher:
            wanted = start(fetcher, model_of("b", B))
            ahead = fetcher.fetch(model_of("a", A), all_chunks(model_of("a", A)), is_prefetch=True)
            gated.open()
            wanted.cancel()
            assert consume(ahead) == b"".join(A)
        assert_settled(fetcher)

    def test_a_load_that_nobody_consumes_leaves_room_for_another(self) -> None:
        with fetching(Shelf(LONG, A), num_cells=WINDOW + 2) as fetcher:
            idle = start(fetcher, model_of("long", LONG))
            assert consume(start(fetcher, model_of("a", A))) == b"".join(A)
            idle.cancel()
        assert_settled(fetcher)


class TestSharing:
    def test_a_chunk_that_two_loads_want_is_read_once(self) -> None:
        shelf = Shelf(A)
        gated = Gated(shelf)
        with fetching(gated, num_cells=8) as fetcher:
            first, second = start(fetcher, model_of("a", A)), start(fetcher, model_of("copy", A))
            gated.open()
            assert consume(first) == consume(second) == b"".join(A)
        assert shelf.asked == [("a", index) for index in range(len(A))]
        assert (fetcher.counters.num_fills, fetcher.counters.num_shared) == (len(A), len(A))
        assert_settled(fetcher)

    @pytest.mark.parametrize("num_cells", [1, 2, 3, 8])
    def test_equal_chunks_of_one_model_are_each_delivered(self, num_cells: int) -> None:
        x, y, z = A[:3]
        parts = [x, x, y, x, z, z, x]
        with fetching(Shelf(parts), num_cells, num_readers=3) as fetcher:
            assert consume(start(fetcher, model_of("repeats", parts))) == b"".join(parts)
        assert_settled(fetcher)

    def test_a_chunk_that_a_load_called_off_was_reading_goes_to_the_other(self) -> None:
        gated = Gated(Shelf(A))
        with fetching(gated, num_cells=8) as fetcher:
            first, second = start(fetcher, model_of("a", A)), start(fetcher, model_of("copy", A))
            ask = gated.next()
            first.cancel()
            ask.allow()
            gated.open()
            assert consume(second) == b"".join(A)
        assert fetcher.counters.num_fills == len(A)
        assert_settled(fetcher)


class TestLargerThanMemory:
    def test_a_load_runs_through(self) -> None:
        with fetching(Shelf(LONG), num_cells=2, num_readers=4) as fetcher:
            assert consume(start(fetcher, model_of("long", LONG))) == b"".join(LONG)
        assert fetcher.counters.num_evictions == len(LONG) - 2
        assert_settled(fetcher)

    @pytest.mark.parametrize("rung", [Rung.DISK, Rung.OBJECT])
    def test_three_loads_on_three_threads_run_through_two_cells(self, rung: Rung) -> None:
        contents = [LONG, LONGER, LONG[:20] + LONGER[20:]]
        with (
            fetching(Shelf(LONG, LONGER, rung=rung), 2, num_readers=4) as fetcher,
            ThreadPoolExecutor() as pool,
        ):
            loads = [start(fetcher, model_of(f"m{i}", parts)) for i, parts in enumerate(contents)]
            consumed = list(pool.map(consume, loads))
        assert consumed == [b"".join(parts) for parts in contents]
        assert_settled(fetcher)


class TestCalledOff:
    def test_cancel_while_a_chunk_is_read_leaves_nothing_behind(self) -> None:
        shelf = Shelf(A)
        gated = Gated(shelf)
        with fetching(gated, num_cells=4) as fetcher:
            fetch = start(fetcher, model_of("a", A))
            ask = gated.next()
            fetch.cancel()
            ask.allow()
            with pytest.raises(LoadCancelled, match="`a` was cancelled"):
                consume(fetch)
        assert shelf.asked == [("a", 0)]  # the others were queued, and are read for nobody
        assert_settled(fetcher)

    def test_cancel_gives_back_what_was_ready(self) -> None:
        with fetching(Shelf(A), num_cells=8) as fetcher:
            fetch = start(fetcher, model_of("a", A))
            until(lambda: fetcher.counters.num_fills == len(A))
            fetch.cancel()
            assert_settled(fetcher)

    def test_closing_calls_off_a_load_whose_chunks_are_all_ready(self) -> None:
        with fetching(Shelf(A), num_cells=8) as fetcher:
            fetch = start(fetcher, model_of("a", A))
            until(lambda: fetcher.counters.num_fills == len(A))
            fetcher.close()
            with pytest.raises(LoadCancelled):
                consume(fetch)
        assert_settled(fetcher)

    def test_nothing_is_fetched_once_it_is_closed(self) -> None:
        with fetching(Shelf(A), num_cells=8) as fetcher:
            fetcher.close()
            with pytest.raises(StoreError, match="closed"):
                start(fetcher, model_of("a", A))

    def test_a_reader_that_meets_a_bug_fails_the_load_and_goes_on(self) -> None:
        class Buggy(Shelf):
            is_broken = True

            def deliver(
                self, model: StoredModel, index: int, buffer: memoryview, is_wanted: Callable[[], bool]
            ) -> Delivery:
                if self.is_broken:
                    raise ValueError("a bug")
                return super().deliver(model, index, buffer, is_wanted)

        shelf = Buggy(A)
        with fetching(shelf, num_cells=8) as fetcher:
            with pytest.raises(StoreError, match="a bug"):
                consume(start(fetcher, model_of("a", A)))
            shelf.is_broken = False
            assert consume(start(fetcher, model_of("a", A))) == b"".join(A)
        assert_settled(fetcher)

    def test_an_object_store_that_does_not_answer_holds_up_no_load_from_disk(self) -> None:
        far_away = replace(model_of("far", LONG), remote=RemoteModel("http://127.0.0.1:1/far"))
        has_begun, may_go_on = threading.Event(), threading.Event()

        class Distant(Shelf):
            def is_far(self, model: StoredModel, index: int) -> bool:
                return model.remote is not None

            def deliver(
                self, model: StoredModel, index: int, buffer: memoryview, is_wanted: Callable[[], bool]
            ) -> Delivery:
                if model.remote is not None:
                    has_begun.set()
                    assert may_go_on.wait(PATIENCE_S)
                return super().deliver(model, index, buffer, is_wanted)

        with fetching(Distant(LONG, A), num_cells=8, num_readers=2) as fetcher, ThreadPoolExecutor(2) as pool:
            slow = pool.submit(consume, start(fetcher, far_away))
            assert has_begun.wait(PATIENCE_S)
            near = pool.submit(consume, start(fetcher, model_of("a", A)))
            try:
                assert near.result(PATIENCE_S) == b"".join(A)
                assert not slow.done()
            finally:
                may_go_on.set()
            assert slow.result(PATIENCE_S) == b"".join(LONG), "and it comes, once it comes"
        assert_settled(fetcher)

    @pytest.mark.parametrize("num_threads", [0, 3])
    def test_as_many_readers_of_an_object_store_as_there_can_be_do_the_work(
        self, num_threads: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        far_away = replace(model_of("far", A), remote=RemoteModel("http://127.0.0.1:1/far"))
        start_thread, can_start = threading.Thread.start, iter([True] * num_threads)

        class FarShelf(Shelf):
            def is_far(self, model: StoredModel, index: int) -> bool:
                return model.remote is not None

        def start_if_possible(thread: threading.Thread) -> None:
            if thread.name.startswith("hearth-read-far") and not next(can_start, False):
                raise RuntimeError("can't start new thread")
            start_thread(thread)

        with fetching(FarShelf(A, B), num_cells=4) as fetcher:
            monkeypatch.setattr(threading.Thread, "start", start_if_possible)
            if num_threads:
                assert consume(start(fetcher, far_away)) == b"".join(A)
            else:
                with pytest.raises(StoreError, match="no thread can be started to read chunks"):
                    start(fetcher, far_away)
            assert consume(start(fetcher, model_of("near", B))) == b"".join(B)

    def test_a_chunk_that_was_taken_stays_until_it_is_released(self) -> None:
        with fetching(Shelf(A, B), num_cells=1) as fetcher:
            fetch = start(fetcher, model_of("a", A))
            chunk = next(iter(fetch))
            fetch.cancel()
            other = start(fetcher, model_of("b", B))
            assert fetcher.book.num_leased == 1
            assert bytes(chunk.data) == A[0]
            fetch.release(chunk)
            assert consume(other) == b"".join(B)
        assert_settled(fetcher)

    def test_cancelling_twice_or_after_the_end_is_harmless(self) -> None:
        with fetching(Shelf(A), num_cells=2) as fetcher:
            fetch = start(fetcher, model_of("a", A))
            consume(fetch)
            fetch.cancel()
            fetch.cancel()
        assert_settled(fetcher)

    @pytest.mark.parametrize("parts", [A, LONG], ids=["all scheduled", "some not yet"])
    def test_close_ends_a_load_that_somebody_waits_for(self, parts: list[bytes]) -> None:
        shelf = Shelf(parts)
        gated = Gated(shelf)
        with ThreadPoolExecutor() as pool, fetching(gated, num_cells=8) as fetcher:
            fetch = start(fetcher, model_of("a", parts))
            ask = gated.next()
            consumer = pool.submit(consume, fetch)
            closer = pool.submit(fetcher.close)
            with pytest.raises(LoadCancelled, match="`a` was cancelled"):
                consumer.result(PATIENCE_S)
            ask.allow()
            closer.result(PATIENCE_S)
        assert shelf.asked == [("a", 0)]
        assert_settled(fetcher)


class TestFailing:
    def test_a_load_without_the_chunk_fails_and_one_with_another_place_gets_it(self) -> None:
        shelf = Shelf(A, B)
        shelf.broken = {"a"}
        gated = Gated(shelf)
        with fetching(gated, num_cells=32) as fetcher:
            loads = [start(fetcher, model_of(name, A)) for name in ("a", "copy", "other copy")]
            unrelated = start(fetcher, model_of("b", B))
            gated.open()
            with pytest.raises(ChunkMissing, match="chunk 0 of `a` is broken"):
                consume(loads[0])
            assert [consume(load) for load in loads[1:]] == [b"".join(A)] * 2
            assert consume(unrelated) == b"".join(B)
        assert ("copy", 0) in shelf.asked
        assert ("other copy", 0) not in shelf.asked
        assert_settled(fetcher)

    def test_chunks_that_were_ready_are_given_back_when_a_later_one_fails(self) -> None:
        gated = Gated(Shelf(A))
        with fetching(gated, num_cells=4) as fetcher:
            fetch = start(fetcher, model_of("a", A))
            gated.next().allow()
            gated.next().refuse(ChunkMissing("chunk 1 is gone"))
            with pytest.raises(ChunkMissing, match="chunk 1 is gone"):
                consume(fetch)
            until(lambda: fetcher.book.num_filling == 0)
            assert_settled(fetcher)
        assert fetcher.counters.num_failures == 1

    def test_close_does_not_strand_those_who_waited_for_a_chunk_that_failed(self) -> None:
        gated = Gated(Shelf(A))
        with ThreadPoolExecutor() as pool, fetching(gated, num_cells=8) as fetcher:
            first, second = start(fetcher, model_of("a", A)), start(fetcher, model_of("copy", A))
            ask = gated.next()
            consumers = [pool.submit(consume, fetch) for fetch in (first, second)]
            closer = pool.submit(fetcher.close)
            until(lambda: all(consumer.done() for consumer in consumers))
            ask.refuse(ChunkMissing("chunk 0 is gone"))
            closer.result(PATIENCE_S)
        assert [type(consumer.exception()) for consumer in consumers] == [LoadCancelled] * 2
        assert_settled(fetcher)


class TestFromObjectStorage:
    def test_every_chunk_is_kept_once_with_its_own_bytes(self) -> None:
        shelf = Shelf(LONG, rung=Rung.OBJECT)
        with fetching(shelf, num_cells=2, num_readers=3) as fetcher:
            consume(start(fetcher, model_of("long", LONG)))
        assert sorted(shelf.kept) == sorted(LONG)
        assert_settled(fetcher)

    def test_what_came_from_disk_is_not_kept_again(self) -> None:
        shelf = Shelf(A, rung=Rung.DISK)
        with fetching(shelf, num_cells=2) as fetcher:
            consume(start(fetcher, model_of("a", A)))
        assert shelf.kept == []


#: Models that share chunks with each other and with themselves.
SHARED = {
    "a": A,
    "b": B,
    "mixed": [A[0], B[1], A[2], B[3]],
    "repeats": [A[0], A[0], C[1], A[0], C[1]],
    "long": LONG,
}


class FetchMachine(RuleBasedStateMachine):
    """Any order of loading, consuming, releasing, calling off and failing. One reader, at the test's gate."""

    keeps_chunks = True

    def __init__(self) -> None:
        super().__init__()
        self.segment = Segment.create(3, CHUNK_BYTES)
        self.gated = Gated(Quick(A, B, C, LONG))
        self.fetcher = Fetcher(
            self.segment, self.gated, ChunkPrices(), num_readers=1, keeps_chunks=self.keeps_chunks
        )
        self.loads: list[_Consumer] = []
        self.ask: Ask | None = None  #: what the reader waits with

    @rule(name=st.sampled_from(sorted(SHARED)), pass_through=st.booleans(), is_prefetch=st.booleans())
    def load(self, name: str, pass_through: bool, is_prefetch: bool) -> None:
        if len(self.loads) < 4:
            model = model_of(name, SHARED[name])
            chunks = all_chunks(model)
            fetch = self.fetcher.fetch(model, chunks, pass_through=pass_through, is_prefetch=is_prefetch)
            self.loads.append(_Consumer(fetch, SHARED[name]))

    @rule(is_whole=st.booleans())
    def read(self, is_whole: bool) -> None:
        """The reader has something to read while a load that is not over waits for a chunk."""
        with self.fetcher._lock:
            is_coming = any(not w.fetch.is_over for ws in self.fetcher._waiting.values() for w in ws)
        if self.ask is None and is_coming:
            self.ask = self.gated.next()
        if self.ask is None:
            return
        counters = self.fetcher.counters
        num_done = counters.num_fills + counters.num_failures
        if is_whole:
            self.ask.allow()
        else:
            self.ask.refuse(ChunkMissing("the test says so"))
        self.ask = None
        until(lambda: counters.num_fills + counters.num_failures > num_done)

    @rule(which=st.integers(0, 3))
    def take(self, which: int) -> None:
        if which < len(self.loads):
            self.loads[which].take()

    @rule(which=st.integers(0, 3))
    def release(self, which: int) -> None:
        if which < len(self.loads):
            self.loads[which].release()

    @rule(which=st.integers(0, 3))
    def cancel(self, which: int) -> None:
        if which < len(self.loads):
            load = self.loads.pop(which)
            load.fetch.cancel()
            load.release_all()

    @invariant()
    def the_books_balance(self) -> None:
        with self.fetcher._lock:
            self.fetcher.book.check()
            assert self.fetcher.book.num_resident + self.fetcher.book.num_filling <= 3

    @invariant()
    def what_is_not_kept_takes_no_memory(self) -> None:
        with self.fetcher._lock:
            if not self.keeps_chunks and self.fetcher.book.num_free == 3:
                assert os.fstat(self.segment.fd).st_blocks == 0

    @invariant()
    def what_was_taken_is_what_was_stored(self) -> None:
        for load in self.loads:
            load.check()

    def teardown(self) -> None:
        """Those that were not called off run to their ends, all the others' leases notwithstanding."""
        for load in self.loads:
            load.release_all()
        self.gated.open()
        with ThreadPoolExecutor() as pool:
            list(pool.map(_Consumer.finish, self.loads))
        self.fetcher.close()
        self.segment.close()
        assert_settled(self.fetcher)


class PassingFetchMachine(FetchMachine):
    """The same where chunks are only passed on."""

    keeps_chunks = False


class _Consumer:
    """A load and what its consumer has of it."""

    def __init__(self, fetch: Fetch, parts: list[bytes]) -> None:
        self.fetch, self.parts = fetch, parts
        self.chunks = iter(fetch)
        self.held: list[HostChunk] = []
        self.num_taken = 0

    def take(self) -> None:
        """The next chunk, unless that would mean waiting. Holding more than one would block the others."""
        with self.fetch.arrived:
            is_there = self.num_taken in self.fetch.ready and not self.fetch.is_over
        if is_there and not self.held:
            self.held.append(next(self.chunks))
            self.num_taken += 1

    def release(self) -> None:
        if self.held:
            self.fetch.release(self.held.pop())

    def release_all(self) -> None:
        while self.held:
            self.release()

    def check(self) -> None:
        for chunk in self.held:
            assert bytes(chunk.data) == self.parts[chunk.index]

    def finish(self) -> None:
        try:
            for chunk in self.chunks:
                assert bytes(chunk.data) == self.parts[chunk.index]
                self.fetch.release(chunk)
                self.num_taken += 1
        except ChunkMissing:
            return
        assert self.num_taken == len(self.parts)


class TestAnyOrder(FetchMachine.TestCase):  # type: ignore[misc,valid-type] # made at run time
    settings = settings(stateful_step_count=40)


class TestAnyOrderOfPassing(PassingFetchMachine.TestCase):  # type: ignore[misc,valid-type] # made at run time
    settings = settings(stateful_step_count=40)
