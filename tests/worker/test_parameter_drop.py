"""Whole models that report their need of KV, become stages of a pipeline for it, and whole again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hearth.core.messages import HostingFailed, ModelPressure, RunFailed
from hearth.memory.pool import EvictionTermsOf, Pool
from tests.store.stored import converted
from tests.store.transfer.test_leases import eventually
from tests.worker.harness import greedy
from tests.worker.in_process import LoopGateway
from tests.worker.test_stage_member import CONTEXT, NAME, PAGE_BYTES, PROMPTS, alone, arena, pages, workers

NewPool = Callable[[EvictionTermsOf], Pool]
BOTH_POOLS = pytest.mark.parametrize("new_pool", [arena, pages])
#: Of the whole model, which has three layers.
BLOCK_BYTES = 6144


def load_whole(gateway: LoopGateway, num_blocks: int = 64) -> None:
    kv_bytes = (1 + num_blocks) * BLOCK_BYTES
    where = converted(NAME, chunk_bytes=PAGE_BYTES)
    floor_bytes = (1 + CONTEXT // 4) * BLOCK_BYTES
    gateway.load(NAME, where, max_context=CONTEXT, kv_floor_bytes=floor_bytes, max_kv_bytes=kv_bytes)


@BOTH_POOLS
def test_a_worker_tells_when_kv_runs_short_and_when_it_no_longer_does(
    tmp_path: Path, new_pool: NewPool
) -> None:
    with workers(tmp_path, new_pool, num_workers=1) as one:
        (gateway,) = one.gateways
        load_whole(gateway, num_blocks=16)
        runs = [gateway.start(NAME, prompt, greedy(20)) for prompt in PROMPTS]
        gateway.until_ended(*runs)
        reports = gateway.pressure
        assert eventually(lambda: bool(gateway.ping()) and reports[-1].demand_tokens == 0)
    assert {one.room_tokens for one in reports} == {64}
    assert max(one.demand_tokens for one in reports) > 64


def test_requests_that_are_cancelled_need_no_kv(tmp_path: Path) -> None:
    with workers(tmp_path, num_workers=1) as one:
        (gateway,) = one.gateways
        load_whole(gateway)
        run = gateway.start(NAME, PROMPTS[1], greedy(20))
        assert gateway.until(ModelPressure).demand_tokens >= len(PROMPTS[1])
        gateway.cancel(run)
        assert eventually(lambda: bool(gateway.ping()) and gateway.pressure[-1].demand_tokens == 0)


@BOTH_POOLS
def test_whole_models_become_stages_and_whole_again_under_their_requests(
    tmp_path: Path, new_pool: NewPool
) -> None:
    expected = alone(tmp_path, PROMPTS, greedy(24))
    with workers(tmp_path, new_pool, num_workers=2) as both:
        first, second = both.gateways
        for gateway in both.gateways:
            load_whole(gateway)
        answers = begun(first, {at: [] for at in range(len(PROMPTS))}, 4)
        retire(both.gateways)
        both.host(NAME, [1])
        answers = begun(first, answers, 10)
        loads = [both.loaded(number) for number in (0, 1)]
        retire(both.gateways)
        load_whole(second)
        answers = begun(second, answers, 24)
    assert list(answers.values()) == expected
    if new_pool is pages:
        assert [sum(one.num_bytes for one in load.rungs) for load in loads] == [0, 0], "no layer was copied"


def retire(gateways: Sequence[LoopGateway]) -> None:
    for gateway in gateways:
        gateway.retire(NAME)
        gateway.loads.clear()


def begun(gateway: LoopGateway, answers: dict[int, list[int]], num_tokens: int) -> dict[int, list[int]]:
    """Continue the answers to the prompts until each has so many tokens, and end the requests there."""
    left = {at: output for at, output in answers.items() if len(output) < 24}
    runs = {at: gateway.start(NAME, PROMPTS[at], greedy(24), output=output) for at, output in left.items()}
    while not all(len(left[at]) + len(gateway.answers[run].tokens) >= num_tokens for at, run in runs.items()):
        fact = gateway.hear()
        assert not isinstance(fact, HostingFailed | RunFailed), f"{fact}"
    for run in runs.values():
        gateway.cancel(run)
    gateway.ping()
    return {**answers, **{at: [*left[at], *gateway.answers[run].tokens] for at, run in runs.items()}}
