"""The order in which bytes are evicted, by the price of keeping them. Evicts nothing itself."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hearth.core.types import Hold, ModelId

#: What is lost with a chunk: a cost, or a cost and what decides among equals; the lowest is evicted first.
Price = float | tuple[float, int]

#: How long an order holds at most before all chunks are priced anew.
EVICTIONS_PER_PRICING = 64
#: An order takes at most this share of the candidates: those that come later must have their chance soon.
ORDERED_SHARE = 1 / 16

#: How models are held whose weights may be taken, in the order in which they give way.
TAKEABLE = (Hold.RETAINED, Hold.WARM, Hold.PAUSED)


def effective_hold(hold: Hold, *, is_loading: bool, has_requests: bool, has_turn: bool) -> Hold:
    """Return how a hosted model is held now; `hold`: while it has no requests.

    BUSY while nothing of it may be taken: it has requests, or is being loaded. PAUSED if it would be BUSY or
    PINNED but waits for its turn.
    """
    if has_turn and hold is Hold.PINNED:
        return Hold.PINNED
    if is_loading or (has_turn and has_requests):
        return Hold.BUSY
    return Hold.PAUSED if has_requests or hold is Hold.PINNED else hold


def tail_first(cost: float, position: int) -> Price:
    """Return a price by which the later of two equally expensive chunks goes first: it is needed later."""
    return (cost, -position)


def cheapest_first(
    chunk_ids: Iterable[str], price: Callable[[str], Price], max_chunks: int | None = None
) -> list[str]:
    """Return the eviction order, or its first `max_chunks`. Equal prices go by id."""

    def rank(chunk_id: str) -> tuple[float, int, str]:
        match price(chunk_id):
            case (cost, tie):
                return cost, tie, chunk_id
            case cost:
                return cost, 0, chunk_id

    if max_chunks is None:
        return sorted(chunk_ids, key=rank)
    return heapq.nsmallest(max_chunks, chunk_ids, key=rank)


class ChunkEvictionOrder:
    """The chunks to evict next. Mutable; written only by the books that own it.

    All are priced once for many evictions. A chunk that is used or gone meanwhile is discarded.
    """

    def __init__(self) -> None:
        self._order: dict[str, None] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def pop(self, candidates: Collection[str], price: Callable[[str], Price]) -> str | None:
        if not self._order:
            num_ordered = min(EVICTIONS_PER_PRICING, 1 + int(len(candidates) * ORDERED_SHARE))
            self._order = dict.fromkeys(cheapest_first(candidates, price, num_ordered))
        cheapest = next(iter(self._order), None)
        if cheapest is not None:
            del self._order[cheapest]
        return cheapest

    def discard(self, chunk_id: str) -> None:
        self._order.pop(chunk_id, None)


@dataclass(frozen=True, slots=True)
class Tail:
    model: ModelId
    hold: Hold  #: one of `TAKEABLE`
    cost_s_per_byte: float  #: `reload_cost` of one byte
    units: tuple[int, ...]  #: bytes that each frees, in the order they go; 0 where another model shares them


@dataclass(frozen=True, slots=True)
class Take:
    model: ModelId
    num_units: int


def plan_takes(tails: Sequence[Tail], num_bytes: int) -> list[Take]:
    """Return the cheapest takes that free at least `num_bytes`, or all if that is less.

    Warm models lose bytes only if all retained bytes go, shared units included, and paused ones only after
    warm ones. If not all of one hold goes, nothing is taken in vain, and no exchange of one model's last
    taken unit for another's next one would be cheaper.
    """
    for tail in tails:
        assert tail.hold in TAKEABLE, f"never to be taken from: {tail.model} {tail.hold=}"
        assert tail.cost_s_per_byte >= 0, f"a price below nothing: {tail.model} {tail.cost_s_per_byte=}"
    takes: list[Take] = []
    for hold in TAKEABLE:
        if num_bytes <= 0:
            break
        held = [tail for tail in tails if tail.hold == hold]
        held.sort(key=lambda tail: (tail.cost_s_per_byte, tail.model))
        held_bytes = sum(sum(tail.units) for tail in held)
        chosen = [len(tail.units) for tail in held]
        if held_bytes >= num_bytes:
            chosen = _TakeChoice(held, num_bytes).improved()
        takes += [Take(tail.model, num) for tail, num in zip(held, chosen, strict=True) if num]
        num_bytes -= held_bytes
    return takes


class _TakeChoice:
    """How many units go from each of some tails that have enough. Mutable."""

    def __init__(self, tails: Sequence[Tail], num_bytes: int) -> None:
        """`tails`: the cheapest byte first."""
        self._tails = tails
        self._num_units = [0] * len(tails)
        self._spare_bytes = -num_bytes
        for index, tail in enumerate(tails):
            freed_bytes = list(accumulate(tail.units))
            num = min(bisect_left(freed_bytes, -self._spare_bytes) + 1, len(tail.units))
            self._num_units[index] = num
            self._spare_bytes += freed_bytes[num - 1] if num else 0
            if self._spare_bytes >= 0:
                break

    def improved(self) -> list[int]:
        self._give_back()
        while self._exchange():
            self._give_back()
        return self._num_units

    def _give_back(self) -> None:
        for index in reversed(range(len(self._tails))):
            units = self._tails[index].units
            while (num := self._num_units[index]) and units[num - 1] <= self._spare_bytes:
                self._num_units[index] -= 1
                self._spare_bytes -= units[num - 1]

    def _exchange(self) -> bool:
        last: list[tuple[float, int, int]] = []
        following: list[tuple[float, int, int]] = []
        for index, (tail, num) in enumerate(zip(self._tails, self._num_units, strict=True)):
            if num:
                last.append((tail.cost_s_per_byte * tail.units[num - 1], index, tail.units[num - 1]))
            if num < len(tail.units):
                following.append((tail.cost_s_per_byte * tail.units[num], index, tail.units[num]))
        last.sort(reverse=True)
        following.sort()
        for cost_s, index, num_bytes in last:
            for other_cost_s, other, other_bytes in following:
                if other_cost_s >= cost_s:
                    break
                if other != index and other_bytes >= num_bytes - self._spare_bytes:
                    self._num_units[index] -= 1
                    self._num_units[other] += 1
                    self._spare_bytes += other_bytes - num_bytes
                    return True
        return False
