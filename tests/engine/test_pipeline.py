"""A model in stages gives the tokens of the whole one; disturbed pipelines are in test_disturbances.py."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from hearth.core.config import EngineConfig
from hearth.engine.engine import Engine, StepOutcome
from hearth.engine.pending_step import StepInFlight
from hearth.engine.pipeline import PipelineRunner
from hearth.engine.stage_messages import StageResult
from hearth.policy.batch.plan import StepPlan
from tests.engine.harness import ROOMY, ask, engine_for, greedy, prompts_for
from tests.engine.pipeline_rig import LocalStages, pipeline_for
from tests.engine.test_elastic import EXTENTS
from tests.models.zoo import FAMILIES

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10, 12]]


MANY = replace(ROOMY, max_seqs=10)


def with_blocks(
    name: str, cuts: list[int], num_flights: int, config: EngineConfig = ROOMY, *, is_kv_wide: bool = False
) -> Engine:
    engine, _ = pipeline_for(name, cuts, num_flights, config, is_kv_wide=is_kv_wide)
    for extent in EXTENTS:
        engine.add_blocks(extent)
    return engine


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_in_stages_says_what_the_whole_one_says(name: str) -> None:
    whole = engine_for(name, ROOMY)
    num_layers = whole.runner.layers.decoder.arch.num_layers
    expected = ask(whole, PROMPTS, greedy())
    for num_flights, cuts in enumerate([[1], list(range(1, num_layers))], start=1):
        pipeline = with_blocks(name, cuts, num_flights, is_kv_wide=num_flights == 2)
        assert ask(pipeline, PROMPTS, greedy()) == expected


@pytest.mark.parametrize("name", ["llama-wide", "opt-wide"], ids=["untied", "tied"])
def test_four_uneven_stages_say_what_the_whole_model_says(name: str) -> None:
    """Of one, one, three and one layers, with as many steps in flight as stages, fewer and more."""
    prompts, whole = prompts_for(160, (7, 1, 13, 8, 2, 30, 5, 4, 19, 3)), engine_for(name, MANY)
    assert whole.runner.layers.decoder.arch.tied_head is (name == "opt-wide")
    expected = ask(whole, prompts, greedy())
    for num_flights in range(1, 6):
        pipeline = with_blocks(name, [1, 2, 5], num_flights, MANY)
        assert ask(pipeline, prompts[: 2 * num_flights], greedy()) == expected[: 2 * num_flights]
        assert isinstance(pipeline.runner, PipelineRunner)
        later = pipeline.runner._later
        assert isinstance(later, LocalStages)
        assert later.most_in_flight == num_flights


def test_a_pipeline_has_one_more_step_in_flight_once_hops_are_seen_to_take_long() -> None:
    pipeline = with_blocks("llama-gqa", [1], 2, MANY)
    runner = pipeline.runner
    assert isinstance(runner, PipelineRunner)
    later = runner._later
    assert isinstance(later, LocalStages)
    later.max_flights = 3
    assert runner.stage_times is None
    ask(pipeline, PROMPTS[:1], greedy())
    times = runner.stage_times
    assert times is not None, "steps of one request are alone"
    assert len(times.stage_s) == 2
    runner._hops_s.clear()
    runner._hops_s.append(3600.0)
    prompts = prompts_for(160, (7, 1, 13, 8, 2, 30))
    assert ask(pipeline, prompts, greedy()) == ask(engine_for("llama-gqa", MANY), prompts, greedy())
    assert later.most_in_flight == runner.num_flights == 3


def test_inputs_are_on_the_device_before_the_tokens_of_a_step_are_known() -> None:
    pipeline = with_blocks("llama-gqa", [1], 2)
    runner, prepared, launched = pipeline.runner, list[StepPlan](), list[StepPlan]()
    prepare, launch = runner.prepare, runner.launch

    def preparing(plan: StepPlan) -> None:
        prepared.append(plan)
        prepare(plan)

    def launching(plan: StepPlan, hidden: torch.Tensor | None = None) -> StepInFlight:
        launched.append(plan)
        return launch(plan, hidden)

    runner.prepare, runner.launch = preparing, launching  # type: ignore[method-assign] # for the test
    expected = ask(engine_for("llama-gqa", ROOMY), PROMPTS[:1], greedy())
    assert ask(pipeline, PROMPTS[:1], greedy()) == expected
    assert len(launched) > 2
    assert [plan.step_id for plan in prepared] == [plan.step_id for plan in launched[1:]], "all but the first"


@pytest.mark.parametrize("num_asked", range(2, 7))
@pytest.mark.parametrize("num_flights", [1, 2])
def test_a_result_may_come_at_any_moment_of_a_step(num_flights: int, num_asked: int) -> None:
    """For instance between planning ahead of it and committing it."""
    pipeline, prompts = with_blocks("llama-gqa", [1], num_flights), PROMPTS[:num_flights]
    later = pipeline.runner._later  # type: ignore[attr-defined] # of a pipeline
    num_calls, result = 0, later.result

    def once_asked_often(*, waits: bool) -> StageResult | None:
        nonlocal num_calls
        num_calls += 1
        return result(waits=True) if waits or (num_calls % num_asked == 0 and later._results) else None

    later.result = once_asked_often
    assert ask(pipeline, prompts, greedy()) == ask(engine_for("llama-gqa", ROOMY), prompts, greedy())


@pytest.mark.parametrize("num_tokens", [12, 40])
def test_the_number_of_flights_may_change_at_any_step(num_tokens: int) -> None:
    """A prompt of 40 tokens is computed in pieces, so that all flights are taken."""
    prompts = prompts_for(160, (num_tokens, 1, 13, 8, 2, 30))
    expected = ask(engine_for("llama-gqa", MANY), prompts, greedy())
    pipeline, random = with_blocks("llama-gqa", [1], 2, MANY), Random(1)
    later = pipeline.runner._later  # type: ignore[attr-defined] # of a pipeline
    step = pipeline.step

    def changed() -> StepOutcome:
        later.num_flights = random.randint(1, 4)
        return step()

    pipeline.step = changed  # type: ignore[method-assign] # for the test
    assert ask(pipeline, prompts, greedy()) == expected
