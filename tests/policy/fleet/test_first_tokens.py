"""Replicas for first tokens that would be late, and where requests go among several replicas."""

from __future__ import annotations

import pytest

from hearth.core.types import ModelId, RequestId, Rung, WorkerId
from hearth.policy.fleet.events import (
    Action,
    BrainConfig,
    ComputedPrompt,
    Dispatch,
    LoadModel,
    ModelDeployed,
    ModelReady,
    RequestArrived,
    RequestFinished,
    RungUse,
    WorkerJoined,
)
from tests.policy.fleet.world import World, profile

MODEL = ModelId("a")
LOAD_S, TOKEN_S = 0.5, 0.001


class Burst:
    """Workers with room for one model of many slots, and a brain that has timed a prompt."""

    def __init__(self, first_token_s: float | None = 1.0, *, knows_prompts: bool = True) -> None:
        priors = dict.fromkeys(Rung, 30 / LOAD_S)
        self.world = World(BrainConfig(priors=priors, first_token_s=first_token_s))
        self.num_asked = 0
        for number in range(4):
            self.world.tell(WorkerJoined(0.0, WorkerId(f"w{number}"), "cuda", 40))
        self.world.tell(ModelDeployed(0.0, profile(MODEL, keep_alive_s=300.0, max_seqs=64)))
        self.ask(0.0)
        self.ready(LOAD_S, "w0")
        prompt = ComputedPrompt(1000, 1000 * TOKEN_S) if knows_prompts else None
        self.world.tell(RequestFinished(2.0, RequestId("r1"), 5, prompt=prompt))

    def ask(self, now_s: float, num_tokens: int = 1000) -> list[Action]:
        self.num_asked += 1
        name = RequestId(f"r{self.num_asked}")
        return self.world.tell(RequestArrived(now_s, name, MODEL, num_tokens, None))

    def ready(self, now_s: float, worker: str) -> None:
        use = RungUse(Rung.DISK, 30, LOAD_S)
        self.world.tell(ModelReady(now_s, WorkerId(worker), MODEL, (use,), LOAD_S))


def loads(actions: list[Action]) -> list[WorkerId]:
    return [one.worker for one in actions if isinstance(one, LoadModel)]


def worker_of(actions: list[Action]) -> WorkerId:
    (sent,) = [one for one in actions if isinstance(one, Dispatch)]
    return sent.worker


def test_a_further_replica_starts_when_it_has_a_first_token_sooner_by_more_than_the_target() -> None:
    burst = Burst(first_token_s=1.0)
    assert loads(burst.ask(2.0)) == []  # after 1 s
    second = burst.ask(2.0)  # after 2 s, on a new replica after 1.5 s
    third = burst.ask(2.0)  # after 3 s
    assert loads(second) == []
    assert len(loads(third)) == 1
    assert worker_of(third) == loads(third)[0] != worker_of(second)


@pytest.mark.parametrize(("first_token_s", "knows_prompts"), [(None, True), (1.0, False)])
def test_free_slots_suffice_without_a_target_or_while_no_prompt_has_been_timed(
    first_token_s: float | None, knows_prompts: bool
) -> None:
    burst = Burst(first_token_s, knows_prompts=knows_prompts)
    assert not any(loads(burst.ask(2.0)) for _ in range(20))


def test_requests_go_to_the_oldest_replica_that_is_on_time_and_else_to_the_soonest() -> None:
    burst = Burst(first_token_s=1.0)
    actions = [burst.ask(2.0) for _ in range(3)]
    new = worker_of(actions[-1])
    burst.ready(2.5, new)
    assert worker_of(burst.ask(2.5, 200)) == new, "late on both, later on the first"
    assert worker_of(burst.ask(4.0, 500)) == "w0", "its prompts are computed, and it is the oldest"
    assert worker_of(burst.ask(4.0, 500)) == "w0"
    assert worker_of(burst.ask(4.0, 500)) == new, "the first would be late"
