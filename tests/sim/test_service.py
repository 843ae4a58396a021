"""A simulated service: every request ends once, turns keep their promises, and jumps change nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hearth.core.errors import ConfigError
from hearth.core.sizes import WantedLimits
from hearth.core.types import ModelId, Pace, RequestId, TurnEnd, WorkerId
from hearth.policy.fleet import estimates
from hearth.policy.fleet.events import (
    Evict,
    ModelDeployed,
    ModelReady,
    ModelRemoved,
    RequestCancelled,
    TurnBegan,
    TurnEnded,
    WorkerJoined,
    WorkerLost,
)
from hearth.policy.turns.paced_request import BATCH_PATIENCE_S
from hearth.policy.turns.turn_policy import TurnRules
from hearth.sim.profile import Profile
from hearth.sim.service import SimulatedService
from hearth.sim.setting import KIND, Policy, SimulationSetting
from hearth.sim.stepped_loads import SteppedLoads
from hearth.sim.stepped_model import StartOrder, TokensSent, WorkerFact
from hearth.sim.stepped_worker import SteppedWorker
from hearth.sim.traces import TracedRequest
from tests.sim.small_machine import GB, HOST_BYTES_PER_S, MACHINE, MEMORY_BYTES, REQUESTS, SHAPES, SLOW_HOST

pytestmark = pytest.mark.slow

SETTING = SimulationSetting(SHAPES, MEMORY_BYTES)
A, B, C = ModelId("a"), ModelId("b"), ModelId("c")
POLICIES = st.sampled_from(list(Policy))
#: Numbers of requests, and when their clients go away.
CANCELS = st.lists(st.tuples(st.integers(0, 13), st.floats(0.0, 8.0)), max_size=6)


def served(requests: list[TracedRequest], setting: SimulationSetting = SETTING) -> SimulatedService:
    """Return a service that has answered all requests."""
    service = SimulatedService(setting, MACHINE)
    service.ask(requests)
    service.run()
    service.check()
    return service


def far_away(request_s: float) -> Profile:
    """Return the machine with requests that are on their way for so long."""
    return Profile(msgspec.structs.replace(MACHINE.measured, request_s=request_s))


def test_a_turn_of_a_conversation_finds_all_that_was_said_before() -> None:
    first = TracedRequest(0.0, str(A), 100, 60, conversation=1)
    later = TracedRequest(5.0, str(A), 200, 10, conversation=1)
    other = TracedRequest(5.0, str(A), 200, 10, conversation=2)
    alone = TracedRequest(5.0, str(A), 200, 10)
    answers = served([first, later, other, alone]).answers.values()
    assert [one.num_cached_tokens for one in answers] == [0, 144, 0, 0], "in whole blocks"


def test_a_first_token_comes_later_by_what_its_request_was_on_its_way() -> None:
    requests = [TracedRequest(0.0, "a", 100, 5), TracedRequest(3.0, "a", 100, 5)]
    near, far = SimulatedService(SETTING, MACHINE), SimulatedService(SETTING, far_away(0.25))
    for service in (near, far):
        service.ask(requests)
        service.run()
        service.check()
    for here, there in zip(token_times(near), token_times(far), strict=True):
        assert there == pytest.approx([at_s + 0.25 for at_s in here])


def test_a_first_token_comes_right_behind_the_last_byte_that_its_prompt_followed() -> None:
    loads = list[ModelReady]()

    def watch(fact: WorkerFact) -> None:
        if isinstance(fact, ModelReady):
            loads.append(fact)

    service = SimulatedService(SETTING, MACHINE, watch)
    service.ask(TracedRequest(3.0 * at, model, 100, 5) for at, model in enumerate("aba"))
    service.run()
    *_, last = service.answers.values()
    num_bytes = loads[-1].rungs[0].num_bytes
    assert (loads[-1].model, num_bytes > 0) == (A, True)
    load_s = MACHINE.wake_s + MACHINE.give_way_s + num_bytes / HOST_BYTES_PER_S
    assert last.first_token_s == pytest.approx(load_s + MACHINE.begin_s)


@pytest.mark.parametrize("return_s", [0.0, 0.25])
def test_a_model_that_comes_back_to_all_its_bytes_takes_no_longer_than_to_be_hosted_again(
    return_s: float,
) -> None:
    machine = Profile(msgspec.structs.replace(MACHINE.measured, return_s=return_s))
    service = SimulatedService(replace(SETTING, policy=Policy.DRAIN), machine)
    service.ask([TracedRequest(0.0, "c", 100, 5)])
    service.run()
    (worker,) = service.workers.values()
    order, now_s = worker.hosted[C].order, service.now_s + 1.0
    start = StartOrder(RequestId("again"), C, 100, 1, Pace(), now_s, 0)
    for one in (Evict(C, worker.name, 0.0, is_freed=False), order, start):
        worker.post(one, now_s)
    sent = list[TokensSent]()
    while not sent:
        sent = [fact for fact in worker.advance(worker.next_s) if isinstance(fact, TokensSent)]
    step_s = machine.shape(SHAPES[C]).step_s(100, 1, 100)
    assert sent[0].at_s[0] - now_s == pytest.approx(machine.wake_s + return_s + step_s)


def test_who_asks_a_worker_that_rests_waits_until_it_is_awake() -> None:
    times = list[list[float]]()
    for wake_s in (0.0, 0.25):
        machine = Profile(msgspec.structs.replace(MACHINE.measured, wake_s=wake_s))
        service = SimulatedService(SETTING, machine)
        service.ask(TracedRequest(at_s, "a", 100, 50) for at_s in (0.0, 3.0, 3.3))
        service.run()
        times.append([answer.first_token_s for answer in service.answers.values()])
    first, resting, busy = (late_s - soon_s for soon_s, late_s in zip(*times, strict=True))
    assert first == pytest.approx(0.25), "its bytes are asked for when the worker is awake"
    assert resting == pytest.approx(0.25)
    assert abs(busy) < 0.05


def test_steps_take_as_long_as_the_host_needs_for_them_beside_a_load() -> None:
    pauses = list[float]()
    for beside_load_s in (0.0, 0.05):
        machine = Profile(msgspec.structs.replace(MACHINE.measured, beside_load_s=beside_load_s))
        service = SimulatedService(SETTING, machine)
        service.ask([TracedRequest(0.0, "a", 100, 400), TracedRequest(1.0, "c", 100, 1)])
        service.run()
        pauses.append(service.answers[RequestId("request-0")].longest_pause_s)
    alone_s, beside_s = pauses
    assert alone_s < 0.03
    assert 0.05 <= beside_s < 0.06


def test_a_client_may_go_while_its_request_is_on_its_way() -> None:
    service = SimulatedService(SETTING, far_away(1.0))
    service.ask([TracedRequest(0.0, "a", 100, 5), TracedRequest(0.0, "b", 100, 5)])
    cancel(service, [(0, 0.5)])
    service.run()
    service.check()
    gone, stayed = service.answers.values()
    assert (gone.why_not, gone.token_s, stayed.is_whole) == ("cancelled", [], True)


def cancel(service: SimulatedService, cancels: list[tuple[int, float]]) -> None:
    """Have the clients of some requests go away, if the requests have arrived by then."""
    for number, at_s in cancels:
        answer = service.answers.get(RequestId(f"request-{number}"))
        if answer is not None and at_s > answer.arrived_s:
            service.schedule(RequestCancelled(at_s, answer.request_id))


def token_times(service: SimulatedService) -> list[list[float]]:
    return [answer.token_s for answer in service.answers.values()]


@given(REQUESTS, POLICIES)
def test_every_request_ends_once_with_all_its_tokens(requests: list[TracedRequest], policy: Policy) -> None:
    service = served(requests, replace(SETTING, policy=policy))
    for answer in service.answers.values():
        assert answer.why_not is None
        assert answer.is_whole
        assert answer.token_s == sorted(answer.token_s)
        assert answer.token_s[0] > answer.arrived_s


@given(REQUESTS)
@settings(max_examples=20)
def test_promises_stay_within_the_budget_whenever_a_worker_tells_something(
    requests: list[TracedRequest],
) -> None:
    def look(_: WorkerFact) -> None:
        for worker in service.workers.values():
            assert worker.reclaimer.device.free_bytes >= 0
            assert worker.turns is not None
            assert worker.turns.memory.bound_bytes() <= MEMORY_BYTES

    service = SimulatedService(SETTING, MACHINE, look)
    service.ask(requests)
    service.run()
    service.check()


@given(REQUESTS, POLICIES, CANCELS, st.none() | st.floats(0.1, 5.0), st.sampled_from([MACHINE, SLOW_HOST]))
def test_jumping_over_steps_changes_no_time_of_any_token(
    requests: list[TracedRequest],
    policy: Policy,
    cancels: list[tuple[int, float]],
    lost_s: float | None,
    machine: Profile,
) -> None:
    def disturbed() -> SimulatedService:
        service = SimulatedService(replace(SETTING, policy=policy, num_workers=2), machine)
        service.ask(requests)
        cancel(service, cancels)
        if lost_s is not None:
            service.schedule(WorkerLost(lost_s, WorkerId("worker-0")))
        service.run()
        return service

    with patch.object(SteppedWorker, "_plan_jump", lambda *_: None):
        stepped = disturbed()
    jumped = disturbed()
    assert token_times(jumped) == token_times(stepped)
    assert len(jumped.turns_s) == len(stepped.turns_s)


@given(REQUESTS, st.integers(1, 2), st.booleans(), st.booleans())
@settings(max_examples=25)
def test_nobody_waits_beyond_the_bound_of_turns(
    requests: list[TracedRequest], num_workers: int, is_read: bool, is_pinned: bool
) -> None:
    """So few and short requests are below saturation. Every model has room beside the pinned one."""
    pace = Pace() if is_read else Pace(tokens_per_s=0.0)
    service = SimulatedService(replace(SETTING, num_workers=num_workers, pace=pace), MACHINE)
    profile = SETTING.model_profile(C, MACHINE.shape(SHAPES[C]))
    service.schedule(ModelDeployed(0.0, replace(profile, is_pinned=is_pinned)))
    service.ask(requests)
    service.run()
    bound_s = wait_bound_s()
    for answer in service.answers.values():
        assert answer.is_whole
        assert answer.first_token_s <= bound_s + (pace.first_token_s if is_read else BATCH_PATIENCE_S)
        assert answer.longest_pause_s <= bound_s + (pace.max_pause_s if is_read else BATCH_PATIENCE_S)


def wait_bound_s() -> float:
    """What `turn_policy.py` states for all models of the machine, and up to 14 requests."""
    shapes = [MACHINE.shape(shape) for shape in SHAPES.values()]
    own_s = TurnRules().max_turn_s + MACHINE.assemble_s + MACHINE.give_way_s + MACHINE.begin_s
    return sum(own_s + one.weights_bytes / HOST_BYTES_PER_S + one.step_s(4096, 14, 8192) for one in shapes)


@pytest.mark.parametrize("policy", [Policy.TURNS, Policy.DRAIN])
def test_a_long_request_and_one_that_has_no_room_beside_it_hold_up_nobody_else(policy: Policy) -> None:
    """For `a` and for `c`, which fits beside both, others are served while the long one runs."""
    setting = replace(SETTING, policy=policy, context=16384, memory_bytes=30 << 30)
    others = [TracedRequest(3.0 + 2.5 * number, "ac"[number % 2], 50, 10) for number in range(24)]
    service = served([TracedRequest(0.0, "a", 50, 16000), TracedRequest(1.0, "b", 50, 20), *others], setting)
    long, waiter, *rest = service.answers.values()
    assert long.ended_s is not None
    assert long.ended_s > 80.0
    if policy is Policy.TURNS:
        assert waiter.first_token_s < wait_bound_s()
        assert all(one.first_token_s < wait_bound_s() for one in rest)
    else:
        config = service.fleet.config
        held_s = max(one.first_token_s for one in rest if one.model == A)
        assert config.max_drain_s - 5.0 < held_s < config.max_drain_s + 1.0
        assert all(one.first_token_s < config.patience_s + 1.0 for one in rest if one.model == C)


def test_kv_that_is_computed_anew_in_each_turn_does_not_eat_it_up() -> None:
    """There is no room for the KV of both models, and a turn is as long as its prompt takes."""
    rules = TurnRules(min_turn_s=0.05, quantum_s=0.1, max_turn_s=0.1)
    setting = SimulationSetting({A: "7B", B: "7B"}, 18 << 30, context=8192, rules=rules)
    service = served([TracedRequest(0.0, "a", 8000, 60), TracedRequest(0.0, "b", 8000, 60)], setting)
    (worker,) = service.workers.values()
    assert worker.num_preempted > 0
    alone_s = MACHINE.shape("7B").step_s(8000, 1, 8000) + 60 * MACHINE.shape("7B").step_s(1, 1, 8000)
    assert worker.step_s <= 2.5 * 2 * alone_s


@given(REQUESTS)
@settings(max_examples=25)
def test_each_turn_that_gives_way_has_sent_a_token(requests: list[TracedRequest]) -> None:
    has_sent: dict[ModelId, bool] = {}

    def watch(fact: WorkerFact) -> None:
        match fact:
            case TurnBegan(model=model):
                has_sent[model] = False
            case TokensSent(request_ids=request_ids):
                for request_id in request_ids:
                    has_sent[service.answers[request_id].model] = True
            case TurnEnded(model=model, why=why):
                assert has_sent.pop(model) or why is TurnEnd.IDLE

    service = SimulatedService(SETTING, MACHINE, watch)
    service.ask(requests)
    service.run()
    assert not has_sent  # the last turn of each ended when it was idle


@given(REQUESTS)
@settings(max_examples=20)
def test_nothing_pinned_is_paused(requests: list[TracedRequest]) -> None:
    service = SimulatedService(SETTING, MACHINE)
    profile = SETTING.model_profile(A, MACHINE.shape(SHAPES[A]))
    service.schedule(ModelDeployed(0.0, replace(profile, is_pinned=True)))
    service.ask(requests)
    service.run()
    # All other models but the large one fit beside it in turns; that one can only be refused.
    for answer in service.answers.values():
        assert answer.is_whole or answer.model == B
        assert not answer.num_pauses or answer.model != A


@given(
    REQUESTS, st.lists(st.tuples(st.integers(0, 13), st.floats(0.0, 8.0))), st.none() | st.floats(0.0, 8.0)
)
def test_cancels_and_removals_leak_nothing(
    requests: list[TracedRequest], cancels: list[tuple[int, float]], removed_s: float | None
) -> None:
    service = SimulatedService(SETTING, MACHINE)
    service.ask(requests)
    cancel(service, cancels)
    if removed_s is not None:
        service.schedule(ModelRemoved(removed_s, A))
    service.run()
    service.check()
    for worker in service.workers.values():
        assert not worker.requests()
        for hosted in worker.hosted.values():
            assert not hosted.engine.has_work
            assert hosted.engine.batcher.blocks.num_live == 0


@given(REQUESTS, st.floats(0.1, 5.0))
@settings(max_examples=20)
def test_requests_of_a_lost_worker_go_on_elsewhere(requests: list[TracedRequest], lost_s: float) -> None:
    service = SimulatedService(replace(SETTING, num_workers=2), MACHINE)
    service.ask(requests)
    service.schedule(WorkerLost(lost_s, WorkerId("worker-0")))
    service.schedule(WorkerJoined(lost_s + 1.0, WorkerId("worker-2"), KIND, MEMORY_BYTES))
    service.run()
    service.check()
    assert all(answer.is_whole for answer in service.answers.values())


#: A model that needs two workers, and one that fits beside it.
STAGED = replace(SETTING, shapes={A: "20B", C: "1B"}, num_workers=2)


def hopping(hop_s: float, node_hop_s: float = 0.0) -> Profile:
    return Profile(msgspec.structs.replace(MACHINE.measured, hop_s=hop_s, node_hop_s=node_hop_s))


def staged_times(profile: Profile, setting: SimulationSetting, num_requests: int = 1) -> list[float]:
    """When each token of the last request was sent."""
    service = SimulatedService(setting, profile)
    service.ask([TracedRequest(0.0, "a", 50, 20)] * num_requests)
    service.run()
    service.check()
    *_, last = service.answers.values()
    assert last.is_whole
    return last.token_s


@pytest.mark.parametrize("policy", list(Policy))
def test_a_model_that_fits_no_worker_is_served_by_several(policy: Policy) -> None:
    requests = [TracedRequest(0.1 * i, "ac"[i % 2], 50, 30) for i in range(20)]
    facts: list[WorkerFact] = []
    service = SimulatedService(replace(STAGED, policy=policy), MACHINE, facts.append)
    service.ask(requests)
    service.run()
    service.check()
    assert all(answer.is_whole for answer in service.answers.values())
    loads = [fact for fact in facts if isinstance(fact, ModelReady) and fact.model == A]
    assert {fact.worker for fact in loads} == {"worker-0", "worker-1"}


def test_a_step_takes_as_long_as_all_stages_and_hops() -> None:
    whole = staged_times(MACHINE, replace(STAGED, memory_bytes=2 * MEMORY_BYTES))
    assert staged_times(MACHINE, STAGED)[-1] - staged_times(MACHINE, STAGED)[5] == pytest.approx(
        whole[-1] - whole[5], rel=0.01
    )
    far = staged_times(hopping(0.01), STAGED)
    assert far[-1] - far[5] == pytest.approx(whole[-1] - whole[5] + 14 * 2 * 0.01, rel=0.02)


def test_a_hop_to_another_machine_takes_its_own_time() -> None:
    """The way of the tokens back is as long as that of the hidden states."""
    near = staged_times(hopping(0.0, node_hop_s=0.01), STAGED)
    far = staged_times(hopping(0.0, node_hop_s=0.01), replace(STAGED, num_nodes=2))
    assert near == staged_times(MACHINE, STAGED)
    assert far[-1] - far[5] == pytest.approx(near[-1] - near[5] + 14 * 2 * 0.01, rel=0.02)


def test_stages_work_on_different_requests_at_a_time() -> None:
    shape = MACHINE.shape("20B")
    staged = shape.in_stages([0.5, 0.5], own_share=0.5, hops_s=0.002)
    assert staged.step_s(64, 64, 6400) == pytest.approx(shape.step_s(32, 32, 3200) + 0.002)
    assert staged.kv_bytes_per_token == pytest.approx(shape.kv_bytes_per_token / 2, abs=1)


def test_the_slowest_stage_holds_up_all_steps_but_that_of_one_request_alone() -> None:
    shape = MACHINE.shape("20B")
    uneven = shape.in_stages([0.25, 0.75], own_share=0.25, hops_s=0.0)
    assert uneven.step_s(64, 64, 6400) == pytest.approx(2 * 0.75 * shape.step_s(32, 32, 3200))
    assert uneven.step_s(1, 1, 100) == pytest.approx(shape.step_s(1, 1, 100), rel=0.01)


@given(st.floats(0.0, 0.2), st.integers(2, 256))
def test_long_hops_are_filled_with_one_more_step(hops_s: float, num_rows: int) -> None:
    shape = MACHINE.shape("20B")
    staged = shape.in_stages([0.5, 0.5], own_share=0.5, hops_s=hops_s)
    sizes = (num_rows, num_rows, 100 * num_rows)
    in_two_s = shape.step_s(*(-(-size // 2) for size in sizes))
    found_s = staged.step_s(*sizes)
    assert found_s <= in_two_s + hops_s + 1e-9
    if hops_s > in_two_s / 2:
        in_three_s = shape.step_s(*(-(-size // 3) for size in sizes))
        assert found_s == pytest.approx(max(in_three_s + hops_s, min(3, num_rows) / 2 * in_three_s))


@given(REQUESTS, st.floats(0.1, 5.0), st.sampled_from(["worker-0", "worker-1"]), POLICIES)
@settings(max_examples=20)
def test_requests_of_a_pipeline_go_on_after_a_member_is_lost(
    requests: list[TracedRequest], lost_s: float, lost: str, policy: Policy
) -> None:
    shapes = {ModelId(name): "20B" if name == "a" else "1B" for name in "abcd"}
    service = SimulatedService(replace(STAGED, shapes=shapes, policy=policy), MACHINE)
    service.ask(requests)
    service.schedule(WorkerLost(lost_s, WorkerId(lost)))
    service.schedule(WorkerJoined(lost_s + 1.0, WorkerId("worker-2"), KIND, MEMORY_BYTES))
    service.run()
    service.check()
    assert all(answer.is_whole for answer in service.answers.values())


#: Two workers that load the same model for a few requests, and may serve it together meanwhile.
BURST = replace(
    SETTING,
    shapes={A: "7B", C: "3B"},
    num_workers=2,
    wanted_limits=WantedLimits(256, 2, block_tokens=16),
)
STAGED_START = replace(BURST, staged_start_gain_s=-math.inf)


@pytest.mark.parametrize("policy", [Policy.TURNS, Policy.DRAIN])
def test_workers_that_load_a_model_at_once_answer_sooner_together(policy: Policy) -> None:
    burst = [TracedRequest(0.0, "a", 50, 200)] * 4
    alone, together = (served(burst, replace(one, policy=policy)) for one in (BURST, STAGED_START))
    firsts = [min(answer.first_token_s for answer in one.answers.values()) for one in (alone, together)]
    assert firsts[1] < firsts[0]
    assert not together.fleet.loading_pipelines
    assert {name for worker in together.workers.values() for name in worker.hosted} == {A}


@pytest.mark.parametrize("policy", [Policy.TURNS, Policy.DRAIN])
def test_a_model_is_loaded_though_the_stage_before_it_is_given_up(policy: Policy) -> None:
    service = SimulatedService(replace(STAGED_START, policy=policy), MACHINE)
    service.ask([TracedRequest(0.0, "a", 50, 200)] * 4)
    cancel(service, [(0, 0.055), (1, 0.055), (3, 0.055)])  # all but one that waits for the whole model
    service.schedule(WorkerLost(0.06, WorkerId("worker-1")))
    service.run()
    service.check()
    assert [one.is_whole for one in service.answers.values()] == [False, False, True, False]


@pytest.fixture
def fast_links() -> Iterator[None]:
    """Workers of a node pass on KV sooner than it is computed."""
    with patch.object(estimates, "PRIOR_NODE_BYTES_PER_S", 1e13):
        yield


def switched_burst() -> SimulatedService:
    return served([TracedRequest(0.0, "a", 1000, 200)] * 4, STAGED_START)


def test_kv_of_requests_that_switch_is_computed_again_over_slow_links() -> None:
    service = switched_burst()
    assert service.num_kv_moves == 0
    assert all(answer.is_whole for answer in service.answers.values())


@pytest.mark.usefixtures("fast_links")
def test_requests_switch_with_their_kv_over_fast_links() -> None:
    service = switched_burst()
    assert service.num_kv_moves == 2, "as many as the pipeline has slots for"
    assert all(answer.is_whole for answer in service.answers.values())
    assert not service.fleet.loading_pipelines


@pytest.mark.usefixtures("fast_links")
@given(REQUESTS, st.floats(0.0, 2.0), st.sampled_from(["worker-0", "worker-1"]), CANCELS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_requests_that_switch_or_lose_a_member_get_each_token_once(
    requests: list[TracedRequest], lost_s: float, lost: str, cancels: list[tuple[int, float]]
) -> None:
    shapes = {ModelId(name): "7B" if name == "a" else "3B" for name in "abcd"}
    service = SimulatedService(replace(STAGED_START, shapes=shapes), MACHINE)
    service.ask([replace(one, arrival_s=one.arrival_s / 8) for one in requests])
    cancel(service, cancels)
    service.schedule(WorkerLost(lost_s, WorkerId(lost)))
    service.schedule(WorkerJoined(lost_s + 1.0, WorkerId("worker-2"), KIND, MEMORY_BYTES))
    service.run()
    service.check()
    assert all(one.is_whole or one.why_not == "cancelled" for one in service.answers.values())


def test_the_same_requests_are_answered_in_the_same_way() -> None:
    requests = [TracedRequest(0.1 * i, "abcd"[i % 4], 50 + i, 20 + i) for i in range(30)]
    assert token_times(served(requests)) == token_times(served(requests))


def test_models_that_fit_together_take_turns_without_giving_way() -> None:
    requests = [TracedRequest(0.05 * i, "acd"[i % 3], 50, 30) for i in range(12)]
    setting = SimulationSetting({ModelId(m): "3B" for m in "acd"}, MEMORY_BYTES)
    service = served(requests, setting)
    assert all(not answer.num_pauses for answer in service.answers.values())
    assert sum(worker.loads.num_ended for worker in service.workers.values()) == 3


def test_a_stream_of_one_model_does_not_hold_up_another_that_does_not_fit_beside_it() -> None:
    stream = [TracedRequest(0.2 * i, "a", 100, 100) for i in range(50)]
    asked = TracedRequest(3.0, "b", 100, 20)
    drained = served([*stream, asked], replace(SETTING, policy=Policy.DRAIN))
    turned = served([*stream, asked])
    (slow,) = (one for one in drained.answers.values() if one.model == B)
    (fast,) = (one for one in turned.answers.values() if one.model == B)
    assert fast.first_token_s < 1.0 < slow.first_token_s


def test_first_bytes_of_who_waits_cross_while_another_has_its_turn() -> None:
    """They go where an idle model was, and its first token comes sooner by as much."""
    stream = [TracedRequest(1.0 + 0.2 * i, "a", 100, 100) for i in range(20)]
    requests = [TracedRequest(0.0, "c", 100, 2), *stream, TracedRequest(1.4, "b", 100, 20)]
    early = served(requests)
    with patch.object(SteppedLoads, "begin_front", lambda *_: None):
        late = served(requests)
    ((soon,), (then,)) = [
        [one for one in service.answers.values() if one.model == B] for service in (early, late)
    ]
    front_bytes = MEMORY_BYTES - MACHINE.shape("7B").weights_bytes - 2 * GB  # some is KV
    assert soon.first_token_s < then.first_token_s - 0.5 * front_bytes / HOST_BYTES_PER_S
    (moved,), (moved_late,) = (
        [one.loads.bytes_moved for one in service.workers.values()] for service in (early, late)
    )
    assert moved <= 1.2 * moved_late


def test_one_model_at_a_time_holds_up_all_behind_a_request_of_another() -> None:
    requests = [TracedRequest(0.01 * i, model, 50, 30) for i, model in enumerate("ccdc")]
    service = served(requests, replace(SETTING, policy=Policy.ONE_AT_A_TIME))
    first, second, other, last = service.answers.values()
    assert first.ended_s is not None
    assert second.ended_s is not None
    assert other.ended_s is not None
    assert max(first.ended_s, second.ended_s) < other.token_s[0]
    assert other.ended_s < last.token_s[0]


def test_a_request_for_a_model_that_is_not_there_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"none of the models: `a`.*Trace.mapped"):
        served([TracedRequest(0.0, "nobody", 1, 1)])
