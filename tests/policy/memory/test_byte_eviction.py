"""The price of keeping a chunk, the order that follows from prices, and what is taken of whose weights."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import Hold, ModelId
from hearth.policy.memory.byte_eviction import (
    EVICTIONS_PER_PRICING,
    ChunkEvictionOrder,
    Price,
    Tail,
    Take,
    cheapest_first,
    effective_hold,
    plan_takes,
    tail_first,
)


@pytest.mark.parametrize(
    ("hold", "is_loading", "has_requests", "has_turn", "expected"),
    [
        (Hold.WARM, False, False, True, Hold.WARM),
        (Hold.RETAINED, False, False, False, Hold.RETAINED),
        (Hold.WARM, False, True, True, Hold.BUSY),
        (Hold.WARM, False, True, False, Hold.PAUSED),
        (Hold.WARM, True, False, False, Hold.BUSY),
        (Hold.PINNED, False, True, True, Hold.PINNED),
        (Hold.PINNED, False, False, False, Hold.PAUSED),
    ],
)
def test_how_a_model_is_held_depends_on_its_requests_its_load_and_its_turn(
    hold: Hold, is_loading: bool, has_requests: bool, has_turn: bool, expected: Hold
) -> None:
    now = effective_hold(hold, is_loading=is_loading, has_requests=has_requests, has_turn=has_turn)
    assert now is expected


def test_evicts_the_cheapest_reload_first() -> None:
    prices = {"a": 2.0, "b": 1.0, "c": 3.0}
    assert cheapest_first(prices, prices.__getitem__) == ["b", "a", "c"]


def test_of_equal_costs_the_last_layers_go_first() -> None:
    prices = {digest: tail_first(1.0, position) for position, digest in enumerate(["a", "b", "c"])}
    assert cheapest_first(prices, prices.__getitem__) == ["c", "b", "a"]


def test_of_equal_prices_the_lower_digest_goes_first() -> None:
    assert cheapest_first(["c", "a", "b"], lambda _: 1.0) == ["a", "b", "c"]


def test_a_bare_cost_stands_beside_one_with_a_position() -> None:
    prices: dict[str, Price] = {"a": 1.0, "b": tail_first(1.0, 4), "c": tail_first(0.5, 0)}
    assert cheapest_first(prices, prices.__getitem__) == ["c", "b", "a"]


@given(
    prices=st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 3)),
    limit=st.integers(0, 9),
)
def test_a_limit_cuts_the_same_order(prices: dict[str, int], limit: int) -> None:
    whole = cheapest_first(reversed(prices), prices.__getitem__)
    assert whole == sorted(prices, key=lambda digest: (prices[digest], digest))
    assert cheapest_first(prices, prices.__getitem__, limit) == whole[:limit]


def test_an_order_without_candidates_gives_nothing() -> None:
    assert ChunkEvictionOrder().pop([], lambda _: 0.0) is None


def test_an_order_holds_although_prices_change_until_it_is_used_up() -> None:
    order = ChunkEvictionOrder()
    digests = [f"{number:04}" for number in range(16 * EVICTIONS_PER_PRICING)]
    first = order.pop(digests, lambda digest: float(digest))
    rest = [order.pop(digests, lambda digest: -float(digest)) for _ in range(EVICTIONS_PER_PRICING)]
    assert [first, *rest] == [*digests[:EVICTIONS_PER_PRICING], digests[-1]]


def test_a_discarded_chunk_is_not_evicted_until_all_are_priced_anew() -> None:
    order = ChunkEvictionOrder()
    digests = [f"{number:02}" for number in range(40)]  # of which three are in order
    order.pop(digests, lambda _: 0.0)
    order.discard("01")
    assert list(order) == ["02"]
    assert [order.pop(digests, lambda _: 0.0), order.pop(["01"], lambda _: 0.0)] == ["02", "01"]


def test_an_order_of_few_chunks_is_short_so_that_cheaper_ones_get_in_soon() -> None:
    order = ChunkEvictionOrder()
    prices = {"dear": 9.0, "dearer": 10.0}
    assert order.pop(prices, prices.__getitem__) == "dear"
    prices["cheap"] = 1.0
    assert order.pop(prices, prices.__getitem__) == "cheap"


def tail(model: str, cost: float, *units: int, hold: Hold = Hold.RETAINED) -> Tail:
    return Tail(ModelId(model), hold, cost, units)


def tails(unit_bytes: st.SearchStrategy[int]) -> st.SearchStrategy[list[Tail]]:
    any_tail = st.builds(
        Tail,
        model=st.sampled_from([ModelId(name) for name in "abcdef"]),
        hold=st.sampled_from([Hold.RETAINED, Hold.RETAINED, Hold.WARM, Hold.PAUSED]),
        cost_s_per_byte=st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0.0, 4.0)),
        units=st.lists(unit_bytes, max_size=6).map(tuple),
    )
    return st.lists(any_tail, max_size=6, unique_by=lambda tail: tail.model)


def num_taken(tails: list[Tail], num_bytes: int) -> list[int]:
    """Of each tail; at most once is taken from a model, and never nothing."""
    takes = plan_takes(tails, num_bytes)
    nums = {take.model: take.num_units for take in takes}
    assert len(nums) == len(takes)
    assert nums.keys() <= {tail.model for tail in tails}
    assert all(nums.values())
    return [nums.get(tail.model, 0) for tail in tails]


def freed_bytes(tails: list[Tail], nums: list[int]) -> int:
    return sum(sum(tail.units[:num]) for tail, num in zip(tails, nums, strict=True))


@given(tails=tails(st.integers(0, 9)), num_bytes=st.integers(-1, 90))
def test_enough_is_freed_or_everything_goes(tails: list[Tail], num_bytes: int) -> None:
    nums = num_taken(tails, num_bytes)
    assert all(num <= len(tail.units) for tail, num in zip(tails, nums, strict=True))
    if freed_bytes(tails, nums) < num_bytes:
        assert nums == [len(tail.units) for tail in tails]


@given(tails=tails(st.integers(0, 9)), num_bytes=st.integers(0, 90))
def test_models_lose_something_only_when_all_goes_that_is_held_less(
    tails: list[Tail], num_bytes: int
) -> None:
    nums = num_taken(tails, num_bytes)
    most = max((tail.hold for tail, num in zip(tails, nums, strict=True) if num), default=Hold.RETAINED)
    for tail, num in zip(tails, nums, strict=True):
        assert tail.hold >= most or num == len(tail.units)


@given(tails=tails(st.sampled_from([0, 1, 2, 5, 20, 60])), share=st.floats(0.0, 1.0))
def test_nothing_is_taken_in_vain_and_no_exchange_is_cheaper(tails: list[Tail], share: float) -> None:
    num_bytes = int(share * freed_bytes(tails, [len(tail.units) for tail in tails]))
    nums = num_taken(tails, num_bytes)
    spare_bytes = freed_bytes(tails, nums) - num_bytes
    last_hold = max((tail.hold for tail, num in zip(tails, nums, strict=True) if num), default=Hold.RETAINED)
    candidates = [(tail, num) for tail, num in zip(tails, nums, strict=True) if tail.hold is last_hold]
    assert not [tail.model for tail, num in candidates if num and tail.units[num - 1] <= spare_bytes]
    for (lost, lost_num), (gained, gained_num) in itertools.permutations(candidates, 2):
        if lost_num and gained_num < len(gained.units):
            lost_bytes, gained_bytes = lost.units[lost_num - 1], gained.units[gained_num]
            is_cheaper = gained.cost_s_per_byte * gained_bytes < lost.cost_s_per_byte * lost_bytes
            assert not (is_cheaper and gained_bytes >= lost_bytes - spare_bytes), (lost, gained)


@given(tails=tails(st.just(4)), num_bytes=st.integers(0, 60))
def test_with_units_of_one_size_no_other_choice_is_cheaper(tails: list[Tail], num_bytes: int) -> None:
    retained = [tail for tail in tails[:4] if tail.hold is Hold.RETAINED]
    choices = itertools.product(*(range(len(tail.units) + 1) for tail in retained))

    def cost_s(nums: list[int]) -> float:
        return sum(4 * num * tail.cost_s_per_byte for tail, num in zip(retained, nums, strict=True))

    costs_s = [cost_s(list(nums)) for nums in choices if freed_bytes(retained, list(nums)) >= num_bytes]
    if costs_s:
        assert cost_s(num_taken(retained, num_bytes)) == pytest.approx(min(costs_s))


@given(tails=tails(st.integers(0, 9)), num_bytes=st.integers(0, 90), data=st.data())
def test_the_order_in_which_models_are_given_is_no_matter(
    tails: list[Tail], num_bytes: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(tails))
    assert plan_takes(shuffled, num_bytes) == plan_takes(tails, num_bytes)


def test_takes_from_the_cheapest_model_until_it_suffices() -> None:
    models = [tail("dear", 2.0, 4, 4, 4), tail("cheap", 1.0, 4, 4, 4)]
    assert plan_takes(models, 13) == [Take(ModelId("cheap"), 3), Take(ModelId("dear"), 1)]


def test_takes_nothing_where_nothing_is_needed() -> None:
    assert plan_takes([tail("a", 0.0, 4)], 0) == []


def test_a_cheap_byte_in_a_huge_unit_gives_way_to_a_small_dearer_unit() -> None:
    models = [tail("huge", 1.0, 100), tail("small", 2.0, 5)]
    assert plan_takes(models, 5) == [Take(ModelId("small"), 1)]


def test_a_model_does_not_exchange_with_itself() -> None:
    models = [tail("a", 1.0, 5, 3), tail("b", 1.5, 3)]
    assert plan_takes(models, 3) == [Take(ModelId("b"), 1)]


def test_a_unit_that_a_larger_one_made_needless_stays() -> None:
    models = [tail("small", 1.0, 3), tail("large", 2.0, 10)]
    assert plan_takes(models, 10) == [Take(ModelId("large"), 1)]


def test_shared_units_go_on_the_way_to_those_that_free_memory() -> None:
    assert plan_takes([tail("a", 1.0, 0, 0, 4, 0)], 4) == [Take(ModelId("a"), 3)]


def test_shared_units_go_as_well_where_all_is_not_enough() -> None:
    models = [tail("a", 1.0, 0, 0), tail("b", 1.0, 0, 0), tail("w", 1.0, 4, 4, hold=Hold.WARM)]
    assert plan_takes(models, 3) == [
        Take(ModelId("a"), 2),
        Take(ModelId("b"), 2),
        Take(ModelId("w"), 1),
    ]


@pytest.mark.parametrize("hold", [Hold.BUSY, Hold.PINNED])
def test_a_busy_or_pinned_model_among_the_tails_is_a_mistake(hold: Hold) -> None:
    with pytest.raises(AssertionError, match="never to be taken from: a"):
        plan_takes([tail("a", 0.0, 4, hold=hold)], 1)


def test_a_price_that_is_no_number_or_below_nothing_is_a_mistake() -> None:
    for cost in (-1.0, float("nan")):
        with pytest.raises(AssertionError, match="a price below nothing: a"):
            plan_takes([tail("a", cost, 4)], 1)
