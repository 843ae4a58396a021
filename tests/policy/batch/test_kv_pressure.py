from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import RequestId, SamplingParams
from hearth.policy.batch.batch_limits import BatchLimits
from hearth.policy.batch.batcher import Batcher
from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.kv_pressure import EDGE, STEP, KvPressure, PressureWatch
from hearth.policy.batch.plan import EngineRequest

RATIOS = st.integers(0, 3000)


def edges(*demands: int, room_tokens: int = 1000) -> list[int]:
    watch = PressureWatch()
    return [one for one in demands if watch.is_edge(KvPressure(one, room_tokens))]


def test_a_report_is_due_for_every_step_of_the_room_and_at_the_edge() -> None:
    assert edges(100, 200, 230, 240, 990, 1005, 1040, 1020, 960) == [100, 230, 990, 1040, 960]


def test_a_demand_that_swings_around_the_room_is_no_edge() -> None:
    assert edges(995, 1005, 995, 1005, 1010) == [995]


def test_a_model_without_requests_is_reported_once_and_so_is_its_next_request() -> None:
    watch = PressureWatch()
    assert [watch.is_edge(KvPressure(one, 1000)) for one in (10, 0, 0)] == [True, True, False]
    assert not watch.has_reported_demand
    assert watch.is_edge(KvPressure(5, 1000))


@given(st.lists(RATIOS, min_size=1, max_size=60))
def test_the_last_report_is_never_far_from_the_truth(demands: list[int]) -> None:
    watch, reported = PressureWatch(), None
    for demand in demands:
        pressure = KvPressure(demand, 1000)
        if watch.is_edge(pressure):
            reported = pressure.ratio
        known = reported or 0.0
        assert abs(known - pressure.ratio) < STEP
        assert (known > 1.0) == (pressure.ratio > 1.0) or abs(known - pressure.ratio) < EDGE
        assert (known == 0.0) == (pressure.ratio == 0.0)


def test_the_pace_of_steps_tells_how_many_tokens_come() -> None:
    watch = PressureWatch()
    assert watch.is_due(10.0, has_work=True)
    assert watch.tokens_ahead(5, 1, 10.0) == 0, "nothing is known yet"
    assert not watch.is_due(10.1, has_work=True)
    assert watch.is_due(10.5, has_work=True)
    assert watch.tokens_ahead(30, 1, 10.5) == 50
    assert watch.tokens_ahead(80, 2, 11.0) == 50, "a request is in every other step of a pipeline"


def test_a_model_that_has_reported_no_demand_and_has_no_work_is_not_looked_at() -> None:
    watch, looked = PressureWatch(), list[float]()

    def look(batcher: Batcher, now_s: float) -> KvPressure | None:
        return watch.look(batcher, lambda: looked.append(now_s) or 8, now_s)

    idle, busy = batcher_with(num_blocks=8), batcher_with(32, num_blocks=8)
    assert look(idle, 1.0) is None
    assert look(busy, 2.0) == KvPressure(32, 128)
    assert look(idle, 3.0) == KvPressure(0, 128)
    assert look(idle, 4.0) is None
    assert looked == [2.0, 3.0]


def batcher_with(*prompts: int, num_blocks: int, max_seqs: int = 4) -> Batcher:
    batcher = Batcher(BatchLimits(256, max_seqs, 1024), BlockBook(16, 9))
    batcher.kv.add(range(num_blocks))
    for number, num_tokens in enumerate(prompts):
        sampling = SamplingParams(max_tokens=100, ignore_eos=True)
        request = EngineRequest(RequestId(f"r{number}"), (number,) * num_tokens, sampling)
        batcher.add(request)
    return batcher


def test_running_and_waiting_requests_are_expected_to_grow() -> None:
    batcher = batcher_with(32, 32, num_blocks=3)
    assert batcher.kv.expected_blocks(0) == 4
    plan = batcher.plan()
    assert plan is not None
    assert batcher.blocks.num_live == 2, "the second one lacks a block"
    assert batcher.kv.expected_blocks(0) == 4
    assert batcher.kv.expected_blocks(1) == 4, "none has made a token"
    batcher.commit(plan, [7] * plan.num_samples)
    assert batcher.kv.expected_blocks(1) == 5
    assert batcher.kv.expected_blocks(1000) == 5, "no more than it has made"


def test_requests_without_a_slot_are_not_expected_to_take_memory() -> None:
    assert batcher_with(16, 16, 16, num_blocks=8, max_seqs=2).kv.expected_blocks(0) == 2
