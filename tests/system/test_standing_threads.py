"""Threads that stand ready for whatever is to be done at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from weakref import ref

import pytest

from hearth.system.standing_threads import StandingThreads
from tests.store.stored import PATIENCE_S


def until_ended(threads: StandingThreads, *acts: Callable[[], None]) -> None:
    for task in [threads.start(act) for act in acts]:
        task.join()


def test_tasks_that_follow_each_other_need_one_thread() -> None:
    threads, idents = StandingThreads("test"), list[int]()

    for _ in range(5):
        until_ended(threads, lambda: idents.append(threading.get_ident()))
        while not threads._num_idle:  # it tells of its end before it stands ready again
            time.sleep(0.001)

    assert len(idents) == 5
    assert len(set(idents)) == 1


def test_every_thread_begins_once_before_its_first_task() -> None:
    """A device is set for a thread, whatever it is to do then."""
    told, both = list[tuple[str, int]](), threading.Barrier(2, timeout=PATIENCE_S)

    def tell(what: str) -> None:
        told.append((what, threading.get_ident()))

    def act() -> None:
        both.wait()
        tell("act")

    threads = StandingThreads("test", begin=lambda: tell("begin"))
    until_ended(threads, act, act)
    until_ended(threads, act, act)

    acted = [thread for what, thread in told if what == "act"]
    begun = [thread for what, thread in told if what == "begin"]
    assert len(acted) == 4
    assert sorted(begun) == sorted(set(acted))
    assert all(told.index(("begin", one)) < told.index(("act", one)) for one in begun)


def test_tasks_wait_for_no_other() -> None:
    threads, both = StandingThreads("test"), threading.Barrier(2, timeout=PATIENCE_S)
    until_ended(threads, lambda: None)

    until_ended(threads, lambda: both.wait() and None, lambda: both.wait() and None)


def test_a_thread_that_has_nothing_to_do_ends_and_another_comes() -> None:
    threads, ends = StandingThreads("test-short", idle_s=0.01), list[str]()
    until_ended(threads, lambda: None)
    for thread in threading.enumerate():
        if thread.name == "test-short":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    until_ended(threads, lambda: ends.append("done"))

    assert ends == ["done"]


def test_an_task_that_has_ended_holds_nothing() -> None:
    class Held:
        def act(self) -> None:
            pass

    held = Held()
    task = StandingThreads("test").start(held.act)
    task.join()
    seen = ref(held)
    del held
    give_up_s = time.monotonic() + PATIENCE_S
    while seen() is not None:  # it tells of its end before it lets go
        assert time.monotonic() < give_up_s, "the task still holds what it was for"
        time.sleep(0.001)


def test_an_task_for_which_there_can_be_no_thread_is_never_done(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, done = StandingThreads("test"), list[str]()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            threads.start(lambda: done.append("refused"))

    until_ended(threads, lambda: done.append("taken"))

    assert done == ["taken"]


def test_an_task_is_done_and_ends_also_on_a_thread_that_cannot_begin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As if its device were lost: other threads would wait for the task for ever."""

    def lost() -> None:
        raise RuntimeError("the device is lost")

    done = list[str]()
    until_ended(StandingThreads("test", begin=lost), lambda: done.append("done"))
    assert done == ["done"]
    assert "thread_begins_badly name=test" in caplog.text
