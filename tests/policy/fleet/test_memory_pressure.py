"""Replicas that run out of KV memory. A worker has 100 bytes, a model takes 35; it has room for 50 tokens."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from hearth.core.types import ModelId, WorkerId
from hearth.policy.fleet.audit import audit
from hearth.policy.fleet.drop_group import HOLD_S, DropState
from hearth.policy.fleet.events import (
    Action,
    BrainConfig,
    CancelRun,
    ComputedPrompt,
    DemandForecast,
    Dispatch,
    Evict,
    LoadModel,
    PressureReported,
    Prewarming,
    Reject,
    Why,
)
from hearth.policy.fleet.fleet_state import restore, save
from hearth.policy.fleet.profile import ModelProfile
from tests.policy.fleet.test_brain import Desk, of
from tests.policy.fleet.world import begun, profile, staged


def press(
    desk: Desk, worker: str, demand_tokens: int, model: str = "m", room_tokens: int = 50
) -> list[Action]:
    name = WorkerId(worker)
    return desk._step(PressureReported(desk.now_s, name, ModelId(model), demand_tokens, room_tokens))


def pressed(demand_tokens: int, num_workers: int = 2, max_replicas: int | None = None) -> list[Action]:
    """What follows when the one replica of a model reports its demand."""
    desk = Desk()
    desk.deploy(profile("m", max_replicas=max_replicas))
    for number in range(num_workers):
        desk.join(f"w{number}")
    desk.ask("r1", "m")
    desk.ready("m", "w0")
    return press(desk, "w0", demand_tokens)


def test_a_model_that_runs_out_of_kv_gets_a_further_replica() -> None:
    (load,) = of(LoadModel, pressed(51))
    assert (load.model, load.worker) == ("m", "w1")


def test_a_model_with_enough_kv_gets_none() -> None:
    assert not pressed(50)


def test_one_without_room_or_with_all_replicas_gets_none() -> None:
    assert not pressed(51, num_workers=1)
    assert not pressed(51, max_replicas=1)


def test_no_second_one_is_loaded_beside_the_first() -> None:
    desk = Desk()
    desk.deploy(profile("m"))
    for name in ("w0", "w1", "w2"):
        desk.join(name)
    desk.ask("r1", "m")
    desk.ready("m", "w0")
    assert of(LoadModel, press(desk, "w0", 51))
    assert not press(desk, "w0", 80)
    desk.ready("m", "w1")
    assert not press(desk, "w1", 0), "together they have enough"
    assert of(LoadModel, press(desk, "w1", 30))


def test_one_overcommitted_replica_does_not_have_its_model_loaded_everywhere() -> None:
    desk = Desk()
    desk.deploy(profile("m"))
    for number in range(4):
        desk.join(f"w{number}")
    desk.ask("r1", "m")
    desk.ready("m", "w0")
    assert of(LoadModel, press(desk, "w0", 400))
    desk.ready("m", "w1")
    assert not press(desk, "w0", 500), "the new one has not reported"
    assert not press(desk, "w1", 10), "it has room for new requests"
    assert not press(desk, "w0", 600)
    assert len(of(LoadModel, press(desk, "w1", 40))) == 1


def test_a_report_of_a_model_that_has_left_is_ignored() -> None:
    desk = Desk()
    desk.join("w0")
    assert not press(desk, "w0", 80)
    assert not press(desk, "gone", 80)


# A worker has 200 bytes; the model has 66 bytes of weights in six layers, and 12 of KV promised.

M = staged("m", num_layers=6, max_seqs=9, may_drop=True, kv_token_bytes=1, is_pinned=True)


def two_whole(num_workers: int = 2, model: ModelProfile = M, config: BrainConfig | None = None) -> Desk:
    """Replicas on all workers, each with four requests."""
    desk = Desk(config)
    desk.deploy(replace(model, min_replicas=num_workers, max_replicas=num_workers))
    names = [f"w{number}" for number in range(num_workers)]
    for name in names:
        desk.join(name, 200)
        desk.ready("m", name)
    for number in range(4 * num_workers):
        desk.ask(f"r{number}", "m")
    assert [len(one.running) for one in desk.fleet.models[M.model].replicas.values()] == [4] * num_workers
    assert list(desk.fleet.models[M.model].replicas) == names
    return desk


def dropped(desk: Desk) -> list[Action]:
    press(desk, "w0", 60)
    return press(desk, "w1", 60)


def settled(desk: Desk) -> Desk:
    """All members are ready."""
    assert dropped(desk)
    for worker in ("w0", "w1"):
        desk.ready("m", worker)
    return desk


def state(desk: Desk) -> str:
    return desk.fleet.models[M.model].drop.state.value


def why(actions: list[Action]) -> dict[str, tuple[str, Why]]:
    return {one.request_id: (one.worker, one.why) for one in of(Dispatch, actions)}


def test_replicas_that_run_out_of_kv_become_a_pipeline() -> None:
    desk = two_whole()
    assert not press(desk, "w0", 60), "the other one has room"
    actions = press(desk, "w1", 60)
    assert len(of(CancelRun, actions)) == 8
    evicted = [(one.worker, one.is_freed) for one in of(Evict, actions)]
    assert evicted == [("w0", False), ("w1", False)], "their weights stay"
    loads = of(LoadModel, actions)
    assert [one.worker for one in loads] == ["w0", "w1"]
    assert loads[0].pipeline is not None
    assert [(one.begin, one.end) for one in loads[0].pipeline.members] == [(0, 3), (3, 6)]
    assert loads[0].max_kv_bytes // 3 > M.footprints["cuda"].max_kv_bytes // 6, "more blocks than whole"
    moved = why(actions)
    assert set(moved.values()) == {("w0", Why.DROPPED)}
    assert len(moved) == 8
    assert state(desk) == "preparing"
    desk.ready("m", "w0")
    desk.ready("m", "w1")
    assert state(desk) == "dropped"


def test_a_model_that_may_not_drop_stays_whole() -> None:
    assert not dropped(two_whole(model=replace(M, may_drop=False)))


def test_a_further_replica_comes_before_a_drop() -> None:
    desk = two_whole()
    desk.deploy(replace(M, min_replicas=2))  # without a limit of replicas
    desk.join("w2", 200)
    (load,) = of(LoadModel, dropped(desk))
    assert (load.worker, load.pipeline) == ("w2", None)
    assert state(desk) == "whole"


def test_replicas_whose_slots_limit_them_stay_whole() -> None:
    desk = two_whole(model=staged("m", 6, max_seqs=4, may_drop=True, kv_token_bytes=1, is_pinned=True))
    assert not dropped(desk), "a group has four slots, for requests of 15 tokens"


def test_groups_are_as_many_as_the_demand_needs() -> None:
    desk = two_whole(num_workers=4)
    assert num_groups(desk, 55) == 1, "a copy of 66 bytes covers 20 tokens, and 40 to come"
    assert len(desk.fleet.models[M.model].usable) == 3
    assert num_groups(two_whole(num_workers=4), 60) == 2


def num_groups(desk: Desk, demand_tokens: int) -> int:
    """Return how many groups four replicas form."""
    for number in range(3):
        press(desk, f"w{number}", demand_tokens)
    return len({one.pipeline for one in of(LoadModel, press(desk, "w3", demand_tokens))})


def test_further_replicas_become_groups_if_one_is_not_enough() -> None:
    desk = two_whole(num_workers=4)
    assert num_groups(desk, 55) == 1
    first = next(one for one in desk.fleet.models[M.model].usable.values() if one.is_dropped)
    for worker in first.workers:
        desk.ready("m", worker.name)
    assert not press(desk, first.worker.name, 150, room_tokens=166)
    assert len(of(LoadModel, press(desk, first.worker.name, 170, room_tokens=166))) == 2
    assert [one.is_dropped for one in desk.fleet.models[M.model].usable.values()] == [True, True]
    assert state(desk) == "preparing"


def test_a_group_gets_requests_in_proportion_to_its_room() -> None:
    model = staged("m", 6, max_seqs=40, may_drop=True, kv_token_bytes=1, is_pinned=True)
    desk = two_whole(num_workers=4, model=model)
    assert num_groups(desk, 55) == 1
    for number in range(16, 32):
        desk.ask(f"r{number}", "m")
    usable = desk.fleet.models[M.model].usable.values()
    assert sorted((round(one.kv_share, 2), len(one.running)) for one in usable) == [
        (1.0, 6),
        (1.0, 6),
        (3.32, 20),
    ]


def test_requests_that_would_soon_have_memory_are_not_computed_again() -> None:
    desk = two_whole()
    desk.fleet.estimates.computed(M.model, ComputedPrompt(1024, 1024 * 0.01))
    assert not press(desk, "w0", 70)
    assert not press(desk, "w1", 70), "the KV of a worker takes 0.5 s, and others end sooner"
    assert press(desk, "w0", 85)


@pytest.mark.parametrize(("kv_token_bytes", "is_enough"), [(1, True), (4, False)])
def test_nothing_is_computed_again_for_a_small_part_of_what_lacks(
    kv_token_bytes: int, is_enough: bool
) -> None:
    model = staged("m", 6, max_seqs=9, may_drop=True, kv_token_bytes=kv_token_bytes, is_pinned=True)
    desk = two_whole(model=model)
    desk.fleet.estimates.computed(M.model, ComputedPrompt(1024, 1024 * 0.0036))
    assert bool(dropped(desk)) is is_enough, f"of {20 * kv_token_bytes} bytes, 66 are freed"


def test_the_layers_come_back_when_the_demand_has_been_low_for_long_enough() -> None:
    desk = settled(two_whole())
    desk.now_s = 5.0
    press(desk, "w0", 20, room_tokens=160)
    assert desk.fleet.timer_s is not None
    assert desk.fleet.timer_s <= 5.0 + HOLD_S
    desk.now_s = 5.0 + HOLD_S
    actions = desk.fire()
    assert [(one.worker, one.pipeline) for one in of(LoadModel, actions)] == [("w0", None), ("w1", None)]
    assert {reason for _, reason in why(actions).values()} == {Why.RESTORED}
    assert len(why(actions)) == 8
    assert state(desk) == "restoring"
    desk.ready("m", "w0")
    desk.ready("m", "w1")
    assert state(desk) == "whole"
    assert not desk.fleet.dropped


def test_layers_whose_memory_other_models_have_come_back_when_one_leaves() -> None:
    desk = settled(two_whole())
    desk.deploy(profile("n", 130, keep_alive_s=1000.0), profile("o", 130, keep_alive_s=1000.0))
    for model in ("n", "o"):
        desk.serve(f"of {model}", model)
    press(desk, "w0", 20, room_tokens=160)
    desk.now_s += HOLD_S
    assert not of(LoadModel, desk.fire())
    assert desk.fleet.timer_s is None or desk.fleet.timer_s > desk.now_s, "the brain waits for an event"
    assert of(LoadModel, desk.remove("n"))
    assert state(desk) == "restoring"


@pytest.mark.parametrize("when", ["preparing", "dropped", "restoring"])
@pytest.mark.parametrize("lost", ["w0", "w1"])
def test_a_lost_member_leaves_whole_replicas(when: str, lost: str) -> None:
    desk = two_whole()
    dropped(desk)
    if when != "preparing":
        desk.ready("m", "w0")
        desk.ready("m", "w1")
    if when == "restoring":
        press(desk, "w0", 20, room_tokens=160)
        desk.now_s += HOLD_S
        assert desk.fire()
    assert state(desk) == when
    actions = desk.lose(lost)
    (left,) = {"w0", "w1"} - {lost}
    assert list(desk.fleet.models[M.model].usable) == [left]
    assert not of(Reject, actions)
    desk.ready("m", left)
    assert state(desk) == "whole"
    assert desk.fleet.queues.num_running == 8
    assert len(desk.fleet.queues.requests) == 8


def test_what_a_lost_group_had_room_for_is_not_counted() -> None:
    desk = two_whole(num_workers=4)
    assert num_groups(desk, 60) == 2
    for number in range(4):
        desk.ready("m", f"w{number}")
    one, lost = (group for group in desk.fleet.models[M.model].usable.values() if group.is_dropped)
    desk.lose(lost.worker.name)
    press(desk, one.worker.name, 80, room_tokens=166)
    desk.now_s += 2 * HOLD_S
    desk.fire()
    assert state(desk) == "dropped", "80 tokens are more than half of what two replicas have room for"


def test_a_group_that_cannot_be_formed_costs_no_request() -> None:
    desk = two_whole()
    dropped(desk)
    actions = desk.fail("m", "w1")
    assert not of(Reject, actions)
    for worker in list(desk.fleet.models[M.model].loading):
        desk.ready("m", worker)
    assert state(desk) == "whole"
    assert not [one for one in dropped(desk) if isinstance(one, Evict)], "it is not tried again at once"


def test_a_group_counts_as_many_replicas() -> None:
    desk = two_whole()
    assert dropped(desk)
    assert not desk.fleet.unplaced
    assert desk.fleet.models[M.model].has_all_replicas


def test_a_forecast_counts_it_as_many_replicas() -> None:
    desk = settled(two_whole(config=BrainConfig(prewarming=Prewarming(budget=1.0))))
    press(desk, "w0", 150, room_tokens=166)
    desk.join("w2", 200)
    for number, desk.now_s in enumerate((1.0, 7200.0)):  # the budget has grown by then
        desk.finish(f"r{number}")
        actions = desk._step(DemandForecast(desk.now_s, M.model, 600.0, (1.0,), (100.0,)))
    assert not of(LoadModel, actions), "it may have two"


def test_a_restart_of_the_brain_forgets_no_group() -> None:
    desk = settled(two_whole())
    restored = restore(desk.fleet.config, save(desk.fleet))
    assert list(restored.dropped) == ["m"]
    assert restored.models[M.model].drop == desk.fleet.models[M.model].drop
    audit(restored)


#: Moves by which groups are formed, serve, fail, lose members and are restored.
PRESSING = ["press"] * 2 + ["wait"] * 4 + ["ready"] * 4 + ["arrive"] * 3 + ["finish"] * 3
PRESSING += ["lose", "join", "fail"]


@pytest.mark.slow
def test_whatever_happens_to_groups_the_books_are_right_and_every_state_is_left() -> None:
    seen: set[str] = set()
    for seed in range(40):
        choose = Random(seed)
        world = begun(BrainConfig(takes_turns=seed % 8 == 7))
        for _ in range(300):
            world.move(choose.choice(PRESSING), choose.randrange(10_000))
            seen |= {model.drop.state.value for model in world.fleet.models.values()}
        assert all(model.drop.state is not DropState.WHOLE for model in world.fleet.dropped.values())
    assert seen == {one.value for one in DropState}
