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


def test_where_all_are_taken_there_is_none() -> None:
    assert choose_slot("ab", range(NUM_SLOTS)) is None
