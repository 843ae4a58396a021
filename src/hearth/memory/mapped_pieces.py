"""Adapters in a mapped pool: their pieces share pages in one space that belongs to no model."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.core.types import AdapterId
from hearth.memory.mapped_tenant import num_pages
from hearth.memory.page_books import PageBooks
from hearth.memory.page_table import Wipe
from hearth.memory.pages import Mark, Pages
from hearth.memory.piece_book import PieceBook
from hearth.memory.pool import PieceRun, piece_runs
from hearth.memory.spaces import Spaces


class MappedPieces:
    """`PieceMemory` of mapped pages. Mutable; the lock of the page table guards it."""

    def __init__(self, books: PageBooks, pages: Pages, spaces: Spaces, wipe: Wipe | None) -> None:
        self._books, self._table, self._pages, self._spaces = books, books.table, pages, spaces
        self._wipe = wipe
        self._book = PieceBook(pages.page_bytes, pages.space_bytes // pages.page_bytes)
        self._base: int | None = None  #: address of the space, reserved with the first pieces
        #: By slot where pieces were dropped and others remain: a mark behind the work queued then.
        self._released: dict[int, Mark] = {}

    @property
    def page_bytes(self) -> int:
        return self._pages.page_bytes

    def place(self, owner: AdapterId, sizes: Sequence[int], spare_bytes: int = 0) -> list[PieceRun] | None:
        """Pages that are mapped ahead for KV count as free; holes in the pages of pieces do not."""
        with self._table.lock:
            num_spare = num_pages(spare_bytes, self._pages.page_bytes)
            plan = self._book.plan(sizes, max(0, self._books.num_available - num_spare))
            if plan is None:
                return None
            if self._base is None:
                self._base = self._spaces.give_common()
            self._books.make_free(len(plan.new_slots))
            self._table.claim(self._places(plan.new_slots))
            self._book.take(owner, plan)
        return piece_runs(plan, sizes, self._base, self._pages.bytes_at)

    def prepare(self, owner: AdapterId) -> None:
        with self._table.lock:
            slots = self._book.slots_of(owner)
            places = self._places(slots)
            released = [mark for slot in slots if (mark := self._released.get(slot)) is not None]
            marks = {id(mark): mark for mark in (*released, *self._table.marks_of(places))}
            is_mapped = all(map(self._table.is_only_mapped_at, places))
        for mark in marks.values():
            mark.synchronize()
        if not is_mapped:
            self._table.map(places)

    def mark(self) -> Mark | None:
        return self._pages.mark()

    def drop(self, owner: AdapterId, last_read: Mark | None = None) -> None:
        if self._wipe is not None:
            last_read = None  # the wipe is queued behind it
            self._wipe_pieces(owner, self._wipe)
        with self._table.lock:
            slots = self._book.slots_of(owner)
            empty = self._book.give(owner)
            is_idle = last_read is not None and last_read.has_passed()
            idle = [slot for slot in empty if is_idle and self._is_idle(slot)]
            self._table.release(self._places(idle), is_idle=True)
            self._table.release(self._places([slot for slot in empty if slot not in idle]))
            if not is_idle:
                mark = self._pages.mark()
                self._released.update((slot, mark) for slot in slots if slot not in empty)
            for slot in empty:
                self._released.pop(slot, None)

    @property
    def num_pages(self) -> int:
        return len(self._book.slots)

    def num_bytes_by_owner(self) -> dict[AdapterId, int]:
        return self._book.bytes_by_owner()

    def all_places(self) -> list[int]:
        return self._places(sorted(self._book.slots))

    def check(self) -> None:
        self._book.check()

    def _is_idle(self, slot: int) -> bool:
        mark = self._released.get(slot)
        return mark is None or mark.has_passed()

    def _places(self, slots: Sequence[int]) -> list[int]:
        if not slots:
            return []
        assert self._base is not None, "there never were any pieces"
        return [self._base + slot * self._pages.page_bytes for slot in slots]

    def _wipe_pieces(self, owner: AdapterId, wipe: Wipe) -> None:
        assert self._base is not None, "there never were any pieces"
        self.prepare(owner)
        for part in self._book.plan_of(owner).parts:
            wipe(self._pages.bytes_at(self._base + part.begin, part.end - part.begin))
