"""The pool of a device whose memory is mapped by pages. Any free page fits anywhere: it never moves a byte.

Weights, KV, tables and workspace of a model lie at addresses that its slot decides; pages come and go
beneath them. What others give up is at once free in the books. It is unmapped and mapped anew by whoever
needs it next: by the thread of a load, just before a chunk is copied, for KV by a thread that maps ahead, and
for a table by the thread of the steps. Pieces of adapters lie in a space of their own, many on one page.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue

import torch

from hearth.core.errors import DeviceError
from hearth.core.types import AdapterId, Hold, ModelId, SamplingTable
from hearth.memory.mapped_tenant import MappedTenant, check_fits, num_pages, runs_of
from hearth.memory.page_books import PageBooks, check_books, tails_of, usage_of
from hearth.memory.page_table import PageTable, Wipe
from hearth.memory.pages import Mark, Pages
from hearth.memory.pool import EvictionTermsOf, PieceRun, PoolUsage, Shape, Space, piece_runs
from hearth.memory.spaces import Spaces
from hearth.models.layout import ByteRange
from hearth.models.weights import TensorPlace, contiguous_places
from hearth.policy.memory.eviction import TAKEABLE, plan_takes

log = logging.getLogger(__name__)


class MappedPool:
    """A `Pool` that owns its pages. Mutable; the thread of the steps calls all that does not prepare."""

    def __init__(
        self,
        pages: Pages,
        eviction_terms: EvictionTermsOf,
        *,
        fallbacks: Mapping[str, int] | None = None,
        wipe: Wipe | None = None,
    ) -> None:
        """`fallbacks`: those beside the pool. `wipe` is called with all bytes that come free, for tests."""
        self._pages, self._eviction_terms, self._fallbacks = pages, eviction_terms, dict(fallbacks or {})
        self._wipe = wipe
        self._table = PageTable(pages, wipe)
        self._spaces = Spaces(pages)
        self._books = PageBooks(pages, self._table, self._spaces)
        self._num_later = 0  #: runs that could not be mapped ahead
        #: Places to be mapped ahead of their use; None ends the thread.
        self._ahead: SimpleQueue[list[int] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._map_ahead, name="hearth-pages", daemon=True)
        self._thread.start()

    @property
    def budget_bytes(self) -> int:
        return self._pages.num_pages * self._pages.page_bytes

    @property
    def page_bytes(self) -> int:
        return self._pages.page_bytes

    @property
    def free_bytes(self) -> int:
        return self._table.num_free * self._pages.page_bytes

    @property
    def keeps_addresses(self) -> bool:
        return True

    def missing_bytes(self, model: ModelId, shape: Shape) -> int:
        """Chunks that others have are not counted; if `take` takes them, the next answer is a larger one."""
        check_fits(model, shape, self._pages)
        with self._table.lock:
            return self._books.missing_pages(model, shape) * self._pages.page_bytes

    def place(self, model: ModelId, shape: Shape) -> Space:
        check_fits(model, shape, self._pages)
        with self._table.lock:
            if num_missing := self._books.missing_pages(model, shape):
                raise DeviceError(
                    f"`{model}` lacks {num_missing * self._pages.page_bytes} bytes of device memory, "
                    f"{self._table.num_free * self._pages.page_bytes} of {self.budget_bytes} are free: take "
                    "weights of others, shrink their KV, or raise `service.memory_bytes`"
                )
            tenant = self._books.tenant(model, shape)
            assert not tenant.coming, f"`{model}` is still being loaded: {sorted(tenant.coming)}"
            self._books.place_weights(tenant)
            if not tenant.is_placed:
                self._books.place_rest(tenant)
            unreal = self._books.unreal_weights(tenant)
        return self._space(tenant, unreal)

    def place_front(self, model: ModelId, shape: Shape, num_bytes: int) -> Space | None:
        """Pages that are ready for KV are left there. So are the addresses of others."""
        check_fits(model, shape, self._pages)
        with self._table.lock:
            most = min(num_pages(num_bytes, self._pages.page_bytes), self._table.num_free)
            if not most or not self._books.has_addresses(model, shape):
                return None
            tenant = self._books.tenant(model, shape)
            assert not tenant.coming, f"`{model}` is still being loaded: {sorted(tenant.coming)}"
            self._books.place_weights(tenant, most)
            if not tenant.coming:
                return None
            unreal = self._books.unreal_weights(tenant)
        return self._space(tenant, unreal)

    def prepare(self, model: ModelId, part: ByteRange) -> None:
        tenant = self._books.tenants[model]
        indices = range(part.begin // tenant.page_bytes, num_pages(part.end, tenant.page_bytes))
        places = tenant.weights_places(indices)
        self._table.wait_until_idle(places)  # loads write on a stream of their own
        self._table.make_real(places)

    def prepare_rest(self, model: ModelId) -> None:
        with self._table.lock:
            tenant = self._books.tenants.get(model)
            places = [] if tenant is None else tenant.rest_places()
        self._table.make_real(places)

    def load_ended(self, model: ModelId, *, is_whole: bool) -> None:
        with self._table.lock:
            self._books.end_load(self._books.tenants[model], is_whole=is_whole)

    def resident_bytes(self, model: ModelId) -> int:
        tenant = self._books.tenants.get(model)
        return 0 if tenant is None else tenant.resident_bytes

    def is_incomplete(self, model: ModelId) -> bool:
        tenant = self._books.tenants.get(model)
        return tenant is not None and len(tenant.there) + len(tenant.coming) < tenant.num_weights_pages

    def take_weights(
        self,
        num_bytes: int,
        most: Hold,
        below_s_per_byte: float = math.inf,
        *,
        with_workspaces: bool = False,
    ) -> int:
        freed_bytes = 0
        with self._table.lock:
            terms = {
                model: self._eviction_terms(model)
                for model, tenant in self._books.tenants.items()
                if not tenant.coming
            }
            for hold in TAKEABLE:
                while hold <= most and freed_bytes < num_bytes:
                    # A plan may free less than it should, where models share pages: then once more.
                    tails = tails_of(self._books, terms, hold, below_s_per_byte)
                    takes = plan_takes(tails, num_bytes - freed_bytes)
                    if not takes:
                        break
                    for take in takes:
                        tenant = self._books.tenants[take.model]
                        indices = sorted(tenant.there, reverse=True)[: take.num_units]
                        is_idle = not terms[take.model].is_computing
                        num_freed = self._books.leave_weights(tenant, indices, is_idle=is_idle)
                        freed_bytes += num_freed * tenant.page_bytes
        return freed_bytes

    def grow(self, model: ModelId, num_blocks: int, ahead_blocks: int = 0) -> list[range]:
        """Pages that are ready for other models, but not given, count as free."""
        with self._table.lock:
            tenant = self._books.tenants[model]
            assert tenant.is_placed, f"`{model}` is not placed"
            num_before = tenant.num_kv_pages
            extents = self._books.give_blocks(tenant, num_blocks)
            given = tenant.kv_places(range(num_before, tenant.num_kv_pages))
            ahead = self._books.claim_ahead(tenant, ahead_blocks)
        self._table.make_real(given)
        if ahead:
            self._ahead.put(ahead)
        return extents

    def growth_bytes(self, model: ModelId, num_blocks: int) -> int:
        """Blocks that lie on a page which the model has take none."""
        tenant = self._books.tenants[model]
        num_more = tenant.kv.num_pages(tenant.num_kv_blocks + num_blocks) - tenant.num_kv_pages
        return max(0, num_more) * self._pages.page_bytes

    def shrink(self, model: ModelId, extent: range) -> None:
        with self._table.lock:
            tenant = self._books.tenants[model]
            assert [extent] == self._books.extents(tenant), f"{extent=} {self._books.extents(tenant)=}"
            self._books.shrink(tenant, extent)

    def extents(self, model: ModelId) -> list[range]:
        return self._books.extents(self._books.tenants[model])

    def place_table(self, model: ModelId, table: SamplingTable, num_bytes: int) -> torch.Tensor | None:
        """Pages that are ready for KV, but not given, count as free."""
        with self._table.lock:
            tenant = self._books.tenants[model]
            assert tenant.is_placed, f"`{model}` is not placed"
            places = self._books.claim_table(tenant, table, num_bytes)
        if places is None:
            return None
        self._table.make_real(places)
        return self._pages.bytes_at(tenant.table_address(table), num_bytes)

    def drop_table(self, model: ModelId, table: SamplingTable) -> None:
        with self._table.lock:
            self._books.leave_table(self._books.tenants[model], table)

    def place_pieces(
        self, owner: AdapterId, sizes: Sequence[int], spare_bytes: int = 0
    ) -> list[PieceRun] | None:
        """Pages that are ready for KV, but not given, count as free; what pieces leave of theirs does not."""
        with self._table.lock:
            plan = self._books.claim_pieces(owner, sizes, spare_bytes)
            if plan is None:
                return None
        return piece_runs(plan, sizes, self._books.pieces_address, self._pages.bytes_at)

    def prepare_pieces(self, owner: AdapterId) -> None:
        with self._table.lock:
            unready = self._books.unready_pieces(owner)
        for mark in unready.marks:
            mark.synchronize()
        self._table.make_real(unready.places)

    def mark(self) -> Mark | None:
        return self._pages.mark()

    def drop_pieces(self, owner: AdapterId, last_read: Mark | None = None) -> None:
        if self._wipe is not None:
            last_read = None  # the wipe comes behind it
            self.prepare_pieces(owner)
            for part in self._books.pieces.plan_of(owner).parts:
                address = self._books.pieces_address + part.begin
                self._wipe(self._pages.bytes_at(address, part.end - part.begin))
        with self._table.lock:
            self._books.leave_pieces(owner, last_read)

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
            ours = {"address": self._spaces.num_fallbacks, "mapping_ahead": self._num_later}
            return usage_of(self._books, self._pages, {**ours, **self._pages.fallbacks, **self._fallbacks})

    def check(self) -> None:
        """Raise if the books contradict each other. For tests."""
        self._table.check()
        with self._table.lock:
            check_books(self._books)

    def close(self) -> None:
        """Give everything back to the device. Nobody may touch the memory or the pool any more."""
        self._ahead.put(None)
        self._thread.join()
        self._table.close()
        self._spaces.close()
        self._pages.close()

    def _space(self, tenant: MappedTenant, unreal: Sequence[int]) -> Space:
        shape = tenant.shape
        if tenant.space is None:  # addresses never change, and looking at them takes its time
            tenant.space = Space(
                places=contiguous_places(shape.served, tenant.weights),
                workspace=self._pages.bytes_at(tenant.workspace_address, shape.workspace_bytes),
                tables=self._pages.bytes_at(tenant.tables_address, shape.tables_bytes),
                kv=self._pages.bytes_at(tenant.kv_address, shape.max_blocks * shape.block_bytes),
                sink=0,
                gaps=(),
                parts=(),
            )
        if not unreal:
            return tenant.space
        return replace(tenant.space, gaps=tenant.gaps(), parts=tuple(map(tenant.part, runs_of(unreal))))

    def _map_ahead(self) -> None:
        """The thread's top. What fails here fails again, and is told, where the place is needed."""
        while (places := self._ahead.get()) is not None:
            try:
                self._table.make_real(places)
            except DeviceError as error:
                self._num_later += 1
                if self._num_later == 1:
                    log.warning("fallback mapping_ahead=when_needed reason=%s", error)
