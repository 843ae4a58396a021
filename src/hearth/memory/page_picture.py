"""The books of mapped pages as others see them, and whether they are sound. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from hearth.memory.mapped_tenant import Tenant
from hearth.memory.page_books import PageBooks
from hearth.memory.pages import Pages
from hearth.memory.pool import Holding, Picture


def picture_of(books: PageBooks, pages: Pages, fallbacks: Mapping[str, int]) -> Picture:
    lost_bytes: dict[int, int] = {}  # behind the end of weights, by page, for it may be shared
    for tenant in books.tenants.values():
        last = tenant.num_weights_pages - 1
        if last in tenant.there or last in tenant.coming:
            (place,) = tenant.weights_places([last])
            lost_bytes[books.table.page_at(place)] = pages.page_bytes - tenant.last_stored_bytes
    shared = books.shared_weights()
    return Picture(
        budget_bytes=pages.num_pages * pages.page_bytes,
        free_bytes=books.table.num_free * pages.page_bytes,
        workspace_bytes=len(books.workspace) * pages.page_bytes,
        lost_bytes=sum(lost_bytes.values()),
        holdings=tuple(_holding(books.tenants[model], shared[model]) for model in sorted(books.tenants)),
        moved_bytes=0,
        fallbacks=fallbacks,
    )


def check(books: PageBooks) -> None:
    """Raise if what models have contradicts what is known of the pages."""
    table = books.table
    places = [place for tenant in books.tenants.values() for place in tenant.all_places()]
    assert len(places) == len(set(places)), "two models have one place"
    users = Counter(table.page_at(place) for place in places)
    shared = books.landed.all_pages() | set(books.workspace)
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


def _check_tenant(tenant: Tenant) -> None:
    assert not tenant.there & tenant.coming, f"{tenant}"
    assert all(0 <= index < tenant.num_weights_pages for index in tenant.there | tenant.coming), f"{tenant}"
    if not tenant.is_placed:
        assert tenant.num_kv_pages == tenant.num_ready_pages == tenant.num_kv_blocks == 0, f"{tenant}"
        return
    assert 1 <= tenant.num_kv_blocks <= tenant.kv.num_blocks(tenant.num_kv_pages), f"{tenant}"
    assert tenant.num_kv_pages >= tenant.kv.sink_pages, f"{tenant}"


def _holding(tenant: Tenant, shared: Collection[int]) -> Holding:
    """What is on its way counts: the memory is the model's."""
    has = tenant.there | tenant.coming
    return Holding(
        model=tenant.model,
        weights_bytes=tenant.stored_bytes(has),
        total_bytes=tenant.shape.stored.num_bytes,
        stored_bytes=tenant.stored_bytes(has),
        shared_bytes=tenant.stored_bytes(shared),
        kv_bytes=(tenant.num_kv_pages + tenant.num_ready_pages) * tenant.page_bytes,
    )
