"""Physical pages of a device and the addresses they can be mapped at. Does not know their owners.

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
    """A point in the work queue of a device."""

    def synchronize(self) -> None: ...

    def has_passed(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PageRun:
    """Adjacent places, and the pages to map there; none: they are unmapped."""

    address: int
    num_pages: int
    pages: tuple[int, ...] = ()


class Pages(Protocol):
    """Any thread may call any method; the caller orders calls for the same address."""

    @property
    def num_pages(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def base_address(self) -> int:
        """Address of the first space of a model."""

    @property
    def space_bytes(self) -> int:
        """Distance from one space to the next: a multiple of 64 pages."""

    @property
    def num_spaces(self) -> int:
        """Number of spaces with fixed addresses; the space before the first one is that of libraries."""

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Count by name."""

    def reserve(self, wanted: int | None) -> int:
        """Reserve `space_bytes` of addresses, elsewhere if `wanted` is taken."""

    def free(self, address: int) -> None:
        """Release a space in which nothing is mapped."""

    def map(self, address: int, *pages: int) -> None:
        """Map pages at adjacent places. Nothing may be mapped there."""

    def unmap(self, address: int, num_pages: int = 1) -> None:
        """Unmap pages that the device is done with."""

    def remap(self, runs: Sequence[PageRun]) -> Iterator[PageRun]:
        """Unmap and map runs in order; yield each that was done.

        Raises:
            DeviceError: a run was refused and is unchanged; the rest is not tried.
        """

    def mark(self) -> Mark:
        """Return a mark behind the work queued on the calling thread's current stream."""

    def bytes_at(self, address: int, num_bytes: int) -> torch.Tensor:
        """Return a uint8 view of addresses, which may be unmapped."""

    def close(self) -> None:
        """Release all pages. Nothing may be mapped."""


def remap_each(pages: Pages, runs: Sequence[PageRun]) -> Iterator[PageRun]:
    for run in runs:
        if run.pages:
            pages.map(run.address, *run.pages)
        else:
            pages.unmap(run.address, run.num_pages)
        yield run
