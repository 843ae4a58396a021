"""Tables of the sampler have a row for each request that needs one, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.sizes import bias_buffers, bytes_of, penalty_buffers, table_rows
from hearth.core.types import RequestId, SamplingParams, SamplingTable
from hearth.engine.sampling_tables import TableRows
from tests.engine.harness import ROOMY, ask, engine_for, kv_bytes
from tests.models.zoo import build

NAME = "llama-gqa"
CROWD = replace(ROOMY, max_seqs=24)
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=12, frequency_penalty=0.9, repetition_penalty=1.3, ignore_eos=True
)


@given(st.integers(1, 5000), st.integers(1, 2000), st.integers(0, 5000))
def test_a_table_has_rows_for_all_who_may_run_and_not_twice_as_many(
    num_requests: int, max_seqs: int, num_more: int
) -> None:
    num_rows = table_rows(num_requests, max_seqs)
    assert min(num_requests, max_seqs) <= num_rows <= max_seqs
    assert num_rows <= max(8, 2 * num_requests)
    assert num_rows <= table_rows(num_requests + num_more, max_seqs)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=60))
def test_no_two_running_requests_share_a_row_and_no_more_rows_are_taken_than_requests_or_slots(
    moves: list[tuple[int, int]],
) -> None:
    """A request gets a slot, after a preemption another one; in the sixth slot it ends."""
    rows, slots, live = TableRows(), dict[int, RequestId](), set[RequestId]()
    most = 0
    for number, slot in moves:
        request_id = RequestId(str(number))
        slots = {other: holder for other, holder in slots.items() if holder != request_id}
        if slot == 4:
            rows.free(request_id)
            live.discard(request_id)
            continue
        live.add(request_id)
        slots[slot] = request_id
        most = max(most, min(len(live), 4))
        assert rows.take(request_id, slot) < most
        taken = [rows.row(other) for other in slots]
        assert len(set(taken)) == len(taken)


def test_a_table_is_as_large_as_those_who_need_it_and_not_as_the_slots() -> None:
    engine = engine_for(NAME, CROWD)
    vocab_size = build(NAME).model.config.vocab_size
    for number in range(9):
        engine.add(
            engine.request(RequestId(f"penalised-{number}"), [1, 2], replace(PARAMS, logit_bias={7: 1.0}))
        )
        num_rows = 8 if number < 8 else 16
        assert engine.tables.needed_bytes() == {
            SamplingTable.PENALTIES: bytes_of(penalty_buffers(num_rows, vocab_size)),
            SamplingTable.BIAS: bytes_of(bias_buffers(num_rows, vocab_size)),
        }


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [400, 20])
def test_requests_answer_in_a_growing_table_as_they_do_alone(num_blocks: int) -> None:
    """With few blocks they are preempted and admitted again, in other slots."""
    engine = engine_for(NAME, replace(CROWD, kv_bytes=kv_bytes(engine_for(NAME), num_blocks)))
    prompts = [[3 + number, 4, 5 + number % 3] for number in range(20)]
    wishes = [
        replace(PARAMS, max_tokens=6 + number % 9, logit_bias={9 + number: 3.0} if number % 3 else {})
        for number in range(20)
    ]
    tokens: dict[str, list[int]] = {str(number): [] for number in range(20)}
    num_added, num_preempted = 0, 0
    while num_added < len(prompts) or engine.has_work:
        for _ in range(3):
            if num_added < len(prompts):
                name, prompt, wish = RequestId(str(num_added)), prompts[num_added], wishes[num_added]
                engine.add(engine.request(name, prompt, wish))
                num_added += 1
        outcome = engine.step()
        num_preempted += len(outcome.preempted)
        for one in outcome.outputs:
            tokens[one.request_id].append(one.token)
    assert (num_preempted > 0) is (num_blocks == 20)

    alone = engine_for(NAME, CROWD)
    for number, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True)):
        (answer,) = ask(alone, [prompt], wish)
        assert tokens[str(number)] == answer.tokens, f"{number=}"
