"""Where a model's parts go in an arena, decided over books alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import ModelId
from hearth.memory.placement import Placement, PlacementNeed, plan_placement
from hearth.memory.regions import Owner, RegionList, Span, Use
from hearth.models.layout import ALIGNMENT_BYTES
from hearth.policy.memory.packing import Item, pack

PAGE = ALIGNMENT_BYTES
OLD, NEW = ModelId("old"), ModelId("new")


def books(*pages: tuple[Use | None, int]) -> RegionList:
    """Regions of so many pages each, one after the other; None: free."""
    regions = RegionList(sum(num for _, num in pages) * PAGE)
    begin = 0
    for index, (use, num) in enumerate(pages):
        if use is not None:
            regions.take(Span(begin, begin + num * PAGE, Owner(OLD, use, index)))
        begin += num * PAGE
    return regions


def need(*tensors: int, workspace: int = 0, num_blocks: int = 0, block_bytes: int = PAGE) -> PlacementNeed:
    items = tuple(Item(Owner(NEW, Use.TENSOR, index), num * PAGE) for index, num in enumerate(tensors))
    return PlacementNeed(NEW, items, workspace * PAGE, num_blocks, block_bytes)


def begins(placement: Placement | None) -> dict[str, int]:
    """In pages."""
    assert placement is not None
    owners = [(span.owner, span.begin // PAGE) for span in placement.spans]
    return {f"{owner.use}{owner.index}": begin for owner, begin in owners if owner is not None}


def test_what_cannot_move_goes_to_the_ends() -> None:
    placement = plan_placement(books((None, 20)), need(3, 2, workspace=4, num_blocks=2), set(), pack)

    assert begins(placement) == {"workspace0": 0, "tensor0": 4, "tensor1": 7, "kv18": 18}


def test_tensors_at_the_ends_give_way_to_what_cannot_move() -> None:
    regions = books((Use.TENSOR, 2), (None, 3), (Use.TENSOR, 1), (None, 4), (Use.TENSOR, 2))
    placement = plan_placement(regions, need(workspace=2, num_blocks=3), {OLD}, pack)

    assert placement is not None
    assert begins(placement) == {"workspace0": 0, "kv9": 9}
    assert [(move.source // PAGE, move.target // PAGE) for move in placement.moves] == [(0, 2), (10, 7)]


def test_it_goes_elsewhere_where_it_would_be_in_the_way() -> None:
    # The workspace fits at the high end, but then the tensor would fit nowhere.
    regions = books((None, 2), (Use.KV, 1), (None, 3))

    assert begins(plan_placement(regions, need(3, workspace=2), set(), pack)) == {
        "tensor0": 3,
        "workspace0": 0,
    }


def test_tensors_move_to_make_one_piece_of_several() -> None:
    regions = books((None, 2), (Use.TENSOR, 1), (None, 2))
    placement = plan_placement(regions, need(4), {OLD}, pack)

    assert placement is not None
    assert [(move.source // PAGE, move.target // PAGE) for move in placement.moves] == [(2, 0)]
    assert begins(placement) == {"tensor0": 1}


def test_nothing_fits_beside_tensors_that_must_not_move() -> None:
    regions = books((None, 2), (Use.TENSOR, 1), (None, 2))

    assert plan_placement(regions, need(4), set(), pack) is None
    assert plan_placement(regions, need(5), {OLD}, pack) is None


def test_blocks_find_a_place_of_their_own_alignment_among_pieces() -> None:
    # Three pages at a multiple of three are nowhere free, but six are in sum.
    regions = books(*[(Use.TENSOR, 1), (None, 2)] * 3, (Use.KV, 3))
    placement = plan_placement(regions, need(num_blocks=1, block_bytes=3 * PAGE), {OLD}, pack)

    assert placement is not None
    assert begins(placement) == {"kv2": 6}
    assert placement.moves


PIECES = st.lists(
    st.tuples(st.sampled_from([None, None, Use.TENSOR, Use.TENSOR, Use.KV]), st.integers(1, 6)),
    min_size=1,
    max_size=12,
)
WISHES = st.builds(
    lambda tensors, workspace, num_blocks, block_bytes: need(
        *tensors, workspace=workspace, num_blocks=num_blocks, block_bytes=block_bytes
    ),
    st.lists(st.integers(1, 4), max_size=4),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([100, 3000, PAGE, 5000, 3 * PAGE]),
)


@given(PIECES, WISHES, st.booleans())
def test_a_plan_can_be_carried_out_and_has_a_place_for_everything(
    pieces: list[tuple[Use | None, int]], wanted: PlacementNeed, is_movable: bool
) -> None:
    regions = books(*pieces)
    placement = plan_placement(regions, wanted, {OLD} if is_movable else set(), pack)
    regions.check()
    if placement is None:
        return
    for move in placement.moves:
        owner = next(span.owner for span in regions if span.owner == move.key)
        assert owner is not None
        assert owner.use is Use.TENSOR
        assert is_movable
        assert regions.give(owner).begin == move.source
        regions.take(Span(move.target, move.target + move.num_bytes, owner))
    for span in placement.spans:
        regions.take(span)
    regions.check()
    taken_bytes = sum(span.num_bytes for span in placement.spans)
    # Blocks may share the pages at their ends with nobody, so they may take a page more than they fill.
    assert wanted.least_bytes <= taken_bytes <= wanted.least_bytes + PAGE
