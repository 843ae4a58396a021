"""The benchmark of elastic KV runs on a CPU with a tiny model, so that it works when a GPU is at hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.elastic.contest import Contest, in_turns
from bench.elastic.load import Load, Mark, Prompts, Run
from bench.elastic.pages import CountedPages, Maps
from bench.elastic.parts import PARTS, answers, merged
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


def test_parts_that_are_not_run_stay_as_they_were(tmp_path: Path) -> None:
    def found(value: int, *parts: str) -> dict[str, Any]:
        ones = [{"part": part, "value": value} for part in parts]
        return {"aims": ones, "rows": ones, "results": dict.fromkeys(parts, value)}

    earlier = tmp_path / "elastic.json"
    assert merged(found(1, "throughput"), earlier) == found(1, "throughput")
    earlier.write_text(json.dumps(found(1, "shares", "saturation")))

    again: Any = merged(found(2, "saturation", "throughput"), earlier)

    assert list(again["results"].items()) == [("shares", 1), ("throughput", 2), ("saturation", 2)]
    for key in ("aims", "rows"):
        assert [(one["part"], one["value"]) for one in again[key]] == list(again["results"].items())


def test_elastic_kv_begins_with_nothing_and_fixed_kv_with_all_of_it(mapped: Contest) -> None:
    load = Load.alike(4, SCALE.prompt_tokens, SCALE.new_tokens)

    elastic, fixed = mapped.measure(Arm.ELASTIC, load), mapped.measure(Arm.FIXED, load)

    assert elastic.run.marks[0].kv_blocks < 8 < fixed.run.marks[0].kv_blocks
    assert elastic.run.num_grown > 0 == fixed.run.num_grown
    assert elastic.maps.num_maps > 0 == fixed.maps.num_maps


def test_where_memory_is_full_of_weights_growing_takes_them_before_each_wave(mapped: Contest) -> None:
    load = Load((4, 4), range(4, 9), range(3, 7), left_share=0.0)

    pressed = mapped.measure(Arm.ELASTIC, load, is_pressed=True)

    assert pressed.taken_bytes >= 2 * PAGE_BYTES
    assert pressed.run.num_shrunk >= 1  # between the two waves
    assert 0 < pressed.maps.num_maps < BODY.kv_blocks  # those of the weights that came between do not count


def test_limited_kv_is_the_same_for_both_arms(mapped: Contest) -> None:
    mapped.stage.limit_kv(8)
    load = Load.alike(6, 8, 6)

    results = mapped.turns((Arm.ELASTIC, Arm.FIXED), load, 1)

    (elastic,), (fixed,) = results[Arm.ELASTIC], results[Arm.FIXED]
    assert 8 <= elastic.run.peak_blocks == fixed.run.peak_blocks < BODY.kv_blocks
    assert elastic.run.num_tokens == fixed.run.num_tokens == 6 * 6


def test_arms_change_their_order_from_round_to_round() -> None:
    assert "".join(arm[0] for arm in in_turns((Arm.ELASTIC, Arm.FIXED), 3)) == "effeef"


def test_every_run_of_a_load_has_the_same_lengths_and_other_tokens() -> None:
    engine, prompts = Stage(BODY, arena).engine, Prompts(ARCH.vocab_size)
    load = Load((3, 2), range(4, 9), range(2, 7))

    first, second = prompts.requests(engine, load), prompts.requests(engine, load)

    assert [len(wave) for wave in first] == [3, 2]
    for one, other in zip(chain(*first), chain(*second), strict=True):
        assert len(one.prompt) == len(other.prompt)
        assert one.sampling.max_tokens == other.sampling.max_tokens
        assert one.prompt != other.prompt


def test_gaps_are_those_between_steps_in_which_all_requests_get_a_token() -> None:
    marks = [Mark(0.0, 0, 0), Mark(1.0, 1, 4), Mark(1.5, 2, 4), Mark(1.75, 2, 8), Mark(3.0, 1, 6)]
    run = Run(elapsed_s=3.0, num_tokens=6, num_preempted=0, marks=tuple(marks))

    assert run.decode_gaps_ms(2) == [250.0]
    assert (run.tokens_per_s, run.decode_tokens_per_s(2)) == (2.0, 8.0)
    assert (run.num_grown, run.num_shrunk, run.peak_blocks) == (2, 1, 8)
