"""The price of keeping a chunk, and the order of eviction that follows from prices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.evict import (
    EVICTIONS_PER_PRICING,
    EvictionOrder,
    Price,
    cheapest_first,
    reload_cost,
    tail_first,
)


def test_the_cost_is_the_expected_seconds_of_a_reload() -> None:
    assert reload_cost(p_miss=0.5, num_bytes=16 << 30, bytes_per_s=float(4 << 30), weight=3.0) == 6.0


def test_what_is_never_wanted_again_costs_nothing() -> None:
    assert reload_cost(p_miss=0.0, num_bytes=1 << 30, bytes_per_s=1e9, weight=1.0) == 0.0


def test_a_rung_without_bandwidth_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"bytes_per_s=0\.0"):
        reload_cost(p_miss=0.5, num_bytes=1, bytes_per_s=0.0, weight=1.0)


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
    assert EvictionOrder().pop([], lambda _: 0.0) is None


def test_an_order_holds_although_prices_change_until_it_is_used_up() -> None:
    order = EvictionOrder()
    digests = [f"{number:04}" for number in range(16 * EVICTIONS_PER_PRICING)]
    first = order.pop(digests, lambda digest: float(digest))
    rest = [order.pop(digests, lambda digest: -float(digest)) for _ in range(EVICTIONS_PER_PRICING)]
    assert [first, *rest] == [*digests[:EVICTIONS_PER_PRICING], digests[-1]]


def test_a_discarded_chunk_is_not_evicted_until_all_are_priced_anew() -> None:
    order = EvictionOrder()
    digests = [f"{number:02}" for number in range(40)]  # of which three are in order
    order.pop(digests, lambda _: 0.0)
    order.discard("01")
    assert list(order) == ["02"]
    assert [order.pop(digests, lambda _: 0.0), order.pop(["01"], lambda _: 0.0)] == ["02", "01"]


def test_an_order_of_few_chunks_is_short_so_that_cheaper_ones_get_in_soon() -> None:
    order = EvictionOrder()
    prices = {"dear": 9.0, "dearer": 10.0}
    assert order.pop(prices, prices.__getitem__) == "dear"
    prices["cheap"] = 1.0
    assert order.pop(prices, prices.__getitem__) == "cheap"
