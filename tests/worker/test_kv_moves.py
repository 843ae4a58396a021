"""Requests that leave a pipeline take their KV along. What does not come is computed again."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hearth.core.messages import KvMove, SendKv
from hearth.core.types import ModelId
from hearth.engine import runner
from hearth.engine.pending_step import PendingCopy
from hearth.policy.turns.turn_policy import TurnRules
from hearth.worker import kv_moves
from tests.store.stored import PATIENCE_S
from tests.worker.harness import greedy
from tests.worker.in_process import LoopGateway
from tests.worker.test_stage_member import CONFIG, NAME, PROMPTS, Workers, alone, arena, pages, workers
from tests.worker.test_staged_starts import STAGES, NewPool, await_whole, host

NUM_TOKENS = 20
BLOCK_TOKENS = CONFIG.block_tokens or 0


@contextmanager
def whole_behind_stages(
    root: Path, new_pool: NewPool = arena, turns: TurnRules | None = None, nodes: Sequence[str] = ()
) -> Iterator[Workers]:
    with workers(root, new_pool, turns=turns, nodes=nodes) as both:
        host(both)
        for gateway in both.gateways:
            await_whole(gateway)
        yield both


def begun(first: LoopGateway, prompts: Sequence[Sequence[int]], salt: bytes = b"") -> list[int]:
    """Runs in stages, each with a token or more."""
    runs = [first.start(STAGES, prompt, greedy(NUM_TOKENS), salt=salt) for prompt in prompts]
    while not all(first.answers[run].tokens for run in runs):
        first.hear()
    return runs


def left(both: Workers, runs: Sequence[int], target: int) -> list[list[int]]:
    """Have runs send their KV and leave the stages; return their tokens so far."""
    first = both.gateways[0]
    for run in runs:
        first.inbox.put(SendKv(ModelId(STAGES), run, both.names[target]))
        first.cancel(run)
    first.ping()
    return [first.answers[run].tokens for run in runs]


def move_of(both: Workers, run: int, wait_s: float = PATIENCE_S) -> KvMove:
    return KvMove(run, tuple(both.names), wait_s)


def full_tokens(prompt: Sequence[int], output: Sequence[int]) -> int:
    """How many tokens are found, if all are that a worker does not have to compute."""
    return (len(prompt) + len(output) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("new_pool", "turns", "number"), [(arena, None, 0), (pages, None, 1), (arena, TurnRules(), 1)]
)
def test_requests_switch_with_their_kv(
    tmp_path: Path, new_pool: NewPool, turns: TurnRules | None, number: int
) -> None:
    with whole_behind_stages(tmp_path, new_pool, turns) as both:
        whole = both.gateways[number]
        runs = begun(both.gateways[0], PROMPTS)
        outputs = left(both, runs, number)
        moved, told = list[tuple[int, int]](), list[list[int]]()
        for prompt, output, run in zip(PROMPTS, outputs, runs, strict=True):
            if len(output) < NUM_TOKENS:
                again = whole.start(NAME, prompt, greedy(NUM_TOKENS), output=output, kv=move_of(both, run))
                (answer,) = whole.until_ended(again)
                told.append([*output, *answer.tokens])
                moved.append((answer.num_cached_tokens, full_tokens(prompt, output)))
            else:  # far ahead of the others
                moved.append((0, 0))
                told.append(output)
        assert all(found <= full for found, full in moved), f"{moved}"
        if turns is None:  # else the model may have waited for its turn
            assert moved[1][0] == moved[1][1], "of a request that was preempted, less may be left"
    assert told == alone(tmp_path, PROMPTS, greedy(NUM_TOKENS))


def test_kv_crosses_nodes(tmp_path: Path) -> None:
    with whole_behind_stages(tmp_path, nodes=("n1", "n2")) as both:
        (run,) = begun(both.gateways[0], PROMPTS[1:2])
        (output,) = left(both, [run], 1)
        whole = both.gateways[1]
        again = whole.start(NAME, PROMPTS[1], greedy(NUM_TOKENS), output=output, kv=move_of(both, run))
        (answer,) = whole.until_ended(again)
        assert whole.kv_moves[again].num_tokens == full_tokens(PROMPTS[1], output)
        assert whole.kv_moves[again].num_bytes > 0
    assert [[*output, *answer.tokens]] == alone(tmp_path, PROMPTS[1:2], greedy(NUM_TOKENS))


@pytest.mark.parametrize("lost", [0, 1])
def test_without_a_sender_all_is_computed_again(tmp_path: Path, lost: int) -> None:
    with whole_behind_stages(tmp_path) as both:
        first, whole = both.gateways[0], both.gateways[1 - lost]
        runs = begun(first, PROMPTS[:3])
        both.gateways[lost].drop(STAGES)
        both.gateways[lost].ping()
        outputs = [first.answers[run].tokens for run in runs]
        for run in runs:
            first.inbox.put(SendKv(ModelId(STAGES), run, both.names[1 - lost]))
        rest = [
            whole.start(NAME, prompt, greedy(NUM_TOKENS), output=list(output), kv=move_of(both, run, 0.05))
            for prompt, output, run in zip(PROMPTS, outputs, runs, strict=False)
        ]
        told_before = [list(output) for output in outputs]
        while not all(whole.answers[run].is_ended for run in rest):
            whole.hear()  # perhaps that it was cut off
        assert all(whole.kv_moves[run].num_tokens == 0 for run in rest)
        told = [[*before, *whole.answers[run].tokens] for before, run in zip(told_before, rest, strict=True)]
    assert told == alone(tmp_path, PROMPTS[:3], greedy(NUM_TOKENS))


def test_of_a_sender_that_ends_half_way_the_first_blocks_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, read, num_claimed = kv_moves._send, kv_moves._Receiver._read, threading.Semaphore(0)

    def reading(*arguments: Any) -> kv_moves.KvPart | None:
        num_claimed.release()
        return read(*arguments)

    def breaking(*arguments: Any) -> None:
        *others, copies = arguments
        send(*others, _Broken(copies[:2]))

    class _Broken(list[PendingCopy]):
        def __iter__(self) -> Iterator[PendingCopy]:
            yield from super().__iter__()
            num_claimed.acquire()
            raise RuntimeError("the device broke")

    monkeypatch.setattr(runner, "_COPY_BYTES", 1)  # a block at a time
    monkeypatch.setattr(kv_moves, "_PIECE_BYTES", 1)
    monkeypatch.setattr(kv_moves, "_send", breaking)
    monkeypatch.setattr(kv_moves._Receiver, "_read", reading)
    with whole_behind_stages(tmp_path) as both:
        (run,) = begun(both.gateways[0], PROMPTS[1:2])
        (output,) = left(both, [run], 1)
        whole = both.gateways[1]
        again = whole.start(NAME, PROMPTS[1], greedy(NUM_TOKENS), output=output, kv=move_of(both, run))
        (answer,) = whole.until_ended(again)
        assert whole.kv_moves[again].num_tokens == answer.num_cached_tokens == 2 * BLOCK_TOKENS
    assert [[*output, *answer.tokens]] == alone(tmp_path, PROMPTS[1:2], greedy(NUM_TOKENS))


def test_kv_that_has_come_is_found_by_its_key_group_alone(tmp_path: Path) -> None:
    with whole_behind_stages(tmp_path) as both:
        prompt, whole = PROMPTS[1], both.gateways[1]
        (run,) = begun(both.gateways[0], [prompt], salt=b"ours")
        (output,) = left(both, [run], 1)
        options = greedy(NUM_TOKENS)
        again = whole.start(NAME, prompt, options, output=output, kv=move_of(both, run), salt=b"ours")
        whole.until_ended(again)
        theirs, ours = (
            whole.until_ended(whole.start(NAME, prompt, options, salt=salt))[0]
            for salt in (b"theirs", b"ours")
        )
    assert (theirs.num_cached_tokens, ours.num_cached_tokens) == (0, full_tokens(prompt, ()))
    assert theirs.tokens == ours.tokens


def test_a_request_that_is_cancelled_while_its_kv_comes_is_not_started(tmp_path: Path) -> None:
    with whole_behind_stages(tmp_path) as both:
        whole = both.gateways[1]
        run = whole.start(NAME, PROMPTS[1], greedy(NUM_TOKENS), kv=move_of(both, 1000, wait_s=0.05))
        whole.cancel(run)
        assert whole.ask(NAME, PROMPTS[1], greedy(NUM_TOKENS)).tokens
        assert not whole.answers[run].tokens
        assert run not in whole.kv_moves


def test_a_request_that_has_not_begun_sends_nothing_and_says_so(tmp_path: Path) -> None:
    with whole_behind_stages(tmp_path) as both:
        first, whole = both.gateways
        first.inbox.put(SendKv(ModelId(STAGES), 1000, both.names[1]))  # no such run
        again = whole.start(NAME, PROMPTS[1], greedy(NUM_TOKENS), kv=move_of(both, 1000))
        (answer,) = whole.until_ended(again)
        assert whole.kv_moves[again].num_tokens == whole.kv_moves[again].num_bytes == 0
    assert [answer.tokens] == alone(tmp_path, PROMPTS[1:2], greedy(NUM_TOKENS))
