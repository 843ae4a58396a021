"""The pool of devices without mapped pages: one contiguous memory, as Tangram has it. Reads no weights.

The unit of residency is a fused tensor: it is there as a whole or not at all, and tensors of two models are
never shared, equal as they may be. When free memory lies in pieces that are too small, tensors move (T3) and
whoever computes with them binds them anew. What never moves lies at the ends: the workspace, which all models
have in common, and KV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import torch

from hearth.errors import DeviceError
from hearth.memory.arena_tenant import BATCH_BLOCKS, ArenaTenant, places_of, space_of, wish_of
from hearth.memory.contiguous import ContiguousMemory
from hearth.memory.placement import Packer, Wish, extent_span, plan_placement
from hearth.memory.pool import EvictionTermsOf, Picture, Shape, Space
from hearth.memory.regions import COMMON, Owner, RegionList, Span, Use, extents_of
from hearth.models.layout import ALIGNMENT_BYTES, ByteRange
from hearth.models.weights import TensorPlace
from hearth.policy.memory.eviction import Tail, plan_takes
from hearth.policy.memory.packing import Move, pack
from hearth.types import Hold, ModelId

#: For KV, unless there is no other way: some hundredths of a second on a CPU.
MAX_MOVED_BYTES = 256 << 20


class ArenaPool:
    """A `Pool`. Mutable; all but `prepare` is called by one thread, between two steps."""

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int,
        regards: EvictionTermsOf,
        *,
        packer: Packer = pack,
        fallbacks: Mapping[str, int] | None = None,
        wipe: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """`fallbacks`: what led to an arena being used. `wipe` is called with all bytes that come free.

        Raises:
            DeviceError: the device does not have the budget.
        """
        num_bytes = budget_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if num_bytes <= 0:
            raise DeviceError(
                f"a pool needs at least {ALIGNMENT_BYTES} bytes, given: {budget_bytes}; "
                "raise `service.memory_bytes`"
            )
        self._budget_bytes, self._regards = budget_bytes, regards
        self._packer, self._fallbacks = packer, dict(fallbacks or {})
        self._memory = ContiguousMemory(device, num_bytes, wipe)
        self._regions = RegionList(num_bytes)
        #: Models that have anything here.
        self._tenants: dict[ModelId, ArenaTenant] = {}
        self._moved: set[ModelId] = set()
        self._moved_bytes = 0

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    @property
    def keeps_addresses(self) -> bool:
        return False

    def lacks(self, model: ModelId, shape: Shape) -> int:
        tenant = self._tenants.get(model)
        regions = self._regions_for(model, shape)
        wish = wish_of(model, shape, tenant, regions)
        if not wish.least_bytes:
            return 0
        if wish.least_bytes > regions.free_bytes:
            return wish.least_bytes - regions.free_bytes
        if plan_placement(regions, wish, self._movable(model), self._packer):
            return 0
        return wish.step_bytes

    def place(self, model: ModelId, shape: Shape) -> Space:
        tenant = self._tenants.get(model)
        assert tenant is None or not tenant.landing, f"`{model}` is still being loaded: {tenant}"
        regions = self._regions_for(model, shape)
        wish = wish_of(model, shape, tenant, regions)
        placement = plan_placement(regions, wish, self._movable(model), self._packer)
        if placement is None:
            raise DeviceError(
                f"`{model}` needs {wish.least_bytes} bytes of device memory more, {self._regions.free_bytes} "
                f"of {self._budget_bytes} are free, or too much in pieces: take weights of others, shrink "
                "their KV, or raise `service.memory_bytes`"
            )
        if tenant is None or tenant.is_other(shape):
            self._remove(model)
            tenant = self._tenants[model] = ArenaTenant(model, shape)
        tenant.shape = shape
        self._carry_out(placement.moves)
        for span in placement.spans:
            if span.owner == COMMON and COMMON in self._regions:
                self._regions.give(COMMON)  # to have it with what is behind it
            self._regions.take(span)
            match span.owner:
                case Owner(use=Use.TENSOR, index=index):
                    tenant.landing.add(index)
                case Owner(use=Use.KV, index=sink):
                    tenant.extents[sink] = range(sink, sink + 1)
        self._cut_common()
        self._moved.discard(model)  # its space says where it is
        if self._memory.bytes.is_cuda:
            tenant.queued = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it untyped
            tenant.queued.record(torch.cuda.current_stream(self._memory.bytes.device))
        return space_of(tenant, self._regions, self._memory.bytes)

    def prepare(self, model: ModelId, part: ByteRange) -> None:
        queued = self._tenants[model].queued
        if queued is not None:
            queued.synchronize()

    def landed(self, model: ModelId, *, is_whole: bool) -> None:
        tenant = self._tenants[model]
        landing, tenant.landing = tenant.landing, set()
        if not is_whole:
            for index in landing:
                self._give(Owner(model, Use.TENSOR, index))
            self._forget_if_empty(model)

    def take(self, num_bytes: int, most: Hold) -> int:
        tails, owners_by_model = [], {}
        for model, tenant in self._tenants.items():
            regard = self._regards(model)
            if regard.hold > min(most, Hold.WARM) or regard.is_loading or tenant.landing:
                continue
            owners_by_model[model] = owners = tenant.tensors(self._regions)[::-1]
            units = tuple(self._regions.span_of(owner).num_bytes for owner in owners)
            tails.append(Tail(model, regard.hold, regard.cost_s_per_byte, units))
        before_bytes = self._regions.free_bytes
        for take in plan_takes(tails, num_bytes):
            for owner in owners_by_model[take.model][: take.num_units]:
                self._give(owner)
            self._forget_if_empty(take.model)
        return self._regions.free_bytes - before_bytes

    def grow(self, model: ModelId, num_blocks: int, ahead_blocks: int = 0) -> list[range]:
        """`ahead_blocks` has no meaning here: nothing has to be mapped, so nothing can be made ready."""
        tenant = self._tenants[model]
        assert tenant.extents, f"`{model}` is not placed"
        grown: list[range] = []
        num_left = min(num_blocks, tenant.shape.max_blocks - tenant.num_blocks)
        while num_left > 0 and (blocks := self._more_blocks(tenant, num_left)):
            for extent in extents_of(blocks, tenant.shape.block_bytes, BATCH_BLOCKS):
                self._regions.take(extent_span(model, extent, tenant.shape.block_bytes))
                tenant.extents[extent.start] = extent
                grown.append(extent)
            num_left -= len(blocks)
        return grown

    def shrink(self, model: ModelId, extent: range) -> None:
        sink = next(iter(self._tenants[model].extents))
        assert extent.start != sink, f"`{model}` cannot give back its sink: {extent}"
        given = self._tenants[model].extents.pop(extent.start)
        assert given == extent, f"`{model}` gives back {extent}, but has {given}"
        self._give(Owner(model, Use.KV, extent.start))

    def extents(self, model: ModelId) -> list[range]:
        """The lowest first: tensors lie below them."""
        extents = self._tenants[model].extents
        sink = next(iter(extents), None)
        return [extents[first] for first in sorted(extents) if first != sink]

    def vacate(self, model: ModelId) -> None:
        tenant = self._tenants.get(model)
        if tenant is None:
            return
        for first in tenant.extents:
            self._give(Owner(model, Use.KV, first))
        tenant.extents = {}
        if tenant.has_own_workspace(self._regions):
            self._give(tenant.own_workspace)
        self._cut_common()
        self._moved.discard(model)
        self._forget_if_empty(model)

    def drop(self, model: ModelId) -> None:
        self._remove(model)
        self._cut_common()

    def _remove(self, model: ModelId) -> None:
        if model in self._tenants:
            for owner in _owned(self._regions, model):
                self._give(owner)
            del self._tenants[model]
            self._moved.discard(model)

    def take_moved(self) -> dict[ModelId, Mapping[str, TensorPlace]]:
        """One that has also lost tensors cannot compute: it hears where the others are when it is placed."""
        moved, self._moved = self._moved, set()
        tenants = {model: self._tenants[model] for model in sorted(moved)}
        return {
            model: places_of(tenant, self._regions, self._memory.bytes)
            for model, tenant in tenants.items()
            if len(tenant.tensors(self._regions)) == len(tenant.shape.served.tensors)
        }

    def take_displaced(self) -> list[ModelId]:
        return []

    def picture(self) -> Picture:
        holdings = tuple(tenant.holding(self._regions) for _, tenant in sorted(self._tenants.items()))
        used_bytes = self._regions.used_bytes
        rounded_bytes = used_bytes[Use.KV] - sum(holding.kv_bytes for holding in holdings)
        return Picture(
            budget_bytes=self._budget_bytes,
            free_bytes=self._regions.free_bytes,
            workspace_bytes=used_bytes[Use.WORKSPACE],
            lost_bytes=rounded_bytes + self._budget_bytes - self._regions.num_bytes,
            holdings=holdings,
            moved_bytes=self._moved_bytes,
            fallbacks=self._fallbacks,
        )

    def check(self) -> None:
        """Raise unless the regions are sound and are those of the tenants. For tests."""
        self._regions.check()
        owners = set()
        for model, tenant in self._tenants.items():
            assert model == tenant.model, f"`{tenant.model}` is known as `{model}`"
            owners |= tenant.checked_owners(self._regions)
        common_bytes = self._common_bytes()
        if common_bytes:
            assert self._regions.span_of(COMMON) == Span(0, common_bytes, COMMON), f"{common_bytes=}"
            owners.add(COMMON)
        assert owners == {span.owner for span in self._regions if span.owner}, "a region is nobody's"
        assert all(self._tenants[model].extents for model in self._moved), f"{self._moved=}"

    def _regions_for(self, model: ModelId, shape: Shape) -> RegionList:
        """As they are, but without what the model will lose because its bytes are other ones now."""
        tenant = self._tenants.get(model)
        if tenant is None or not tenant.is_other(shape):
            return self._regions
        regions = self._regions.copy()
        for owner in _owned(regions, model):
            regions.give(owner)
        return regions

    def _movable(self, placed: ModelId | None = None) -> set[ModelId]:
        """The one that is being placed may be called loading already, but nothing is written yet."""
        return {
            model
            for model, tenant in self._tenants.items()
            if not tenant.landing and (model == placed or not self._regards(model).is_loading)
        }

    def _more_blocks(self, tenant: ArenaTenant, num_blocks: int) -> range:
        """About as many, up to where extents end, or fewer; none where no block has a place.

        A batch that fits into no free region takes the place of tensors, which move, rather than coming in
        pieces: every region that cannot move cuts those that can off from each other. But many bytes move
        only where nothing else is left: a step waits for it.
        """
        movable = self._movable()
        if tenant.vain == (self._regions.version, movable):
            return range(0)
        for most_bytes in (MAX_MOVED_BYTES, self._regions.num_bytes):
            num_least = min(num_blocks, BATCH_BLOCKS)
            while num_least:
                blocks = tenant.free_blocks(self._regions, num_least, num_blocks)
                if blocks := blocks or self._cleared_blocks(tenant, num_least, movable, most_bytes):
                    return blocks
                num_least //= 2
        tenant.vain = self._regions.version, movable
        return range(0)

    def _cleared_blocks(
        self, tenant: ArenaTenant, num_blocks: int, movable: Set[ModelId], most_bytes: int
    ) -> range:
        """Where tensors have been; empty where that cannot be, or takes more moves than it may."""
        wish = Wish(tenant.model, (), 0, num_blocks, tenant.shape.block_bytes)
        placement = plan_placement(self._regions, wish, movable, self._packer)
        if placement is None or sum(move.num_bytes for move in placement.moves) > most_bytes:
            return range(0)
        self._carry_out(placement.moves)
        (owner,) = (span.owner for span in placement.spans)
        assert owner is not None, f"{placement} is for nobody"
        return range(owner.index, owner.index + num_blocks)

    def _common_bytes(self) -> int:
        return max((tenant.common_bytes(self._regions) for tenant in self._tenants.values()), default=0)

    def _cut_common(self) -> None:
        """Of the workspace only what a placed model uses stays."""
        if COMMON not in self._regions:
            return
        num_bytes, end = self._common_bytes(), self._regions.span_of(COMMON).end
        if num_bytes < end:
            self._regions.give(COMMON)
            if num_bytes:
                self._regions.take(Span(0, num_bytes, COMMON))
            self._memory.freed(num_bytes, end)

    def _carry_out(self, moves: tuple[Move, ...]) -> None:
        for move in moves:
            owner = move.key
            assert isinstance(owner, Owner), f"{move} is of nobody"
            self._memory.move(move.source, move.target, move.num_bytes)
            self._regions.give(owner)
            self._regions.take(Span(move.target, move.target + move.num_bytes, owner))
            self._moved_bytes += move.num_bytes
            if self._tenants[owner.model].extents:
                self._moved.add(owner.model)

    def _give(self, owner: Owner) -> None:
        span = self._regions.give(owner)
        self._memory.freed(span.begin, span.end)

    def _forget_if_empty(self, model: ModelId) -> None:
        tenant = self._tenants[model]
        if not tenant.extents and not tenant.tensors(self._regions):
            del self._tenants[model]


def _owned(regions: RegionList, model: ModelId) -> list[Owner]:
    return [span.owner for span in regions if span.owner is not None and span.owner.model == model]
