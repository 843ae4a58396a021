"""KV goes with requests that switch to whole replicas, where that is sooner. Each has 10 tokens of 10 bytes.

The members of a pipeline have half of the layers each: a switch to one of them takes 50 bytes from the other.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.core.types import NodeId, Rung, WorkerId
from hearth.policy.fleet import kv_moves
from hearth.policy.fleet.events import (
    Action,
    BrainConfig,
    CancelRun,
    ComputedPrompt,
    Dispatch,
    Evict,
    LinkMeasured,
    MoveKv,
)
from hearth.policy.fleet.fleet_state import restore
from hearth.policy.fleet.kv_moves import MIN_WAIT_S, SETUP_S
from tests.policy.fleet.test_brain import Desk, of
from tests.policy.fleet.test_fleet_state import encoded
from tests.policy.fleet.test_loading_pipelines import burst, desk_with, gathered, name_of, why
from tests.policy.fleet.world import ALWAYS, staged

CONFIG = BrainConfig(while_loading=ALWAYS, priors=dict.fromkeys(Rung, 10.0))
M = staged("m", num_layers=6, max_seqs=4, kv_token_bytes=10)


def switching(num_requests: int = 1, link_bytes_per_s: float = 50.0, token_s: float = 1.0) -> Desk:
    """A pipeline of n1 and n2 with requests, of which n2 has yet to load the whole model."""
    desk = desk_with("n1/w", "n2/w", model=M, config=CONFIG)
    for source, target in (("n1", "n2"), ("n2", "n1")):
        desk._step(LinkMeasured(0.0, NodeId(source), NodeId(target), link_bytes_per_s, 0.0))
    desk.fleet.estimates.computed(M.model, ComputedPrompt(1000, 1000 * token_s))
    burst(desk, 5)
    assert gathered(desk)
    for worker in ("n1/w", "n2/w"):
        desk.ready(name_of(desk), worker)
    for number in range(num_requests, 5):
        desk.cancel(f"r{number + 1}")
    assert not of(MoveKv, desk.ready("m", "n1/w"))
    return desk


def choices(actions: list[Action]) -> dict[str, MoveKv]:
    return {one.request_id: one for one in of(MoveKv, actions)}


def test_kv_moves_if_that_is_sooner_before_the_run_is_cancelled() -> None:
    desk = switching()
    pipeline = name_of(desk)
    actions = desk.ready("m", "n2/w")
    (choice,) = of(MoveKv, actions)
    assert choice.is_moved
    assert (choice.model, choice.senders, choice.num_bytes) == (pipeline, ("n1/w", "n2/w"), 100)
    assert (choice.move_s, choice.prompt_s) == (1.0 + SETUP_S, 10.0)
    kinds = [type(one) for one in actions if isinstance(one, MoveKv | CancelRun | Evict | Dispatch)]
    assert kinds == [MoveKv, CancelRun, Dispatch]
    assert choice.target == of(Dispatch, actions)[0].worker


def test_a_pipeline_goes_when_it_has_had_time_to_send_and_takes_no_request_meanwhile() -> None:
    desk = switching()
    pipeline = name_of(desk)
    desk.ready("m", "n2/w")
    assert why(desk.ask("r6", "m"))["r6"][0] == "m"
    desk.now_s += 9.9
    assert not of(Evict, desk.fire())
    desk.now_s += 0.1
    assert [(one.model, one.worker) for one in of(Evict, desk.fire())] == [
        (pipeline, "n1/w"),
        (pipeline, "n2/w"),
    ]
    assert not desk.fleet.loading_pipelines


@pytest.mark.parametrize("link_bytes_per_s", [4.0, None])
def test_kv_is_computed_again_over_a_slow_link_and_over_an_unknown_one(
    link_bytes_per_s: float | None,
) -> None:
    desk = switching(link_bytes_per_s=link_bytes_per_s or 1.0)
    if link_bytes_per_s is None:
        desk.fleet.estimates.links.clear()
    actions = desk.ready("m", "n2/w")
    (choice,) = of(MoveKv, actions)
    assert not choice.is_moved
    assert (choice.move_s is None) == (link_bytes_per_s is None)
    assert len(of(Evict, actions)) == 2, "nothing is awaited"


def test_requests_behind_each_other_on_a_link_count_what_goes_before() -> None:
    desk = switching(num_requests=4, link_bytes_per_s=8.0)
    actions = desk.ready("m", "n2/w")
    found = choices(actions)
    by_target: dict[WorkerId, list[MoveKv]] = {}
    for one in found.values():
        by_target.setdefault(one.target, []).append(one)
    assert sorted(map(len, by_target.values())) == [2, 2]
    for first, second in by_target.values():
        assert first.is_moved, f"{first}"
        assert first.move_s == 50 / 8 + SETUP_S
        assert not second.is_moved, f"{second}"
        assert (second.move_s, second.prompt_s) == (100 / 8 + SETUP_S, 10.0)


def test_a_switch_moves_only_so_much_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_moves, "MAX_MOVED_BYTES", 250)
    desk = switching(num_requests=4, link_bytes_per_s=1e6)
    found = of(MoveKv, desk.ready("m", "n2/w"))
    assert [one.is_moved for one in found] == [True, True, False, False]


def test_short_waits_are_no_shorter_than_a_connection_takes() -> None:
    desk = switching(link_bytes_per_s=1e6, token_s=1e-3)
    (choice,) = of(MoveKv, desk.ready("m", "n2/w"))
    assert (choice.is_moved, choice.wait_s) == (True, MIN_WAIT_S)


@settings(max_examples=20)
@given(st.floats(1.0, 1e6), st.floats(1e-5, 10.0))
def test_what_is_sooner_is_done(link_bytes_per_s: float, token_s: float) -> None:
    desk = switching(link_bytes_per_s=link_bytes_per_s, token_s=token_s)
    (choice,) = of(MoveKv, desk.ready("m", "n2/w"))
    assert choice.is_moved == (50 / link_bytes_per_s + SETUP_S < 10 * token_s)
    assert choice.wait_s >= choice.prompt_s


@pytest.mark.parametrize("lost", ["n1/w", "n2/w"])
def test_a_member_may_be_lost_while_it_sends(lost: str) -> None:
    desk = switching()
    desk.ready("m", "n2/w")
    actions = desk.lose(lost)
    assert all(one.worker != lost for one in of(Evict, actions))
    assert not desk.fleet.loading_pipelines
    assert desk.fleet.queues.requests.keys() == {"r1"}


def test_a_model_may_be_replaced_while_its_kv_is_sent() -> None:
    desk = switching()
    pipeline = name_of(desk)
    desk.ready("m", "n2/w")
    actions = desk.deploy(replace(M, digest="new"))
    assert [one.model for one in of(Evict, actions)].count(pipeline) == 2


def test_a_fleet_whose_pipeline_sends_is_restored() -> None:
    desk = switching()
    desk.ready("m", "n2/w")
    restored = Desk(CONFIG)
    restored.fleet, restored.now_s = restore(CONFIG, encoded(desk.fleet)), desk.now_s + 10.0
    assert len(of(Evict, restored.fire())) == 2
