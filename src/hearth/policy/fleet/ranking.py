"""Ids in the order of a value that each has, its rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Id = TypeVar("Id", bound=str)
Rank = TypeVar("Rank")  #: a number, or anything else that has an order


class Ranking(Generic[Id, Rank]):
    """Ids in a list sorted by rank, then by id. Mutable; one owner."""

    __slots__ = ("_rank_by_id", "_ranked")

    def __init__(self) -> None:
        self._ranked: list[tuple[Rank, Id]] = []
        self._rank_by_id: dict[Id, Rank] = {}

    def __len__(self) -> int:
        return len(self._ranked)

    def __contains__(self, id_: Id) -> bool:
        return id_ in self._rank_by_id

    def __iter__(self) -> Iterator[Id]:
        """Iterate over the present ids, lowest rank first, unaffected by later changes."""
        return (id_ for _, id_ in self._ranked.copy())

    def __reversed__(self) -> Iterator[Id]:
        """Iterate over all ids, highest rank first. Not to be continued after a change."""
        return (id_ for _, id_ in reversed(self._ranked))

    def from_rank(self, rank: Rank) -> Iterator[Id]:
        """Iterate over ids of at least this rank, lowest first. Not to be continued after a change."""
        return (self._ranked[at][1] for at in range(self._first(rank), len(self._ranked)))

    def down_to_rank(self, rank: Rank) -> Iterator[Id]:
        """Iterate over ids of at least this rank, highest first. Not to be continued after a change."""
        return (self._ranked[at][1] for at in range(len(self._ranked) - 1, self._first(rank) - 1, -1))

    def first_from_rank(self, rank: Rank) -> Id | None:
        """Return the id of the lowest rank from `rank` on."""
        at = self._first(rank)
        return self._ranked[at][1] if at < len(self._ranked) else None

    @property
    def lowest(self) -> Rank | None:
        return self._ranked[0][0] if self._ranked else None

    @property
    def highest(self) -> Rank | None:
        return self._ranked[-1][0] if self._ranked else None

    def rank(self, id_: Id) -> Rank | None:
        return self._rank_by_id.get(id_)

    def has_rank(self, id_: Id, rank: Rank) -> bool:
        own = self._rank_by_id.get(id_)
        return own is not None and (own, id_) >= (rank, "")

    def few_from_rank(self, rank: Rank, most: int) -> list[Id] | None:
        """Return the ids of at least this rank, lowest first; None if there are more than `most`."""
        first = self._first(rank)
        return None if len(self._ranked) - first > most else [id_ for _, id_ in self._ranked[first:]]

    def sort(self, ids: Iterable[Id], from_rank: Rank, *, highest_first: bool) -> list[Id]:
        """Return those of some ids that have at least a rank, in order."""
        found = [(self._rank_by_id[id_], id_) for id_ in ids if self.has_rank(id_, from_rank)]
        return [id_ for _, id_ in sorted(found, reverse=highest_first)]

    def put(self, id_: Id, rank: Rank) -> None:
        before, ranked = self._rank_by_id.get(id_), self._ranked
        if before == rank:
            return
        if before is not None:
            del ranked[bisect_left(ranked, (before, id_))]
        self._rank_by_id[id_] = rank
        insort(ranked, (rank, id_))

    def drop(self, id_: Id) -> None:
        rank = self._rank_by_id.pop(id_, None)
        if rank is not None:
            del self._ranked[bisect_left(self._ranked, (rank, id_))]

    def _first(self, rank: Rank) -> int:
        return bisect_left(self._ranked, (rank, ""))


class SizedRanking(Generic[Id, Rank]):
    """Ids by rank that also have a size each, so that the next small one is found. Mutable; one owner.

    Sizes are in classes, four for each power of two: a search costs the number of classes.
    """

    __slots__ = ("_by_class", "_size_by_id")

    def __init__(self) -> None:
        self._by_class: dict[int, Ranking[Id, Rank]] = {}
        self._size_by_id: dict[Id, int] = {}

    def put(self, id_: Id, rank: Rank, size: int) -> None:
        if self._size_by_id.get(id_) != size:
            self.drop(id_)
            self._size_by_id[id_] = size
        self._by_class.setdefault(_size_class(size), Ranking()).put(id_, rank)

    def drop(self, id_: Id) -> None:
        if (size := self._size_by_id.pop(id_, None)) is not None:
            ranking = self._by_class[_size_class(size)]
            ranking.drop(id_)
            if not len(ranking):
                del self._by_class[_size_class(size)]

    def find(self, rank: Rank, max_size: int) -> Id | None:
        """Return the id of the lowest rank from `rank` on whose size is at most `max_size`."""
        highest = _size_class(max_size)
        best: tuple[Rank, Id] | None = None
        for size_class, ranking in self._by_class.items():
            if size_class > highest:
                continue
            ranked = ranking._ranked
            at = bisect_left(ranked, (rank, ""))
            while size_class == highest and at < len(ranked) and self._size_by_id[ranked[at][1]] > max_size:
                at += 1
            if at < len(ranked) and (best is None or ranked[at] < best):
                best = ranked[at]
        return None if best is None else best[1]


def _size_class(size: int) -> int:
    bits = size.bit_length()
    return bits * 4 + (size >> max(0, bits - 3)) % 4
