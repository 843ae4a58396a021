"""Which model has which pages. Calls no driver.

Two kinds of pages belong at several places: chunks that models have in common, which are never written again,
and the workspace, one set for all models because only one steps at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from hearth.core.types import ChunkId, Hold, ModelId, SamplingTable
from hearth.memory.mapped_tenant import MappedTenant, num_pages, pages_of
from hearth.memory.page_table import PageTable
from hearth.memory.pages import Pages
from hearth.memory.pool import EvictionTerms, Holding, Shape
from hearth.memory.spaces import SpaceAddresses, Spaces
from hearth.policy.memory.byte_eviction import TAKEABLE, Tail


class SharedChunks:
    """Which pages hold which chunk of weights, complete and never written again. Mutable.

    Only chunks of exactly one page can be shared. A chunk may have several pages, from concurrent loads.
    """

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._pages: dict[ChunkId, set[int]] = {}

    def add(self, shape: Shape, index: int, page: int) -> None:
        if shape.chunk_bytes == self._page_bytes:
            self._pages.setdefault(shape.chunks[index], set()).add(page)

    def discard(self, shape: Shape, index: int, page: int) -> None:
        if shape.chunk_bytes == self._page_bytes:
            pages = self._pages[shape.chunks[index]]
            pages.remove(page)
            if not pages:
                del self._pages[shape.chunks[index]]

    def find(self, shape: Shape, indices: Iterable[int], excluded: Collection[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        if shape.chunk_bytes != self._page_bytes:
            return found
        taken = set(excluded)
        for index in indices:
            pages = self._pages.get(shape.chunks[index])
            if pages and (page := min(pages - taken, default=None)) is not None:
                found[index] = page
                taken.add(page)
        return found

    def all_pages(self) -> set[int]:
        return {page for pages in self._pages.values() for page in pages}


class PageBooks:
    """Mutable; written only by the pool, which holds the lock of the table."""

    def __init__(self, pages: Pages, table: PageTable, spaces: Spaces) -> None:
        self._pages = pages
        self.table = table
        self._spaces = spaces
        #: Models with addresses; those that were retired come last, in that order.
        self.tenants: dict[ModelId, MappedTenant] = {}
        self.shared_chunks = SharedChunks(pages.page_bytes)
        #: Pages of the largest workspace of a placed model.
        self.workspace: list[int] = []
        self.displaced: list[ModelId] = []  #: models whose addresses went to others

    @property
    def num_available(self) -> int:
        """Pages that are free, or mapped ahead for KV that was not given yet."""
        return self.table.num_free + sum(tenant.num_ready_pages for tenant in self.tenants.values())

    def missing_pages(self, model: ModelId, shape: Shape) -> int:
        tenant, num_available = self.tenants.get(model), self.num_available
        if tenant is not None and tenant.is_of(shape):
            missing = self._missing(tenant)
            num_needed = len(missing) - len(self._shareable(tenant, missing))
            if not tenant.is_placed:
                num_needed += self._num_rest_pages(shape, len(self.workspace))
            return max(0, num_needed - num_available)
        # Pages of another digest go first: they are neither kept nor shared.
        going = self._pages_only_of(tenant) if tenant is not None else set()
        num_available += len(going) - (tenant.num_ready_pages if tenant is not None else 0)
        indices = pages_of(shape.stored, self._pages.page_bytes)
        num_needed = len(indices) - len(self.shared_chunks.find(shape, indices, going))
        num_needed += self._num_rest_pages(shape, len([page for page in self.workspace if page not in going]))
        return max(0, num_needed - num_available)

    def _num_rest_pages(self, shape: Shape, num_workspace_pages: int) -> int:
        page_bytes = self._pages.page_bytes
        num_more = num_pages(shape.workspace_bytes, page_bytes) - num_workspace_pages
        num_own = num_pages(shape.block_bytes, page_bytes) + num_pages(shape.tables_bytes, page_bytes)
        return num_own + max(0, num_more)

    def _missing(self, tenant: MappedTenant) -> list[int]:
        if len(tenant.resident) == len(tenant.wanted) and not tenant.shape.stored.is_part:
            return []
        return [index for index in tenant.wanted if index not in tenant.resident]

    def _shareable(self, tenant: MappedTenant, missing: Sequence[int]) -> dict[int, int]:
        if not missing:
            return {}
        own = {self.table.page_at(place) for place in tenant.at.weights(tenant.resident)}
        return self.shared_chunks.find(tenant.shape, missing, own)

    def _pages_only_of(self, tenant: MappedTenant) -> set[int]:
        pages = {self.table.page_at(place) for place in tenant.all_places()}
        return {page for page in pages if all(map(tenant.at.has, self.table.places_of(page)))}

    def tenant(self, model: ModelId, shape: Shape) -> MappedTenant:
        """Return the tenant of a model; a new one replaces one of another digest or slot."""
        tenant = self.tenants.get(model)
        if tenant is not None and not tenant.is_of(shape):
            self.drop(tenant)
            tenant = None
        if tenant is None:
            if self._spaces.is_full:
                self._displace_one()
            address = self._spaces.give(model, shape.digest, shape.slot)
            weights = self._pages.bytes_at(address, shape.stored.num_bytes)
            at = SpaceAddresses(address, self._pages.space_bytes, self._pages.page_bytes)
            wanted = pages_of(shape.stored, self._pages.page_bytes)
            tenant = self.tenants[model] = MappedTenant(model, shape, at, weights, wanted)
        if tenant.shape != shape:
            assert not tenant.is_placed, f"`{model}` is placed with another shape"
            tenant.shape, tenant.space = shape, None
            tenant.wanted = pages_of(shape.stored, self._pages.page_bytes)
            needless = sorted(tenant.resident.difference(tenant.wanted))
            self.release_weights(tenant, needless, is_idle=False)
        return tenant

    def _displace_one(self) -> None:
        for tenant in self.tenants.values():
            if not tenant.is_placed and not tenant.resident and not tenant.loading:
                self.drop(tenant)
                self.displaced.append(tenant.model)
                return

    def place_weights(self, tenant: MappedTenant, most: int | None = None) -> None:
        missing = self._missing(tenant)[:most]
        shared = self._shareable(tenant, missing)
        to_load = [index for index in missing if index not in shared]
        for index, place in zip(shared, tenant.at.weights(shared), strict=True):
            self.table.share(place, shared[index])
        self.make_free(len(to_load))
        self.table.claim(tenant.at.weights(to_load))
        tenant.resident.update(shared)
        tenant.borrowed.update(shared)
        tenant.loading.update(to_load)

    def unmapped_weights(self, tenant: MappedTenant) -> list[int]:
        places = dict(zip(tenant.borrowed, tenant.at.weights(tenant.borrowed), strict=True))
        tenant.borrowed = {index for index, place in places.items() if not self.table.is_mapped(place)}
        return sorted(tenant.loading | tenant.borrowed)

    def place_rest(self, tenant: MappedTenant) -> None:
        workspace = tenant.workspace_places()
        num_shared = min(len(workspace), len(self.workspace))
        for place, page in zip(workspace[:num_shared], self.workspace, strict=False):
            self.table.share(place, page)
        sink = tenant.at.kv(range(tenant.kv.sink_pages))
        tables = tenant.tables_places()
        new = [*workspace[num_shared:], *tables, *sink]
        self.make_free(len(new))
        self.table.claim(new)
        self.workspace += [self.table.page_at(place) for place in workspace[num_shared:]]
        tenant.is_placed = True
        tenant.num_kv_pages, tenant.num_kv_blocks = len(sink), 1

    def make_free(self, num_wanted: int) -> None:
        for tenant in self.tenants.values():
            num_more = num_wanted - self.table.num_free
            if num_more > 0 and tenant.num_ready_pages:
                self._release_ready(tenant, min(num_more, tenant.num_ready_pages))

    def _release_ready(self, tenant: MappedTenant, num_released: int) -> None:
        end = tenant.num_kv_pages + tenant.num_ready_pages
        self.table.release(tenant.at.kv(reversed(range(end - num_released, end))))
        tenant.num_ready_pages -= num_released

    def end_load(self, tenant: MappedTenant, *, is_whole: bool) -> None:
        indices = sorted(tenant.loading)
        places = tenant.at.weights(indices)
        tenant.loading.clear()
        if not is_whole:
            self.table.release(places)
            return
        tenant.resident.update(indices)
        for index, place in zip(indices, places, strict=True):
            self.shared_chunks.add(tenant.shape, index, self.table.page_at(place))

    def release_kv(self, tenant: MappedTenant, num_kept: int) -> None:
        self._release_ready(tenant, tenant.num_ready_pages)
        self.table.release(tenant.at.kv(reversed(range(num_kept, tenant.num_kv_pages))))
        tenant.num_kv_pages = num_kept

    def release_weights(self, tenant: MappedTenant, indices: Sequence[int], *, is_idle: bool) -> int:
        """Release pages of weights; return how many came free. `is_idle`: no step in flight reads them."""
        places = tenant.at.weights(indices)
        for index, place in zip(indices, places, strict=True):
            page = self.table.page_at(place)
            if len(self.table.places_of(page)) == 1:
                self.shared_chunks.discard(tenant.shape, index, page)
        tenant.resident.difference_update(indices)
        tenant.borrowed.difference_update(indices)
        return self.table.release(places, is_idle=is_idle)

    def release_table(self, tenant: MappedTenant, table: SamplingTable) -> None:
        self.table.release(tenant.at.table(table, range(tenant.num_table_pages.pop(table))))

    def retire(self, tenant: MappedTenant) -> None:
        if not tenant.is_placed:
            return
        for table in list(tenant.num_table_pages):
            self.release_table(tenant, table)
        self.release_kv(tenant, 0)
        self.table.release(tenant.tables_places())
        self.table.release(tenant.workspace_places())
        tenant.is_placed, tenant.num_kv_blocks = False, 0
        self.tenants[tenant.model] = self.tenants.pop(tenant.model)
        del self.workspace[self._max_workspace_pages() :]

    def drop(self, tenant: MappedTenant) -> None:
        self.retire(tenant)
        self.table.release(tenant.at.weights(sorted(tenant.loading)))
        self.release_weights(tenant, sorted(tenant.resident, reverse=True), is_idle=True)
        del self.tenants[tenant.model]
        self._spaces.take_back(tenant.at.begin)

    def _max_workspace_pages(self) -> int:
        placed = (tenant for tenant in self.tenants.values() if tenant.is_placed)
        return max((len(tenant.workspace_places()) for tenant in placed), default=0)

    def check(self, piece_places: Sequence[int]) -> None:
        table = self.table
        places = [place for tenant in self.tenants.values() for place in tenant.all_places()]
        places += piece_places
        assert len(places) == len(set(places)), "two models have one place"
        users = Counter(table.page_at(place) for place in places)
        shared = self.shared_chunks.all_pages() | set(self.workspace)
        for page in range(table.num_pages):
            num_users = len(table.places_of(page))
            assert num_users == users[page], f"{page=} {num_users=} {users[page]=}"
            assert num_users <= 1 or page in shared, f"{page=} is shared, but neither a chunk nor workspace"
        assert users.keys() >= shared, f"neither free nor owned: {shared - users.keys()}"
        for tenant in self.tenants.values():
            own = [table.page_at(place) for place in tenant.all_places()]
            assert len(own) == len(set(own)), f"`{tenant.model}` has a page twice"
            _check_tenant(tenant)
            workspace = tenant.workspace_places() if tenant.is_placed else []
            assert [table.page_at(place) for place in workspace] == self.workspace[: len(workspace)]
        assert len(self.workspace) == self._max_workspace_pages(), f"{len(self.workspace)=}"


def _check_tenant(tenant: MappedTenant) -> None:
    assert not tenant.resident & tenant.loading, f"{tenant}"
    assert (tenant.resident | tenant.loading).issubset(tenant.wanted), f"{tenant}"
    if not tenant.is_placed:
        assert tenant.num_kv_pages == tenant.num_ready_pages == tenant.num_kv_blocks == 0, f"{tenant}"
        assert not tenant.num_table_pages, f"{tenant}"
        return
    assert 1 <= tenant.num_kv_blocks <= tenant.kv.num_blocks(tenant.num_kv_pages), f"{tenant}"
    assert tenant.num_kv_pages >= tenant.kv.sink_pages, f"{tenant}"


def lost_weights_bytes(books: PageBooks) -> int:
    lost_bytes: dict[int, int] = {}
    for tenant in books.tenants.values():
        last = tenant.last_page
        if last in tenant.resident or last in tenant.loading:
            (place,) = tenant.at.weights([last])
            lost_bytes[books.table.page_at(place)] = tenant.page_bytes - tenant.last_stored_bytes
    return sum(lost_bytes.values())


def _shared_weights(books: PageBooks) -> dict[ModelId, dict[int, int]]:
    tenants = sorted(books.tenants.values(), key=lambda tenant: tenant.at.begin)
    addresses = [tenant.at.begin for tenant in tenants]
    shared: dict[ModelId, dict[int, int]] = {tenant.model: {} for tenant in tenants}
    for page in books.table.shared.difference(books.workspace):
        for place in books.table.places_of(page):
            tenant = tenants[bisect_right(addresses, place) - 1]
            shared[tenant.model][tenant.at.weights_index(place)] = page
    return shared


def holdings_of(books: PageBooks) -> tuple[Holding, ...]:
    shared = _shared_weights(books)
    return tuple(_holding(books.tenants[model], shared[model]) for model in sorted(books.tenants))


def _holding(tenant: MappedTenant, shared: Collection[int]) -> Holding:
    """Pages that are being loaded count."""
    has = tenant.resident | tenant.loading
    num_table_pages = sum(tenant.num_table_pages.values())
    num_table_pages += len(tenant.tables_places()) if tenant.is_placed else 0
    return Holding(
        model=tenant.model,
        weights_bytes=tenant.stored_bytes(has),
        total_bytes=tenant.stored_bytes(tenant.wanted),
        stored_bytes=tenant.stored_bytes(has),
        shared_bytes=tenant.stored_bytes(shared),
        kv_bytes=(tenant.num_kv_pages + tenant.num_ready_pages) * tenant.page_bytes,
        tables_bytes=num_table_pages * tenant.page_bytes,
    )


def tails_of(
    books: PageBooks, terms_by_model: Mapping[ModelId, EvictionTerms], hold: Hold, below_s_per_byte: float
) -> list[Tail]:
    """Return what each model with this hold would free, page by page, in the order of eviction.

    Only models with terms that are not loading and whose reload cost is less than `below_s_per_byte`.
    """
    assert hold in TAKEABLE, f"weights are never taken at {hold=}"
    costs = {
        model: terms.cost_s_per_byte
        for model, terms in terms_by_model.items()
        if terms.hold == hold and not terms.is_loading and terms.cost_s_per_byte < below_s_per_byte
    }
    if not costs:
        return []
    shared = _shared_weights(books)
    last = _last_owners(shared, costs)
    return [
        Tail(model, hold, cost, _units(books.tenants[model], shared[model], last))
        for model, cost in costs.items()
    ]


def _last_owners(
    shared: Mapping[ModelId, Mapping[int, int]], costs: Mapping[ModelId, float]
) -> dict[int, ModelId | None]:
    """Return for each shared page the last of its models to be evicted; None: one of them may not be."""
    last: dict[int, ModelId | None] = {}
    for model, pages in shared.items():
        for page in pages.values():
            other = last.get(page, model)
            if model not in costs or other is None:
                last[page] = None
            else:
                last[page] = max(model, other, key=lambda owner: (costs[owner], owner))
    return last


def _units(
    tenant: MappedTenant, shared: Mapping[int, int], last: Mapping[int, ModelId | None]
) -> tuple[int, ...]:
    units = dict.fromkeys(sorted(tenant.resident, reverse=True), tenant.page_bytes)
    units.update((index, 0) for index, page in shared.items() if last[page] != tenant.model)
    return tuple(units.values())
