"""Messages to a thread that sleeps on a pipe."""

from __future__ import annotations

import threading
from queue import Empty

import pytest

from hearth.worker.inbox import Inbox

NUM_THREADS, NUM_MESSAGES = 4, 2000


def test_all_messages_come_each_once_and_those_of_a_thread_in_order() -> None:
    inbox = Inbox[tuple[int, int]]()

    def post(number: int) -> None:
        for at in range(NUM_MESSAGES):
            inbox.put((number, at))

    threads = [threading.Thread(target=post, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    found = [inbox.get(timeout=60.0) for _ in range(NUM_THREADS * NUM_MESSAGES)]
    for thread in threads:
        thread.join()
    assert inbox.empty()
    for number in range(NUM_THREADS):
        assert [at for one, at in found if one == number] == list(range(NUM_MESSAGES))


def test_a_thread_that_waits_for_ever_is_woken_each_time() -> None:
    questions, answers = Inbox[int](), Inbox[int]()

    def answer() -> None:
        while (number := questions.get()) >= 0:
            answers.put(number)

    thread = threading.Thread(target=answer)
    thread.start()
    for number in range(NUM_MESSAGES):
        questions.put(number)
        assert answers.get(timeout=60.0) == number
    questions.put(-1)
    thread.join()


def test_a_timeout_of_years_is_not_too_long() -> None:
    inbox = Inbox[int]()
    threading.Timer(0.05, inbox.put, (7,)).start()
    assert inbox.get(timeout=1e8) == 7


def test_without_a_message_it_is_empty_after_the_timeout() -> None:
    inbox = Inbox[str]()
    with pytest.raises(Empty):
        inbox.get(timeout=0.01)
    inbox.put("a")
    assert not inbox.empty()
    assert inbox.get(timeout=0.0) == "a"
    with pytest.raises(Empty):
        inbox.get(timeout=0.0)
