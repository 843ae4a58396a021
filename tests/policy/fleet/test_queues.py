"""The queues against a plain list of requests that wait."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import ModelId, RequestId, WorkerId
from hearth.policy.fleet.capacity import FleetCapacity, Promises
from hearth.policy.fleet.events import RequestArrived
from hearth.policy.fleet.profile import Promise
from hearth.policy.fleet.queues import RequestQueues
from hearth.policy.fleet.records import Model, Replica, Request, Worker
from tests.policy.fleet.world import profile

PATIENCE_S = 5.0
#: (accept, start, requeue or end; which request or model)
KINDS = ["accept", "accept", "start", "requeue", "end"]
CHANGES = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 50)), max_size=40)


def new_models() -> list[Model]:
    """Two models: one with a usable replica, which is full, and one with none."""
    models = [Model(ModelId(name), profile(name)) for name in "ab"]
    worker = Worker(WorkerId("w"), "cuda", Promises(100))
    models[0].usable[worker.name] = Replica(models[0], worker, Promise(10, 0), 10, "")
    return models


def change(
    queues: RequestQueues, models: list[Model], requests: dict[Request, bool], kind: str, at: int
) -> None:
    """`requests`: whether each waits."""
    now_s = 4.0 * queues.next_number
    if kind == "accept":
        request_id, is_batch = RequestId(f"r{queues.next_number}"), at % 3 == 0
        event = RequestArrived(now_s, request_id, ModelId("a"), 1, None, is_batch=is_batch)
        request = queues.accept(event, models[at % len(models)], now_s)
        queues.enqueue(request, now_s, 0)
        queues.line_up(request.model)
        requests[request] = True
        return
    chosen = [one for one, is_waiting in requests.items() if is_waiting is (kind == "start") or kind == "end"]
    if not chosen:
        return
    request = chosen[at % len(chosen)]
    if kind == "requeue":
        queues.enqueue(request, now_s, 0)
        queues.line_up(request.model)
        requests[request] = True
        return
    if requests[request]:
        queues.dequeue(request)
        queues.line_up(request.model)
    requests[request] = False
    if kind == "end":
        queues.remove(request)
        del requests[request]


def came_s(request: Request) -> tuple[float, int]:
    """When a request came, by a clock that is 30 s late for the class batch."""
    return 4.0 * request.number + (30.0 if request.is_batch else 0.0), request.number


def test_a_batch_request_that_waits_again_is_patient_until_its_line_and_no_longer() -> None:
    queues, (model, _) = RequestQueues(PATIENCE_S, FleetCapacity()), new_models()
    event = RequestArrived(0.0, RequestId("r"), model.name, 1, None, is_batch=True)
    request = queues.accept(event, model, now_s=0.0)
    for queued_s, expected_s in ((0.0, 30.0), (20.0, 30.0), (40.0, 40.0 + PATIENCE_S)):
        queues.enqueue(request, queued_s, 0)
        queues.line_up(model)
        assert queues.next_overdue_s(queued_s, math.inf) == expected_s
        queues.dequeue(request)
        queues.line_up(model)


@given(CHANGES, st.floats(0.0, 120.0))
def test_models_stand_in_the_order_of_their_first_request(
    changes: list[tuple[str, int]], now_s: float
) -> None:
    queues, models = RequestQueues(PATIENCE_S, FleetCapacity()), new_models()
    requests: dict[Request, bool] = {}
    for kind, at in changes:
        change(queues, models, requests, kind, at)
    waiting = sorted((one for one, is_waiting in requests.items() if is_waiting), key=came_s)
    assert queues.num_waiting == len(waiting)
    assert queues.num_running == len(requests) - len(waiting)
    first = list(dict.fromkeys(request.model.name for request in waiting))
    assert list(queues.for_room) == [name for name in first if name != "a"]
    assert list(queues.for_slot) == [name for name in first if name == "a"]
    for model in models:
        assert list(model.waiting.values()) == [request for request in waiting if request.model is model]
    ends_s = [max(came_s(one)[0], one.queued_s + PATIENCE_S) for one in waiting]
    expected_s = min((end_s for end_s in ends_s if end_s > now_s), default=None)
    assert queues.next_overdue_s(now_s, math.inf) == expected_s
    if expected_s is not None:
        assert queues.next_overdue_s(now_s, math.nextafter(expected_s, 0.0)) is None
