"""Ids in the order of a value that each has, its rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
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

    def from_rank(self, rank: Rank) -> Iterator[Id]:
        """Iterate over ids of at least this rank, lowest first. Not to be continued after a change."""
        return (self._ranked[at][1] for at in range(self._first(rank), len(self._ranked)))

    def down_to_rank(self, rank: Rank) -> Iterator[Id]:
        """Iterate over ids of at least this rank, highest first. Not to be continued after a change."""
        return (self._ranked[at][1] for at in range(len(self._ranked) - 1, self._first(rank) - 1, -1))

    @property
    def lowest(self) -> Rank | None:
        return self._ranked[0][0] if self._ranked else None

    @property
    def highest(self) -> Rank | None:
        return self._ranked[-1][0] if self._ranked else None

    def rank(self, id_: Id) -> Rank | None:
        return self._rank_by_id.get(id_)

    def put(self, id_: Id, rank: Rank) -> None:
        if self._rank_by_id.get(id_) == rank:
            return
        self.drop(id_)
        self._rank_by_id[id_] = rank
        insort(self._ranked, (rank, id_))

    def drop(self, id_: Id) -> None:
        rank = self._rank_by_id.pop(id_, None)
        if rank is not None:
            del self._ranked[bisect_left(self._ranked, (rank, id_))]

    def _first(self, rank: Rank) -> int:
        return bisect_left(self._ranked, (rank, ""))
