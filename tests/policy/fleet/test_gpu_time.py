"""GPU time adds up: of models to that of devices, of requests and idle time to that of their model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import ModelId, RequestId, WorkerId
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import (
    BrainConfig,
    ModelDeployed,
    ModelRemoved,
    RequestArrived,
    RequestFinished,
    WorkerJoined,
)
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.gpu_time import cost_of
from tests.policy.fleet.world import CONFIGS, LONG_LIVES, Moves, played, profile

A, B = ModelId("a"), ModelId("b")


def fleet_of(*models: ModelId) -> Fleet:
    fleet = Fleet(BrainConfig())
    for model in models:
        step(fleet, ModelDeployed(0.0, profile(model, 30, 5, 10, keep_alive_s=4.0)))
    step(fleet, WorkerJoined(0.0, WorkerId("w0"), "cuda", 100))
    return fleet


def test_a_device_is_held_from_the_load_until_its_model_is_retained() -> None:
    fleet = fleet_of(A)
    step(fleet, RequestArrived(10.0, RequestId("r0"), A, 5, 5, key="k"))
    step(fleet, RequestFinished(13.0, RequestId("r0"), 5))
    assert fleet.gpu_time.total_s(15.0) == pytest.approx(5.0)
    fleet.advance(17.0)
    assert fleet.gpu_time.num_held == 0
    assert fleet.gpu_time.total_s(100.0) == pytest.approx(7.0)
    time = fleet.gpu_time.model(A, 100.0)
    assert (time.held_s, time.idle_s) == (pytest.approx(7.0), pytest.approx(4.0))
    assert fleet.gpu_time.by_key == {"k": pytest.approx(3.0)}


def test_requests_share_the_time_of_their_model_and_models_that_of_their_device() -> None:
    fleet = fleet_of(A, B)
    step(fleet, RequestArrived(0.0, RequestId("r0"), A, 5, 5, key="k"))
    step(fleet, RequestArrived(2.0, RequestId("r1"), A, 5, 5, key="l"))
    step(fleet, RequestArrived(2.0, RequestId("r2"), B, 5, 5, key="l"))
    for number in range(3):
        step(fleet, RequestFinished(6.0, RequestId(f"r{number}"), 5))
    assert fleet.gpu_time.take_by_key() == {"k": pytest.approx(2.0 + 1.0), "l": pytest.approx(1.0 + 2.0)}
    assert fleet.gpu_time.take_by_key() == {}, "a key that was removed is not kept"
    assert fleet.gpu_time.model(A, 6.0).held_s == pytest.approx(4.0)
    assert fleet.gpu_time.model(B, 6.0).held_s == pytest.approx(2.0)


def test_a_removed_model_is_counted_until_its_last_pipeline_has_left() -> None:
    fleet = fleet_of(A)
    step(fleet, RequestArrived(0.0, RequestId("r0"), A, 5, 5))
    fleet.gpu_time.forget(A)
    assert fleet.gpu_time.model(A, 2.0).held_s == pytest.approx(2.0)


def test_a_removed_model_is_forgotten_and_its_time_is_still_in_the_total() -> None:
    fleet = fleet_of(A)
    step(fleet, RequestArrived(0.0, RequestId("r0"), A, 5, 5))
    step(fleet, RequestFinished(3.0, RequestId("r0"), 5))
    step(fleet, ModelRemoved(4.0, A))
    assert A not in fleet.gpu_time.by_model
    assert fleet.gpu_time.total_s(9.0) == pytest.approx(4.0)


@given(CONFIGS, LONG_LIVES, st.floats(0.0, 10.0))
def test_times_add_up_whatever_happens(config: BrainConfig, moves: Moves, later_s: float) -> None:
    moves = [(kind, number) for kind, number in moves if kind not in ("remove", "deploy")]
    fleet = played(config, moves).fleet
    now_s, time = fleet.now_s + later_s, fleet.gpu_time
    models = [time.model(name, now_s) for name in time.by_model]
    assert sum(one.held_s for one in models) == pytest.approx(time.total_s(now_s))
    running = [request for request in fleet.queues.requests.values() if request.replica is not None]
    for request in running:
        time.stop(request, now_s)
    charged_s = sum(one.idle_s for one in models) + sum(time.by_key.values())
    assert charged_s == pytest.approx(time.total_s(now_s))


def test_a_price_is_of_an_hour() -> None:
    assert cost_of(1800.0, 4.0) == pytest.approx(2.0)
    assert cost_of(1800.0, None) is None
