"""Engines whose KV grows, moves and shrinks between steps, against engines that are left alone.

Only memory is disturbed: bit-identical (DESIGN: same output, a). Preempted: the best tokens (b). All memory
holds NaN before it is given and after it is taken away, so whatever is read there shows.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from hearth.core.config import EngineConfig
from hearth.core.types import RequestId, SamplingParams
from hearth.engine.assemble import Memory, ModelSpec, block_bytes, tables_bytes, workspace_bytes
from hearth.engine.engine import Engine, Output
from hearth.policy.batch.blocks import BlockMove
from hearth.policy.batch.elastic import KvUse
from tests.engine.harness import ROOMY, Answer, assert_greedy, engine_over, greedy, prompts_for, run
from tests.models.zoo import build

NUM_BLOCKS, SINK, EXTENT_BLOCKS = 200, 150, 8
#: Scattered, as on an arena; none holds the sink.
EXTENTS = [range(first, first + EXTENT_BLOCKS) for first in range(3, 140, 11)]
LENGTHS = [1, 3, 4, 5, 17, 30]
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, logprobs=3, ignore_eos=True)


def elastic_memory(spec: ModelSpec, floor_blocks: int = 32, device: str = "cpu") -> Memory:
    sizes = (
        workspace_bytes(spec, torch.device(device)),
        tables_bytes(spec),
        NUM_BLOCKS * block_bytes(spec),
    )
    parts = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sizes]
    return Memory(*parts, SINK, floor_blocks)


def elastic_engine(
    name: str, config: EngineConfig = ROOMY, floor_blocks: int = 32, device: str = "cpu"
) -> Engine:
    memory = partial(elastic_memory, floor_blocks=floor_blocks, device=device)
    engine = engine_over(build(name).directory, config, device, memory=memory)
    engine.runner.fill_tables()
    return engine


def prompts(name: str) -> list[list[int]]:
    return prompts_for(build(name).model.config.vocab_size, LENGTHS)


def start(engine: Engine, asked: list[list[int]]) -> None:
    for number, prompt in enumerate(asked):
        engine.add(engine.request(RequestId(str(number)), prompt, PARAMS))


def take(engine: Engine, extent: range, *, may_preempt: bool = False, may_move: bool = True) -> bool:
    """As a pool does: what was taken away holds anything from then on."""
    if not engine.clear(extent, may_move=may_move, may_preempt=may_preempt):
        return False
    engine.runner.layers.kv[extent.start : extent.stop].view(torch.uint8).fill_(0xFF)
    return True


def finish(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    while engine.has_work:
        outputs.extend(engine.step().outputs)
    engine.batcher.check()
    return outputs


def undisturbed(name: str, asked: list[list[int]], device: str = "cpu") -> list[Output]:
    engine = elastic_engine(name, device=device)
    for extent in EXTENTS:
        engine.add_blocks(extent)
    start(engine, asked)
    return finish(engine)


def disturbed(name: str, asked: list[list[int]], seed: int, device: str = "cpu") -> tuple[list[Output], int]:
    """Extents come as they are wanted and go at random, live blocks moving. Returns how many went, too."""
    chance, engine = random.Random(seed), elastic_engine(name, device=device)
    absent, present, num_taken = list(EXTENTS), list[range](), 0
    start(engine, asked)
    outputs: list[Output] = []
    while engine.has_work:
        use = engine.batcher.kv.use()
        lacking = use.num_wanted - use.num_free
        while lacking > 0 or (chance.random() < 0.3 and absent):
            extent = absent.pop(chance.randrange(len(absent)))
            engine.add_blocks(extent)
            present.append(extent)
            lacking -= len(extent)
        outputs.extend(engine.step().outputs)
        for extent in chance.sample(present, len(present)):
            if chance.random() < 0.4 and take(engine, extent):
                present.remove(extent)
                absent.append(extent)
                num_taken += 1
        engine.batcher.check()
    never = sorted(set(range(NUM_BLOCKS)) - {SINK}.union(*EXTENTS))
    untouched = engine.runner.layers.kv[torch.tensor(never, device=device)].isnan().all()
    assert bool(untouched), "blocks that were never given were written"
    return outputs, num_taken


def test_a_flush_takes_in_the_step_in_flight_and_launches_none() -> None:
    engine = elastic_engine("llama-gqa")
    engine.add_blocks(EXTENTS[0])
    start(engine, prompts("llama-gqa")[:1])
    assert not engine.step().outputs

    outcome = engine.flush()

    assert (len(outcome.outputs), outcome.has_run, outcome.admitted) == (1, True, ())
    again = engine.flush()
    assert (len(again.outputs), again.has_run) == (0, False)
    assert engine.usage.num_running == 1


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "qwen3"])
def test_pauses_after_any_step_change_no_bit(name: str) -> None:
    """Requests that ended are known a step sooner, and change the plans; these all end at their length."""
    asked = prompts(name)
    expected = undisturbed(name, asked)
    for seed in range(3):
        chance, engine = random.Random(seed), elastic_engine(name)
        for extent in EXTENTS:
            engine.add_blocks(extent)
        start(engine, asked)
        outputs: list[Output] = []
        while engine.has_work:
            outputs.extend(engine.step().outputs)
            if chance.random() < 0.5:
                outputs.extend(engine.flush().outputs)
        assert outputs == expected


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "qwen3", "opt-350m"])
def test_blocks_that_come_go_and_move_change_no_bit(name: str) -> None:
    expected = undisturbed(name, prompts(name))
    num_taken = 0
    for seed in range(3):
        outputs, count = disturbed(name, prompts(name), seed)
        assert outputs == expected
        num_taken += count
    assert num_taken > 10, "nothing was disturbed"


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window"])
def test_blocks_that_come_go_and_move_change_no_bit_on_a_gpu(name: str) -> None:
    expected = undisturbed(name, prompts(name), "cuda")
    for seed in range(3):
        assert disturbed(name, prompts(name), seed, "cuda")[0] == expected


@pytest.mark.parametrize("may_move", [True, False])
def test_requests_that_gave_way_come_back_with_the_best_tokens(may_move: bool) -> None:
    name, asked = "llama-gqa", prompts("llama-gqa")
    engine = elastic_engine(name, floor_blocks=14)
    for extent in EXTENTS[:4]:
        engine.add_blocks(extent)
    start(engine, asked)
    answers = {RequestId(str(number)): Answer([]) for number in range(len(asked))}
    num_preempted, num_steps = 0, 0
    while engine.has_work:
        outcome = engine.step()
        num_preempted += len(outcome.preempted)
        for output in outcome.outputs:
            answers[output.request_id].tokens.append(output.token)
        num_steps += 1
        if num_steps % 6 == 0:
            taken = next(
                (e for e in EXTENTS[:4] if take(engine, e, may_move=may_move, may_preempt=True)), None
            )
            if taken is not None:
                engine.batcher.check()
                engine.add_blocks(taken)
        assert num_steps < 2000, "no progress"

    assert num_preempted > 0, "nothing was preempted"
    for prompt, answer in zip(asked, answers.values(), strict=True):
        assert_greedy(name, prompt, answer.tokens)
        assert len(answer.tokens) == 20


def test_without_blocks_an_engine_waits_and_then_goes_on() -> None:
    engine = elastic_engine("llama-gqa")
    start(engine, [[5, 6, 7]])
    empty = engine.step()
    assert (len(empty.outputs), empty.has_run) == (0, False)
    assert engine.batcher.kv.use() == KvUse(
        num_blocks=0, num_live=0, num_cached=0, num_wanted=1, num_running=0
    )
    engine.add_blocks(EXTENTS[0])
    assert len(finish(engine)) == 20
    assert engine.usage.kv_cached_blocks > 0


def test_cached_blocks_that_whoever_waits_would_read_are_not_to_spare() -> None:
    engine = elastic_engine("llama-gqa")
    engine.add_blocks(EXTENTS[0])
    start(engine, [list(range(2, 11))])
    finish(engine)
    num_cached = engine.usage.kv_cached_blocks
    assert engine.batcher.kv.cached_to_spare() == num_cached > 2

    engine.add(engine.request(RequestId("again"), [*range(2, 11), 77, 78], PARAMS))

    assert engine.batcher.kv.cached_to_spare() == num_cached - 2


def test_who_was_preempted_and_then_cancelled_is_told_of_no_more() -> None:
    engine = elastic_engine("llama-gqa", floor_blocks=1)
    engine.add_blocks(EXTENTS[0])
    engine.add_blocks(EXTENTS[1])
    start(engine, [[5, 6, 7], [8, 9, 10]])
    engine.step()
    assert take(engine, EXTENTS[0], may_preempt=True, may_move=False)
    engine.cancel(RequestId("1"))
    engine.cancel(RequestId("0"))

    assert engine.step().preempted == ()


def test_an_engine_that_had_no_requests_for_a_while_answers_as_before() -> None:
    engine = elastic_engine("llama-gqa")
    for extent in EXTENTS:
        engine.add_blocks(extent)
    params = SamplingParams(
        seed=3, max_tokens=8, frequency_penalty=0.5, logit_bias={7: 2.0}, temperature=0.7, ignore_eos=True
    )
    tokens = []
    for name in ("before", "after"):
        engine.add(engine.request(RequestId(name), [5, 6, 7], params))
        tokens.append([one.token for one in finish(engine)])
        assert engine.tables.needed_bytes() == {}, "no table of the request before is left"

    assert tokens[0] == tokens[1]


def test_the_sink_and_blocks_beyond_the_end_are_refused() -> None:
    engine = elastic_engine("llama-gqa")
    for extent in (range(SINK - 1, SINK + 1), range(NUM_BLOCKS - 1, NUM_BLOCKS + 1)):
        with pytest.raises(AssertionError, match="extent="):
            engine.add_blocks(extent)


def test_a_plan_that_names_a_block_which_is_not_there_is_never_launched() -> None:
    engine = elastic_engine("llama-gqa")
    engine.add_blocks(EXTENTS[0])
    start(engine, [[5, 6, 7]])
    engine.batcher.blocks._blocks.discard(EXTENTS[0].start)
    with pytest.raises(AssertionError, match="blocks that are not there"):
        engine.step()


def test_copies_are_whole_blocks_and_touch_no_other() -> None:
    engine = elastic_engine("llama-gqa")
    kv = engine.runner.layers.kv
    kv[4], kv[7] = 1.0, 2.0
    engine.runner.copy_blocks([BlockMove(4, 20), BlockMove(7, 5)])
    assert [float(kv[block].mean()) for block in (4, 7, 20, 5)] == [1.0, 2.0, 1.0, 2.0]
    assert int((~kv.flatten(1).isnan().any(1)).sum()) == 4


def test_weights_that_move_between_steps_change_no_token() -> None:
    asked = prompts("qwen3")
    engines = [elastic_engine("qwen3") for _ in range(2)]
    elsewhere = elastic_engine("qwen3").runner.layers.decoder.weights
    outputs = []
    for number, engine in enumerate(engines):
        for extent in EXTENTS:
            engine.add_blocks(extent)
        start(engine, asked)
        first = [output for _ in range(4) for output in engine.step().outputs]
        if number:
            engine.runner.rebind(elsewhere)
        outputs.append(first + finish(engine))
    assert outputs[0] == outputs[1]


def test_a_fixed_kv_and_an_elastic_one_give_the_same_tokens() -> None:
    asked, engine = prompts("llama-gqa"), elastic_engine("llama-gqa", replace(ROOMY, max_batch_tokens=16))
    for extent in EXTENTS:
        engine.add_blocks(extent)
    fixed = engine_over(build("llama-gqa").directory, replace(ROOMY, max_batch_tokens=16))
    answers = [
        run(each, [each.request(RequestId(str(n)), prompt, greedy()) for n, prompt in enumerate(asked)])
        for each in (engine, fixed)
    ]
    assert answers[0] == answers[1]
