"""Every rule of the batcher as an example, and any schedule at all against a device that remembers."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from hearth.core.errors import BadPrompt, ConfigError, GuideStuck, LogitsNotFinite, PromptTooLong
from hearth.core.types import AdapterId, FinishReason, Pooling, RequestId, SamplingParams
from hearth.policy.batch.batch_limits import BatchLimits
from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.plan import EngineRequest, Row
from tests.policy.batch.device import (
    PROMPTS,
    SALTS,
    SAMPLING,
    VOCABULARY,
    Alternating,
    Driven,
    Loop,
    launched,
    loop,
    names,
    next_token,
    request,
    stopping,
)

pytestmark = pytest.mark.slow

# --- adding ---


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(BadPrompt, match="at least 1"):
        loop().add(request("a", []))


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused() -> None:
    with pytest.raises(PromptTooLong, match="64 tokens, limit: 63"):
        loop(max_context=64).add(request("a", [1] * 64))


def test_a_prompt_that_leaves_no_room_in_the_kv_memory_is_refused() -> None:
    with pytest.raises(PromptTooLong, match="8 tokens, limit: 7"):
        loop(num_blocks=3, block_tokens=4).add(request("a", [1] * 8))


def test_the_longest_prompt_that_fits_yields_one_token() -> None:
    engine = loop(num_blocks=3, block_tokens=4)
    engine.add(request("a", [1] * 7, max_tokens=None))
    engine.drain()
    assert len(engine.outputs[RequestId("a")]) == 1


def test_max_tokens_is_cut_to_the_context() -> None:
    engine = loop(max_context=10)
    engine.add(request("a", [1] * 4, max_tokens=100))
    engine.drain()
    assert len(engine.outputs[RequestId("a")]) == 6


def test_an_id_that_is_in_use_is_our_bug() -> None:
    engine = loop()
    engine.add(request("a", [1]))
    with pytest.raises(AssertionError, match="added twice"):
        engine.batcher.add(request("a", [2]))


def test_a_limit_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_seqs=0"):
        BatchLimits(max_batch_tokens=8, max_seqs=0, max_context=8)


# --- planning ---


def test_nothing_to_do_means_no_plan() -> None:
    engine = loop()
    assert engine.launch() is None
    assert not engine.batcher.has_work


def test_a_short_prompt_is_computed_and_sampled_in_one_row() -> None:
    engine = loop()
    engine.add(request("a", [5, 6, 7]))
    plan = launched(engine)
    assert plan.rows == (Row(RequestId("a"), 0, 0, 3, array("I", (5, 6, 7)), True),)
    assert [(write.begin, write.blocks) for write in plan.table_writes] == [(0, (1,))]
    assert tuple(plan.admissions[0].tokens) == (5, 6, 7)


def test_a_long_prompt_is_cut_into_chunks_and_sampled_after_the_last() -> None:
    engine = loop(max_batch_tokens=4)
    engine.add(request("a", range(10), max_tokens=1))
    plans = engine.drain()
    assert [tuple(plan.rows[0].tokens or ()) for plan in plans] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert [plan.rows[0].samples for plan in plans] == [False, False, True]


def test_blocks_are_assigned_only_as_tokens_need_them() -> None:
    engine = loop(max_batch_tokens=4, block_tokens=4)
    engine.add(request("a", range(10), max_tokens=4))
    plans = engine.drain()
    assert [[write.begin for write in plan.table_writes] for plan in plans] == [[0], [1], [2], [], [], [3]]


def test_decode_rows_come_first_then_the_unfinished_prompt_then_admissions() -> None:
    engine = loop(max_batch_tokens=8)
    engine.add(request("a", [1] * 4, max_tokens=8))
    engine.add(request("b", [2] * 8, max_tokens=8))
    launched(engine)
    engine.add(request("c", [3] * 2))
    plan = launched(engine)
    assert names(plan) == ["a", "b", "c"]
    assert [row.num_tokens for row in plan.rows] == [1, 4, 2]
    assert plan.rows[0].tokens is None


def test_a_younger_request_never_overtakes_an_older_one() -> None:
    engine = loop(num_blocks=5, block_tokens=4)
    engine.add(request("big", [1] * 12, max_tokens=4))
    engine.add(request("bigger", [2] * 12, max_tokens=4))
    engine.add(request("small", [3]))
    assert names(launched(engine)) == ["big"]


def test_no_more_sequences_run_than_there_are_slots() -> None:
    engine = loop(max_seqs=2)
    for name in "abc":
        engine.add(request(name, [1]))
    assert [admission.slot for admission in launched(engine).admissions] == [0, 1]
    assert (engine.batcher.num_running, engine.batcher.num_waiting) == (2, 1)


def test_the_lowest_free_slot_is_given_first() -> None:
    engine = loop(max_seqs=3)
    for name in "abc":
        engine.add(request(name, [1]))
    launched(engine)
    engine.cancel(RequestId("b"))
    engine.cancel(RequestId("a"))
    engine.add(request("d", [1]))
    assert launched(engine).admissions[0].slot == 0


def test_a_budget_below_the_number_of_sequences_serves_the_oldest_first() -> None:
    engine = loop(max_batch_tokens=2)
    for name in "abc":
        engine.add(request(name, [1], max_tokens=2))
    plans = engine.drain()
    assert [names(plan) for plan in plans] == [["a", "b"], ["a", "b"], ["c"], ["c"]]


# --- prompts beside those that decode ---


def decoding(step_sizes: tuple[int, ...] = (), **limits: int) -> Loop:
    """One request decodes, and a token of it is in flight."""
    engine = loop(block_tokens=4, step_sizes=step_sizes, **limits)
    engine.add(request("running", [1, 2, 3], max_tokens=40))
    launched(engine)
    return engine


def prompt_tokens(engine: Loop, max_prompt_tokens: int | None) -> list[int]:
    """How many tokens of each prompt the next step has."""
    engine.max_prompt_tokens = max_prompt_tokens
    engine.step()
    plan = engine.in_flight[-1].plan
    assert names(plan)[0] == "running"
    return [row.num_tokens for row in plan.prompts]


def test_a_prompt_takes_no_more_of_a_step_than_it_may_beside_those_that_decode() -> None:
    engine = decoding()
    engine.add(request("long", range(40)))
    assert [prompt_tokens(engine, 16) for _ in range(4)] == [[12], [12], [16], []]


def test_a_prompt_has_the_whole_budget_where_nobody_decodes() -> None:
    engine = loop()
    engine.max_prompt_tokens = 8
    engine.add(request("long", range(40)))
    assert launched(engine).num_tokens == 40


def test_a_prompt_has_the_whole_budget_beside_those_of_which_nobody_sees_the_tokens() -> None:
    engine = loop()
    engine.max_prompt_tokens = 8
    engine.add(replace(request("unseen", [1, 2, 3], max_tokens=40), is_streamed=False))
    launched(engine)
    engine.add(request("long", range(40)))
    assert launched(engine).num_prompt_tokens == 40
    engine.add(request("longer", range(50)))
    engine.commit()
    plan = launched(engine)
    assert (plan.num_decode_rows, plan.num_prompt_tokens) == (2, 4), "beside one that is streamed"


@pytest.mark.parametrize(("max_prompt_tokens", "max_lone_tokens"), [(12, 4), (4, 12)])
def test_on_a_slow_device_the_larger_limit_holds_beside_those(
    max_prompt_tokens: int, max_lone_tokens: int
) -> None:
    batcher = loop(block_tokens=4).batcher
    batcher.add(replace(request("unseen", [1, 2, 3], max_tokens=40), is_streamed=False))
    assert batcher.plan() is not None
    batcher.add(request("long", range(40)))
    plan = batcher.plan(max_prompt_tokens, max_lone_tokens)
    assert plan is not None
    assert (plan.num_decode_rows, plan.num_prompt_tokens) == (1, 8)


def test_a_guided_request_that_sits_out_a_step_counts_as_one_that_decodes() -> None:
    engine = loop()
    engine.max_prompt_tokens = 16
    engine.add(guided("guided", [1, 2]))
    launched(engine)
    engine.add(request("long", range(40)))
    plan = launched(engine)
    assert (plan.num_decode_rows, plan.num_prompt_tokens) == (0, 12)


def test_a_prompt_gets_a_block_of_every_step_however_little_is_allowed() -> None:
    engine = decoding()
    engine.add(request("long", range(10)))
    assert [prompt_tokens(engine, 1) for _ in range(3)] == [[4], [4], [2]]


def test_prompts_that_fit_are_not_cut() -> None:
    engine = decoding()
    engine.add(request("a", [5] * 7))
    engine.add(request("b", [6] * 9))
    assert prompt_tokens(engine, 16) == [7, 9]


def test_a_prompt_is_not_begun_for_a_sliver_behind_others() -> None:
    engine = decoding()
    engine.add(request("a", [5] * 28))
    engine.add(request("b", [6] * 30))
    assert prompt_tokens(engine, 32) == [28]
    assert prompt_tokens(engine, 32) == [30]


def test_a_prompt_is_begun_behind_others_for_a_good_part_of_the_step() -> None:
    engine = decoding()
    engine.add(request("a", [5] * 8))
    engine.add(request("b", [6] * 40))
    assert prompt_tokens(engine, 32) == [8, 20]


def test_a_prompt_is_cut_where_the_step_needs_no_padding() -> None:
    engine = decoding(step_sizes=(8, 16, 24, 64))
    engine.add(request("a", [5] * 7))
    engine.add(request("b", [6] * 40))
    assert prompt_tokens(engine, 32) == [7, 16], "and a decode row: 24 in all"


def test_a_prompt_that_waits_is_begun_where_the_step_would_have_padding() -> None:
    engine = decoding(step_sizes=(8, 16, 32, 64))
    engine.add(request("a", [5] * 18))
    engine.add(request("b", [6] * 30))
    assert prompt_tokens(engine, 20) == [18, 13], "and a decode row: 32 in all"
    assert prompt_tokens(engine, 20) == [17]


def test_short_prompts_that_wait_take_the_place_of_padding() -> None:
    engine = decoding(step_sizes=(8, 16, 32, 64))
    engine.add(request("a", [5] * 20))
    engine.add(request("b", [6] * 7))
    engine.add(request("c", [7] * 7))
    assert prompt_tokens(engine, 20) == [20, 7, 4]


def test_a_prompt_is_not_begun_for_less_padding_than_a_block() -> None:
    engine = decoding(step_sizes=(8, 16, 32, 64))
    engine.add(request("a", [5] * 28))
    engine.add(request("b", [6] * 30))
    assert prompt_tokens(engine, 28) == [28], "and a decode row: padded by 3"


def test_a_piece_of_a_prompt_is_as_long_as_its_step_is_padded_to() -> None:
    engine = decoding(step_sizes=(32, 64))
    engine.add(request("long", range(40)))
    assert [prompt_tokens(engine, 16) for _ in range(2)] == [[31], [9]]


def test_a_prompt_that_takes_the_blocks_of_others_is_cut_where_the_step_without_them_needs_no_padding() -> (
    None
):
    engine = loop(num_blocks=16, block_tokens=4, max_seqs=8, step_sizes=(8, 16, 32, 64))
    engine.max_prompt_tokens = 4
    engine.add(request("first", [1, 2, 3], max_tokens=60))
    for number in range(4):
        engine.add(replace(request(f"behind-{number}", [10 + number] * 3, max_tokens=60), line_s=100.0))
    launched(engine)
    engine.commit()
    engine.add(request("long", range(40)))
    steps = []
    for _ in range(7):
        plan = launched(engine)
        engine.commit()
        steps.append((plan.num_decode_rows, plan.num_prompt_tokens))
    assert steps == [(5, 3)] * 5 + [(3, 5), (2, 6)], "of 8 each"


def test_nobody_is_admitted_behind_a_prompt_that_was_cut() -> None:
    """Only the youngest may be in the midst of its prompt, or age would not decide."""
    engine = decoding()
    engine.add(request("long", range(40)))
    engine.add(request("short", [6]))
    assert prompt_tokens(engine, 16) == [12]
    assert engine.batcher.num_waiting == 1


def test_all_prompts_that_could_be_computed_now_count_as_waiting() -> None:
    engine = decoding(max_seqs=3)
    assert engine.batcher.waiting_prompt_tokens() == 0
    engine.add(request("long", range(40)))
    engine.add(request("short", [6]))
    engine.add(request("without a slot", [7]))
    assert engine.batcher.waiting_prompt_tokens() == 41
    prompt_tokens(engine, 16)
    assert engine.batcher.waiting_prompt_tokens() == 41, "one that was begun counts until it is done"


# --- one ahead ---


def test_the_next_step_is_planned_before_the_token_is_known() -> None:
    engine = loop()
    engine.add(request("a", [5, 6, 7]))
    launched(engine)
    assert launched(engine).rows == (Row(RequestId("a"), 0, 3, 1, None, True),)


def test_a_newcomer_waits_for_its_first_token_until_that_is_committed() -> None:
    batcher = loop(max_seqs=1).batcher
    assert not batcher.has_newcomer
    batcher.add(request("a", range(4), max_tokens=3))
    assert batcher.has_newcomer
    plan = batcher.plan()
    assert plan is not None
    assert batcher.has_newcomer
    batcher.commit(plan, [7])
    assert not batcher.has_newcomer
    batcher.add(request("b", range(4)))
    assert not batcher.has_newcomer, "it has no slot, so no step would help it"


def test_newcomers_are_planned_once_nothing_is_left_to_launch_for_their_first_tokens() -> None:
    batcher = loop(max_seqs=2).batcher
    assert not batcher.newcomers_are_planned, "there are none"
    batcher.add(request("long", range(12), max_tokens=3))
    assert not batcher.newcomers_are_planned
    first = batcher.plan(8, 8)
    assert first is not None
    assert not batcher.newcomers_are_planned, "a part of the prompt is left"
    second = batcher.plan(8, 8)
    assert second is not None
    assert batcher.newcomers_are_planned
    batcher.add(request("b", range(4)))
    assert not batcher.newcomers_are_planned, "another one has a slot and room"
    batcher.commit(first, [])
    third = batcher.plan(8, 8)
    assert third is not None
    assert batcher.newcomers_are_planned
    batcher.commit(second, [7])
    assert batcher.newcomers_are_planned
    batcher.commit(third, [7, 7])
    assert not batcher.newcomers_are_planned


def test_steps_of_a_pipeline_share_the_sequences() -> None:
    engine = loop(num_flights=2)
    for number in range(5):
        engine.add(request(str(number), [number, 1], max_tokens=6))
    assert names(launched(engine)) == ["0", "1", "2", "3", "4"]
    assert engine.launch() is None  # no token is known
    engine.commit()
    assert names(launched(engine)) == ["0", "1", "2"]
    assert names(launched(engine)) == ["3", "4"]
    engine.commit()
    assert names(launched(engine)) == ["0", "1", "2"]
    engine.drain()


def test_the_step_behind_the_oldest_one_of_a_pipeline_is_planned_ahead() -> None:
    engine = loop(num_flights=2)
    for number in range(3):
        engine.add(request(str(number), [number, 1], max_tokens=6))
    launched(engine)
    engine.commit()
    assert names(launched(engine)) == ["0", "1"]
    assert names(launched(engine)) == ["2"]
    ahead = engine.plan_ahead()
    assert ahead is not None
    assert names(ahead) == ["0", "1"]
    assert ahead.decode.positions == [3, 3]
    engine.commit()  # runs it before the commit
    assert [step.plan.step_id for step in engine.in_flight] == [2, 3]
    engine.drain()


def test_the_next_plan_writes_the_blocks_of_a_step_that_was_planned_ahead_and_not_run() -> None:
    engine = loop(num_flights=2, block_tokens=2)
    engine.add(request("a", [1, 2], max_tokens=6))
    launched(engine)
    ahead = engine.plan_ahead()
    assert ahead is not None
    engine.add(request("b", [3], max_tokens=6))  # undoes it
    following = launched(engine)
    assert names(following) == ["b"]
    assert set(ahead.table_writes) < set(following.table_writes)
    engine.commit()
    assert launched(engine).decode.positions == ahead.decode.positions
    engine.drain()


def test_no_step_is_planned_ahead_that_would_keep_a_request_waiting() -> None:
    engine = loop(num_flights=2)
    engine.add(request("a", [1, 2]))
    launched(engine)
    engine.add(request("b", [3]))
    assert engine.plan_ahead() is None
    launched(engine)
    assert names(engine.plan_ahead() or launched(engine)) == ["a"]
    engine.drain()


def test_a_guided_request_is_not_planned_ahead() -> None:
    engine = loop(num_flights=2)
    params = SamplingParams(max_tokens=8)
    engine.add(EngineRequest(RequestId("a"), (1,), params, guide=Alternating(6)))
    launched(engine)
    assert engine.plan_ahead() is None
    engine.drain()


@pytest.mark.parametrize(("num_tokens", "num_pieces"), [(600, 3), (150, 2), (90, 1)])
def test_a_prompt_is_cut_so_that_every_stage_has_a_piece(num_tokens: int, num_pieces: int) -> None:
    engine = loop(num_blocks=200, max_context=1000, max_batch_tokens=1000, num_flights=3)
    engine.batcher.add(request("a", [1] * num_tokens))
    pieces = [0 if (plan := engine.batcher.plan()) is None else plan.num_prompt_tokens for _ in range(3)]
    assert sum(pieces) == num_tokens
    assert len([piece for piece in pieces if piece]) == num_pieces
    assert max(pieces) <= max(128, 0.42 * num_tokens), "about equal"


def test_chunks_of_a_prompt_follow_each_other_through_a_pipeline() -> None:
    engine = loop(num_flights=3, max_batch_tokens=4)
    engine.add(request("a", range(10)))
    assert [launched(engine).num_tokens for _ in range(3)] == [4, 4, 2]
    engine.drain()


def test_what_a_later_step_samples_is_not_planned_ahead() -> None:
    engine = loop(num_flights=2, max_batch_tokens=4)
    engine.add(request("a", range(8)))
    assert [launched(engine).num_tokens for _ in range(2)] == [4, 4]
    assert engine.plan_ahead() is None
    engine.drain()


def test_a_third_step_in_flight_is_our_bug() -> None:
    engine = loop()
    engine.add(request("a", [1], max_tokens=8))
    launched(engine)
    launched(engine)
    with pytest.raises(AssertionError, match="commit first"):
        engine.batcher.plan()


@pytest.mark.parametrize("num_known", [0, 1, 5, 30])
def test_digests_of_a_prompt_are_computed_up_to_where_it_leaves_what_is_known(
    num_known: int,
) -> None:
    engine = loop(num_blocks=80, block_tokens=2, max_context=160, max_batch_tokens=160)
    engine.add(request("a", range(2 * num_known + 1), max_tokens=1))
    engine.drain()
    engine.add(request("b", range(100), max_tokens=9))
    assert launched(engine).admissions[0].num_cached_tokens == 2 * num_known
    sequence = engine.batcher._sequences[RequestId("b")]
    assert sequence.chain.num_known == num_known + 1
    engine.drain()
    assert sequence.num_published == 54
    assert sequence.chain.num_known == num_known + 1


def test_steps_are_committed_in_order() -> None:
    engine = loop()
    engine.add(request("a", [1], max_tokens=8))
    launched(engine)
    second = launched(engine)
    with pytest.raises(AssertionError, match=r"plan.step_id=1 committed before flight.plan.step_id=0"):
        engine.batcher.commit(second, [1])


def test_as_many_tokens_as_samples_are_committed() -> None:
    engine = loop()
    engine.add(request("a", [1]))
    plan = launched(engine)
    with pytest.raises(AssertionError, match="2 tokens for 1 samples"):
        engine.batcher.commit(plan, [1, 2])


def test_a_sequence_whose_last_token_is_in_flight_is_not_planned_again() -> None:
    engine = loop()
    engine.add(request("a", [1], max_tokens=1))
    launched(engine)
    assert engine.launch() is None
    assert engine.commit()[0].finish_reason is FinishReason.LENGTH


def test_a_sequence_decodes_on_after_all_steps_were_committed() -> None:
    engine = loop()
    engine.add(request("a", [1, 2], max_tokens=3))
    launched(engine)
    engine.commit()
    assert launched(engine).rows == (Row(RequestId("a"), 0, 2, 1, None, True),)


def test_the_row_after_a_stop_token_is_dropped() -> None:
    engine = loop()
    engine.add(stopping("a", [1, 2], at=1))
    launched(engine)
    launched(engine)
    stopped = engine.commit()
    assert [emission.finish_reason for emission in stopped] == [FinishReason.STOP]
    assert engine.commit() == []
    assert not engine.batcher.has_work


def test_a_stop_token_before_min_tokens_does_not_stop() -> None:
    engine = loop()
    engine.add(stopping("a", [1, 2], at=1, max_tokens=2, min_tokens=1))
    engine.drain()
    assert len(engine.outputs[RequestId("a")]) == 2


def test_a_stop_token_at_the_last_position_counts_as_stop() -> None:
    engine = loop()
    engine.add(stopping("a", [4, 2], at=2, max_tokens=2))
    engine.drain()
    assert engine.reasons == {RequestId("a"): FinishReason.STOP}


def test_an_emission_names_its_place_among_the_samples() -> None:
    engine = loop(max_batch_tokens=4)
    engine.add(request("a", [1], max_tokens=1))
    engine.add(request("b", [2], max_tokens=1))
    engine.add(request("c", [3] * 8, max_tokens=1))
    launched(engine)
    engine.cancel(RequestId("a"))
    assert [(e.request_id, e.sample_index) for e in engine.commit()] == [("b", 1)]


# --- resuming ---


def resumed(name: str, prompt: Sequence[int], num_output: int, max_tokens: int | None = 6) -> EngineRequest:
    output: list[int] = []
    for _ in range(num_output):
        output.append(next_token(b"", [*prompt, *output]))
    return replace(request(name, prompt, max_tokens), output=tuple(output))


@pytest.mark.parametrize("num_output", range(1, 6))
def test_a_resumed_request_gets_the_rest_of_its_tokens(num_output: int) -> None:
    engine = loop()
    engine.add(resumed("a", [1, 2, 3], num_output))
    engine.drain()
    assert len(engine.outputs[RequestId("a")]) == 6 - num_output


def test_a_resumed_request_is_admitted_with_prompt_and_output() -> None:
    engine = loop()
    asked = resumed("a", [1, 2, 3], 2)
    engine.add(asked)
    admission = launched(engine).admissions[0]
    assert (tuple(admission.tokens), admission.num_prompt_tokens) == ((1, 2, 3, *asked.output), 3)


def test_an_output_that_leaves_no_room_in_the_context_is_refused() -> None:
    with pytest.raises(PromptTooLong, match="prompt has 60 tokens and output 4, limit: 63"):
        loop(max_context=64).add(resumed("a", [1] * 60, 4, max_tokens=None))


def test_an_output_that_has_all_its_tokens_is_refused() -> None:
    with pytest.raises(BadPrompt, match="the output of 6 tokens is complete"):
        loop().add(resumed("a", [1], 6, max_tokens=6))


@pytest.mark.parametrize(("min_tokens", "is_complete"), [(0, True), (1, True), (2, False)])
def test_an_output_that_ends_with_a_stop_token_is_refused(min_tokens: int, is_complete: bool) -> None:
    engine = loop()
    asked = stopping("a", [1, 2], at=2, min_tokens=min_tokens)
    asked = replace(asked, output=resumed("a", [1, 2], 2).output)
    if is_complete:
        with pytest.raises(BadPrompt, match="the output of 2 tokens is complete"):
            engine.add(asked)
    else:
        engine.add(asked)
        engine.drain()


# --- guides ---


def guided(name: str, prompt: Sequence[int], length: int = 3, max_tokens: int = 8) -> EngineRequest:
    return replace(request(name, prompt, max_tokens), guide=Alternating(length))


def test_a_guided_request_waits_for_its_token_while_others_run_ahead() -> None:
    engine = loop()
    engine.add(guided("guided", [1, 2]))
    engine.add(request("free", [1, 2], max_tokens=8))
    assert names(launched(engine)) == ["guided", "free"]
    assert names(launched(engine)) == ["free"]
    engine.commit()
    assert names(launched(engine)) == ["guided", "free"]


def test_a_guide_that_needs_no_masks_yet_lets_its_request_run_ahead() -> None:
    engine = loop()
    engine.add(replace(request("a", [1, 2], max_tokens=8), guide=Alternating(9, num_free_first=2)))
    assert [launched(engine).rows[0].mask for _ in range(2)] == [None, None]
    engine.commit()
    assert engine.launch() is None, "its third token needs a mask, and its second is not known"
    engine.commit()
    assert launched(engine).rows[0].mask is not None


def test_in_a_pipeline_a_guided_request_sits_out_even_without_masks() -> None:
    engine = loop(num_flights=2)
    engine.add(replace(request("a", [1, 2], max_tokens=8), guide=Alternating(9, num_free_first=8)))
    launched(engine)
    assert engine.launch() is None, "the first stage does not know its token"
    engine.commit()
    assert launched(engine).rows[0].mask is None


def test_only_the_row_that_samples_has_a_mask() -> None:
    engine = loop(max_batch_tokens=4)
    engine.add(guided("a", range(6)))
    rows = [launched(engine).rows[0] for _ in range(2)]
    assert [row.mask for row in rows] == [None, Alternating(3).mask]


def test_a_guided_request_ends_where_its_guide_does() -> None:
    engine = loop()
    engine.add(guided("a", [1, 2], length=3))
    engine.drain()
    assert engine.reasons == {RequestId("a"): FinishReason.STOP}
    assert len(engine.outputs[RequestId("a")]) == 3


def test_a_guide_that_goes_on_is_cut_by_max_tokens() -> None:
    engine = loop()
    engine.add(guided("a", [1, 2], length=9, max_tokens=4))
    engine.drain()
    assert engine.reasons == {RequestId("a"): FinishReason.LENGTH}


# --- prefixes ---


def test_a_known_prefix_is_not_computed_again() -> None:
    engine = loop(block_tokens=4)
    engine.add(request("a", range(10)))
    engine.drain()
    engine.add(request("b", [*range(9), 1, 1]))
    plan = launched(engine)
    assert plan.admissions[0].num_cached_tokens == 8
    assert plan.rows[0].tokens == array("I", (8, 1, 1))
    assert [(write.begin, write.blocks) for write in plan.table_writes] == [(0, (1, 2, 4))]


def test_who_starts_in_the_same_step_evicts_no_prefix_that_another_finds() -> None:
    engine = loop(num_blocks=6, block_tokens=4)
    for name in range(4):  # each leaves a block, that of the first is the oldest
        engine.add(request(f"{name}", [name] * 5, max_tokens=1))
        engine.drain()
    engine.add(request("new", [9] * 7, max_tokens=1))
    engine.add(request("again", [0] * 5, max_tokens=1))

    plan = launched(engine)

    assert [one.num_cached_tokens for one in plan.admissions] == [0, 4]
    assert [len(write.blocks) for write in plan.table_writes] == [2, 2]
    engine.drain()


def test_one_token_is_always_left_to_compute() -> None:
    engine = loop(block_tokens=4)
    engine.add(request("a", range(8)))
    engine.drain()
    engine.add(request("b", range(8)))
    assert launched(engine).rows[0].tokens == array("I", (4, 5, 6, 7))


def test_a_prefix_is_shared_while_its_first_owner_still_runs() -> None:
    engine = loop(block_tokens=4)
    engine.add(request("a", range(8), max_tokens=8))
    launched(engine)
    engine.commit()
    engine.add(request("b", range(8)))
    plan = launched(engine)
    assert plan.admissions[0].num_cached_tokens == 4
    assert engine.batcher.blocks.num_holders[1] == 2


def test_output_becomes_a_prefix_too() -> None:
    engine = loop(block_tokens=4)
    engine.add(request("a", [1, 2], max_tokens=7))
    engine.drain()
    engine.add(request("b", [1, 2, *engine.outputs[RequestId("a")]]))
    assert launched(engine).admissions[0].num_cached_tokens == 8


@pytest.mark.parametrize("seed", range(20))
def test_texts_that_branch_off_each_other_are_not_mixed_up_where_blocks_are_short(seed: int) -> None:
    chance = random.Random(seed)
    engine = loop(
        max_batch_tokens=chance.choice([8, 16, 32]),
        max_seqs=chance.choice([2, 4, 8]),
        max_context=48,
        num_blocks=chance.choice([13, 16, 20]),  # of which one request may take all
        block_tokens=2,
    )
    stems = (
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 9, 9, 8, 8],
        [1, 2, 3, 4, 9, 9, 7, 7],
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
    )
    for number in range(120):
        what = chance.random()
        if what < 0.4:
            prompt = chance.choice(stems) + chance.choices(range(3), k=chance.randrange(1, 6))
            engine.add(request(str(number), prompt, max_tokens=chance.randrange(1, 14)))
        elif what < 0.45 and engine.live:
            engine.cancel(chance.choice(list(engine.live)))
        else:
            engine.step()
    engine.drain()


def test_output_is_no_prefix_before_its_end() -> None:
    engine = loop(block_tokens=4)
    engine.add(request("a", range(4), max_tokens=20))
    for _ in range(8):
        launched(engine)
        engine.commit()
    output = engine.outputs[RequestId("a")]
    engine.add(request("b", [*range(4), *output], max_tokens=1))
    plan = launched(engine)
    assert [one.num_cached_tokens for one in plan.admissions] == [4]
    engine.commit()
    engine.cancel(RequestId("a"))
    engine.add(request("c", [*range(4), *engine.outputs[RequestId("a")]], max_tokens=1))
    assert [one.num_cached_tokens for one in launched(engine).admissions] == [12]
    engine.drain()


def test_who_gives_way_finds_its_own_output_again() -> None:
    engine = loop(block_tokens=4, num_blocks=20)
    engine.add(request("a", range(2), max_tokens=20))
    for _ in range(9):
        launched(engine)
        engine.commit()
    assert engine.batcher.kv.clear(range(3, 4), may_move=False, may_preempt=True, keeps_floor=False) == []
    assert engine.batcher.num_running == 0
    assert [one.num_cached_tokens for one in launched(engine).admissions] == [8]
    engine.drain()


def test_a_prompt_that_is_planned_is_a_prefix_for_the_next_step() -> None:
    engine = loop(block_tokens=4)
    engine.add(request("a", range(8)))
    launched(engine)
    engine.add(request("b", range(8)))
    assert launched(engine).admissions[0].num_cached_tokens == 4
    engine.drain()


def test_prompts_that_start_in_one_step_compute_their_common_beginning_once() -> None:
    engine = loop(block_tokens=4, max_seqs=8)
    engine.add(request("a", [*range(8), 1, 1]))
    engine.add(request("other", [9] * 6))
    for name in "bcd":
        engine.add(request(name, [*range(8), 2, 2, 2, 2, ord(name) % 7]))

    plan = launched(engine)

    assert names(plan) == ["a", "other", "b", "c", "d"]
    assert [one.num_cached_tokens for one in plan.admissions] == [0, 0, 8, 12, 12]
    assert [row.num_tokens for row in plan.rows] == [10, 6, 5, 1, 1]
    engine.drain()


def test_a_prompt_is_read_in_the_step_that_computes_its_last_chunk() -> None:
    engine = loop(block_tokens=4, max_batch_tokens=16)
    engine.add(request("a", range(24)))
    engine.add(request("b", [*range(24), 1]))
    launched(engine)
    plan = launched(engine)
    assert names(plan) == ["a", "b"]
    assert plan.admissions[0].num_cached_tokens == 24
    engine.drain()


def test_prompts_of_other_salts_and_adapters_compute_their_own_beginning_in_one_step() -> None:
    engine = loop(block_tokens=4)
    engine.add(request("a", range(8)))
    engine.add(request("b", range(8), salt=b"other"))
    engine.add(request("c", range(8), adapter=AdapterId("one")))
    assert [one.num_cached_tokens for one in launched(engine).admissions] == [0, 0, 0]
    engine.drain()


@pytest.mark.parametrize("has_follower", [False, True])
def test_a_prompt_that_is_cancelled_before_its_commit_is_no_prefix_any_more(has_follower: bool) -> None:
    engine = loop(block_tokens=4)
    engine.add(request("a", range(9)))
    if has_follower:
        engine.add(request("b", range(9)))
    launched(engine)
    engine.cancel(RequestId("a"))
    engine.add(request("c", range(9)))
    assert launched(engine).admissions[0].num_cached_tokens == 0
    engine.drain()
    assert len(engine.batcher.blocks.cached) == 3 if has_follower else 2


def test_a_prompt_whose_leader_is_preempted_goes_on_alone() -> None:
    engine = loop(block_tokens=4, num_blocks=7, max_context=24)
    engine.add(replace(request("a", range(9), max_tokens=8), line_s=1.0))
    engine.add(replace(request("b", [*range(8), 7], max_tokens=12), line_s=0.5))
    engine.drain()
    assert engine.reasons == dict.fromkeys((RequestId("a"), RequestId("b")), FinishReason.LENGTH)


def test_a_prompt_whose_every_token_is_wanted_is_computed_from_its_beginning() -> None:
    engine, prompt = loop(), [5, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    for pooling, num_logprobs, num_cached in (
        (None, None, 0),
        (None, None, 8),
        (Pooling.LAST, None, 8),
        (Pooling.MEAN, None, 0),
        (None, 2, 0),
    ):
        params = SamplingParams(max_tokens=0, prompt_logprobs=num_logprobs)
        engine.add(EngineRequest(RequestId("a"), tuple(prompt), params, pooling=pooling))
        assert [one.num_cached_tokens for one in launched(engine).admissions] == [num_cached]
        engine.drain()


def test_a_request_of_no_tokens_may_fill_the_context() -> None:
    engine = loop(max_context=8)
    engine.add(request("full", range(8), max_tokens=0))
    engine.drain()
    assert engine.reasons == {"full": FinishReason.LENGTH}
    with pytest.raises(PromptTooLong, match="prompt has 9 tokens, limit: 8"):
        engine.add(request("more", range(9), max_tokens=0))


def test_other_salts_find_nothing() -> None:
    engine = loop(block_tokens=4)
    engine.add(request("a", range(8), salt=b"one"))
    engine.drain()
    engine.add(request("b", range(8), salt=b"two"))
    assert launched(engine).admissions[0].num_cached_tokens == 0


def test_requests_of_one_adapter_share_prefixes_and_others_find_nothing() -> None:
    engine = loop(block_tokens=4)
    one, two = AdapterId("one"), AdapterId("two")
    found = []
    for number, adapter in enumerate((one, two, None, one, two, None)):
        engine.add(request(str(number), range(9), adapter=adapter))
        found += [admission.num_cached_tokens for plan in engine.drain() for admission in plan.admissions]
    assert found == [0, 0, 0, 8, 8, 8]


def test_a_popular_adapter_stands_in_line_like_everybody() -> None:
    """Whoever came first is served first: neither many of one adapter nor few of another go before."""
    engine = loop(max_seqs=2)
    popular, rare = AdapterId("popular"), AdapterId("rare")
    chosen = [popular, popular, popular, rare, popular, None, popular]
    for number, adapter in enumerate(chosen):
        engine.add(request(str(number), range(3), adapter=adapter))
    admitted = [one.request_id for plan in engine.drain() for one in plan.admissions]
    assert admitted == [str(number) for number in range(len(chosen))]


def test_the_same_requests_decode_with_the_very_same_adapters() -> None:
    """By which whoever sends them to a device knows that it has them."""
    engine = loop()
    engine.add(request("a", range(3), max_tokens=9, adapter=AdapterId("one")))
    engine.add(request("b", range(3), max_tokens=9))
    decoded = [plan.decode.adapters for plan in engine.drain() if not plan.prompts]
    both = [adapters for adapters in decoded if len(adapters) == 2]
    assert both[0] == ["one", None]
    assert all(adapters is both[0] for adapters in both)


def test_the_device_of_these_tests_knows_behind_which_tokens_a_block_was_computed() -> None:
    engine = loop(block_tokens=4)
    engine.add(request("a", [1] * 4 + [2] * 4, max_tokens=6))
    engine.add(request("b", [3] * 4 + [2] * 4, max_tokens=6))
    launched(engine)
    tables = engine.device.tables
    tables[1][1] = tables[0][1]  # the same tokens, at the same place
    with pytest.raises(AssertionError, match="reads what was not written for it"):
        engine.launch()


@given(st.lists(st.tuples(PROMPTS, st.sampled_from([b"alice", b"bob", b""])), min_size=2, max_size=8))
@settings(derandomize=True)
def test_with_room_for_all_no_salt_changes_what_another_finds(
    asked: list[tuple[tuple[int, ...], bytes]],
) -> None:
    def found(salts: set[bytes]) -> dict[int, int]:
        engine = loop(block_tokens=2, num_blocks=513)
        num_cached = {}
        for number, (prompt, salt) in enumerate(asked):
            if salt in salts:
                engine.add(request(str(number), prompt, salt=salt))
                (admission,) = [one for plan in engine.drain() for one in plan.admissions]
                num_cached[number] = admission.num_cached_tokens
        return num_cached

    salts = {salt for _, salt in asked}
    together = found(salts)
    for salt in salts:
        alone = found({salt})
        assert alone == {number: together[number] for number in alone}


# --- preemption ---


def crowded() -> Loop:
    """Two sequences in two blocks each, all four in use, one token of each in flight."""
    engine = loop(num_blocks=5, block_tokens=4)
    engine.add(request("old", [1] * 8, max_tokens=6))
    engine.add(request("young", [2] * 8, max_tokens=6))
    launched(engine)
    return engine


def test_the_youngest_gives_way_when_blocks_run_out() -> None:
    engine = crowded()
    assert names(launched(engine)) == ["old"]
    assert (engine.batcher.num_running, engine.batcher.num_waiting) == (1, 1)


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    engine = loop(num_blocks=5, block_tokens=4)
    engine.add(request("old", [1] * 8, max_tokens=6))
    engine.add(request("young", [1] * 8, max_tokens=6))
    launched(engine)
    engine.commit()
    # `young` could come back at once on top of the prefix that it shares with `old`, but waits a step.
    assert [len(launched(engine).admissions) for _ in range(2)] == [0, 1]


def test_the_token_in_flight_of_a_preempted_sequence_is_still_its_own() -> None:
    engine = crowded()
    launched(engine)
    assert [emission.request_id for emission in engine.commit()] == ["old", "young"]


def test_a_preempted_sequence_resumes_over_prompt_and_output_before_later_arrivals() -> None:
    engine = crowded()
    engine.add(request("new", [3], max_tokens=1))
    plans = engine.drain()
    admissions = [admission for plan in plans for admission in plan.admissions]
    assert [admission.request_id for admission in admissions] == ["young", "new"]
    assert tuple(admissions[0].tokens) == (*[2] * 8, engine.outputs[RequestId("young")][0])
    assert admissions[0].num_prompt_tokens == 8


def test_a_preempted_sequence_is_not_admitted_while_its_token_is_unknown() -> None:
    engine = loop(num_blocks=5, block_tokens=4)
    engine.add(request("old", [1] * 8, max_tokens=1))
    engine.add(request("young", [2] * 8, max_tokens=6))
    launched(engine)
    assert engine.launch() is None  # the last of `old` is in flight, and `young` has given way to itself
    assert engine.launch() is None
    engine.commit()
    assert len(launched(engine).admissions[0].tokens) == 9


def test_the_youngest_gives_way_to_itself() -> None:
    engine = loop(num_blocks=5, block_tokens=4)
    engine.add(request("old", [1] * 6, max_tokens=2))
    engine.add(request("young", [2] * 8, max_tokens=6))
    launched(engine)
    assert names(launched(engine)) == ["old"]
    assert engine.batcher.num_waiting == 1


def test_a_sequence_preempted_with_its_last_token_in_flight_ends_at_the_commit() -> None:
    engine = loop(num_blocks=5, block_tokens=4)
    engine.add(request("old", [1] * 8, max_tokens=6))
    engine.add(request("young", [2] * 8, max_tokens=1))
    launched(engine)
    launched(engine)
    assert engine.batcher.num_waiting == 1
    assert engine.commit()[1].finish_reason is FinishReason.LENGTH
    assert engine.batcher.num_waiting == 0


def test_who_was_preempted_is_told_once() -> None:
    engine = crowded()
    assert engine.batcher.take_preempted() == ()
    launched(engine)
    assert engine.batcher.take_preempted() == ("young",)
    assert engine.batcher.take_preempted() == ()


def test_a_preemption_is_told_even_if_nothing_could_be_planned() -> None:
    engine = loop(num_blocks=5, block_tokens=4)
    engine.add(request("old", [1] * 8, max_tokens=1))
    engine.add(request("young", [2] * 8, max_tokens=6))
    launched(engine)
    assert engine.launch() is None
    assert engine.batcher.take_preempted() == ("young",)


def test_a_prompt_without_room_for_all_of_it_waits_instead_of_starting_over() -> None:
    """Beside the older sequence only a part fits: chunks of it would be computed and thrown away."""
    engine = loop(num_blocks=11, block_tokens=4, max_batch_tokens=8)
    engine.add(request("old", [1] * 9, max_tokens=14))
    engine.step()
    engine.add(request("young", [2] * 32, max_tokens=2))
    plans = engine.drain()
    assert [a.request_id for plan in plans for a in plan.admissions] == ["young"]
    assert sum(row.num_tokens for plan in plans for row in plan.rows if row.request_id == "young") == 32 + 1


def test_a_waiting_request_preempts_nobody() -> None:
    engine = loop(num_blocks=4, block_tokens=4)
    engine.add(request("a", [1] * 8, max_tokens=2))
    engine.add(request("b", [2] * 8, max_tokens=2))
    assert names(launched(engine)) == ["a"]
    assert names(launched(engine)) == ["a"]


# --- cancelling ---


def test_cancelling_an_unknown_request_says_so() -> None:
    assert not loop().batcher.cancel(RequestId("a"))


def test_a_waiting_request_can_be_cancelled() -> None:
    engine = loop()
    engine.add(request("a", [1]))
    engine.cancel(RequestId("a"))
    assert not engine.batcher.has_work


def test_tokens_of_a_cancelled_request_are_dropped() -> None:
    engine = loop()
    engine.add(request("a", [1]))
    launched(engine)
    engine.cancel(RequestId("a"))
    assert engine.commit() == []
    assert not engine.batcher.cancel(RequestId("a"))


def test_a_late_token_never_goes_to_a_new_request_of_the_same_id() -> None:
    engine = loop()
    engine.add(request("a", [1, 2]))
    launched(engine)
    engine.cancel(RequestId("a"))
    engine.add(request("a", [7, 8]))
    launched(engine)
    assert engine.commit() == []
    engine.drain()
    assert engine.reasons == {RequestId("a"): FinishReason.LENGTH}


def test_check_notices_a_block_that_the_book_does_not_know_about() -> None:
    engine = loop()
    engine.add(request("a", [1]))
    launched(engine)
    engine.batcher.blocks.allocate(1)
    with pytest.raises(AssertionError, match="block=2 held 0 times, in the book 1"):
        engine.batcher.check()


# --- failing ---

NAN = VOCABULARY  #: a token whose KV is NaN, and that is never sampled


def test_a_row_without_finite_logits_fails_its_request_alone() -> None:
    engine = loop()
    engine.device.nan_token = NAN
    engine.add(request("broken", [1, NAN]))
    engine.add(request("sound", [1, 2]))
    engine.drain()
    assert engine.reasons == {RequestId("broken"): LogitsNotFinite, RequestId("sound"): FinishReason.LENGTH}
    assert engine.outputs[RequestId("broken")] == []


def test_a_failure_says_after_how_many_tokens_and_what_to_do() -> None:
    engine = loop()
    engine.add(request("a", [1, 2], max_tokens=3))
    launched(engine)
    engine.commit()
    plan = launched(engine)
    (failure,) = engine.batcher.commit(plan, [0], [0]).failures
    assert failure.request_id == "a"
    assert "NaN or infinite logits after 2 tokens of prompt and 1 of output" in str(failure.error)
    assert "`hearth verify`" in str(failure.error)


def test_a_chunk_without_finite_logits_fails_before_the_prompt_ends_and_is_no_prefix() -> None:
    engine = loop(max_batch_tokens=8, block_tokens=4)
    engine.device.nan_token = NAN
    prompt = [1, 2, 3, 4, NAN, *[5] * 20]
    engine.add(request("a", prompt))
    assert not launched(engine).rows[0].samples
    engine.commit()
    assert engine.reasons == {RequestId("a"): LogitsNotFinite}
    assert len(engine.batcher.blocks.cached) == 0


def test_what_a_failed_request_found_and_nobody_else_reads_is_no_prefix_any_more() -> None:
    """The cause may lie there, and whoever asks again would fail again."""
    engine = loop(block_tokens=4)
    engine.add(request("before", [1] * 8, max_tokens=1))
    engine.drain()
    assert len(engine.batcher.blocks.cached) == 2
    engine.device.nan_token = NAN
    engine.add(request("a", [*[1] * 8, NAN]))
    assert launched(engine).admissions[0].num_cached_tokens == 8
    engine.commit()
    assert (len(engine.batcher.blocks.cached), engine.batcher.has_work) == (0, False)


def test_a_prefix_that_others_read_stays_when_one_reader_fails() -> None:
    engine = loop(block_tokens=4)
    engine.add(request("sound", [1] * 8, max_tokens=6))
    engine.step()
    engine.step()
    engine.device.nan_token = NAN
    engine.add(request("a", [*[1] * 8, NAN]))
    assert launched(engine).admissions[0].num_cached_tokens == 8
    engine.drain()
    assert engine.reasons[RequestId("a")] is LogitsNotFinite
    engine.add(request("again", [1] * 9))
    assert launched(engine).admissions[0].num_cached_tokens == 8
    engine.drain()


def test_a_beginning_that_is_nan_is_no_prefix_once_it_is_committed_whoever_reads_it() -> None:
    engine = loop(block_tokens=4)
    engine.device.nan_token = NAN
    engine.add(request("leader", [1, 2, 3, NAN, 5]))
    engine.add(request("same step", [1, 2, 3, NAN, 6]))
    launched(engine)
    engine.add(request("next step", [1, 2, 3, NAN, 7]))
    assert launched(engine).admissions[0].num_cached_tokens == 4
    engine.commit()
    engine.add(request("later", [1, 2, 3, NAN, 8]))
    assert launched(engine).admissions[0].num_cached_tokens == 0
    engine.drain()


def test_a_stuck_guide_fails_its_request_behind_the_token_that_it_took() -> None:
    engine = loop()
    engine.add(replace(request("a", [1], max_tokens=8), guide=Alternating(6, stuck_at=2)))
    engine.add(request("b", [2], max_tokens=8))
    engine.drain()
    assert engine.reasons == {RequestId("a"): GuideStuck, RequestId("b"): FinishReason.LENGTH}
    assert len(engine.outputs[RequestId("a")]) == 2


def test_a_guide_that_is_stuck_behind_the_last_token_harms_nobody() -> None:
    engine = loop()
    engine.add(replace(request("a", [1], max_tokens=2), guide=Alternating(6, stuck_at=2)))
    engine.drain()
    assert engine.reasons == {RequestId("a"): FinishReason.LENGTH}


# --- any schedule ---


class Schedules(Driven):
    """Any order of arrivals, steps up to two ahead, commits and cancellations, with few blocks."""

    @initialize(
        max_batch_tokens=st.integers(1, 16),
        max_seqs=st.integers(1, 5),
        max_context=st.integers(13, 30),
        block_tokens=st.integers(1, 4),
        spare_blocks=st.integers(0, 8),
        nan_token=st.none() | st.integers(0, VOCABULARY - 1),
        step_sizes=st.none() | st.sets(st.integers(1, 15)),
        num_flights=st.none() | st.integers(1, 4),
    )
    def start(
        self,
        max_batch_tokens: int,
        max_seqs: int,
        max_context: int,
        block_tokens: int,
        spare_blocks: int,
        nan_token: int | None,
        step_sizes: set[int] | None,
        num_flights: int | None,
    ) -> None:
        num_blocks = 1 + -(-13 // block_tokens) + spare_blocks
        sizes = (
            () if step_sizes is None else sorted(min(size, max_batch_tokens) for size in step_sizes | {16})
        )
        limits = BatchLimits(max_batch_tokens, max_seqs, max_context, tuple(sizes))
        self.engine = Loop(limits, BlockBook.fixed(num_blocks, block_tokens), num_flights)
        self.engine.device.nan_token = nan_token
        self.num_added = 0

    @precondition(lambda self: self.engine.batcher.num_flights is not None)
    @rule(num_flights=st.integers(1, 4))
    def change_flights(self, num_flights: int) -> None:
        self.engine.batcher.num_flights = num_flights

    @precondition(lambda self: self.engine.batcher.num_flights is not None and self.engine.in_flight)
    @rule(is_undone=st.booleans())
    def plan_ahead(self, is_undone: bool) -> None:
        if self.engine.ahead is None:
            self.engine.plan_ahead()
        if is_undone:
            self.engine.undo_ahead()

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        lost = data.draw(st.sampled_from(sorted(self.engine.live)))
        self.engine.resume(lost, RequestId(str(self.num_added)))
        self.num_added += 1

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data(), prompt=PROMPTS, sampling=SAMPLING, salt=SALTS)
    def replace(
        self, data: st.DataObject, prompt: tuple[int, ...], sampling: SamplingParams, salt: bytes
    ) -> None:
        """Cancel a request and at once give its id to another."""
        request_id = data.draw(st.sampled_from(sorted(self.engine.live)))
        self.engine.cancel(request_id)
        self.engine.add(EngineRequest(request_id, prompt, sampling, salt))

    @invariant()
    def every_request_is_live_or_ended(self) -> None:
        if hasattr(self, "engine"):
            assert len(self.engine.live) + len(self.engine.reasons) == self.num_added
            assert self.engine.batcher.num_running + self.engine.batcher.num_waiting == len(self.engine.live)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()
            assert len(self.engine.reasons) == self.num_added


Schedules.TestCase.settings = settings(derandomize=True, stateful_step_count=40)
TestAnySchedule = Schedules.TestCase
