"""One model in the mapped pool: which pages it has. Changes no books of pages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from hearth.core.errors import DeviceError
from hearth.core.types import ModelId, SamplingTable
from hearth.memory.pages import Pages
from hearth.memory.pool import Gap, Shape, Space
from hearth.memory.spaces import SpaceAddresses
from hearth.models.layout import ByteRange, Layout
from hearth.policy.memory.kv_range import KvRange


@dataclass(slots=True)
class MappedTenant:
    """Mutable; written only by the pool."""

    model: ModelId
    shape: Shape
    at: SpaceAddresses
    weights: torch.Tensor
    wanted: Sequence[int]  #: pages of the weights that it needs, by index, ascending; a range if it can be
    #: Pages of the weights by index, loaded and being loaded. Disjoint.
    resident: set[int] = field(default_factory=set)
    loading: set[int] = field(default_factory=set)
    is_placed: bool = False  #: has a workspace, tables and at least the pages of the sink
    num_kv_pages: int = 0  #: beneath the blocks that were given, the sink included
    num_kv_blocks: int = 0  #: that were given, the sink included
    num_ready_pages: int = 0  #: behind those, mapped ahead for the next blocks
    #: Pages of the sampler tables that it has. Empty unless the model is placed.
    num_table_pages: dict[SamplingTable, int] = field(default_factory=dict)
    #: Pages of the weights that it shares with another model, by index; some may not be mapped yet.
    borrowed: set[int] = field(default_factory=set)
    space: Space | None = None  #: as last returned; the same as long as the shape is

    @property
    def page_bytes(self) -> int:
        return self.at.page_bytes

    @property
    def kv(self) -> KvRange:
        return KvRange(self.shape.block_bytes, self.page_bytes, self.shape.max_blocks)

    @property
    def last_extent(self) -> range | None:
        """The extent that can be taken back next; None: only the sink is left, or nothing."""
        num_left = self.kv.one_less(self.num_kv_pages) if self.is_placed else None
        return None if num_left is None else range(self.kv.num_blocks(num_left), self.num_kv_blocks)

    @property
    def resident_bytes(self) -> int:
        """Stored bytes of the weights that have pages; the last page counts as full unless all are there."""
        num_pages_had = len(self.resident) + len(self.loading)
        return min(num_pages_had * self.page_bytes, self.stored_bytes(self.wanted))

    @property
    def last_page(self) -> int:
        """The last page of the whole model."""
        return num_pages(self.shape.stored.num_bytes, self.page_bytes) - 1

    @property
    def last_stored_bytes(self) -> int:
        return self.shape.stored.num_bytes - self.last_page * self.page_bytes

    def is_of(self, shape: Shape) -> bool:
        return (self.shape.digest, self.shape.slot) == (shape.digest, shape.slot)

    def workspace_places(self) -> list[int]:
        return self.at.workspace(range(num_pages(self.shape.workspace_bytes, self.page_bytes)))

    def tables_places(self) -> list[int]:
        return self.at.tables(range(num_pages(self.shape.tables_bytes, self.page_bytes)))

    def rest_places(self) -> list[int]:
        if not self.is_placed:
            return []
        sink = self.at.kv(range(self.kv.sink_pages))
        return [*self.workspace_places(), *self.tables_places(), *sink]

    def all_places(self) -> list[int]:
        places = self.at.weights(sorted(self.resident | self.loading))
        if self.is_placed:
            places += self.at.kv(range(self.num_kv_pages + self.num_ready_pages))
            places += [*self.workspace_places(), *self.tables_places()]
            for table, num_table_pages in self.num_table_pages.items():
                places += self.at.table(table, range(num_table_pages))
        return places

    def stored_bytes(self, indices: Collection[int]) -> int:
        lost_bytes = self.page_bytes - self.last_stored_bytes
        has_last = self.last_page in indices
        return len(indices) * self.page_bytes - (lost_bytes if has_last else 0)

    def gaps(self) -> tuple[Gap, ...]:
        parts = map(self.part, runs_of(sorted(self.loading)))
        return tuple(Gap(part, self.weights[part.begin : part.end]) for part in parts)

    def part(self, run: range) -> ByteRange:
        begin, end = run.start * self.page_bytes, run.stop * self.page_bytes
        return ByteRange(begin, min(end, self.shape.stored.num_bytes))


def runs_of(indices: Iterable[int]) -> list[range]:
    runs: list[range] = []
    for index in indices:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs


def pages_of(layout: Layout, page_bytes: int) -> Sequence[int]:
    """Return the pages that hold tensors of the layout, ascending; a range if nothing lies between."""
    if not layout.is_part:
        return range(num_pages(layout.num_bytes, page_bytes))
    spans = (range(spec.offset // page_bytes, num_pages(spec.end, page_bytes)) for spec in layout.tensors)
    pages = sorted(set(chain.from_iterable(spans)))
    runs = runs_of(pages)
    return runs[0] if len(runs) == 1 else pages


def num_pages(num_bytes: int, page_bytes: int) -> int:
    return -(-num_bytes // page_bytes)


def check_fits(model: ModelId, shape: Shape, pages: Pages) -> None:
    assert shape.served == shape.stored, f"`{model}` is widened, which mapped pages cannot do"
    assert shape.max_blocks > 0, f"`{model}` has no block that could be the sink"
    parts = {
        "weights": (shape.stored.num_bytes, pages.space_bytes // 2),
        "KV": (shape.max_blocks * shape.block_bytes, pages.space_bytes // 64 * 27),
        "tables": (shape.tables_bytes, pages.space_bytes // 64),
        "workspace": (shape.workspace_bytes, pages.space_bytes // 32),
    }
    for name, (num_bytes, max_bytes) in parts.items():
        if num_bytes > max_bytes:
            raise DeviceError(
                f"the {name} of `{model}` could take {num_bytes} bytes, limit of its addresses: {max_bytes}; "
                "lower the model's context or its memory ceiling"
            )
