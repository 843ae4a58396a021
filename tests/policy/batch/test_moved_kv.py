"""Requests that go on in another batcher with the KV that they had: a cached prefix there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import RequestId
from tests.policy.batch.device import PROMPTS, SALTS, Loop, launched, loop, request

A, B = RequestId("a"), RequestId("b")
PROMPT = (5, 1, 4, 1, 5, 9, 2, 6, 5, 3)


def moved(source: Loop, target: Loop, request_id: RequestId, num_cells: int | None = None) -> int:
    """Have a request go on elsewhere with some of its KV; return how much of it is known there."""
    live, output = source.live[request_id], source.outputs[request_id]
    again = replace(live, output=(*live.output, *output))
    cells = source.computed(request_id)[:num_cells]
    source.cancel(request_id)
    num_known = target.receive(again, cells)
    target.add(again)
    return num_known


def begun(engine: Loop, num_steps: int) -> Loop:
    for _ in range(num_steps):
        engine.step()
    return engine


def test_a_request_computes_only_what_has_not_come() -> None:
    source, target = loop(), loop()
    source.add(request("a", PROMPT))
    assert moved(begun(source, 3), target, A) == 8
    (admission,) = launched(target).admissions
    assert (admission.num_cached_tokens, len(admission.tokens)) == (8, 12)
    target.drain()


def test_of_a_prompt_that_is_being_computed_the_committed_blocks_move() -> None:
    source = loop(max_batch_tokens=4)
    source.add(request("a", PROMPT))
    begun(source, 2)
    assert len(source.computed(A)) == 4, "one of its two steps is committed"


def test_a_request_that_has_not_begun_has_what_others_computed_for_it() -> None:
    source = loop(max_seqs=1)
    source.add(request("a", PROMPT))
    source.add(request("b", PROMPT))
    begun(source, 2)
    assert len(source.computed(B)) == 8
    assert not source.computed(RequestId("nobody"))


def test_what_is_known_already_is_not_taken_twice() -> None:
    source, target = loop(), loop()
    target.add(request("b", PROMPT))
    target.drain()
    source.add(request("a", PROMPT))
    num_cached = len(target.batcher.blocks.cached)
    assert moved(begun(source, 3), target, A) == 8
    assert len(target.batcher.blocks.cached) == num_cached
    target.drain()


def test_kv_that_finds_no_room_is_computed_again() -> None:
    source, target = loop(), loop(num_blocks=5)
    target.add(request("b", (1, 2, 3, 4, 5, 6, 7, 8, 9)))
    source.add(request("a", PROMPT))
    assert moved(begun(source, 3), begun(target, 1), A) == 4
    target.drain()


def test_other_salts_do_not_find_it() -> None:
    source, target = loop(), loop()
    source.add(request("a", PROMPT, salt=b"ours"))
    moved(begun(source, 3), target, A)
    target.add(request("b", PROMPT, salt=b"theirs"))
    cached = {one.request_id: one.num_cached_tokens for one in launched(target).admissions}
    assert cached == {A: 8, B: 0}
    target.drain()


@given(
    st.lists(st.tuples(PROMPTS, SALTS), min_size=1, max_size=5),
    st.integers(1, 12),
    st.sampled_from([4, 8, 64]),
    st.sampled_from([None, 2]),
    st.sampled_from([9, 12, 65]),
    st.lists(st.integers(0, 16), min_size=5, max_size=5),
)
def test_whatever_moves_every_request_ends_as_if_it_were_alone(
    asked: Sequence[tuple[Sequence[int], bytes]],
    num_steps: int,
    max_batch_tokens: int,
    num_flights: int | None,
    num_blocks: int,
    num_cells: Sequence[int],
) -> None:
    source = loop(max_batch_tokens=max_batch_tokens, num_flights=num_flights, num_blocks=num_blocks)
    target = loop(max_context=24, num_blocks=num_blocks)
    for number, (prompt, salt) in enumerate(asked):
        source.add(request(f"r{number}", prompt, max_tokens=8, salt=salt))
    begun(source, num_steps)
    for request_id, most in zip(list(source.live), num_cells, strict=False):
        moved(source, target, request_id, most)
        target.step()
    source.drain()
    target.drain()
