"""Replicas that run out of KV memory. A worker has 100 bytes, a model takes 35; it has room for 50 tokens."""

from __future__ import annotations

from hearth.core.types import ModelId, WorkerId
from hearth.policy.fleet.events import Action, LoadModel, PressureReported
from tests.policy.fleet.test_brain import Desk, of
from tests.policy.fleet.world import profile


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


def test_a_report_of_a_model_that_has_left_is_ignored() -> None:
    desk = Desk()
    desk.join("w0")
    assert not press(desk, "w0", 80)
    assert not press(desk, "gone", 80)
