"""Packing: everything gets a place or cannot have one, and whatever moves arrives whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hearth.policy.memory.packing import Item, Move, Packing, Region, merge_all, pack

Packer = Callable[[Sequence[Region], Sequence[Item]], Packing | None]


def memory(picture: str) -> list[Region]:
    """`.2 a3 #4`: two free bytes, three that may be moved, four that may not."""
    regions: list[Region] = []
    begin = 0
    for index, word in enumerate(picture.split()):
        key = None if word[0] == "." else (word[0], index)
        regions.append(Region(begin, int(word[1:]), key, is_fixed=word[0] == "#"))
        begin += int(word[1:])
    return regions


def new(*sizes: int) -> list[Item]:
    return [Item(("new", index), num_bytes) for index, num_bytes in enumerate(sizes)]


def pictures(kinds: str) -> st.SearchStrategy[str]:
    words = st.builds(
        lambda kind, num_bytes: f"{kind}{num_bytes}", st.sampled_from(kinds), st.integers(1, 12)
    )
    return st.lists(words, max_size=24).map(" ".join)


item_sizes = st.lists(st.integers(1, 20), max_size=12)


def free_bytes(regions: Sequence[Region]) -> int:
    return sum(region.num_bytes for region in regions if region.key is None)


def free_bytes_by_section(regions: Sequence[Region]) -> list[int]:
    rooms_bytes = [0]
    for region in regions:
        if region.is_fixed:
            rooms_bytes.append(0)
        elif region.key is None:
            rooms_bytes[-1] += region.num_bytes
    return rooms_bytes


def carry_out(regions: Sequence[Region], items: Sequence[Item], packing: Packing) -> None:
    """Do all moves byte by byte, put the items in, and see that everything is there once and whole."""
    cells: list[tuple[Hashable, int] | None] = []
    for region in regions:
        cells += [None if region.key is None else (region.key, at) for at in range(region.num_bytes)]
    begins = {region.key: region.begin for region in regions if region.key is not None}
    sizes = {region.key: region.num_bytes for region in regions if region.key is not None}
    fixed = {region.key for region in regions if region.is_fixed}
    for move in packing.moves:
        assert move.key not in fixed
        assert (move.source, move.num_bytes) == (begins[move.key], sizes[move.key])
        read = cells[move.source : move.source + move.num_bytes]
        assert read == [(move.key, at) for at in range(move.num_bytes)], f"written over before: {move}"
        cells[move.source : move.source + move.num_bytes] = [None] * move.num_bytes
        assert not any(cells[move.target : move.target + move.num_bytes]), f"writes over others: {move}"
        cells[move.target : move.target + move.num_bytes] = read
        begins[move.key] = move.target
    assert set(packing.begins) == {item.key for item in items}
    for item in items:
        begin = packing.begins[item.key]
        assert cells[begin : begin + item.num_bytes] == [None] * item.num_bytes, f"not free: {item} {begin=}"
        cells[begin : begin + item.num_bytes] = [(item.key, at) for at in range(item.num_bytes)]
    assert len(cells) == sum(region.num_bytes for region in regions)


def moved_bytes(picture: str, *sizes: int) -> int:
    """By `pack`, which must have found a place for all."""
    packing = pack(memory(picture), new(*sizes))
    assert packing is not None
    carry_out(memory(picture), new(*sizes), packing)
    return packing.moved_bytes


@pytest.mark.parametrize("packer", [pack, merge_all])
@given(picture=pictures(".a"), sizes=item_sizes)
def test_without_fixed_regions_all_are_placed_unless_they_are_more_than_what_is_free(
    packer: Packer, picture: str, sizes: list[int]
) -> None:
    regions, items = memory(picture), new(*sizes)
    packing = packer(regions, items)
    assert (packing is None) == (sum(sizes) > free_bytes(regions))
    if packing is not None:
        carry_out(regions, items, packing)


@pytest.mark.parametrize("packer", [pack, merge_all])
@given(picture=pictures("..aa#"), sizes=item_sizes)
def test_what_is_packed_around_fixed_regions_overlaps_nothing(
    packer: Packer, picture: str, sizes: list[int]
) -> None:
    regions, items = memory(picture), new(*sizes)
    packing = packer(regions, items)
    if packing is not None:
        carry_out(regions, items, packing)


@given(picture=pictures("..a#"), sizes=item_sizes)
def test_around_fixed_regions_it_gives_up_only_where_best_fit_and_first_fit_do(
    picture: str, sizes: list[int]
) -> None:
    regions, items = memory(picture), new(*sizes)
    if pack(regions, items) is not None:
        return
    assert merge_all(regions, items) is None
    for fullest_first in (True, False):
        rooms_bytes = free_bytes_by_section(regions)
        fits = True
        for num_bytes in sorted(sizes, reverse=True):
            roomy = [index for index, room in enumerate(rooms_bytes) if room >= num_bytes]
            if fullest_first:
                roomy.sort(key=rooms_bytes.__getitem__)
            fits = fits and bool(roomy)
            if roomy:
                rooms_bytes[roomy[0]] -= num_bytes
        assert not fits


@given(picture=pictures("...aaa#"), sizes=item_sizes)
@example(picture=".3 a1 .3 b50 .3 c2 .3", sizes=[5, 5])
def test_never_more_is_moved_than_by_merging_all(picture: str, sizes: list[int]) -> None:
    packing, merged = pack(memory(picture), new(*sizes)), merge_all(memory(picture), new(*sizes))
    if packing is not None:
        assert merged is not None
        assert packing.moved_bytes <= merged.moved_bytes


@given(picture=pictures("...aaa#"), sizes=item_sizes)
def test_the_same_memory_is_always_packed_the_same_way(picture: str, sizes: list[int]) -> None:
    assert pack(memory(picture), new(*sizes)) == pack(memory(picture), new(*sizes))


@given(picture=pictures("..aa#"), sizes=item_sizes, unit_bytes=st.sampled_from([3, 4096]))
def test_addresses_stay_multiples_of_what_all_sizes_are_multiples_of(
    picture: str, sizes: list[int], unit_bytes: int
) -> None:
    regions = [
        Region(unit_bytes * region.begin, unit_bytes * region.num_bytes, region.key, region.is_fixed)
        for region in memory(picture)
    ]
    packing = pack(regions, new(*(unit_bytes * num_bytes for num_bytes in sizes)))
    if packing is not None:
        assert all(begin % unit_bytes == 0 for begin in packing.begins.values())
        assert all(move.target % unit_bytes == 0 for move in packing.moves)


def test_items_that_fit_into_holes_move_nothing() -> None:
    assert moved_bytes(".10 a1 .6 b1 .5", 5, 6, 10) == 0


def test_an_item_takes_the_smallest_hole_that_holds_it() -> None:
    assert pack(memory(".9 a1 .4 b1 .5"), new(4)) == Packing({("new", 0): 10}, ())


def test_free_regions_that_touch_are_one_hole() -> None:
    assert moved_bytes(".3 .3 a9 .7", 6, 4, 3) == 0


def test_a_full_memory_holds_nothing_more() -> None:
    assert pack(memory("a4 #2"), new(1)) is None
    assert pack([], new(1)) is None


def test_without_items_nothing_moves() -> None:
    assert pack(memory(".2 a3 .4"), []) == Packing({}, ())


def test_the_example_of_the_figure_moves_only_the_smaller_run() -> None:
    assert pack(memory(".2 a1 .2 b3 .4"), new(4, 3)) == Packing(
        {("new", 0): 8, ("new", 1): 1}, (Move(("a", 1), 2, 0, 1),)
    )


def test_the_bytes_of_what_stays_are_no_room_for_what_comes() -> None:
    assert moved_bytes(".1 a5 .1 b2 .6", 3, 3) == 0
    assert moved_bytes(".1 a5 .1 b2 .6", 3, 4) == 2


def test_an_item_larger_than_one_side_may_go_to_the_other() -> None:
    assert moved_bytes(".1 a100 .3 b2 .3", 5) == 2


def test_the_largest_run_that_can_stay_does() -> None:
    assert moved_bytes(".3 a1 .3 b50 .3", 5, 2) == 1


def test_two_merges_apart_are_cheaper_than_one_of_everything() -> None:
    assert pack(memory(".3 a1 .3 b50 .3 c2 .3"), new(5, 5)) == Packing(
        {("new", 0): 1, ("new", 1): 59}, (Move(("a", 1), 3, 0, 1), Move(("c", 5), 60, 57, 2))
    )


def test_a_run_moves_as_a_whole_and_in_order() -> None:
    assert pack(memory("a1 .2 b3 c4 .2 d1"), new(3)) == Packing(
        {("new", 0): 8}, (Move(("b", 2), 3, 1, 3), Move(("c", 3), 6, 4, 4))
    )


def test_nothing_moves_across_a_fixed_region() -> None:
    assert pack(memory(".3 #1 .3"), new(4)) is None
    assert moved_bytes(".3 #1 .3 a2 .3", 5) == 2


def test_items_are_shared_out_so_that_holes_are_used_where_they_are() -> None:
    # By free bytes alone the item of 9 would go to the tighter section, and move the 20 there.
    assert moved_bytes(".5 a20 .5 #1 .9 b2 .2", 9, 2) == 0


def test_merging_all_moves_everything_to_the_front_of_its_section() -> None:
    assert merge_all(memory("a1 .2 b3 .1 #2 .1 c2"), new(3)) == Packing(
        {("new", 0): 4}, (Move(("b", 2), 3, 1, 3), Move(("c", 6), 10, 9, 2))
    )


def test_items_without_bytes_or_with_equal_keys_are_mistakes() -> None:
    with pytest.raises(AssertionError, match="num_bytes=0"):
        pack(memory(".4"), new(0))
    with pytest.raises(AssertionError, match="keys of items must differ"):
        pack(memory(".4"), [Item("same", 1), Item("same", 1)])


def test_more_partitions_than_the_interpreter_has_frames_are_searched() -> None:
    picture = ".2 a3 " * 1200 + ".2"
    assert moved_bytes(picture, *([3] * 100)) == 300


def test_the_search_ends_where_partitions_only_ever_cut_off_one_hole() -> None:
    picture = " ".join(f".2 a{1 + (800 - index) // 8}" for index in range(800)) + " .2"
    assert moved_bytes(picture, *([3] * 480)) < merge_bytes(picture)


def merge_bytes(picture: str) -> int:
    return sum(region.num_bytes for region in memory(picture) if region.key is not None)
