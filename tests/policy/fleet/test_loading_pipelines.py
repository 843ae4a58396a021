"""Workers that load the same model at once run it in stages meanwhile. A worker has 200 bytes, the model 66.

A byte takes a tenth of a second to load. Each worker is on a node of its own that has the model on its disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.core.types import ModelId, NodeId, Rung, WorkerId, node_of
from hearth.policy.fleet import kv_moves
from hearth.policy.fleet.audit import audit
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import (
    Action,
    BrainConfig,
    CancelRun,
    Dispatch,
    Evict,
    LinkMeasured,
    LoadModel,
    LoadProgressed,
    ModelDeployed,
    ModelFailed,
    Reject,
    ResidencyReported,
    WhileLoading,
    Why,
    WorkerJoined,
)
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.fleet_state import restore
from hearth.policy.fleet.profile import ModelProfile
from hearth.policy.fleet.residents import State, list_residents
from tests.policy.fleet.test_brain import Desk, of, sent
from tests.policy.fleet.test_fleet_state import encoded, values
from tests.policy.fleet.world import ALWAYS, KINDS, World, profile, staged

M = staged("m", num_layers=6, max_seqs=2)
CONFIG = BrainConfig(while_loading=WhileLoading(), priors=dict.fromkeys(Rung, 10.0))


def desk_with(
    *workers: str, config: BrainConfig = CONFIG, rung: Rung = Rung.DISK, model: ModelProfile = M
) -> Desk:
    desk = Desk(config)
    desk.deploy(model)
    for name in workers:
        desk.join(name, budget_bytes=200)
    for node in {node_of(WorkerId(name)) for name in workers}:
        desk._step(ResidencyReported(0.0, M.model, {rung: 66}, node))
    return desk


def burst(desk: Desk, num_requests: int) -> list[Action]:
    return [action for number in range(num_requests) for action in desk.ask(f"r{number + 1}", "m")]


def gathered(desk: Desk) -> list[Action]:
    """What follows once no further load is awaited."""
    desk.now_s += 0.05
    return desk.fire()


def formed(num_workers: int = 2) -> Desk:
    """A desk at which the workers that load the model for a burst are a pipeline."""
    desk = desk_with(*(f"n{number + 1}/w" for number in range(num_workers)))
    burst(desk, 2 * num_workers - 1)
    assert gathered(desk)
    return desk


def test_workers_of_an_older_version_load_without_a_pipeline() -> None:
    desk = Desk(CONFIG)
    desk.deploy(M)
    for name in ("n1/w", "n2/w"):
        desk.join(name, budget_bytes=200, runs_stages=name != "n2/w")
        desk._step(ResidencyReported(0.0, M.model, {Rung.DISK: 66}, node_of(WorkerId(name))))
    burst(desk, 3)
    assert not stages(gathered(desk))


def stages(actions: list[Action]) -> dict[str, tuple[int, int]]:
    """The layers of each worker in the pipeline that was formed."""
    pipelines = {load.pipeline for load in of(LoadModel, actions)} - {None}
    return {
        one.worker: (one.begin, one.end) for pipeline in pipelines if pipeline for one in pipeline.members
    }


def why(actions: list[Action]) -> dict[str, tuple[str, str, Why]]:
    return {one.request_id: (one.model, one.worker, one.why) for one in of(Dispatch, actions)}


def name_of(desk: Desk) -> str:
    (name,) = desk.fleet.loading_pipelines
    return name


def test_workers_that_load_a_model_at_once_load_their_stages_first() -> None:
    desk = desk_with("n1/w", "n2/w")
    burst(desk, 3)
    actions = gathered(desk)
    assert stages(actions) == {"n1/w": (0, 3), "n2/w": (3, 6)}
    for worker in ("n1/w", "n2/w"):
        mine = [one for one in actions if isinstance(one, Evict | LoadModel) and one.worker == worker]
        assert [(type(one), one.model) for one in mine] == [
            (Evict, "m"),
            (LoadModel, "m~5"),
            (LoadModel, "m"),
        ]


def test_requests_that_wait_for_the_loads_go_to_the_pipeline() -> None:
    desk = desk_with("n1/w", "n2/w")
    assert sent(burst(desk, 3)) == {"r1": "n1/w", "r2": "n1/w", "r3": "n2/w"}
    actions = gathered(desk)
    assert [(one.request_id, one.worker) for one in of(CancelRun, actions)] == [
        ("r1", "n1/w"),
        ("r2", "n1/w"),
        ("r3", "n2/w"),
    ]
    assert why(actions) == {
        "r1": ("m~5", "n1/w", Why.STAGED),
        "r2": ("m~5", "n1/w", Why.STAGED),
        "r3": ("m", "n1/w", Why.LOADING),  # all slots of the pipeline are taken
    }


def test_a_burst_over_more_workers_gets_smaller_stages() -> None:
    desk = desk_with("n1/w", "n2/w", "n3/w")
    burst(desk, 5)
    assert stages(gathered(desk)) == {"n1/w": (0, 2), "n2/w": (2, 4), "n3/w": (4, 6)}


def test_more_workers_than_layers_are_several_pipelines() -> None:
    desk = desk_with(*(f"n{number + 1}/w" for number in range(7)))
    burst(desk, 13)
    actions = gathered(desk)
    pipelines = desk.fleet.loading_pipelines.values()
    assert [[worker.name for worker in one.workers] for one in pipelines] == [
        ["n1/w", "n2/w", "n3/w"],
        ["n4/w", "n5/w", "n6/w", "n7/w"],
    ]
    names = {model for model, _, reason in why(actions).values() if reason is Why.STAGED}
    assert names == set(desk.fleet.loading_pipelines), "requests go to both"


def test_receivers_from_several_sources_form_pipelines_of_as_many_stages() -> None:
    desk = desk_with(*(f"n{number + 1}/w" for number in range(6)))
    for number in range(3, 7):
        desk._step(ResidencyReported(0.0, M.model, {}, NodeId(f"n{number}")))
    for node in ("n1", "n2"):  # only send
        desk.drain_node(node)
    burst(desk, 7)
    gathered(desk)
    pipelines = desk.fleet.loading_pipelines.values()
    assert [[worker.name for worker in one.workers] for one in pipelines] == [
        ["n3/w", "n4/w"],
        ["n5/w", "n6/w"],
    ]
    order = list(desk.fleet.models[M.model].loading)
    assert order == ["n3/w", "n4/w", "n5/w", "n6/w"], "by which sources share out receivers"


def test_workers_that_begin_later_form_a_pipeline_of_their_own() -> None:
    desk = formed()
    before = name_of(desk)
    for name in ("n3/w", "n4/w"):
        desk.join(name, budget_bytes=200)
        desk._step(ResidencyReported(desk.now_s, M.model, {Rung.DISK: 66}, node_of(WorkerId(name))))
    for number in range(4, 10):
        desk.ask(f"r{number}", "m")
    assert stages(gathered(desk)) == {"n3/w": (0, 3), "n4/w": (3, 6)}
    assert len(desk.fleet.loading_pipelines) == 2
    for worker in ("n1/w", "n2/w"):
        desk.ready("m", worker)
    assert before not in desk.fleet.loading_pipelines
    assert len(desk.fleet.loading_pipelines) == 1


def test_with_a_target_requests_go_where_the_first_token_comes_first() -> None:
    desk = desk_with("n1/w", "n2/w", config=replace(CONFIG, first_token_s=1.0))
    burst(desk, 3)
    gathered(desk)
    (pipeline,) = desk.fleet.loading_pipelines.values()
    whole = desk.fleet.models[M.model].loading.values()
    expected_s = [one.prompts_until_s - desk.now_s for one in (pipeline, *whole)]
    assert expected_s == [pytest.approx(3.3), pytest.approx(6.6), pytest.approx(6.6)], "by their loads"
    desk.finish("r1")
    assert why(desk.ask("r4", "m"))["r4"][0] == pipeline.model.name
    desk.finish("r2")
    pipeline.prompts_until_s += 4.0  # as after long prompts
    assert why(desk.ask("r5", "m"))["r5"][0] == "m"


def test_one_worker_forms_no_pipeline() -> None:
    desk = desk_with("n1/w", "n2/w")
    burst(desk, 2)
    assert desk.fleet.timer_s is None or desk.fleet.timer_s > 1.0
    assert not desk.fleet.gathering


def test_nothing_is_formed_unless_it_is_wanted() -> None:
    desk = desk_with("n1/w", "n2/w", config=replace(CONFIG, while_loading=None))
    burst(desk, 3)
    assert not gathered(desk)


def test_workers_that_load_over_the_same_way_gain_nothing() -> None:
    one_disk = desk_with("n1/v", "n1/w")
    burst(one_disk, 3)
    assert not stages(gathered(one_disk))
    one_source = desk_with("n1/w", "n2/w", "n3/w")
    for node in ("n2", "n3"):
        one_source._step(ResidencyReported(0.0, M.model, {}, NodeId(node)))
    one_source.drain_node("n1")
    burst(one_source, 3)
    assert not stages(gathered(one_source))


def test_workers_of_one_node_each_have_their_own_way_to_its_host_memory() -> None:
    desk = desk_with("n1/v", "n1/w", rung=Rung.HOST)
    burst(desk, 3)
    assert stages(gathered(desk)) == {"n1/v": (0, 3), "n1/w": (3, 6)}


def test_a_load_that_is_almost_done_is_not_begun_again() -> None:
    desk = desk_with("n1/w", "n2/w")
    burst(desk, 2)
    desk.progress("m", "n1/w", 40)
    desk.ask("r3", "m")
    assert not stages(gathered(desk))


def test_a_worker_without_room_for_a_stage_loads_the_whole_model_alone() -> None:
    desk = desk_with("n1/w", "n2/w")
    desk.join("n3/w", budget_bytes=80)
    burst(desk, 5)
    assert len(desk.fleet.models[M.model].loading) == 3
    assert stages(gathered(desk)) == {"n1/w": (0, 3), "n2/w": (3, 6)}


def test_a_new_request_goes_to_the_pipeline_until_a_whole_replica_is_ready() -> None:
    desk = formed()
    for worker in ("n1/w", "n2/w"):
        desk.ready(name_of(desk), worker)
    desk.finish("r1")
    assert why(desk.ask("r4", "m"))["r4"] == (name_of(desk), "n1/w", Why.STAGED)
    desk.finish("r2")
    desk.ready("m", "n2/w")
    assert why(desk.ask("r5", "m"))["r5"] == ("m", "n2/w", Why.RESIDENT)


def test_when_no_member_loads_any_more_requests_switch_to_whole_replicas() -> None:
    desk = formed()
    pipeline = name_of(desk)
    for worker in ("n1/w", "n2/w"):
        desk.ready(pipeline, worker)
    desk.cancel("r3")
    assert not desk.ready("m", "n1/w")
    actions = desk.ready("m", "n2/w")
    assert why(actions) == {"r1": ("m", "n1/w", Why.SWITCHED), "r2": ("m", "n2/w", Why.SWITCHED)}
    assert [one.request_id for one in of(CancelRun, actions)] == ["r1", "r2"]
    assert [(one.model, one.worker, one.is_freed) for one in of(Evict, actions)] == [
        (pipeline, "n1/w", True),
        (pipeline, "n2/w", True),
    ]
    assert not desk.fleet.loading_pipelines
    assert pipeline not in desk.fleet.models


def test_a_pipeline_that_comes_too_late_is_given_up() -> None:
    desk = formed()
    desk.ready(name_of(desk), "n1/w")
    actions = desk.ready("m", "n1/w")
    assert {one: told[2] for one, told in why(actions).items()} == {"r1": Why.SWITCHED, "r2": Why.SWITCHED}
    assert not desk.fleet.loading_pipelines


@pytest.mark.parametrize("lost", ["n1/w", "n2/w"])
def test_requests_of_a_lost_member_go_on_where_the_model_still_loads(lost: str) -> None:
    desk = formed()
    for worker in ("n1/w", "n2/w"):
        desk.ready(name_of(desk), worker)
    desk.cancel("r3")
    actions = desk.lose(lost)
    (other,) = {"n1/w", "n2/w"} - {lost}
    assert set(sent(actions).values()) == {other}
    assert sent(actions).keys() == {"r1", "r2"}
    assert all(one.is_freed for one in of(Evict, actions))
    assert not of(Reject, actions)


def test_a_stage_that_fails_costs_no_request_anything() -> None:
    desk = formed()
    pipeline = name_of(desk)
    actions = desk._step(ModelFailed(desk.now_s, WorkerId("n2/w"), ModelId(pipeline), "no memory"))
    assert [(one.model, one.worker) for one in of(Evict, actions)] == [(pipeline, "n1/w")]
    assert {one: told[0] for one, told in why(actions).items()} == {"r1": "m", "r2": "m"}
    assert not any(request.num_losses for request in desk.fleet.queues.requests.values())
    assert desk.fleet.models[M.model].failure is None


def test_the_pipeline_of_a_replaced_version_ends_with_its_requests() -> None:
    desk = formed()
    pipeline = name_of(desk)
    for worker in ("n1/w", "n2/w"):
        desk.ready(pipeline, worker)
    desk.deploy(replace(M, digest="new"))
    for worker in ("n1/w", "n2/w"):
        desk.ready("m", worker)
    assert name_of(desk) == pipeline
    assert pipeline not in {told[0] for told in why(desk.ask("r4", "m")).values()}
    desk.finish("r1")
    assert [one.model for one in of(Evict, desk.finish("r2"))] == [pipeline, pipeline]


def test_a_request_with_an_adapter_waits_for_a_whole_replica() -> None:
    desk = formed()
    desk.finish("r1")
    actions = desk.ask("r4", "m", adapter="a")
    assert why(actions)["r4"][0] == "m"


def test_an_idle_pipeline_gives_way_first() -> None:
    desk = formed()
    pipeline = name_of(desk)
    for request in ("r1", "r2", "r3"):
        desk.cancel(request)
    desk.deploy(profile("other", 100))
    assert [one.model for one in of(Evict, desk.ask("r4", "other"))] == [pipeline, pipeline]
    assert not desk.fleet.loading_pipelines


def test_it_is_shown_with_its_layers() -> None:
    desk = formed()
    desk._step(LoadProgressed(desk.now_s, WorkerId("n2/w"), ModelId(name_of(desk)), 10))
    shown = {(one.model, one.worker): one for one in list_residents(desk.fleet, desk.now_s)}
    stage = shown[ModelId(name_of(desk)), WorkerId("n2/w")]
    assert (stage.state, stage.layers, stage.loaded_bytes) == (State.LOADING, (3, 6), 10)
    assert shown[M.model, WorkerId("n2/w")].layers is None


@pytest.fixture(autouse=True, scope="module")
def moves_kv() -> Iterator[None]:
    """Even the few tokens of requests here are moved, of models whose KV has bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_moves, "SETUP_S", 0.0)
        yield


CONFIGS = st.builds(BrainConfig, takes_turns=st.booleans(), while_loading=st.just(ALWAYS))
MOVES = [one for one in KINDS if one not in ("join", "deploy")] + ["arrive"] * 10 + ["wait"] * 4


def lived(config: BrainConfig, moves: Sequence[tuple[str, int]]) -> tuple[World, int]:
    """A world in which several workers often load the same model, and how many pipelines were formed."""
    world = World(config)
    for number in range(3):
        world.tell(WorkerJoined(0.0, WorkerId(f"n{number}/w"), "cuda", 200, node=NodeId(f"n{number}")))
    for number in range(3):
        model = staged(f"m{number}", 2 + number, max_seqs=1 + number, kv_token_bytes=number)
        world.tell(ModelDeployed(0.0, model))
    for source, target in permutations(world.fleet.workers.values(), 2):
        world.tell(LinkMeasured(0.0, source.node, target.node, 1e9, 0.0))
    for kind, number in moves:
        world.move(kind, number)
    names = {one.model for actions in world.actions for one in of(LoadModel, actions) if "~" in one.model}
    return world, len(names)


@settings(max_examples=200)
@given(CONFIGS, st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 10_000)), max_size=100))
def test_whatever_happens_every_request_ends_once(
    config: BrainConfig, moves: Sequence[tuple[str, int]]
) -> None:
    world, _ = lived(config, moves)
    world.come_to_rest()
    assert not world.cluster.requests
    assert world.cluster.num_arrived == world.cluster.num_ended
    assert not world.fleet.loading_pipelines


@pytest.mark.parametrize("num_before", [6, 7, 8, 9])
def test_a_fleet_with_a_pipeline_is_restored_and_decides_the_same(num_before: int) -> None:
    moves = [("arrive", 2)] * 6 + [("wait", 0), ("ready", 3), ("ready", 4), ("arrive", 2), ("finish", 0)]
    config = BrainConfig(while_loading=ALWAYS)
    world, num_pipelines = lived(config, [*moves, *[("ready", 0)] * 6, ("drain_node", 0), ("finish", 0)])
    assert num_pipelines == 1
    num_before += 12  # workers, models and links
    fleet = Fleet(config)
    for event in world.events[:num_before]:
        step(fleet, event)
    restored = restore(config, encoded(fleet))
    assert list(values(restored)) == list(values(fleet))
    audit(restored)
    for event, actions in list(zip(world.events, world.actions, strict=True))[num_before:]:
        assert step(restored, event) == actions


def test_a_life_with_bursts_has_pipelines() -> None:
    burst = [("arrive", 0)] * 6 + [("wait", 0)] * 3
    _, num_pipelines = lived(BrainConfig(while_loading=ALWAYS), burst)
    assert num_pipelines == 1
