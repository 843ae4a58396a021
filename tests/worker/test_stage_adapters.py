"""Adapters on models in stages: every member loads them, keeps them while requests run, and lets them go."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bench.host_pages import HostPages
from hearth.core.errors import StageLost
from hearth.core.messages import AdapterLoaded, AdapterOrder, AdapterUsage, HostingFailed, RunFailed
from hearth.core.types import RequestId, SamplingParams
from hearth.engine.pending_step import StepResult
from hearth.engine.stage_messages import StageAdapterReady, StageResult, StageStep, decode_result
from hearth.memory.arena import ArenaPool
from hearth.memory.vmm import MappedPool
from hearth.policy.batch.plan import DecodeRows, StepPlan, TableWrites
from hearth.store.transfer.lease_client import LeaseClient, OpenedAdapter
from hearth.worker.adapters import WorkerAdapters
from hearth.worker.stage_member import ResultSender
from tests.store.stored import PATIENCE_S, converted
from tests.worker.harness import greedy
from tests.worker.in_process import NewPool
from tests.worker.stored_adapters import StoredAdapter, stored_adapter
from tests.worker.test_stage_member import (
    CONTEXT,
    CPU,
    NAME,
    OTHER,
    PAGE_BYTES,
    PROMPTS,
    Workers,
    arena,
    order_of,
    pages,
    workers,
)

Asked = Sequence[StoredAdapter | None]


def adapted(seed: int) -> StoredAdapter:
    return stored_adapter(NAME, seed)


def mixed() -> Asked:
    """With the prompts: several adapters and bare requests in one batch."""
    return (adapted(0), None, adapted(1), adapted(0), None, adapted(2))


def start(many: Workers, wanted: Asked, sampling: SamplingParams) -> list[int]:
    first = many.gateways[0]
    orders = [None if one is None else one.order for one in wanted]
    return [
        first.start(NAME, prompt, sampling, adapter=order)
        for prompt, order in zip(PROMPTS, orders, strict=False)
    ]


def ask(many: Workers, wanted: Asked, sampling: SamplingParams | None = None) -> list[list[int]]:
    runs = start(many, wanted, sampling or greedy(10))
    return [answer.tokens for answer in many.gateways[0].until_ended(*runs)]


def alone(root: Path, wanted: Asked, sampling: SamplingParams | None = None) -> list[list[int]]:
    with workers(root, num_workers=1) as one:
        one.gateways[0].load(NAME, converted(NAME, chunk_bytes=PAGE_BYTES), max_context=CONTEXT)
        return ask(one, wanted, sampling)


def roomy_for(root: Path, num_adapters: Sequence[int], new_pool: NewPool = arena) -> NewPool:
    """Return the pools of members, with room for so many adapters beside what the model is promised."""
    budgets, each_bytes = [], adapted(0).layout.num_bytes
    with workers(root, new_pool, num_workers=len(num_adapters)) as many:
        pipeline = many.host(NAME, range(1, len(num_adapters)))
        ask(many, [None])
        for number, gateway in enumerate(many.gateways):
            pong = gateway.ping()
            used_bytes = pong.budget_bytes - pong.free_bytes - pong.models[0].kv_bytes
            kv_bytes = order_of(NAME, pipeline, number).kv_floor_bytes
            budgets.append(used_bytes + kv_bytes + num_adapters[number] * each_bytes + each_bytes // 2)
    unused = iter(budgets)
    if new_pool is arena:
        return lambda terms: ArenaPool(CPU, next(unused), terms)
    return lambda terms: MappedPool(HostPages(next(unused) // PAGE_BYTES, PAGE_BYTES), terms)


def usages(many: Workers) -> list[dict[str, AdapterUsage]]:
    return [{use.name: use for use in gateway.ping().adapters} for gateway in many.gateways]


def wait_until_unused(many: Workers) -> None:
    """Members behind the first learn of the end of a request by a message."""
    for _ in range(1000):
        if not any(use.num_running or use.num_waiting for one in usages(many) for use in one.values()):
            return
    raise AssertionError(f"{usages(many)}")


@pytest.mark.parametrize(("cuts", "new_pool"), [([1], arena), ([1, 2], pages)])
def test_members_say_together_what_one_worker_says_with_adapters(
    tmp_path: Path, new_pool: NewPool, cuts: list[int]
) -> None:
    expected = alone(tmp_path, mixed())
    assert expected != alone(tmp_path, [None] * len(mixed()))
    with workers(tmp_path, new_pool, num_workers=len(cuts) + 1) as many:
        many.host(NAME, cuts)
        assert [ask(many, mixed()) for _ in range(2)] == [expected] * 2
        wait_until_unused(many)
        sizes = {one.order.name: one.layout.num_bytes for one in mixed() if one is not None}
        assert [{name: use.num_bytes for name, use in one.items()} for one in usages(many)] == [
            sizes for _ in many.gateways
        ]


def test_only_the_first_member_names_requests_that_waited_for_an_adapter(tmp_path: Path) -> None:
    with workers(tmp_path) as both:
        both.host(NAME, [1])
        (run,) = start(both, [adapted(0)], greedy(4))
        first, last = (gateway.until(AdapterLoaded) for gateway in both.gateways)
        assert (first.runs, last.runs) == ((run,), ())


class _LateStep:
    """A step of a device, which ends when the test says so."""

    is_computed = is_done = may_wait = False
    end = None

    def __init__(self) -> None:
        self.ended = threading.Event()

    def wait(self) -> StepResult:
        assert self.ended.wait(PATIENCE_S)
        return StepResult([5], None, [])


def test_answers_of_a_device_are_sent_behind_its_steps() -> None:
    near, far = socket.socketpair()
    sender, late, answers = ResultSender(near, "p"), _LateStep(), list[object]()
    plan = StepPlan(3, (), TableWrites(), DecodeRows([RequestId("r")], [0], [0]), ())
    sender.make_room()
    sender.send(StageStep("p", plan), late)
    sender.tell(StageAdapterReady("p", 7))
    late.ended.set()
    with far.makefile("rb") as incoming:
        for _ in range(2):
            num_bytes = int.from_bytes(incoming.read(8)[:4], "little")
            answers.append(decode_result(incoming.read(num_bytes)))
    assert [type(answer) for answer in answers] == [StageResult, StageAdapterReady]
    sender.close()
    far.close()


def send_on(sender: ResultSender, step: StageStep, pending: _LateStep) -> None:
    """Until the thread that sends has noticed that nobody reads."""
    while True:
        sender.make_room()
        sender.send(step, pending)


def test_a_last_stage_without_the_first_is_never_stuck() -> None:
    near, far = socket.socketpair()
    sender, late = ResultSender(near, "p"), _LateStep()
    plan = StepPlan(3, (), TableWrites(), DecodeRows([RequestId("r")], [0], [0]), ())
    sender.make_room()
    sender.send(StageStep("p", plan), late)
    far.close()
    late.ended.set()
    with pytest.raises(StageLost):
        send_on(sender, StageStep("p", plan), late)
    for _ in range(9):
        with pytest.raises(StageLost):
            sender.make_room()
    sender.close()


@pytest.mark.parametrize("nodes", [["", "gpu-2"], ["gpu-2", ""]])
def test_members_of_other_nodes_look_for_adapters_at_each_other(
    tmp_path: Path, nodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, order, places = alone(tmp_path, [adapted(0)]), adapted(0).order, list[str]()
    opened = LeaseClient.open_adapter

    def found(self: LeaseClient, where: str, weight: float) -> OpenedAdapter:
        places.append(where)
        return opened(self, order.where, weight)

    monkeypatch.setattr(LeaseClient, "open_adapter", found)
    with workers(tmp_path, nodes=nodes) as both:
        both.host(NAME, [1])
        assert ask(both, [adapted(0)]) == expected
    assert sorted(places) == [order.where, f"hearth://{order.adapter}"]


@pytest.fixture
def broken_behind_first(monkeypatch: pytest.MonkeyPatch) -> Callable[[StoredAdapter], None]:
    """Have later members look for an adapter where it is not."""

    def break_it(wanted: StoredAdapter) -> None:
        asked = WorkerAdapters.asked

        def astray(self: WorkerAdapters, order: AdapterOrder, run: int, *others: Any, **more: Any) -> None:
            is_wrong = run < 0 and order.adapter == wanted.order.adapter
            asked(self, replace(order, where="/nowhere") if is_wrong else order, run, *others, **more)

        monkeypatch.setattr(WorkerAdapters, "asked", astray)

    return break_it


@pytest.mark.parametrize("cuts", [[1], [1, 2]])
def test_an_adapter_that_a_later_member_cannot_load_fails_its_request_alone(
    tmp_path: Path, cuts: list[int], broken_behind_first: Callable[[StoredAdapter], None]
) -> None:
    expected = alone(tmp_path, [None, adapted(1)])
    broken_behind_first(adapted(0))
    with workers(tmp_path, num_workers=len(cuts) + 1) as many:
        many.host(NAME, cuts)
        first = many.gateways[0]
        fine = start(many, [None, adapted(1)], greedy(10))
        broken = first.start(NAME, PROMPTS[0], greedy(10), adapter=adapted(0).order)
        failed = first.until(RunFailed)
        assert failed.run == broken
        assert "/nowhere" in failed.reason
        assert [answer.tokens for answer in first.until_ended(*fine)] == expected
        wait_until_unused(many)


def test_an_adapter_without_room_on_a_later_member_fails_its_request_alone(tmp_path: Path) -> None:
    with workers(tmp_path, roomy_for(tmp_path, [2, 0])) as both:
        both.host(NAME, [1])
        first = both.gateways[0]
        fine = start(both, [None, None], greedy(10))
        broken = first.start(NAME, PROMPTS[0], greedy(10), adapter=adapted(0).order)
        failed = first.until(RunFailed)
        assert failed.run == broken
        assert "are promised almost all of" in failed.reason
        assert [answer.tokens for answer in first.until_ended(*fine)] == alone(tmp_path, [None, None])
        wait_until_unused(both)


def test_a_request_can_be_cancelled_while_a_later_member_loads_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last member has found nothing yet; the first one may have it already."""
    may_open, opened = threading.Event(), LeaseClient.open_adapter

    def late(self: LeaseClient, where: str, weight: float) -> OpenedAdapter:
        assert may_open.wait(PATIENCE_S)
        return opened(self, where, weight)

    with workers(tmp_path) as both:
        both.host(NAME, [1])
        both.loaded(0), both.loaded(1)
        monkeypatch.setattr(LeaseClient, "open_adapter", late)
        first = both.gateways[0]
        runs = start(both, [adapted(0), adapted(0)], greedy(10))
        first.cancel(runs[0])
        assert first.ping().adapters[0].num_waiting == 1
        may_open.set()
        (answer,) = first.until_ended(runs[1])
        assert not first.answers[runs[0]].tokens
        wait_until_unused(both)
    assert answer.tokens == alone(tmp_path, [adapted(0), adapted(0)])[1]


@pytest.mark.parametrize(("rooms", "new_pool"), [([1, 1, 1], arena), ([3, 2, 1], pages), ([1, 2, 3], arena)])
def test_adapters_of_ended_requests_are_evicted_on_all_members(
    tmp_path: Path, rooms: list[int], new_pool: NewPool
) -> None:
    """Members have room for some adapters beside the model. Requests with one more wait for others to end."""
    with workers(tmp_path, roomy_for(tmp_path, rooms, new_pool), num_workers=3) as three:
        three.host(NAME, [1, 2])
        for seeds in ([0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 0, 2]):
            wanted = [adapted(seed) for seed in seeds]
            assert ask(three, wanted) == alone(tmp_path, wanted)
        wait_until_unused(three)
        for gateway, room in zip(three.gateways, rooms, strict=True):
            pong = gateway.ping()
            assert pong.num_adapter_evictions >= 4 - room
            assert sum(use.num_bytes > 0 for use in pong.adapters) <= room


def test_a_model_waits_on_a_later_member_until_requests_with_adapters_have_ended(tmp_path: Path) -> None:
    """The last member has room for the other model only where the adapter is."""
    where = converted(OTHER, chunk_bytes=PAGE_BYTES)
    with workers(tmp_path, num_workers=1) as one:
        beside = one.gateways[0]
        beside.load(OTHER, where, max_context=CONTEXT)
        expected = beside.ask(OTHER, PROMPTS[0], greedy(8)).tokens
        pong = beside.ping()
        other_bytes = pong.budget_bytes - pong.free_bytes
    num_adapters = other_bytes // adapted(0).layout.num_bytes
    with workers(tmp_path, roomy_for(tmp_path, [2, num_adapters])) as both:
        both.host(NAME, [1])
        runs = start(both, [adapted(0), adapted(1)], greedy(CONTEXT - 41, ignore_eos=True))
        while not all(both.gateways[0].answers[run].tokens for run in runs):
            both.gateways[0].hear()
        both.gateways[1].host(OTHER, where, max_context=CONTEXT)
        tokens = [answer.tokens for answer in both.gateways[0].until_ended(*runs)]
        assert both.gateways[1].ask(OTHER, PROMPTS[0], greedy(8)).tokens == expected
        assert both.gateways[1].ping().num_adapter_evictions
    assert tokens == alone(tmp_path, [adapted(0), adapted(1)], greedy(CONTEXT - 41, ignore_eos=True))


def test_a_removed_adapter_leaves_all_members_with_its_last_request(tmp_path: Path) -> None:
    with workers(tmp_path) as both:
        both.host(NAME, [1])
        runs = start(both, [adapted(0)], greedy(40))
        for gateway in both.gateways:
            gateway.until(AdapterLoaded)
            gateway.forget_adapter(adapted(0).order.adapter)
        both.gateways[0].until_ended(*runs)
        wait_until_unused(both)
        assert usages(both) == [{}, {}]


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_dissolved_pipeline_leaves_no_adapter_in_use(tmp_path: Path, is_dropped: bool) -> None:
    with workers(tmp_path, pages) as both:
        both.host(NAME, [1])
        first = both.gateways[0]
        start(both, [adapted(0), adapted(1), None], greedy(40))
        first.until(AdapterLoaded)
        for gateway in both.gateways:
            gateway.drop(NAME) if is_dropped else gateway.retire(NAME)
        wait_until_unused(both)
        both.host(NAME, [1])
        assert ask(both, mixed()) == alone(tmp_path, mixed())


def test_a_pipeline_that_is_cut_off_while_adapters_load_is_noticed_without_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.worker.worker_loop.StageAdapters.take", lambda *_: None)  # it never answers
    with workers(tmp_path) as both:
        both.host(NAME, [1])
        both.loaded(0), both.loaded(1)
        first = both.gateways[0]
        start(both, [adapted(0)], greedy(10))
        first.until(AdapterLoaded)
        both.gateways[1].drop(NAME)
        assert first.until(HostingFailed).is_cut_off
        assert not any(use.num_running for use in first.ping().adapters)
