"""Stored responses stay within their limits, and nobody pushes out who holds less."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.api.responses.store import MAX_AGE_S, MAX_RESPONSES, OVERHEAD_BYTES, ResponseStore, StoredResponse
from hearth.control.requests.caller import GroupId
from hearth.core.errors import UnknownResponse

ANN, BOB = GroupId("ann's"), GroupId("bob's")


def response(response_id: str, num_bytes: int = 0, previous_id: str | None = None) -> StoredResponse:
    return StoredResponse(response_id, "tiny", previous_id, b"x" * num_bytes, b"")


def has(store: ResponseStore, group: GroupId, response_id: str) -> bool:
    try:
        store.find(group, response_id)
    except UnknownResponse:
        return False
    return True


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@given(
    st.lists(
        st.tuples(st.sampled_from([ANN, BOB, GroupId("eve's")]), st.integers(0, 6000), st.integers(0, 40_000))
    )
)
def test_all_limits_hold_whatever_is_stored(kept: list[tuple[GroupId, int, int]]) -> None:
    clock = Clock()
    store = ResponseStore(10_000, clock)
    for index, (group, num_bytes, wait_s) in enumerate(kept):
        clock.now_s += wait_s
        is_kept = store.keep(group, response(str(index), num_bytes))
        assert is_kept == has(store, group, str(index))
        left = [one for one in range(index + 1) if has(store, kept[one][0], str(one))]
        assert store.num_bytes == sum(kept[one][1] + OVERHEAD_BYTES for one in left) <= 10_000


def test_a_group_with_much_gives_way_to_one_with_little() -> None:
    store = ResponseStore(10 * OVERHEAD_BYTES)
    store.keep(BOB, response("bob"))
    for index in range(30):
        store.keep(ANN, response(f"ann-{index}"))
    assert has(store, BOB, "bob")
    assert not has(store, ANN, "ann-20")
    assert has(store, ANN, "ann-21")
    store.keep(BOB, response("bob-2"))
    assert has(store, BOB, "bob")
    assert not has(store, ANN, "ann-22")


def test_the_least_used_leave_first_and_a_conversation_is_used_as_one() -> None:
    store = ResponseStore(3 * OVERHEAD_BYTES)
    store.keep(ANN, response("first"))
    store.keep(ANN, response("second", previous_id="first"))
    store.keep(ANN, response("other"))
    assert [one.id for one in store.conversation(ANN, "second")] == ["first", "second"]
    store.keep(ANN, response("new"))
    assert not has(store, ANN, "other")
    assert has(store, ANN, "first")


def test_a_group_keeps_a_bounded_number() -> None:
    store = ResponseStore(1 << 30)
    for index in range(MAX_RESPONSES + 1):
        store.keep(ANN, response(str(index)))
    assert not has(store, ANN, "0")
    assert has(store, ANN, "1")


def test_a_response_that_nobody_asks_for_grows_old() -> None:
    clock = Clock()
    store = ResponseStore(1 << 20, clock)
    store.keep(ANN, response("used"))
    store.keep(ANN, response("unused"))
    clock.now_s = MAX_AGE_S - 1
    assert has(store, ANN, "used")
    clock.now_s = MAX_AGE_S + 1
    assert not has(store, ANN, "unused")
    assert has(store, ANN, "used")


def test_a_response_that_is_gone_says_why() -> None:
    with pytest.raises(UnknownResponse, match=r"`store: true`.*send the whole conversation as `input`"):
        ResponseStore(1 << 20).conversation(ANN, "resp_1")
