"""What an engine keeps between steps: in memory that is given, and filled anew when it was another's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hearth.engine.assemble import Memory, ModelSpec, block_bytes, tables_bytes, workspace_bytes
from hearth.engine.engine import Engine
from hearth.policy.batch.blocks import SINK_BLOCK
from tests.core.test_sizes import memory_of
from tests.engine.harness import ROOMY, ask, engine_for, engine_over, greedy, prompts_for
from tests.models.zoo import build

CPU = torch.device("cpu")
NUM_BLOCKS = 64


def engine_in(name: str, memories: list[Memory]) -> Engine:
    """Over memory that held NaN, which is added to `memories`."""

    def memory(spec: ModelSpec) -> Memory:
        sizes = workspace_bytes(spec, CPU), tables_bytes(spec), NUM_BLOCKS * block_bytes(spec)
        memories.append(
            Memory(*(torch.full((size,), 0xFF, dtype=torch.uint8) for size in sizes), SINK_BLOCK, 32)
        )
        return memories[-1]

    engine = engine_over(build(name).directory, ROOMY, memory=memory)
    assert (memories[-1].tables == 0xFF).all(), "memory that may be gone was touched"
    engine.runner.fill_tables()
    engine.add_blocks(range(1, NUM_BLOCKS))
    return engine


@pytest.mark.parametrize("name", ["llama-gqa", "opt-pre", "neox-parallel"])
def test_answers_are_the_same_in_given_tables_and_after_they_were_somebody_elses(name: str) -> None:
    prompts, params = prompts_for(160, [3, 9, 30]), greedy(6)
    sampled = replace(params, temperature=0.8, seed=5, top_p=0.9)
    own = engine_for(name)
    expected = [ask(own, prompts, one) for one in (params, sampled)]
    memories: list[Memory] = []
    engine = engine_in(name, memories)
    at_first = memories[0].tables.clone()

    assert [ask(engine, prompts, one) for one in (sampled, params)] == expected[::-1]
    assert not torch.equal(memories[0].tables, at_first)
    for _ in range(2):
        memories[0].tables.fill_(0xFF)
        engine.runner.fill_tables()
        assert torch.equal(memories[0].tables, at_first)
        assert [ask(engine, prompts, one) for one in (params, sampled)] == expected


def test_an_engine_computes_with_nothing_but_its_weights_and_the_memory_that_it_was_given() -> None:
    """But for the host's copies of inputs, of writes to the block table and of what comes back, two each."""
    memories: list[Memory] = []
    engine = engine_in("llama-gqa", memories)
    ask(engine, prompts_for(160, [3, 9, 30]), greedy(6))
    weights = engine.runner.layers.decoder.weights.layers[0].qkv.weight
    given = (memories[0].workspace, memories[0].tables, memories[0].kv, weights)

    others = memory_of(engine).keys() - {one.untyped_storage().data_ptr() for one in given}

    assert len(others) == 6
