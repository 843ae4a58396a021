from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hearth.core.config import EngineConfig
from hearth.core.errors import DeviceError
from hearth.core.types import RequestId
from tests.engine.harness import ROOMY, ask, engine_for, greedy

#: Of llama-gqa in float32, with blocks of 4 tokens: 3 layers, k and v, 2 kv heads of 16.
BLOCK_BYTES = 3 * 2 * 4 * 2 * 16 * 4
CONTEXT_BLOCKS = 128 // 4


@pytest.mark.parametrize(("kv_bytes", "num_blocks"), [(1, 0), (BLOCK_BYTES, 1), (2 * BLOCK_BYTES - 1, 1)])
def test_too_little_kv_memory_is_refused_with_the_numbers(kv_bytes: int, num_blocks: int) -> None:
    with pytest.raises(DeviceError) as refusal:
        engine_for("llama-gqa", replace(ROOMY, kv_bytes=kv_bytes))

    assert str(refusal.value) == (
        f"KV memory of {kv_bytes} bytes holds {num_blocks} blocks of {BLOCK_BYTES} bytes, at least 2 are "
        "needed; raise `engine.kv_bytes` or `engine.memory_fraction`, or use a smaller model"
    )


@pytest.mark.parametrize(("kv_bytes", "num_blocks"), [(2 * BLOCK_BYTES, 2), (10 * BLOCK_BYTES + 5, 10)])
def test_kv_has_as_many_blocks_as_fit(kv_bytes: int, num_blocks: int) -> None:
    engine = engine_for("llama-gqa", replace(ROOMY, kv_bytes=kv_bytes))

    assert engine.runner.layers.kv.shape == (num_blocks, 3, 2, 4, 2, 16)
    assert engine.runner.layers.kv.nbytes <= kv_bytes
    assert engine.batcher.blocks.num_blocks == num_blocks - 1


def test_kv_is_no_larger_than_sequences_can_fill() -> None:
    engine = engine_for("llama-gqa", replace(ROOMY, max_seqs=3, kv_bytes=1 << 40))

    assert len(engine.runner.layers.kv) == 1 + 3 * CONTEXT_BLOCKS


def test_limits_that_nobody_set_are_those_of_the_device_and_the_others_stay() -> None:
    config = EngineConfig(max_seqs=3, block_tokens=4, kv_bytes=1 << 20)
    limits = engine_for("llama-gqa", config).batcher.limits
    assert (limits.max_batch_tokens, limits.max_seqs) == (512, 3)


def test_without_a_size_kv_comes_from_the_memory_of_the_machine() -> None:
    engine = engine_for("llama-gqa", replace(ROOMY, max_seqs=2, kv_bytes=None))

    assert len(engine.runner.layers.kv) == 1 + 2 * CONTEXT_BLOCKS


def test_the_smallest_kv_serves_what_fits_one_block() -> None:
    engine = engine_for("llama-gqa", replace(ROOMY, kv_bytes=2 * BLOCK_BYTES))

    (answer,) = ask(engine, [[5, 6]], greedy(10))

    assert len(answer.tokens) == 2


def test_the_smallest_step_serves_any_prompt() -> None:
    roomy, tight = (
        engine_for("llama-gqa"),
        engine_for("llama-gqa", replace(ROOMY, max_batch_tokens=1, max_seqs=1)),
    )
    prompts = [[5, 6, 7], [8, 9]]

    assert ask(tight, prompts, greedy(4)) == ask(roomy, prompts, greedy(4))


def test_the_cpu_runs_without_graphs() -> None:
    assert engine_for("llama-gqa", replace(ROOMY, graphs="start")).runner.layers.graphs is None


def test_two_engines_share_no_memory() -> None:
    first, second = engine_for("llama-gqa"), engine_for("llama-gqa")
    first.runner.layers.kv.fill_(1.0)
    second.runner.layers.kv.fill_(2.0)
    first.add(first.request(RequestId("only"), [5, 6], greedy(3)))

    assert bool((first.runner.layers.kv == 1.0).all())
    assert (first.has_work, second.has_work) == (True, False)
    assert not torch.equal(first.runner.layers.kv, second.runner.layers.kv)
