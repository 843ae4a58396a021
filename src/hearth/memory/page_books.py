"""Which model has which pages, and what has to be given up before another can have them. Calls no driver.

Two kinds of pages belong at several places: chunks that models have in common, which nobody writes again,
and the workspace, one set for all models, for only one steps at a time. Pieces of adapters share pages in a
space that is no model's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hearth.core.types import AdapterId, Hold, ModelId, SamplingTable
from hearth.memory.mapped_tenant import MappedTenant, num_pages
from hearth.memory.page_table import PageTable
from hearth.memory.pages import Mark, Pages
from hearth.memory.piece_book import PieceBook, PiecePlan
from hearth.memory.pool import EvictionTerms, Holding, PoolUsage, Shape
from hearth.memory.shared_chunks import SharedChunks
from hearth.memory.spaces import Spaces
from hearth.policy.memory.eviction import TAKEABLE, Tail


@dataclass(frozen=True, slots=True)
class UnreadyPieces:
    """Waits and mappings that come before pieces of an adapter are written."""

    marks: tuple[Mark, ...]  #: to be waited for: others had the memory until then
    places: tuple[int, ...]  #: to be made real


class PageBooks:
    """Mutable; written only by the pool, with the lock of the table held."""

    def __init__(self, pages: Pages, table: PageTable, spaces: Spaces) -> None:
        self._pages = pages
        self.table = table
        self._spaces = spaces
        #: Models that have anything here; those that compute no more come last, in the order they ended.
        self.tenants: dict[ModelId, MappedTenant] = {}
        self.shared_chunks = SharedChunks(pages.page_bytes)
        #: As many pages as the largest workspace of a placed model has.
        self.workspace: list[int] = []
        self.displaced: list[ModelId] = []  #: models whose addresses went to others
        self.pieces = PieceBook(pages.page_bytes, pages.space_bytes // pages.page_bytes)
        self._pieces_address: int | None = None  #: of their space; None: there never were any
        #: By slot on which pieces were given up and others are: what the device had queued then.
        self._left_pieces: dict[int, Mark] = {}

    def missing_pages(self, model: ModelId, shape: Shape) -> int:
        tenant = self.tenants.get(model)
        num_available = self.table.num_free + sum(one.num_ready_pages for one in self.tenants.values())
        if tenant is not None and tenant.is_of(shape):
            missing = self._missing(tenant)
            num_needed = len(missing) - len(self._shareable(tenant, missing))
            if not tenant.is_placed:
                num_needed += self._num_rest_pages(shape, len(self.workspace))
            return max(0, num_needed - num_available)
        # What the model has of another digest goes first: it is neither kept nor shared with.
        going = self._pages_only_of(tenant) if tenant is not None else set()
        num_available += len(going) - (tenant.num_ready_pages if tenant is not None else 0)
        indices = range(num_pages(shape.stored.num_bytes, self._pages.page_bytes))
        num_needed = len(indices) - len(self.shared_chunks.find(shape, indices, going))
        num_needed += self._num_rest_pages(shape, len([page for page in self.workspace if page not in going]))
        return max(0, num_needed - num_available)

    def _num_rest_pages(self, shape: Shape, num_workspace_pages: int) -> int:
        """Return the pages for sink and tables, and for what a workspace has beyond that of all others."""
        page_bytes = self._pages.page_bytes
        num_more = num_pages(shape.workspace_bytes, page_bytes) - num_workspace_pages
        num_own = num_pages(shape.block_bytes, page_bytes) + num_pages(shape.tables_bytes, page_bytes)
        return num_own + max(0, num_more)

    def _missing(self, tenant: MappedTenant) -> list[int]:
        if len(tenant.there) == tenant.num_weights_pages:
            return []
        return [index for index in range(tenant.num_weights_pages) if index not in tenant.there]

    def _shareable(self, tenant: MappedTenant, missing: Sequence[int]) -> dict[int, int]:
        """Return pages of others for what a model lacks, by index."""
        if not missing:
            return {}
        own = {self.table.page_at(place) for place in tenant.weights_places(tenant.there)}
        return self.shared_chunks.find(tenant.shape, missing, own)

    def _pages_only_of(self, tenant: MappedTenant) -> set[int]:
        """Return the pages that come free when a model goes."""
        pages = {self.table.page_at(place) for place in tenant.all_places()}
        return {page for page in pages if all(map(tenant.has, self.table.places_of(page)))}

    def tenant(self, model: ModelId, shape: Shape) -> MappedTenant:
        """Return the model's own, if it has the same digest and slot; else a new one in its place."""
        tenant = self.tenants.get(model)
        if tenant is not None and not tenant.is_of(shape):
            self.drop(tenant)
            tenant = None
        if tenant is None:
            if self._spaces.is_full:
                self._displace_one()
            address = self._spaces.give(model, shape.digest, shape.slot)
            weights = self._pages.bytes_at(address, shape.stored.num_bytes)
            tenant = MappedTenant(
                model, shape, address, self._pages.space_bytes, self._pages.page_bytes, weights
            )
            self.tenants[model] = tenant
        if tenant.shape != shape:
            assert not tenant.is_placed, f"`{model}` is placed with another shape"
            tenant.shape, tenant.space = shape, None
        return tenant

    def has_addresses(self, model: ModelId, shape: Shape) -> bool:
        """True if a model of this digest has addresses, or can have some that nobody else has."""
        tenant = self.tenants.get(model)
        if tenant is not None:
            return tenant.is_of(shape)
        return not self._spaces.is_full

    def _displace_one(self) -> None:
        """Take the addresses of the model that computed longest ago, of those that have nothing else."""
        for tenant in self.tenants.values():
            if not tenant.is_placed and not tenant.there and not tenant.coming:
                self.drop(tenant)
                self.displaced.append(tenant.model)
                return

    def place_weights(self, tenant: MappedTenant, most: int | None = None) -> None:
        """Give a model a page for each part of its weights, or for at most so many that it lacks, first ones
        first; whoever needs one to be there maps it."""
        missing = self._missing(tenant)[:most]
        shared = self._shareable(tenant, missing)
        to_load = [index for index in missing if index not in shared]
        for index, place in zip(shared, tenant.weights_places(shared), strict=True):
            self.table.share(place, shared[index])
        self._make_free(len(to_load))
        self.table.claim(tenant.weights_places(to_load))
        tenant.there.update(shared)
        tenant.borrowed.update(shared)
        tenant.coming.update(to_load)

    def unreal_weights(self, tenant: MappedTenant) -> list[int]:
        """Return the indices of pages that are coming, or are another model's and still to be mapped."""
        places = dict(zip(tenant.borrowed, tenant.weights_places(tenant.borrowed), strict=True))
        tenant.borrowed = {index for index, place in places.items() if not self.table.is_real(place)}
        return sorted(tenant.coming | tenant.borrowed)

    def place_rest(self, tenant: MappedTenant) -> None:
        """Give a model its workspace, tables and sink, at its `rest_places`."""
        workspace = tenant.workspace_places(range(tenant.num_workspace_pages))
        num_shared = min(len(workspace), len(self.workspace))
        for place, page in zip(workspace[:num_shared], self.workspace, strict=False):
            self.table.share(place, page)
        sink = tenant.kv_places(range(tenant.kv.sink_pages))
        tables = tenant.tables_places()
        new = [*workspace[num_shared:], *tables, *sink]
        self._make_free(len(new))
        self.table.claim(new)
        self.workspace += [self.table.page_at(place) for place in workspace[num_shared:]]
        tenant.is_placed = True
        tenant.num_kv_pages, tenant.num_kv_blocks = len(sink), 1

    def _make_free(self, num_wanted: int) -> None:
        """Have so many pages be free, if need be those that are only ready to be given."""
        for tenant in self.tenants.values():
            num_more = num_wanted - self.table.num_free
            if num_more > 0 and tenant.num_ready_pages:
                self._leave_ready(tenant, min(num_more, tenant.num_ready_pages))

    def _leave_ready(self, tenant: MappedTenant, num_left: int) -> None:
        """Give up so many pages from the end."""
        end = tenant.num_kv_pages + tenant.num_ready_pages
        self.table.leave(tenant.kv_places(reversed(range(end - num_left, end))))
        tenant.num_ready_pages -= num_left

    def shared_weights(self) -> dict[ModelId, dict[int, int]]:
        """Return the pages of weights that several models have, for each of them by index."""
        tenants = sorted(self.tenants.values(), key=lambda tenant: tenant.address)
        addresses = [tenant.address for tenant in tenants]
        shared: dict[ModelId, dict[int, int]] = {tenant.model: {} for tenant in tenants}
        for page in self.table.shared.difference(self.workspace):
            for place in self.table.places_of(page):
                tenant = tenants[bisect_right(addresses, place) - 1]
                shared[tenant.model][tenant.weights_index(place)] = page
        return shared

    def end_load(self, tenant: MappedTenant, *, is_whole: bool) -> None:
        indices = sorted(tenant.coming)
        places = tenant.weights_places(indices)
        tenant.coming.clear()
        if not is_whole:
            self.table.leave(places)
            return
        tenant.there.update(indices)
        for index, place in zip(indices, places, strict=True):
            self.shared_chunks.add(tenant.shape, index, self.table.page_at(place))

    def shrink(self, tenant: MappedTenant, extent: range) -> None:
        num_kept = tenant.kv.one_less(tenant.num_kv_pages)
        assert num_kept is not None, f"`{tenant.model}` has no {extent=} to give back"
        self._leave_kv(tenant, num_kept)
        tenant.num_kv_blocks = extent.start

    def _leave_kv(self, tenant: MappedTenant, num_kept: int) -> None:
        """Give up all pages behind the first so many."""
        self._leave_ready(tenant, tenant.num_ready_pages)
        self.table.leave(tenant.kv_places(reversed(range(num_kept, tenant.num_kv_pages))))
        tenant.num_kv_pages = num_kept

    def leave_weights(self, tenant: MappedTenant, indices: Sequence[int], *, is_idle: bool) -> int:
        """Give up pages of weights; return how many came free. `is_idle`: no step in flight reads them."""
        places = tenant.weights_places(indices)
        for index, place in zip(indices, places, strict=True):
            page = self.table.page_at(place)
            if len(self.table.places_of(page)) == 1:
                self.shared_chunks.discard(tenant.shape, index, page)
        tenant.there.difference_update(indices)
        tenant.borrowed.difference_update(indices)
        return self.table.leave(places, is_idle=is_idle)

    def give_blocks(self, tenant: MappedTenant, num_blocks: int) -> list[range]:
        extents: list[range] = []
        wanted = tenant.num_kv_blocks + num_blocks
        while tenant.num_kv_blocks < wanted:
            if (end := tenant.kv.num_blocks(tenant.num_kv_pages)) == tenant.num_kv_blocks:
                num_kept = tenant.kv.one_more(tenant.num_kv_pages)
                if num_kept is None or not self._claim_kv(tenant, num_kept):
                    break
                end = tenant.kv.num_blocks(num_kept)
            extents.append(range(tenant.num_kv_blocks, end))
            tenant.num_kv_blocks = end
        return extents

    def _claim_kv(self, tenant: MappedTenant, num_pages: int) -> bool:
        """Have so many pages of KV, the ready ones first; False: memory is short, and nothing has changed."""
        num_ready = min(tenant.num_ready_pages, num_pages - tenant.num_kv_pages)
        num_more = num_pages - tenant.num_kv_pages - num_ready
        num_ready_elsewhere = sum(one.num_ready_pages for one in self.tenants.values() if one is not tenant)
        if num_more > self.table.num_free + num_ready_elsewhere:
            return False
        tenant.num_ready_pages -= num_ready
        tenant.num_kv_pages += num_ready
        self._make_free(num_more)
        self.table.claim(tenant.kv_places(range(tenant.num_kv_pages, num_pages)))
        tenant.num_kv_pages = num_pages
        return True

    def claim_ahead(self, tenant: MappedTenant, ahead_blocks: int) -> list[int]:
        """Have free pages be ready for a model; return the places to be mapped in the background."""
        num_blocks = min(tenant.num_kv_blocks + ahead_blocks, tenant.shape.max_blocks)
        begin = tenant.num_kv_pages + tenant.num_ready_pages
        end = min(tenant.kv.num_pages(num_blocks), begin + self.table.num_free)
        places = tenant.kv_places(range(begin, end))
        self.table.claim(places)
        tenant.num_ready_pages += len(places)
        return places

    def extents(self, tenant: MappedTenant) -> list[range]:
        num_left = tenant.kv.one_less(tenant.num_kv_pages) if tenant.is_placed else None
        return [] if num_left is None else [range(tenant.kv.num_blocks(num_left), tenant.num_kv_blocks)]

    def claim_table(self, tenant: MappedTenant, table: SamplingTable, num_bytes: int) -> list[int] | None:
        """Have pages for a table of the sampler; return their places. None: memory or addresses are short."""
        assert table not in tenant.num_table_pages, f"`{tenant.model}` has its {table=}"
        num_wanted = num_pages(num_bytes, tenant.page_bytes)
        num_available = self.table.num_free + sum(one.num_ready_pages for one in self.tenants.values())
        if num_wanted > num_available or num_bytes > tenant.space_bytes // 64:
            return None
        self._make_free(num_wanted)
        places = tenant.table_places(table, range(num_wanted))
        self.table.claim(places)
        tenant.num_table_pages[table] = num_wanted
        return places

    def leave_table(self, tenant: MappedTenant, table: SamplingTable) -> None:
        self.table.leave(tenant.table_places(table, range(tenant.num_table_pages.pop(table))))

    def claim_pieces(self, owner: AdapterId, sizes: Sequence[int], spare_bytes: int) -> PiecePlan | None:
        """Have pages for the pieces of an adapter; None: memory is short, and nothing has changed."""
        num_available = self.table.num_free + sum(one.num_ready_pages for one in self.tenants.values())
        num_spare = num_pages(spare_bytes, self._pages.page_bytes)
        plan = self.pieces.plan(sizes, max(0, num_available - num_spare))
        if plan is None:
            return None
        if self._pieces_address is None:
            self._pieces_address = self._spaces.give_common()
        self._make_free(len(plan.new_slots))
        self.table.claim(self._piece_places(plan.new_slots))
        self.pieces.take(owner, plan)
        return plan

    @property
    def pieces_address(self) -> int:
        """Where the space of pieces begins."""
        assert self._pieces_address is not None, "there never were any pieces"
        return self._pieces_address

    def unready_pieces(self, owner: AdapterId) -> UnreadyPieces:
        """Return what has to happen before the pieces of an adapter are written."""
        slots = self.pieces.slots_of(owner)
        places = self._piece_places(slots)
        left = [mark for slot in slots if (mark := self._left_pieces.get(slot)) is not None]
        marks = {id(mark): mark for mark in (*left, *self.table.marks_of(places))}
        unreal = () if all(map(self.table.is_only_there, places)) else tuple(places)
        return UnreadyPieces(tuple(marks.values()), unreal)

    def leave_pieces(self, owner: AdapterId, last_read: Mark | None) -> None:
        """Give up the pieces of an adapter, and the pages that have no others. `last_read`: see `Pool`."""
        slots = self.pieces.slots_of(owner)
        empty = self.pieces.give(owner)
        is_idle = last_read is not None and last_read.has_passed()
        idle = [slot for slot in empty if is_idle and self._is_idle(slot)]
        self.table.leave(self._piece_places(idle), is_idle=True)
        self.table.leave(self._piece_places([slot for slot in empty if slot not in idle]))
        if not is_idle:
            mark = self._pages.mark()
            self._left_pieces.update((slot, mark) for slot in slots if slot not in empty)
        for slot in empty:
            self._left_pieces.pop(slot, None)

    def _is_idle(self, slot: int) -> bool:
        """True if the device is done with all pieces of a slot that were given up before."""
        mark = self._left_pieces.get(slot)
        return mark is None or mark.has_passed()

    def _piece_places(self, slots: Sequence[int]) -> list[int]:
        base, page_bytes = self.pieces_address, self._pages.page_bytes
        return [base + slot * page_bytes for slot in slots]

    def all_piece_places(self) -> list[int]:
        """Return the places of all pages that have pieces."""
        return self._piece_places(sorted(self.pieces.slots)) if self.pieces.slots else []

    def retire(self, tenant: MappedTenant) -> None:
        if not tenant.is_placed:
            return
        for table in list(tenant.num_table_pages):
            self.leave_table(tenant, table)
        self._leave_kv(tenant, 0)
        self.table.leave(tenant.tables_places())
        self.table.leave(tenant.workspace_places(range(tenant.num_workspace_pages)))
        tenant.is_placed, tenant.num_kv_blocks = False, 0
        self.tenants[tenant.model] = self.tenants.pop(tenant.model)
        num_kept = max((one.num_workspace_pages for one in self.tenants.values() if one.is_placed), default=0)
        del self.workspace[num_kept:]

    def drop(self, tenant: MappedTenant) -> None:
        self.retire(tenant)
        self.table.leave(tenant.weights_places(sorted(tenant.coming)))
        self.leave_weights(tenant, sorted(tenant.there, reverse=True), is_idle=True)
        del self.tenants[tenant.model]
        self._spaces.take_back(tenant.address)


def usage_of(books: PageBooks, pages: Pages, fallbacks: Mapping[str, int]) -> PoolUsage:
    """Return the books as others see them."""
    lost_bytes: dict[int, int] = {}  # behind the end of weights, by page, for it may be shared
    for tenant in books.tenants.values():
        last = tenant.num_weights_pages - 1
        if last in tenant.there or last in tenant.coming:
            (place,) = tenant.weights_places([last])
            lost_bytes[books.table.page_at(place)] = pages.page_bytes - tenant.last_stored_bytes
    shared, pieces_bytes = books.shared_weights(), books.pieces.bytes_by_owner()
    unused_bytes = len(books.pieces.slots) * pages.page_bytes - sum(pieces_bytes.values())
    return PoolUsage(
        budget_bytes=pages.num_pages * pages.page_bytes,
        free_bytes=books.table.num_free * pages.page_bytes,
        workspace_bytes=len(books.workspace) * pages.page_bytes,
        lost_bytes=sum(lost_bytes.values()) + unused_bytes,
        holdings=tuple(_holding(books.tenants[model], shared[model]) for model in sorted(books.tenants)),
        pieces_bytes=pieces_bytes,
        moved_bytes=0,
        fallbacks=fallbacks,
    )


def check_books(books: PageBooks) -> None:
    """Raise if what models have contradicts what is known of the pages."""
    table = books.table
    places = [place for tenant in books.tenants.values() for place in tenant.all_places()]
    places += books.all_piece_places()
    books.pieces.check()
    assert len(places) == len(set(places)), "two models have one place"
    users = Counter(table.page_at(place) for place in places)
    shared = books.shared_chunks.all_pages() | set(books.workspace)
    for page in range(table.num_pages):
        num_users = len(table.places_of(page))
        assert num_users == users[page], f"{page=} {num_users=} {users[page]=}"
        assert num_users <= 1 or page in shared, f"{page=} is shared, but neither a chunk nor workspace"
    assert users.keys() >= shared, f"neither free nor anybody's: {shared - users.keys()}"
    for tenant in books.tenants.values():
        own = [table.page_at(place) for place in tenant.all_places()]
        assert len(own) == len(set(own)), f"`{tenant.model}` has a page twice"
        _check_tenant(tenant)
        workspace = tenant.workspace_places(range(tenant.num_workspace_pages if tenant.is_placed else 0))
        assert [table.page_at(place) for place in workspace] == books.workspace[: len(workspace)]
    placed = [tenant.num_workspace_pages for tenant in books.tenants.values() if tenant.is_placed]
    assert len(books.workspace) == max(placed, default=0), f"{len(books.workspace)=} {placed=}"


def _check_tenant(tenant: MappedTenant) -> None:
    assert not tenant.there & tenant.coming, f"{tenant}"
    assert all(0 <= index < tenant.num_weights_pages for index in tenant.there | tenant.coming), f"{tenant}"
    if not tenant.is_placed:
        assert tenant.num_kv_pages == tenant.num_ready_pages == tenant.num_kv_blocks == 0, f"{tenant}"
        assert not tenant.num_table_pages, f"{tenant}"
        return
    assert 1 <= tenant.num_kv_blocks <= tenant.kv.num_blocks(tenant.num_kv_pages), f"{tenant}"
    assert tenant.num_kv_pages >= tenant.kv.sink_pages, f"{tenant}"


def _holding(tenant: MappedTenant, shared: Collection[int]) -> Holding:
    """Return what a model has; what is on its way counts, for the memory is the model's."""
    has = tenant.there | tenant.coming
    num_table_pages = sum(tenant.num_table_pages.values())
    num_table_pages += tenant.num_tables_pages if tenant.is_placed else 0
    return Holding(
        model=tenant.model,
        weights_bytes=tenant.stored_bytes(has),
        total_bytes=tenant.shape.stored.num_bytes,
        stored_bytes=tenant.stored_bytes(has),
        shared_bytes=tenant.stored_bytes(shared),
        kv_bytes=(tenant.num_kv_pages + tenant.num_ready_pages) * tenant.page_bytes,
        tables_bytes=num_table_pages * tenant.page_bytes,
    )


def tails_of(
    books: PageBooks, terms_by_model: Mapping[ModelId, EvictionTerms], hold: Hold, below_s_per_byte: float
) -> list[Tail]:
    """Return what each model that is held so would free, page by page, unless somebody writes its bytes.

    Only those of models with terms, whose reload cost is less than `below_s_per_byte`.
    """
    assert hold in TAKEABLE, f"never to be taken from: {hold=}"
    costs = {
        model: terms.cost_s_per_byte
        for model, terms in terms_by_model.items()
        if terms.hold == hold and not terms.is_loading and terms.cost_s_per_byte < below_s_per_byte
    }
    if not costs:
        return []
    shared = books.shared_weights()
    last = _last_owners(shared, costs)
    return [
        Tail(model, hold, cost, _units(books.tenants[model], shared[model], last))
        for model, cost in costs.items()
    ]


def _last_owners(
    shared: Mapping[ModelId, Mapping[int, int]], costs: Mapping[ModelId, float]
) -> dict[int, ModelId | None]:
    """Return with whom each page comes free that several models have.

    That is the last of them: where all may be taken from the dearest, for the others go before; else None.
    """
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
    units = dict.fromkeys(sorted(tenant.there, reverse=True), tenant.page_bytes)
    units.update((index, 0) for index, page in shared.items() if last[page] != tenant.model)
    return tuple(units.values())
