"""Who gives way when somebody needs room: the order, and what is never touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hearth.core.errors import DeviceError
from hearth.core.messages import HostingFailed, ModelUse
from hearth.core.types import Hold
from hearth.engine.engine import Engine
from hearth.store.format.manifest import read_manifest
from tests.engine.harness import assert_greedy, prompts_for
from tests.worker.harness import greedy
from tests.worker.test_disturbed import (
    CONTEXT,
    PENALISED_AND_BIASED,
    SETTINGS,
    VOCABULARY,
    Player,
    playing,
)

A, B, C = "llama-gqa", "qwen3", "neox-parallel"
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", ["arena", "mapped-finely"])]


@contextmanager
def worker(kind: str, root: Path, *promised: str, spare_bytes: int = 0) -> Iterator[Player]:
    """With room for the promises of these, and something to spare."""
    budget_bytes = sum(map(SETTINGS[kind].promise_bytes, promised)) + spare_bytes
    with playing(kind, budget_bytes, root, seed=0) as player:
        yield player


def uses(player: Player) -> dict[str, ModelUse]:
    return {str(use.model): use for use in player.gateway.ping().models}


def is_whole(use: ModelUse) -> bool:
    return use.weights_bytes == use.total_bytes


def load(player: Player, *names: str) -> None:
    for name in names:
        player.host(name)
        player.gateway.ask(name, [1, 2, 3], greedy(2, ignore_eos=True))


def fill(player: Player, name: str, num_requests: int = 6) -> list[int]:
    """Ask so much at once that KV has to grow; returns the runs."""
    prompts = prompts_for(VOCABULARY, [30] * num_requests, seed=num_requests)
    return [player.gateway.start(name, prompt, greedy(30, ignore_eos=True)) for prompt in prompts]


def test_what_is_retained_goes_before_what_is_warm(kind: str, tmp_path: Path) -> None:
    with worker(kind, tmp_path, A, B, C) as player:
        load(player, A, B, C)
        player.gateway.set_hold(B, Hold.RETAINED)

        player.gateway.until_ended(*fill(player, C, num_requests=12))

        there = uses(player)
        assert is_whole(there[A])
        assert not is_whole(there[B])


def test_running_requests_take_retained_weights_before_anybody_is_preempted(
    kind: str, tmp_path: Path
) -> None:
    with worker(kind, tmp_path, A, B) as player:
        load(player, A, B)
        player.gateway.set_hold(A, Hold.RETAINED)

        answers = player.gateway.until_ended(*fill(player, B, num_requests=8))

        assert not is_whole(uses(player)[A])
        assert max(answer.num_admissions for answer in answers) == 1


def test_a_request_whose_table_has_no_room_is_answered_all_the_same(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with worker(kind, tmp_path, A) as player:
        load(player, A)
        always_bytes = uses(player)[A].tables_bytes
        expected = player.gateway.ask(A, [5, 6, 7], PENALISED_AND_BIASED).tokens
        runs = fill(player, A, num_requests=20)
        while len(player.gateway.answers[runs[0]].tokens) < 10:  # until KV has taken all there is
            player.gateway.hear()

        more = [player.gateway.start(A, [5, 6, 7], PENALISED_AND_BIASED) for _ in range(12)]

        assert all(answer.tokens == expected for answer in player.gateway.until_ended(*more))
        assert all(len(answer.tokens) == 30 for answer in player.gateway.until_ended(*runs))
        told = player.gateway.ping()
        assert told.fallbacks["tables"] > 0
        assert told.models[0].tables_bytes == always_bytes
        assert caplog.text.count("fallback tables=torch") == 1


def test_a_table_goes_back_when_its_request_is_cancelled(kind: str, tmp_path: Path) -> None:
    with worker(kind, tmp_path, A, spare_bytes=1 << 20) as player:
        load(player, A)
        always_bytes = uses(player)[A].tables_bytes
        run = player.gateway.start(A, [5, 6, 7], PENALISED_AND_BIASED)
        while uses(player)[A].tables_bytes == always_bytes:
            if player.gateway.answers[run].is_ended:  # faster than we looked
                run = player.gateway.start(A, [5, 6, 7], PENALISED_AND_BIASED)
        player.gateway.cancel(run)

        assert uses(player)[A].tables_bytes == always_bytes


def test_pinned_weights_stay_whoever_wants_the_room(kind: str, tmp_path: Path) -> None:
    with worker(kind, tmp_path, A, B) as player:
        load(player, A, B)
        player.gateway.set_hold(A, Hold.PINNED)

        player.gateway.until_ended(*fill(player, B, num_requests=12))

        there = uses(player)
        assert (there[A].hold, is_whole(there[A])) == (Hold.PINNED, True)


def test_a_model_whose_tail_was_taken_gets_it_back_for_its_next_request(kind: str, tmp_path: Path) -> None:
    with worker(kind, tmp_path, A, B) as player:
        load(player, A, B)
        player.gateway.set_hold(A, Hold.RETAINED)
        num_requests = 4
        while is_whole(uses(player)[A]):
            num_requests += 1
            player.gateway.until_ended(*fill(player, B, num_requests))
        num_loads = len(player.gateway.loads)

        answer = player.gateway.ask(A, [5, 6, 7], greedy(12, ignore_eos=True))

        assert_greedy(A, [5, 6, 7], answer.tokens)
        (again,) = player.gateway.loads[num_loads:]
        assert again.reused_bytes > 0
        assert sum(rung.num_bytes for rung in again.rungs) > 0
        assert is_whole(uses(player)[A])


def test_kv_never_grows_beyond_its_ceiling_nor_takes_from_others_in_vain(kind: str, tmp_path: Path) -> None:
    with worker(kind, tmp_path, A, B, spare_bytes=1 << 20) as player:
        setting = player.setting
        floor_bytes = setting.floor_bytes(A)
        ceiling_bytes = 2 * floor_bytes
        load(player, B)
        player.gateway.load(
            A,
            setting.where(A),
            kv_floor_bytes=floor_bytes,
            max_kv_bytes=ceiling_bytes,
            max_context=CONTEXT,
        )
        num_blocks = 0
        runs = fill(player, A, num_requests=20)
        while not all(player.gateway.answers[run].is_ended for run in runs):
            player.gateway.hear()
            num_blocks = max(num_blocks, uses(player)[A].kv_blocks)

        assert 0 < num_blocks <= ceiling_bytes // setting.block_bytes(A)
        assert is_whole(uses(player)[B])


def test_what_is_promised_is_had_though_others_have_borrowed_it(kind: str, tmp_path: Path) -> None:
    """B has grown into the memory that is promised to A; A comes back, and some of B's requests wait."""
    with worker(kind, tmp_path, A, B) as player:
        load(player, A, B)
        player.gateway.set_hold(A, Hold.RETAINED)
        greedy_ones = fill(player, B, num_requests=12)
        while not player.gateway.answers[greedy_ones[0]].tokens:
            player.gateway.hear()

        answer = player.gateway.ask(A, [5, 6, 7], greedy(40, ignore_eos=True))
        player.gateway.until_ended(*greedy_ones)

        assert_greedy(A, [5, 6, 7], answer.tokens)
        assert all(len(player.gateway.answers[run].tokens) == 30 for run in greedy_ones)


def test_a_request_that_was_preempted_for_another_model_may_be_cancelled(kind: str, tmp_path: Path) -> None:
    with worker(kind, tmp_path, A, B) as player:
        load(player, A, B)
        player.gateway.set_hold(A, Hold.RETAINED)
        runs = fill(player, B, num_requests=12)
        while len(player.gateway.answers[runs[0]].tokens) < 18:
            player.gateway.hear()

        back = player.gateway.start(A, [5, 6, 7], greedy(40, ignore_eos=True))
        for run in runs:
            player.gateway.cancel(run)

        assert len(player.gateway.ask(B, [5, 6, 7], greedy(40, ignore_eos=True)).tokens) == 40
        assert len(player.gateway.until_ended(back)[0].tokens) == 40


def test_a_model_that_breaks_while_it_gives_way_is_the_one_that_fails(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worker(kind, tmp_path, A, B) as player:
        load(player, A, B)
        player.gateway.until_ended(*fill(player, A))
        broken, clear = read_manifest(player.setting.where(A)).arch, Engine.clear

        def breaks(engine: Engine, extent: range, **how: bool) -> bool:
            if engine.runner.layers.decoder.arch == broken:
                raise ValueError("something is off")
            return clear(engine, extent, **how)

        monkeypatch.setattr(Engine, "clear", breaks)
        runs = fill(player, B, num_requests=12)

        assert player.gateway.until(HostingFailed).model == A
        assert all(len(answer.tokens) == 30 for answer in player.gateway.until_ended(*runs))
        assert list(uses(player)) == [B]


def test_kv_that_is_promised_and_not_to_be_had_fails_the_model_instead_of_spinning(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worker(kind, tmp_path, A, B) as player:
        load(player, B)
        assert player.gateway.pool is not None
        monkeypatch.setattr(player.gateway.pool.kv, "grow", lambda *_: [])
        player.host(A)
        player.gateway.start(A, [5, 6, 7], greedy(3, ignore_eos=True))

        failed = player.gateway.until(HostingFailed)

        assert (failed.model, failed.label) == (A, DeviceError.label)
        assert "blocks of KV" in failed.reason


def test_kv_goes_back_when_the_pressure_has_gone(kind: str, tmp_path: Path) -> None:
    with worker(kind, tmp_path, A, B) as player:
        load(player, A)
        runs = fill(player, A, num_requests=20)
        most = 0
        while not all(player.gateway.answers[run].is_ended for run in runs):
            player.gateway.hear()
            most = max(most, uses(player)[A].kv_blocks)
        load(player, B)  # it is promised its own, and what is only cached there gives way

        assert uses(player)[A].kv_blocks < most
        assert all(is_whole(use) for use in uses(player).values())
