"""Every rule of the brain as an example. Sizes are a few bytes: a worker has 100, a model takes 35."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

import pytest

from hearth.core.types import LOCAL, AdapterId, Hold, ModelId, NodeId, RequestId, Rung, WorkerId, node_of
from hearth.policy.fleet.audit import audit
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import (
    Action,
    BrainConfig,
    CancelRun,
    DeviceReported,
    Dispatch,
    End,
    Event,
    Evict,
    LoadModel,
    LoadProgressed,
    ModelDeployed,
    ModelFailed,
    ModelReady,
    ModelRemoved,
    ModelStopped,
    NodeDraining,
    Option,
    Reject,
    RejectReason,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    ResidencyReported,
    RungUse,
    SetHold,
    SetTimer,
    TimerFired,
    WantedAdapter,
    Why,
    WorkerJoined,
    WorkerLost,
)
from hearth.policy.fleet.failures import MAX_DELAY_S
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.profile import ModelProfile, Promise
from hearth.policy.fleet.residents import State, list_residents
from hearth.policy.fleet.routing import explain_wait
from tests.policy.fleet.world import profile

A = TypeVar("A")
#: What a worker owes a model of 30 bytes of weights.
LEAST = Promise(35, 0)


class Desk:
    """Tells the brain what happened, at a time that the test sets, and checks the books after each step."""

    def __init__(self, config: BrainConfig | None = None) -> None:
        self.fleet = Fleet(config or BrainConfig())
        self.now_s = 0.0

    def _step(self, *events: Event) -> list[Action]:
        actions: list[Action] = []
        for event in events:
            actions += step(self.fleet, event)
            audit(self.fleet)
        return actions

    def deploy(self, *profiles: ModelProfile) -> list[Action]:
        return self._step(*(ModelDeployed(self.now_s, profile) for profile in profiles))

    def join(
        self,
        worker: str,
        budget_bytes: int = 100,
        kind: str = "cuda",
        gpu: int | None = None,
        *,
        runs_stages: bool = True,
    ) -> list[Action]:
        name, is_cuda = WorkerId(worker), kind == "cuda"
        node = node_of(name)
        return self._step(WorkerJoined(self.now_s, name, kind, budget_bytes, is_cuda, node, gpu, runs_stages))

    def lose(self, worker: str, culprit: str | None = None, *, has_answered: bool = False) -> list[Action]:
        model = None if culprit is None else ModelId(culprit)
        return self._step(WorkerLost(self.now_s, WorkerId(worker), model, has_answered))

    def drain_node(self, node: str, *, undo: bool = False) -> list[Action]:
        return self._step(NodeDraining(self.now_s, NodeId(node), not undo))

    def ask(
        self, request: str, model: str, keep_alive_s: float | None = None, adapter: str | None = None
    ) -> list[Action]:
        event = RequestArrived(self.now_s, RequestId(request), ModelId(model), 10, None, keep_alive_s)
        if adapter is not None:
            event = replace(event, adapter=WantedAdapter(AdapterId(adapter), num_bytes=10))
        return self._step(event)

    def finish(self, request: str, how: End = End.DONE) -> list[Action]:
        return self._step(RequestFinished(self.now_s, RequestId(request), 5, how))

    def cancel(self, request: str) -> list[Action]:
        return self._step(RequestCancelled(self.now_s, RequestId(request)))

    def ready(self, model: str, worker: str, *rungs: RungUse) -> list[Action]:
        return self._step(ModelReady(self.now_s, WorkerId(worker), ModelId(model), rungs, 1.0))

    def fail(self, model: str, worker: str) -> list[Action]:
        return self._step(ModelFailed(self.now_s, WorkerId(worker), ModelId(model), "no such file"))

    def stop(self, model: str, *, is_freed: bool = False) -> list[Action]:
        return self._step(ModelStopped(self.now_s, ModelId(model), is_freed))

    def remove(self, model: str) -> list[Action]:
        return self._step(ModelRemoved(self.now_s, ModelId(model)))

    def report(self, model: str, bytes_by_rung: dict[Rung, int]) -> list[Action]:
        return self._step(ResidencyReported(self.now_s, ModelId(model), bytes_by_rung))

    def has(self, worker: str, **bytes_by_model: int) -> list[Action]:
        """What lies in the worker's device memory."""
        there = {ModelId(model): num_bytes for model, num_bytes in bytes_by_model.items()}
        return self._step(DeviceReported(self.now_s, WorkerId(worker), there))

    def progress(self, model: str, worker: str, num_bytes: int) -> list[Action]:
        return self._step(LoadProgressed(self.now_s, WorkerId(worker), ModelId(model), num_bytes))

    def fire(self) -> list[Action]:
        return self._step(TimerFired(self.now_s))

    def serve(self, request: str, model: str, keep_alive_s: float | None = None) -> None:
        """A request from beginning to end; its model is resident and idle then."""
        actions = self.ask(request, model, keep_alive_s)
        for load in of(LoadModel, actions):
            self.ready(load.model, load.worker)
        self.finish(request)

    def states(self) -> dict[tuple[str, str], State]:
        residents = list_residents(self.fleet, self.now_s)
        return {(resident.model, resident.worker): resident.state for resident in residents}


def of(kind: type[A], actions: list[Action]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def sent(actions: list[Action]) -> dict[str, str]:
    """By request: the worker it was sent to."""
    return {dispatch.request_id: dispatch.worker for dispatch in of(Dispatch, actions)}


def evicted(actions: list[Action]) -> list[str]:
    return [evict.model for evict in of(Evict, actions)]


def regards(actions: list[Action]) -> list[tuple[str, Hold]]:
    return [(order.model, order.hold) for order in of(SetHold, actions)]


def desk_with(*models: str, workers: int = 1, config: BrainConfig | None = None) -> Desk:
    desk = Desk(config)
    desk.deploy(*(profile(model) for model in models))
    for number in range(workers):
        desk.join(f"w{number + 1}")
    return desk


# Arrival.


def test_a_request_for_a_model_that_is_not_deployed_is_refused() -> None:
    (reject,) = of(Reject, desk_with("a").ask("r1", "b"))
    assert (reject.request_id, reject.reason) == ("r1", RejectReason.UNKNOWN_MODEL)
    assert "`b`" in reject.message


def test_a_model_that_fits_no_worker_is_refused_at_once_with_the_numbers() -> None:
    desk = desk_with(workers=1)
    desk.deploy(profile("a", fixed_bytes=120))
    (reject,) = of(Reject, desk.ask("r1", "a"))
    assert reject.reason is RejectReason.NEVER_FITS
    assert "125 bytes" in reject.message
    assert "100 bytes" in reject.message


def test_a_model_that_only_other_nodes_may_run_is_refused_with_its_labels_and_theirs() -> None:
    desk = Desk()
    desk.join("w0")
    desk.join("n1/w0", kind="cuda zone=b")
    desk.deploy(replace(profile("a", kinds=()), labels=("zone=a",)))
    (reject,) = of(Reject, desk.ask("r1", "a"))
    assert reject.reason is RejectReason.NEVER_FITS
    assert "needs nodes labelled zone=a, which `cuda`, `cuda zone=b` are not" in reject.message
    assert "start a node with such `cluster.labels`" in reject.message
    desk.deploy(replace(profile("a", kinds=("cuda zone=a",)), labels=("zone=a",)))
    desk.join("n2/w0", kind="cuda zone=a")
    (sent,) = of(Dispatch, desk.ask("r2", "a"))
    assert sent.worker == "n2/w0"
    obstacles = [option.obstacle for option in sent.options if option.worker == "w0"]
    assert obstacles == ["it needs nodes labelled zone=a, which `cuda` is not"]


def test_who_needs_a_drained_node_waits_for_it_and_others_that_fit_nowhere_are_refused() -> None:
    desk = Desk()
    desk.join("w0")
    desk.join("n1/w0", kind="cuda zone=b")
    desk.deploy(profile("huge", 200), profile("b", kinds=("cuda zone=b",)))
    desk.deploy(profile("a", kinds=()))
    desk.drain_node("n1")
    assert of(Reject, desk.ask("r1", "b")) == []
    for request, model in (("r2", "huge"), ("r3", "a")):
        (reject,) = of(Reject, desk.ask(request, model))
        assert reject.reason is RejectReason.NEVER_FITS
    (sent,) = of(Dispatch, desk.drain_node("n1", undo=True))
    assert (sent.request_id, sent.worker) == ("r1", "n1/w0")


def test_a_request_waits_for_the_first_worker() -> None:
    desk = desk_with("a", workers=0)
    assert desk.ask("r1", "a") == [SetTimer(2.0)]
    actions = desk.join("w1")
    assert [type(action) for action in actions] == [LoadModel, Dispatch]
    assert of(Dispatch, actions)[0].why is Why.WAITED


def test_a_request_that_waits_is_refused_when_only_workers_join_that_are_too_small() -> None:
    desk = Desk()
    desk.deploy(profile("a", fixed_bytes=120))
    assert of(Reject, desk.ask("r1", "a")) == []
    (reject,) = of(Reject, desk.join("w1"))
    assert reject.reason is RejectReason.NEVER_FITS


def test_a_cold_request_follows_directly_behind_the_order_to_load() -> None:
    load, dispatch = desk_with("a").ask("r1", "a")
    assert load == LoadModel(ModelId("a"), WorkerId("w1"), kv_floor_bytes=5, max_kv_bytes=10, promise=LEAST)
    assert isinstance(dispatch, Dispatch)
    assert (dispatch.worker, dispatch.why, dispatch.waited_s) == ("w1", Why.FREE_ROOM, 0.0)


def test_all_requests_for_a_loading_model_share_one_load() -> None:
    desk = desk_with("a", workers=2)
    desk.ask("r1", "a")
    (second,) = desk.ask("r2", "a")
    assert isinstance(second, Dispatch)
    assert (second.worker, second.why) == ("w1", Why.LOADING)


def test_a_request_to_a_resident_idle_model_is_dispatched_in_the_same_turn() -> None:
    desk = desk_with("a")
    desk.serve("r1", "a")
    (dispatch,) = desk.ask("r2", "a")
    assert isinstance(dispatch, Dispatch)
    assert dispatch.why is Why.RESIDENT


def test_a_second_replica_comes_when_the_first_is_full_even_while_that_is_loading() -> None:
    desk = desk_with("a", workers=2)
    desk.ask("r1", "a")
    desk.ask("r2", "a")
    load, dispatch = desk.ask("r3", "a")
    assert isinstance(load, LoadModel)
    assert isinstance(dispatch, Dispatch)
    assert (load.worker, dispatch.worker, dispatch.why) == ("w2", "w2", Why.DEMAND)


def test_a_model_that_failed_is_loaded_once_at_a_time() -> None:
    desk = desk_with("a", workers=3)
    desk.ask("r1", "a")
    desk.fail("a", "w1")
    desk.now_s = MAX_DELAY_S
    for number in range(2, 8):
        desk.ask(f"r{number}", "a")
    assert len(desk.states()) == 1
    desk.ready("a", next(worker for _, worker in desk.states()))
    assert len(desk.states()) == 2, "the worker where it failed is not tried while another serves it"


def busy_twice(load_bytes_per_s: float) -> Desk:
    """`a` has all slots of `w1` in use; `w2` is free; loading `a` takes 30 bytes over that speed."""
    config = BrainConfig(priors={Rung.HOST: 20.0, Rung.DISK: load_bytes_per_s, Rung.OBJECT: 1.0})
    desk = desk_with("a", workers=2, config=config)
    desk.ask("r1", "a")
    desk.ask("r2", "a")
    desk.ready("a", "w1")
    return desk


def test_no_second_replica_comes_where_a_slot_is_free_sooner_until_enough_wait() -> None:
    desk = busy_twice(load_bytes_per_s=25.0)  # 1.2 s to load; a request is taken to run for 1 s
    assert of(LoadModel, desk.ask("r3", "a")) == []
    assert of(LoadModel, desk.ask("r4", "a")) == []
    assert of(LoadModel, desk.ask("r5", "a")) == [LoadModel(ModelId("a"), WorkerId("w2"), 5, 10, LEAST)]


def test_who_has_waited_for_its_patience_gets_a_second_replica_even_if_it_takes_long() -> None:
    desk = busy_twice(load_bytes_per_s=1.0)
    assert desk.ask("r3", "a") == [SetTimer(2.0)]
    desk.now_s = 2.0
    assert sent(desk.fire()) == {"r3": "w2"}


def test_a_second_replica_takes_the_place_of_a_warm_model_only_for_who_has_waited_long() -> None:
    desk = desk_with("a", "b", workers=0)
    desk.join("w1", budget_bytes=45)
    desk.serve("r0", "b")
    desk.join("w2", budget_bytes=45)
    desk.ask("r1", "a")
    desk.ask("r2", "a")
    desk.ready("a", "w2")
    assert evicted(desk.ask("r3", "a")) == []
    desk.now_s = 2.0
    assert evicted(desk.fire()) == ["b"]


# Routing.


def test_a_request_goes_where_its_adapter_was_used_before_if_the_base_is_as_good_elsewhere() -> None:
    desk = desk_with(workers=2)
    desk.deploy(profile("a", max_seqs=2))
    for request in ("r1", "r2", "r3"):
        for load in of(LoadModel, desk.ask(request, "a")):
            desk.ready(load.model, load.worker)
    desk.now_s = 1.0  # so long requests run
    for request in ("r1", "r2", "r3"):
        desk.finish(request)
    assert len(desk.fleet.models[ModelId("a")].replicas) == 2
    first = sent(desk.ask("r4", "a", adapter="lora"))["r4"]
    other = sent(desk.ask("r5", "a", adapter="other"))["r5"]
    assert first != other
    for request in ("r4", "r5"):
        desk.finish(request)

    assert sent(desk.ask("r6", "a", adapter="other")) == {"r6": other}
    desk.finish("r6")
    assert sent(desk.ask("r7", "a", adapter="lora")) == {"r7": first}
    assert sent(desk.ask("r8", "a", adapter="lora")) == {"r8": other}, "the queue is shorter there"


def test_the_replica_with_the_shorter_queue_is_chosen() -> None:
    desk = desk_with("a", workers=2)
    for request in ("r1", "r2", "r3"):
        desk.ask(request, "a")
    desk.ready("a", "w1")
    desk.ready("a", "w2")
    desk.now_s = 1.0
    desk.finish("r1")
    desk.finish("r2")
    assert sent(desk.ask("r4", "a")) == {"r4": "w1"}


def test_a_model_is_loaded_where_no_other_is_busy() -> None:
    desk = desk_with("a", "b", workers=2)
    desk.ask("r1", "a")
    assert sent(desk.ask("r2", "b")) == {"r2": "w2"}


def test_idle_workers_are_packed() -> None:
    desk = desk_with("a", "b", workers=2)
    desk.serve("r1", "a")
    assert sent(desk.ask("r2", "b")) == {"r2": "w1"}


def test_every_considered_worker_is_reported_with_its_cost_or_its_obstacle() -> None:
    config = BrainConfig(priors={Rung.HOST: 20.0, Rung.DISK: 10.0, Rung.OBJECT: 1.0})
    desk = desk_with("a", "b", "c", workers=2, config=config)
    desk.deploy(profile("big", fixed_bytes=80))
    desk.ask("r1", "big")
    actions = desk.ask("r2", "a")
    chosen, other = of(Dispatch, actions)[0].options
    assert (chosen.worker, chosen.obstacle, chosen.load_s) == ("w2", None, 3.0)
    assert chosen.cost_s == pytest.approx(chosen.queue_s + chosen.load_s + 0.05 * (1 - chosen.utilisation))
    assert other.worker == "w1"
    assert other.obstacle == "needs 35 bytes, 15 bytes can be freed; busy: big"


def test_the_load_estimate_follows_the_rungs_and_their_measured_speed() -> None:
    config = BrainConfig(priors={Rung.HOST: 20.0, Rung.DISK: 10.0, Rung.OBJECT: 1.0})
    desk = desk_with("a", "b", config=config)
    desk.report("b", {Rung.HOST: 10, Rung.DISK: 15})
    desk.ask("r1", "a")
    desk.ready("a", "w1", RungUse(Rung.HOST, 30, 0.5))
    dispatch = of(Dispatch, desk.ask("r2", "b"))[0]
    assert dispatch.options[0].load_s == pytest.approx(10 / 60 + 15 / 10 + 5 / 1)


@pytest.mark.parametrize(("ahead_bytes", "expected_s"), [(0, 5.0), (20 << 30, 2.0)])
def test_the_load_estimate_follows_what_a_whole_load_took(ahead_bytes: int, expected_s: float) -> None:
    desk = Desk(BrainConfig(priors={Rung.HOST: 20e9, Rung.DISK: 2e9, Rung.OBJECT: 1e9}))
    desk.deploy(profile("a", 30 << 30), profile("b", 30 << 30))
    desk.join("w1", 200 << 30)
    desk.ask("r1", "a")
    uses = (RungUse(Rung.DISK, 30 << 30, 2.0),)
    step(desk.fleet, ModelReady(0.0, WorkerId("w1"), ModelId("a"), uses, 5.0, ahead_bytes))
    (dispatch,) = of(Dispatch, desk.ask("r2", "b"))
    assert dispatch.options[0].load_s == pytest.approx(expected_s)


def test_a_load_under_way_costs_what_is_still_missing() -> None:
    config = BrainConfig(priors={Rung.HOST: 20.0, Rung.DISK: 10.0, Rung.OBJECT: 1.0})
    desk = desk_with("a", config=config)
    desk.ask("r1", "a")
    desk.progress("a", "w1", 20)
    (dispatch,) = of(Dispatch, desk.ask("r2", "a"))
    assert dispatch.options[0].load_s == pytest.approx(1.0)


def test_of_workers_that_must_evict_the_one_that_loses_least_is_chosen_and_the_loss_is_shown() -> None:
    config = BrainConfig(priors={Rung.HOST: 20.0, Rung.DISK: 10.0, Rung.OBJECT: 1.0})
    desk = Desk(config)
    desk.deploy(profile("dear", 80, weight=9.0, keep_alive_s=0.0), profile("cheap", 80, keep_alive_s=0.0))
    desk.deploy(profile("new", 80))
    for worker in ("w1", "w2"):
        desk.join(worker)
    desk.ask("r1", "dear")
    desk.ask("r2", "cheap")
    for model, worker in (("dear", "w1"), ("cheap", "w2")):
        desk.ready(model, worker)
    desk.finish("r1")
    desk.finish("r2")
    actions = desk.ask("r3", "new")
    assert evicted(actions) == ["cheap"]
    costs = {name: option.evict_s for name, option in options(actions).items()}
    assert costs["w2"] == of(Evict, actions)[0].cost_s > 0
    assert costs["w1"] == pytest.approx(9 * costs["w2"])


# Affinity. A byte takes a tenth of a second to load.

SLOW = BrainConfig(priors={Rung.HOST: 20.0, Rung.DISK: 10.0, Rung.OBJECT: 1.0})


def options(actions: list[Action]) -> dict[str, Option]:
    (dispatch,) = of(Dispatch, actions)
    return {option.worker: option for option in dispatch.options}


def test_a_model_is_loaded_where_bytes_of_it_are_and_only_the_others_cost_time() -> None:
    desk = desk_with("a", workers=3, config=SLOW)
    desk.has("w2", a=20)
    desk.has("w3", a=10)
    actions = desk.ask("r1", "a")
    assert sent(actions) == {"r1": "w2"}
    shown = options(actions)
    assert {name: option.missing_bytes for name, option in shown.items()} == {"w1": 30, "w2": 10, "w3": 20}
    assert {name: option.load_s for name, option in shown.items()} == {"w1": 3.0, "w2": 1.0, "w3": 2.0}


def test_a_model_that_was_evicted_comes_back_where_its_bytes_stayed() -> None:
    desk = desk_with("a", "b", "c", workers=0, config=SLOW)
    desk.deploy(profile("big", fixed_bytes=90))
    desk.join("w1")
    desk.serve("r1", "a", keep_alive_s=0.0)
    assert evicted(desk.ask("r2", "big")) == ["a"]
    desk.ready("big", "w1")
    desk.has("w1", a=20, big=90)
    desk.finish("r2")
    desk.stop("big")
    desk.join("w2")
    actions = desk.ask("r3", "a")
    assert sent(actions) == {"r3": "w1"}
    assert evicted(actions) == ["big"], "it costs less to have that back than to load all of `a` elsewhere"


def test_bytes_of_a_model_do_not_outweigh_those_who_would_have_to_go() -> None:
    desk = desk_with("a", workers=2, config=SLOW)
    desk.deploy(profile("dear", fixed_bytes=90, weight=100.0))
    desk.serve("r1", "dear", keep_alive_s=0.0)
    desk.has("w1", a=1, dear=90)
    assert sent(desk.ask("r2", "a")) == {"r2": "w2"}


def test_nobody_goes_where_the_bytes_save_less_than_that_costs_however_well_it_would_pack() -> None:
    desk = desk_with("a", workers=2)  # Loads take no time to speak of, so only packing is left to decide.
    desk.deploy(profile("kept", fixed_bytes=90))
    desk.serve("r1", "kept", keep_alive_s=0.0)
    desk.has("w1", a=1, kept=90)
    actions = desk.ask("r2", "a")
    assert evicted(actions) == []
    assert sent(actions) == {"r2": "w2"}


def test_a_warm_model_stays_where_bytes_of_another_are_while_a_third_worker_has_room_or_retained_ones() -> (
    None
):
    desk = desk_with("a", "b", workers=0, config=SLOW)
    for number, model in ((1, "a"), (2, "b")):
        desk.join(f"w{number}", budget_bytes=45)
        desk.serve(f"r{number}", model)
    desk.deploy(profile("c"))
    desk.has("w1", a=30, c=29)
    desk.stop("b")
    desk.join("w3", budget_bytes=45)
    actions = desk.ask("r3", "c")
    assert (evicted(actions), sent(actions)) == ([], {"r3": "w3"})
    desk.lose("w3")
    desk.cancel("r3")
    desk.serve("r4", "b")
    desk.stop("b")
    actions = desk.ask("r5", "c")
    assert (evicted(actions), sent(actions)) == (["b"], {"r5": "w2"})


def test_where_a_warm_model_has_to_go_it_is_one_beside_bytes_of_who_comes() -> None:
    desk = desk_with("a", "b", workers=0, config=SLOW)
    for number, model in ((1, "a"), (2, "b")):
        desk.join(f"w{number}", budget_bytes=45)
        desk.serve(f"r{number}", model)
    desk.deploy(profile("c"))
    desk.has("w2", b=30, c=29)
    actions = desk.ask("r3", "c")
    assert (evicted(actions), sent(actions)) == (["b"], {"r3": "w2"})


def test_nobody_warm_goes_for_a_second_replica_even_where_its_bytes_are() -> None:
    desk = desk_with("a", "b", workers=0, config=SLOW)
    desk.join("w1", budget_bytes=45)
    desk.serve("r0", "b")
    desk.join("w2", budget_bytes=45)
    desk.ask("r1", "a")
    desk.ask("r2", "a")
    desk.ready("a", "w2")
    desk.has("w1", a=30)
    assert evicted(desk.ask("r3", "a")) == []


def test_a_request_goes_to_the_replica_that_lost_nothing() -> None:
    desk = desk_with("a", workers=2, config=SLOW)
    for number in range(1, 4):
        desk.ask(f"r{number}", "a")
    desk.ready("a", "w1")
    desk.ready("a", "w2")
    desk.now_s = 2.0
    for number in range(1, 4):
        desk.finish(f"r{number}")
    desk.has("w1", a=10)
    actions = desk.ask("r4", "a")
    assert sent(actions) == {"r4": "w2"}
    assert {name: option.missing_bytes for name, option in options(actions).items()} == {"w1": 20, "w2": 0}
    desk.ready("a", "w1")
    assert options(desk.ask("r5", "a"))["w1"].missing_bytes == 0, "it was loaded again without an order"


def test_a_load_that_reuses_bytes_costs_only_the_rest() -> None:
    desk = desk_with("a", config=SLOW)
    desk.has("w1", a=10)
    desk.ask("r1", "a")
    desk.progress("a", "w1", 15)
    assert options(desk.ask("r2", "a"))["w1"].missing_bytes == 5


def test_a_report_replaces_the_one_before_and_ends_with_its_worker() -> None:
    desk = desk_with("a", "b", workers=2, config=SLOW)
    desk.has("w2", a=1000, unknown=5)
    model = desk.fleet.models[ModelId("a")]
    assert model.resident_bytes == {"w2": 30}, "no more than there is of it"
    desk.has("w2", b=10)
    assert model.resident_bytes == {}
    desk.has("w2", a=10)
    desk.lose("w2")
    assert model.resident_bytes == {}
    assert desk.has("w2", a=10) == []
    assert model.resident_bytes == {}


def test_a_report_changes_no_promise() -> None:
    desk = desk_with("a", "b")
    desk.serve("r1", "a")
    desk.has("w1", a=0, b=30)
    assert desk.fleet.workers[WorkerId("w1")].promises.free_bytes == 65


def test_bytes_of_another_version_count_for_nothing_and_are_freed() -> None:
    desk = desk_with("a", workers=2, config=SLOW)
    desk.has("w2", a=20)
    freed = Evict(ModelId("a"), WorkerId("w2"), 0.0, is_freed=True)
    assert desk.deploy(profile("a", digest="other")) == [freed]
    assert sent(desk.ask("r1", "a")) == {"r1": "w1"}


def test_a_replica_of_an_older_version_says_nothing_of_the_new_one() -> None:
    desk = desk_with("a", config=SLOW)
    desk.ask("r1", "a")
    desk.ready("a", "w1")
    desk.deploy(profile("a", digest="other"))
    desk.has("w1", a=30)
    assert desk.fleet.models[ModelId("a")].resident_bytes == {}


def test_a_model_of_the_same_bytes_that_is_promised_more_reuses_them() -> None:
    desk = desk_with("a", workers=2, config=SLOW)
    desk.serve("r1", "a")
    (evict,) = of(Evict, desk.deploy(profile("a", min_kv_bytes=7)))
    assert not evict.is_freed
    assert options(desk.ask("r2", "a"))["w1"].missing_bytes == 0


def test_what_is_left_of_a_removed_model_is_freed() -> None:
    desk = desk_with("a", workers=2)
    desk.has("w2", a=20)
    assert desk.remove("a") == [Evict(ModelId("a"), WorkerId("w2"), 0.0, is_freed=True)]
    assert desk.fleet.models == {}


# Room.


def test_retained_models_go_first_and_the_one_that_is_cheapest_to_have_back() -> None:
    desk = Desk()
    desk.deploy(
        profile("dear", weight=9.0, keep_alive_s=0.0), profile("cheap", keep_alive_s=0.0), profile("new")
    )
    desk.join("w1")
    desk.serve("r1", "dear")
    desk.serve("r2", "cheap")
    actions = desk.ask("r3", "new")
    assert [type(action) for action in actions] == [Evict, LoadModel, Dispatch]
    assert evicted(actions) == ["cheap"]
    assert of(Dispatch, actions)[0].why is Why.EVICTED


def test_warm_models_stay_while_a_retained_one_suffices_and_go_when_none_does() -> None:
    desk = Desk()
    desk.deploy(profile("warm"), profile("old", weight=9.0, keep_alive_s=0.0), profile("b"), profile("c"))
    desk.join("w1")
    desk.serve("r1", "warm")
    desk.serve("r2", "old")
    assert evicted(desk.ask("r3", "b")) == ["old"]
    assert evicted(desk.ask("r4", "c")) == ["warm"]


def test_a_busy_or_pinned_model_is_never_evicted() -> None:
    desk = Desk(BrainConfig(patience_s=math.inf))
    desk.deploy(profile("pinned", is_pinned=True), profile("busy"), profile("new"))
    desk.join("w1")
    desk.ask("r1", "busy")
    assert desk.ask("r2", "new") == []
    assert evicted(desk.finish("r1")) == ["busy"]
    assert desk.states()["pinned", "w1"] is State.LOADING


def test_no_more_is_evicted_than_needed() -> None:
    desk = Desk()
    small = profile("small", fixed_bytes=10, keep_alive_s=0.0)
    large = profile("large", fixed_bytes=60, weight=9.0, keep_alive_s=0.0)
    desk.deploy(small, large, profile("new", fixed_bytes=60))
    desk.join("w1")
    desk.serve("r1", "small")
    desk.serve("r2", "large")
    assert evicted(desk.ask("r3", "new")) == ["large"], "the small one is cheaper, but would not suffice"


def test_nobody_goes_for_more_kv_than_is_promised() -> None:
    desk = Desk()
    desk.deploy(
        profile("old", keep_alive_s=0.0), profile("new", fixed_bytes=50, min_kv_bytes=5, max_kv_bytes=20)
    )
    desk.join("w1")
    desk.serve("r1", "old")
    actions = desk.ask("r2", "new")
    assert evicted(actions) == []
    assert of(LoadModel, actions) == [LoadModel(ModelId("new"), WorkerId("w1"), 5, 20, Promise(55, 0))]


def test_a_model_may_have_no_more_kv_than_the_budget_leaves() -> None:
    desk = Desk()
    desk.deploy(profile("a", fixed_bytes=90, min_kv_bytes=5, max_kv_bytes=50))
    desk.join("w1")
    assert of(LoadModel, desk.ask("r1", "a"))[0].max_kv_bytes == 10


def test_what_is_evicted_for_room_keeps_its_bytes_until_somebody_needs_them() -> None:
    desk = desk_with("a", "b", "c")
    desk.serve("r1", "a")
    desk.serve("r2", "b")
    (evict,) = of(Evict, desk.ask("r3", "c"))
    assert not evict.is_freed
    assert evict.cost_s > 0


# Waiting.


def full_house(config: BrainConfig | None = None) -> Desk:
    """`a` and `b` are busy with one request each; there is no room for a third model."""
    desk = desk_with("a", "b", "c", "d", config=config)
    for request, model in (("ra", "a"), ("rb", "b")):
        desk.ask(request, model)
        desk.ready(model, "w1")
    return desk


def test_a_request_without_room_waits_until_a_model_is_idle() -> None:
    desk = full_house()
    assert of(Dispatch, desk.ask("rc", "c")) == []
    desk.now_s = 1.5
    actions = desk.finish("ra")
    assert evicted(actions) == ["a"]
    (dispatch,) = of(Dispatch, actions)
    assert (dispatch.request_id, dispatch.why, dispatch.waited_s) == ("rc", Why.WAITED, 1.5)


def test_who_needs_no_room_may_overtake_and_who_needs_some_may_not() -> None:
    desk = full_house()
    desk.deploy(profile("tiny", fixed_bytes=5, min_kv_bytes=1, max_kv_bytes=5))
    desk.ask("rc", "c")
    assert sent(desk.ask("ra2", "a")) == {"ra2": "w1"}
    assert of(LoadModel, desk.ask("rt", "tiny")) == [], "the room for it counts for the one before"
    actions = desk.cancel("rc")
    assert sent(actions) == {"rt": "w1"}


def test_a_model_that_only_pins_keep_out_is_refused_at_once_without_their_names() -> None:
    desk = Desk()
    desk.deploy(profile("secret", is_pinned=True), profile("big", fixed_bytes=80))
    desk.join("w1")
    desk.ready("secret", "w1")
    (reject,) = of(Reject, desk.ask("r1", "big"))
    assert reject.reason is RejectReason.PINNED_OUT
    assert "it needs 85 bytes, at most 65 bytes of 100 bytes can be freed" in reject.message
    assert "unpin one that `hearth ps` shows" in reject.message
    assert "secret" not in reject.message
    desk.stop("secret")
    assert sent(desk.ask("r2", "big")) == {"r2": "w1"}


def test_who_waits_is_refused_when_a_pin_takes_the_room_that_was_hoped_for() -> None:
    desk = desk_with("a", "small", workers=1)
    desk.deploy(profile("big", fixed_bytes=80))
    desk.ask("r1", "a")
    desk.ready("a", "w1")
    assert of(Reject, desk.ask("r2", "big")) == []
    actions = desk.ask("r3", "a", keep_alive_s=math.inf)
    assert [(reject.request_id, reject.reason) for reject in of(Reject, actions)] == [
        ("r2", RejectReason.PINNED_OUT)
    ]


def test_a_model_that_pins_keep_out_waits_while_a_lost_worker_is_replaced_and_holds_up_nobody() -> None:
    desk = Desk()
    desk.deploy(profile("pinned", is_pinned=True), profile("big", fixed_bytes=80), profile("small"))
    desk.join("w1")
    desk.join("w2")
    desk.ready("pinned", "w1")
    assert sent(desk.ask("r1", "big")) == {"r1": "w2"}
    assert of(Reject, desk.lose("w2")) == []
    assert sent(desk.ask("r2", "small")) == {"r2": "w1"}
    assert sent(desk.join("w3")) == {"r1": "w3"}


def test_who_waits_holds_up_only_those_who_want_room_that_it_could_have() -> None:
    desk = full_house()
    desk.deploy(profile("large", fixed_bytes=80))
    desk.join("small", budget_bytes=50)
    desk.ask("r1", "large")
    assert sent(desk.ask("r2", "c")) == {"r2": "small"}, "a worker that can never hold the large one"


def test_once_a_worker_is_drained_for_who_waits_others_may_have_room_elsewhere() -> None:
    desk = Desk(BrainConfig(patience_s=2.0))
    desk.deploy(profile("a", 80), profile("b", 80), profile("c", 100), profile("d", 30))
    for worker in ("w1", "w2"):
        desk.join(worker, budget_bytes=130)
    for request, model in (("ra", "a"), ("rb", "b")):
        desk.ask(request, model)
    desk.ready("a", "w1")
    desk.ready("b", "w2")
    desk.ask("rc", "c")
    assert sent(desk.ask("rd", "d")) == {}, "any worker may be the one that `c` gets"
    desk.now_s = 2.0
    actions = desk.fire()
    (drain,) = desk.fleet.drains.values()
    assert set(sent(actions).values()) == {"w1", "w2"} - {drain.workers[0].name}


def test_requests_wait_for_a_slot_in_order() -> None:
    desk = desk_with("a")
    for number in range(1, 6):
        desk.ask(f"r{number}", "a")
    assert sent(desk.finish("r2")) == {"r3": "w1"}
    assert sent(desk.cancel("r1")) == {"r4": "w1"}
    assert desk.fleet.queues.num_waiting == 1


def test_beyond_the_queue_a_request_is_refused_and_told_when_to_come_again() -> None:
    desk = desk_with("a", config=BrainConfig(max_queue=1))
    for number in range(1, 4):
        desk.ask(f"r{number}", "a")
    (reject,) = of(Reject, desk.ask("r4", "a"))
    assert reject.reason is RejectReason.QUEUE_FULL
    assert reject.retry_s is not None
    assert reject.retry_s >= 1.0
    assert desk.fleet.queues.num_waiting == 1


def test_a_queue_of_none_still_serves_what_can_run() -> None:
    desk = desk_with("a", config=BrainConfig(max_queue=0))
    assert sent(desk.ask("r1", "a")) == {"r1": "w1"}


# Patience.


def test_who_has_waited_long_enough_has_a_busy_model_drained() -> None:
    desk = full_house(BrainConfig(patience_s=2.0))
    assert desk.ask("rc", "c") == [SetTimer(2.0)]
    desk.now_s = 2.0
    assert desk.fire() == [SetTimer(32.0)], "then the drain would be in vain"
    drained = [name for name in ("a", "b") if not desk.fleet.models[ModelId(name)].usable]
    assert len(drained) == 1
    (name,) = drained
    assert of(Dispatch, desk.ask("later", name)) == [], "the drained model takes nobody new"
    actions = desk.finish(f"r{name}")
    assert evicted(actions) == [name]
    assert sent(actions) == {"rc": "w1"}, "and the later one waits behind it"


def test_a_drain_ends_with_the_request_that_it_was_for() -> None:
    desk = full_house(BrainConfig(patience_s=2.0))
    desk.ask("rc", "c")
    desk.now_s = 2.0
    desk.fire()
    (name,) = [name for name in ("a", "b") if not desk.fleet.models[ModelId(name)].usable]
    desk.ask("later", name)
    assert sent(desk.cancel("rc")) == {"later": "w1"}


def test_two_requests_do_not_hold_a_worker() -> None:
    desk = Desk(BrainConfig(patience_s=2.0, max_drain_s=30.0))
    desk.deploy(profile("a", 60, max_seqs=256), profile("y", 60), profile("small", 20))
    desk.join("w1")
    desk.ask("long", "a")
    desk.ready("a", "w1")
    desk.ask("ry", "y")
    desk.now_s = 2.0
    desk.fire()
    assert sent(desk.ask("r1", "small")) == {"r1": "w1"}, "it fits beside `a` now and beside `y` then"
    desk.ready("small", "w1")
    desk.now_s = 3.0
    assert sent(desk.ask("r2", "a")) == {}
    desk.now_s = 32.0
    assert sent(desk.fire()) == {"r2": "w1"}, "nobody knows when the long one ends"
    desk.now_s = 61.0
    assert sent(desk.ask("r3", "a")) == {"r3": "w1"}
    assert desk.fleet.timer_s == 62.0
    desk.now_s = 62.0
    desk.fire()
    assert sent(desk.ask("r4", "a")) == {}, "the worker has rested for as long as it was drained"
    actions = [action for request in ("long", "r2", "r3") for action in desk.finish(request)]
    assert sent(actions) == {"ry": "w1"}


def test_who_would_leave_no_room_to_the_one_that_waits_is_loaded_when_its_drain_was_in_vain() -> None:
    desk = Desk(BrainConfig(patience_s=2.0, max_drain_s=30.0))
    desk.deploy(profile("a", 60), profile("y", 80), profile("small", 20))
    desk.join("w1")
    desk.ask("long", "a")
    desk.ready("a", "w1")
    desk.ask("ry", "y")
    desk.now_s = 2.0
    desk.fire()
    assert sent(desk.ask("r1", "small")) == {}
    desk.now_s = 32.0
    assert sent(desk.fire()) == {"r1": "w1"}


def test_who_cannot_have_a_worker_drained_keeps_its_room_from_others_no_longer() -> None:
    desk = Desk(BrainConfig(patience_s=2.0, max_drain_s=30.0))
    desk.deploy(profile("a", 60, max_seqs=1), profile("y", 80), profile("b", 40), profile("z", 40))
    desk.deploy(profile("small", 20))
    desk.join("w1")
    desk.join("w2", budget_bytes=50)
    for request, model, worker in (("ra", "a", "w1"), ("rb", "b", "w2")):
        assert sent(desk.ask(request, model)) == {request: worker}
        desk.ready(model, worker)
    for request, model in (("ra2", "a"), ("ry", "y"), ("rz", "z"), ("rs", "small")):
        assert sent(desk.ask(request, model)) == {}
    desk.now_s = 2.0
    desk.fire()
    assert not desk.fleet.drains, "somebody waits for a slot of `a` who came before `y`"
    assert desk.fleet.timer_s == 32.0
    desk.now_s = 32.0
    assert sent(desk.fire()) == {"rs": "w1"}
    assert list(desk.fleet.drains) == ["z"]


def test_each_model_on_a_worker_has_as_many_slots_as_its_own_memory_was_sized_for() -> None:
    desk = Desk()
    desk.deploy(profile("a", max_seqs=1), profile("b", max_seqs=3))
    desk.join("w1")
    for model in "ab":
        actions = [action for number in range(4) for action in desk.ask(f"{model}{number}", model)]
        assert len(sent(actions)) == {"a": 1, "b": 3}[model]


def test_two_models_that_do_not_fit_side_by_side_take_turns() -> None:
    desk = Desk(BrainConfig(patience_s=2.0))
    desk.deploy(*(profile(name, fixed_bytes=70, max_seqs=4) for name in "ab"))
    desk.join("w1")
    desk.ask("a1", "a")
    desk.ready("a", "w1")
    desk.ask("b1", "b")
    desk.now_s = 2.0
    desk.fire()
    desk.ask("a2", "a")
    assert sent(desk.finish("a1")) == {"b1": "w1"}
    desk.ready("b", "w1")
    desk.now_s = 4.0
    desk.fire()
    assert sent(desk.ask("b2", "b")) == {}, "`a` has waited for its patience, so `b` is drained for it"
    assert sent(desk.finish("b1")) == {"a2": "w1"}


# Keep-alive.


def test_an_idle_model_is_warm_for_its_keep_alive_and_retained_afterwards() -> None:
    desk = desk_with("a")
    desk.now_s = 1.0
    desk.ask("r1", "a")
    assert desk.states() == {("a", "w1"): State.LOADING}
    desk.ready("a", "w1")
    assert desk.states() == {("a", "w1"): State.BUSY}
    desk.finish("r1")
    assert desk.states() == {("a", "w1"): State.WARM}
    assert list_residents(desk.fleet, desk.now_s)[0].expires_s == 11.0
    desk.now_s = 11.0
    assert desk.states() == {("a", "w1"): State.RETAINED}


def test_a_request_may_name_its_own_keep_alive() -> None:
    desk = desk_with("a")
    desk.serve("r1", "a", keep_alive_s=0.0)
    assert desk.states() == {("a", "w1"): State.RETAINED}
    desk.serve("r2", "a")
    assert desk.states() == {("a", "w1"): State.RETAINED}, "the last one that was named counts"
    desk.serve("r3", "a", keep_alive_s=5.0)
    assert desk.states() == {("a", "w1"): State.WARM}


def test_an_infinite_keep_alive_pins_until_a_finite_one_is_named() -> None:
    desk = desk_with("a")
    desk.serve("r1", "a", keep_alive_s=math.inf)
    assert desk.states() == {("a", "w1"): State.PINNED}
    desk.serve("r2", "a", keep_alive_s=5.0)
    assert desk.states() == {("a", "w1"): State.WARM}


def test_a_model_that_is_deployed_as_pinned_stays_pinned() -> None:
    desk = Desk()
    desk.deploy(profile("a", is_pinned=True))
    desk.join("w1")
    desk.ready("a", "w1")
    desk.serve("r1", "a", keep_alive_s=0.0)
    assert desk.states() == {("a", "w1"): State.PINNED}


def test_a_pinned_model_is_loaded_without_a_request_when_it_is_deployed_or_a_worker_joins() -> None:
    desk = Desk()
    desk.deploy(profile("a", is_pinned=True))
    for model, actions in (("a", desk.join("w1")), ("b", desk.deploy(profile("b", is_pinned=True)))):
        load = LoadModel(ModelId(model), WorkerId("w1"), 5, 10, LEAST)
        assert actions == [load, SetHold(load.model, load.worker, Hold.PINNED)]
    assert desk.join("w2") == [], "once is enough"


def test_a_pinned_model_evicts_retained_ones_but_no_warm_one_before_it_is_asked_for() -> None:
    desk = desk_with("warm", "old")
    desk.serve("r1", "warm")
    desk.serve("r2", "old", keep_alive_s=0.0)
    assert evicted(desk.deploy(profile("p", is_pinned=True))) == ["old"]
    assert desk.deploy(profile("q", is_pinned=True)) == [], "when `warm` ends being warm"
    assert evicted(desk.ask("r3", "q")) == ["warm"]


def test_stop_makes_an_idle_model_retained_even_a_pinned_one_until_it_is_used_again() -> None:
    desk = Desk()
    desk.deploy(profile("a", is_pinned=True))
    desk.join("w1")
    desk.ready("a", "w1")
    desk.stop("a")
    assert desk.states() == {("a", "w1"): State.RETAINED}
    desk.serve("r1", "a")
    assert desk.states() == {("a", "w1"): State.PINNED}


def test_only_the_oldest_replica_of_a_pinned_model_is_pinned() -> None:
    desk = Desk()
    desk.deploy(profile("a", is_pinned=True, keep_alive_s=math.inf))
    desk.join("w1")
    desk.join("w2")
    desk.ready("a", "w1")
    for number in range(3):
        desk.ask(f"r{number}", "a")
    desk.ready("a", "w2")
    desk.now_s = 1.0
    for number in range(3):
        desk.finish(f"r{number}")
    assert desk.states() == {("a", "w1"): State.PINNED, ("a", "w2"): State.WARM}
    desk.lose("w1")
    assert desk.states() == {("a", "w2"): State.PINNED}


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_load_brings_a_model_more_than_its_most_replicas(most: int) -> None:
    desk = Desk(BrainConfig(patience_s=0.0))
    desk.deploy(profile("a", max_replicas=most))
    for number in range(4):
        desk.join(f"w{number}")
    for number in range(20):
        for load in of(LoadModel, desk.ask(f"r{number}", "a")):
            desk.ready("a", load.worker)
    assert len(desk.states()) == most
    reason = explain_wait(desk.fleet, RequestId("r19"))
    assert reason is not None
    assert "all 2 slots are in use" in reason
    desk.finish("r0")
    (sent,) = of(Dispatch, desk.finish("r1"))
    reasons = {
        option.obstacle for option in sent.options if option.worker not in desk.fleet.models["a"].usable
    }
    assert reasons <= {f"has as many replicas as `max_replicas` allows: {most}"}


def test_the_least_replicas_of_a_model_are_pinned_on_different_nodes_and_restored() -> None:
    desk = Desk()
    for worker in ("w0", "w1", "n1/w0", "n1/w1"):
        desk.join(worker)
    loads = of(LoadModel, desk.deploy(profile("a", min_replicas=2)))
    assert len({node_of(load.worker) for load in loads}) == 2
    for load in loads:
        desk.ready("a", load.worker)
    assert list(desk.states().values()) == [State.PINNED, State.PINNED]
    desk.now_s += 100.0
    (lost,) = [load.worker for load in loads if node_of(load.worker) == "n1"]
    (load,) = of(LoadModel, desk.lose(lost))
    assert node_of(load.worker) == "n1"
    (load,) = of(LoadModel, desk.lose(load.worker))
    assert node_of(load.worker) == LOCAL, "better beside the other than not at all"
    assert of(LoadModel, desk.lose(load.worker)) == []


def test_a_kept_replica_is_loaded_elsewhere_while_its_node_is_drained() -> None:
    desk = Desk()
    desk.deploy(profile("a", is_pinned=True))
    desk.join("n1/w0")
    desk.ready("a", "n1/w0")
    desk.join("w0")
    (load,) = of(LoadModel, desk.drain_node("n1"))
    desk.ready("a", load.worker)
    assert desk.states()["a", "w0"] is State.PINNED
    assert desk.states()["a", "n1/w0"] is not State.PINNED
    desk.drain_node("n1", undo=True)
    assert desk.states() == {("a", "n1/w0"): State.PINNED, ("a", "w0"): State.WARM}


def test_a_named_keep_alive_is_forgotten_when_the_model_has_left() -> None:
    desk = desk_with("a")
    desk.serve("r1", "a", keep_alive_s=math.inf)
    desk.lose("w1")
    desk.join("w2")
    desk.serve("r2", "a")
    assert desk.states() == {("a", "w2"): State.WARM}


def test_a_pinned_model_that_was_freed_stays_away_until_it_is_asked_for() -> None:
    desk = Desk()
    desk.deploy(profile("a", is_pinned=True))
    desk.join("w1")
    desk.ready("a", "w1")
    assert evicted(desk.stop("a", is_freed=True)) == ["a"]
    assert desk.join("w2") == []
    assert desk.deploy(profile("b")) == []
    desk.serve("r1", "a")
    assert State.PINNED in desk.states().values()


def test_a_pinned_model_that_was_freed_comes_back_when_it_is_deployed_anew() -> None:
    desk = Desk()
    desk.deploy(profile("a", is_pinned=True))
    desk.join("w1")
    desk.stop("a", is_freed=True)
    assert of(LoadModel, desk.deploy(profile("a", is_pinned=True))) != []


def test_a_pinned_model_is_loaded_again_when_its_worker_is_lost() -> None:
    desk = Desk()
    desk.deploy(profile("a", is_pinned=True))
    desk.join("w1")
    desk.join("w2")
    desk.ready("a", "w1")
    assert of(LoadModel, desk.lose("w1")) == [LoadModel(ModelId("a"), WorkerId("w2"), 5, 10, LEAST)]


def test_a_pinned_model_is_loaded_when_room_appears() -> None:
    desk = full_house()
    assert of(LoadModel, desk.deploy(profile("p", is_pinned=True))) == []
    desk.finish("ra")
    (load,) = of(LoadModel, desk.stop("a"))
    assert load.model == "p"


def test_a_pinned_model_is_loaded_when_a_warm_one_has_had_its_time() -> None:
    desk = desk_with("a")
    desk.serve("r1", "a")
    assert desk.deploy(profile("p", fixed_bytes=80, is_pinned=True)) == []
    desk.now_s = 10.0
    assert evicted(desk.fire()) == ["a"]


def test_a_pinned_model_under_which_workers_die_is_not_loaded_unasked_for_ever() -> None:
    desk = Desk(BrainConfig(max_resumes=3))
    desk.deploy(profile("a", is_pinned=True))
    num_loads = 0
    for number in range(20):
        num_loads += len(of(LoadModel, desk.join(f"w{number}")))
        desk.lose(f"w{number}")
        desk.now_s += MAX_DELAY_S  # else it would have to wait before that
    assert num_loads == 4


def test_a_pinned_model_is_not_blamed_for_workers_that_are_lost_much_later() -> None:
    desk = Desk(BrainConfig(max_resumes=0))
    desk.deploy(profile("a", is_pinned=True))
    for number in range(5):
        assert len(of(LoadModel, desk.join(f"w{number}"))) == 1
        desk.ready("a", f"w{number}")
        desk.now_s += 100.0
        desk.lose(f"w{number}")


def test_stop_with_free_evicts_at_once_or_when_what_runs_has_ended() -> None:
    desk = desk_with("a", "b")
    desk.serve("r1", "a")
    assert evicted(desk.stop("a", is_freed=True)) == ["a"]
    desk.ask("r2", "b")
    assert evicted(desk.stop("b", is_freed=True)) == []
    assert evicted(desk.finish("r2")) == ["b"]


def test_a_request_that_comes_after_stop_with_free_keeps_the_model() -> None:
    desk = desk_with("a")
    desk.ask("r1", "a")
    desk.ready("a", "w1")
    desk.stop("a", is_freed=True)
    desk.ask("r2", "a")
    desk.finish("r1")
    desk.finish("r2")
    assert desk.states() == {("a", "w1"): State.WARM}


def test_stop_with_free_frees_the_bytes_of_hosted_and_of_evicted_replicas() -> None:
    desk = desk_with("a", workers=2)
    desk.serve("r1", "a")
    desk.has("w2", a=10)
    evicts = of(Evict, desk.stop("a", is_freed=True))
    assert [(evict.worker, evict.is_freed) for evict in evicts] == [("w2", True), ("w1", True)]
    assert desk.fleet.models[ModelId("a")].resident_bytes == {}


# What workers are told of idle models.


def test_a_worker_is_told_in_time_that_a_warm_model_is_only_retained() -> None:
    desk = desk_with("a")
    desk.ask("r1", "a")
    desk.ready("a", "w1")
    desk.now_s = 3.0
    assert desk.finish("r1") == [SetTimer(13.0)], "a new one is warm: nobody has to say so"
    desk.now_s = 13.0
    assert desk.fire() == [SetHold(ModelId("a"), WorkerId("w1"), Hold.RETAINED)]


def test_the_timer_waits_for_the_end_of_keep_alive_after_the_last_request() -> None:
    desk = desk_with("a")
    desk.serve("r1", "a")
    desk.now_s = 4.0
    desk.serve("r2", "a")
    desk.now_s = 10.0
    assert desk.fire() == [SetTimer(14.0)]
    desk.now_s = 14.0
    assert regards(desk.fire()) == [("a", Hold.RETAINED)]


def test_a_request_to_a_retained_model_tells_its_worker_enough() -> None:
    desk = desk_with("a")
    desk.serve("r1", "a", keep_alive_s=5.0)
    desk.now_s = 5.0
    assert regards(desk.fire()) == [("a", Hold.RETAINED)]
    assert regards(desk.ask("r2", "a")) == []
    assert regards(desk.finish("r2")) == [], "it is warm again, and its worker knows"


def test_a_worker_is_told_of_a_pin_and_of_its_end() -> None:
    desk = desk_with("a")
    assert regards(desk.ask("r1", "a", keep_alive_s=math.inf)) == [("a", Hold.PINNED)]
    desk.ready("a", "w1")
    assert regards(desk.finish("r1")) == []
    assert regards(desk.ask("r2", "a", keep_alive_s=5.0)) == [], "it is busy, which its worker sees"
    assert regards(desk.finish("r2")) == [("a", Hold.WARM)]


def test_a_worker_is_told_that_a_model_was_stopped_and_not_that_a_busy_one_was() -> None:
    desk = desk_with("a")
    desk.serve("r1", "a")
    assert regards(desk.stop("a")) == [("a", Hold.RETAINED)]
    desk.ask("r2", "a")
    assert regards(desk.stop("a")) == []
    assert regards(desk.finish("r2")) == [("a", Hold.RETAINED)]


def test_a_request_that_undoes_the_stop_of_a_pinned_model_is_told() -> None:
    desk = Desk()
    desk.deploy(profile("a", is_pinned=True))
    desk.join("w1")
    assert regards(desk.stop("a")) == [("a", Hold.RETAINED)]
    assert regards(desk.ask("r1", "a")) == [("a", Hold.PINNED)]


# Faults.


def test_requests_of_a_lost_worker_go_on_elsewhere_in_the_same_turn_and_in_order() -> None:
    desk = desk_with("a", workers=2)
    desk.ask("r1", "a")
    desk.ask("r2", "a")
    actions = desk.lose("w1")
    assert [type(action) for action in actions] == [LoadModel, Dispatch, Dispatch]
    assert list(sent(actions).items()) == [("r1", "w2"), ("r2", "w2")]


def test_resumed_requests_come_before_those_that_arrived_later() -> None:
    desk = desk_with("a")
    for number in range(1, 5):
        desk.ask(f"r{number}", "a")
    desk.lose("w1")
    assert list(sent(desk.join("w2"))) == ["r1", "r2"]


def test_a_request_ends_when_too_many_workers_were_lost_under_it() -> None:
    desk = desk_with("a", config=BrainConfig(max_resumes=1))
    desk.ask("r1", "a")
    desk.lose("w1")
    desk.join("w2")
    (reject,) = of(Reject, desk.lose("w2"))
    assert reject.reason is RejectReason.WORKERS_LOST
    assert desk.fleet.queues.num_waiting == 0


def test_a_failed_load_ends_its_requests_and_those_that_wait_for_the_model() -> None:
    desk = desk_with("a", workers=1)
    for number in range(1, 4):
        desk.ask(f"r{number}", "a")
    rejects = of(Reject, desk.fail("a", "w1"))
    assert [reject.request_id for reject in rejects] == ["r1", "r2", "r3"]
    assert {reject.reason for reject in rejects} == {RejectReason.LOAD_FAILED}
    assert "no such file" in rejects[0].message
    assert desk.states() == {}


def test_requests_of_a_ready_model_that_breaks_go_on_elsewhere() -> None:
    desk = desk_with("a", workers=2)
    for number in range(1, 4):
        desk.ask(f"r{number}", "a")
    desk.ready("a", "w1")
    desk.ready("a", "w2")
    desk.finish("r3")
    actions = desk.fail("a", "w1")
    assert of(Reject, actions) == []
    assert sent(actions) == {"r1": "w2", "r2": "w2"}


def test_a_request_ends_when_its_model_broke_too_often_under_it() -> None:
    desk = desk_with("a", workers=3, config=BrainConfig(max_resumes=1))
    desk.ask("r1", "a")
    desk.ready("a", "w1")
    assert sent(desk.fail("a", "w1")) == {"r1": "w2"}
    desk.ready("a", "w2")
    (reject,) = of(Reject, desk.fail("a", "w2"))
    assert reject.reason is RejectReason.LOAD_FAILED
    assert "no such file" in reject.message


def test_a_model_that_cannot_be_loaded_anywhere_is_not_tried_again_for_a_while() -> None:
    desk = desk_with("a", "b")
    desk.serve("rb", "b")
    desk.deploy(profile("a", fixed_bytes=80))
    assert evicted(desk.ask("r1", "a")) == ["b"]
    desk.fail("a", "w1")
    desk.serve("rb2", "b")
    (reject,) = desk.ask("r2", "a")
    assert isinstance(reject, Reject)
    assert (reject.reason, reject.retry_s) == (RejectReason.LOAD_FAILED, 2.0)
    assert "no such file; it is tried again in 2 s" in reject.message
    desk.now_s = 2.0
    assert evicted(desk.ask("r3", "a")) == ["b"]
    desk.fail("a", "w1")
    desk.now_s = 5.9
    assert of(Reject, desk.ask("r4", "a"))[0].retry_s == 1.0
    desk.deploy(profile("a", fixed_bytes=81))
    assert sent(desk.ask("r5", "a")) == {"r5": "w1"}, "another one may do better"


def test_a_failed_replica_does_not_end_those_that_wait_beside_a_working_one() -> None:
    desk = desk_with("a", workers=2)
    for number in range(1, 4):
        desk.ask(f"r{number}", "a")
    desk.ready("a", "w1")
    desk.ask("r4", "a")
    desk.ask("r5", "a")
    assert [reject.request_id for reject in of(Reject, desk.fail("a", "w2"))] == ["r3", "r4"]
    assert sent(desk.finish("r1")) == {"r5": "w1"}


def test_a_model_goes_back_to_a_worker_where_it_failed_only_if_no_other_has_room() -> None:
    desk = desk_with("a", workers=2)
    desk.ask("r1", "a")
    desk.fail("a", "w1")
    assert sent(desk.ask("r2", "a")) == {"r2": "w2"}
    desk.lose("w2")
    assert sent(desk.ask("r3", "a")) == {"r3": "w1"}


def test_a_removed_model_finishes_what_runs_and_refuses_the_rest() -> None:
    desk = desk_with("a")
    for number in range(1, 4):
        desk.ask(f"r{number}", "a")
    (reject,) = of(Reject, desk.remove("a"))
    assert (reject.request_id, reject.reason) == ("r3", RejectReason.MODEL_REMOVED)
    assert of(Reject, desk.ask("r4", "a"))[0].reason is RejectReason.UNKNOWN_MODEL
    desk.finish("r1")
    assert evicted(desk.finish("r2")) == ["a"]
    assert desk.fleet.models == {}


def test_a_removed_model_is_not_resumed() -> None:
    desk = desk_with("a", workers=2)
    desk.ask("r1", "a")
    desk.remove("a")
    (reject,) = of(Reject, desk.lose("w1"))
    assert reject.reason is RejectReason.MODEL_REMOVED


def test_a_new_version_is_loaded_anew_and_the_old_one_leaves_when_it_is_idle() -> None:
    desk = desk_with("a", workers=2)
    desk.ask("r1", "a")
    desk.ready("a", "w1")
    assert desk.deploy(profile("a", fixed_bytes=31)) == []
    assert sent(desk.ask("r2", "a")) == {"r2": "w2"}
    assert desk.finish("r1") == [Evict(ModelId("a"), WorkerId("w1"), 0.0, is_freed=True)]


def test_who_waits_for_a_version_that_is_replaced_is_told_so() -> None:
    desk = desk_with("a")
    for number in range(1, 4):
        desk.ask(f"r{number}", "a")
    (reject,) = of(Reject, desk.deploy(profile("a", digest="other")))
    assert (reject.request_id, reject.reason) == ("r3", RejectReason.MODEL_REMOVED)
    assert "replaced by another version" in reject.message


def test_no_request_goes_on_with_another_version() -> None:
    desk = desk_with("a", workers=2)
    desk.ask("r1", "a")
    desk.ready("a", "w1")
    desk.deploy(profile("a", digest="other"))
    (reject,) = of(Reject, desk.lose("w1"))
    assert (reject.request_id, reject.reason) == ("r1", RejectReason.MODEL_REMOVED)


def test_a_request_whose_tokens_were_made_for_another_version_is_refused() -> None:
    desk = desk_with("a")
    event = RequestArrived(0.0, RequestId("r1"), ModelId("a"), 10, None, digest="old")
    (reject,) = step(desk.fleet, event)
    assert isinstance(reject, Reject)
    assert reject.reason is RejectReason.MODEL_REMOVED


def test_a_changed_keep_alive_needs_no_new_load() -> None:
    desk = desk_with("a")
    desk.serve("r1", "a")
    assert of(LoadModel, desk.deploy(profile("a", keep_alive_s=math.inf))) == []
    assert desk.states() == {("a", "w1"): State.PINNED}


def test_a_cancelled_request_frees_its_slot_at_once() -> None:
    desk = desk_with("a")
    for number in range(1, 4):
        desk.ask(f"r{number}", "a")
    cancel, dispatch = desk.cancel("r1")
    assert cancel == CancelRun(RequestId("r1"), WorkerId("w1"))
    assert sent([dispatch]) == {"r3": "w1"}


def test_a_run_that_a_stop_string_ended_is_stopped_on_its_worker_and_counts() -> None:
    desk = desk_with("a")
    desk.ask("r1", "a")
    desk.ready("a", "w1")
    desk.now_s = 7.0
    assert of(CancelRun, desk.finish("r1", End.STOPPED)) == [CancelRun(RequestId("r1"), WorkerId("w1"))]
    assert desk.fleet.estimates.run_s(ModelId("a")) == 7.0


def test_a_run_that_failed_does_not_count() -> None:
    desk = desk_with("a")
    desk.ask("r1", "a")
    desk.ready("a", "w1")
    before_s = desk.fleet.estimates.run_s(ModelId("a"))
    assert of(CancelRun, desk.finish("r1", End.FAILED)) == []
    assert desk.fleet.estimates.run_s(ModelId("a")) == before_s


def test_nothing_is_left_of_models_and_workers_that_are_gone() -> None:
    desk = desk_with("a")
    desk.ask("r1", "a")
    desk.ready("a", "w1")
    desk.ask("r2", "a")
    desk.remove("a")
    desk.finish("r1")
    desk.finish("r2")
    desk.now_s = 1.0
    estimates = desk.fleet.estimates
    assert desk.fleet.models == {}
    assert estimates.reload.p_wanted("a", 1.0) == 0.0
    assert estimates.run_s(ModelId("a")) == estimates.run_s()
    desk.deploy(profile("b"))
    desk.ask("r3", "b")
    desk.fail("b", "w1")
    desk.lose("w1")
    assert not desk.fleet.models[ModelId("b")].failed_on


def test_what_is_said_of_requests_and_workers_that_are_gone_is_ignored() -> None:
    desk = desk_with("a")
    assert desk.finish("gone") == desk.cancel("gone") == desk.lose("gone") == []
    assert desk.ready("a", "w1") == desk.fail("a", "w1") == desk.remove("b") == desk.stop("b") == []


def test_a_model_goes_to_the_kind_of_device_that_it_has_a_footprint_for() -> None:
    desk = Desk()
    both = profile("a")
    desk.deploy(ModelProfile(both.model, 30, {"cpu": both.footprints["cpu"]}, 10.0))
    desk.join("w1", kind="cuda")
    (reject,) = of(Reject, desk.ask("r1", "a"))
    assert "cannot run on `cuda`" in reject.message
    desk.join("w2", kind="cpu")
    assert sent(desk.ask("r2", "a")) == {"r2": "w2"}
