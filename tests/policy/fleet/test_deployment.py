"""What a deployed, removed or stopped model leaves behind, in any world."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import Hold, ModelId
from hearth.policy.fleet.events import (
    BrainConfig,
    Evict,
    LoadModel,
    ModelDeployed,
    ModelRemoved,
    ModelStopped,
)
from tests.policy.fleet.world import CONFIGS, LONG_LIVES, MODELS, Moves, played, profile


@given(CONFIGS, LONG_LIVES, st.sampled_from(MODELS))
def test_of_a_removed_model_only_busy_replicas_stay(config: BrainConfig, moves: Moves, name: ModelId) -> None:
    world = played(config, moves)
    world.tell(ModelRemoved(world.now_s, name))
    replicas = [replica for replica in world.fleet.replicas() if replica.model.name == name]
    assert all(replica.running and replica.is_stale for replica in replicas)
    model = world.fleet.models.get(name)
    if model is None:
        assert not replicas
    else:
        assert not model.waiting
        assert not model.resident_bytes


@given(CONFIGS, LONG_LIVES, st.sampled_from(MODELS))
def test_of_a_replaced_model_only_busy_replicas_stay_and_its_old_bytes_count_for_nothing(
    config: BrainConfig, moves: Moves, name: ModelId
) -> None:
    world = played(config, moves)
    model = world.fleet.models.get(name)
    before = [] if model is None else list(model.replicas.values())
    actions = world.tell(ModelDeployed(world.now_s, profile(name, digest="another", keep_alive_s=4.0)))
    freed = {
        (action.model, action.worker) for action in actions if isinstance(action, Evict) and action.is_freed
    }
    for replica in before:
        is_gone = replica.hold is None
        assert is_gone != bool(replica.running)
        assert not is_gone or (name, replica.worker.name) in freed
    assert not world.fleet.models[name].resident_bytes


@given(CONFIGS, LONG_LIVES, st.sampled_from(MODELS), st.booleans())
def test_a_stopped_model_is_retained_or_freed_and_not_loaded_unasked(
    config: BrainConfig, moves: Moves, name: ModelId, is_freed: bool
) -> None:
    world = played(config, moves)
    has_waiting = name in world.fleet.models and bool(world.fleet.models[name].waiting)
    actions = world.tell(ModelStopped(world.now_s, name, is_freed))
    for replica in world.fleet.replicas():
        if replica.model.name == name and not replica.running:
            assert replica.hold is Hold.RETAINED
            assert not is_freed
    if not has_waiting:
        assert name not in [action.model for action in actions if isinstance(action, LoadModel)]


@given(CONFIGS, LONG_LIVES, st.sampled_from(MODELS))
def test_a_model_leaves_only_workers_whose_footprint_has_changed(
    config: BrainConfig, moves: Moves, name: ModelId
) -> None:
    world = played(config, moves)
    model = world.fleet.models.get(name)
    if model is None or model.profile is None:
        return
    before = [replica for replica in model.replicas.values() if not replica.is_leaving]
    footprint = model.profile.footprints["cuda"]
    footprints = {"cuda": footprint, "cuda zone=a": footprint}
    stages = {kind: sizes for kind, sizes in model.profile.stages.items() if kind == "cuda"}
    world.tell(ModelDeployed(world.now_s, replace(model.profile, footprints=footprints, stages=stages)))
    for replica in before:
        assert replica.is_stale is (replica.worker.kind == "cpu")
