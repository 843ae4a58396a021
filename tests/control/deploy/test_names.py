"""The name that was meant is found, whatever is given."""

from __future__ import annotations

from difflib import SequenceMatcher, get_close_matches

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.control.deploy.names import MAX_COMPARED, NearestName

KINDS = ("llama", "qwen", "mistral")
MANY = [f"org-{kind}-{size}b-{i:04d}" for i in range(100) for kind in KINDS for size in (1, 7, 70)]
NEAREST_OF_MANY = NearestName(MANY)


def likeness(name: str, given_name: str) -> float:
    return SequenceMatcher(None, name, given_name).ratio()


@given(st.sampled_from(MANY), st.data())
def test_a_name_with_a_character_too_few_or_wrong_leads_to_none_that_is_less_like_it(
    name: str, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(name) - 1))
    for typo in (name[:at] + name[at + 1 :], f"{name[:at]}x{name[at + 1 :]}"):
        found = NEAREST_OF_MANY.find(typo)
        assert found is not None
        assert likeness(found, typo) >= likeness(name, typo)


@given(st.lists(st.text(max_size=8), max_size=MAX_COMPARED, unique=True), st.text(max_size=10))
def test_few_names_are_all_compared_well(names: list[str], given_name: str) -> None:
    compared = get_close_matches(given_name, names, n=len(names) + 1)
    found = NearestName(names).find(given_name)
    assert found in compared if compared else found is None


@pytest.mark.parametrize("strange", ["", "\ud800", "x" * 100_000, "\U0001f525"])
def test_a_strange_name_is_like_none(strange: str) -> None:
    assert NEAREST_OF_MANY.find(strange) is None
