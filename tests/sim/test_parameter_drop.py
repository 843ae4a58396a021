"""Simulated replicas that give up layers for KV in a burst, and have them back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hearth.core.sizes import WantedLimits
from hearth.core.types import ModelId, WorkerId
from hearth.policy.fleet.drop_group import DropState
from hearth.policy.fleet.events import ModelDeployed, WorkerLost
from hearth.sim.service import SimulatedService
from hearth.sim.setting import Policy, SimulationSetting
from hearth.sim.stepped_model import WorkerFact
from hearth.sim.traces import TracedRequest
from tests.sim.small_machine import MACHINE, MEMORY_BYTES

MODEL = ModelId("m")
BURST_S, NUM_REQUESTS = 5.0, 120


def begun(
    *,
    may_drop: bool,
    num_output_tokens: int = 400,
    num_workers: int = 2,
    watch: Callable[[WorkerFact], None] | None = None,
) -> SimulatedService:
    """Each replica has room for some 20,000 tokens; the burst brings twice as much, and a few more follow."""
    setting = SimulationSetting(
        {MODEL: "7B"},
        MEMORY_BYTES,
        num_workers=num_workers,
        policy=Policy.DRAIN,
        wanted_limits=WantedLimits(2048, 256, 16),
    )
    service = SimulatedService(setting, MACHINE, watch)
    profile = replace(setting.model_profile(MODEL, MACHINE.shape("7B")), is_pinned=True, may_drop=may_drop)
    profile = replace(profile, min_replicas=num_workers, max_replicas=num_workers)
    service.schedule(ModelDeployed(0.0, profile))
    times_s = [BURST_S + 0.01 * number for number in range(NUM_REQUESTS)]
    times_s += [BURST_S + 4.0 * number for number in range(2, 16)]
    service.ask(TracedRequest(at_s, MODEL, 700, num_output_tokens) for at_s in times_s)
    return service


def last_first_token_s(*, may_drop: bool) -> float:
    service = begun(may_drop=may_drop)
    service.run()
    service.check()
    num_loads = 3 if may_drop else 1  # whole, as a stage, and whole again
    assert {one.loads.num_ended for one in service.workers.values()} == {num_loads}
    return max(one.first_token_s for one in service.answers.values())


def test_first_tokens_of_a_burst_come_sooner_with_the_memory_of_layers() -> None:
    assert last_first_token_s(may_drop=True) < 0.7 * last_first_token_s(may_drop=False)


def test_nothing_is_dropped_if_requests_end_as_fast_as_prompts_are_computed() -> None:
    service = begun(may_drop=True, num_output_tokens=30)
    service.run()
    assert {one.loads.num_ended for one in service.workers.values()} == {1}


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("state", list(DropState)[1:])
def test_requests_go_on_after_a_member_is_lost_in_any_state(state: DropState, at: int) -> None:
    lost: list[WorkerId] = []

    def lose(_: WorkerFact) -> None:
        if not lost and service.fleet.models[MODEL].drop.state is state:
            lost.append(list(service.workers)[at])
            service.schedule(WorkerLost(service.now_s, lost[0]))

    service = begun(may_drop=True, watch=lose)
    service.run()
    service.check()
    assert lost, f"it was never {state.value}"
    assert all(one.is_whole for one in service.answers.values())
