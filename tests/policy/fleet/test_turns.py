"""Every rule of hosting models that take turns. A worker has 100 bytes, a model takes 65 and keeps a few."""

from __future__ import annotations

import math

from hearth.core.types import Hold, ModelId, RequestId, TurnEnd, WorkerId
from hearth.policy.fleet.events import (
    Action,
    BrainConfig,
    Dispatch,
    Evict,
    LoadModel,
    RefusePin,
    Reject,
    RejectReason,
    SetHold,
    TurnBegan,
    TurnEnded,
    Why,
)
from hearth.policy.fleet.profile import Promise
from hearth.policy.fleet.records import Replica
from hearth.policy.fleet.residents import State, list_residents
from hearth.policy.fleet.routing import explain_wait
from tests.policy.fleet.test_brain import Desk, evicted, of, profile, regards, sent

TURNS = BrainConfig(takes_turns=True)


class TurnsDesk(Desk):
    """A desk whose workers have models take turns."""

    def __init__(self, config: BrainConfig = TURNS) -> None:
        super().__init__(config)

    def begin(self, model: str, worker: str = "w1") -> list[Action]:
        return self._step(TurnBegan(self.now_s, WorkerId(worker), ModelId(model)))

    def end(self, model: str, worker: str = "w1", why: TurnEnd = TurnEnd.TIME) -> list[Action]:
        return self._step(TurnEnded(self.now_s, WorkerId(worker), ModelId(model), why))

    def run(self, request: str, model: str, worker: str = "w1") -> None:
        """A request whose model has its turn, and is loaded."""
        self.ask(request, model)
        self.begin(model, worker)
        self.ready(model, worker)

    def replica(self, model: str, worker: str = "w1") -> Replica:
        return self.fleet.workers[WorkerId(worker)].replicas[ModelId(model)]


def busy_desk(config: BrainConfig = TURNS) -> TurnsDesk:
    """A worker on which `a` is in turn, and models that have no room beside it."""
    desk = TurnsDesk(config)
    desk.deploy(*(profile(name, 60, sink_bytes=5) for name in "abc"))
    desk.join("w1")
    desk.run("r1", "a")
    return desk


def test_a_model_without_room_beside_a_busy_one_is_hosted_to_take_turns_with_it() -> None:
    load, dispatch = busy_desk().ask("r2", "b")
    assert load == LoadModel(ModelId("b"), WorkerId("w1"), 5, 10, Promise(65, 0, 5))
    assert isinstance(dispatch, Dispatch)
    assert (dispatch.worker, dispatch.why, dispatch.waited_s) == ("w1", Why.TURNS, 0.0)


def test_on_an_arena_a_model_out_of_turn_is_charged_no_workspace_so_that_three_can_take_turns() -> None:
    desk = TurnsDesk()
    desk.deploy(*(profile(name, 22, workspace_bytes=50, sink_bytes=1) for name in "abc"))
    desk.join("w1", 80, kind="cpu")
    desk.run("r1", "a")
    for request, model in (("r2", "b"), ("r3", "c")):
        _, dispatch = desk.ask(request, model)
        assert isinstance(dispatch, Dispatch)
        assert dispatch.why is Why.TURNS


def test_on_an_arena_a_pinned_model_keeps_its_workspace_for_ever() -> None:
    for budget_bytes, has_room in ((77 + 77, True), (77 + 76, False)):
        desk = TurnsDesk()
        desk.deploy(profile("a", 22, workspace_bytes=50, sink_bytes=1, is_pinned=True))
        desk.deploy(profile("b", 22, workspace_bytes=50, sink_bytes=1))
        desk.join("w1", budget_bytes, kind="cpu")
        desk.begin("a")
        desk.ready("a", "w1")
        assert bool(of(Dispatch, desk.ask("r1", "b"))) is has_room


def test_without_turns_it_waits_for_room() -> None:
    desk = Desk()
    desk.deploy(profile("a", 60), profile("b", 60))
    desk.join("w1")
    desk.ask("r1", "a")
    assert of(Dispatch, desk.ask("r2", "b")) == []
    assert explain_wait(desk.fleet, RequestId("r1")) is None
    assert explain_wait(desk.fleet, RequestId("r2")) == "w1: needs 65 bytes, 35 bytes can be freed; busy: a"


def test_a_request_says_why_it_waits() -> None:
    desk = TurnsDesk()
    desk.deploy(
        profile("a", 60, sink_bytes=5, max_seqs=1), profile("big", 94, 5), profile("c", 60, sink_bytes=5)
    )
    desk.ask("r0", "a")
    assert explain_wait(desk.fleet, RequestId("r0")) == "no worker is up"
    desk.join("w1")
    for request, model in (("r1", "a"), ("r2", "big"), ("r3", "c")):
        assert of(Dispatch, desk.ask(request, model)) == []
    reasons = [explain_wait(desk.fleet, RequestId(request)) for request in ("r1", "r2", "r3")]
    assert reasons == [
        "w1: all 1 slots are in use",
        "w1: needs 99 bytes, 35 bytes can be freed; busy: a; too large to take turns with them",
        "w1: its room is kept for requests that came first",
    ]


def test_idle_models_are_evicted_where_that_gives_room_and_only_then_turns_are_taken() -> None:
    desk = TurnsDesk()
    desk.deploy(profile("idle"), profile("big", 60), profile("more", 60))
    desk.join("w1")
    desk.run("r0", "idle")
    desk.finish("r0")
    desk.end("idle", why=TurnEnd.IDLE)
    actions = desk.ask("r1", "big")
    assert evicted(actions) == []
    actions = desk.ask("r2", "more")
    assert [dispatch.why for dispatch in of(Dispatch, actions)] == [Why.TURNS]
    assert evicted(actions) == [], "its weights are lent anyway, and it keeps nothing that is in the way"


def test_an_idle_model_goes_for_one_that_has_room_without_it() -> None:
    desk = busy_desk()
    desk.finish("r1")
    desk.end("a", why=TurnEnd.IDLE)
    actions = desk.ask("r2", "b")
    assert evicted(actions) == ["a"]
    assert [dispatch.why for dispatch in of(Dispatch, actions)] == [Why.EVICTED]


def test_an_idle_model_goes_where_what_it_keeps_out_of_turn_is_in_the_way() -> None:
    desk = TurnsDesk()
    desk.deploy(profile("idle", 20, sink_bytes=5), profile("a", 60), profile("b", 95, min_kv_bytes=5))
    desk.join("w1")
    desk.run("r0", "idle")
    desk.finish("r0")
    desk.run("r1", "a")
    actions = desk.ask("r2", "b")
    assert evicted(actions) == ["idle"]
    assert [dispatch.why for dispatch in of(Dispatch, actions)] == [Why.TURNS]


def test_a_worker_with_room_is_preferred_to_turns() -> None:
    desk = busy_desk()
    desk.join("w2")
    assert sent(desk.ask("r2", "b")) == {"r2": "w2"}


def test_nobody_is_drained_however_long_somebody_waits_for_a_turn() -> None:
    desk = busy_desk()
    desk.ask("r2", "b")
    desk.now_s = 60.0
    desk.fire()
    assert not desk.fleet.drains
    assert sent(desk.ask("r3", "a")) == {"r3": "w1"}, "the busy one takes new requests"


def test_who_has_no_room_beside_what_others_keep_waits_and_has_them_drained() -> None:
    desk = TurnsDesk()
    desk.deploy(profile("a", 60, sink_bytes=5), profile("all", 95, min_kv_bytes=5))
    desk.join("w1")
    desk.run("r1", "a")
    assert of(Dispatch, desk.ask("r2", "all")) == [], "`all` needs all of the worker, and `a` keeps 5"
    desk.now_s = 3.0
    desk.fire()
    assert list(desk.fleet.drains) == ["all"]
    assert of(Dispatch, desk.ask("r3", "a")) == []
    assert sent(desk.finish("r1"))["r2"] == "w1"


def test_who_needs_all_of_a_worker_does_not_stop_it_for_long() -> None:
    desk = TurnsDesk(BrainConfig(takes_turns=True, patience_s=2.0, max_drain_s=30.0))
    desk.deploy(profile("a", 60, sink_bytes=5, max_seqs=256), profile("all", 95), profile("small", 20))
    desk.join("w1")
    desk.run("long", "a")
    desk.ask("r1", "all")
    desk.now_s = 2.0
    desk.fire()
    assert sent(desk.ask("r2", "a")) | sent(desk.ask("r3", "small")) == {}
    desk.now_s = 32.0
    assert sent(desk.fire()) == {"r2": "w1", "r3": "w1"}


def test_a_model_is_not_hosted_where_another_would_never_have_its_turn_again() -> None:
    desk = TurnsDesk()
    desk.deploy(profile("large", 90), profile("small", 30, sink_bytes=5), profile("tiny", 30, sink_bytes=1))
    desk.join("w1", budget_bytes=96)
    desk.run("r1", "large")
    assert of(Dispatch, desk.ask("r2", "small")) == [], "`large` needs 95, and `small` would keep 5 of 96"
    desk.cancel("r2")
    assert sent(desk.ask("r3", "tiny")) == {"r3": "w1"}


def test_a_model_with_requests_is_busy_in_its_turn_and_paused_out_of_it() -> None:
    desk = busy_desk()
    desk.ask("r2", "b")
    assert desk.states() == {("a", "w1"): State.BUSY, ("b", "w1"): State.WAITING}
    assert desk.replica("b").hold is Hold.PAUSED
    desk.end("a")
    desk.begin("b")
    assert desk.states() == {("a", "w1"): State.PAUSED, ("b", "w1"): State.LOADING}
    desk.ready("b", "w1")
    assert desk.states() == {("a", "w1"): State.PAUSED, ("b", "w1"): State.BUSY}
    desk.finish("r2")
    desk.end("b", why=TurnEnd.IDLE)
    assert desk.states()["b", "w1"] is State.WARM


def test_workers_are_not_told_whose_turn_it_is() -> None:
    desk = busy_desk()
    desk.ask("r2", "b")
    assert of(SetHold, desk.end("a") + desk.begin("b")) == []


def test_what_a_worker_says_late_of_a_turn_changes_nothing() -> None:
    desk = busy_desk()
    assert desk.begin("b") + desk.end("c") + desk.begin("a", "gone") == []


def test_requests_of_paused_models_go_on_elsewhere_when_their_worker_is_lost() -> None:
    desk = busy_desk()
    desk.ask("r2", "b")
    desk.end("a")
    desk.begin("b")
    desk.ready("b", "w1")
    desk.ask("r3", "c")
    actions = desk.lose("w1")
    assert of(Reject, actions) == []
    assert sent(desk.join("w2")) == {"r1": "w2", "r2": "w2", "r3": "w2"}
    assert desk.fleet.queues.num_awaiting_turn == 3


def test_a_model_that_waits_for_its_first_turn_is_not_blamed_for_the_loss_of_its_worker() -> None:
    desk = busy_desk()
    desk.ask("r2", "b")
    desk.lose("w1")
    assert [desk.fleet.models[ModelId(name)].num_deadly_loads for name in "ab"] == [1, 0]


# Pins.


def test_a_pin_counts_only_if_everybody_else_still_has_room_for_a_turn() -> None:
    desk = busy_desk()
    actions = desk.ask("r2", "b", keep_alive_s=math.inf)
    (refused,) = of(RefusePin, actions)
    assert (refused.model, refused.worker) == ("b", "w1")
    assert "`b` cannot be pinned yet" in refused.message
    assert "busy: a" in refused.message
    assert of(SetHold, actions) == []
    (_, resident) = list_residents(desk.fleet, 0.0)
    assert (resident.model, resident.is_pin_refused) == ("b", True)
    assert of(RefusePin, desk.ask("r3", "a")) == [], "people are told once"


def test_a_refused_pin_names_each_model_that_is_in_the_way_once() -> None:
    desk = TurnsDesk()
    desk.deploy(*(profile(name, 40, sink_bytes=5) for name in "abc"))
    desk.join("w1")
    desk.ask("r1", "a", keep_alive_s=math.inf)
    desk.ask("r2", "b")
    (refused,) = of(RefusePin, desk.ask("r3", "c", keep_alive_s=math.inf))
    assert "; busy: b; pinned: a;" in refused.message


def test_a_refused_pin_counts_as_soon_as_it_can() -> None:
    desk = busy_desk()
    desk.ask("r2", "b", keep_alive_s=math.inf)
    actions = desk.finish("r1")
    assert evicted(actions) == ["a"], "it is idle, and would have no turn beside a pinned model"
    assert regards(actions) == [("b", Hold.PINNED)]
    assert not desk.replica("b").is_pin_refused


def test_of_two_that_cannot_both_be_pinned_the_first_is() -> None:
    desk = busy_desk()
    desk.ask("r2", "b", keep_alive_s=math.inf)
    desk.ask("r3", "a", keep_alive_s=math.inf)
    desk.finish("r1")
    assert (desk.replica("a").hold, desk.replica("b").hold) == (Hold.BUSY, Hold.PAUSED)
    desk.finish("r3")
    assert desk.replica("b").hold is Hold.PINNED
    assert "a" not in desk.fleet.workers[WorkerId("w1")].replicas


def test_nobody_takes_turns_with_a_pinned_model() -> None:
    desk = TurnsDesk()
    desk.deploy(profile("pin", 60, is_pinned=True), profile("b", 60))
    desk.join("w1")
    (refused,) = of(Reject, desk.ask("r1", "b"))
    assert refused.reason is RejectReason.PINNED_OUT


# The bound on those who wait.


def test_requests_that_wait_for_a_first_turn_count_as_waiting() -> None:
    desk = busy_desk(BrainConfig(takes_turns=True, max_queue=2))
    for request in ("r2", "r3"):
        assert sent(desk.ask(request, "b")) == {request: "w1"}
    (refused,) = desk.ask("r4", "c")
    assert isinstance(refused, Reject)
    assert refused.reason is RejectReason.QUEUE_FULL
    assert refused.message.startswith("2 requests wait for room, a free slot or their turn, the limit: 2")
    assert refused.retry_s == 2.0
    assert sent(desk.ask("r5", "a")) == {"r5": "w1"}, "its model is in turn"
    desk.end("a")
    desk.begin("b")
    assert sent(desk.ask("r6", "c")) == {"r6": "w1"}, "those of `b` had their turn"


def test_a_cancelled_request_waits_for_no_turn() -> None:
    desk = busy_desk(BrainConfig(takes_turns=True, max_queue=1))
    desk.ask("r2", "b")
    desk.cancel("r2")
    assert sent(desk.ask("r3", "c")) == {"r3": "w1"}


def test_who_has_room_is_taken_however_many_wait_for_a_turn() -> None:
    desk = busy_desk(BrainConfig(takes_turns=True, max_queue=1))
    desk.ask("r2", "b")
    desk.join("w2")
    assert sent(desk.ask("r3", "c")) == {"r3": "w2"}


# Second replicas.


def test_a_model_that_has_had_no_turn_for_long_is_loaded_where_there_is_room() -> None:
    desk = busy_desk()
    desk.ask("r2", "b")
    desk.end("a")
    desk.begin("b")
    desk.ready("b", "w1")
    desk.join("w2")
    assert sent(desk.ask("r3", "a")) == {"r3": "w1"}, "it may come to its turn soon"
    desk.now_s = 2.0
    assert sent(desk.ask("r4", "a")) == {"r4": "w2"}


def test_a_second_replica_takes_no_turns_and_no_warm_model_goes_for_it() -> None:
    desk = busy_desk()
    desk.join("w2")
    desk.ask("r2", "c")
    desk.begin("c", "w2")
    desk.ask("r3", "b")
    worker = sent(desk.ask("r4", "b"))["r4"]
    assert worker == "w1"
    desk.now_s = 10.0
    assert of(LoadModel, desk.ask("r5", "b")) == []
    assert of(Evict, desk.ask("r6", "b")) == []


def test_a_run_is_measured_from_the_first_turn() -> None:
    desk = busy_desk()
    desk.ask("r2", "b")
    desk.now_s = 100.0
    desk.end("a")
    desk.begin("b")
    desk.ready("b", "w1")
    desk.now_s = 103.0
    desk.finish("r2")
    assert desk.fleet.estimates.run_s(ModelId("b")) == 3.0
