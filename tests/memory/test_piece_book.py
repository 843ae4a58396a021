"""Where pieces of adapters lie: beside each other on few pages, wherever others have left room."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import AdapterId
from hearth.memory.piece_book import PieceBook
from hearth.models.layout import ByteRange

PAGE_BYTES = 4096
A, B, C = (AdapterId(name * 64) for name in "abc")


def place(book: PieceBook, owner: AdapterId, *sizes: int) -> list[int]:
    """Take places for pieces; return the slots that needed a page."""
    plan = book.plan(sizes, max_new_slots=1000)
    assert plan is not None
    assert book.plan(sizes, len(plan.new_slots)) == plan
    assert not plan.new_slots or book.plan(sizes, len(plan.new_slots) - 1) is None
    book.take(owner, plan)
    book.check()
    return list(plan.new_slots)


def test_several_adapters_lie_on_one_page() -> None:
    book = PieceBook(PAGE_BYTES, 100)

    assert place(book, A, 1000, 24) == [0]
    assert place(book, B, 1000, 1000) == []

    assert book.plan_of(A).parts == (ByteRange(0, 1024), ByteRange(1024, 1280))
    assert book.plan_of(B).parts == (ByteRange(1280, 2304), ByteRange(2304, 3328))


def test_the_lowest_room_on_pages_that_are_there_is_taken_before_another_page() -> None:
    book = PieceBook(PAGE_BYTES, 100)
    place(book, A, PAGE_BYTES)
    place(book, B, PAGE_BYTES, 512)
    place(book, C, 512)

    assert book.give(A) == [0]

    assert place(book, A, 1024) == []
    assert book.plan_of(A).parts[0].begin == 2 * PAGE_BYTES + 1024


def test_pieces_of_changing_sizes_each_take_the_lowest_room() -> None:
    book = PieceBook(PAGE_BYTES, 100)
    place(book, A, 512)
    place(book, B, 1024)
    place(book, C, 512)
    place(book, AdapterId("d" * 64), 256)
    book.give(A)
    book.give(C)

    place(book, A, 1024, 512, 256, 512, 256)

    assert [part.begin for part in book.plan_of(A).parts] == [2304, 0, 1536, 3328, 1792]


def test_pieces_that_follow_each_other_and_touch_are_one_stretch() -> None:
    book = PieceBook(PAGE_BYTES, 100)
    place(book, A, 512)
    place(book, B, 512)
    place(book, C, 256)
    book.give(A)

    place(book, A, 256, 256, 512, 256, 100)

    plan = book.plan_of(A)
    assert [(one.begin, one.first, one.end) for one in plan.stretches] == [(0, 0, 2), (1280, 2, 5)]
    assert [part.begin for part in plan.parts] == [0, 256, 1280, 1792, 2048]


def test_a_page_without_pieces_goes_and_its_addresses_are_the_next_to_be_taken() -> None:
    book = PieceBook(PAGE_BYTES, 100)
    place(book, A, 2 * PAGE_BYTES)
    place(book, B, 300)

    assert book.give(A) == [0, 1]
    assert book.slots == {2}
    assert place(book, C, PAGE_BYTES + 1) == [0, 1]


def test_a_piece_that_is_larger_than_a_page_begins_in_the_room_of_the_last_one() -> None:
    book = PieceBook(PAGE_BYTES, 100)
    place(book, A, 1024)

    assert place(book, B, 2 * PAGE_BYTES) == [1, 2]
    assert book.plan_of(B).parts == (ByteRange(1024, 1024 + 2 * PAGE_BYTES),)


def test_what_has_no_addresses_has_no_plan() -> None:
    book = PieceBook(PAGE_BYTES, 2)
    place(book, A, PAGE_BYTES)

    assert book.plan([PAGE_BYTES + 1], 10) is None
    assert book.plan([PAGE_BYTES], 10) is not None


@given(st.lists(st.one_of(st.lists(st.integers(1, 3 * PAGE_BYTES), min_size=1, max_size=6), st.integers(0))))
def test_every_byte_of_every_page_is_in_one_hand(done: list[list[int] | int]) -> None:
    book, numbers, owners = PieceBook(PAGE_BYTES, 10_000), count(), list[AdapterId]()
    for action in done:
        if isinstance(action, list):
            owners.append(AdapterId(f"{next(numbers):064x}"))
            before = book.slots
            new_slots = place(book, owners[-1], *action)
            assert not before & set(new_slots)
        elif owners:
            slots = book.slots
            empty = book.give(owners.pop(action % len(owners)))
            book.check()
            assert book.slots == slots - set(empty)
    for owner in owners:
        book.give(owner)
    book.check()
    assert not book.slots


@pytest.mark.slow
def test_many_adapters_take_little_more_than_their_bytes() -> None:
    """As adapters of all ranks come and go, within two hundredths of what they are."""
    page_bytes = 16 << 20
    book = PieceBook(page_bytes, 32_768)
    sizes = {rank: [rank * 250_000 // 32] * 32 for rank in (8, 16, 32, 64)}
    for number in range(128):
        place(book, AdapterId(f"{number:064x}"), *sizes[list(sizes)[number * 7 % 4]])
    for number in range(0, 128, 3):
        book.give(AdapterId(f"{number:064x}"))
        place(book, AdapterId(f"{number:064x}"), *sizes[list(sizes)[number % 4]])
    taken_bytes = len(book.slots) * page_bytes
    assert taken_bytes <= 1.02 * sum(book.bytes_by_owner().values())
