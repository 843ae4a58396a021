"""Workers that load the whole model behind a stage of it: they answer together, and then each alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hearth.core.messages import ModelLoaded
from hearth.core.types import ModelId, pipeline_name
from hearth.memory.pool import EvictionTermsOf, Pool
from hearth.policy.turns.turn_policy import TurnRules
from tests.store.stored import converted
from tests.worker.harness import greedy
from tests.worker.in_process import LoopGateway
from tests.worker.test_stage_member import (
    CONTEXT,
    NAME,
    PAGE_BYTES,
    PROMPTS,
    Workers,
    alone,
    arena,
    pages,
    workers,
)

STAGES = pipeline_name(ModelId(NAME), 1)
NewPool = Callable[[EvictionTermsOf], Pool]
everywhere = pytest.mark.parametrize(
    ("new_pool", "turns"), [(arena, None), (pages, None), (arena, TurnRules()), (pages, TurnRules())]
)


def host(both: Workers) -> None:
    both.host(NAME, [1], STAGES)
    for gateway in both.gateways:
        gateway.host(NAME, converted(NAME, chunk_bytes=PAGE_BYTES), max_context=CONTEXT)


def await_whole(gateway: LoopGateway) -> None:
    while not any(load.model == NAME for load in gateway.loads):
        gateway.until(ModelLoaded)


@everywhere
def test_the_whole_model_is_loaded_behind_a_stage_also_without_requests(
    tmp_path: Path, new_pool: NewPool, turns: TurnRules | None
) -> None:
    with workers(tmp_path, new_pool, turns=turns) as both:
        host(both)
        for gateway in both.gateways:
            await_whole(gateway)
        in_stages = both.ask(STAGES, PROMPTS, greedy(20))
        whole = both.ask(NAME, PROMPTS, greedy(20))
    assert in_stages == whole == alone(tmp_path, PROMPTS, greedy(20))


@everywhere
@pytest.mark.parametrize("number", [0, 1])
def test_requests_switch_to_the_whole_model_with_all_tokens_so_far(
    tmp_path: Path, new_pool: NewPool, turns: TurnRules | None, number: int
) -> None:
    with workers(tmp_path, new_pool, turns=turns) as both:
        host(both)
        first, whole = both.gateways[0], both.gateways[number]
        runs = [first.start(STAGES, prompt, greedy(20)) for prompt in PROMPTS]
        while not all(first.answers[run].tokens for run in runs):
            first.hear()
        for run in runs:
            first.cancel(run)
        for gateway in both.gateways:
            gateway.drop(STAGES)
        first.ping()
        outputs = [first.answers[run].tokens for run in runs]
        rest = [
            whole.start(NAME, prompt, greedy(20), output=output)
            for prompt, output in zip(PROMPTS, outputs, strict=True)
            if len(output) < 20
        ]
        while not all(whole.answers[run].is_ended for run in rest):
            whole.hear()  # perhaps that the first member has cut off a later one
        more = iter(whole.answers[run] for run in rest)
        told = [output if len(output) == 20 else [*output, *next(more).tokens] for output in outputs]
        assert both.ask(NAME, PROMPTS, greedy(20)) == told
    assert told == alone(tmp_path, PROMPTS, greedy(20))


def test_a_stage_that_is_dropped_before_it_is_loaded_holds_up_no_load(tmp_path: Path) -> None:
    with workers(tmp_path) as both:
        first = both.gateways[0]
        host(both)
        first.drop(STAGES)
        await_whole(first)


def test_mapped_pages_of_a_stage_are_those_of_the_whole_model(tmp_path: Path) -> None:
    with workers(tmp_path, pages) as both:
        both.host(NAME, [1], STAGES)
        both.loaded(0), both.loaded(1)
        for gateway in both.gateways:
            whole = gateway.load(NAME, converted(NAME, chunk_bytes=PAGE_BYTES), max_context=CONTEXT)
            assert whole.reused_bytes > 0
        first, last = both.gateways
        first.drop(STAGES)
        last.drop(STAGES)
        told = [answer.tokens for answer in (last.ask(NAME, prompt, greedy(20)) for prompt in PROMPTS)]
        assert both.ask(NAME, PROMPTS, greedy(20)) == told
    assert told == alone(tmp_path, PROMPTS, greedy(20))
