"""Physical pages of a device and the addresses they can be mapped at. Does not know who has a page.

spaces   | base_address + 0 * space_bytes | + 1 * space_bytes | ...     reserved, most of it unmapped; before
                                                                        those of models that of libraries
              ^         ^        ^
pages    | 0 | 1 | 2 | 3 | ... | num_pages - 1 |                        created at start and kept; each may
                                                                        be mapped at several addresses
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in the work that is queued on a device."""

    def synchronize(self) -> None:
        """Return when all work before it is done."""

    def has_passed(self) -> bool:
        """True if all work before it is done."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """Places that follow each other, and the pages to be mapped there; without any they are unmapped."""

    address: int
    num_pages: int
    pages: tuple[int, ...] = ()


class Pages(Protocol):
    """Any thread may call any method; what happens to one address is put in order by the caller."""

    @property
    def num_pages(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def base_address(self) -> int:
        """Address at which the first space of a model is wanted."""

    @property
    def space_bytes(self) -> int:
        """Distance of one space from the next: a multiple of 64 pages."""

    @property
    def num_spaces(self) -> int:
        """Spaces that models may have, by their slots; one before them is that of libraries."""

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Counts of what had to be done otherwise than wished, by name."""

    def reserve(self, wanted: int | None) -> int:
        """Reserve `space_bytes` of addresses; another address than `wanted` where that is not to be had."""

    def free(self, address: int) -> None:
        """Give back a space in which nothing is mapped."""

    def map(self, address: int, *pages: int) -> None:
        """Map pages one behind the other. Nothing may be mapped there."""

    def unmap(self, address: int, num_pages: int = 1) -> None:
        """Unmap pages that the device is done with."""

    def remap(self, runs: Sequence[PageRun]) -> Iterator[PageRun]:
        """Unmap and map runs in their order, as `unmap` and `map` do, and yield each that was.

        Raises:
            DeviceError: one was refused, which is as it was before; the rest is not tried.
        """

    def mark(self) -> Mark:
        """Return a mark behind what is queued now on the calling thread's current stream."""

    def bytes_at(self, address: int, num_bytes: int) -> torch.Tensor:
        """A uint8 view of addresses, mapped or not. What is not must not be touched."""

    def close(self) -> None:
        """Release all pages. Nothing may be mapped."""


def remap_each(pages: Pages, runs: Sequence[PageRun]) -> Iterator[PageRun]:
    """Do what `Pages.remap` does by a call for each run."""
    for run in runs:
        if run.pages:
            pages.map(run.address, *run.pages)
        else:
            pages.unmap(run.address, run.num_pages)
        yield run
