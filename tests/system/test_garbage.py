"""When a process collects garbage: while it is idle, or late, and a user's process as the user has set it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from hearth.system import garbage
from hearth.system.garbage import LATE_COLLECTIONS, collect_when_idle, postponed

OWNERS = (650, 9, 8)  #: unusual thresholds


class Cycle:
    """An object that refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def owner() -> Iterator[None]:
    """A process whose owner has chosen when garbage is collected."""
    given = gc.get_threshold()
    gc.collect()  # so that few are young
    gc.set_threshold(*OWNERS)
    yield
    gc.set_threshold(*given)


def lost_cycle() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def grow(num_containers: int) -> list[list[object]]:
    return [[] for _ in range(num_containers)]


def test_a_process_of_ours_collects_when_it_is_told_to_and_not_by_itself() -> None:
    num_late = LATE_COLLECTIONS.num
    with collect_when_idle():
        lost, _live = lost_cycle(), grow(20 * OWNERS[0])
        assert lost() is not None
        assert garbage.is_due()
        garbage.collect()
        assert lost() is None
        assert not garbage.is_due()
    assert LATE_COLLECTIONS.num == num_late


def test_what_has_lived_for_long_is_looked_at_as_rarely_as_by_python_itself() -> None:
    generations = list[int]()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    with collect_when_idle():
        old = Cycle()
        lost = weakref.ref(old)
        garbage.collect()  # which it survives
        del old
        gc.callbacks.append(note)
        try:
            while lost() is not None and len(generations) < 100:
                garbage.collect()
        finally:
            gc.callbacks.remove(note)
    assert generations == [1] * (OWNERS[2] - 1) + [2]


def test_python_itself_would_have_collected() -> None:
    lost, _live = lost_cycle(), grow(20 * OWNERS[0])
    assert lost() is None
    assert not garbage.is_due()


def test_a_process_that_grows_beyond_the_bound_collects_late_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "MAX_YOUNG", 5_000)
    num_late = LATE_COLLECTIONS.num
    with collect_when_idle():
        lost, _live = lost_cycle(), grow(6_000)
        assert lost() is None
        assert LATE_COLLECTIONS.num == num_late + 1
        assert LATE_COLLECTIONS.longest_s > 0


def test_what_exists_when_a_process_is_ready_is_never_looked_at_again() -> None:
    lives_long = Cycle()
    with collect_when_idle():
        looked_at = {id(one) for one in gc.get_objects()}  # not those that are frozen
        assert id(lives_long) not in looked_at
    assert gc.get_threshold() == OWNERS
    assert LATE_COLLECTIONS.note not in gc.callbacks


def test_a_strangers_process_puts_collections_off_and_freezes_nothing() -> None:
    exists = Cycle()
    with postponed():
        lost, live = lost_cycle(), grow(20 * OWNERS[0])
        assert lost() is not None
        assert id(exists) in {id(one) for one in gc.get_objects()}  # which excludes what is frozen
    live += grow(1)
    assert lost() is None
    assert gc.get_threshold() == OWNERS


def test_collections_are_put_off_until_the_last_of_several_threads_is_done() -> None:
    may_end = threading.Event()
    has_begun = threading.Event()

    def work() -> None:
        with postponed():
            has_begun.set()
            may_end.wait()

    thread = threading.Thread(target=work)
    with postponed():
        thread.start()
        has_begun.wait()
    assert gc.get_threshold()[0] == garbage.MAX_YOUNG
    may_end.set()
    thread.join()
    assert gc.get_threshold() == OWNERS


def test_an_owner_who_wants_fewer_collections_or_none_has_them_so() -> None:
    for chosen in (0, 2 * garbage.MAX_YOUNG):
        gc.set_threshold(chosen, 5, 5)
        with postponed():
            assert gc.get_threshold() == (chosen, 5, 5)
        assert gc.get_threshold() == (chosen, 5, 5)


def test_what_an_owner_sets_meanwhile_holds() -> None:
    with postponed():
        gc.set_threshold(1_234, 5, 5)
    assert gc.get_threshold() == (1_234, 5, 5)


def test_a_stream_that_is_garbage_may_end_while_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def stream() -> Iterator[None]:
        with postponed():
            yield

    class Reader:
        def __init__(self) -> None:
            self.self, self.stream = self, stream()
            next(self.stream)

    def thresholds() -> tuple[int, int, int]:
        gc.collect()  # as an allocation may
        return get_threshold()

    def begin() -> None:
        with postponed():
            found.append(get_threshold()[0])

    get_threshold, found = gc.get_threshold, list[int]()
    Reader()
    monkeypatch.setattr(gc, "get_threshold", thresholds)
    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    thread.join(60)
    assert found == [garbage.MAX_YOUNG], "it waits for itself"
    assert get_threshold() == OWNERS
