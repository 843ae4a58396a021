"""KV of a pipeline that grows and shrinks under its requests, on all members."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.host_pages import HostPages
from hearth.core.messages import HostingFailed, ModelUse, StepDone
from hearth.core.types import WorkerId
from hearth.memory.arena import ArenaPool
from hearth.memory.pool import EvictionTermsOf, Pool
from hearth.memory.vmm import MappedPool
from tests.engine.harness import prompts_for
from tests.store.stored import PATIENCE_S, converted
from tests.store.transfer.test_leases import eventually
from tests.worker.harness import greedy
from tests.worker.in_process import LoopGateway
from tests.worker.test_stage_member import (
    CONFIG,
    CONTEXT,
    CPU,
    NAME,
    OTHER,
    PAGE_BYTES,
    Workers,
    alone,
    arena,
    pages,
    workers,
)

FLOOR_BLOCKS = CONTEXT // CONFIG.block_tokens
MAX_BLOCKS = 8 * FLOOR_BLOCKS
PROMPTS = prompts_for(160, (3, 40, 7, 21, 1, 12, 33, 18))
SAMPLING = greedy(24)
#: With the sink: of the other model, and of the last stage.
OTHER_KV_BYTES, STAGE_BLOCK_BYTES = (1 + FLOOR_BLOCKS) * 3072, 4096
#: Room for the last stage and the other model with what both are promised, and a little more.
TIGHT_BYTES = 356 * PAGE_BYTES


def tight_arena(eviction_terms: EvictionTermsOf) -> Pool:
    return ArenaPool(CPU, TIGHT_BYTES, eviction_terms)


def tight_pages(eviction_terms: EvictionTermsOf) -> Pool:
    return MappedPool(HostPages(TIGHT_BYTES // PAGE_BYTES, PAGE_BYTES), eviction_terms)


def use_of(gateway: LoopGateway, model: str = NAME) -> ModelUse:
    (use,) = [one for one in gateway.ping().models if one.model == model]
    return use


def host(members: Workers, cuts: list[int]) -> None:
    members.host(NAME, cuts, num_blocks=FLOOR_BLOCKS, max_blocks=MAX_BLOCKS)


def load_other(gateway: LoopGateway, max_kv_bytes: int = OTHER_KV_BYTES) -> None:
    where = converted(OTHER, chunk_bytes=PAGE_BYTES)
    gateway.load(OTHER, where, max_context=CONTEXT, kv_floor_bytes=OTHER_KV_BYTES, max_kv_bytes=max_kv_bytes)


@pytest.mark.parametrize("new_pool", [arena, pages])
@pytest.mark.parametrize("cuts", [[1], [1, 2]])
def test_kv_grows_with_the_load_on_all_members(
    tmp_path: Path, new_pool: Callable[[EvictionTermsOf], Pool], cuts: list[int]
) -> None:
    expected = alone(tmp_path, PROMPTS, SAMPLING)
    with workers(tmp_path, new_pool, num_workers=1 + len(cuts)) as members:
        host(members, cuts)
        assert [members.ask(NAME, PROMPTS, SAMPLING) for _ in range(3)] == [expected] * 3
        first, *later = [use_of(gateway) for gateway in members.gateways]
        assert FLOOR_BLOCKS < first.kv_blocks <= MAX_BLOCKS
        assert all(first.kv_blocks <= one.kv_blocks <= MAX_BLOCKS for one in later)
        assert not any(one.kv_used_blocks for one in (first, *later)), "no request is running"


@pytest.mark.parametrize("new_pool", [tight_arena, tight_pages])
def test_kv_comes_back_under_its_requests_for_a_model_that_is_promised_the_memory(
    tmp_path: Path, new_pool: Callable[[EvictionTermsOf], Pool]
) -> None:
    """First for weights, then for KV, on the worker of the last stage."""
    with workers(tmp_path, num_workers=1) as one:
        load_other(one.gateways[0])
        other = one.ask(OTHER, PROMPTS[1:2], SAMPLING)
    expected, sampling = alone(tmp_path, PROMPTS, greedy(22)), greedy(22)
    with workers(tmp_path, new_pool) as both:
        first, last = both.gateways
        host(both, [1])
        assert both.ask(NAME, PROMPTS, sampling) == expected
        assert use_of(last).kv_blocks > 4 * FLOOR_BLOCKS
        for number in range(4):
            runs = [first.start(NAME, prompt, sampling) for prompt in PROMPTS]
            first.until(StepDone)
            if not number:
                load_other(last)
            assert tokens_of(last, OTHER) == other
            assert [one.tokens for one in first.until_ended(*runs)] == expected


@pytest.mark.parametrize("new_pool", [tight_arena, tight_pages])
def test_kv_comes_back_under_its_requests_for_a_stage_of_another_pipeline(
    tmp_path: Path, new_pool: Callable[[EvictionTermsOf], Pool]
) -> None:
    """Which has its weights when it takes the KV that it is promised."""
    with workers(tmp_path) as both:
        both.host(OTHER, [1], num_blocks=FLOOR_BLOCKS, max_blocks=FLOOR_BLOCKS)
        other = both.ask(OTHER, PROMPTS[1:2], SAMPLING)
    expected = alone(tmp_path, PROMPTS, SAMPLING)
    with workers(tmp_path, new_pool) as both:
        first, last = both.gateways
        host(both, [1])
        assert both.ask(NAME, PROMPTS, SAMPLING) == expected
        assert use_of(last).kv_blocks > 4 * FLOOR_BLOCKS
        runs = [first.start(NAME, prompt, SAMPLING) for prompt in PROMPTS]
        first.until(StepDone)
        both.host(OTHER, [1], num_blocks=FLOOR_BLOCKS, max_blocks=FLOOR_BLOCKS)
        assert both.ask(OTHER, PROMPTS[1:2], SAMPLING) == other
        assert [one.tokens for one in first.until_ended(*runs)] == expected


def tokens_of(gateway: LoopGateway, model: str) -> list[list[int]]:
    (answer,) = gateway.until_ended(gateway.start(model, PROMPTS[1], SAMPLING))
    return [answer.tokens]


class LostWithGrowth(socket.socket):
    """Loses its connection in place of the first message about growth."""

    def send(self, content: bytes, flags: int = 0) -> int:  # type: ignore[override] # as it is called
        if b"StageKvGrowth" not in content:
            return super().send(content, flags)
        self.shutdown(socket.SHUT_RDWR)
        return len(content)

    def sendall(self, content: bytes, flags: int = 0) -> None:  # type: ignore[override] # too
        if b"StageKvGrowth" in content:
            self.shutdown(socket.SHUT_RDWR)
        else:
            super().sendall(content, flags)


@pytest.mark.parametrize("lost", ["w1", "w2", "w0"], ids=["question", "passed on", "answer"])
def test_requests_go_on_elsewhere_if_a_member_is_lost_while_growth_is_open(tmp_path: Path, lost: str) -> None:
    is_lost = True

    def opened(worker: WorkerId, end: socket.socket) -> socket.socket:
        return LostWithGrowth(fileno=end.detach()) if is_lost and worker == lost else end

    expected = alone(tmp_path, PROMPTS, SAMPLING)
    with workers(tmp_path, num_workers=3, opened=opened) as members:
        host(members, [1, 2])
        first = members.gateways[0]
        runs = [first.start(NAME, prompt, SAMPLING) for prompt in PROMPTS]
        assert first.until(HostingFailed).is_cut_off
        emitted = [first.answers[run].tokens for run in runs]
        is_lost = False
        for gateway in members.gateways:
            gateway.drop(NAME)
        host(members, [1, 2])
        resumed = [
            first.start(NAME, prompt, SAMPLING, output=output)
            for prompt, output in zip(PROMPTS, emitted, strict=True)
        ]
        more = first.until_ended(*resumed)
        tokens = [[*output, *one.tokens] for output, one in zip(emitted, more, strict=True)]
        assert tokens == expected
        assert use_of(members.gateways[2]).kv_blocks > FLOOR_BLOCKS


def test_kv_that_an_idle_pipeline_only_caches_goes_to_a_model_that_can_use_it(tmp_path: Path) -> None:
    """Beyond its promise, on the worker of the last stage."""
    with workers(tmp_path, tight_pages) as both:
        last = both.gateways[1]
        load_other(last, max_kv_bytes=MAX_BLOCKS * 3072)
        host(both, [1])
        both.ask(NAME, PROMPTS, SAMPLING)
        before = use_of(last).kv_blocks
        assert before > 4 * FLOOR_BLOCKS

        def asked_and_shrunk() -> bool:
            last.until_ended(*(last.start(OTHER, prompt, SAMPLING) for prompt in PROMPTS))
            return use_of(last).kv_blocks < before

        assert eventually(asked_and_shrunk, within_s=PATIENCE_S)
