"""Promised bytes against a plain list of replicas, and the ranked workers against a search through all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import Hold, ModelId, WorkerId
from hearth.policy.fleet.capacity import FleetCapacity, Promises
from hearth.policy.fleet.profile import Footprint, ModelProfile, Promise

BUDGET_BYTES = 1000
PROMISES = st.builds(
    lambda own_bytes, workspace_bytes, share: Promise(own_bytes, workspace_bytes, own_bytes * share // 4),
    st.integers(0, 100),
    st.sampled_from([0, 10, 30, 31, 60]),
    st.integers(0, 4),
)
HELD = st.lists(st.tuples(PROMISES, st.sampled_from(Hold)), max_size=8)
WORKERS = st.lists(st.tuples(st.sampled_from(["cpu", "cuda"]), HELD, st.integers(1, 1000)), max_size=6)
NEEDS = st.dictionaries(st.sampled_from(["cpu", "cuda", "other"]), PROMISES.map(lambda p: footprint_of(p)))


def footprint_of(promise: Promise, more_bytes: int = 0) -> Footprint:
    workspace_bytes = promise.workspace_bytes
    all_bytes = promise.own_bytes + more_bytes + workspace_bytes
    return Footprint(all_bytes, 0, 0, workspace_bytes, tables_bytes=promise.standing_bytes)


def promised(
    held: list[tuple[Promise, Hold]], budget_bytes: int = BUDGET_BYTES, *, shares_workspace: bool = True
) -> Promises:
    promises = Promises(budget_bytes, shares_workspace)
    for promise, hold in held:
        promises.add(promise, hold)
    return promises


def add_up(promises: list[Promise], *, shares_workspace: bool = True) -> int:
    """Add up promises as a person would: what each has for itself, and one workspace, or each its own."""
    workspaces = [one.workspace_bytes for one in promises]
    workspace_bytes = max(workspaces, default=0) if shares_workspace else sum(workspaces)
    return sum(one.own_bytes for one in promises) + workspace_bytes


def test_models_share_one_workspace_as_large_as_the_largest_needs() -> None:
    promises = promised([(Promise(100, 30), Hold.BUSY), (Promise(200, 60), Hold.WARM)])
    assert promises.free_bytes == BUDGET_BYTES - 300 - 60
    assert promises.freeable_bytes(Hold.WARM) == BUDGET_BYTES - 100 - 30
    assert promises.has_room(footprint_of(Promise(640, 60)))
    assert not promises.has_room(footprint_of(Promise(640, 61)))


def test_where_the_pool_cannot_share_a_workspace_each_model_is_charged_its_own() -> None:
    held = [(Promise(100, 30), Hold.BUSY), (Promise(200, 60), Hold.WARM)]
    promises = promised(held, shares_workspace=False)
    assert promises.free_bytes == BUDGET_BYTES - 300 - 90
    assert promises.has_room(footprint_of(Promise(550, 60)))
    assert not promises.has_room(footprint_of(Promise(551, 60)))


@given(HELD, st.sampled_from(Hold), PROMISES, st.booleans())
def test_a_model_has_room_exactly_if_all_promises_together_fit(
    held: list[tuple[Promise, Hold]], most: Hold, newcomer: Promise, shares_workspace: bool
) -> None:
    promises = promised(held, shares_workspace=shares_workspace)
    owed_bytes = partial(add_up, shares_workspace=shares_workspace)
    kept = [promise for promise, hold in held if hold > most]
    assert promises.free_bytes == BUDGET_BYTES - owed_bytes([promise for promise, _ in held])
    assert promises.freeable_bytes(most) == BUDGET_BYTES - owed_bytes(kept)
    for more_bytes in (0, BUDGET_BYTES - owed_bytes([*kept, newcomer]) + 1):
        larger = Promise(newcomer.own_bytes + more_bytes, newcomer.workspace_bytes)
        fits = owed_bytes([*kept, larger]) <= BUDGET_BYTES
        assert promises.has_room(footprint_of(larger), most) == fits
    everybody = [*(promise for promise, _ in held), newcomer]
    assert promises.has_room(footprint_of(newcomer)) == (owed_bytes(everybody) <= BUDGET_BYTES)
    assert 0.0 <= promises.utilisation <= 1.0


@given(HELD, PROMISES, st.booleans())
def test_everybody_can_take_turns_if_each_has_room_beside_pinned_ones_and_what_others_keep(
    held: list[tuple[Promise, Hold]], newcomer: Promise, shares_workspace: bool
) -> None:
    def can_all(hosted: list[tuple[Promise, Hold]]) -> bool:
        """Try the turn of each; that of a pinned one never ends."""
        return all(
            add_up(
                [
                    one if other == at or hold is Hold.PINNED else kept(one, shares_workspace)
                    for other, (one, hold) in enumerate(hosted)
                ],
                shares_workspace=shares_workspace,
            )
            <= BUDGET_BYTES
            for at in range(len(hosted))
        )

    scaled = [(replace(one, own_bytes=7 * one.own_bytes), hold) for one, hold in held]
    promises = promised(scaled, shares_workspace=shares_workspace)
    assert promises.can_all_take_turns == can_all(scaled)
    both = [*scaled, (newcomer, Hold.BUSY)]
    assert promises.can_take_turns(footprint_of(newcomer)) == can_all(both)
    staying = [(one, hold) for one, hold in both if hold > Hold.WARM]
    assert promises.can_take_turns(footprint_of(newcomer), without=Hold.WARM) == can_all(staying)
    total = add_up([one for one, hold in scaled if hold > Hold.WARM], shares_workspace=shares_workspace)
    assert promises.must_take_turns == (total > BUDGET_BYTES)


def kept(promise: Promise, shares_workspace: bool) -> Promise:
    """Return what is left of a promise out of turn: no workspace of its own, unless it takes no turns."""
    if promise.standing_bytes == promise.own_bytes:
        return promise
    workspace_bytes = promise.workspace_bytes if shares_workspace else 0
    return Promise(promise.standing_bytes, workspace_bytes)


@given(HELD, st.data())
def test_what_is_released_is_free_again_and_a_copy_leaves_the_original_alone(
    held: list[tuple[Promise, Hold]], data: st.DataObject
) -> None:
    promises = promised(held)
    num_gone = data.draw(st.integers(0, len(held)))
    copy = promises.copy()
    for promise, hold in held[:num_gone]:
        copy.release(promise, hold)
    assert copy == promised(held[num_gone:])
    assert promises == promised(held)


@given(WORKERS, NEEDS)
def test_whether_a_model_fits_is_found_without_looking_at_every_worker(
    workers: list[tuple[str, list[tuple[Promise, Hold]], int]], footprints: dict[str, Footprint]
) -> None:
    capacity = FleetCapacity()
    books = {
        WorkerId(f"w{at}"): (kind, promised(held, BUDGET_BYTES + more))
        for at, (kind, held, more) in enumerate(workers)
    }
    for name, (kind, promises) in books.items():
        capacity.put(kind, name, promises)
    profile = ModelProfile(ModelId("a"), 1, footprints, keep_alive_s=0.0)

    def find_possible(most: Hold) -> set[WorkerId]:
        return {
            name
            for name, (kind, promises) in books.items()
            if kind in footprints and promises.has_room(footprints[kind], most)
        }

    assert capacity.has_fitting(profile, Hold.WARM) == bool(find_possible(Hold.WARM))
    assert capacity.has_fitting(profile, Hold.BUSY) == bool(find_possible(Hold.BUSY))
    for most in (Hold.RETAINED, Hold.WARM, Hold.BUSY):
        found = [
            name
            for index, footprint in capacity.find_suited(profile)
            for name in index.rank_fitting(footprint, most, roomiest_first=False)
            if index.promises[name].has_room(footprint, most)
        ]
        assert set(found) == find_possible(most)
        assert len(found) == len(set(found))
    for name, (kind, _) in books.items():
        capacity.drop(kind, name)
    assert not capacity.by_kind
