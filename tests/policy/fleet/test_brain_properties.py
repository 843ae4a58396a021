"""The brain in a world where anything may happen at any time."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hearth.core.types import LOCAL, Hold, ModelId, RequestId, WorkerId
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.capacity import Promises
from hearth.policy.fleet.events import (
    BrainConfig,
    DeviceReported,
    LoadModel,
    ModelDeployed,
    RequestArrived,
    WorkerJoined,
)
from hearth.policy.fleet.fleet import REPLACED_S, Fleet
from hearth.policy.fleet.pipelines import could_hold
from hearth.policy.fleet.records import Model, Replica, Worker
from hearth.policy.fleet.replica_evictions import plan_evictions
from hearth.policy.fleet.reserved_workers import ReservedWorkers
from hearth.policy.fleet.routing import ReplicaPlace, choose_place
from hearth.policy.fleet.serving import awaited_until_s, reserve_room
from tests.policy.fleet.world import CONFIGS, KINDS, MANY_MOVES, MODELS, Moves, World, begun, profile, staged

pytestmark = pytest.mark.slow


def checked(config: BrainConfig, moves: Moves) -> World:
    """A world after some moves, each of which was followed by all checks."""
    world = begun(config)
    for kind, number in moves:
        world.move(kind, number)
        check_nobody_waits_in_vain(world.fleet)
        check_nobody_is_held_up_for_long(world.fleet)
        check_places(world.fleet)
        check_the_oldest_replicas_are_pinned(world.fleet)
    return world


def can_take(worker: Worker, model: Model, *holds: Hold) -> bool:
    """Whether a worker would have room for a model if all others so held were gone."""
    if model.profile is None or model.name in worker.replicas or worker.is_draining:
        return False
    if model.usable and worker.name in model.failed_on:
        return False
    footprint = model.profile.footprints.get(worker.kind)
    if footprint is None:
        return False
    staying = [one for one in worker.replicas.values() if one.hold not in holds]
    owed = [*(one.promise_on(worker) for one in staying), footprint.promise]
    workspaces = [promise.workspace_bytes for promise in owed]
    workspace_bytes = max(workspaces) if worker.promises.shares_workspace else sum(workspaces)
    return workspace_bytes + sum(promise.own_bytes for promise in owed) <= worker.promises.budget_bytes


def can_take_turns(worker: Worker, model: Model) -> bool:
    """Whether a worker could host a model, each in turn, beside pinned ones and what busy ones keep."""
    if model.profile is None or model.name in worker.replicas or worker.is_draining:
        return False
    footprint = model.profile.footprints.get(worker.kind)
    if footprint is None:
        return False
    staying = [one for one in worker.replicas.values() if one.hold not in (Hold.RETAINED, Hold.WARM)]
    pinned = [one.promise_on(worker) for one in staying if one.hold is Hold.PINNED]
    busy = [one for one in staying if one.hold is not Hold.PINNED]
    others = [*(one.promise_on(worker) for one in busy), footprint.promise]
    if not worker.promises.shares_workspace:
        pinned, others = [one.unshared for one in pinned], [one.unshared for one in others]
    workspace_bytes = max(promise.workspace_bytes for promise in (*pinned, *others))
    fixed_bytes = workspace_bytes + sum(promise.own_bytes for promise in pinned)
    budget_bytes = worker.promises.budget_bytes
    standing_bytes = sum(promise.standing_bytes for promise in others)
    return all(
        fixed_bytes + standing_bytes - one.standing_bytes + one.own_bytes <= budget_bytes for one in others
    )


def could_host(fleet: Fleet, worker: Worker, model: Model) -> bool:
    """Whether a worker could host a model now if all idle ones went."""
    if fleet.config.takes_turns and can_take_turns(worker, model):
        return True
    return can_take(worker, model, Hold.RETAINED, Hold.WARM)


def check_nobody_waits_in_vain(fleet: Fleet) -> None:
    """Who waits for room has none, and no turn, on any worker that is not kept for somebody before it.

    Who has waited too long for a slot has no room for a second replica.
    """
    reserved = ReservedWorkers(fleet)
    for model in [fleet.models[name] for name in fleet.queues.for_room]:
        assert model.profile is not None
        if could_hold(fleet, model.profile, Hold.BUSY):
            most = Hold.BUSY if fleet.config.takes_turns else Hold.WARM
            place = choose_place(fleet, model, most=most, reserved=reserved)
            if place is not None and (until_s := awaited_until_s(fleet, model, place)) is not None:
                assert fleet.now_s < until_s <= fleet.now_s + REPLACED_S
                assert fleet.timer_s is not None, "nothing would end the wait"
                assert fleet.timer_s <= until_s
                continue
            # A pin may have left the model before without room; it is refused once all workers are there.
            assert place is None or not fleet.is_complete, f"`{model.name}` waits, but has room"
            assert not any(could_host(fleet, worker, model) for worker in find_open(reserved, model))
            reserve_room(fleet, model, reserved)
        else:
            may_have_room = not fleet.is_complete or fleet.may_return(model.profile)
            assert may_have_room, f"`{model.name}` waits, but cannot have room"
    for model in [fleet.models[name] for name in fleet.queues.for_slot if not reserved.has_all]:
        first = model.first_waiting
        assert first is not None
        if not (model.loading or model.has_all_replicas) and fleet.now_s >= first.overdue_s(
            fleet.config.patience_s
        ):
            open_ = find_open(reserved, model)
            assert not any(can_take(worker, model, Hold.RETAINED, Hold.WARM) for worker in open_)


def check_nobody_is_held_up_for_long(fleet: Fleet) -> None:
    """Who could be served, but for somebody who waits for room, is held up by that one for a limited time."""
    now_s, max_drain_s = fleet.now_s, fleet.config.max_drain_s
    for drain in fleet.drains.values():
        assert now_s < drain.began_s + max_drain_s or not any(one.running for one in drain.victims)
    earlier: list[Model] = []
    for model in [fleet.models[name] for name in fleet.queues.for_room]:
        for worker in fleet.workers.values():
            if could_host(fleet, worker, model):
                is_kept = any(is_keeping(fleet, one, worker) for one in earlier)
                assert is_kept or model.name in fleet.replaced, f"`{model.name}` is held up"
        earlier.append(model)


def is_keeping(fleet: Fleet, model: Model, worker: Worker) -> bool:
    """Whether a model that waits may keep others from a worker: it is drained for it, or may be yet."""
    if (drain := fleet.drains.get(model.name)) is not None:
        return worker in drain.workers
    first = model.first_waiting
    if first is None or worker.name in fleet.resting:
        return False
    return fleet.now_s < first.overdue_s(fleet.config.patience_s) + fleet.config.max_drain_s


def find_open(reserved: ReservedWorkers, model: Model) -> list[Worker]:
    """The workers whose room is not kept for somebody before a model."""
    profile = model.profile
    if profile is None:
        return []
    workers = reserved.fleet.workers.values()
    suited = [(worker, profile.footprints.get(worker.kind)) for worker in workers]
    return [worker for worker, needs in suited if needs is not None and not reserved.bars(worker, needs)]


def check_the_oldest_replicas_are_pinned(fleet: Fleet) -> None:
    for model in fleet.models.values():
        pinned = [replica for replica in model.replicas.values() if replica.hold is Hold.PINNED]
        staying = [replica for replica in model.replicas.values() if not replica.is_on_draining_node]
        wanted = [replica for replica in staying if not replica.is_unwanted]
        refused = [replica for replica in wanted if replica in fleet.refused_pins]
        assert {*pinned, *refused} == {*wanted[: model.num_pinned]}
        for replica in refused:
            assert replica.is_pin_refused
            assert not can_be_pinned(replica)


def can_be_pinned(replica: Replica) -> bool:
    """Whether all busy ones beside a replica would have room in turn if it were pinned."""
    worker = replica.worker
    promises = Promises(worker.promises.budget_bytes, worker.promises.shares_workspace)
    for one in worker.replicas.values():
        if one is replica or one.booked_hold not in (Hold.RETAINED, Hold.WARM):
            promises.add(one.promise_on(worker), Hold.PINNED if one is replica else one.booked_hold)
    return promises.can_all_take_turns


def check_places(fleet: Fleet) -> None:
    """Where every model would be loaded now."""
    for model in fleet.models.values():
        place = choose_place(fleet, model)
        if place is None:
            workers = fleet.workers.values()
            assert not any(can_take(worker, model, Hold.RETAINED, Hold.WARM) for worker in workers)
        elif place.pipeline is None:
            check_warm_models_go_last(fleet, model, place)
            check_the_cheapest_place_is_chosen(fleet, model, place)


def check_warm_models_go_last(fleet: Fleet, model: Model, place: ReplicaPlace) -> None:
    """Unless the worker has bytes of the model, and having them back would cost more."""
    others = [worker for worker in fleet.workers.values() if worker.name not in model.failed_on]
    if any(victim.replica.hold is Hold.WARM for victim in place.evictions.victims) and any(
        can_take(worker, model, Hold.RETAINED) for worker in others
    ):
        assert model.profile is not None
        bytes_there = model.resident_bytes.get(place.worker.name, 0)
        all_s = fleet.estimates.load_s(model.profile.num_bytes, model, LOCAL)
        rest_s = fleet.estimates.load_s(model.profile.num_bytes - bytes_there, model, LOCAL)
        assert place.evictions.evict_s < all_s - rest_s


def check_the_cheapest_place_is_chosen(fleet: Fleet, model: Model, place: ReplicaPlace) -> None:
    """Workers that have bytes of a model and free room for it are always among those that are compared."""
    cost_by_worker = {option.worker: option.cost_s for option in place.options if option.obstacle is None}
    assert cost_by_worker[place.worker.name] == min(cost_by_worker.values())
    if place.worker.name not in model.failed_on:
        workers = [fleet.workers[name] for name in model.retired if name not in model.failed_on]
        assert {worker.name for worker in workers if can_take(worker, model)} <= cost_by_worker.keys()


@settings(max_examples=150)
@given(CONFIGS, MANY_MOVES)
def test_whatever_happens_the_books_are_right_and_every_request_ends_once(
    config: BrainConfig, moves: Moves
) -> None:
    world = checked(config, moves)
    world.come_to_rest()
    assert not world.cluster.requests, "somebody waits for ever"
    assert world.cluster.num_arrived == world.cluster.num_ended
    assert not world.fleet.queues.patient


@settings(max_examples=150)
@given(CONFIGS, MANY_MOVES)
def test_several_models_in_stages_never_wait_for_each_other_for_ever(
    config: BrainConfig, moves: Moves
) -> None:
    world = begun(config)
    world.join(0)
    for number, name in enumerate(MODELS[:4]):
        world.tell(ModelDeployed(0.0, staged(name, 12 + 3 * number)))
    for kind, number in moves:
        if kind != "deploy":
            world.move(kind, number)
            check_nobody_waits_in_vain(world.fleet)
            check_nobody_is_held_up_for_long(world.fleet)
    world.come_to_rest()
    assert not world.cluster.requests, "somebody waits for ever"
    assert world.cluster.num_arrived == world.cluster.num_ended


@given(CONFIGS, MANY_MOVES)
def test_what_is_lost_of_the_least_replicas_is_restored_if_there_is_room(
    config: BrainConfig, moves: Moves
) -> None:
    world = checked(config, moves)
    world.come_to_rest()
    for model in world.fleet.models.values():
        num_there = sum(not replica.is_stale for replica in model.replicas.values())
        is_wanted = model.profile is not None and model.profile.is_pinned and not model.is_stopped
        if is_wanted and model.failure is None and not model.num_deadly_loads:
            workers = world.fleet.workers.values()
            has_room = any(can_take(worker, model, Hold.RETAINED) for worker in workers)
            assert num_there >= model.num_pinned or not has_room


@pytest.mark.parametrize("seed", range(20))
def test_long_lives_end_well_too(seed: int) -> None:
    """Rare meetings, of a pin, a loss and a new version, that short lists of moves hardly contain."""
    choose = random.Random(seed)
    config = BrainConfig(
        max_queue=choose.choice([2, 512]), patience_s=choose.choice([0.0, 2.0]), takes_turns=seed % 2 == 1
    )
    world = checked(config, [(choose.choice(KINDS), choose.randrange(10_000)) for _ in range(400)])
    world.come_to_rest()
    assert not world.cluster.requests, "somebody waits for ever"


@given(CONFIGS, MANY_MOVES)
def test_the_same_events_always_lead_to_the_same_actions(config: BrainConfig, moves: Moves) -> None:
    world = checked(config, moves)
    fleet = Fleet(config)
    assert [step(fleet, event) for event in world.events] == world.actions


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20))
@example([1] * 3 + [20] + [1] * 16)  # More workers than are looked at, and neither the first nor the last.
def test_of_equal_workers_the_one_with_most_bytes_of_a_model_gets_it(bytes_there: list[int]) -> None:
    fleet, model = Fleet(BrainConfig()), ModelId("a")
    step(fleet, ModelDeployed(0.0, profile(model, fixed_bytes=30)))
    for number, num_bytes in enumerate(bytes_there):
        worker = WorkerId(f"w{number}")
        step(fleet, WorkerJoined(0.0, worker, "cuda", 100))
        step(fleet, DeviceReported(0.0, worker, {model: num_bytes}))
    actions = step(fleet, RequestArrived(1.0, RequestId("r"), model, 10, None))
    (load,) = [action for action in actions if isinstance(action, LoadModel)]
    known_bytes = [min(30, num_bytes) for num_bytes in bytes_there]
    assert known_bytes[int(load.worker[1:])] == max(known_bytes)


@given(CONFIGS, MANY_MOVES)
def test_a_plan_of_evictions_needs_every_one_of_its_victims(config: BrainConfig, moves: Moves) -> None:
    fleet = checked(config, moves).fleet
    for model in fleet.models.values():
        for worker in fleet.workers.values():
            if model.profile is None or model.name in worker.replicas:
                continue
            footprint = model.profile.footprints.get(worker.kind)
            if footprint is None:
                continue
            plan = plan_evictions(worker, footprint, fleet.estimates, fleet.now_s)
            if plan is None or not plan.victims:
                continue
            for spared in plan.victims:
                promises = worker.promises.copy()
                for victim in plan.victims:
                    if victim is not spared:
                        promises.release(victim.promise, victim.replica.booked_hold)
                assert not promises.has_room(footprint), f"needless: {spared.replica.model.name}"
