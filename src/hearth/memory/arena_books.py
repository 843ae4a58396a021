"""Which model has which regions of an arena. Moves the bytes along with the books."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Set

import torch

from hearth.core.types import ModelId
from hearth.memory.arena_tenant import ArenaTenant
from hearth.memory.contiguous import ContiguousMemory
from hearth.memory.placement import Packer, Placement, PlacementNeed, plan_placement
from hearth.memory.pool import EvictionTermsOf, Shape
from hearth.memory.regions import COMMON, Owner, RegionList, Span, Use
from hearth.models.layout import ByteRange
from hearth.policy.memory.packing import Move


class ArenaBooks:
    """Mutable; written only by the pool that owns it, by one thread."""

    def __init__(self, memory: ContiguousMemory, eviction_terms: EvictionTermsOf, packer: Packer) -> None:
        self._memory, self._eviction_terms, self._packer = memory, eviction_terms, packer
        self.regions = RegionList(len(memory.bytes))
        self.tenants: dict[ModelId, ArenaTenant] = {}  #: models with regions
        self.moved: set[ModelId] = set()  #: placed models whose tensors have moved since `take_moved`
        self.moved_bytes = 0
        #: Bytes that came free and are not returned to the system yet: their next owner may be about to be
        #: placed, and the system would zero the pages again, which takes longer than filling them.
        self.freed: list[ByteRange] = []

    @property
    def memory(self) -> torch.Tensor:
        return self._memory.bytes

    def tenant(self, model: ModelId, shape: Shape) -> ArenaTenant:
        """Return the tenant of a model; a new one replaces one with other bytes."""
        tenant = self.tenants.get(model)
        if tenant is None or tenant.is_other(shape):
            self.remove(model)
            tenant = self.tenants[model] = ArenaTenant(model, shape)
        tenant.shape = shape
        return tenant

    def regions_for(self, model: ModelId, shape: Shape) -> RegionList:
        """Return the regions without those that the model will lose because its bytes changed."""
        tenant = self.tenants.get(model)
        if tenant is None or not tenant.is_other(shape):
            return self.regions
        regions = self.regions.copy()
        for owner in _owned(regions, model):
            regions.give(owner)
        return regions

    def take(self, tenant: ArenaTenant, span: Span) -> None:
        if span.owner == COMMON and COMMON in self.regions:
            self.regions.give(COMMON)  # the new span begins at the same byte
        self.regions.take(span)
        match span.owner:
            case Owner(use=Use.TENSOR, index=index):
                tenant.loading.add(index)
            case Owner(use=Use.KV, index=sink):
                tenant.extents[sink] = range(sink, sink + 1)

    def movable(self, placed: ModelId | None = None) -> set[ModelId]:
        """Return the models whose tensors may move. `placed`: include it, nothing is written there yet."""
        return {
            model
            for model, tenant in self.tenants.items()
            if not tenant.loading and (model == placed or not self._eviction_terms(model).is_loading)
        }

    def plan(
        self, need: PlacementNeed, movable: Set[ModelId], regions: RegionList | None = None
    ) -> Placement | None:
        """`regions`: those of `regions_for` a model, if not all."""
        return plan_placement(regions or self.regions, need, movable, self._packer)

    def queued_now(self) -> torch.cuda.Event | None:
        """Return a mark behind the queued work; None on a CPU, which does everything at once."""
        if not self.memory.is_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it untyped
        event.record(torch.cuda.current_stream(self.memory.device))
        return event

    def give(self, owner: Owner, *, is_wanted: bool = False) -> None:
        """Free a region. `is_wanted`: it will be placed again soon, so the system does not get its pages."""
        span = self.regions.give(owner)
        self._note_freed(span.begin, span.end)
        if not is_wanted:
            self.give_back()

    def cut(self, kept: Span) -> None:
        """Free the end of a region, up to what is kept of it."""
        assert kept.owner is not None, f"{kept} has no owner"
        end = self.regions.give(kept.owner).end
        self.regions.take(kept)
        self._note_freed(kept.end, end)
        self.give_back()

    def move(self, moves: Iterable[Move]) -> None:
        for move in moves:
            owner = move.key
            assert isinstance(owner, Owner), f"{move} has no owner"
            self._memory.move(move.source, move.target, move.num_bytes)
            self.regions.give(owner)
            self.regions.take(Span(move.target, move.target + move.num_bytes, owner))
            self.moved_bytes += move.num_bytes
            if self.tenants[owner.model].extents:
                self.moved.add(owner.model)
            self._note_freed(move.source, move.source + move.num_bytes)

    def remove(self, model: ModelId) -> None:
        """Free all regions of a model. Ignores unknown models."""
        if model in self.tenants:
            for owner in _owned(self.regions, model):
                self.give(owner)
            del self.tenants[model]
            self.moved.discard(model)

    def forget_if_empty(self, model: ModelId) -> None:
        tenant = self.tenants[model]
        if not tenant.extents and not tenant.tensors(self.regions):
            del self.tenants[model]

    def take_workspaces(self, tenants: Collection[ArenaTenant]) -> None:
        """Take the workspaces of these models, except bytes that the other models need as well."""
        others = self.tenants.keys() - {tenant.model for tenant in tenants}
        kept_bytes = max((self.tenants[model].common_bytes(self.regions) for model in others), default=0)
        for tenant in tenants:
            if tenant.has_own_workspace(self.regions):
                self.give(tenant.own_workspace, is_wanted=True)
                tenant.has_workspace = False
            elif tenant.common_bytes(self.regions) > kept_bytes:
                tenant.has_workspace = False
        self.cut_common()

    def cut_common(self) -> None:
        if COMMON not in self.regions:
            return
        num_bytes, end = self._common_bytes(), self.regions.span_of(COMMON).end
        if num_bytes < end:
            self.regions.give(COMMON)
            if num_bytes:
                self.regions.take(Span(0, num_bytes, COMMON))
            self._note_freed(num_bytes, end)
            self.give_back()

    def check(self, piece_owners: Set[Owner]) -> None:
        self.regions.check()
        owners = set()
        for model, tenant in self.tenants.items():
            assert model == tenant.model, f"`{tenant.model}` is known as `{model}`"
            owners |= tenant.checked_owners(self.regions)
        common_bytes = self._common_bytes()
        if common_bytes:
            assert self.regions.span_of(COMMON) == Span(0, common_bytes, COMMON), f"{common_bytes=}"
            owners.add(COMMON)
        owners |= piece_owners
        assert owners == {span.owner for span in self.regions if span.owner}, "a region has no owner"
        assert all(self.tenants[model].extents for model in self.moved), f"{self.moved=}"

    def give_back(self) -> None:
        """Return the pages of freed bytes that are still free to the system."""
        freed, self.freed = self.freed, []
        for part in freed:
            for free in self.regions.free_within(part.begin, part.end):
                begin = max(part.begin - mmap.PAGESIZE, free.begin)
                self._memory.give_back(begin, min(part.end + mmap.PAGESIZE, free.end))

    def _note_freed(self, begin: int, end: int) -> None:
        self.freed.append(ByteRange(begin, end))
        for free in self.regions.free_within(begin, end):
            self._memory.freed(max(begin, free.begin), min(end, free.end))

    def _common_bytes(self) -> int:
        return max((tenant.common_bytes(self.regions) for tenant in self.tenants.values()), default=0)


def _owned(regions: RegionList, model: ModelId) -> list[Owner]:
    return [span.owner for span in regions if span.owner is not None and span.owner.model == model]
