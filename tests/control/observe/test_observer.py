"""The observer alone: events, actions and facts in; metrics, timelines and log lines out."""

from __future__ import annotations

import pytest

from hearth.control.observe.metrics import Metrics
from hearth.control.observe.observer import Observer
from hearth.control.observe.timeline import Timeline
from hearth.control.requests.caller import ANYBODY
from hearth.core.messages import LoadProgress, ModelLoaded, RungBytes, StepDone
from hearth.core.types import (
    Member,
    ModelId,
    Pipeline,
    RequestId,
    Rung,
    WorkerId,
    pipeline_name,
)
from hearth.policy.fleet import events
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import BrainConfig, RejectReason, Why
from hearth.policy.fleet.fleet import Fleet
from tests.control.shown_metrics import shown, shown_value
from tests.policy.fleet.world import profile

A = ModelId("a")
W0, W1 = WorkerId("w0"), WorkerId("w1")
R0 = RequestId("r0")


class Scene:
    """An observer, told of one request that arrives at 10 s."""

    def __init__(self, *, takes_turns: bool = False) -> None:
        self._metrics = Metrics(device_hour_price=7.2)
        self.observer = Observer(self._metrics, takes_turns=takes_turns)
        self.observer.begin(Timeline(R0, A, 10.0, 0.0, 7, ANYBODY.group))

    def arrive(self, *actions: events.Action) -> None:
        self.observer.observe(events.RequestArrived(10.5, R0, A, 7, None), actions)

    def metric(self, name: str) -> float:
        return shown_value(self._metrics, name)

    def shown(self) -> str:
        return shown(self._metrics)

    def marks(self) -> list[tuple[float, str]]:
        explained = self.observer.explain(R0, 100.0, lambda _: True)
        assert explained is not None
        return [(mark.at_s, mark.what) for mark in explained.marks]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def dispatch(worker: WorkerId = W0) -> events.Dispatch:
    return events.Dispatch(R0, A, worker, Why.FREE_ROOM, 0.0, ())


def load(worker: WorkerId = W0) -> events.LoadModel:
    return events.LoadModel(A, worker, 1, 2)


def test_a_request_that_is_taken_counts_its_prompt_and_one_that_is_rejected_does_not(scene: Scene) -> None:
    scene.arrive(events.Reject(R0, RejectReason.QUEUE_FULL, "full"))
    assert scene.metric('hearth_prompt_tokens_total{model="a"}') == 0
    scene.arrive()
    assert scene.metric('hearth_prompt_tokens_total{model="a"}') == 7


def test_the_queue_is_measured_from_the_arrival_at_the_gateway_to_the_order(scene: Scene) -> None:
    scene.arrive(load(), dispatch())
    assert scene.metric("hearth_queue_seconds_sum") == 0.5
    assert scene.marks() == [(0.0, "queued"), (0.5, "placed")]


def test_events_and_orders_alone_tell_a_cold_start(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    scene.arrive(load(), dispatch())
    ready = events.ModelReady(12.0, W0, A, (events.RungUse(Rung.DISK, 500, 1.0),), 1.25)
    scene.observer.observe(ready, [])
    assert scene.metric('hearth_cold_start_seconds_sum{tier="disk"}') == 1.25
    assert scene.metric('hearth_loaded_bytes_total{tier="disk"}') == 500
    assert scene.metric('hearth_loads_total{model="a",tier="disk"}') == 1
    assert [record.getMessage() for record in caplog.records] == [
        "model_loading model=a worker=w0 kv_floor_bytes=1",
        "model_ready model=a worker=w0 load_s=1.250 reused_bytes=0 rungs=disk:500",
    ]


@pytest.mark.parametrize(
    ("is_advice", "did"), [(False, "loaded on w0"), (True, "would have been loaded on w0")]
)
def test_a_request_shows_that_its_model_was_prewarmed(scene: Scene, is_advice: bool, did: str) -> None:
    order = events.Prewarm(A, W0, False, 1.0, 0.1, 1.0, is_advice)
    scene.observer.observe(events.TimerFired(4.0), [order])
    scene.arrive(load(), dispatch())
    explained = scene.observer.explain(R0, 100.0, lambda _: True)
    assert explained is not None
    (mark,) = (mark for mark in explained.marks if mark.what == "prewarm")
    assert mark.detail == f"{did} 6.5 s before, for a forecast"


def test_only_a_hosted_model_that_makes_room_is_an_eviction(scene: Scene) -> None:
    scene.arrive(load(), dispatch())
    for is_freed in (False, False, True):  # the second and third are of what is left of it
        scene.observer.observe(events.TimerFired(20.0), [events.Evict(A, W0, 0.1, is_freed)])
    assert scene.metric("hearth_evictions_total") == 1


def test_a_lost_worker_is_counted_and_its_requests_are_resumed(scene: Scene) -> None:
    scene.arrive(load(), dispatch())
    scene.observer.observe(events.WorkerLost(12.0, W0), [load(W1), dispatch(W1)])
    assert scene.metric("hearth_workers_lost_total") == 1
    assert scene.metric("hearth_resumes_total") == 1
    assert [what for _, what in scene.marks()] == ["queued", "placed", "worker_lost", "resumed"]


def test_a_request_that_switches_to_a_whole_replica_is_not_resumed(scene: Scene) -> None:
    name = pipeline_name(A, 3)
    pipeline = Pipeline(name, (Member(W0, 0, 2), Member(W1, 2, 4)), 5)
    staged = events.Dispatch(R0, name, W0, Why.STAGED, 0.0, ())
    switched = events.Dispatch(R0, A, W1, Why.SWITCHED, 0.0, ())
    stages = [events.LoadModel(name, worker, 1, 2, pipeline=pipeline) for worker in (W0, W1)]
    scene.arrive(load(), dispatch())
    scene.observer.observe(events.TimerFired(11.0), [events.CancelRun(R0, W0), *stages, staged])
    scene.observer.stepped(12.0, StepDone(name, [], [], busy_s=0.5), {}, 7)
    scene.observer.observe(events.ModelReady(13.0, W1, A, (), 1.0), [events.CancelRun(R0, W0), switched])
    assert [what for _, what in scene.marks()] == ["queued", "placed", "moved", "staged", "moved"]
    assert scene.metric("hearth_switches_total") == 1
    assert scene.metric("hearth_resumes_total") == 0
    assert scene.metric('hearth_output_tokens_total{model="a"}') == 7
    explained = scene.observer.explain(R0, 20.0, lambda _: True)
    assert explained is not None
    assert (explained.num_resumes, explained.why) == (0, Why.SWITCHED)
    assert any(mark.detail.startswith("a~3: layers 0 to 1 on w0") for mark in explained.marks)


def test_a_request_on_a_pipeline_beside_the_whole_model_is_lost_with_a_member(scene: Scene) -> None:
    name = pipeline_name(A, 3)
    pipeline = Pipeline(name, (Member(W0, 0, 2), Member(W1, 2, 4)), 5)
    stages = [events.LoadModel(name, worker, 1, 2, pipeline=pipeline) for worker in (W0, W1)]
    scene.arrive(*stages, events.Dispatch(R0, name, W0, Why.STAGED, 0.0, ()))
    scene.observer.observe(events.WorkerLost(12.0, W1), [dispatch()])
    assert [what for _, what in scene.marks()] == ["queued", "placed", "staged", "worker_lost", "resumed"]
    assert scene.metric("hearth_resumes_total") == 1


def test_a_request_is_told_in_whose_step_its_worker_was_lost_and_whether_that_counts(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.arrive(load(), dispatch())
    hung = "did not advance for 30 s, limit: 30 s,"
    scene.observer.observe(events.WorkerLost(12.0, W0, ModelId("b"), reason=hung), [load(W1), dispatch(W1)])
    scene.observer.observe(events.WorkerLost(14.0, W1, A), [])
    explained = scene.observer.explain(R0, 20.0, lambda _: True)
    assert explained is not None
    assert [mark.detail for mark in explained.marks if mark.what == "worker_lost"] == [
        f"w0 {hung} in a step of another model, not counted against it, after 0 tokens",
        "w1 died in a step of its model after 0 tokens",
    ]
    assert f"worker_lost worker=w0 model=b reason=`{hung}`" in caplog.messages


def test_only_a_worker_that_is_lost_by_itself_is_an_error(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    scene.observer.observe(events.WorkerLost(1.0, W0, reason="was stopped", is_with_node=True), [])
    scene.observer.observe(events.WorkerLost(2.0, W1), [])
    levels = [one.levelname for one in caplog.records if one.message.startswith("worker_lost")]
    assert levels == ["INFO", "ERROR"]


def test_a_worker_that_leaves_because_the_service_ends_is_not_lost(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.observer.close()
    scene.observer.observe(events.WorkerLost(12.0, W0), [])
    assert scene.metric("hearth_workers_lost_total") == 0
    assert caplog.records == []


def test_a_load_that_fails_ends_with_its_requests_and_a_ready_model_that_breaks_lets_go_of_them(
    scene: Scene,
) -> None:
    scene.arrive(load(), dispatch())
    scene.observer.observe(events.ModelFailed(12.0, W0, A, "the disk is gone"), [])
    assert "worker_lost" not in [what for _, what in scene.marks()]
    scene.observer.observe(events.TimerFired(13.0), [load(W1), dispatch(W1)])
    scene.observer.load_ended(14.0, W1, ModelLoaded(A, 2, (), 0, 0, 0.0, 0.0, 0.0, 0.5))
    scene.observer.observe(events.ModelFailed(15.0, W1, A, "it broke"), [])
    assert (5.0, "worker_lost") in scene.marks()


def test_the_details_of_a_load_are_facts_that_events_do_not_have(scene: Scene) -> None:
    scene.arrive(load(), dispatch())
    scene.observer.load_progressed(11.0, W0, LoadProgress(A, 1, 100, 4))
    rungs = (RungBytes(Rung.HOST, 300, 0.1),)
    scene.observer.load_ended(
        12.0, W0, ModelLoaded(A, 1, rungs, 700, 0, 0.25, 0.25, 0.5, 1.0, is_widened=True)
    )
    explained = scene.observer.explain(R0, 20.0, lambda _: True)
    assert explained is not None
    assert (explained.reused_bytes, explained.load_s) == (700, 1.5)
    assert [span.what for span in explained.spans] == ["queue", "open", "place", "load", "assemble"]
    assert (1.0, "layers_ready") in scene.marks()
    assert scene.metric("hearth_reused_bytes_total") == 700
    assert scene.metric('hearth_fallbacks_total{what="float32"}') == 1


def test_steps_tokens_and_ends_are_measured(scene: Scene) -> None:
    scene.arrive(load(), dispatch())
    scene.observer.stepped(11.0, StepDone(A, [1], [5], preempted=[9], step_s=0.25, busy_s=1.5), {}, 1)
    scene.observer.delivered(11.0, R0)
    scene.observer.delivered(11.5, R0)
    scene.observer.ended(12.0, R0, "stop", None)
    assert scene.metric("hearth_step_seconds_sum") == 0.25
    assert scene.metric('hearth_output_tokens_total{model="a"}') == 1
    assert scene.metric("hearth_preemptions_total") == 1, "also of a request that has just ended"
    assert scene.metric('hearth_ttft_seconds_sum{model="a"}') == 1.0
    assert scene.metric('hearth_itl_seconds_sum{model="a"}') == 0.5
    assert scene.metric('hearth_e2e_seconds_sum{model="a"}') == 2.0
    assert scene.metric('hearth_busy_seconds_total{model="a"}') == 1.5
    assert scene.metric('hearth_requests_total{model="a",outcome="stop"}') == 1
    assert scene.marks()[-1] == (2.0, "ended")


def test_the_series_of_a_removed_model_end_also_for_what_still_runs(scene: Scene) -> None:
    scene.arrive(load(), dispatch())
    scene.observer.observe(events.ModelRemoved(11.0, A), [])
    scene.observer.stepped(11.0, StepDone(A, [1], [5], step_s=0.25), {}, 1)
    scene.observer.delivered(11.0, R0)
    scene.observer.ended(12.0, R0, "model_removed", "it was removed")
    assert 'model="a"' not in scene.shown()


def test_models_and_keys_are_charged_for_the_time_of_devices() -> None:
    """`a` holds half of a shared device, and a request of key `k` runs from 10 to 16 s."""
    scene, fleet = Scene(), Fleet(BrainConfig())
    for event in (
        events.ModelDeployed(0.0, profile("a")),
        events.WorkerJoined(0.0, W0, "cuda", 100, device_share=0.5),
        events.RequestArrived(10.0, R0, A, 7, None, key="k"),
    ):
        step(fleet, event)
    for now_s in (14.0, 14.5, 16.0):
        scene.observer.charge(fleet.gpu_time, now_s)
    assert scene.metric('hearth_device_seconds_total{model="a"}') == pytest.approx(3.0)
    step(fleet, events.RequestFinished(16.0, R0, 5))
    scene.observer.charge(fleet.gpu_time, 18.0)
    assert scene.metric('hearth_device_seconds_total{model="a"}') == pytest.approx(4.0)
    assert scene.metric('hearth_idle_device_seconds_total{model="a"}') == pytest.approx(1.0)
    assert scene.metric('hearth_cost_total{model="a"}') == pytest.approx(4.0 * 7.2 / 3600)
    assert scene.metric('hearth_key_device_seconds_total{key="k"}') == pytest.approx(3.0)
    assert scene.metric('hearth_key_cost_total{key="k"}') == pytest.approx(3.0 * 7.2 / 3600)


def test_a_load_begins_with_the_turn_that_it_waits_for() -> None:
    scene = Scene(takes_turns=True)
    scene.arrive(load(), dispatch())
    scene.observer.observe(events.TurnBegan(14.0, W0, A), [])
    scene.observer.load_ended(14.5, W0, ModelLoaded(A, 1, (), 0, 0, 0.25, 0.125, 0.0, 0.375, place_s=0.125))
    explained = scene.observer.explain(R0, 100.0, lambda _: True)
    assert explained is not None
    assert [(span.what, span.begin_s, span.end_s) for span in explained.spans if span.end_s > 0.5] == [
        ("turn", 0.5, 4.0),
        ("open", 3.75, 4.0),  # a model is found before it has its turn
        ("place", 4.0, 4.125),
        ("load", 4.125, 4.5),
        ("assemble", 4.125, 4.125),
    ]
    assert [mark for mark in scene.marks() if "turn" in mark[1]] == [(0.5, "waits_for_turn"), (4.0, "turn")]


def test_a_request_that_waits_for_its_turn_says_which_models_are_in_turn() -> None:
    scene = Scene(takes_turns=True)
    scene.observer.observe(events.TurnBegan(9.0, W0, ModelId("b")), [])
    scene.observer.observe(events.TurnBegan(9.0, WorkerId("w9"), ModelId("c")), [])
    scene.arrive(load(), dispatch())
    explained = scene.observer.explain(R0, 100.0, lambda _: True)
    assert explained is not None
    assert [span.detail for span in explained.spans if span.what == "turn"] == [
        "its turn has yet to begin; in turn: b"
    ]


def test_only_the_first_load_of_a_hosted_model_is_news(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    scene = Scene(takes_turns=True)
    scene.arrive(load(), dispatch())
    for now_s in (12.0, 14.0):
        scene.observer.load_ended(now_s, W0, ModelLoaded(A, 1, (), 0, 0, 0.0, 0.0, 0.0, 0.5))
        scene.observer.observe(events.ModelReady(now_s, W0, A, (), 0.5), [])
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in lines] == ["model_loading", "model_ready"]


def test_tokens_are_on_time_or_late_by_the_pace_of_their_request(scene: Scene) -> None:
    """Due are the first token at 10.5 s and ten more a second, none later than 1.5 s after the one before."""
    scene.arrive(dispatch())
    for now_s in (10.5, 10.6, 10.8, 12.0):
        scene.observer.delivered(now_s, R0)
    scene.observer.ended(12.0, R0, "stop", None)
    assert scene.metric("hearth_tokens_on_time_total") == 2
    assert scene.metric("hearth_tokens_late_total") == 2
    assert scene.metric("hearth_requests_late_total") == 1
    assert scene.metric("hearth_requests_on_time_total") == 0


def test_a_model_that_cannot_be_pinned_is_told_to_people(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.arrive(events.RefusePin(A, W0, "it cannot be pinned"))
    assert scene.metric('hearth_fallbacks_total{what="unpinned"}') == 1
    assert [record.getMessage() for record in caplog.records] == [
        "pin_refused model=a worker=w0 reason=it cannot be pinned"
    ]
