"""One model in an arena: the regions that it has and those that it needs. Changes no regions."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import torch

from hearth.core.types import ModelId, SamplingTable
from hearth.memory.placement import PlacementNeed, extent_span
from hearth.memory.pool import Gap, Holding, Shape, Space
from hearth.memory.regions import COMMON, Owner, RegionList, Use, aligned, blocks_within
from hearth.models.layout import ByteRange
from hearth.models.weights import TensorPlace
from hearth.policy.memory.packing import Item

#: KV grows by about this many blocks, and extents end at multiples of it. KV is taken back by extents: the
#: smaller they are, the fewer requests are in the way.
BATCH_BLOCKS = 8


@dataclass(slots=True)
class ArenaTenant:
    """Mutable; written only by the pool. The regions say which tensors it has."""

    model: ModelId
    shape: Shape
    #: Tensors that have a region but not yet their bytes.
    loading: set[int] = field(default_factory=set)
    #: By first block; the first entry is the sink. Empty unless the model is placed.
    extents: dict[int, range] = field(default_factory=dict)
    #: False: the model must get a workspace before it computes, the common one or its own.
    has_workspace: bool = False
    _held: tuple[int, Holding] | None = None
    #: Version of the regions and movable models with which `grow` last found no place for a block.
    failed_growth: tuple[int, Set[ModelId]] | None = None
    #: On CUDA: a mark behind the work queued when it was placed, which may still read or move its regions.
    queued: torch.cuda.Event | None = None

    @property
    def num_blocks(self) -> int:
        return sum(len(extent) for extent in self.extents.values())

    @property
    def own_workspace(self) -> Owner:
        """Owner of its own workspace, for where the common one could not grow far enough."""
        return Owner(self.model, Use.WORKSPACE, 0)

    def has_own_workspace(self, regions: RegionList) -> bool:
        return self.own_workspace in regions

    def table_owner(self, table: SamplingTable) -> Owner:
        return Owner(self.model, Use.TABLE, 1 + list(SamplingTable).index(table))

    def tables(self, regions: RegionList) -> list[Owner]:
        owners = (tables_owner(self.model), *map(self.table_owner, SamplingTable))
        return [owner for owner in owners if owner in regions]

    def common_bytes(self, regions: RegionList) -> int:
        uses_common = self.has_workspace and not self.has_own_workspace(regions)
        return aligned(self.shape.workspace_bytes) if uses_common else 0

    def is_other(self, shape: Shape) -> bool:
        return (self.shape.digest, self.shape.served) != (shape.digest, shape.served)

    def tensors(self, regions: RegionList) -> list[Owner]:
        return [owner for owner in tensor_owners(self.model, self.shape) if owner in regions]

    def free_blocks(self, regions: RegionList, num_least: int, num_wanted: int, max_blocks: int) -> range:
        """Return about `num_wanted` blocks of the highest free region that has at least `num_least`.

        They begin where extents do, unless the model would have more than `max_blocks`.
        """
        for span in reversed(regions.free_spans()):
            blocks = blocks_within(span.begin, span.end, self.shape.block_bytes)
            if len(blocks) >= num_least:
                first = max(blocks.stop - num_wanted, 0) // BATCH_BLOCKS * BATCH_BLOCKS
                num_most = max_blocks - self.num_blocks
                return range(max(first, blocks.start, blocks.stop - num_most), blocks.stop)
        return range(0)

    def holding(self, regions: RegionList) -> Holding:
        num_changes = regions.num_changes[self.model]
        if self._held is None or self._held[0] != num_changes:
            self._held = num_changes, self._holding(regions)
        return self._held[1]

    def _holding(self, regions: RegionList) -> Holding:
        tensors = self.tensors(regions)
        return Holding(
            model=self.model,
            weights_bytes=sum(regions.span_of(owner).num_bytes for owner in tensors),
            total_bytes=self.shape.served.own_bytes,
            stored_bytes=sum(aligned(self.shape.stored.tensors[owner.index].nbytes) for owner in tensors),
            shared_bytes=0,
            kv_bytes=self.num_blocks * self.shape.block_bytes,
            tables_bytes=sum(regions.span_of(owner).num_bytes for owner in self.tables(regions)),
        )

    def checked_owners(self, regions: RegionList) -> set[Owner]:
        """Return all owners of its regions. Raises if one has the wrong size."""
        tensors = self.tensors(regions)
        assert self.extents or tensors, f"`{self.model}` has no region and is still known"
        for owner in tensors:
            spec, span = self.shape.served.tensors[owner.index], regions.span_of(owner)
            assert span.num_bytes == aligned(spec.nbytes), f"{span} is not the size of {spec}"
        assert self.loading <= {owner.index for owner in tensors}, (
            f"loading without a region: {self.loading=}"
        )
        owners = set(tensors)
        for first, extent in self.extents.items():
            span = extent_span(self.model, extent, self.shape.block_bytes)
            owner = Owner(self.model, Use.KV, first)
            assert regions.span_of(owner) == span, f"{regions.span_of(owner)} is not that of {extent}"
            owners.add(owner)
        assert self.num_blocks <= self.shape.max_blocks, f"`{self.model}` has {self.num_blocks} blocks"
        if self.has_own_workspace(regions):
            assert self.has_workspace, f"`{self.model}` does not know its workspace"
            owners.add(self.own_workspace)
        assert self.extents or not self.has_workspace, f"`{self.model}` has a workspace and is not placed"
        tables = self.tables(regions)
        assert self.extents or not tables, f"`{self.model}` has tables and is not placed: {tables}"
        return owners | set(tables)


def tables_owner(model: ModelId) -> Owner:
    return Owner(model, Use.TABLE, 0)


def tensor_owners(model: ModelId, shape: Shape) -> list[Owner]:
    return [Owner(model, Use.TENSOR, index) for index in range(len(shape.served.tensors))]


def places_of(tenant: ArenaTenant, regions: RegionList, memory: torch.Tensor) -> dict[str, TensorPlace]:
    specs = zip(tenant.shape.served.tensors, tensor_owners(tenant.model, tenant.shape), strict=True)
    return {spec.name: TensorPlace(memory, regions.span_of(owner).begin) for spec, owner in specs}


def space_of(tenant: ArenaTenant, regions: RegionList, memory: torch.Tensor) -> Space:
    shape, places = tenant.shape, places_of(tenant, regions, memory)
    gaps = []
    for index in sorted(tenant.loading):
        stored, served = shape.stored.tensors[index], shape.served.tensors[index]
        # At the end of its place: from there it can be widened towards the front.
        end = places[served.name].offset + served.nbytes
        part = ByteRange(stored.offset, stored.offset + stored.nbytes)
        gaps.append(Gap(part, memory[end - stored.nbytes : end]))
    begin = regions.span_of(tenant.own_workspace).begin if tenant.has_own_workspace(regions) else 0
    workspace = memory[begin : begin + shape.workspace_bytes]
    begin = regions.span_of(tables_owner(tenant.model)).begin if shape.tables_bytes else 0
    tables = memory[begin : begin + shape.tables_bytes]
    kv = memory[: len(memory) // shape.block_bytes * shape.block_bytes]
    sink, parts = next(iter(tenant.extents)), tuple(gap.part for gap in gaps)
    return Space(places, workspace, tables, kv, sink, tuple(gaps), parts)


def need_of(model: ModelId, shape: Shape, tenant: ArenaTenant | None, regions: RegionList) -> PlacementNeed:
    """Return what a model needs to be placed. `regions`: without those of a tenant with other bytes."""
    owners = zip(tensor_owners(model, shape), shape.served.tensors, strict=True)
    tensors = tuple(Item(owner, aligned(spec.nbytes)) for owner, spec in owners if owner not in regions)
    common_bytes = regions.span_of(COMMON).num_bytes if COMMON in regions else 0
    if tenant is None or tenant.is_other(shape) or not tenant.extents:
        tables = (Item(tables_owner(model), aligned(shape.tables_bytes)),) if shape.tables_bytes else ()
        return PlacementNeed(
            model, tensors, shape.workspace_bytes, 1, shape.block_bytes, common_bytes, tables
        )
    had, wanted = ((one.workspace_bytes, one.tables_bytes, one.block_bytes) for one in (tenant.shape, shape))
    assert had == wanted, f"retire `{model}` first: {had=} {shape=}"
    workspace_bytes = 0 if tenant.has_workspace else shape.workspace_bytes
    return PlacementNeed(model, tensors, workspace_bytes, 0, shape.block_bytes, common_bytes)
