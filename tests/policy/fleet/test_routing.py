"""The routing cost, and that the cheapest of the workers considered is taken."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import AdapterId, Hold, ModelId, NodeId, RequestId, Rung, WorkerId
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import (
    BrainConfig,
    ComputedPrompt,
    Dispatch,
    End,
    LinkMeasured,
    LoadModel,
    ModelDeployed,
    ModelReady,
    RequestArrived,
    RequestFinished,
    ResidencyReported,
    SetTimer,
    WantedAdapter,
    WorkerJoined,
    WorkerLost,
    WorkersExpected,
)
from hearth.policy.fleet.fleet import REPLACED_S, Fleet
from hearth.policy.fleet.prefixes import PREFIX_TOKENS, KnownPrefixes, count_tokens, digest_prefixes
from hearth.policy.fleet.profile import Footprint, ModelProfile
from hearth.policy.fleet.records import MAX_KNOWN, KnownAdapters, Replica, Request
from hearth.policy.fleet.reserved_workers import MAX_OPTIONS
from hearth.policy.fleet.routing import choose_replica, explain_unplaced, has_untried_place, routing_cost
from tests.policy.fleet.test_brain import Desk, of
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
    config = replace(config, first_token_s=None)  # With a target the time to the first token decides.
    fleet = played(config, moves).fleet
    for model in fleet.models.values():
        request = Request(RequestId("r"), model, number=10_000, keep_alive_s=None, digest="")
        chosen = choose_replica(fleet, request)
        is_open = {n for n, one in model.usable.items() if len(one.running) < one.max_seqs}
        if chosen is None:
            assert not is_open
            continue
        if chosen.replica.model is not model:  # a pipeline of workers that load it
            assert not any(model.usable[name].is_ready for name in is_open)
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


PREFIXES = digest_prefixes(range(4000), bytes(32), "a")


@given(
    st.integers(1, 12), st.lists(st.integers(0, len(PREFIXES)), min_size=3, max_size=3), st.floats(0.0, 1.0)
)
def test_a_request_goes_where_its_prompt_is_cached_unless_another_replica_saves_more_than_that(
    num_ended: int, num_known: list[int], prompt_s: float
) -> None:
    fleet = busy_fleet(num_ended)
    model, num_tokens = fleet.models[ModelId("a")], count_tokens(len(PREFIXES))
    fleet.estimates.computed(model.name, ComputedPrompt(num_tokens, prompt_s))
    missing_s = {}
    for number, num_digests in enumerate(num_known):
        replica = model.replicas[WorkerId(f"w{number}")]
        replica.prefixes.use(PREFIXES[:num_digests])
        missing_s[replica.worker.name] = prompt_s * (1 - count_tokens(num_digests) / num_tokens)
    bare = Request(RequestId("r"), model, number=10_000, keep_alive_s=None, digest="")
    chosen_bare, chosen = choose_replica(fleet, bare), choose_replica(fleet, replace(bare, prefixes=PREFIXES))
    assert chosen is not None
    assert chosen_bare is not None
    cost_s = {one.worker: one.cost_s for one in chosen_bare.options if one.obstacle is None}
    best_s = min(cost_s[name] + missing_s[name] for name in cost_s)
    taken = chosen.replica.worker.name
    assert abs(cost_s[taken] + missing_s[taken] - best_s) < 1e-9
    shown = {one.worker: one.cached_tokens for one in chosen.options if one.obstacle is None}
    assert shown == {name: count_tokens(num_known[int(name[1:])]) for name in cost_s}


def test_a_request_leaves_a_busy_replica_for_an_idle_one_if_the_queue_costs_more_than_the_prompt() -> None:
    fleet = busy_fleet(7, num_workers=2)  # w0 is idle, w1 runs one of four requests: 0.25 s
    model = fleet.models[ModelId("a")]
    idle, busy = model.replicas[WorkerId("w0")], model.replicas[WorkerId("w1")]
    assert (len(idle.running), len(busy.running)) == (0, 1)
    busy.prefixes.use(PREFIXES)
    request = Request(RequestId("r"), model, 10_000, None, digest="", prefixes=PREFIXES)

    def choose(prompt_s: float) -> Replica | None:
        prompt = ComputedPrompt(count_tokens(len(PREFIXES)), prompt_s)
        fleet.estimates.token_s_by_model.clear()
        fleet.estimates.computed(model.name, prompt)
        chosen = choose_replica(fleet, request)
        return None if chosen is None else chosen.replica

    assert choose(0.2) is idle
    assert choose(0.3) is busy


def test_the_longest_cached_prefix_is_looked_at_however_many_replicas_share_a_system_prompt() -> None:
    num_workers = 2 * MAX_OPTIONS
    fleet = busy_fleet(0, num_workers)
    model = fleet.models[ModelId("a")]
    idle, *others = model.replicas.values()
    for replica in (idle, *others):
        running = list(replica.running)
        for request_id in running if replica is idle else running[:1]:
            step(fleet, RequestFinished(1.0, request_id, 5, End.DONE))
        replica.prefixes.use(PREFIXES[: 1 if replica is idle else 2])
    others[-1].prefixes.use(PREFIXES)
    request = Request(RequestId("r"), model, 10_000, None, digest="", prefixes=PREFIXES)
    fleet.estimates.token_s_by_model[model.name] = 1.0
    long = choose_replica(fleet, request)
    fleet.estimates.token_s_by_model[model.name] = 1e-9
    short = choose_replica(fleet, request)

    assert long is not None
    assert short is not None
    assert (long.replica, short.replica) == (others[-1], idle)
    assert len(long.options) <= MAX_OPTIONS


def test_a_replica_remembers_as_much_as_its_kv_can_hold_and_its_successor_nothing() -> None:
    fleet, model = Fleet(BrainConfig()), ModelId("a")
    footprint = Footprint(10, 10, 90 * PREFIX_TOKENS, kv_token_bytes=10)
    step(fleet, ModelDeployed(0.0, ModelProfile(model, 10, {"cuda": footprint}, 60.0)))

    def serve(worker: str) -> KnownPrefixes:
        step(fleet, WorkerJoined(0.0, WorkerId(worker), "cuda", 1 << 30))
        request_id = RequestId(f"r-{worker}")
        step(fleet, RequestArrived(0.0, request_id, model, 4000, None, prefixes=PREFIXES))
        step(fleet, ModelReady(0.0, WorkerId(worker), model, (), 1.0))
        step(fleet, RequestFinished(1.0, request_id, 5, End.DONE))
        return fleet.models[model].replicas[WorkerId(worker)].prefixes

    assert serve("w0").count_cached(PREFIXES) == count_tokens(9)
    step(fleet, WorkerLost(2.0, WorkerId("w0")))
    step(fleet, WorkerJoined(2.0, WorkerId("w1"), "cuda", 1 << 30))
    step(fleet, RequestArrived(2.0, RequestId("next"), model, 4000, None))
    assert not fleet.models[model].replicas[WorkerId("w1")].prefixes.used


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
        if fleet.capacity.must_stage(model.profile):
            continue
        footprints, is_pinned = model.profile.footprints, model.profile.is_pinned
        most, takes_turns = Hold.RETAINED if is_pinned else Hold.WARM, config.takes_turns and not is_pinned
        untried = [
            worker.promises.has_room(footprints[worker.kind], most)
            or (takes_turns and worker.promises.can_take_turns(footprints[worker.kind], Hold.WARM))
            for worker in fleet.workers.values()
            if worker.kind in footprints
            and worker.name not in model.failed_on
            and model.name not in worker.replicas
            and not worker.is_draining
        ]
        assert has_untried_place(fleet, model) == any(untried)


def two_nodes(num_bytes: int = 10**9) -> Desk:
    """A model that runs on `n1`, which has it on disk, and that `n2` could only fetch, in 40 s."""
    desk = Desk()
    desk.deploy(profile("a", num_bytes))
    for node in ("n1", "n2"):
        desk.join(f"{node}/w0", 4 * num_bytes)
    at_once, n1, n2 = desk.now_s, NodeId("n1"), NodeId("n2")
    desk._step(
        ResidencyReported(at_once, ModelId("a"), {Rung.DISK: num_bytes}, n1),
        ResidencyReported(at_once, ModelId("a"), {}, n2),
        LinkMeasured(at_once, n1, n2, num_bytes / 40, 0.0),
    )
    (load,) = of(LoadModel, desk.ask("r1", "a"))
    assert load.worker == "n1/w0"
    desk.ready("a", "n1/w0")
    return desk


def test_a_request_waits_for_the_successor_of_its_worker_where_its_model_is_on_disk() -> None:
    desk = two_nodes()
    assert not of(LoadModel, desk.lose("n1/w0"))
    assert not of(LoadModel, desk.ask("r2", "a"))
    desk.now_s = 0.3
    actions = desk.join("n1/w0.1", 4 * 10**9)
    assert [load.worker for load in of(LoadModel, actions)] == ["n1/w0.1"]
    assert [one.request_id for one in of(Dispatch, actions)] == ["r1", "r2"]


def test_a_request_waits_no_longer_than_a_successor_may_take() -> None:
    desk = two_nodes()
    (timer,) = of(SetTimer, desk.lose("n1/w0"))
    assert timer.at_s == REPLACED_S
    desk.now_s = timer.at_s
    assert [load.worker for load in of(LoadModel, desk.fire())] == ["n2/w0"]


def test_no_request_waits_for_a_worker_that_is_not_replaced() -> None:
    desk = two_nodes()
    lost = WorkerLost(desk.now_s, WorkerId("n1/w0"), is_with_node=True)
    assert [load.worker for load in of(LoadModel, desk._step(lost))] == ["n2/w0"]

    desk = two_nodes()
    desk.lose("n1/w0")
    actions = desk._step(WorkersExpected(desk.now_s, NodeId("n1"), 0))
    assert [load.worker for load in of(LoadModel, actions)] == ["n2/w0"]


def test_no_request_waits_where_another_node_loads_as_soon() -> None:
    desk = two_nodes()
    desk._step(ResidencyReported(desk.now_s, ModelId("a"), {Rung.DISK: 10**9}, NodeId("n2")))
    assert [load.worker for load in of(LoadModel, desk.lose("n1/w0"))] == ["n2/w0"]


def test_too_few_replicas_are_explained_by_the_other_workers() -> None:
    desk = Desk()
    desk.join("w0")
    (load,) = of(LoadModel, desk.deploy(profile("a", min_replicas=2)))
    desk.ready("a", load.worker)
    short = "model `a` has 1 of 2 replicas that should be kept loaded"
    assert list(explain_unplaced(desk.fleet)) == [f"{short}: no other worker is up"]
    desk.join("n1/w0", kind="other")
    desk.join("n2/w0", budget_bytes=1)
    (note,) = explain_unplaced(desk.fleet)
    assert note.startswith(f"{short}: n1/w0: it cannot run on `other`; n2/w0: needs ")
    desk.join("n3/w0")
    assert list(explain_unplaced(desk.fleet)) == []
