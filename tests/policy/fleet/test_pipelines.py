"""Models too large for one worker. A worker has 100 bytes; a layer takes 10 and a block of its KV 1."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hearth.core.types import Hold, ModelId, NodeId, RequestId, WorkerId
from hearth.policy.fleet.brain import CUT_OFF_S
from hearth.policy.fleet.events import (
    Action,
    BrainConfig,
    CancelRun,
    Dispatch,
    Evict,
    LinkMeasured,
    LoadModel,
    LoadProgressed,
    ModelFailed,
    ModelReady,
    NodeLost,
    Reject,
    RejectReason,
    SetHold,
    SetTimer,
    StagesMeasured,
    TimerFired,
    Why,
    WorkerLost,
    WorkersExpected,
)
from hearth.policy.fleet.failures import FIRST_DELAY_S
from hearth.policy.fleet.fleet_state import restore, save
from hearth.policy.fleet.pipelines import share_layers
from hearth.policy.fleet.profile import Promise
from hearth.policy.fleet.residents import list_residents
from hearth.policy.fleet.routing import explain_wait
from tests.policy.fleet.test_brain import Desk, evicted, sent
from tests.policy.fleet.world import profile, staged

LARGE = staged("large", num_layers=12)


def joined(*workers: str, config: BrainConfig | None = None, budget_bytes: int = 100) -> Desk:
    desk = Desk(config)
    for worker in workers:
        desk.join(worker, budget_bytes)
    return desk


def loads(actions: list[Action]) -> dict[str, LoadModel]:
    return {action.worker: action for action in actions if isinstance(action, LoadModel)}


def layers(actions: list[Action]) -> dict[str, tuple[int, int]]:
    """The layers of each worker in the one pipeline that is formed."""
    (pipeline,) = {action.pipeline for action in loads(actions).values()}
    assert pipeline is not None
    assert [one.worker for one in pipeline.members] == list(loads(actions))
    return {one.worker: (one.begin, one.end) for one in pipeline.members}


def serving(desk: Desk) -> Desk:
    """A desk at which a pipeline on w1 and w2 runs a request."""
    desk.deploy(LARGE)
    desk.ask("r1", "large")
    desk.ready("large", "w1")
    desk.ready("large", "w2")
    return desk


def test_a_model_that_fits_no_worker_is_loaded_by_the_fewest_that_can() -> None:
    desk = joined("w1", "w2", "w3")
    desk.deploy(LARGE)
    actions = desk.ask("r1", "large")
    assert list(loads(actions)) == ["w1", "w2"]
    assert sent(actions) == {"r1": "w1"}
    (dispatch,) = [action for action in actions if isinstance(action, Dispatch)]
    assert dispatch.why is Why.FREE_ROOM
    assert [option.worker for option in dispatch.options] == ["w1", "w2"]


def test_workers_of_an_older_version_are_in_no_pipeline() -> None:
    desk = Desk()
    desk.join("old/w1", 110, runs_stages=False)
    desk.join("w2")
    desk.deploy(LARGE)
    (refused,) = desk.ask("r1", "large")
    assert isinstance(refused, Reject)
    desk.join("w3")
    assert list(loads(desk.ask("r2", "large"))) == ["w2", "w3"]
    assert restore(desk.fleet.config, save(desk.fleet)).workers[WorkerId("old/w1")].runs_stages is False


@pytest.mark.parametrize(
    ("workers", "transport"),
    [
        ({"w1": 0, "w2": 0}, "device memory"),
        ({"w1": 0, "w2": 1}, "shared memory"),
        ({"w1": None, "w2": None}, "shared memory"),
        ({"a/w1": 0, "b/w1": 0}, "TLS"),
    ],
)
def test_hidden_states_take_the_shortest_way(workers: dict[str, int | None], transport: str) -> None:
    desk = Desk()
    for name, gpu in workers.items():
        desk.join(name, gpu=gpu)
    desk.deploy(LARGE)
    (first, last) = loads(desk.ask("r1", "large")).values()
    assert first.pipeline is not None
    assert f", {transport}, layers 6 to 11 on {last.worker}" in first.pipeline.described
    assert [one.transport for one in list_residents(desk.fleet, 0.0)] == [None, transport]


def test_the_layers_that_are_shown_are_those_of_the_pipeline() -> None:
    desk = Desk()
    desk.join("w1", 60)
    desk.join("w2", 110)
    desk.deploy(profile("small", 50))
    desk.deploy(LARGE)
    assert share_layers(desk.fleet, profile("small", 50)) == ()
    told = share_layers(desk.fleet, LARGE)
    (first, last) = layers(desk.ask("r1", "large")).values()
    assert told == (first[1], last[1] - last[0]) == (4, 8)
    desk.lose("w2")
    assert share_layers(desk.fleet, LARGE) == (), "no workers could hold it now"


def test_layers_are_shared_out_and_one_context_is_promised() -> None:
    desk = joined("w1", "w2")
    desk.deploy(LARGE)
    actions = desk.ask("r1", "large")
    assert layers(actions) == {"w1": (0, 6), "w2": (6, 12)}
    first, last = loads(actions).values()
    assert first.pipeline == last.pipeline
    assert first.pipeline is not None
    assert first.pipeline.name == "large-1"
    assert first.pipeline.num_blocks == LARGE.stages["cuda"].context_blocks == 1
    for load in (first, last):  # 60 bytes of weights, 3 of the embedding or head, 2 blocks with the sink
        assert load.kv_floor_bytes == 2 * 6
        assert load.promise == Promise(75, 0, 75)


@pytest.mark.parametrize(("budget_bytes", "num_blocks"), [(100, 5), (80, 2)])
def test_kv_is_limited_by_the_worker_and_by_what_all_requests_can_use(
    budget_bytes: int, num_blocks: int
) -> None:
    desk = joined("w1", "w2", budget_bytes=budget_bytes)
    desk.deploy(LARGE)
    (load, _) = loads(desk.ask("r1", "large")).values()
    assert LARGE.stages["cuda"].max_blocks == 4
    assert load.max_kv_bytes // 6 == num_blocks, "with the sink"


def test_a_model_that_fits_one_worker_is_loaded_whole() -> None:
    desk = joined("w1", "w2")
    desk.join("w3", budget_bytes=200)
    desk.deploy(LARGE)
    actions = desk.ask("r1", "large")
    assert list(loads(actions)) == ["w3"]
    assert loads(actions)["w3"].pipeline is None


def test_workers_of_one_node_come_before_those_with_more_room_elsewhere() -> None:
    desk = joined("a/w1", "b/w1", "b/w2")
    desk.deploy(LARGE, profile("small", 5, min_kv_bytes=1, max_kv_bytes=1))
    assert list(loads(desk.ask("r0", "small"))) == ["a/w1"]
    desk.finish("r0")
    assert list(loads(desk.ask("r1", "large"))) == ["b/w1", "b/w2"]


def test_of_other_nodes_the_one_with_the_fastest_link_is_taken() -> None:
    desk = joined("a/w1", "b/w1", "c/w1")
    desk.deploy(LARGE)
    for target, bytes_per_s in (("b", 1e9), ("c", 2e9)):
        desk._step(LinkMeasured(0.0, NodeId("a"), NodeId(target), bytes_per_s, 0.001))
    assert list(loads(desk.ask("r1", "large"))) == ["a/w1", "c/w1"]


def test_layers_are_shared_out_by_the_times_of_the_last_pipeline() -> None:
    desk = serving(joined("w1", "w2"))
    desk.finish("r1")
    desk._step(StagesMeasured(0.0, WorkerId("w1"), ModelId("large"), (6.0, 8.0)))  # the head: two layers
    desk._step(WorkerLost(0.0, WorkerId("w2")))
    desk.join("w3")
    assert layers(desk.ask("r2", "large")) == {"w1": (0, 7), "w3": (7, 12)}


def test_times_of_stages_are_forgotten_with_the_bytes_that_took_them() -> None:
    desk = serving(joined("w1", "w2"))
    desk.finish("r1")
    desk._step(StagesMeasured(0.0, WorkerId("w1"), ModelId("large"), (6.0, 8.0)))
    desk.deploy(staged("large", num_layers=12, digest="other"))
    assert layers(desk.ask("r2", "large")) == {"w1": (0, 6), "w2": (6, 12)}


def test_fewer_stages_come_before_one_node() -> None:
    desk = joined("a/w1", "b/w1")
    for worker in ("c/w1", "c/w2", "c/w3", "c/w4"):
        desk.join(worker, budget_bytes=50)
    desk.deploy(LARGE)
    assert list(loads(desk.ask("r1", "large"))) == ["a/w1", "b/w1"]


def test_a_pipeline_stays_in_one_pool() -> None:
    desk = joined("w1")
    desk.join("w2", kind="cpu")
    desk.deploy(LARGE)
    (reject,) = [one for one in desk.ask("r1", "large") if isinstance(one, Reject)]
    assert reject.reason is RejectReason.NEVER_FITS


def test_it_is_ready_when_all_members_are() -> None:
    desk = joined("w1", "w2")
    desk.deploy(LARGE)
    desk.ask("r1", "large")
    replica = desk.fleet.models[ModelId("large")].replicas[WorkerId("w1")]
    desk._step(LoadProgressed(0.0, WorkerId("w2"), ModelId("large"), 20))
    desk._step(LoadProgressed(0.0, WorkerId("w1"), ModelId("large"), 10))
    assert replica.loaded_bytes == 30
    desk.ready("large", "w2")
    assert not replica.is_ready
    assert [one.loaded_bytes for one in list_residents(desk.fleet, 0.0)] == [10, 63]
    desk.ready("large", "w1")
    assert replica.is_ready
    assert [one.layers for one in list_residents(desk.fleet, 0.0)] == [(0, 6), (6, 12)]


def test_evictions_are_ordered_for_every_member_and_holds_for_none() -> None:
    desk = serving(joined("w1", "w2"))
    desk.finish("r1")
    desk.now_s = 20.0
    assert not [one for one in desk._step(TimerFired(20.0)) if isinstance(one, SetHold)]
    assert desk.fleet.models[ModelId("large")].replicas[WorkerId("w1")].hold is Hold.RETAINED
    desk.deploy(profile("small", 50))
    actions = desk.ask("r2", "small")
    assert [(one.model, one.worker) for one in evicted_orders(actions)] == [("large", "w1"), ("large", "w2")]


def evicted_orders(actions: list[Action]) -> list[Evict]:
    return [action for action in actions if isinstance(action, Evict)]


def test_idle_models_of_all_members_give_way() -> None:
    desk = joined("w1", "w2")
    desk.deploy(profile("a"), profile("b"), LARGE)
    for name in ("a", "b"):
        desk.ask(name, name)
    desk.finish("a")
    desk.finish("b")
    actions = desk.ask("r1", "large")
    assert evicted(actions) == ["a", "b"] or evicted(actions) == ["a"]
    assert list(loads(actions)) == ["w1", "w2"]


@pytest.mark.parametrize("lost", ["w1", "w2"])
def test_a_lost_member_dissolves_the_pipeline_and_its_requests_go_on(lost: str) -> None:
    desk = serving(joined("w1", "w2", "w3"))
    actions = desk.lose(lost)
    (other,) = {"w1", "w2"} - {lost}
    assert [(one.worker, one.is_freed) for one in evicted_orders(actions)] == [(other, False)]
    assert list(loads(actions)) == sorted([other, "w3"])
    assert sent(actions) == {"r1": min(other, "w3")}


def test_only_requests_in_the_step_of_the_lost_worker_are_at_fault() -> None:
    desk = serving(joined("w1", "w2", "w3", "w4"))
    desk.ask("r2", "large")
    desk._step(WorkerLost(0.0, WorkerId("w2"), ModelId("large"), in_step=(RequestId("r2"),)))
    requests = desk.fleet.queues.requests
    assert {name: one.num_losses for name, one in requests.items()} == {"r1": 0, "r2": 1}


def test_a_member_that_is_cut_off_blames_no_model() -> None:
    desk = serving(joined("w1", "w2"))
    cut_off = ModelFailed(0.0, WorkerId("w2"), ModelId("large"), "lost `w1`", is_cut_off=True)
    actions = desk._step(cut_off)
    assert [one.worker for one in evicted_orders(actions)] == ["w1"]
    assert not loads(actions), "`w1` may be dead"
    assert SetTimer(CUT_OFF_S) in actions
    actions = desk._step(TimerFired(CUT_OFF_S))
    assert list(loads(actions)) == ["w1", "w2"]
    model = desk.fleet.models[ModelId("large")]
    assert (model.failure, model.failed_on, model.num_deadly_loads) == (None, {}, 0)
    assert desk.fleet.queues.requests[RequestId("r1")].num_losses == 1, "it may have been the reason"
    (load, _) = loads(actions).values()
    assert load.pipeline is not None
    assert load.pipeline.name == "large-2"


def test_the_lost_worker_behind_a_cut_counts_once() -> None:
    desk = serving(joined("w1", "w2", "w3"))
    first = desk.fleet.models[ModelId("large")].replicas[WorkerId("w1")]
    assert [one.name for one in first.workers] == ["w1", "w2"]
    desk._step(ModelFailed(0.0, WorkerId("w2"), ModelId("large"), "lost `w1`", is_cut_off=True))
    actions = desk._step(WorkerLost(0.1, WorkerId("w1"), ModelId("large")))
    assert list(loads(actions)) == ["w2", "w3"]
    assert desk.fleet.queues.requests[RequestId("r1")].num_losses == 1


def test_members_that_never_meet_end_the_request_in_the_end() -> None:
    desk = joined("w1", "w2")
    desk.deploy(LARGE)
    desk.ask("r1", "large")
    cut_off = ModelFailed(0.0, WorkerId("w2"), ModelId("large"), "no way to `w1`", is_cut_off=True)
    for number in range(desk.fleet.config.max_resumes):
        now_s = number * CUT_OFF_S
        assert not loads(desk._step(replace(cut_off, now_s=now_s)))
        assert list(loads(desk._step(TimerFired(now_s + CUT_OFF_S)))) == ["w1", "w2"]
    (reject,) = [one for one in desk._step(cut_off) if isinstance(one, Reject)]
    assert "no way to `w1`" in reject.message


def test_members_that_never_meet_are_not_loaded_unasked_again_at_once() -> None:
    desk = joined("w1", "w2")
    assert list(loads(desk.deploy(replace(LARGE, is_pinned=True)))) == ["w1", "w2"]
    cut_off = ModelFailed(0.0, WorkerId("w2"), ModelId("large"), "no way to `w1`", is_cut_off=True)
    assert not loads(desk._step(cut_off))
    assert list(loads(desk._step(TimerFired(FIRST_DELAY_S)))) == ["w1", "w2"]


def test_a_member_that_fails_is_avoided() -> None:
    desk = joined("w1", "w2", "w3")
    desk.deploy(LARGE)
    desk.ask("r1", "large")
    actions = desk.fail("large", "w2")
    assert [one.worker for one in evicted_orders(actions)] == ["w1"]
    (reject,) = [one for one in actions if isinstance(one, Reject)]
    assert reject.reason is RejectReason.LOAD_FAILED
    assert list(loads(desk.ask("r2", "large"))) == ["w1", "w3"]


def test_a_draining_node_takes_no_more_requests_for_the_pipeline() -> None:
    desk = joined("a/w1", "b/w2", "c/w3")
    desk.deploy(LARGE)
    assert list(loads(desk.ask("r1", "large"))) == ["a/w1", "b/w2"]
    desk.drain_node("b")
    desk.ask("r2", "large")
    assert desk.fleet.queues.num_waiting == 1
    actions = desk.finish("r1")
    assert [one.worker for one in evicted_orders(actions)] == ["a/w1", "b/w2"]
    assert list(loads(actions)) == ["a/w1", "c/w3"]


def test_an_idle_pipeline_leaves_a_node_that_is_drained() -> None:
    desk = joined("a/w1", "b/w2")
    desk.deploy(LARGE)
    desk.ask("r1", "large")
    desk.finish("r1")
    assert [one.worker for one in evicted_orders(desk.drain_node("b"))] == ["a/w1", "b/w2"]


def test_a_redeployed_model_leaves_all_members() -> None:
    desk = serving(joined("w1", "w2"))
    desk.finish("r1")
    actions = desk.deploy(replace(LARGE, digest="other"))
    assert [(one.worker, one.is_freed) for one in evicted_orders(actions)] == [("w1", True), ("w2", True)]


def test_a_stopped_model_leaves_all_members() -> None:
    desk = serving(joined("w1", "w2"))
    desk.finish("r1")
    actions = desk.stop("large", is_freed=True)
    assert [(one.worker, one.is_freed) for one in evicted_orders(actions)] == [("w1", True), ("w2", True)]
    assert not desk.fleet.models[ModelId("large")].resident_bytes


def test_cancelled_requests_are_cancelled_on_the_first_member() -> None:
    desk = serving(joined("w1", "w2"))
    assert [one for one in desk.cancel("r1") if isinstance(one, CancelRun)] == [
        CancelRun(RequestId("r1"), WorkerId("w1"))
    ]


def test_parts_are_not_taken_for_the_whole_model() -> None:
    desk = serving(joined("w1", "w2"))
    model = desk.fleet.models[ModelId("large")]
    assert model.resident_bytes == {"w1": 63, "w2": 63}
    (dispatch,) = [one for one in desk.ask("r2", "large") if isinstance(one, Dispatch)]
    assert dispatch.options[0].missing_bytes == 0
    assert dispatch.why is Why.RESIDENT


def test_busy_models_on_several_workers_are_drained_for_an_overdue_pipeline() -> None:
    desk = joined("w1", "w2")
    desk.deploy(*(profile(name, 45, max_replicas=1) for name in ("a", "b", "c")), LARGE)
    for name in ("a", "b", "c"):
        desk.ask(name, name)
        desk.ready(name, *loaded_on(desk, name))
    desk.ask("r1", "large")
    desk.now_s = 3.0
    desk._step(TimerFired(3.0))
    (drain,) = desk.fleet.drains.values()
    assert {worker.name for worker in drain.workers} == {"w1", "w2"}
    for name in ("a", "b"):
        assert not loads(desk.finish(name))
    actions = desk.finish("c")
    assert list(loads(actions)) == ["w1", "w2"]
    assert sent(actions)["r1"] == "w1"


def loaded_on(desk: Desk, model: str) -> list[str]:
    return [str(name) for name in desk.fleet.models[ModelId(model)].replicas]


def test_a_drain_for_a_pipeline_in_vain_lets_all_its_workers_rest() -> None:
    desk = joined("w1", "w2")
    desk.deploy(profile("a", 60), profile("b", 60), LARGE)
    for name in ("a", "b"):
        desk.ask(name, name)
        desk.ready(name, *loaded_on(desk, name))
    desk.ask("r1", "large")
    for now_s in (3.0, 40.0):
        desk.now_s = now_s
        desk._step(TimerFired(now_s))
    assert not desk.fleet.drains
    assert desk.fleet.resting.keys() == {"w1", "w2"}


def test_while_it_waits_later_models_get_no_room() -> None:
    desk = joined("w1", "w2")
    desk.deploy(profile("a", 60), profile("b"), LARGE)
    desk.ask("a", "a")
    desk.ask("r1", "large")
    assert not loads(desk.ask("b", "b"))
    assert desk.fleet.queues.num_waiting == 2


def test_it_takes_no_turns_and_is_formed_beside_models_out_of_turn() -> None:
    desk = joined("w1", "w2", config=BrainConfig(takes_turns=True))
    desk.deploy(profile("a", 5, min_kv_bytes=1, max_kv_bytes=1), LARGE)
    desk.ask("a", "a")
    actions = desk.ask("r1", "large")
    assert list(loads(actions)) == ["w1", "w2"]
    replica = desk.fleet.models[ModelId("large")].replicas[WorkerId("w1")]
    assert replica.is_in_turn
    assert replica.hold is Hold.BUSY


def test_a_pinned_model_has_a_pinned_pipeline() -> None:
    for takes_turns in (False, True):
        desk = joined("w1", "w2", config=BrainConfig(takes_turns=takes_turns))
        actions = desk.deploy(replace(LARGE, is_pinned=True))
        assert list(loads(actions)) == ["w1", "w2"]
        assert desk.fleet.models[ModelId("large")].replicas[WorkerId("w1")].hold is Hold.PINNED
        desk.lose("w2")
        assert list(loads(desk.join("w3"))) == ["w1", "w3"]


def test_a_request_waits_for_workers_that_start() -> None:
    desk = joined("a/w1")
    desk.deploy(LARGE)
    desk._step(WorkersExpected(0.0, NodeId("b"), 1))
    assert not any(isinstance(one, Reject) for one in desk.ask("r1", "large"))
    assert list(loads(desk.join("b/w1"))) == ["a/w1", "b/w1"]


def test_a_request_of_a_lost_pipeline_waits_for_its_node_until_that_is_given_up() -> None:
    desk = joined("a/w1", "b/w1")
    desk.deploy(LARGE)
    desk.ask("r1", "large")
    desk._step(WorkersExpected(0.0, NodeId("b.next"), 1))
    assert not any(isinstance(one, Reject) for one in desk.lose("b/w1"))
    assert not any(isinstance(one, Reject) for one in desk._step(NodeLost(0.0, NodeId("b"))))
    (reject,) = [
        one for one in desk._step(WorkersExpected(0.0, NodeId("b.next"), 0)) if isinstance(one, Reject)
    ]
    assert reject.reason is RejectReason.NEVER_FITS


def test_what_cannot_be_split_over_the_workers_is_refused_with_the_numbers() -> None:
    desk = joined("w1")
    desk.deploy(LARGE)
    (reject,) = [one for one in desk.ask("r1", "large") if isinstance(one, Reject)]
    assert reject.reason is RejectReason.NEVER_FITS
    assert "it needs 2 stages of about 6 of its 12 layers, each at least 72 bytes" in reject.message
    assert "1 of 1 workers have that much memory; add workers" in reject.message


def test_while_a_lost_worker_is_replaced_requests_wait() -> None:
    desk = joined("w1", "w2")
    desk.deploy(LARGE)
    desk.lose("w2")
    assert not [one for one in desk.ask("r1", "large") if isinstance(one, Reject)]
    assert list(loads(desk.join("w3"))) == ["w1", "w3"]


def test_a_model_deployed_before_is_to_be_deployed_again() -> None:
    desk = joined("w1", "w2")
    desk.deploy(replace(LARGE, stages={}))
    (reject,) = [one for one in desk.ask("r1", "large") if isinstance(one, Reject)]
    assert "deploy it again with `--overwrite`" in reject.message


def test_a_pinned_model_may_leave_no_room() -> None:
    desk = joined("w1", "w2")
    desk.deploy(profile("a", 60, is_pinned=True), LARGE)
    (reject,) = [one for one in desk.ask("r1", "large") if isinstance(one, Reject)]
    assert reject.reason is RejectReason.PINNED_OUT
    assert "1 of 2 workers have that much beside pinned ones" in reject.message


def test_a_waiting_request_is_told_what_its_model_waits_for() -> None:
    desk = joined("w1", "w2")
    desk.deploy(profile("a", 60), LARGE)
    desk.ask("a", "a")
    desk.ask("r1", "large")
    assert explain_wait(desk.fleet, RequestId("r1")) == (
        "no worker can hold it: on `cuda` it needs 2 stages of about 6 of its 12 layers, each at least 72 "
        "bytes; 1 of 2 workers have that much beside busy models"
    )


def test_a_second_pipeline_is_formed_on_other_workers() -> None:
    desk = serving(joined("w1", "w2", "w3", "w4"))
    for number in range(4):
        desk.ask(f"more{number}", "large")
    desk.now_s = 3.0
    desk._step(TimerFired(3.0))
    replicas = desk.fleet.models[ModelId("large")].replicas
    assert [[worker.name for worker in one.workers] for one in replicas.values()] == [
        ["w1", "w2"],
        ["w3", "w4"],
    ]


def test_late_facts_of_a_dissolved_pipeline_change_nothing() -> None:
    desk = serving(joined("w1", "w2"))
    desk.lose("w1")
    assert not desk._step(ModelReady(0.0, WorkerId("w2"), ModelId("large"), (), 1.0))
    assert not desk._step(ModelFailed(0.0, WorkerId("w2"), ModelId("large"), "cut off", is_cut_off=True))
