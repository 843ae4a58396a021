"""Which pages hold which chunk of weights, complete and never written again. Knows no model.

Only chunks of exactly one page can be shared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hearth.core.types import ChunkId
from hearth.memory.pool import Shape


class SharedChunks:
    """Mutable; written only by the books. A chunk may have several pages, from loads that ran at the same
    time."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._pages: dict[ChunkId, set[int]] = {}

    def add(self, shape: Shape, index: int, page: int) -> None:
        if shape.chunk_bytes == self._page_bytes:
            self._pages.setdefault(shape.chunks[index], set()).add(page)

    def discard(self, shape: Shape, index: int, page: int) -> None:
        """Forget a page that no model maps any more."""
        if shape.chunk_bytes == self._page_bytes:
            pages = self._pages[shape.chunks[index]]
            pages.remove(page)
            if not pages:
                del self._pages[shape.chunks[index]]

    def find(self, shape: Shape, indices: Iterable[int], excluded: Collection[int]) -> dict[int, int]:
        """Return pages that hold the chunks of these indices, each page for one index."""
        found: dict[int, int] = {}
        if shape.chunk_bytes != self._page_bytes:
            return found
        taken = set(excluded)
        for index in indices:
            pages = self._pages.get(shape.chunks[index])
            if pages and (page := min(pages - taken, default=None)) is not None:
                found[index] = page
                taken.add(page)
        return found

    def all_pages(self) -> set[int]:
        return {page for pages in self._pages.values() for page in pages}
