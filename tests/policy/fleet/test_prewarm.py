"""Models that are loaded ahead of forecast requests. A worker has 100 bytes, a model takes 35."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.core.types import LOCAL, Hold, ModelId, NodeId, Rung
from hearth.policy.fleet.events import (
    Action,
    AddWorkers,
    BrainConfig,
    DemandForecast,
    Evict,
    LoadModel,
    NodeDraining,
    Prewarm,
    Prewarming,
    ResidencyReported,
    Scaling,
    SetTimer,
    TimerFired,
)
from hearth.policy.fleet.prewarm_budget import MAX_SAVED_S, PrewarmBudget
from hearth.policy.fleet.records import PrewarmHold, Replica
from tests.policy.fleet.test_brain import Desk, of
from tests.policy.fleet.world import CONFIGS, MANY_MOVES, Moves, World, begun, profile

STEP_S = 600.0
#: So much that no decision in these tests is for the lack of it.
RICH = BrainConfig(prewarming=Prewarming(budget=1.0))


def forecast(desk: Desk, *mean_per_s: float, model: str = "m", high: float = 1.0) -> list[Action]:
    high_per_s = tuple(high * per_s for per_s in mean_per_s)
    return desk._step(DemandForecast(desk.now_s, ModelId(model), STEP_S, mean_per_s, high_per_s))


def fire(desk: Desk) -> list[Action]:
    """Let the time pass until the timer of the brain."""
    assert desk.fleet.timer_s is not None
    desk.now_s = max(desk.now_s, desk.fleet.timer_s)
    return desk._step(TimerFired(desk.now_s))


def saved_up(config: BrainConfig = RICH, num_workers: int = 1, keep_alive_s: float = 100.0) -> Desk:
    """A service that has saved up all it may, with a forecast of nothing."""
    desk = Desk(config)
    desk.deploy(profile("m", keep_alive_s=keep_alive_s), profile("n", keep_alive_s=keep_alive_s))
    for number in range(num_workers):
        desk.join(f"w{number}")
    forecast(desk, 0.0)
    desk.now_s = MAX_SAVED_S
    desk._step(TimerFired(desk.now_s))
    return desk


def test_a_model_is_loaded_before_the_requests_that_are_expected_within_its_keep_alive() -> None:
    desk = saved_up()
    assert of(LoadModel, forecast(desk, 0.009)) == [], "in 111 s, and keep_alive is 100 s"
    actions = forecast(desk, 0.011)
    (load,), (told,) = of(LoadModel, actions), of(Prewarm, actions)
    assert (load.model, load.worker, load.is_ahead) == (told.model, told.worker, True) == ("m", "w0", True)
    assert not told.to_host
    assert not told.is_advice


def test_it_is_loaded_just_in_time_for_a_later_interval() -> None:
    desk = saved_up()
    began_s = desk.now_s
    assert of(LoadModel, forecast(desk, 0.0, 1.0)) == []
    assert of(LoadModel, fire(desk))
    lead_s = began_s + STEP_S - desk.now_s
    assert 0.5 <= lead_s < 1.0, "a load takes microseconds here, and the margin is half a second"


def test_it_is_kept_while_requests_are_expected_and_let_go_then() -> None:
    desk = saved_up()
    forecast(desk, 0.02, 0.0)
    desk.ready("m", "w0")
    replica = desk.fleet.models[ModelId("m")].replicas
    held_s, began_s = 0.0, desk.now_s
    while desk.now_s < began_s + 2 * STEP_S and desk.fleet.timer_s is not None:
        before_s, was_held = desk.now_s, next(iter(replica.values())).hold is Hold.WARM
        fire(desk)
        held_s += (desk.now_s - before_s) * was_held
    assert STEP_S - 2.0 <= held_s <= STEP_S + 101.0


def test_a_request_in_time_gives_the_budget_back() -> None:
    desk = saved_up()
    (told,) = of(Prewarm, forecast(desk, 0.02))
    budget = desk.fleet.prewarm_budget
    assert budget.device_s == pytest.approx(MAX_SAVED_S - told.cost_s)
    desk.ask("r", "m")
    assert budget.device_s == pytest.approx(MAX_SAVED_S)


def test_a_model_that_is_not_kept_when_idle_is_not_kept_for_a_forecast() -> None:
    desk = saved_up(keep_alive_s=0.0)
    desk.ask("r", "m")
    desk.ready("m", "w0")
    desk.now_s += 10.0
    desk.finish("r")
    replica = desk.fleet.models[ModelId("m")].replicas
    assert [one.hold for one in replica.values()] == [Hold.RETAINED]
    assert of(Prewarm, forecast(desk, 100.0)) == []


def test_without_budget_nothing_is_loaded() -> None:
    desk = Desk(BrainConfig(prewarming=Prewarming(budget=0.01)))
    desk.deploy(profile("m", keep_alive_s=100.0))
    desk.join("w0")
    forecast(desk, 0.02)
    desk.now_s = 10.0
    assert of(LoadModel, forecast(desk, 0.02)) == [], "0.1 s are saved up, 35 s may be lost"
    desk.now_s = 3600.0
    assert of(LoadModel, forecast(desk, 0.02)), "36 s are"


def test_advice_changes_nothing() -> None:
    desk = saved_up(BrainConfig(prewarming=Prewarming(budget=1.0, is_advice=True)))
    actions = [one for one in forecast(desk, 0.02) if not isinstance(one, SetTimer)]
    assert [(type(one), one.is_advice) for one in actions if isinstance(one, Prewarm)] == [(Prewarm, True)]
    assert len(actions) == 1
    assert not desk.fleet.models[ModelId("m")].replicas
    assert of(Prewarm, forecast(desk, 0.02)) == [], "it was said"


def test_advice_of_the_past_is_not_looked_at_all_the_time() -> None:
    desk = saved_up(BrainConfig(prewarming=Prewarming(budget=1.0, is_advice=True)), num_workers=2)
    desk.ask("r", "m")
    desk.now_s += 2.0
    desk.finish("r")
    desk.ask("long", "m")
    assert of(Prewarm, forecast(desk, 1.2)), "2.4 requests at a time need two replicas"
    desk.now_s += 200.0
    assert of(Prewarm, forecast(desk, 0.02)) == []
    assert desk.fleet.forecasts_due.lowest == desk.now_s + 100.0


def test_without_the_setting_forecasts_are_ignored() -> None:
    assert forecast(saved_up(BrainConfig()), 1.0) == []


def test_no_warm_or_busy_model_leaves_for_it_and_no_retained_one_that_is_worth_more() -> None:
    desk = saved_up()
    desk.deploy(profile("large", fixed_bytes=80, keep_alive_s=5.0, weight=1e9))
    desk.ask("r", "large")
    desk.ready("large", "w0")
    assert of(LoadModel, forecast(desk, 0.02)) == [], "beside a busy one"
    desk.finish("r")
    assert of(LoadModel, forecast(desk, 0.02)) == [], "beside a warm one"
    desk.now_s += 6.0
    assert of(LoadModel, forecast(desk, 0.02)) == [], "beside a retained one whose start matters more"
    desk.deploy(profile("large", fixed_bytes=80, keep_alive_s=5.0, weight=0.001))
    actions = forecast(desk, 0.02)
    assert [one.model for one in of(Evict, actions)] == ["large"]
    assert [one.model for one in of(LoadModel, actions)] == ["m"]


def test_a_model_gets_as_many_replicas_as_the_upper_bound_fills() -> None:
    desk = saved_up(num_workers=4)
    desk.ask("r", "m")
    desk.now_s += 2.0
    desk.finish("r")
    run_s = desk.fleet.estimates.run_s(ModelId("m"))
    # Two slots each, of which 0.75 should be in use: 1.5 requests at a time.
    actions = forecast(desk, 2.0 / run_s, high=2.0)
    assert len(of(LoadModel, actions)) == 3 - 1, "four requests run at a time"
    desk.deploy(profile("m", keep_alive_s=100.0, max_replicas=1))
    assert of(LoadModel, forecast(desk, 2.0 / run_s, high=3.0)) == []


def test_a_forecast_of_a_model_that_may_run_on_no_worker_any_more_loads_nothing() -> None:
    desk = saved_up()
    desk.ask("r", "m")
    desk.now_s += 2.0
    desk.finish("r")
    desk.deploy(profile("m", kinds=()))
    assert of(LoadModel, forecast(desk, 1.0)) == []


def test_a_model_that_was_stopped_or_fails_is_not_loaded_unasked() -> None:
    desk = saved_up()
    desk.stop("m")
    assert of(LoadModel, forecast(desk, 1.0)) == []


def test_a_model_expected_later_comes_to_host_memory_once() -> None:
    desk = saved_up()
    slow = replace(profile("m", keep_alive_s=100.0), num_bytes=1 << 40)
    desk.deploy(slow)
    actions = forecast(desk, 0.002)
    (told,) = of(Prewarm, actions)
    assert told.to_host
    assert told.cost_s == pytest.approx((1 << 40) / 2e9)
    assert of(LoadModel, actions) == []
    assert of(Prewarm, forecast(desk, 0.002)) == []
    desk.now_s += 3600.0
    desk._step(ResidencyReported(desk.now_s, ModelId("m"), {Rung.HOST: 1 << 40}))
    assert of(Prewarm, forecast(desk, 0.002)) == [], "it is there"


def test_a_model_that_cannot_run_on_the_head_comes_to_the_machine_that_would_load_it_fastest() -> None:
    desk = saved_up()
    for name in ("far", "near"):
        desk.join(f"{name}/w0")
    desk.join("cpu/w0", kind="cpu")
    slow = replace(profile("m", keep_alive_s=100.0), num_bytes=1 << 40)
    desk.deploy(slow)
    desk._step(ResidencyReported(desk.now_s, slow.model, {Rung.DISK: 1 << 40}, NodeId("near")))
    (told,) = of(Prewarm, forecast(desk, 0.002))
    assert (told.worker, told.to_host) == ("w0", True)
    desk.now_s += 3600.0
    desk._step(NodeDraining(desk.now_s, LOCAL, True))
    (told,) = of(Prewarm, forecast(desk, 0.002))
    assert (told.worker, told.to_host) == ("near/w0", True)
    desk.now_s += 3600.0
    desk._step(ResidencyReported(desk.now_s, slow.model, {Rung.HOST: 1 << 40}, NodeId("near")))
    assert of(Prewarm, forecast(desk, 0.002)) == [], "it is there"


def test_a_machine_is_added_for_a_model_without_room_if_any_is_to_be_had() -> None:
    desk = saved_up(BrainConfig(prewarming=Prewarming(budget=1.0), scaling=Scaling(in_after_s=60.0)))
    desk.deploy(profile("large", fixed_bytes=80))
    desk.ask("r", "large")
    assert of(AddWorkers, forecast(desk, 0.02))
    assert of(AddWorkers, forecast(desk, 0.02)) == [], "one is on its way"


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 100), st.booleans()), max_size=40))
def test_what_is_lost_never_exceeds_the_budget(moves: list[tuple[float, float, bool]]) -> None:
    budget, now_s, lost_s, share = PrewarmBudget(), 0.0, 0.0, 0.05
    budget.grow(now_s, share)
    for elapsed_s, cost_s, is_used in moves:
        now_s += elapsed_s
        budget.grow(now_s, share)
        if budget.take(cost_s):
            if is_used:
                budget.give_back(PrewarmHold(now_s + 1.0, cost_s), now_s)
            else:
                lost_s += cost_s
        assert lost_s <= share * now_s + 1e-6
        assert 0.0 <= budget.device_s <= share * MAX_SAVED_S + 1e-9


def in_use(world: World) -> set[Replica]:
    return {one for one in world.fleet.replicas() if one.hold is not Hold.RETAINED}


@settings(deadline=None)
@given(CONFIGS, MANY_MOVES, st.booleans(), st.integers(0, 1000))
def test_forecasts_evict_nothing_in_use_and_keep_all_promises(
    config: BrainConfig, moves: Moves, is_advice: bool, seed: int
) -> None:
    """Forecasts come between all other things that may happen; the world checks all books after each."""
    world = begun(replace(config, prewarming=Prewarming(budget=0.5, is_advice=is_advice)))
    for at, (kind, number) in enumerate(moves):
        world.move(kind, number)
        used, num_waiting = in_use(world), world.fleet.queues.num_waiting
        world.move("forecast", seed + 7 * at)
        actions = world.actions[-1]
        told = [one for one in actions if isinstance(one, Prewarm)]
        assert all(one.is_advice is is_advice for one in told)
        if num_waiting == 0:
            left = {(one.model, one.worker) for one in actions if isinstance(one, Evict)}
            assert not left & {(one.model.name, one.worker.name) for one in used}
        if is_advice:
            assert num_waiting or not any(isinstance(one, Evict | LoadModel) for one in actions)
        assert world.fleet.prewarm_budget.device_s >= 0.0
    world.come_to_rest()
