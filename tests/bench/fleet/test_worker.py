"""What a simulated worker does with orders, and which orders it cannot carry out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.fleet.worker import SimulatedWorker
from hearth.core.types import Hold, ModelId, RequestId, Rung, WorkerId
from hearth.policy.fleet.events import Evict, LoadModel, RungUse, SetHold
from hearth.policy.fleet.profile import Footprint, ModelProfile

A, B, C = ModelId("a"), ModelId("b"), ModelId("c")
R = RequestId("r")


def new_worker() -> SimulatedWorker:
    return SimulatedWorker(WorkerId("w"), "cuda", budget_bytes=100)


def load(worker: SimulatedWorker, model: ModelId, num_bytes: int = 30, now_s: float = 0.0) -> int:
    """Load a model of so many bytes, 5 of KV and none of workspace; return how many were missing."""
    profile = ModelProfile(
        model, num_bytes, {"cuda": Footprint(num_bytes, 5, 10, max_seqs=2)}, keep_alive_s=10.0
    )
    missing_bytes = worker.load(LoadModel(model, worker.name, 5, 10), profile, 1, now_s).missing_bytes
    worker.finish_load(model, [RungUse(Rung.HOST, missing_bytes, 1.0)])
    worker.check()
    return missing_bytes


def evict(worker: SimulatedWorker, model: ModelId, *, is_freed: bool = False) -> None:
    worker.evict(Evict(model, worker.name, 0.0, is_freed))
    worker.check()


def test_an_evicted_model_comes_back_for_what_others_took() -> None:
    worker = new_worker()
    assert load(worker, A) == 30
    evict(worker, A)
    assert worker.count_device_bytes() == {A: 30}
    assert load(worker, B, 60) == 60
    assert worker.count_device_bytes() == {A: 30, B: 60}
    evict(worker, B)
    assert load(worker, C, 40) == 40
    taken_bytes = 90 - sum(num for model, num in worker.count_device_bytes().items() if model != C)
    assert taken_bytes >= 35
    evict(worker, C)
    there_bytes = worker.count_device_bytes().get(A, 0)
    assert load(worker, A) == 30 - there_bytes


def test_a_freed_model_leaves_nothing() -> None:
    worker = new_worker()
    load(worker, A)
    evict(worker, A, is_freed=True)
    assert worker.count_device_bytes() == {}
    evict(worker, A, is_freed=True)  # Whatever was left would have gone, too.
    assert load(worker, A) == 30


def test_the_model_goes_that_is_cheapest_to_have_back() -> None:
    """Not the one that has been there longest: it was asked for, and the other never was."""
    worker = new_worker()
    load(worker, A)
    worker.run(R, A, now_s=1.0)
    worker.finish_run(R, A)
    load(worker, B)
    evict(worker, A)
    evict(worker, B)
    load(worker, C, 60, now_s=2.0)
    assert worker.count_device_bytes()[A] == 30
    assert worker.count_device_bytes()[B] < 30


def test_weights_of_warm_models_go_after_those_of_retained_ones() -> None:
    worker = new_worker()
    load(worker, A, 25)
    load(worker, B, 25)
    evict(worker, B)
    load(worker, C, 60)
    there = worker.count_device_bytes()
    assert there[A] == 25
    assert there.get(B, 0) <= 10


def test_a_hosted_model_that_lost_weights_loads_them_for_its_next_request() -> None:
    """Retained ones give way by their cost, hosted or not, as long as no promise is broken."""
    worker = new_worker()
    load(worker, A)
    load(worker, B)
    worker.run(R, B, now_s=1.0)
    worker.finish_run(R, B)
    evict(worker, B)  # It was asked for, so that the bytes of the other are cheaper.
    worker.set_hold(SetHold(A, worker.name, Hold.RETAINED))
    load(worker, C, 55, now_s=2.0)
    there_bytes = worker.count_device_bytes()[A]
    assert there_bytes < 30
    replica = worker.run(R, A, now_s=3.0)
    assert (replica.is_ready, replica.is_loading) == (True, True)
    assert replica.missing_bytes == 30 - there_bytes
    worker.check()
    worker.finish_load(A, [RungUse(Rung.HOST, replica.missing_bytes, 1.0)])
    assert worker.count_device_bytes()[A] == 30
    worker.check()


def test_a_load_that_is_evicted_leaves_what_was_there_before() -> None:
    worker = new_worker()
    profile = ModelProfile(A, 30, {"cuda": Footprint(30, 5, 10, max_seqs=2)}, keep_alive_s=10.0)
    worker.load(LoadModel(A, worker.name, 5, 10), profile, 1, now_s=0.0)
    assert worker.count_device_bytes() == {}
    evict(worker, A)
    assert worker.count_device_bytes() == {}
    load(worker, A)
    other = replace(profile, digest="other")
    evict(worker, A)
    assert worker.load(LoadModel(A, worker.name, 5, 10), other, 2, now_s=1.0).missing_bytes == 30


def test_weights_that_are_loading_are_not_taken_however_idle_their_model_is() -> None:
    worker = new_worker()
    load(worker, C, 30)
    evict(worker, C)
    profile = ModelProfile(A, 40, {"cuda": Footprint(40, 5, 10, max_seqs=2)}, keep_alive_s=10.0)
    worker.load(LoadModel(A, worker.name, 5, 10), profile, 1, now_s=0.0)
    worker.set_hold(SetHold(A, worker.name, Hold.RETAINED))
    load(worker, B, 40)
    assert worker.device.count_bytes(A) == 40
    assert worker.count_device_bytes()[C] <= 10


def test_a_model_that_fails_takes_its_requests_with_it() -> None:
    worker = new_worker()
    load(worker, A)
    worker.run(R, A, now_s=1.0)
    assert worker.fail(A) == [R]
    assert worker.count_device_bytes() == {}


def test_a_retained_model_that_gets_a_request_is_warm() -> None:
    worker = new_worker()
    load(worker, A)
    worker.set_hold(SetHold(A, worker.name, Hold.RETAINED))
    replica = worker.run(R, A, now_s=1.0)
    assert (replica.hold, replica.current_hold) == (Hold.WARM, Hold.BUSY)


def test_impossible_orders_raise() -> None:
    worker = new_worker()
    load(worker, A, 60)
    with pytest.raises(AssertionError, match="beyond the budget"):
        load(worker, B, 60)
    with pytest.raises(AssertionError, match="loaded twice"):
        load(worker, A, 60)
    with pytest.raises(AssertionError, match="evicted twice"):
        evict(worker, C)
    with pytest.raises(AssertionError, match="needless"):
        worker.set_hold(SetHold(A, worker.name, Hold.WARM))
    for request in ("r1", "r2"):
        worker.run(RequestId(request), A, now_s=0.0)
    with pytest.raises(AssertionError, match="no slot"):
        worker.run(R, A, now_s=0.0)
    with pytest.raises(AssertionError, match="evicted while busy"):
        evict(worker, A)
