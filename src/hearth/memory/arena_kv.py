"""KV blocks and sampler tables of the models in an arena."""

from __future__ import annotations

from collections.abc import Set

import torch

from hearth.core.types import ModelId, SamplingTable
from hearth.memory.arena_books import ArenaBooks
from hearth.memory.arena_tenant import BATCH_BLOCKS, ArenaTenant
from hearth.memory.placement import PlacementNeed, extent_span
from hearth.memory.regions import Owner, Use, aligned, extents_of
from hearth.policy.memory.packing import Item

#: Moved for KV, unless there is no other way: some hundredths of a second on a CPU.
MAX_MOVED_BYTES = 256 << 20


class ArenaKv:
    def __init__(self, books: ArenaBooks) -> None:
        self._books = books

    def grow(
        self, model: ModelId, num_blocks: int, ahead_blocks: int = 0, max_blocks: int | None = None
    ) -> list[range]:
        tenant = self._books.tenants[model]
        assert tenant.extents, f"`{model}` is not placed"
        grown: list[range] = []
        max_blocks = (
            tenant.shape.max_blocks if max_blocks is None else min(max_blocks, tenant.shape.max_blocks)
        )
        num_left = min(num_blocks, max_blocks - tenant.num_blocks)
        while num_left > 0 and (blocks := self._more_blocks(tenant, num_left, max_blocks)):
            for extent in extents_of(blocks, tenant.shape.block_bytes, BATCH_BLOCKS):
                self._books.regions.take(extent_span(model, extent, tenant.shape.block_bytes))
                tenant.extents[extent.start] = extent
                grown.append(extent)
            num_left -= len(blocks)
        self._books.give_back()
        return grown

    def growth_bytes(self, model: ModelId, num_blocks: int) -> int:
        return num_blocks * self._books.tenants[model].shape.block_bytes

    def shrink(self, model: ModelId, extent: range) -> None:
        tenant = self._books.tenants[model]
        sink = next(iter(tenant.extents))
        assert extent.start != sink, f"`{model}` cannot give back its sink: {extent}"
        whole = next((one for one in tenant.extents.values() if one.stop == extent.stop), None)
        assert whole is not None, f"`{model}` gives back {extent}, but has {tenant.extents}"
        assert whole.start <= extent.start, f"`{model}` gives back {extent}, but has {whole}"
        if kept := range(whole.start, extent.start):
            tenant.extents[whole.start] = kept
            self._books.cut(extent_span(model, kept, tenant.shape.block_bytes))
        else:
            del tenant.extents[whole.start]
            self._books.give(Owner(model, Use.KV, whole.start))

    def extents(self, model: ModelId) -> list[range]:
        """Return the lowest extents first: tensors lie below them."""
        extents = self._books.tenants[model].extents
        sink = next(iter(extents), None)
        return [extents[first] for first in sorted(extents) if first != sink]

    def _more_blocks(self, tenant: ArenaTenant, num_blocks: int, max_blocks: int) -> range:
        """Return about `num_blocks` free blocks, up to where extents end; fewer if memory is short."""
        movable = self._books.movable()
        if tenant.failed_growth == (self._books.regions.version, movable):
            return range(0)
        for max_bytes in (MAX_MOVED_BYTES, self._books.regions.num_bytes):
            num_least = min(num_blocks, BATCH_BLOCKS)
            while num_least:
                blocks = tenant.free_blocks(self._books.regions, num_least, num_blocks, max_blocks)
                if blocks := blocks or self._cleared_blocks(tenant, num_least, movable, max_bytes):
                    return blocks
                num_least //= 2
        tenant.failed_growth = self._books.regions.version, movable
        return range(0)

    def _cleared_blocks(
        self, tenant: ArenaTenant, num_blocks: int, movable: Set[ModelId], max_bytes: int
    ) -> range:
        need = PlacementNeed(tenant.model, (), 0, num_blocks, tenant.shape.block_bytes)
        placement = self._books.plan(need, movable)
        if placement is None or sum(move.num_bytes for move in placement.moves) > max_bytes:
            return range(0)
        self._books.move(placement.moves)
        (owner,) = (span.owner for span in placement.spans)
        assert owner is not None, f"{placement} has no owner"
        return range(owner.index, owner.index + num_blocks)


class ArenaTables:
    def __init__(self, books: ArenaBooks) -> None:
        self._books = books

    def place(self, model: ModelId, table: SamplingTable, num_bytes: int) -> torch.Tensor | None:
        books, tenant = self._books, self._books.tenants[model]
        assert tenant.extents, f"`{model}` is not placed"
        item = Item(tenant.table_owner(table), aligned(num_bytes))
        need = PlacementNeed(model, (), 0, 0, tenant.shape.block_bytes, tables=(item,))
        placement = books.plan(need, books.movable())
        if placement is None:
            return None
        books.move(placement.moves)
        (span,) = placement.spans
        books.take(tenant, span)
        books.give_back()
        return books.memory[span.begin : span.begin + num_bytes]

    def drop(self, model: ModelId, table: SamplingTable) -> None:
        self._books.give(self._books.tenants[model].table_owner(table))
