"""The books of a contiguous memory against a plain list with one owner per page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import ModelId
from hearth.memory.regions import Owner, RegionList, Span, Use, aligned, blocks_within, bytes_around
from hearth.models.layout import ALIGNMENT_BYTES

NUM_PAGES = 12
#: An owner, where its region begins and how long it is, in pages.
WISHES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, NUM_PAGES - 1), st.integers(1, 4)), max_size=40)


def owner(index: int) -> Owner:
    return Owner(ModelId("a"), Use.TENSOR, index)


def span(begin: int, num_pages: int, index: int) -> Span:
    return Span(begin * ALIGNMENT_BYTES, (begin + num_pages) * ALIGNMENT_BYTES, owner(index))


def pages(regions: RegionList) -> list[Owner | None]:
    return [one.owner for one in regions for _ in range(one.num_bytes // ALIGNMENT_BYTES)]


@given(WISHES)
def test_every_page_has_the_owner_who_took_it_last_and_did_not_give_it_back(
    wishes: list[tuple[int, int, int]],
) -> None:
    regions = RegionList(NUM_PAGES * ALIGNMENT_BYTES)
    expected: list[Owner | None] = [None] * NUM_PAGES
    for index, begin, num_pages in wishes:
        wanted = expected[begin : begin + num_pages]
        if owner(index) in regions:
            regions.give(owner(index))
            expected = [None if one == owner(index) else one for one in expected]
        elif len(wanted) == num_pages and not any(wanted):
            regions.take(span(begin, num_pages, index))
            expected[begin : begin + num_pages] = [owner(index)] * num_pages
        regions.check()
        assert pages(regions) == expected
        assert regions.free_bytes == expected.count(None) * ALIGNMENT_BYTES
        begin, end = begin * ALIGNMENT_BYTES, (begin + num_pages) * ALIGNMENT_BYTES
        assert regions.free_within(begin, end) == [
            one for one in regions.free_spans() if one.begin < end and begin < one.end
        ]


def test_what_is_not_free_is_not_given_again() -> None:
    regions = RegionList(4 * ALIGNMENT_BYTES)
    regions.take(span(1, 2, index=0))

    with pytest.raises(AssertionError, match="is not free"):
        regions.take(span(2, 1, index=1))
    with pytest.raises(AssertionError, match="is more than what is free"):
        regions.take(span(0, 2, index=1))
    with pytest.raises(AssertionError, match="has its region already"):
        regions.take(span(3, 1, index=0))


def test_a_copy_has_books_of_its_own() -> None:
    regions = RegionList(4 * ALIGNMENT_BYTES)
    twin = regions.copy()
    twin.take(span(0, 1, index=0))

    assert [one.owner for one in regions] == [None]
    twin.check()
    regions.check()


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 5 * ALIGNMENT_BYTES))
def test_blocks_and_what_is_around_them_stay_within_the_free_region(
    begin_page: int, num_pages: int, block_bytes: int
) -> None:
    begin, end = begin_page * ALIGNMENT_BYTES, (begin_page + num_pages) * ALIGNMENT_BYTES
    blocks = blocks_within(begin, end, block_bytes)
    if blocks:
        around = bytes_around(blocks, block_bytes)
        assert begin <= around.begin <= blocks.start * block_bytes
        assert blocks.stop * block_bytes <= around.end <= end
        assert around.begin % ALIGNMENT_BYTES == around.end % ALIGNMENT_BYTES == 0
        assert (blocks.start - 1) * block_bytes < begin
        assert (blocks.stop + 1) * block_bytes > end


def test_sizes_are_rounded_up_to_whole_pages() -> None:
    assert aligned(0) == 0
    assert aligned(1) == aligned(ALIGNMENT_BYTES) == ALIGNMENT_BYTES
    assert aligned(ALIGNMENT_BYTES + 1) == 2 * ALIGNMENT_BYTES
