"""The pool of devices without mapped pages: one contiguous memory, as Tangram has it. Reads no weights.

The unit of residency is a fused tensor: it is there as a whole or not at all, and tensors of two models are
never shared, equal as they may be. When free memory lies in pieces that are too small, tensors move and
whoever computes with them binds them anew. What never moves lies at the ends: the workspace, which all models
have in common, KV, tables and adapters, each of these with all its pieces in one region. A model that does
not compute can lose its workspace; `place` gives it another one, possibly elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set

import torch

from hearth.core.errors import DeviceError
from hearth.core.types import AdapterId, Hold, ModelId, SamplingTable
from hearth.memory.arena_books import ArenaBooks
from hearth.memory.arena_tenant import BATCH_BLOCKS, ArenaTenant, need_of, places_of, space_of
from hearth.memory.contiguous import ContiguousMemory
from hearth.memory.pages import Mark
from hearth.memory.piece_book import piece_bytes
from hearth.memory.placement import Packer, PlacementNeed, extent_span, plan_placement
from hearth.memory.pool import EvictionTermsOf, PieceRun, PoolUsage, Shape, Space
from hearth.memory.regions import Owner, Use, aligned, extents_of
from hearth.models.layout import ALIGNMENT_BYTES, ByteRange
from hearth.models.weights import TensorPlace
from hearth.policy.memory.eviction import TAKEABLE, Tail, plan_takes
from hearth.policy.memory.packing import Item, pack

#: For KV, unless there is no other way: some hundredths of a second on a CPU.
MAX_MOVED_BYTES = 256 << 20


class ArenaPool:
    """A `Pool`. Mutable; one thread calls all that does not prepare, between two steps."""

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int,
        eviction_terms: EvictionTermsOf,
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
        self._budget_bytes, self._eviction_terms = budget_bytes, eviction_terms
        self._packer, self._fallbacks = packer, dict(fallbacks or {})
        self._books = ArenaBooks(ContiguousMemory(device, num_bytes, wipe))

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    @property
    def free_bytes(self) -> int:
        return self._books.regions.free_bytes

    @property
    def page_bytes(self) -> int:
        return 1

    @property
    def keeps_addresses(self) -> bool:
        return False

    def missing_bytes(self, model: ModelId, shape: Shape) -> int:
        regions = self._books.regions_for(model, shape)
        need = need_of(model, shape, self._books.tenants.get(model), regions)
        if not need.least_bytes:
            return 0
        if need.least_bytes > regions.free_bytes:
            return need.least_bytes - regions.free_bytes
        if plan_placement(regions, need, self._movable(model), self._packer):
            return 0
        return need.step_bytes

    def place(self, model: ModelId, shape: Shape) -> Space:
        books = self._books
        tenant = books.tenants.get(model)
        assert tenant is None or not tenant.coming, f"`{model}` is still being loaded: {tenant}"
        regions = books.regions_for(model, shape)
        need = need_of(model, shape, tenant, regions)
        placement = plan_placement(regions, need, self._movable(model), self._packer)
        if placement is None:
            raise DeviceError(
                f"`{model}` needs {need.least_bytes} bytes of device memory more, {books.regions.free_bytes} "
                f"of {self._budget_bytes} are free, or too much in pieces: take weights of others, shrink "
                "their KV, or raise `service.memory_bytes`"
            )
        tenant = books.tenant(model, shape)
        books.move(placement.moves)
        for span in placement.spans:
            books.take(tenant, span)
        tenant.has_workspace = True
        books.cut_common()
        books.moved.discard(model)  # its space says where it is
        books.give_back()
        tenant.queued = books.queued_now()
        return space_of(tenant, books.regions, books.memory)

    def place_front(self, model: ModelId, shape: Shape, num_bytes: int) -> Space | None:
        """A part of a model would only lie in the way of whoever is placed before the rest of it."""
        return None

    def prepare(self, model: ModelId, part: ByteRange) -> None:
        queued = self._books.tenants[model].queued
        if queued is not None:
            queued.synchronize()

    def prepare_rest(self, model: ModelId) -> None:
        """Do nothing: it lies in memory that is always there, and is touched in the order of the steps."""

    def load_ended(self, model: ModelId, *, is_whole: bool) -> None:
        tenant = self._books.tenants[model]
        coming, tenant.coming = tenant.coming, set()
        if not is_whole:
            for index in coming:
                self._books.give(Owner(model, Use.TENSOR, index))
            self._books.forget_if_empty(model)

    def resident_bytes(self, model: ModelId) -> int:
        tenant = self._books.tenants.get(model)
        return 0 if tenant is None else tenant.holding(self._books.regions).stored_bytes

    def is_incomplete(self, model: ModelId) -> bool:
        tenant = self._books.tenants.get(model)
        if tenant is None:
            return False
        holding = tenant.holding(self._books.regions)
        return holding.weights_bytes < holding.total_bytes or not tenant.has_workspace

    def take_weights(
        self,
        num_bytes: int,
        most: Hold,
        below_s_per_byte: float = math.inf,
        *,
        with_workspaces: bool = False,
    ) -> int:
        tails, owners_by_model, takeable = [], {}, []
        for model, tenant in self._books.tenants.items():
            terms = self._eviction_terms(model)
            if terms.hold not in TAKEABLE or terms.hold > most or terms.is_loading or tenant.coming:
                continue
            if terms.cost_s_per_byte >= below_s_per_byte:
                continue
            takeable.append(tenant)
            owners_by_model[model] = owners = tenant.tensors(self._books.regions)[::-1]
            units = tuple(self._books.regions.span_of(owner).num_bytes for owner in owners)
            tails.append(Tail(model, terms.hold, terms.cost_s_per_byte, units))
        before_bytes = self._books.regions.free_bytes
        for take in plan_takes(tails, num_bytes):
            for owner in owners_by_model[take.model][: take.num_units]:
                self._books.give(owner, is_wanted=True)
            self._books.forget_if_empty(take.model)
        if with_workspaces and self._books.regions.free_bytes - before_bytes < num_bytes:
            self._books.take_workspaces(takeable)
        return self._books.regions.free_bytes - before_bytes

    def grow(self, model: ModelId, num_blocks: int, ahead_blocks: int = 0) -> list[range]:
        """`ahead_blocks` has no meaning here: nothing has to be mapped, so nothing can be made ready."""
        tenant = self._books.tenants[model]
        assert tenant.extents, f"`{model}` is not placed"
        grown: list[range] = []
        num_left = min(num_blocks, tenant.shape.max_blocks - tenant.num_blocks)
        while num_left > 0 and (blocks := self._more_blocks(tenant, num_left)):
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
        sink = next(iter(self._books.tenants[model].extents))
        assert extent.start != sink, f"`{model}` cannot give back its sink: {extent}"
        given = self._books.tenants[model].extents.pop(extent.start)
        assert given == extent, f"`{model}` gives back {extent}, but has {given}"
        self._books.give(Owner(model, Use.KV, extent.start))

    def extents(self, model: ModelId) -> list[range]:
        """Return the lowest extents first: tensors lie below them."""
        extents = self._books.tenants[model].extents
        sink = next(iter(extents), None)
        return [extents[first] for first in sorted(extents) if first != sink]

    def place_table(self, model: ModelId, table: SamplingTable, num_bytes: int) -> torch.Tensor | None:
        books, tenant = self._books, self._books.tenants[model]
        assert tenant.extents, f"`{model}` is not placed"
        item = Item(tenant.table_owner(table), aligned(num_bytes))
        need = PlacementNeed(model, (), 0, 0, tenant.shape.block_bytes, tables=(item,))
        placement = plan_placement(books.regions, need, self._movable(), self._packer)
        if placement is None:
            return None
        books.move(placement.moves)
        (span,) = placement.spans
        books.take(tenant, span)
        books.give_back()
        return books.memory[span.begin : span.begin + num_bytes]

    def drop_table(self, model: ModelId, table: SamplingTable) -> None:
        self._books.give(self._books.tenants[model].table_owner(table))

    def place_pieces(
        self, owner: AdapterId, sizes: Sequence[int], spare_bytes: int = 0
    ) -> list[PieceRun] | None:
        """All pieces lie in one region, so that few of those that never move cut the memory in pieces."""
        books, num_bytes = self._books, aligned(sum(map(piece_bytes, sizes)))
        if num_bytes + spare_bytes > self.free_bytes:
            return None
        item = Item(books.next_pieces_owner(), num_bytes)
        need = PlacementNeed(ModelId(""), (), 0, 0, block_bytes=1, tables=(item,))
        placement = plan_placement(books.regions, need, self._movable(), self._packer)
        if placement is None:
            return None
        books.move(placement.moves)
        (span,) = placement.spans
        pieces = books.take_pieces(owner, span, sizes)
        books.give_back()
        return pieces

    def prepare_pieces(self, owner: AdapterId) -> None:
        queued = self._books.pieces[owner].queued
        if queued is not None:
            queued.synchronize()

    def mark(self) -> Mark | None:
        """None: pieces that are placed wait for all that is queued then."""
        return None

    def drop_pieces(self, owner: AdapterId, last_read: Mark | None = None) -> None:
        self._books.give(self._books.pieces.pop(owner).owner)

    def retire(self, model: ModelId) -> None:
        tenant = self._books.tenants.get(model)
        if tenant is None:
            return
        for first in tenant.extents:
            self._books.give(Owner(model, Use.KV, first))
        tenant.extents, tenant.has_workspace = {}, False
        for table in tenant.tables(self._books.regions):
            self._books.give(table)
        if tenant.has_own_workspace(self._books.regions):
            self._books.give(tenant.own_workspace)
        self._books.cut_common()
        self._books.moved.discard(model)
        self._books.forget_if_empty(model)

    def drop(self, model: ModelId) -> None:
        self._books.remove(model)
        self._books.cut_common()

    def take_moved(self) -> dict[ModelId, Mapping[str, TensorPlace]]:
        """Return where tensors are now; a model that lacks some hears of the others when it is placed."""
        moved, self._books.moved = self._books.moved, set()
        tenants = {model: self._books.tenants[model] for model in sorted(moved)}
        return {
            model: places_of(tenant, self._books.regions, self._books.memory)
            for model, tenant in tenants.items()
            if len(tenant.tensors(self._books.regions)) == len(tenant.shape.served.tensors)
        }

    def take_displaced(self) -> list[ModelId]:
        return []

    def usage(self) -> PoolUsage:
        holdings = tuple(
            tenant.holding(self._books.regions) for _, tenant in sorted(self._books.tenants.items())
        )
        used_bytes = self._books.regions.used_bytes
        rounded_bytes = used_bytes[Use.KV] - sum(holding.kv_bytes for holding in holdings)
        pieces_bytes = {owner: one.num_bytes for owner, one in sorted(self._books.pieces.items())}
        rounded_bytes += used_bytes[Use.PIECES] - sum(pieces_bytes.values())
        return PoolUsage(
            budget_bytes=self._budget_bytes,
            free_bytes=self._books.regions.free_bytes,
            workspace_bytes=used_bytes[Use.WORKSPACE],
            lost_bytes=rounded_bytes + self._budget_bytes - self._books.regions.num_bytes,
            holdings=holdings,
            pieces_bytes=pieces_bytes,
            moved_bytes=self._books.moved_bytes,
            fallbacks=self._fallbacks,
        )

    def check(self) -> None:
        """Raise unless the books are sound. For tests."""
        self._books.check()

    def _movable(self, placed: ModelId | None = None) -> set[ModelId]:
        """Return the models whose tensors may move, `placed` too: nothing is written there yet."""
        return {
            model
            for model, tenant in self._books.tenants.items()
            if not tenant.coming and (model == placed or not self._eviction_terms(model).is_loading)
        }

    def _more_blocks(self, tenant: ArenaTenant, num_blocks: int) -> range:
        """Return about as many free blocks, up to where extents end, or fewer; none where none has a place.

        A batch that fits into no free region takes the place of tensors, which move, rather than coming in
        pieces: every region that cannot move cuts those that can off from each other. But many bytes move
        only where nothing else is left: a step waits for it.
        """
        movable = self._movable()
        if tenant.vain == (self._books.regions.version, movable):
            return range(0)
        for most_bytes in (MAX_MOVED_BYTES, self._books.regions.num_bytes):
            num_least = min(num_blocks, BATCH_BLOCKS)
            while num_least:
                blocks = tenant.free_blocks(self._books.regions, num_least, num_blocks)
                if blocks := blocks or self._cleared_blocks(tenant, num_least, movable, most_bytes):
                    return blocks
                num_least //= 2
        tenant.vain = self._books.regions.version, movable
        return range(0)

    def _cleared_blocks(
        self, tenant: ArenaTenant, num_blocks: int, movable: Set[ModelId], most_bytes: int
    ) -> range:
        """Return blocks where tensors have been; none where that cannot be, or takes too many moves."""
        need = PlacementNeed(tenant.model, (), 0, num_blocks, tenant.shape.block_bytes)
        placement = plan_placement(self._books.regions, need, movable, self._packer)
        if placement is None or sum(move.num_bytes for move in placement.moves) > most_bytes:
            return range(0)
        self._books.move(placement.moves)
        (owner,) = (span.owner for span in placement.spans)
        assert owner is not None, f"{placement} is for nobody"
        return range(owner.index, owner.index + num_blocks)
