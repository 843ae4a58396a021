"""The benchmark of elastic KV runs on a CPU with a tiny model, so that it works when a GPU is at hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bench.elastic.contest import Contest
from bench.elastic.load import Load, Prompts
from bench.elastic.pages import CountedPages, Maps
from bench.elastic.parts import PARTS, answers
from bench.elastic.setting import Batch, Scale, Surge
from bench.elastic.stage import Arm, Body, Stage
from bench.host_pages import HostPages
from bench.random_model import TINY
from hearth.core.config import EngineConfig
from hearth.memory.arena import ArenaPool
from hearth.memory.pool import EvictionTermsOf, Pool
from hearth.memory.vmm import MappedPool
from hearth.models.families import arch_from_config

PAGE_BYTES = 8 << 10
#: A block of KV takes half a page.
ARCH = arch_from_config({**TINY, "hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2})
CONFIG = EngineConfig(max_batch_tokens=64, max_seqs=16, block_tokens=4)
BODY = Body(ARCH, "float32", 24, CONFIG, torch.device("cpu"), kv_blocks=24, page_bytes=PAGE_BYTES)
SCALE = Scale(
    batches=(Batch(1, 1), Batch(4, 1)),
    prompt_tokens=8,
    new_tokens=6,
    arms=(Arm.ELASTIC, Arm.FIXED, Arm.PLAIN),
    num_fitting=3,
    surges=(Surge(1.0, 2, False), Surge(2.0, 2, True)),
    num_surge_rounds=1,
    gaps_batch=4,
)


def arena(eviction_terms: EvictionTermsOf) -> Pool:
    return ArenaPool(BODY.device, BODY.budget_bytes, eviction_terms)


@pytest.fixture
def pages() -> CountedPages:
    return CountedPages(HostPages(BODY.budget_bytes // PAGE_BYTES, PAGE_BYTES, num_spaces=16))


@pytest.fixture
def mapped(pages: CountedPages) -> Iterator[Contest]:
    pools: list[MappedPool] = []

    def new_pool(eviction_terms: EvictionTermsOf) -> Pool:
        pools.append(MappedPool(pages, eviction_terms))
        return pools[-1]

    stage = Stage(BODY, new_pool)
    yield Contest(stage, Prompts(ARCH.vocab_size), lambda: pages.maps)
    stage.close()
    pools[0].check()
    pools[0].close()


def contest_on(new_pool: Callable[[EvictionTermsOf], Pool]) -> Contest:
    return Contest(Stage(BODY, new_pool), Prompts(ARCH.vocab_size), Maps)


def test_every_part_answers_with_aims_and_rows_for_the_table() -> None:
    result: dict[str, Any] = json.loads(json.dumps(answers(contest_on(arena), SCALE, 1 << 30)))

    assert list(result["results"]) == list(PARTS)
    assert [set(aim) for aim in result["aims"]] == [{"measure", "measured", "aim", "met", "part"}] * 4
    assert all(row["value"] > 0 and row["peers"] for row in result["rows"])
    assert len({row["measure"] for row in result["rows"]}) == len(result["rows"]) == 9
    batch = result["results"]["throughput"]["batches"]["4"]
    assert set(batch["gaps_ms"]) == set(Arm)
    assert batch["decode_ratio_to_fixed"] != batch["whole_ratio_to_fixed"]


def test_limited_kv_is_the_same_for_both_arms(mapped: Contest) -> None:
    mapped.stage.limit_kv(8)
    load = Load.alike(6, 8, 6)

    results = mapped.turns((Arm.ELASTIC, Arm.FIXED), load, 1)

    (elastic,), (fixed,) = results[Arm.ELASTIC], results[Arm.FIXED]
    assert 8 <= elastic.run.peak_blocks == fixed.run.peak_blocks < BODY.kv_blocks
    assert elastic.run.num_tokens == fixed.run.num_tokens == 6 * 6
