"""The routing cost, and that the cheapest of the workers considered is taken."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import AdapterId, Hold, ModelId, RequestId, WorkerId
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import (
    BrainConfig,
    End,
    LoadModel,
    ModelDeployed,
    ModelReady,
    RequestArrived,
    RequestFinished,
    WantedAdapter,
    WorkerJoined,
)
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.records import MAX_KNOWN, KnownAdapters, Request
from hearth.policy.fleet.reserved_workers import MAX_OPTIONS
from hearth.policy.fleet.routing import choose_replica, has_untried_place, routing_cost
from tests.policy.fleet.world import CONFIGS, LONG_LIVES, Moves, played, profile

SECONDS = st.floats(0.0, 1e4)
SHARES = st.floats(0.0, 1.0)


@given(SECONDS, SECONDS, SHARES, SECONDS, SECONDS, SHARES)
def test_waiting_loading_evicting_and_idle_workers_cost(
    queue_s: float, load_s: float, utilisation: float, evict_s: float, more_s: float, other: float
) -> None:
    config = BrainConfig()
    cost_s = routing_cost(config, queue_s, load_s, utilisation, evict_s)
    assert routing_cost(config, queue_s + more_s, load_s, utilisation, evict_s) >= cost_s
    assert routing_cost(config, queue_s, load_s + more_s, utilisation, evict_s) >= cost_s
    assert routing_cost(config, queue_s, load_s, utilisation, evict_s + more_s) >= cost_s
    assert (routing_cost(config, queue_s, load_s, other, evict_s) <= cost_s) or other < utilisation
    assert cost_s >= queue_s + load_s + evict_s - 1e-6
    assert cost_s <= queue_s + load_s + evict_s + config.packing_s + 1e-6


@given(CONFIGS, LONG_LIVES)
def test_a_request_would_go_to_the_cheapest_replica_with_a_free_slot(
    config: BrainConfig, moves: Moves
) -> None:
    fleet = played(config, moves).fleet
    for model in fleet.models.values():
        request = Request(RequestId("r"), model, number=10_000, keep_alive_s=None, digest="")
        chosen = choose_replica(fleet, request)
        is_open = {n for n, one in model.usable.items() if len(one.running) < one.max_seqs}
        if chosen is None:
            assert not is_open
            continue
        options = {option.worker: option for option in chosen.options}
        assert len(options) <= MAX_OPTIONS
        possible = {name for name, option in options.items() if option.obstacle is None}
        assert possible == is_open  # There are fewer than are looked at.
        best_s = min(options[name].cost_s for name in possible)
        assert options[chosen.replica.worker.name].cost_s == best_s


def busy_fleet(num_ended: int, num_workers: int = 3) -> Fleet:
    """Replicas of a model, whose requests took a second; so many have ended, the first ones first."""
    fleet, model = Fleet(BrainConfig()), ModelId("a")
    step(fleet, ModelDeployed(0.0, profile("a", max_seqs=4)))
    for number in range(num_workers):
        step(fleet, WorkerJoined(0.0, WorkerId(f"w{number}"), "cuda", 100))
    for number in range(4 * num_workers):
        for action in step(fleet, RequestArrived(0.0, RequestId(f"r{number}"), model, 10, None)):
            if isinstance(action, LoadModel):
                step(fleet, ModelReady(0.0, action.worker, model, (), 1.0))
    for number in range(num_ended):
        step(fleet, RequestFinished(1.0, RequestId(f"r{number}"), 5, End.DONE))
    return fleet


@given(st.integers(1, 12), st.sets(st.integers(0, 2)), st.sampled_from([0, 1, 1 << 30, 1 << 33]))
def test_a_request_goes_where_its_adapter_is_unless_another_replica_saves_more_than_its_load(
    num_ended: int, having: set[int], num_bytes: int
) -> None:
    """So of replicas that are equally good for the base it takes one that has the adapter."""
    fleet = busy_fleet(num_ended)
    model, adapter = fleet.models[ModelId("a")], WantedAdapter(AdapterId("lora"), num_bytes)
    for number in having:
        fleet.workers[WorkerId(f"w{number}")].adapters.use(adapter.adapter)
    bare = Request(RequestId("r"), model, number=10_000, keep_alive_s=None, digest="")
    chosen, chosen_bare = choose_replica(fleet, replace(bare, adapter=adapter)), choose_replica(fleet, bare)
    assert chosen is not None
    assert chosen_bare is not None
    load_s = fleet.config.load_weight * fleet.estimates.reload.load_s(num_bytes, None)
    cost_s = {one.worker: one.cost_s for one in chosen_bare.options if one.obstacle is None}
    best_s, taken_s = cost_s[chosen_bare.replica.worker.name], cost_s[chosen.replica.worker.name]
    having_s = [cost_s[name] for name in cost_s if int(name[1:]) in having]
    if int(chosen.replica.worker.name[1:]) in having:
        assert taken_s == min(having_s)
        assert taken_s <= best_s + load_s + 1e-9
    else:
        assert taken_s == best_s
        assert all(best_s + load_s <= one_s + 1e-9 for one_s in having_s)


def test_an_idle_replica_is_looked_at_however_many_have_the_adapter_and_the_other_way_round() -> None:
    num_workers = 2 * MAX_OPTIONS
    fleet, small = busy_fleet(0, num_workers), WantedAdapter(AdapterId("small"), 1)
    model, huge = fleet.models[ModelId("a")], WantedAdapter(AdapterId("huge"), 1 << 50)
    idle, *others = (fleet.workers[worker] for worker in model.replicas)
    for worker in (idle, *others):  # all have a free slot, and one has all of them free
        running = list(worker.replicas[model.name].running)
        for request in running if worker is idle else running[:1]:
            step(fleet, RequestFinished(1.0, request, 5, End.DONE))
    for worker in others:
        worker.adapters.use(small.adapter)
    others[-1].adapters.use(huge.adapter)
    bare = Request(RequestId("r"), model, number=10_000, keep_alive_s=None, digest="")

    chosen = [choose_replica(fleet, replace(bare, adapter=adapter)) for adapter in (small, huge)]

    assert [one and one.replica.worker for one in chosen] == [idle, others[-1]]
    assert all(one is not None and len(one.options) <= MAX_OPTIONS for one in chosen)


def test_a_worker_is_thought_to_have_the_adapters_that_were_used_last() -> None:
    known = KnownAdapters()
    for number in range(MAX_KNOWN):
        known.use(AdapterId(f"{number}"))
    known.use(AdapterId("0"))
    known.use(AdapterId("one more"))

    assert AdapterId("0") in known
    assert AdapterId("1") not in known
    assert AdapterId("one more") in known


@given(CONFIGS, LONG_LIVES)
def test_a_model_has_an_untried_place_only_where_it_has_not_failed_and_idle_models_or_turns_make_room(
    config: BrainConfig, moves: Moves
) -> None:
    fleet = played(config, moves).fleet
    for model in fleet.models.values():
        others = [name for name in fleet.queues.for_room if name != model.name]
        if model.profile is None or others:
            assert not has_untried_place(fleet, model)
            continue
        footprints, is_pinned = model.profile.footprints, model.profile.is_pinned
        most, takes_turns = Hold.RETAINED if is_pinned else Hold.WARM, config.takes_turns and not is_pinned
        untried = [
            worker.promises.has_room(footprints[worker.kind], most)
            or (takes_turns and worker.promises.can_take_turns(footprints[worker.kind], Hold.WARM))
            for worker in fleet.workers.values()
            if worker.name not in model.failed_on
            and worker.name not in model.replicas
            and not worker.is_draining
        ]
        assert has_untried_place(fleet, model) == any(untried)
