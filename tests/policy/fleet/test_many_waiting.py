"""What an event costs does not grow with the number of models that wait for room."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from hearth.core.types import ModelId, RequestId, WorkerId
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import (
    BrainConfig,
    Dispatch,
    Event,
    LoadModel,
    ModelDeployed,
    ModelReady,
    RequestArrived,
    RequestFinished,
    TimerFired,
    WorkerJoined,
)
from hearth.policy.fleet.fleet import Fleet
from tests.policy.fleet.world import profile

NUM_WORKERS = 20


class CountedBrain:
    """Counts the function calls of each step. Mutable."""

    def __init__(self) -> None:
        self.fleet = Fleet(BrainConfig(max_queue=10_000))
        self.num_calls: list[int] = []
        self.loaded: list[tuple[WorkerId, ModelId]] = []
        self.running: list[RequestId] = []

    def tell(self, event: Event) -> None:
        num_calls = 0

        def count(frame: FrameType, what: str, argument: object) -> None:
            nonlocal num_calls
            num_calls += what == "call"

        sys.setprofile(count)
        actions = step(self.fleet, event)
        sys.setprofile(None)
        self.num_calls.append(num_calls)
        self.loaded += [(one.worker, one.model) for one in actions if isinstance(one, LoadModel)]
        self.running += [one.request_id for one in actions if isinstance(one, Dispatch)]


def starved(num_waiting: int, *, waited_s: float) -> CountedBrain:
    """Every worker is full of busy models, and for so many others a request has waited for so long."""
    brain = CountedBrain()
    num_models = NUM_WORKERS * 2 + num_waiting
    for at in range(NUM_WORKERS):
        brain.tell(WorkerJoined(0.0, WorkerId(f"w{at}"), "cuda", 100))
    for at in range(num_models):
        brain.tell(ModelDeployed(0.0, profile(f"m{at}", 35 + at % 10)))
    for at in range(num_models):
        brain.tell(RequestArrived(0.0, RequestId(f"r{at}"), ModelId(f"m{at}"), 10, None))
    for worker, model in list(brain.loaded):
        brain.tell(ModelReady(0.5, worker, model, (), 0.5))
    brain.tell(TimerFired(waited_s))
    assert len(brain.fleet.queues.for_room) >= num_waiting
    brain.num_calls.clear()
    return brain


@pytest.mark.parametrize("waited_s", [1.0, 3.0, 31.0, 40.0])
def test_an_event_visits_no_more_models_where_ten_times_as_many_wait(waited_s: float) -> None:
    """Before any is overdue, while some are drained for, when drains are given up, and later."""
    totals = []
    for num_waiting in (50, 500):
        brain = starved(num_waiting, waited_s=waited_s)
        for at in range(10):
            brain.tell(RequestArrived(waited_s, RequestId(f"late{at}"), ModelId(f"m{60 + at}"), 10, None))
            brain.tell(RequestFinished(waited_s, brain.running.pop(0), 5))
        totals.append(sum(brain.num_calls))
    assert totals[1] < 1.2 * totals[0], f"calls with 50 and 500 waiting models: {totals}"
