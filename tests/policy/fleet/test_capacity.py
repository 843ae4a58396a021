"""Promised bytes against a plain list of replicas, and the ranked workers against a search through all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.fleet.capacity import FleetCapacity, Promises
from hearth.policy.fleet.events import Footprint, ModelProfile
from hearth.types import Hold, ModelId, WorkerId

BUDGET_BYTES = 1000
HELD = st.lists(st.tuples(st.integers(0, 100), st.sampled_from(Hold)), max_size=10)
WORKERS = st.lists(st.tuples(st.sampled_from(["cpu", "cuda"]), HELD, st.integers(1, 1000)), max_size=6)
NEEDS = st.dictionaries(st.sampled_from(["cpu", "cuda", "other"]), st.integers(0, 1000))


def promised(held: list[tuple[int, Hold]], budget_bytes: int = BUDGET_BYTES) -> Promises:
    promises = Promises(budget_bytes)
    for num_bytes, hold in held:
        promises.add(num_bytes, hold)
    return promises


@given(HELD, st.sampled_from(Hold))
def test_what_can_be_freed_is_all_but_what_is_held_more(held: list[tuple[int, Hold]], most: Hold) -> None:
    promises = promised(held)
    assert promises.free_bytes == BUDGET_BYTES - sum(num_bytes for num_bytes, _ in held)
    kept_bytes = sum(num_bytes for num_bytes, hold in held if hold > most)
    assert promises.freeable_bytes(most) == BUDGET_BYTES - kept_bytes
    footprint = Footprint(promises.free_bytes, 0, 0)
    assert promises.has_room(footprint)
    assert not promises.has_room(Footprint(promises.free_bytes, 1, 1))
    assert promises.could_have_room(Footprint(promises.freeable_bytes(most), 0, 0), most)
    assert not promises.could_have_room(Footprint(promises.freeable_bytes(most), 1, 1), most)
    assert 0.0 <= promises.utilisation <= 1.0


@given(HELD, st.data())
def test_what_is_released_is_free_again_and_a_copy_leaves_the_original_alone(
    held: list[tuple[int, Hold]], data: st.DataObject
) -> None:
    promises = promised(held)
    gone = data.draw(st.lists(st.sampled_from(held), unique_by=id) if held else st.just([]))
    copy = promises.copy()
    for num_bytes, hold in gone:
        copy.release(num_bytes, hold)
    assert copy.free_bytes == promises.free_bytes + sum(num_bytes for num_bytes, _ in gone)
    assert promises == promised(held)


@given(WORKERS, NEEDS)
def test_whether_a_model_fits_is_found_without_looking_at_every_worker(
    workers: list[tuple[str, list[tuple[int, Hold]], int]], needs: dict[str, int]
) -> None:
    capacity = FleetCapacity()
    books = {
        WorkerId(f"w{at}"): (kind, promised(held, BUDGET_BYTES + more))
        for at, (kind, held, more) in enumerate(workers)
    }
    for name, (kind, promises) in books.items():
        capacity.put(kind, name, promises)
    footprints = {kind: Footprint(num_bytes, 0, 0) for kind, num_bytes in needs.items()}
    profile = ModelProfile(ModelId("a"), 1, footprints, keep_alive_s=0.0)

    def is_possible(most: Hold) -> bool:
        return any(
            kind in footprints and promises.could_have_room(footprints[kind], most)
            for kind, promises in books.values()
        )

    assert capacity.can_fit_now(profile) == is_possible(Hold.WARM)
    assert capacity.could_fit(profile) == is_possible(Hold.BUSY)
    for name, (kind, _) in books.items():
        capacity.drop(kind, name)
    assert not capacity.by_kind
