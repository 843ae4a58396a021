"""Models that cannot be loaded, or break before they have served anybody, are not tried again at once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.policy.fleet.events import Action, BrainConfig, End, LoadModel, Reject, RejectReason
from hearth.policy.fleet.failures import FIRST_DELAY_S, MAX_DELAY_S, PROVEN_S, clamp_retry_s
from tests.policy.fleet.test_brain import Desk, desk_with, evicted, of, sent
from tests.policy.fleet.world import profile


def broken(desk: Desk, actions: list[Action], model: str = "a") -> list[Action]:
    """A model that loads and breaks at its first step, wherever it is loaded, until nobody loads it."""
    done = list(actions)
    while loads := [load for load in of(LoadModel, actions) if load.model == model]:
        actions = []
        for load in loads:
            actions += desk.ready(model, load.worker)
            actions += desk.fail(model, load.worker)
        done += actions
    return done


def test_a_model_that_breaks_at_its_first_step_is_not_tried_again_for_a_while() -> None:
    desk = desk_with("b")
    desk.deploy(profile("a", fixed_bytes=80))
    desk.serve("rb", "b")
    actions = broken(desk, desk.ask("r1", "a"))
    assert (len(of(LoadModel, actions)), evicted(actions)) == (1, ["b"])
    (reject,) = of(Reject, actions)
    assert (reject.request_id, reject.reason, reject.retry_s) == ("r1", RejectReason.LOAD_FAILED, 2.0)
    assert reject.message.endswith("no such file; it is tried again in 2 s")
    desk.serve("rb2", "b")
    for number in range(20):
        (refused,) = desk.ask(f"q{number}", "a")
        assert isinstance(refused, Reject)
    assert ("b", "w1") in desk.states()


def test_the_time_doubles_while_the_model_serves_nobody_though_it_is_ready_each_time() -> None:
    desk = desk_with("a")
    delays_s = []
    for number in range(8):
        (reject,) = of(Reject, broken(desk, desk.ask(f"r{number}", "a")))
        assert reject.retry_s is not None
        delays_s.append(reject.retry_s)
        desk.now_s += reject.retry_s
    assert delays_s == [2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize("how", [End.DONE, End.STOPPED])
def test_a_model_that_has_served_goes_on_where_it_was_and_its_time_begins_anew(how: End) -> None:
    desk = desk_with("a")
    broken(desk, desk.ask("r1", "a"))
    desk.now_s = 2.0
    desk.ask("r2", "a")
    desk.ready("a", "w1")
    desk.ask("r3", "a")
    desk.finish("r2", how)
    assert sent(desk.fail("a", "w1")) == {"r3": "w1"}
    desk.ready("a", "w1")
    (reject,) = of(Reject, desk.fail("a", "w1"))
    assert (reject.request_id, reject.retry_s) == ("r3", 2.0)


def test_a_request_that_failed_or_was_cancelled_proves_nothing() -> None:
    desk = desk_with("a")
    for request in ("r1", "r2"):
        desk.ask(request, "a")
    desk.ready("a", "w1")
    desk.finish("r1", End.FAILED)
    desk.cancel("r2")
    desk.ask("r3", "a")
    assert [reject.request_id for reject in of(Reject, desk.fail("a", "w1"))] == ["r3"]


def test_a_request_that_has_run_for_long_goes_on_when_its_model_breaks() -> None:
    desk = desk_with("a")
    desk.ask("r1", "a")
    desk.ready("a", "w1")
    desk.now_s = PROVEN_S
    assert sent(desk.fail("a", "w1")) == {"r1": "w1"}


def test_all_who_wait_for_a_model_are_refused_when_it_breaks_at_its_first_step() -> None:
    desk = desk_with("a")
    actions: list[Action] = []
    for number in range(1, 5):
        actions += desk.ask(f"r{number}", "a")
    rejects = of(Reject, broken(desk, actions))
    assert [(reject.request_id, reject.retry_s) for reject in rejects] == [
        (f"r{n}", 2.0) for n in range(1, 5)
    ]


def test_those_who_wait_when_a_load_fails_are_told_when_it_is_tried_again() -> None:
    desk = desk_with("a")
    for number in range(1, 4):
        desk.ask(f"r{number}", "a")
    assert [reject.retry_s for reject in of(Reject, desk.fail("a", "w1"))] == [2.0] * 3


def test_a_model_is_tried_on_each_worker_before_it_has_to_wait() -> None:
    desk = desk_with("a", workers=3)
    actions = broken(desk, desk.ask("r1", "a"))
    assert sorted(load.worker for load in of(LoadModel, actions)) == ["w1", "w2", "w3"]
    assert [reject.retry_s for reject in of(Reject, actions)] == [2.0]
    assert sent(desk.join("w4")) == {}
    assert sent(desk.ask("r2", "a")) == {"r2": "w4"}, "it may do better there"


def test_a_model_that_has_room_only_where_it_failed_has_to_wait_too() -> None:
    desk = desk_with(workers=2)
    desk.deploy(profile("a", fixed_bytes=80), profile("big", fixed_bytes=80))
    assert sent(desk.ask("r1", "big")) == {"r1": "w1"}
    desk.ready("big", "w1")
    actions = broken(desk, desk.ask("r2", "a"))
    assert [load.worker for load in of(LoadModel, actions)] == ["w2"]
    assert of(Reject, desk.ask("r3", "a"))[0].retry_s == 2.0
    desk.finish("r1")
    assert sent(desk.ask("r4", "a")) == {"r4": "w1"}


def test_a_pinned_model_is_not_loaded_again_at_once_where_it_failed() -> None:
    desk = desk_with(workers=2)
    desk.deploy(profile("warm", fixed_bytes=80))
    desk.serve("r1", "warm")
    desk.deploy(profile("pin", fixed_bytes=80, is_pinned=True))
    assert ("pin", "w2") in desk.states()
    assert of(LoadModel, desk.fail("pin", "w2")) == []
    desk.now_s = 2.0
    assert [load.worker for load in of(LoadModel, desk.fire())] == ["w2"]


def test_the_failure_of_an_old_version_says_nothing_of_the_new_one() -> None:
    desk = desk_with("a")
    desk.ask("r1", "a")
    desk.deploy(profile("a", digest="new"))
    (reject,) = of(Reject, desk.fail("a", "w1"))
    assert reject.reason is RejectReason.MODEL_REMOVED
    assert sent(desk.ask("r2", "a")) == {"r2": "w1"}


def test_a_full_queue_without_a_worker_does_not_count_how_long_one_request_after_the_other_takes() -> None:
    desk = desk_with("a", config=BrainConfig(max_queue=100))
    desk.ask("r", "a")
    desk.ready("a", "w1")
    desk.now_s = 100.0
    desk.finish("r")
    desk.lose("w1")
    for number in range(100):
        desk.ask(f"r{number}", "a")
    (reject,) = of(Reject, desk.ask("late", "a"))
    assert (reject.reason, reject.retry_s) == (RejectReason.QUEUE_FULL, 10.0)
    assert reject.message.endswith("try again in 10 s")
    desk.join("w2")
    for number in range(100, 102):
        assert desk.ask(f"r{number}", "a") == []
    (reject,) = of(Reject, desk.ask("later", "a"))
    assert reject.retry_s == 60.0, "100 wait, 2 run, each for 100 s: longer than clients heed"


@given(st.floats(0.0, allow_nan=False))
def test_clients_come_back_neither_at_once_nor_never(seconds: float) -> None:
    assert clamp_retry_s(seconds) == seconds or not 1.0 < seconds < 60.0
    assert 1.0 <= clamp_retry_s(seconds) <= 60.0


@given(
    workers=st.integers(1, 3),
    takes_turns=st.booleans(),
    pauses_s=st.lists(st.sampled_from([0.0, 0.5, 3.0, 40.0]), max_size=40),
    is_loaded=st.booleans(),
)
def test_however_often_a_broken_model_is_asked_for_it_is_loaded_once_per_worker_and_waiting_time(
    workers: int, takes_turns: bool, pauses_s: list[float], is_loaded: bool
) -> None:
    """Also each refusal is true: who comes back when told to finds the model tried again."""
    desk = desk_with("a", workers=workers, config=BrainConfig(takes_turns=takes_turns))
    num_loads, open_s = 0, 0.0
    for number, pause_s in enumerate(pauses_s):
        desk.now_s += pause_s
        actions = desk.ask(f"r{number}", "a")
        is_tried = bool(of(LoadModel, actions))
        assert is_tried == (desk.now_s >= open_s)
        while loads := of(LoadModel, actions):
            num_loads += len(loads)
            if is_loaded:
                desk.ready("a", loads[0].worker)
            actions = desk.fail("a", loads[0].worker)
        (reject,) = of(Reject, actions)
        if reject.retry_s is None:
            assert not is_loaded, "a request whose model was ready tries every worker"
        elif is_tried:
            open_s = desk.now_s + reject.retry_s
        else:
            assert desk.now_s + reject.retry_s == max(open_s, desk.now_s + 1.0)
    delays = math.ceil(math.log2(MAX_DELAY_S / FIRST_DELAY_S)) + desk.now_s / MAX_DELAY_S + 1
    assert num_loads <= workers * (delays + 1)


# Models that take their workers along.


def lost_in_step(desk: Desk, number: int, culprit: str = "a") -> list[Action]:
    """A worker comes, all that it loads is ready at once, and it is lost in a step of one of these."""
    worker = f"v{number}"
    actions = desk.join(worker)
    for load in of(LoadModel, actions):
        desk.ready(load.model, worker)
    return actions + desk.lose(worker, culprit)


def test_a_loss_counts_only_against_the_model_whose_step_was_under_way() -> None:
    desk = desk_with("a", "b", workers=0)
    desk.ask("guilty", "a")
    desk.ask("bystander", "b")
    rejects: list[Reject] = []
    for number in range(10):
        desk.now_s += MAX_DELAY_S
        rejects += of(Reject, lost_in_step(desk, number))
    assert [reject.request_id for reject in rejects] == ["guilty"]
    assert "bystander" in sent(desk.join("w"))


def test_a_model_that_takes_its_worker_along_twice_is_loaded_nowhere_for_a_while() -> None:
    desk = desk_with("a", workers=0)
    desk.ask("r1", "a")
    assert of(Reject, lost_in_step(desk, 1)) == [], "once may have been chance"
    (reject,) = of(Reject, lost_in_step(desk, 2))
    assert (reject.reason, reject.retry_s) == (RejectReason.WORKERS_LOST, FIRST_DELAY_S)
    assert reject.message == "worker `v2` died under it; it is tried again in 2 s"
    desk.join("w")
    (refused,) = desk.ask("r2", "a")
    assert isinstance(refused, Reject)
    assert refused.reason is RejectReason.WORKERS_LOST, "though this worker has never had it"
    desk.now_s = 2.0
    assert sent(desk.ask("r3", "a")) == {"r3": "w"}
    desk.ready("a", "w")
    (reject,) = of(Reject, desk.lose("w", "a"))
    assert reject.retry_s == 2 * FIRST_DELAY_S, "each time costs a worker, so the time doubles at once"


def test_a_model_that_makes_tokens_is_tried_again_at_once_however_often_its_worker_is_lost() -> None:
    desk = desk_with("a", workers=0, config=BrainConfig(max_resumes=3))
    desk.ask("r1", "a")
    for number in range(3):
        desk.join(f"v{number}")
        desk.ready("a", f"v{number}")
        assert of(Reject, desk.lose(f"v{number}", "a", has_answered=True)) == []
    desk.join("w")
    (reject,) = of(Reject, desk.lose("w", "a", has_answered=True))
    assert reject.message == "worker `w` died under it; that was the loss number 4, the limit: 3"


def test_a_model_that_has_served_since_may_lose_its_worker_again() -> None:
    desk = desk_with("a", workers=0)
    desk.ask("r1", "a")
    lost_in_step(desk, 1)
    desk.join("w")
    desk.ready("a", "w")
    desk.ask("r2", "a")
    desk.finish("r1")
    assert of(Reject, desk.lose("w", "a")) == []
    assert of(Reject, lost_in_step(desk, 2)) == []


def test_a_worker_that_is_lost_while_a_model_loads_counts_against_that_one_alone() -> None:
    desk = desk_with("a", "b", workers=0, config=BrainConfig(max_resumes=0))
    desk.ask("bystander", "b")
    desk.join("w")
    desk.ready("b", "w")
    desk.ask("guilty", "a")
    assert [reject.request_id for reject in of(Reject, desk.lose("w"))] == ["guilty"]


def test_a_worker_that_is_lost_for_no_known_reason_counts_against_all_but_holds_nobody_back() -> None:
    desk = desk_with("a", "b", workers=0, config=BrainConfig(max_resumes=2))
    desk.ask("r1", "a")
    desk.ask("r2", "b")
    for number in range(2):
        for load in of(LoadModel, desk.join(f"v{number}")):
            desk.ready(load.model, load.worker)
        assert of(Reject, desk.lose(f"v{number}")) == []
    for load in of(LoadModel, desk.join("w")):
        desk.ready(load.model, load.worker)
    rejects = of(Reject, desk.lose("w"))
    assert [reject.request_id for reject in rejects] == ["r1", "r2"]
    assert rejects[0].message.endswith("that was the loss number 3, the limit: 2")


def test_a_step_of_a_model_that_has_left_meanwhile_counts_against_nobody() -> None:
    desk = desk_with("a", workers=0, config=BrainConfig(max_resumes=0))
    desk.ask("r1", "a")
    assert of(Reject, lost_in_step(desk, 1, culprit="gone")) == []
