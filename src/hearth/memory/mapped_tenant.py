"""One model in the mapped pool: its state, and at which places its pages belong. Changes no book of pages.

address       + 32/64 of the space   + 59/64   + 60/64     + 61/64   + 62/64
| weights ...  | KV ...               | tables   | penalties  | bias    | workspace ...
                                                   while requests need them

Every offset is a whole number of pages and the same for all models and in all processes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch

from hearth.core.errors import DeviceError
from hearth.core.types import ModelId, SamplingTable
from hearth.memory.pages import Pages
from hearth.memory.pool import Gap, Shape, Space
from hearth.models.layout import ByteRange
from hearth.policy.memory.kv_range import KvRange


@dataclass(slots=True)
class MappedTenant:
    """One model in a mapped pool. Mutable; written only by the pool."""

    model: ModelId
    shape: Shape
    address: int  #: of its space
    space_bytes: int
    page_bytes: int
    weights: torch.Tensor
    #: Pages of the weights by index: filled, or being filled by a load. No index is in both.
    there: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)
    is_placed: bool = False  #: has a workspace, tables and at least the pages of the sink
    num_kv_pages: int = 0  #: beneath the blocks that were given, the sink's included
    num_kv_blocks: int = 0  #: that were given, the sink included
    num_ready_pages: int = 0  #: behind those, for what will be given next
    #: Tables of its sampler that it has. None unless the model is placed.
    num_table_pages: dict[SamplingTable, int] = field(default_factory=dict)
    #: Pages of weights that it got from another model, by index; some of them may have no mapping yet.
    borrowed: set[int] = field(default_factory=set)
    #: Its memory as it was told when it was placed last; that of a shape never changes.
    space: Space | None = None

    @property
    def kv(self) -> KvRange:
        return KvRange(self.shape.block_bytes, self.page_bytes, self.shape.max_blocks)

    @property
    def num_weights_pages(self) -> int:
        return num_pages(self.shape.stored.num_bytes, self.page_bytes)

    @property
    def resident_bytes(self) -> int:
        """Stored bytes of the weights that have pages; the last page counts as full unless all are there."""
        num_pages_had = len(self.there) + len(self.coming)
        return min(num_pages_had * self.page_bytes, self.shape.stored.num_bytes)

    @property
    def num_workspace_pages(self) -> int:
        return num_pages(self.shape.workspace_bytes, self.page_bytes)

    @property
    def num_tables_pages(self) -> int:
        """Pages of the tables that its engine always has."""
        return num_pages(self.shape.tables_bytes, self.page_bytes)

    @property
    def kv_address(self) -> int:
        return self.address + self.space_bytes // 2

    @property
    def tables_address(self) -> int:
        return self.address + self.space_bytes // 64 * 59

    @property
    def workspace_address(self) -> int:
        return self.address + self.space_bytes // 32 * 31

    def table_address(self, table: SamplingTable) -> int:
        return self.address + self.space_bytes // 64 * (60 + list(SamplingTable).index(table))

    def is_of(self, shape: Shape) -> bool:
        """True if what is there is of use for a model of such a shape, and at its place."""
        return (self.shape.digest, self.shape.slot) == (shape.digest, shape.slot)

    def has(self, place: int) -> bool:
        return self.address <= place < self.address + self.space_bytes

    def weights_places(self, indices: Iterable[int]) -> list[int]:
        return [self.address + index * self.page_bytes for index in indices]

    def weights_index(self, place: int) -> int:
        """Return which page of the weights belongs at a place; if none does, an index that there is not."""
        return (place - self.address) // self.page_bytes

    def kv_places(self, indices: Iterable[int]) -> list[int]:
        return [self.kv_address + index * self.page_bytes for index in indices]

    def workspace_places(self, indices: Iterable[int]) -> list[int]:
        return [self.workspace_address + index * self.page_bytes for index in indices]

    def tables_places(self) -> list[int]:
        begin = self.tables_address
        return [begin + index * self.page_bytes for index in range(self.num_tables_pages)]

    def table_places(self, table: SamplingTable, indices: Iterable[int]) -> list[int]:
        return [self.table_address(table) + index * self.page_bytes for index in indices]

    def rest_places(self) -> list[int]:
        """Return the places of workspace, tables and sink; none unless the model is placed."""
        if not self.is_placed:
            return []
        return [
            *self.workspace_places(range(self.num_workspace_pages)),
            *self.tables_places(),
            *self.kv_places(range(self.kv.sink_pages)),
        ]

    def all_places(self) -> list[int]:
        """Return the places where pages belong now."""
        num_workspace_pages = self.num_workspace_pages if self.is_placed else 0
        return [
            *self.weights_places(sorted(self.there | self.coming)),
            *self.kv_places(range(self.num_kv_pages + self.num_ready_pages)),
            *self.workspace_places(range(num_workspace_pages)),
            *(self.tables_places() if self.is_placed else ()),
            *(
                place
                for table, num_pages in self.num_table_pages.items()
                for place in self.table_places(table, range(num_pages))
            ),
        ]

    @property
    def last_stored_bytes(self) -> int:
        """Bytes of the weights on their last page; all others are full."""
        return self.shape.stored.num_bytes - (self.num_weights_pages - 1) * self.page_bytes

    def stored_bytes(self, indices: Collection[int]) -> int:
        """Return the bytes of the weights on the pages of these indices."""
        lost_bytes = self.page_bytes - self.last_stored_bytes
        has_last = self.num_weights_pages - 1 in indices
        return len(indices) * self.page_bytes - (lost_bytes if has_last else 0)

    def gaps(self) -> tuple[Gap, ...]:
        """Return the runs of pages that are coming, as parts of the file."""
        parts = map(self.part, runs_of(sorted(self.coming)))
        return tuple(Gap(part, self.weights[part.begin : part.end]) for part in parts)

    def part(self, run: range) -> ByteRange:
        """Return the part of the file that lies on a run of pages."""
        begin, end = run.start * self.page_bytes, run.stop * self.page_bytes
        return ByteRange(begin, min(end, self.shape.stored.num_bytes))


def runs_of(indices: Iterable[int]) -> list[range]:
    """Return sorted indices as ranges, those together that follow each other."""
    runs: list[range] = []
    for index in indices:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs


def num_pages(num_bytes: int, page_bytes: int) -> int:
    return -(-num_bytes // page_bytes)


def check_fits(model: ModelId, shape: Shape, pages: Pages) -> None:
    """Raise DeviceError where a part of a model is larger than the addresses that are kept for it."""
    assert shape.served == shape.stored, f"`{model}` is widened, which mapped pages cannot do"
    assert shape.max_blocks > 0, f"`{model}` has no block that could be the sink"
    parts = {
        "weights": (shape.stored.num_bytes, pages.space_bytes // 2),
        "KV": (shape.max_blocks * shape.block_bytes, pages.space_bytes // 64 * 27),
        "tables": (shape.tables_bytes, pages.space_bytes // 64),
        "workspace": (shape.workspace_bytes, pages.space_bytes // 32),
    }
    for name, (num_bytes, most_bytes) in parts.items():
        if num_bytes > most_bytes:
            raise DeviceError(
                f"the {name} of `{model}` could take {num_bytes} bytes, {most_bytes} are the most that a "
                "mapped space has addresses for; lower the model's context or its memory ceiling"
            )
