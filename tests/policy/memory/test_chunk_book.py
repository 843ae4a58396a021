"""Every rule of the chunk book as an example, and its invariants under any order of calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hearth.policy.memory.byte_eviction import EVICTIONS_PER_PRICING, Price, tail_first
from hearth.policy.memory.chunk_book import ChunkBook, Fill, Full, Hit, Pending


def free_of_charge(digest: str) -> float:
    return 0.0


def leased(book: ChunkBook, *digests: str) -> None:
    for digest in digests:
        assert isinstance(book.take(digest, free_of_charge), Fill)
        book.filled(digest)


def idle(book: ChunkBook, *digests: str) -> None:
    leased(book, *digests)
    for digest in digests:
        book.release(digest)


def test_an_absent_chunk_gets_the_lowest_free_cell() -> None:
    book = ChunkBook(3)
    leased(book, "a", "b")
    book.release("a")
    book.drop("a")
    assert book.take("c", free_of_charge) == Fill(0, evicted=None)


def test_the_first_cells_are_spared_while_others_are_free() -> None:
    book = ChunkBook(4)
    cells = [book.take(chunk, free_of_charge, num_spared=2) for chunk in "abcd"]
    assert cells == [Fill(cell, evicted=None) for cell in (2, 3, 0, 1)]
    book.failed("b")
    book.failed("c")
    assert book.take("e", free_of_charge) == Fill(0, evicted=None)
    assert book.take("f", free_of_charge) == Fill(3, evicted=None)
    book.check()


def test_a_filled_chunk_is_leased_by_its_filler_and_by_each_who_hits_it() -> None:
    book = ChunkBook(2)
    leased(book, "a")
    assert book.take("a", free_of_charge) == Hit(0)
    assert book.leases("a") == 2


def test_several_chunks_are_leased_together_or_not_at_all() -> None:
    book = ChunkBook(4)
    idle(book, "a", "b")
    leased(book, "c")
    assert isinstance(book.take("d", free_of_charge), Fill)
    assert book.lease(["a", "x"]) is None
    assert book.lease(["a", "d"]) is None, "one is being filled"
    assert book.num_leased == 1

    assert book.lease(["b", "c", "b"]) == [1, 2, 1]

    assert [book.leases(chunk) for chunk in "abc"] == [0, 2, 2]
    book.check()


def test_who_asks_for_a_chunk_that_is_being_filled_has_to_wait() -> None:
    book = ChunkBook(2)
    book.take("a", free_of_charge)
    assert book.take("a", free_of_charge) == Pending()
    assert not book.is_resident("a")
    assert (book.num_filling, book.num_resident, book.num_free) == (1, 0, 1)


def test_a_failed_fill_frees_the_cell_and_leaves_nothing() -> None:
    book = ChunkBook(1)
    book.take("a", free_of_charge)
    book.failed("a")
    assert not book.is_resident("a")
    assert book.take("b", free_of_charge) == Fill(0, evicted=None)


def test_a_released_chunk_stays_and_is_hit_again() -> None:
    book = ChunkBook(1)
    idle(book, "a")
    assert book.is_resident("a")
    assert book.take("a", free_of_charge) == Hit(0)


def test_a_book_that_keeps_nothing_frees_a_cell_with_the_last_lease() -> None:
    book = ChunkBook(1, keeps_idle=False)
    leased(book, "a")
    assert book.take("a", free_of_charge) == Hit(0)
    book.release("a")
    assert book.is_resident("a")
    book.release("a")
    assert not book.is_resident("a")
    assert book.take("b", free_of_charge) == Fill(0, evicted=None)


def test_the_cheapest_idle_chunk_makes_room() -> None:
    book = ChunkBook(3)
    idle(book, "a", "b", "c")
    prices = {"a": 2.0, "b": 1.0, "c": 3.0}
    assert book.take("d", prices.__getitem__) == Fill(1, evicted="b")


def test_of_equal_cost_the_last_layers_make_room_first() -> None:
    book = ChunkBook(3)
    idle(book, "a", "b", "c")
    position = {"a": 0, "b": 2, "c": 1}
    assert book.take("d", lambda digest: tail_first(1.0, position[digest])) == Fill(1, evicted="b")


def test_a_leased_chunk_is_not_evicted_however_cheap() -> None:
    book = ChunkBook(2)
    idle(book, "a")
    leased(book, "b")
    assert book.take("c", {"a": 9.0, "b": 0.0}.__getitem__) == Fill(0, evicted="a")


def test_is_full_when_every_cell_is_leased_or_being_filled() -> None:
    book = ChunkBook(2)
    leased(book, "a")
    book.take("b", free_of_charge)
    assert book.take("c", free_of_charge) == Full()


def test_a_book_without_cells_is_always_full() -> None:
    assert ChunkBook(0).take("a", free_of_charge) == Full()


def test_drop_forgets_only_idle_chunks() -> None:
    book = ChunkBook(3)
    idle(book, "idle")
    leased(book, "leased")
    book.take("filling", free_of_charge)
    dropped = {digest: book.drop(digest) for digest in ("idle", "leased", "filling", "absent")}
    assert dropped == {"idle": True, "leased": False, "filling": False, "absent": False}
    assert not book.is_resident("idle")


def test_chunks_are_priced_once_for_many_evictions() -> None:
    num_cells = 16 * EVICTIONS_PER_PRICING
    book = ChunkBook(num_cells)
    old = [f"old {number:04}" for number in range(num_cells)]
    idle(book, *old)
    priced: list[str] = []

    def price(digest: str) -> float:
        priced.append(digest)
        return 0.0

    takes = [book.take(f"new {number:03}", price) for number in range(EVICTIONS_PER_PRICING + 1)]

    assert [take.evicted for take in takes if isinstance(take, Fill)] == old[: EVICTIONS_PER_PRICING + 1]
    assert len(priced) == num_cells + (num_cells - EVICTIONS_PER_PRICING)


def test_a_dear_model_stays_while_a_larger_cheap_one_runs_through() -> None:
    book = ChunkBook(64)
    idle(book, *(f"hot {number:02}" for number in range(50)))

    def price(digest: str) -> float:
        return 10.0 if digest.startswith("hot") else 1.0

    for number in range(200):
        book.take(f"cold {number:03}", price)
        book.filled(f"cold {number:03}")
        book.release(f"cold {number:03}")

    assert sum(book.is_resident(f"hot {number:02}") for number in range(50)) >= 48


def test_the_head_of_a_model_that_is_too_large_stays() -> None:
    book = ChunkBook(64)

    def price(digest: str) -> Price:
        return tail_first(1.0, int(digest))

    for number in range(160):
        book.take(f"{number:03}", price)
        book.filled(f"{number:03}")
        book.release(f"{number:03}")

    assert sum(book.is_resident(f"{number:03}") for number in range(56)) >= 52


def test_a_chunk_used_since_it_was_priced_is_passed_over() -> None:
    book = ChunkBook(40)
    idle(book, *(f"{number:02}" for number in range(40)))
    book.take("d", free_of_charge)  # evicts 00; 01 and 02 are next
    book.take("01", free_of_charge)
    book.release("01")
    assert book.take("e", free_of_charge) == Fill(2, evicted="02")


@pytest.mark.parametrize("call", [ChunkBook.filled, ChunkBook.failed, ChunkBook.release])
def test_a_chunk_nobody_took_cannot_be_given_back(call: Callable[[ChunkBook, str], None]) -> None:
    with pytest.raises(AssertionError, match="`a`"):
        call(ChunkBook(1), "a")


def test_check_names_a_cell_that_is_owned_twice() -> None:
    book = ChunkBook(2)
    leased(book, "a")
    book._free.append(0)
    with pytest.raises(AssertionError, match=r"each once: \[0, 0, 1\]"):
        book.check()


class AnyOrderOfCalls(RuleBasedStateMachine):
    """The book against a model that keeps one plain record per chunk."""

    digests = st.sampled_from("abcdefgh")
    CAPACITY = 4
    keeps_idle = True

    def __init__(self) -> None:
        super().__init__()
        self.book = ChunkBook(self.CAPACITY, keeps_idle=self.keeps_idle)
        self.cells: dict[str, int] = {}
        self.filling: set[str] = set()
        self.leases: dict[str, int] = {}  #: of resident chunks, 0 included

    @rule(digest=digests, prices=st.lists(st.integers(0, 3), min_size=8, max_size=8))
    def take(self, digest: str, prices: list[int]) -> None:
        idle = {name for name, count in self.leases.items() if count == 0}
        match self.book.take(digest, lambda name: prices["abcdefgh".index(name)]):
            case Hit(cell):
                assert self.cells[digest] == cell
                assert digest in self.leases
                self.leases[digest] += 1
            case Pending():
                assert digest in self.filling
            case Full():
                assert digest not in self.cells
                assert not idle
                assert len(self.cells) == self.CAPACITY
            case Fill(cell, evicted):
                assert digest not in self.cells
                if evicted is None:
                    unused = set(range(self.CAPACITY)) - set(self.cells.values())
                    assert cell == min(unused)
                else:
                    assert len(self.cells) == self.CAPACITY
                    assert evicted in idle
                    assert self.cells.pop(evicted) == cell
                    del self.leases[evicted]
                self.cells[digest] = cell
                self.filling.add(digest)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), succeeds=st.booleans())
    def end_filling(self, data: st.DataObject, succeeds: bool) -> None:
        digest = data.draw(st.sampled_from(sorted(self.filling)))
        self.filling.remove(digest)
        if succeeds:
            self.book.filled(digest)
            self.leases[digest] = 1
        else:
            self.book.failed(digest)
            del self.cells[digest]

    @precondition(lambda self: any(self.leases.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(name for name, count in self.leases.items() if count)))
        self.book.release(digest)
        self.leases[digest] -= 1
        if not self.keeps_idle and not self.leases[digest]:
            del self.leases[digest], self.cells[digest]

    @rule(digest=digests)
    def drop(self, digest: str) -> None:
        is_idle = self.leases.get(digest) == 0
        assert self.book.drop(digest) == is_idle
        if is_idle:
            del self.leases[digest], self.cells[digest]

    @invariant()
    def books_agree(self) -> None:
        self.book.check()
        assert self.book.num_free == self.CAPACITY - len(self.cells)
        assert self.book.num_filling == len(self.filling)
        assert self.book.num_resident == len(self.leases)
        assert self.book.num_leased == sum(count > 0 for count in self.leases.values())
        for digest in "abcdefgh":
            assert self.book.is_resident(digest) == (digest in self.leases)
            assert self.book.leases(digest) == self.leases.get(digest, 0)

    def teardown(self) -> None:
        """Once all have let go, every cell can be had."""
        for digest in self.filling:
            self.book.failed(digest)
        for digest, count in self.leases.items():
            for _ in range(count):
                self.book.release(digest)
        takes = [self.book.take(f"new {number}", free_of_charge) for number in range(self.CAPACITY)]
        assert sorted(take.cell for take in takes if isinstance(take, Fill)) == list(range(self.CAPACITY))


class AnyOrderOfCallsKeepingNothing(AnyOrderOfCalls):
    keeps_idle = False


TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase
TestAnyOrderOfCallsKeepingNothing = AnyOrderOfCallsKeepingNothing.TestCase
for _case in (TestAnyOrderOfCalls, TestAnyOrderOfCallsKeepingNothing):
    _case.settings = settings(stateful_step_count=40)
