"""Which slot of addresses a deployed model gets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.memory.space_slots import NUM_SLOTS, choose_slot, preferred_slot

DIGESTS = st.integers(0, 1 << 256).map("{:064x}".format)


@given(st.one_of(DIGESTS, st.text()), st.sets(st.integers(0, NUM_SLOTS - 1)))
def test_a_slot_is_the_preferred_one_or_the_next_that_is_free(digest: str, taken: set[int]) -> None:
    slot, wanted = choose_slot(digest, taken), preferred_slot(digest, NUM_SLOTS)

    assert slot is not None
    assert slot not in taken
    passed = {(wanted + step) % NUM_SLOTS for step in range((slot - wanted) % NUM_SLOTS)}
    assert passed <= taken


@given(st.lists(DIGESTS, max_size=30, unique=True))
def test_no_two_models_have_one_slot(digests: list[str]) -> None:
    taken: set[int] = set()
    for digest in digests:
        slot = choose_slot(digest, taken)
        assert slot is not None
        taken.add(slot)
    assert len(taken) == len(digests)


@given(DIGESTS, st.sets(st.integers(0, NUM_SLOTS - 1)), st.integers(0, 2 * NUM_SLOTS))
def test_the_slot_that_a_snapshot_names_comes_first_if_it_is_one_and_free(
    digest: str, taken: set[int], named: int
) -> None:
    chosen = choose_slot(digest, taken, named)
    is_free = named < NUM_SLOTS and named not in taken
    assert chosen == (named if is_free else choose_slot(digest, taken))


def test_where_all_are_taken_there_is_none() -> None:
    assert choose_slot("ab", range(NUM_SLOTS)) is None
