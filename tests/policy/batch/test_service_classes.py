"""Batch requests beside interactive ones in one engine: they give way, and end all the same."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import BATCH_PATIENCE_S, Pace
from hearth.policy.batch.plan import EngineRequest
from tests.policy.batch.device import Loop, launched, loop, names, request


def batch(name: str, num_prompt: int, max_tokens: int = 4, came_s: float = 0.0) -> EngineRequest:
    """A batch request; all prompts of a name begin like no other."""
    made = request(name, [sum(map(ord, name)) % 50] * num_prompt, max_tokens, name.encode())
    return replace(made, is_batch=True, line_s=came_s + BATCH_PATIENCE_S)


def interactive(name: str, num_prompt: int, max_tokens: int = 4, came_s: float = 0.0) -> EngineRequest:
    return replace(batch(name, num_prompt, max_tokens), is_batch=False, line_s=came_s)


def test_an_interactive_request_starts_before_batch_requests_that_wait() -> None:
    engine = loop(max_seqs=1)
    for name in ("b1", "b2"):
        engine.add(batch(name, 2))
    engine.add(interactive("i", 2, came_s=1.0))
    assert names(launched(engine)) == ["i"]


def test_there_is_room_for_both_so_nobody_is_preempted() -> None:
    engine = loop(max_seqs=2)
    engine.add(batch("b", 2))
    launched(engine)
    engine.add(interactive("i", 2, came_s=1.0))
    assert names(launched(engine)) == ["b", "i"]
    assert engine.batcher.take_preempted() == ()
    engine.drain()


def test_without_a_free_slot_the_last_batch_request_gives_its_own_and_goes_on_later() -> None:
    engine = loop(max_seqs=2)
    engine.add(batch("b1", 2, 8))
    engine.add(batch("b2", 2, 8))
    launched(engine)
    engine.add(interactive("i", 2, came_s=1.0))
    assert names(launched(engine)) == ["b1", "i"]
    assert engine.batcher.take_preempted() == ("b2",)
    engine.drain()
    assert engine.reasons.keys() == {"b1", "b2", "i"}


def test_without_blocks_batch_requests_give_up_theirs_and_interactive_ones_keep_theirs() -> None:
    engine = loop(num_blocks=9)  # of 4 tokens each, one of them the sink
    engine.add(interactive("i1", 10))
    engine.add(batch("b1", 10))
    launched(engine)
    engine.add(interactive("i2", 11, came_s=1.0))
    assert names(launched(engine)) == ["i1", "i2"]
    assert engine.batcher.take_preempted() == ("b1",)
    engine.drain()


def test_nobody_gives_way_where_all_batch_requests_are_not_enough() -> None:
    engine = loop(num_blocks=9)
    engine.add(interactive("i1", 18))
    engine.add(batch("b1", 6))
    launched(engine)
    engine.add(interactive("i2", 14, came_s=1.0))
    assert names(launched(engine)) == ["i1", "b1"]
    engine.drain()


def test_who_is_in_the_midst_of_a_batch_prompt_lets_an_interactive_one_go_first() -> None:
    engine = loop(max_batch_tokens=8)
    engine.add(batch("b", 30))
    launched(engine)
    engine.add(interactive("i", 12, came_s=1.0))
    assert names(launched(engine)) == ["i"]
    engine.drain()


def test_a_batch_request_decodes_beside_the_chunks_of_a_long_interactive_prompt() -> None:
    engine = loop(max_batch_tokens=8)
    engine.add(batch("b", 2, 20))
    for _ in range(3):
        engine.step()
    engine.add(interactive("i", 30, came_s=1.0))
    assert [names(launched(engine))] == [["b", "i"]]
    engine.commit()
    assert [names(launched(engine))] == [["b", "i"]]
    engine.drain()


def test_a_batch_request_gives_way_to_nobody_who_came_after_its_patience() -> None:
    engine = loop(max_seqs=1)
    engine.add(batch("b", 2))
    launched(engine)
    engine.add(interactive("i", 2, came_s=BATCH_PATIENCE_S + 1))
    assert names(launched(engine)) == ["b"]


def test_a_prompt_in_chunks_takes_blocks_of_those_behind_it_before_they_decode_with_them() -> None:
    engine = loop(num_blocks=9, block_tokens=1)
    engine.max_prompt_tokens = 1
    engine.add(batch("b", 1, 7))
    engine.step()
    engine.add(interactive("i", 4, 2, came_s=1.0))
    for _ in range(3):
        plan = engine.step()
        assert plan is not None
        assert names(plan) == ["b", "i"]
    assert engine.batcher.blocks.num_available == 1  # for the next token of one of them
    plan = engine.step()
    assert plan is not None
    assert names(plan) == ["i"]
    engine.drain()
    assert engine.reasons.keys() == {"b", "i"}


@given(
    num_blocks=st.integers(4, 12),
    block_tokens=st.integers(1, 2),
    num_batch=st.integers(1, 4),
    num_tokens=st.integers(1, 6),
    num_prompt=st.integers(1, 9),
    num_steps=st.integers(1, 4),
)
def test_a_prompt_in_chunks_ends_beside_any_batch_requests(
    num_blocks: int, block_tokens: int, num_batch: int, num_tokens: int, num_prompt: int, num_steps: int
) -> None:
    """The fake device notices where two write or read the same block."""
    engine = loop(num_blocks=1 + num_blocks, block_tokens=block_tokens)
    engine.max_prompt_tokens = 1
    capacity = engine.batcher.request_limits.kv_tokens
    for number in range(num_batch):
        engine.add(batch(f"b{number}", min(2, capacity - 1), num_tokens))
    for _ in range(num_steps):
        engine.step()
    engine.add(interactive("i", min(num_prompt, capacity - 1), came_s=1.0))
    engine.drain()
    assert len(engine.reasons) == num_batch + 1


def test_a_prompt_that_gives_way_may_begin_anew_in_the_same_step() -> None:
    engine = loop(max_batch_tokens=8)
    engine.add(batch("b", 16))
    launched(engine)
    engine.commit()  # so that nothing of it is in flight
    engine.add(interactive("i", 2, came_s=1.0))
    assert names(launched(engine)) == ["i", "b"]
    assert engine.batcher.take_preempted() == ("b",)
    engine.drain()


def test_only_a_first_token_that_somebody_waits_for_is_urgent() -> None:
    engine = loop()
    engine.add(batch("b", 2))
    assert not engine.batcher.has_newcomer
    launched(engine)
    assert not engine.batcher.has_newcomer
    engine.add(interactive("i", 2, came_s=1.0))
    assert engine.batcher.has_newcomer
    launched(engine)
    assert engine.batcher.has_newcomer
    engine.drain()
    assert not engine.batcher.has_newcomer


@given(st.floats(0.0, 100.0), st.floats(0.0, 100.0), st.booleans())
def test_a_place_in_line_is_that_of_the_arrival_here_and_of_batch_requests_that_of_their_patience(
    arrived_s: float, age_s: float, is_batch: bool
) -> None:
    now_s = arrived_s + age_s
    placed = request("r", [1]).in_line(Pace(tokens_per_s=0.0 if is_batch else 10.0), arrived_s, now_s)
    assert placed.is_batch is is_batch
    assert placed.line_s == (max(now_s, arrived_s + BATCH_PATIENCE_S) if is_batch else now_s)


def runs_first(engine: Loop, names_: set[str]) -> bool:
    return bool(names_ & {str(one.request_id) for one in engine.batcher._sequences.running()})


@given(
    st.lists(st.tuples(st.floats(0.1, 6.0), st.integers(1, 12), st.integers(1, 6)), min_size=5, max_size=30),
    st.integers(1, 3),
    st.integers(2, 12),
)
def test_a_batch_request_ends_before_any_starts_in_its_place_that_came_after_its_patience(
    arrivals: list[tuple[float, int, int]], max_seqs: int, num_tokens: int
) -> None:
    """Interactive requests come for as long as it takes, and always more than fit."""
    engine = loop(max_seqs=max_seqs, num_blocks=17)
    engine.add(batch("b", 3, num_tokens))
    now_s = 0.0
    late: set[str] = set()
    was_first = False
    for number, (later_s, num_prompt, max_tokens) in enumerate(arrivals):
        now_s += later_s
        name = f"i{number}"
        engine.add(interactive(name, num_prompt, max_tokens, came_s=now_s))
        if now_s > BATCH_PATIENCE_S:
            late.add(name)
        engine.step()
        if "b" not in engine.reasons and runs_first(engine, late):
            assert runs_first(engine, {"b"}), "one that came later runs, and it does not"
            was_first = True
        elif was_first and "b" not in engine.reasons:
            assert runs_first(engine, {"b"}), "it gave way to one that came later"
    engine.drain()
    assert len(engine.reasons) == 1 + len(arrivals)
