"""Who is told why, against a search through all workers."""

from __future__ import annotations

from hypothesis import given

from hearth.core.types import Hold
from hearth.policy.fleet.events import BrainConfig
from hearth.policy.fleet.profile import MAX_STAGES
from hearth.policy.fleet.refusals import (
    explain_misfit,
    explain_outdated,
    explain_pinned_out,
    explain_shortage,
)
from tests.policy.fleet.world import CONFIGS, LONG_LIVES, Moves, played


@given(CONFIGS, LONG_LIVES)
def test_a_reason_is_given_exactly_if_there_is_one(config: BrainConfig, moves: Moves) -> None:
    fleet = played(config, moves).fleet
    for model in fleet.models.values():
        if model.profile is None or fleet.capacity.must_stage(model.profile):
            continue
        needs = model.profile.footprints
        workers = [one for one in fleet.workers.values() if one.kind in needs]
        fits = [needs[one.kind].least_bytes <= one.promises.budget_bytes for one in workers]
        open_ = [one for one in workers if not one.is_draining]
        could = [one.promises.has_room(needs[one.kind], Hold.BUSY) for one in open_]
        stages = model.profile.stages
        may_stage = any(
            stages[one.kind].smallest(MAX_STAGES).least_bytes <= one.promises.budget_bytes
            for one in fleet.workers.values()
            if one.is_draining and one.kind in stages
        )
        may_return = may_stage or any(fit for one, fit in zip(workers, fits, strict=True) if one.is_draining)
        is_early = not fleet.is_complete or may_stage
        assert (explain_misfit(fleet, model.profile) is None) == (any(fits) or is_early)
        assert (explain_pinned_out(fleet, model.profile) is None) == (any(could) or may_return)
        for worker in workers:
            shortage = explain_shortage(worker, needs[worker.kind])
            assert (shortage is None) == worker.promises.has_room(needs[worker.kind], Hold.WARM)
            if shortage is not None:
                replicas = worker.replicas.values()
                busy = [r.model.name for r in replicas if r.hold in (Hold.PAUSED, Hold.BUSY)]
                assert all(name in shortage for name in busy[:3])


@given(CONFIGS, LONG_LIVES)
def test_nobody_waits_for_a_model_that_was_removed_or_replaced(config: BrainConfig, moves: Moves) -> None:
    fleet = played(config, moves).fleet
    for request in fleet.queues.requests.values():
        if request.replica is None:
            assert explain_outdated(request) is None
