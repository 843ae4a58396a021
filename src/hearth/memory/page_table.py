"""Which page belongs at which place, which one is mapped there, and which are free. Knows no model.

The books change at once; the driver is called later, by the first thread that needs the page:

    claim, share   a place gets a page in the books
    release        a place gives its page up in the books; the page stays mapped there: it is stale
    map            wait until the device is done with the stale places in the way, unmap those, map

So a page that returns to a place where it is still mapped costs nothing, and evicting costs no call of the
driver on the step thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hearth.memory.pages import Mark, PageRun, Pages

Wipe = Callable[[torch.Tensor], None]

#: Places that are remapped together. One call of the driver maps adjacent ones; other threads wait meanwhile.
MAX_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class _Remap:
    pages: dict[int, int]  #: to map, by place, in order
    stale: tuple[int, ...]  #: places to unmap first, in order


class PageTable:
    """Mutable. Callers hold `lock`, except for `map`, `wait_until_idle`, `check` and `close`."""

    def __init__(self, pages: Pages, wipe: Wipe | None = None) -> None:
        self._pages = pages
        self._wipe = wipe
        #: Guards the books, because loads call from their own threads. Never held during a call of the
        #: driver, so that the step thread never waits for one.
        self.lock = threading.Lock()
        #: Serialises calls of the driver; taken before `lock`.
        self._driver = threading.Lock()
        #: Pages that belong nowhere, in the order they came free: the device is done with the first ones.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(pages.num_pages))
        self._page_at: dict[int, int] = {}  #: the page that belongs at a place
        self._places: list[set[int]] = [set() for _ in range(pages.num_pages)]  #: the inverse
        self.shared: set[int] = set()  #: pages that belong at more than one place
        #: The page that is mapped at a place and not about to be unmapped; written with both locks held.
        self._mapped: dict[int, int] = {}
        self._mapped_places: list[set[int]] = [set() for _ in range(pages.num_pages)]  #: the inverse
        #: By mapped place that was released: a mark behind the work queued then.
        self._released: dict[int, Mark] = {}

    @property
    def num_pages(self) -> int:
        return self._pages.num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def page_at(self, place: int) -> int:
        return self._page_at[place]

    def places_of(self, page: int) -> set[int]:
        """Return the places where a page belongs. Read-only."""
        return self._places[page]

    def is_mapped(self, place: int) -> bool:
        return self._mapped.get(place) == self._page_at[place]

    def is_only_mapped_at(self, place: int) -> bool:
        """True if the page of a place is mapped there and nowhere else: `map` would do nothing."""
        page = self._page_at[place]
        return self._mapped.get(place) == page and len(self._mapped_places[page]) == 1

    def claim(self, places: Sequence[int]) -> None:
        """Give each place a free page of its own, preferably the one still mapped there."""
        assert len(places) <= self.num_free, f"{len(places)=} {self.num_free=}"
        others = []
        for place in places:
            page = self._mapped.get(place)
            if page is not None and page in self._free:
                del self._free[page]
                self.share(place, page)
            else:
                others.append(place)
        for place in others:
            page, _ = self._free.popitem(last=False)
            self.share(place, page)

    def share(self, place: int, page: int) -> None:
        assert place not in self._page_at, f"{place=:#x} has page {self._page_at[place]}"
        assert page not in self._free, f"{page=} is free"
        self._page_at[place] = page
        self._places[page].add(place)
        if len(self._places[page]) > 1:
            self.shared.add(page)

    def release(self, places: Sequence[int], *, is_idle: bool = False) -> int:
        """Give up these places. Returns how many pages came free, which excludes shared ones.

        Their next owners wait for the work that is queued now, unless `is_idle`: it does not use them.
        """
        num_free = self.num_free
        for place in places:
            page = self._page_at.pop(place)
            self._places[page].remove(place)
            if len(self._places[page]) == 1:
                self.shared.discard(page)
            if not self._places[page]:
                if self._wipe is not None and self._mapped.get(place) == page:
                    self._wipe(self._pages.bytes_at(place, self._pages.page_bytes))
                self._free[page] = None
        if places and (not is_idle or self._wipe is not None):
            mark = self._pages.mark()
            self._released.update((place, mark) for place in places if place in self._mapped)
        return self.num_free - num_free

    def map(self, places: Iterable[int]) -> None:
        """Map the pages that belong at these places. Skips places that have none any more."""
        wanted = sorted(places)
        for begin in range(0, len(wanted), MAX_AT_ONCE):
            while not self._try_map(wanted[begin : begin + MAX_AT_ONCE]):
                pass  # the books changed between waiting and mapping

    def wait_until_idle(self, places: Sequence[int]) -> None:
        """Wait until the device is done with the former contents of places, also of the same pages."""
        with self.lock:
            marks = self.marks_of(places)
        for mark in marks:
            mark.synchronize()

    def _try_map(self, places: Sequence[int]) -> bool:
        with self.lock:
            remap = self._remap(places)
            marks = self.marks_of(remap.stale)
        if not remap.stale and not remap.pages:
            return True
        for mark in marks:
            mark.synchronize()
        with self._driver:
            with self.lock:
                if self._remap(places) != remap:
                    return False
                stale_pages = {stale: self._mapped.pop(stale) for stale in remap.stale}
                for stale, page in stale_pages.items():  # before the call: they no longer count as mapped
                    self._mapped_places[page].remove(stale)
                    self._released.pop(stale, None)
            self._carry_out(remap, stale_pages)
        return True

    def marks_of(self, places: Sequence[int]) -> list[Mark]:
        """Return the marks to wait for before places are written. Places released together share one."""
        marks = {id(mark): mark for place in places if (mark := self._released.get(place)) is not None}
        return list(marks.values())

    def _carry_out(self, remap: _Remap, stale_pages: Mapping[int, int]) -> None:
        """Call the driver. The books record all that it did, also before it refused a call."""
        there = dict(stale_pages)
        try:
            for run in self._pages.remap(self._page_runs(remap)):
                places = range(
                    run.address, run.address + run.num_pages * self._pages.page_bytes, self._pages.page_bytes
                )
                if run.pages:
                    there.update(zip(places, run.pages, strict=True))
                else:
                    for place in places:
                        del there[place]
        finally:
            with self.lock:
                for place, page in there.items():
                    self._mapped[place] = page
                    self._mapped_places[page].add(place)

    def _remap(self, places: Sequence[int]) -> _Remap:
        pages: dict[int, int] = {}
        stale: set[int] = set()
        for place in places:
            page = self._page_at.get(place)
            if page is None:
                continue
            # A page with a new owner is mapped nowhere else: no stray write of the last one may reach it.
            stale.update(other for other in self._mapped_places[page] if self._page_at.get(other) != page)
            if self._mapped.get(place) != page:
                pages[place] = page
                if place in self._mapped:
                    stale.add(place)
        return _Remap(pages, tuple(sorted(stale)))

    def _page_runs(self, remap: _Remap) -> list[PageRun]:
        stale = [PageRun(run[0], len(run)) for run in self._runs(remap.stale)]
        return stale + [
            PageRun(run[0], len(run), tuple(remap.pages[place] for place in run))
            for run in self._runs(tuple(remap.pages))
        ]

    def _runs(self, places: Sequence[int]) -> Iterator[list[int]]:
        run: list[int] = []
        for place in places:
            if run and place != run[-1] + self._pages.page_bytes:
                yield run
                run = []
            run.append(place)
        if run:
            yield run

    def check(self) -> None:
        with self._driver, self.lock:
            for page, places in enumerate(self._places):
                assert bool(places) != (page in self._free), f"{page=} {places=} is free and not, or neither"
                assert all(self._page_at[place] == page for place in places), f"{page=} {places=}"
                assert (page in self.shared) == (len(places) > 1), f"{page=} {places=}"
                mapped = self._mapped_places[page]
                assert all(self._mapped[place] == page for place in mapped), f"{page=} {mapped=}"
            assert len(self._page_at) == sum(map(len, self._places)), "a place has a page that denies it"
            assert len(self._mapped) == sum(map(len, self._mapped_places)), "a mapping that its page denies"
            assert self._released.keys() <= self._mapped.keys(), "a mark of a place where nothing is mapped"

    def close(self) -> None:
        """Unmap everything, once the device is done with it."""
        self._pages.mark().synchronize()
        with self._driver, self.lock:
            for mark in self._released.values():
                mark.synchronize()
            for place in self._mapped:
                self._pages.unmap(place)
            self._mapped.clear()
            self._released.clear()
