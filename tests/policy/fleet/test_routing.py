"""The routing cost, and that the cheapest of the workers considered is taken."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.policy.fleet.events import BrainConfig
from hearth.policy.fleet.records import Request
from hearth.policy.fleet.routing import MAX_OPTIONS, choose_replica, has_untried_place, routing_cost
from hearth.types import Hold, RequestId
from tests.policy.fleet.world import CONFIGS, LONG_LIVES, Moves, played

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


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=40, deadline=None)
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
            worker.promises.could_have_room(footprints[worker.kind], most)
            or (takes_turns and worker.promises.could_take_turns(footprints[worker.kind]))
            for worker in fleet.workers.values()
            if worker.name not in model.failed_on and worker.name not in model.replicas
        ]
        assert has_untried_place(fleet, model) == any(untried)
