"""The pool of devices without mapped pages: one contiguous memory, as in Tangram.

The unit of residency is a fused tensor, present as a whole or not at all; models never share tensors. When
free memory is too fragmented tensors move, and their engines bind them again. Workspace, KV, tables and
adapters never move and lie at the ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch

from hearth.core.errors import DeviceError
from hearth.core.types import Hold, ModelId
from hearth.memory.arena_books import ArenaBooks
from hearth.memory.arena_kv import ArenaKv, ArenaTables
from hearth.memory.arena_pieces import ArenaPieces
from hearth.memory.arena_tenant import ArenaTenant, need_of, places_of, space_of
from hearth.memory.contiguous import ContiguousMemory
from hearth.memory.placement import Packer
from hearth.memory.pool import (
    EvictionTerms,
    EvictionTermsOf,
    KvMemory,
    PieceMemory,
    PoolUsage,
    Shape,
    Space,
    TableMemory,
)
from hearth.memory.regions import Owner, Use
from hearth.models.layout import ALIGNMENT_BYTES, ByteRange
from hearth.models.weights import TensorPlace
from hearth.policy.memory.byte_eviction import TAKEABLE, Tail, plan_takes
from hearth.policy.memory.packing import pack


class ArenaPool:
    """A `Pool`. Mutable; called between two steps."""

    keeps_addresses = False

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
        """`fallbacks`: why an arena is used. `wipe`: called with all bytes that come free, for tests.

        Raises:
            DeviceError: the device has less than the budget.
        """
        num_bytes = budget_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if num_bytes <= 0:
            raise DeviceError(
                f"a pool needs at least {ALIGNMENT_BYTES} bytes, given: {budget_bytes}; "
                "raise `service.memory_bytes`"
            )
        self._eviction_terms, self._fallbacks = eviction_terms, dict(fallbacks or {})
        self._books = ArenaBooks(ContiguousMemory(device, num_bytes, wipe), eviction_terms, packer)
        self._pieces = ArenaPieces(self._books)
        self.budget_bytes = budget_bytes
        self.kv: KvMemory = ArenaKv(self._books)
        self.tables: TableMemory = ArenaTables(self._books)
        self.pieces: PieceMemory = self._pieces

    @property
    def free_bytes(self) -> int:
        return self._books.regions.free_bytes

    def missing_bytes(self, model: ModelId, shape: Shape) -> int:
        regions = self._books.regions_for(model, shape)
        need = need_of(model, shape, self._books.tenants.get(model), regions)
        if not need.least_bytes:
            return 0
        if need.least_bytes > regions.free_bytes:
            return need.least_bytes - regions.free_bytes
        return 0 if self._books.plan(need, self._books.movable(model), regions) else need.step_bytes

    def place(self, model: ModelId, shape: Shape) -> Space:
        books = self._books
        tenant = books.tenants.get(model)
        assert tenant is None or not tenant.loading, f"`{model}` is still being loaded: {tenant}"
        regions = books.regions_for(model, shape)
        need = need_of(model, shape, tenant, regions)
        placement = books.plan(need, books.movable(model), regions)
        if placement is None:
            raise DeviceError(
                f"`{model}` needs {need.least_bytes} bytes of device memory more, {books.regions.free_bytes} "
                f"of {self.budget_bytes} are free, or too fragmented: take weights of other models, shrink "
                "their KV, or raise `service.memory_bytes`"
            )
        tenant = books.tenant(model, shape)
        books.move(placement.moves)
        for span in placement.spans:
            books.take(tenant, span)
        tenant.has_workspace = True
        books.cut_common()
        books.moved.discard(model)  # the returned space has its places
        books.give_back()
        tenant.queued = books.queued_now()
        return space_of(tenant, books.regions, books.memory)

    def place_front(self, model: ModelId, shape: Shape, num_bytes: int) -> Space | None:
        """None: a part of a model would only be in the way of models that are placed before its rest."""
        return None

    def prepare(self, model: ModelId, part: ByteRange) -> None:
        queued = self._books.tenants[model].queued
        if queued is not None:
            queued.synchronize()

    def prepare_rest(self, model: ModelId) -> None:
        """Does nothing: the memory is always there, and is touched in the order of the steps."""

    def load_ended(self, model: ModelId, *, is_whole: bool) -> None:
        tenant = self._books.tenants[model]
        loading, tenant.loading = tenant.loading, set()
        if not is_whole:
            for index in loading:
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

    def take_weights(self, num_bytes: int, most: Hold, below_s_per_byte: float = math.inf) -> int:
        tails, owners_by_model = [], {}
        for tenant, terms in self._takeable(most):
            if terms.cost_s_per_byte < below_s_per_byte:
                owners_by_model[tenant.model] = owners = tenant.tensors(self._books.regions)[::-1]
                units = tuple(self._books.regions.span_of(owner).num_bytes for owner in owners)
                tails.append(Tail(tenant.model, terms.hold, terms.cost_s_per_byte, units))
        before_bytes = self.free_bytes
        for take in plan_takes(tails, num_bytes):
            for owner in owners_by_model[take.model][: take.num_units]:
                self._books.give(owner, is_wanted=True)
            self._books.forget_if_empty(take.model)
        return self.free_bytes - before_bytes

    def take_workspaces(self, most: Hold) -> int:
        before_bytes = self.free_bytes
        self._books.take_workspaces([tenant for tenant, _ in self._takeable(most)])
        return self.free_bytes - before_bytes

    def _takeable(self, most: Hold) -> Iterator[tuple[ArenaTenant, EvictionTerms]]:
        for model, tenant in self._books.tenants.items():
            terms = self._eviction_terms(model)
            if terms.hold in TAKEABLE and terms.hold <= most and not terms.is_loading and not tenant.loading:
                yield tenant, terms

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
        """Models that lack tensors get their places from `place`."""
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
        pieces_bytes = self._pieces.num_bytes_by_owner()
        rounded_bytes += used_bytes[Use.PIECES] - sum(pieces_bytes.values())
        return PoolUsage(
            budget_bytes=self.budget_bytes,
            free_bytes=self.free_bytes,
            workspace_bytes=used_bytes[Use.WORKSPACE],
            lost_bytes=rounded_bytes + self.budget_bytes - self._books.regions.num_bytes,
            holdings=holdings,
            pieces_bytes=pieces_bytes,
            moved_bytes=self._books.moved_bytes,
            fallbacks=self._fallbacks,
        )

    def check(self) -> None:
        self._books.check(self._pieces.region_owners())
