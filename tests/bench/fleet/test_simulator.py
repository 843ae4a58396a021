"""A simulated service as a whole: times, order, and that everything comes to its end."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fleet.costs import CostModel
from bench.fleet.simulator import Simulator
from hearth.core.types import ModelId, RequestId, Rung, WorkerId
from hearth.policy.fleet.audit import audit
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import (
    Action,
    BrainConfig,
    DeviceReported,
    Dispatch,
    Event,
    LoadModel,
    ModelDeployed,
    ModelReady,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    WorkerJoined,
    WorkerLost,
)
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.profile import Footprint, ModelProfile

SPEEDS = {Rung.HOST: 100.0, Rung.DISK: 10.0}
FOREVER = 1_000_000


class Recorder:
    """A brain that keeps what was said, and whose books are checked after each step. Mutable."""

    def __init__(self) -> None:
        self.fleet = Fleet(BrainConfig())
        self.steps: list[tuple[Event, list[Action]]] = []

    def __call__(self, event: Event) -> list[Action]:
        actions = step(self.fleet, event)
        self.steps.append((event, actions))
        audit(self.fleet)
        return actions

    def at(self, kind: type[Event]) -> list[float]:
        """Times at which events of a kind happened."""
        return [event.now_s for event, _ in self.steps if isinstance(event, kind)]

    def ordered(self, kind: type[Action]) -> int:
        return sum(isinstance(action, kind) for _, actions in self.steps for action in actions)


def simulate(
    events: Sequence[Event], seed: int = 1, cancelled_share: float = 0.0
) -> tuple[Recorder, Simulator]:
    """A service to which these events happen, until nothing more can."""
    recorder = Recorder()
    simulator = Simulator(recorder, CostModel(Random(seed), SPEEDS, 2.0, cancelled_share))
    simulator.feed(iter(sorted(events, key=lambda event: event.now_s)))
    assert simulator.run(FOREVER) < FOREVER
    simulator.cluster.check()
    return recorder, simulator


def deployed(name: str, num_bytes: int = 30) -> ModelDeployed:
    footprints = {"cuda": Footprint(num_bytes, 5, 10, max_seqs=2)}
    return ModelDeployed(0.0, ModelProfile(ModelId(name), num_bytes, footprints, keep_alive_s=5.0))


def joined(name: str, now_s: float = 0.0) -> WorkerJoined:
    return WorkerJoined(now_s, WorkerId(name), "cuda", 100)


def asked(request: str, model: str, now_s: float) -> RequestArrived:
    return RequestArrived(now_s, RequestId(request), ModelId(model), 10, None)


def test_a_load_takes_the_time_of_its_bytes_and_requests_begin_after_it() -> None:
    recorder, simulator = simulate([deployed("a"), joined("w"), asked("r", "a", 1.0)])
    assert recorder.at(ModelReady) == [1.0 + 30 / SPEEDS[Rung.DISK]]
    assert recorder.at(RequestFinished) > recorder.at(ModelReady)
    assert not simulator.cluster.requests


def test_requests_may_be_told_not_to_wait_for_loads() -> None:
    recorder = Recorder()
    simulator = Simulator(recorder, CostModel(Random(1), SPEEDS, 0.1, runs_from_dispatch=True))
    simulator.feed(iter([deployed("a"), joined("w"), asked("r", "a", 1.0)]))
    simulator.run(FOREVER)
    assert recorder.at(RequestFinished) < recorder.at(ModelReady)


def test_a_second_load_of_a_model_comes_half_from_host_memory() -> None:
    events: list[Event] = [
        deployed("a"),
        joined("w0"),
        asked("r0", "a", 1.0),
        WorkerLost(100.0, WorkerId("w0")),
    ]
    recorder, _ = simulate([*events, joined("w1", 100.0), asked("r1", "a", 101.0)])
    assert recorder.at(ModelReady)[1] == pytest.approx(
        101.0 + 15 / SPEEDS[Rung.HOST] + 15 / SPEEDS[Rung.DISK]
    )


def test_a_worker_reports_what_it_has_after_each_load() -> None:
    recorder, _ = simulate([deployed("a"), joined("w"), asked("r", "a", 1.0)])
    reports = [event for event, _ in recorder.steps if isinstance(event, DeviceReported)]
    assert [dict(report.bytes_by_model) for report in reports] == [{"a": 30}]


def test_a_lost_worker_says_nothing_and_its_requests_go_on_elsewhere() -> None:
    events: list[Event] = [deployed("a"), joined("w0"), asked("r", "a", 1.0), WorkerLost(2.0, WorkerId("w0"))]
    recorder, simulator = simulate([*events, joined("w1", 3.0)])
    ready = [event.worker for event, _ in recorder.steps if isinstance(event, ModelReady)]
    assert ready == ["w1"]
    assert recorder.ordered(Dispatch) == recorder.ordered(LoadModel) == 2
    assert simulator.cluster.num_ended == 1


def test_a_model_whose_request_is_gone_may_have_to_leave_as_soon_as_it_is_loaded() -> None:
    """Its room is wanted by another, which was not worth a load cut short."""
    events: list[Event] = [deployed("a", 60), deployed("b", 60), joined("w"), asked("ra", "a", 1.0)]
    events += [RequestCancelled(2.0, RequestId("ra")), asked("rb", "b", 1.5)]
    recorder, simulator = simulate(events)
    assert [event.model for event, _ in recorder.steps if isinstance(event, ModelReady)][-1] == "b"
    assert not simulator.cluster.requests


REQUESTS = st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0.0, 60.0)), max_size=40)
LOSSES = st.lists(st.floats(1.0, 60.0), max_size=3)


@given(REQUESTS, LOSSES, st.integers(0, 5), st.sampled_from([0.0, 0.3]))
def test_every_request_ends_once_and_the_same_seed_says_the_same(
    requests: list[tuple[str, float]], losses: list[float], seed: int, cancelled_share: float
) -> None:
    events: list[Event] = [deployed(name, 20 + 15 * at) for at, name in enumerate("abcd")]
    events += [joined("w0"), joined("w1")]
    events += [asked(f"r{at}", model, now_s) for at, (model, now_s) in enumerate(requests)]
    for number, now_s in enumerate(sorted(losses)):
        events += [WorkerLost(now_s, WorkerId(f"w{number}")), joined(f"w{number + 2}", now_s)]
    recorder, simulator = simulate(events, seed, cancelled_share)
    assert not simulator.cluster.requests
    assert simulator.cluster.num_arrived == simulator.cluster.num_ended == len(requests)
    times = [event.now_s for event, _ in recorder.steps]
    assert times == sorted(times)
    again, _ = simulate(events, seed, cancelled_share)
    assert again.steps == recorder.steps
