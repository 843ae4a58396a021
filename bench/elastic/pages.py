"""Pages that count how often they are mapped, and whether a step had to wait for it. Maps nothing itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hearth.memory.pages import Mark, PageRun, Pages


@dataclass(frozen=True, slots=True)
class Maps:
    """How often the driver was called so far."""

    num_maps: int = 0
    num_unmaps: int = 0
    num_awaited: int = 0  #: of the maps, those that the thread of the steps made, and so waited for

    def __add__(self, other: Maps) -> Maps:
        return Maps(
            self.num_maps + other.num_maps,
            self.num_unmaps + other.num_unmaps,
            self.num_awaited + other.num_awaited,
        )

    def __sub__(self, other: Maps) -> Maps:
        return Maps(
            self.num_maps - other.num_maps,
            self.num_unmaps - other.num_unmaps,
            self.num_awaited - other.num_awaited,
        )


class CountedPages:
    """`Pages` that hand everything on. The thread that makes it is the one that steps."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._thread = threading.get_ident()
        self._lock = threading.Lock()  #: steps, loads and mapping ahead have threads of their own
        self._maps = Maps()

    @property
    def maps(self) -> Maps:
        with self._lock:
            return self._maps

    @property
    def num_pages(self) -> int:
        return self._pages.num_pages

    @property
    def page_bytes(self) -> int:
        return self._pages.page_bytes

    @property
    def base_address(self) -> int:
        return self._pages.base_address

    @property
    def space_bytes(self) -> int:
        return self._pages.space_bytes

    @property
    def num_spaces(self) -> int:
        return self._pages.num_spaces

    @property
    def fallbacks(self) -> Mapping[str, int]:
        return self._pages.fallbacks

    def reserve(self, wanted: int | None) -> int:
        return self._pages.reserve(wanted)

    def free(self, address: int) -> None:
        self._pages.free(address)

    def map(self, address: int, *pages: int) -> None:
        self._pages.map(address, *pages)
        self._count_mapped(len(pages))

    def unmap(self, address: int, num_pages: int = 1) -> None:
        self._pages.unmap(address, num_pages)
        self._count(Maps(num_unmaps=num_pages))

    def remap(self, runs: Sequence[PageRun]) -> Iterator[PageRun]:
        for run in self._pages.remap(runs):
            if run.pages:
                self._count_mapped(run.num_pages)
            else:
                self._count(Maps(num_unmaps=run.num_pages))
            yield run

    def mark(self) -> Mark:
        return self._pages.mark()

    def bytes_at(self, address: int, num_bytes: int) -> torch.Tensor:
        return self._pages.bytes_at(address, num_bytes)

    def close(self) -> None:
        self._pages.close()

    def _count_mapped(self, num_pages: int) -> None:
        is_awaited = threading.get_ident() == self._thread
        self._count(Maps(num_maps=num_pages, num_awaited=num_pages if is_awaited else 0))

    def _count(self, more: Maps) -> None:
        with self._lock:
            self._maps += more
