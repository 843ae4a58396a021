"""The pool of a device whose memory is mapped by pages. Any free page fits anywhere: it never moves a byte.

Weights, KV, tables and workspace of a model lie at addresses that its slot decides; pages come and go beneath
them. Evicted pages are free in the books at once. The next owner unmaps and maps them: the thread of a load
just before it copies a chunk, a background thread for KV, the step thread for tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hearth.core.errors import DeviceError
from hearth.core.types import Hold, ModelId
from hearth.memory.mapped_kv import MappedKv, MappedTables
from hearth.memory.mapped_pieces import MappedPieces
from hearth.memory.mapped_tenant import MappedTenant, check_fits, num_pages, runs_of
from hearth.memory.page_books import PageBooks, holdings_of, lost_weights_bytes, tails_of
from hearth.memory.page_table import PageTable, Wipe
from hearth.memory.pages import Pages
from hearth.memory.pool import EvictionTermsOf, KvMemory, PieceMemory, PoolUsage, Shape, Space, TableMemory
from hearth.memory.spaces import Spaces
from hearth.models.layout import ByteRange
from hearth.models.weights import TensorPlace, contiguous_places
from hearth.policy.memory.byte_eviction import TAKEABLE, plan_takes


class MappedPool:
    """A `Pool` that owns its pages. Mutable."""

    keeps_addresses = True

    def __init__(
        self,
        pages: Pages,
        eviction_terms: EvictionTermsOf,
        *,
        fallbacks: Mapping[str, int] | None = None,
        wipe: Wipe | None = None,
    ) -> None:
        """`fallbacks`: taken outside of the pool. `wipe`: called with all bytes that come free, for tests."""
        self._pages, self._eviction_terms, self._fallbacks = pages, eviction_terms, dict(fallbacks or {})
        self._table = PageTable(pages, wipe)
        self._spaces = Spaces(pages)
        self._books = PageBooks(pages, self._table, self._spaces)
        self._kv = MappedKv(self._books)
        self._pieces = MappedPieces(self._books, pages, self._spaces, wipe)
        self.budget_bytes = pages.num_pages * pages.page_bytes
        self.kv: KvMemory = self._kv
        self.tables: TableMemory = MappedTables(self._books, pages)
        self.pieces: PieceMemory = self._pieces

    @property
    def free_bytes(self) -> int:
        return self._table.num_free * self._pages.page_bytes

    def missing_bytes(self, model: ModelId, shape: Shape) -> int:
        """Shared chunks do not count; if `take_weights` takes them, the next answer is larger."""
        check_fits(model, shape, self._pages)
        with self._table.lock:
            return self._books.missing_pages(model, shape) * self._pages.page_bytes

    def place(self, model: ModelId, shape: Shape) -> Space:
        check_fits(model, shape, self._pages)
        with self._table.lock:
            if num_missing := self._books.missing_pages(model, shape):
                raise DeviceError(
                    f"`{model}` lacks {num_missing * self._pages.page_bytes} bytes of device memory, "
                    f"{self.free_bytes} of {self.budget_bytes} are free: take weights of other models, "
                    "shrink their KV, or raise `service.memory_bytes`"
                )
            tenant = self._books.tenant(model, shape)
            assert not tenant.loading, f"`{model}` is still being loaded: {sorted(tenant.loading)}"
            self._books.place_weights(tenant)
            if not tenant.is_placed:
                self._books.place_rest(tenant)
            unmapped = self._books.unmapped_weights(tenant)
        return self._space(tenant, unmapped)

    def place_front(self, model: ModelId, shape: Shape, num_bytes: int) -> Space | None:
        """Takes neither pages that are mapped ahead for KV nor addresses of other models."""
        check_fits(model, shape, self._pages)
        with self._table.lock:
            most = min(num_pages(num_bytes, self._pages.page_bytes), self._table.num_free)
            known = self._books.tenants.get(model)
            if not most or (self._spaces.is_full if known is None else not known.is_of(shape)):
                return None
            tenant = self._books.tenant(model, shape)
            assert not tenant.loading, f"`{model}` is still being loaded: {sorted(tenant.loading)}"
            self._books.place_weights(tenant, most)
            if not tenant.loading:
                return None
            unmapped = self._books.unmapped_weights(tenant)
        return self._space(tenant, unmapped)

    def prepare(self, model: ModelId, part: ByteRange) -> None:
        tenant = self._books.tenants[model]
        indices = range(part.begin // tenant.page_bytes, num_pages(part.end, tenant.page_bytes))
        places = tenant.at.weights(indices)
        self._table.wait_until_idle(places)  # loads write on a stream of their own
        self._table.map(places)

    def prepare_rest(self, model: ModelId) -> None:
        with self._table.lock:
            tenant = self._books.tenants.get(model)
            places = [] if tenant is None else tenant.rest_places()
        self._table.map(places)

    def load_ended(self, model: ModelId, *, is_whole: bool) -> None:
        with self._table.lock:
            self._books.end_load(self._books.tenants[model], is_whole=is_whole)

    def resident_bytes(self, model: ModelId) -> int:
        tenant = self._books.tenants.get(model)
        return 0 if tenant is None else tenant.resident_bytes

    def is_incomplete(self, model: ModelId) -> bool:
        tenant = self._books.tenants.get(model)
        return tenant is not None and len(tenant.resident) + len(tenant.loading) < len(tenant.wanted)

    def take_weights(self, num_bytes: int, most: Hold, below_s_per_byte: float = math.inf) -> int:
        freed_bytes = 0
        with self._table.lock:
            terms = {
                model: self._eviction_terms(model)
                for model, tenant in self._books.tenants.items()
                if not tenant.loading
            }
            for hold in TAKEABLE:
                while hold <= most and freed_bytes < num_bytes:
                    # A plan may free less than planned, where models share pages: then plan again.
                    tails = tails_of(self._books, terms, hold, below_s_per_byte)
                    takes = plan_takes(tails, num_bytes - freed_bytes)
                    if not takes:
                        break
                    for take in takes:
                        tenant = self._books.tenants[take.model]
                        indices = sorted(tenant.resident, reverse=True)[: take.num_units]
                        is_idle = not terms[take.model].is_computing
                        num_freed = self._books.release_weights(tenant, indices, is_idle=is_idle)
                        freed_bytes += num_freed * tenant.page_bytes
        return freed_bytes

    def take_workspaces(self, most: Hold) -> int:
        return 0

    def retire(self, model: ModelId) -> None:
        with self._table.lock:
            if (tenant := self._books.tenants.get(model)) is not None:
                self._books.retire(tenant)

    def drop(self, model: ModelId) -> None:
        with self._table.lock:
            if (tenant := self._books.tenants.get(model)) is not None:
                self._books.drop(tenant)

    def take_moved(self) -> dict[ModelId, Mapping[str, TensorPlace]]:
        return {}

    def take_displaced(self) -> list[ModelId]:
        with self._table.lock:
            displaced, self._books.displaced = self._books.displaced, []
        return displaced

    def usage(self) -> PoolUsage:
        with self._table.lock:
            own = {"address": self._spaces.num_fallbacks, "mapping_ahead": self._kv.num_late}
            pieces_bytes = self._pieces.num_bytes_by_owner()
            unused_bytes = self._pieces.num_pages * self._pages.page_bytes - sum(pieces_bytes.values())
            return PoolUsage(
                budget_bytes=self.budget_bytes,
                free_bytes=self.free_bytes,
                workspace_bytes=len(self._books.workspace) * self._pages.page_bytes,
                lost_bytes=lost_weights_bytes(self._books) + unused_bytes,
                holdings=holdings_of(self._books),
                pieces_bytes=pieces_bytes,
                moved_bytes=0,
                fallbacks={**own, **self._pages.fallbacks, **self._fallbacks},
            )

    def check(self) -> None:
        self._table.check()
        with self._table.lock:
            self._pieces.check()
            self._books.check(self._pieces.all_places())

    def close(self) -> None:
        """Give everything back to the device. The memory and the pool must not be used any more."""
        self._kv.close()
        self._table.close()
        self._spaces.close()
        self._pages.close()

    def _space(self, tenant: MappedTenant, unmapped: Sequence[int]) -> Space:
        shape = tenant.shape
        if tenant.space is None:  # kept: addresses never change, and creating the tensors takes time
            tenant.space = Space(
                places=contiguous_places(shape.served, tenant.weights),
                workspace=self._pages.bytes_at(tenant.at.workspace_address, shape.workspace_bytes),
                tables=self._pages.bytes_at(tenant.at.tables_address, shape.tables_bytes),
                kv=self._pages.bytes_at(tenant.at.kv_address, shape.max_blocks * shape.block_bytes),
                sink=0,
                gaps=(),
                parts=(),
            )
        if not unmapped:
            return tenant.space
        return replace(tenant.space, gaps=tenant.gaps(), parts=tuple(map(tenant.part, runs_of(unmapped))))
