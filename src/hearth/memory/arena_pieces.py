"""Adapters in an arena: the pieces of each lie in one region.

Regions of adapters never move and separate those that do, so there are few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch

from hearth.core.types import AdapterId, ModelId
from hearth.memory.arena_books import ArenaBooks
from hearth.memory.pages import Mark
from hearth.memory.piece_book import PiecePlan, piece_bytes
from hearth.memory.placement import PlacementNeed
from hearth.memory.pool import PieceRun, piece_runs
from hearth.memory.regions import Owner, Use, aligned
from hearth.policy.memory.packing import Item


@dataclass(frozen=True, slots=True)
class _PieceRegion:
    owner: Owner
    num_bytes: int
    #: On CUDA: a mark behind the work queued when they were placed, which may still read or move the memory.
    queued: torch.cuda.Event | None


class ArenaPieces:
    page_bytes = 1

    def __init__(self, books: ArenaBooks) -> None:
        self._books = books
        self._regions: dict[AdapterId, _PieceRegion] = {}
        self._numbers = count()

    def place(self, owner: AdapterId, sizes: Sequence[int], spare_bytes: int = 0) -> list[PieceRun] | None:
        assert owner not in self._regions, f"adapter {owner} has its pieces"
        books, num_bytes = self._books, sum(map(piece_bytes, sizes))
        if aligned(num_bytes) + spare_bytes > books.regions.free_bytes:
            return None
        region = Owner(ModelId(""), Use.PIECES, next(self._numbers))
        need = PlacementNeed(ModelId(""), (), 0, 0, block_bytes=1, tables=(Item(region, aligned(num_bytes)),))
        placement = books.plan(need, books.movable())
        if placement is None:
            return None
        books.move(placement.moves)
        (span,) = placement.spans
        books.regions.take(span)
        self._regions[owner] = _PieceRegion(region, num_bytes, books.queued_now())
        books.give_back()
        base, memory = books.memory.data_ptr(), books.memory
        return piece_runs(
            PiecePlan.in_a_row(sizes, span.begin),
            sizes,
            base,
            lambda address, size: memory[address - base : address - base + size],
        )

    def prepare(self, owner: AdapterId) -> None:
        queued = self._regions[owner].queued
        if queued is not None:
            queued.synchronize()

    def mark(self) -> Mark | None:
        """None: the next owner waits for all work that is queued when it is placed."""
        return None

    def drop(self, owner: AdapterId, last_read: Mark | None = None) -> None:
        self._books.give(self._regions.pop(owner).owner)

    def num_bytes_by_owner(self) -> dict[AdapterId, int]:
        return {owner: region.num_bytes for owner, region in sorted(self._regions.items())}

    def region_owners(self) -> set[Owner]:
        return {region.owner for region in self._regions.values()}
