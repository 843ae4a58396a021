"""What is given up first: the price of keeping a chunk, and the order that follows. Evicts nothing itself."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator

#: What is lost with a chunk: a cost, or a cost and what decides among equals; the lowest is evicted first.
Price = float | tuple[float, int]

#: How long an order holds at most before all chunks are priced anew.
EVICTIONS_PER_PRICING = 64
#: An order takes at most this share of the candidates: those that come later must have their chance soon.
ORDERED_SHARE = 1 / 16


def reload_cost(p_miss: float, num_bytes: int, bytes_per_s: float, weight: float) -> float:
    """Seconds that keeping these bytes is expected to save (T2 of the Tangram paper).

    `p_miss`: how probable it is that they are wanted again; `bytes_per_s`: of the rung they would come
    from; `weight`: how much a second of this model's start matters.
    """
    assert bytes_per_s > 0, f"a rung without bandwidth cannot be priced: {bytes_per_s=}"
    return p_miss * num_bytes / bytes_per_s * weight


def tail_first(cost: float, position: int) -> Price:
    """Of chunks that cost the same, the later one in its model goes first: what stays is needed first."""
    return (cost, -position)


def cheapest_first(
    digests: Iterable[str], price: Callable[[str], Price], max_digests: int | None = None
) -> list[str]:
    """The eviction order, or its first `max_digests`. Equal prices go by digest, so it is always the same."""

    def rank(digest: str) -> tuple[float, int, str]:
        match price(digest):
            case (cost, tie):
                return cost, tie, digest
            case cost:
                return cost, 0, digest

    if max_digests is None:
        return sorted(digests, key=rank)
    return heapq.nsmallest(max_digests, digests, key=rank)


class EvictionOrder:
    """Mutable; written only by the books that own it. Iterates over the chunks it would evict next.

    Pricing every chunk for every eviction would be slow with thousands of them. So they are priced once, and
    the order of the cheapest few is good for as many evictions. A chunk that is used or gone meanwhile is
    discarded, and is in the order again only when all are priced anew; so is a cheaper one that came later.
    """

    def __init__(self) -> None:
        self._order: dict[str, None] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def pop(self, candidates: Collection[str], price: Callable[[str], Price]) -> str | None:
        """The chunk to evict now, or None without candidates; they are looked at only when priced anew."""
        if not self._order:
            num_ordered = min(EVICTIONS_PER_PRICING, 1 + int(len(candidates) * ORDERED_SHARE))
            self._order = dict.fromkeys(cheapest_first(candidates, price, num_ordered))
        cheapest = next(iter(self._order), None)
        if cheapest is not None:
            del self._order[cheapest]
        return cheapest

    def discard(self, digest: str) -> None:
        self._order.pop(digest, None)
