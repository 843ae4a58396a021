"""Skipped steps leave the books as steps that were planned and committed one by one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import RequestId, SamplingParams
from hearth.policy.batch.batch_limits import BatchLimits
from hearth.policy.batch.batcher import Batcher
from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.elastic import Elastic, KvUse
from hearth.policy.batch.plan import EngineRequest, StepPlan

TOKEN = 7
BLOCK_TOKENS = 4
LIMITS = BatchLimits(max_batch_tokens=8, max_seqs=3, max_context=40)
#: Prompts are told apart by one token, so that some share what they publish.
REQUESTS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 19), st.sampled_from((TOKEN, 8))), min_size=1
)


def batcher_of(requests: list[tuple[int, int, int]], num_blocks: int) -> Batcher:
    batcher = Batcher(LIMITS, BlockBook(BLOCK_TOKENS, floor_blocks=10))
    batcher.kv.add(range(1, 1 + num_blocks))
    for number, (num_prompt, num_output, token) in enumerate(requests):
        sampling = SamplingParams(max_tokens=num_output, ignore_eos=True, seed=0)
        batcher.add(EngineRequest(RequestId(str(number)), (token,) * num_prompt, sampling))
    return batcher


class Stepper:
    """Steps a batcher, one step ahead of the device or not."""

    def __init__(self, batcher: Batcher, *, is_ahead: bool) -> None:
        self.batcher, self._is_ahead = batcher, is_ahead
        self._flight: StepPlan | None = None

    def step(self) -> StepPlan | None:
        plan = self.batcher.plan()
        committed, self._flight = (self._flight, plan) if self._is_ahead else (plan, None)
        if committed is not None:
            self.batcher.commit(committed, [TOKEN] * committed.num_samples)
        return plan

    def skip(self, num_steps: int) -> None:
        self._flight = self.batcher.skip(num_steps, TOKEN)


def step(batcher: Batcher) -> None:
    Stepper(batcher, is_ahead=False).step()


def books(batcher: Batcher) -> tuple[object, ...]:
    """All that later steps depend on."""
    batcher.settle()
    blocks = batcher.blocks
    running = [
        (one.request.request_id, one.slot, one.tokens, one.blocks, one.num_planned, one.num_published)
        for one in batcher._sequences.running()
    ]
    free, cached = sorted(blocks.free), list(blocks.cached)
    return running, batcher.num_waiting, free, cached, sorted(blocks.prefixes), blocks.num_holders


@given(REQUESTS, st.integers(10, 24), st.booleans(), st.data())
def test_skipped_steps_leave_the_books_as_single_ones_do(
    requests: list[tuple[int, int, int]], num_blocks: int, is_ahead: bool, data: st.DataObject
) -> None:
    skipping = Stepper(batcher_of(requests, num_blocks), is_ahead=is_ahead)
    stepping = Stepper(batcher_of(requests, num_blocks), is_ahead=is_ahead)
    while stepping.batcher.has_work:
        most = data.draw(st.integers(0, 30))
        run = skipping.batcher.decode_run(most)
        assert run.num_steps <= most
        if not run.num_steps:
            assert skipping.step() == stepping.step()
        else:
            skipping.skip(run.num_steps)
            for number in range(run.num_steps):
                plan = stepping.step()
                assert plan is not None
                assert tuple(row.request_id for row in plan.rows) == run.request_ids
                context_tokens = run.context_tokens + number * len(run.request_ids)
                assert sum(row.start + row.num_tokens for row in plan.rows) == context_tokens
        skipping.batcher.check()
        assert books(skipping.batcher) == books(stepping.batcher)
    assert not skipping.batcher.has_work


def test_a_run_ends_before_blocks_that_are_not_there() -> None:
    batcher = batcher_of([(4, 30, 8)], num_blocks=2)
    step(batcher)
    assert batcher.decode_run(30).num_steps == 4  # the rest of its second block
    assert batcher.decode_run(30, more_blocks=1).num_steps == 8


def test_a_run_ends_before_an_answer_does() -> None:
    batcher = batcher_of([(4, 6, 8)], num_blocks=10)
    step(batcher)
    assert batcher.decode_run(30).num_steps == 4


def test_no_step_is_skipped_while_somebody_could_be_admitted() -> None:
    batcher = batcher_of([(4, 6, 8)], num_blocks=10)
    step(batcher)
    batcher.add(EngineRequest(RequestId("late"), (1, 2), SamplingParams(max_tokens=4)))
    assert batcher.decode_run(30).num_steps == 0


@given(st.integers(20, 200), st.integers(1, 8), st.lists(st.integers(1, 60), min_size=1))
def test_kv_goes_back_after_skipped_steps_as_after_single_ones(
    num_blocks: int, num_running: int, runs: list[int]
) -> None:
    """Each step takes a block, as long as any is free."""
    skipping, stepping = Elastic(BLOCK_TOKENS), Elastic(BLOCK_TOKENS)
    use = KvUse(num_blocks, num_live=0, num_cached=0, num_wanted=0, num_running=num_running)

    def after(num_steps: int) -> KvUse:
        return replace(use, num_live=min(num_blocks, use.num_live + num_steps))

    for run in runs:
        num_steps = min(run, skipping.num_steps_left)
        for number in range(num_steps):
            stepping.growth(after(number))
            assert stepping.surplus_blocks(after(number + 1)) == 0
        use = after(num_steps)
        skipping.skip(num_steps, use)
        assert skipping.growth(use) == stepping.growth(use)
        use = after(1)
        assert skipping.surplus_blocks(use) == stepping.surplus_blocks(use)
