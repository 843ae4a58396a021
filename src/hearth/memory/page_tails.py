"""What the tails of models would free, page by page, for the policy that chooses. Takes nothing itself."""

from __future__ import annotations

from collections.abc import Mapping

from hearth.memory.mapped_tenant import Tenant
from hearth.memory.page_books import PageBooks
from hearth.memory.pool import EvictionTermsOf
from hearth.policy.memory.eviction import Tail
from hearth.types import Hold, ModelId


def tails_of(books: PageBooks, regard: EvictionTermsOf, hold: Hold) -> list[Tail]:
    """Of the models that are held so, and whose bytes nobody is writing."""
    assert hold <= Hold.WARM, f"never to be taken from: {hold=}"
    regards = {model: regard(model) for model, tenant in books.tenants.items() if not tenant.coming}
    costs = {
        model: regard.cost_s_per_byte
        for model, regard in regards.items()
        if regard.hold == hold and not regard.is_loading
    }
    shared = books.shared_weights()
    last = _last_owners(shared, costs)
    return [
        Tail(model, hold, cost, _units(books.tenants[model], shared[model], last))
        for model, cost in costs.items()
    ]


def _last_owners(
    shared: Mapping[ModelId, Mapping[int, int]], costs: Mapping[ModelId, float]
) -> dict[int, ModelId | None]:
    """A page that several models have comes free with the last of them. Where all of them may be taken from
    that is the dearest, for the others go before; else it is None."""
    last: dict[int, ModelId | None] = {}
    for model, pages in shared.items():
        for page in pages.values():
            other = last.get(page, model)
            if model not in costs or other is None:
                last[page] = None
            else:
                last[page] = max(model, other, key=lambda owner: (costs[owner], owner))
    return last


def _units(tenant: Tenant, shared: Mapping[int, int], last: Mapping[int, ModelId | None]) -> tuple[int, ...]:
    units = dict.fromkeys(sorted(tenant.there, reverse=True), tenant.page_bytes)
    units.update((index, 0) for index, page in shared.items() if last[page] != tenant.model)
    return tuple(units.values())
