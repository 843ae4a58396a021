"""KV blocks and sampler tables of the models in a mapped pool."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from queue import SimpleQueue

import torch

from hearth.core.errors import DeviceError
from hearth.core.types import ModelId, SamplingTable
from hearth.memory.mapped_tenant import MappedTenant, num_pages
from hearth.memory.page_books import PageBooks
from hearth.memory.pages import Pages
from hearth.policy.memory.kv_range import KvRange

log = logging.getLogger(__name__)


class MappedKv:
    def __init__(self, books: PageBooks) -> None:
        self._books, self._table = books, books.table
        self.num_late = 0  #: runs that could not be mapped ahead
        #: Places to map ahead of their use; None ends the thread.
        self._ahead: SimpleQueue[list[int] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._map_ahead, name="hearth-pages", daemon=True)
        self._thread.start()

    def grow(
        self, model: ModelId, num_blocks: int, ahead_blocks: int = 0, max_blocks: int | None = None
    ) -> list[range]:
        """Pages that are mapped ahead for other models count as free."""
        with self._table.lock:
            tenant = self._books.tenants[model]
            assert tenant.is_placed, f"`{model}` is not placed"
            num_before, kv = tenant.num_kv_pages, tenant.kv
            if max_blocks is not None:
                kv = replace(kv, max_blocks=min(kv.max_blocks, max_blocks))
            extents = self._give_blocks(tenant, num_blocks, kv)
            given = tenant.at.kv(range(num_before, tenant.num_kv_pages))
            ahead = self._claim_ahead(tenant, ahead_blocks, kv)
        self._table.map(given)
        if ahead:
            self._ahead.put(ahead)
        return extents

    def growth_bytes(self, model: ModelId, num_blocks: int) -> int:
        """Blocks that lie on a page which the model has take none."""
        tenant = self._books.tenants[model]
        num_more = tenant.kv.num_pages(tenant.num_kv_blocks + num_blocks) - tenant.num_kv_pages
        return max(0, num_more) * tenant.page_bytes

    def shrink(self, model: ModelId, extent: range) -> None:
        with self._table.lock:
            tenant = self._books.tenants[model]
            last = tenant.last_extent
            assert last is not None, f"`{model}` has no {extent=} to give back"
            assert last.start <= extent.start < extent.stop == last.stop, f"{extent=} {last=}"
            num_kept = tenant.kv.num_pages(extent.start)
            self._books.release_kv(tenant, num_kept)
            tenant.num_kv_blocks = extent.start

    def extents(self, model: ModelId) -> list[range]:
        extent = self._books.tenants[model].last_extent
        return [] if extent is None else [extent]

    def close(self) -> None:
        self._ahead.put(None)
        self._thread.join()

    def _give_blocks(self, tenant: MappedTenant, num_blocks: int, kv: KvRange) -> list[range]:
        extents: list[range] = []
        wanted = min(tenant.num_kv_blocks + num_blocks, kv.max_blocks)
        while tenant.num_kv_blocks < wanted:
            if (end := kv.num_blocks(tenant.num_kv_pages)) == tenant.num_kv_blocks:
                num_kept = kv.one_more(tenant.num_kv_pages)
                if num_kept is None or not self._claim(tenant, num_kept):
                    break
                end = kv.num_blocks(num_kept)
            extents.append(range(tenant.num_kv_blocks, end))
            tenant.num_kv_blocks = end
        return extents

    def _claim(self, tenant: MappedTenant, num_pages: int) -> bool:
        """Raise a model's pages of KV to `num_pages`, using those mapped ahead first."""
        num_ready = min(tenant.num_ready_pages, num_pages - tenant.num_kv_pages)
        num_more = num_pages - tenant.num_kv_pages - num_ready
        if num_more > self._books.num_available - tenant.num_ready_pages:
            return False
        tenant.num_ready_pages -= num_ready
        tenant.num_kv_pages += num_ready
        self._books.make_free(num_more)
        self._table.claim(tenant.at.kv(range(tenant.num_kv_pages, num_pages)))
        tenant.num_kv_pages = num_pages
        return True

    def _claim_ahead(self, tenant: MappedTenant, ahead_blocks: int, kv: KvRange) -> list[int]:
        num_blocks = min(tenant.num_kv_blocks + ahead_blocks, kv.max_blocks)
        begin = tenant.num_kv_pages + tenant.num_ready_pages
        end = min(kv.num_pages(num_blocks), begin + self._table.num_free)
        places = tenant.at.kv(range(begin, end))
        self._table.claim(places)
        tenant.num_ready_pages += len(places)
        return places

    def _map_ahead(self) -> None:
        """Run the thread. What fails here fails again, and is reported, where the place is needed."""
        while (places := self._ahead.get()) is not None:
            try:
                self._table.map(places)
            except DeviceError as error:
                self.num_late += 1
                if self.num_late == 1:
                    log.warning("fallback mapping_ahead=when_needed reason=%s", error)


class MappedTables:
    def __init__(self, books: PageBooks, pages: Pages) -> None:
        self._books, self._pages = books, pages

    def place(self, model: ModelId, table: SamplingTable, num_bytes: int) -> torch.Tensor | None:
        """Pages that are mapped ahead for KV count as free."""
        books = self._books
        with books.table.lock:
            tenant = books.tenants[model]
            assert tenant.is_placed, f"`{model}` is not placed"
            assert table not in tenant.num_table_pages, f"`{model}` has its {table=}"
            num_wanted = num_pages(num_bytes, tenant.page_bytes)
            if num_wanted > books.num_available or num_bytes > tenant.at.space_bytes // 64:
                return None
            books.make_free(num_wanted)
            places = tenant.at.table(table, range(num_wanted))
            books.table.claim(places)
            tenant.num_table_pages[table] = num_wanted
        books.table.map(places)
        return self._pages.bytes_at(tenant.at.table_address(table), num_bytes)

    def drop(self, model: ModelId, table: SamplingTable) -> None:
        with self._books.table.lock:
            self._books.release_table(self._books.tenants[model], table)
