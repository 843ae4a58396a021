"""Samples and sums of the last hour, from the counters that metrics have."""

from __future__ import annotations

import math

import pytest

from hearth.control.observe.history import NUM_SAMPLES, SAMPLES_PER_MARK, History, percentiles
from hearth.control.observe.model_metrics import ModelMetrics
from hearth.control.observe.views import ProcessView
from hearth.core.types import ModelId, Rung, WorkerId
from hearth.policy.fleet import events

A = ModelId("a")


class Scene:
    def __init__(self) -> None:
        self.metrics = ModelMetrics()
        self.history = History(self.metrics.by_name, 3600.0, lambda: ProcessView((), (), 3, 2))

    def answer(self, model: str = "a", num_tokens: int = 10, first_token_s: float = 0.3) -> None:
        series = self.metrics.take(model)
        series.requests["stop"] += 1
        series.num_output_tokens += num_tokens
        series.first_token.observe(first_token_s)
        series.device_s += 2.0

    def load(self, *tiers: Rung) -> None:
        rungs = tuple(events.RungUse(tier, 100, 0.1) for tier in tiers)
        self.history.observe(events.ModelReady(0.0, WorkerId("w0"), A, rungs, 0.5), ())


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_sample_is_what_has_happened_since_the_one_before(scene: Scene) -> None:
    scene.answer()
    scene.history.take_sample(10.0)
    scene.answer(num_tokens=5)
    scene.answer("b", num_tokens=1)
    scene.metrics.take("b").requests["cancelled"] += 1
    scene.metrics.take("b").requests["overloaded"] += 1
    scene.load(Rung.HOST, Rung.DISK)
    scene.history.take_sample(10.0)
    scene.history.take_sample(10.0)

    first, second, third = scene.history.view().samples
    assert (first.num_answered, first.output_tokens) == (1, 10)
    assert (second.num_answered, second.num_cancelled, second.num_failed) == (2, 1, 1)
    assert (second.output_tokens, second.loads, second.loaded_bytes) == (
        6,
        {"disk": 1},
        {"host": 100, "disk": 100},
    )
    assert (third.num_answered, third.output_tokens, third.loads, third.first_token) == (0, 0, {}, None)
    assert (third.num_waiting, third.num_running) == (3, 2)
    assert scene.history.last_sample == third


def test_a_model_deployed_again_counts_from_nothing(scene: Scene) -> None:
    scene.answer(num_tokens=1000)
    scene.history.take_sample(10.0)
    scene.metrics.remove("a")
    scene.answer(num_tokens=7)
    scene.history.take_sample(10.0)

    assert [one.output_tokens for one in scene.history.view().samples] == [1000, 7]


def test_models_are_summed_up_over_an_hour_at_most(scene: Scene) -> None:
    scene.answer(num_tokens=1)
    scene.load(Rung.HOST)
    for _ in range(NUM_SAMPLES + SAMPLES_PER_MARK):
        scene.history.take_sample(10.0)
    scene.answer(num_tokens=20)

    view = scene.history.view()
    assert len(view.samples) == NUM_SAMPLES
    assert (view.models["a"].num_requests, view.models["a"].output_tokens) == (1, 20)
    assert (view.models["a"].device_s, view.models["a"].cost) == (2.0, 2.0)
    assert view.models["a"].last_load is not None
    assert view.models["a"].last_load.tier == "host"


def test_percentiles_lie_within_the_bucket_of_the_middle_request() -> None:
    found = percentiles((1.0, 2.0, 4.0), (0, 10, 0, 1))
    assert found is not None
    assert math.isclose(found.p50_s, 1.55)
    assert found.p95_s == 4.0  # beyond all bounds
    assert percentiles((1.0, 2.0, 4.0), (0, 0, 0, 0)) is None
