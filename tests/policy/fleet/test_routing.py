"""The routing cost, and that the cheapest of the workers considered is taken."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.policy.fleet.events import BrainConfig
from hearth.policy.fleet.routing import MAX_OPTIONS, choose_replica, is_failed_everywhere, routing_cost
from hearth.types import Hold
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
        chosen = choose_replica(fleet, model)
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
def test_a_model_has_failed_everywhere_if_no_worker_that_could_hold_it_is_left(
    config: BrainConfig, moves: Moves
) -> None:
    fleet = played(config, moves).fleet
    for model in fleet.models.values():
        if model.profile is None:
            assert not is_failed_everywhere(fleet, model)
            continue
        footprints = model.profile.footprints
        suited = [
            worker.name
            for worker in fleet.workers.values()
            if worker.promises.could_have_room(footprints[worker.kind], Hold.BUSY)
        ]
        assert is_failed_everywhere(fleet, model) == all(name in model.failed_on for name in suited)
