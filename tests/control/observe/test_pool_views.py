"""A pool's parts make up its budget, and models are shown as they are there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hearth.control.observe.pool_reports import PARTS
from hearth.control.observe.pool_views import pool_parts, resident_views
from hearth.control.observe.views import PartView
from hearth.core.messages import AdapterUsage, ModelUse, Pong
from hearth.core.types import Hold, ModelId, WorkerId
from hearth.policy.fleet.residents import Resident, State

A, B = ModelId("a"), ModelId("b")
W0 = WorkerId("w0")


def use(model: ModelId, hold: Hold = Hold.BUSY, *, is_hosted: bool = True, **fields: float) -> ModelUse:
    given_ = {"weights_bytes": 100, "total_bytes": 100, "shared_bytes": 0, "kv_bytes": 0, **fields}
    return ModelUse(model, hold, is_hosted, **given_)


def pong(*uses: ModelUse, budget: int = 1000, free: int = 0, workspace: int = 0, lost: int = 0) -> Pong:
    return Pong(1, budget, free, workspace, lost, 0, {}, uses)


def resident(model: ModelId, state: State, **fields: int) -> Resident:
    given_ = {"num_bytes": 500, "loaded_bytes": 100, "total_bytes": 100, "num_running": 0, **fields}
    return Resident(model, W0, state, **given_, expires_s=12.0 if state is State.WARM else None)


def test_a_part_says_whose_it_is_what_it_holds_and_whether_it_is_in_use() -> None:
    kv = {"kv_bytes": 200, "kv_blocks": 15, "kv_used_blocks": 5, "kv_cached_blocks": 3, "block_bytes": 10}
    busy = use(A, **kv, tables_bytes=30)
    retired = use(B, Hold.RETAINED, is_hosted=False, weights_bytes=60)
    assert pool_parts(pong(retired, busy, free=550, workspace=50, lost=10)) == (
        PartView("weights", "active", "a", 100),
        PartView("kv", "active", "a", 50),
        PartView("kv", "retained", "a", 30),
        PartView("kv", "spare", "a", 120),
        PartView("tables", "active", "a", 30),
        PartView("weights", "retained", "b", 60),
        PartView("workspace", "active", None, 50),
        PartView("lost", "spare", None, 10),
        PartView("free", "spare", None, 550),
    )


def test_bytes_that_several_share_are_shown_once_and_as_nobodys_own() -> None:
    shared = [use(model, Hold.RETAINED, shared_bytes=90) for model in (A, B)]
    assert pool_parts(pong(*shared, free=890)) == (
        PartView("weights", "retained", "a", 10),
        PartView("weights", "retained", "b", 10),
        PartView("weights", "retained", None, 90),
        PartView("free", "spare", None, 890),
    )


def test_bytes_that_are_lost_are_not_taken_for_shared_ones() -> None:
    shared = [use(model, Hold.RETAINED, shared_bytes=90) for model in (A, B)]
    assert pool_parts(pong(*shared, free=880, lost=10))[2:] == (
        PartView("weights", "retained", None, 90),
        PartView("lost", "spare", None, 10),
        PartView("free", "spare", None, 880),
    )


def test_shared_bytes_are_in_use_when_one_of_those_who_share_them_is() -> None:
    told = pool_parts(
        pong(use(A, Hold.RETAINED, shared_bytes=90), use(B, Hold.WARM, shared_bytes=90), free=890)
    )
    assert PartView("weights", "active", None, 90) in told


def test_a_model_that_waits_for_its_turn_says_when_its_next_token_is_due() -> None:
    paused = use(A, is_in_turn=False, due_s=0.25)
    (view,) = resident_views([resident(A, State.PAUSED)], {W0: pong(paused)}, 10.0)
    assert (view.state, view.is_in_turn, view.due_in_s) == ("paused", False, 0.25)


@st.composite
def pongs(draw: st.DrawFn) -> Pong:
    """Draw pongs of pools whose books are right."""
    uses = []
    num_models, shared = draw(st.integers(0, 4)), draw(st.integers(0, 50))
    for number in range(num_models):
        blocks, block_bytes = draw(st.integers(0, 9)), draw(st.integers(1, 7))
        used = draw(st.integers(0, blocks))
        is_sharing = shared and num_models > 1
        uses.append(
            use(
                ModelId(f"m{number}"),
                draw(st.sampled_from(Hold)),
                is_hosted=draw(st.booleans()),
                weights_bytes=draw(st.integers(0, 100)) + (shared if is_sharing else 0),
                shared_bytes=shared if is_sharing else 0,
                block_bytes=block_bytes,
                kv_bytes=blocks * block_bytes + draw(st.integers(0, 20)),  # the sink and what is ready
                kv_blocks=blocks,
                kv_used_blocks=used,
                kv_cached_blocks=draw(st.integers(0, blocks - used)),
                tables_bytes=draw(st.integers(0, 9)),
            )
        )
    adapters = tuple(
        AdapterUsage(f"a{number}", ModelId(f"m{number % 3}"), num_bytes, num_bytes % 3, 0, is_pinned=False)
        for number, num_bytes in enumerate(draw(st.lists(st.integers(0, 40), max_size=5)))
    )
    free, workspace, lost = (draw(st.integers(0, most)) for most in (1000, 100, 30))
    own = sum(one.weights_bytes - one.shared_bytes + one.kv_bytes + one.tables_bytes for one in uses)
    once = max((one.shared_bytes for one in uses), default=0)
    budget = free + workspace + lost + own + once + sum(one.num_bytes for one in adapters)
    told = pong(*uses, budget=budget, free=free, workspace=workspace, lost=lost)
    return structs.replace(told, adapters=adapters)


@given(pongs())
def test_parts_are_of_known_kinds_and_make_up_the_budget(told: Pong) -> None:
    found = pool_parts(told)
    assert sum(part.num_bytes for part in found) == told.budget_bytes
    by_kind = {kind: sum(part.num_bytes for part in found if part.kind == kind) for kind, _ in PARTS}
    assert (by_kind["free"], by_kind["lost"]) == (told.free_bytes, told.lost_bytes)
    assert all(part.num_bytes > 0 and (part.kind, part.state) in PARTS for part in found)
    assert by_kind["adapters"] == sum(one.num_bytes for one in told.adapters)
    for one in told.models:
        own_bytes = one.weights_bytes - one.shared_bytes
        parts = (("weights", own_bytes), ("tables", one.tables_bytes), ("kv", one.kv_bytes))
        for kind, num_bytes in parts:
            of_it = {
                part.state: part.num_bytes for part in found if (part.kind, part.model) == (kind, one.model)
            }
            assert sum(of_it.values()) == num_bytes
        assert of_it.get("active", 0) == one.kv_used_blocks * one.block_bytes
        assert of_it.get("retained", 0) == one.kv_cached_blocks * one.block_bytes


def test_a_hosted_model_has_the_brains_state_and_the_pools_bytes() -> None:
    told = pong(
        use(A, Hold.BUSY, weights_bytes=70, kv_bytes=40, kv_blocks=4, kv_used_blocks=1, tables_bytes=5)
    )
    (view,) = resident_views([resident(A, State.WARM)], {W0: told}, now_s=10.0)
    assert (view.state, view.expires_in_s, view.is_hosted) == ("warm", 2.0, True)
    assert (view.loaded_bytes, view.total_bytes, view.kv_bytes, view.num_bytes) == (70, 100, 40, 115)
    assert (view.kv_used_blocks, view.kv_blocks) == (1, 4)


def test_adapters_are_folded_under_their_base_the_busiest_first() -> None:
    told = structs.replace(
        pong(use(A, weights_bytes=100)),
        adapters=(
            AdapterUsage("idle", A, 8, 0, 0, is_pinned=False),
            AdapterUsage("busy", A, 16, 2, 0, is_pinned=False),
            AdapterUsage("another's", B, 4, 0, 1, is_pinned=True),
        ),
    )
    (view,) = resident_views([], {W0: told}, 0.0)

    assert [(one.name, one.num_bytes) for one in view.adapters] == [("busy", 16), ("idle", 8)]
    parts = [part for part in pool_parts(told) if part.kind == "adapters"]
    assert {(part.state, part.model, part.num_bytes) for part in parts} == {
        ("active", A, 16),
        ("retained", A, 8),
        ("active", B, 4),
    }


def test_what_is_left_of_a_retired_model_is_shown_as_retained() -> None:
    told = pong(use(B, Hold.WARM, is_hosted=False, weights_bytes=30))
    (view,) = resident_views([], {W0: told}, now_s=10.0)
    assert (view.model, view.state, view.is_hosted, view.loaded_bytes) == ("b", "retained", False, 30)
    assert view.expires_in_s is None


def test_a_retired_model_of_which_nothing_is_left_is_not_shown() -> None:
    told = {W0: pong(use(B, is_hosted=False, weights_bytes=0))}
    assert resident_views([], told, now_s=10.0) == ()


def test_a_worker_that_has_not_told_yet_is_shown_as_the_brain_sees_it() -> None:
    (view,) = resident_views([resident(A, State.BUSY, num_running=2, max_seqs=7)], {}, now_s=10.0)
    assert (view.state, view.num_bytes, view.num_running, view.kv_blocks) == ("busy", 500, 2, 0)
    assert view.max_seqs == 7


def test_a_model_that_loads_shows_how_far_it_is() -> None:
    loading = resident(A, State.LOADING, loaded_bytes=25)
    (view,) = resident_views([loading], {W0: pong(use(A, weights_bytes=0))}, now_s=10.0)
    assert (view.state, view.loaded_bytes, view.total_bytes) == ("loading", 25, 100)


def test_a_model_that_loads_again_unasked_shows_what_has_landed() -> None:
    told = pong(use(A, weights_bytes=100, coming_bytes=40))
    (view,) = resident_views([resident(A, State.BUSY)], {W0: told}, now_s=10.0)
    assert (view.state, view.loaded_bytes, view.total_bytes) == ("busy", 60, 100)


def test_models_come_in_the_order_of_workers_and_names() -> None:
    told = {WorkerId("w1"): pong(use(A)), W0: pong(use(B), use(A))}
    assert [(view.worker, view.model) for view in resident_views([], told, 0.0)] == [
        ("w0", "a"),
        ("w0", "b"),
        ("w1", "a"),
    ]
