"""Planned sends of a node go in the order of the plan, one at a time, at the speed of the link."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from hearth.core.types import NodeId
from hearth.store.transfer import send_turns
from hearth.store.transfer.send_turns import MIN_PACED_BYTES, NUM_PACED_BY, PACE, SendLimit, SendTurns

PATIENCE_S = 120.0


class Sender:
    """Sends that begin as `turns` lets them, and end when told."""

    def __init__(self, turns: SendTurns, threads: ThreadPoolExecutor) -> None:
        self._turns, self._threads = turns, threads
        self.begun: list[int] = []
        self._changed = threading.Condition()
        self._ended = {turn: threading.Event() for turn in range(10)}
        self._waits = {turn: threading.Event() for turn in range(10)}

    def send(self, turn: int) -> Future[None]:
        return self._threads.submit(self._send, turn)

    def _send(self, turn: int) -> None:
        with self._turns.taken(turn, 0.01, self._waits[turn].set):
            with self._changed:
                self.begun.append(turn)
                self._changed.notify_all()
            assert self._ended[turn].wait(PATIENCE_S)

    def await_waiting(self, turn: int) -> None:
        assert self._waits[turn].wait(PATIENCE_S)

    def await_begun(self, turn: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: turn in self.begun, PATIENCE_S), self.begun

    def end(self, turn: int) -> None:
        self.await_begun(turn)
        self._ended[turn].set()


@pytest.fixture
def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4)


def test_sends_go_one_at_a_time_in_the_order_of_the_plan(threads: ThreadPoolExecutor) -> None:
    sender = Sender(SendTurns(), threads)
    with threads:
        sends = [sender.send(5)]
        sender.await_begun(5)
        for turn in (4, 3):
            sends.append(sender.send(turn))
            sender.await_waiting(turn)
        assert sender.begun == [5]
        for turn in (5, 3, 4):
            sender.end(turn)
        for send in sends:
            send.result(PATIENCE_S)
    assert sender.begun == [5, 3, 4]


def test_the_link_stays_free_for_an_earlier_turn_that_is_announced(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_turns, "MIN_TURN_S", PATIENCE_S)
    sender = Sender(turns := SendTurns(), threads)
    with threads:
        with turns.announced(1):
            later = sender.send(2)
            earlier = sender.send(1)
            sender.end(1)
            earlier.result(PATIENCE_S)
        sender.end(2)
        later.result(PATIENCE_S)
    assert sender.begun == [1, 2]


def test_the_pace_follows_the_fastest_of_the_last_sends_to_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, near, far = SendTurns(), NodeId("near"), NodeId("far")
    assert turns.max_bytes_per_s(near) is None
    turns.sent(near, MIN_PACED_BYTES, 2.0)
    turns.sent(near, MIN_PACED_BYTES, 1.0)
    turns.sent(near, MIN_PACED_BYTES - 1, 0.001)  # it fits into buffers
    assert turns.max_bytes_per_s(near) == int(PACE * MIN_PACED_BYTES)
    assert turns.max_bytes_per_s(far) is None
    for _ in range(NUM_PACED_BY):
        turns.sent(near, MIN_PACED_BYTES, 4.0)
    assert turns.max_bytes_per_s(near) == int(PACE * MIN_PACED_BYTES / 4), "the link has become slower"
    monkeypatch.setattr(send_turns, "PACED_FOR_S", 0.0)
    assert turns.max_bytes_per_s(near) is None, "it may be faster by now"


def test_all_connections_together_send_no_faster_than_the_limit() -> None:
    limit = SendLimit(1000)
    assert limit.book(500, 10.0) == 0.0
    assert limit.book(2000, 10.25) == 0.25
    assert limit.book(100, 10.5) == 2.0
    assert limit.book(100, 20.0) == 0.0, "a pause saves up nothing"
    assert limit.book(100, 20.0) == pytest.approx(0.1)


def test_a_receiver_that_announced_and_does_not_come_is_waited_for_once(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_turns, "MIN_TURN_S", 0.05)
    sender = Sender(turns := SendTurns(), threads)
    with threads, turns.announced(1):
        for turn in (2, 3):
            send = sender.send(turn)
            sender.end(turn)
            send.result(PATIENCE_S)
            monkeypatch.setattr(send_turns, "MAX_FREE_SHARE", 1e9)
    assert sender.begun == [2, 3]
