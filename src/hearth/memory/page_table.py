"""Which page belongs at which place, which one is mapped there, and which are free. Knows no model.

The books say at once what should be; the driver is told later, by whoever first needs it to be so:

    claim, share   a place gets a page in the books
    leave          a place gives its page up in the books; it stays mapped there, which is called stale
    make_real      wait until the device is done with the stale places in the way, unmap those, map

So a page that returns to a place where it is still mapped costs nothing, and taking memory from somebody
costs no call of the driver on the thread of the steps.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hearth.memory.pages import Mark, PageRun, Pages

Wipe = Callable[[torch.Tensor], None]

#: Places that are remapped together: one call of the driver does for all that follow each other, and whoever
#: needs another place has to wait so long.
MAX_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class _Remap:
    """Calls of the driver that make the books true for some places."""

    pages: dict[int, int]  #: to be mapped, by place, in their order
    stale: tuple[int, ...]  #: places to unmap before, in their order


class PageTable:
    """Mutable. `lock` is held for all methods but `make_real`, `wait_until_idle`, `check` and `close`."""

    def __init__(self, pages: Pages, wipe: Wipe | None = None) -> None:
        self._pages = pages
        self._wipe = wipe
        #: Guards the books, because loads call from their own threads. Held for no call of the driver, so
        #: that the thread of the steps never waits for one.
        self.lock = threading.Lock()
        #: Keeps calls of the driver in order, one remapping at a time; taken before `lock`.
        self._driver = threading.Lock()
        #: Pages that belong nowhere; the first to come free is given first, for the device is done with it.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(pages.num_pages))
        self._page_at: dict[int, int] = {}  #: what belongs at a place
        self._places: list[set[int]] = [set() for _ in range(pages.num_pages)]  #: the inverse
        self.shared: set[int] = set()  #: pages that belong at more than one place
        #: The page that is mapped at a place, and not about to be unmapped; written with both locks held.
        self._mapped: dict[int, int] = {}
        self._mapped_places: list[set[int]] = [set() for _ in range(pages.num_pages)]  #: the inverse
        #: By mapped place that was given up: what the device had queued then.
        self._left: dict[int, Mark] = {}

    @property
    def num_pages(self) -> int:
        return self._pages.num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def page_at(self, place: int) -> int:
        return self._page_at[place]

    def places_of(self, page: int) -> set[int]:
        """Return the places where a page belongs; not to be changed."""
        return self._places[page]

    def is_real(self, place: int) -> bool:
        """True if what belongs at a place is mapped there."""
        return self._mapped.get(place) == self._page_at[place]

    def is_only_there(self, place: int) -> bool:
        """True if what belongs at a place is mapped there, and nowhere else: `make_real` does nothing."""
        page = self._page_at[place]
        return self._mapped.get(place) == page and len(self._mapped_places[page]) == 1

    def claim(self, places: Sequence[int]) -> None:
        """Give each of these places a free page of its own: if it can be, the one still mapped there."""
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
        """Have a page that belongs elsewhere belong to this place as well."""
        assert place not in self._page_at, f"{place=:#x} has page {self._page_at[place]}"
        assert page not in self._free, f"{page=} is free"
        self._page_at[place] = page
        self._places[page].add(place)
        if len(self._places[page]) > 1:
            self.shared.add(page)

    def leave(self, places: Sequence[int], *, is_idle: bool = False) -> int:
        """Give up these places. Returns how many pages came free, for others had no part in them.

        Whoever gets them waits for what the device has queued now, unless that has nothing to do with them.
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
            self._left.update((place, mark) for place in places if place in self._mapped)
        return self.num_free - num_free

    def make_real(self, places: Iterable[int]) -> None:
        """Have what belongs at these places mapped there. Where nothing belongs any more, nothing is done."""
        wanted = sorted(places)
        for begin in range(0, len(wanted), MAX_AT_ONCE):
            while not self._try_make_real(wanted[begin : begin + MAX_AT_ONCE]):
                pass  # the books changed between waiting and mapping: others are as fast as we are

    def wait_until_idle(self, places: Sequence[int]) -> None:
        """Wait until the device is done with what was at places, also if the same pages are there again."""
        with self.lock:
            marks = self.marks_of(places)
        for mark in marks:
            mark.synchronize()

    def _try_make_real(self, places: Sequence[int]) -> bool:
        """Have the books be true for some places; False if they have changed meanwhile."""
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
                for (
                    stale,
                    page,
                ) in stale_pages.items():  # before the call, so that nobody takes them for mapped
                    self._mapped_places[page].remove(stale)
                    self._left.pop(stale, None)
            self._carry_out(remap, stale_pages)
        return True

    def marks_of(self, places: Sequence[int]) -> list[Mark]:
        """Return what to wait for before places are written. Those that were left together have one mark."""
        marks = {id(mark): mark for place in places if (mark := self._left.get(place)) is not None}
        return list(marks.values())

    def _carry_out(self, remap: _Remap, stale_pages: Mapping[int, int]) -> None:
        """Call the driver. What it refuses is not in the books, and what it has done before that is."""
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
            # A page in new hands is mapped nowhere else: a stray write of its last owner must not reach it.
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
        """Yield sorted places, those together that follow each other."""
        run: list[int] = []
        for place in places:
            if run and place != run[-1] + self._pages.page_bytes:
                yield run
                run = []
            run.append(place)
        if run:
            yield run

    def check(self) -> None:
        """Raise if a page is lost or in two states. Waits for a remapping under way."""
        with self._driver, self.lock:
            for page, places in enumerate(self._places):
                assert bool(places) != (page in self._free), f"{page=} {places=} is free and not, or neither"
                assert all(self._page_at[place] == page for place in places), f"{page=} {places=}"
                assert (page in self.shared) == (len(places) > 1), f"{page=} {places=}"
                mapped = self._mapped_places[page]
                assert all(self._mapped[place] == page for place in mapped), f"{page=} {mapped=}"
            assert len(self._page_at) == sum(map(len, self._places)), "a place has a page that denies it"
            assert len(self._mapped) == sum(map(len, self._mapped_places)), "a mapping that its page denies"
            assert self._left.keys() <= self._mapped.keys(), "a mark of a place where nothing is mapped"

    def close(self) -> None:
        """Unmap everything, once the device is done with it."""
        self._pages.mark().synchronize()
        with self._driver, self.lock:
            for mark in self._left.values():
                mark.synchronize()
            for place in self._mapped:
                self._pages.unmap(place)
            self._mapped.clear()
            self._left.clear()
