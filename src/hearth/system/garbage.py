"""When Python's garbage collector runs: while the process is idle.

By default it runs whenever 700 more containers were allocated than freed, and stops all threads meanwhile. A
young collection visits every element of young lists: 3 to 10 ms with long prompts. A full one visits
everything, torch included: 140 ms. It finds next to nothing, since Hearth's objects are freed by their
reference counts.

Hearth's own processes (`collect_when_idle`) freeze all objects that exist once they are ready, and collect
when they are idle (`collect`). A process that is never idle collects after `MAX_YOUNG` new containers, and
that is counted. So does the keeper, whose threads do not know when all of them are idle.

In a user's process (`postponed`) nothing is frozen: any object may become garbage, unused models included.
Collections are postponed while requests run, up to `MAX_YOUNG` containers; then the user's thresholds return.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: New containers after which a busy process collects, for up to 25 ms. Five hundred streams that reach a
#: gateway at once allocate that many; as garbage they would be ten megabytes.
MAX_YOUNG = 100_000
#: An idle process with fewer new containers does not collect.
MIN_YOUNG = 700
#: A process collects after so long without work.
QUIET_S = 0.2


@dataclass(slots=True)
class LateCollections:
    """Collections while the process was busy. Mutable; written by the collector, one call at a time."""

    num: int = 0
    longest_s: float = 0.0
    is_chosen: bool = False  #: the running collection was requested by `collect`, and is not counted
    began_s: float = 0.0  #: of the running collection

    def note(self, phase: str, _info: dict[str, int]) -> None:
        """Count a collection; one of `gc.callbacks`. Takes no lock: the allocating thread may hold it."""
        if phase == "start":
            self.began_s = time.perf_counter()
        elif not self.is_chosen:
            self.num += 1
            self.longest_s = max(self.longest_s, time.perf_counter() - self.began_s)


#: Those of this process, since it was ready.
LATE_COLLECTIONS = LateCollections()


@contextmanager
def collect_when_idle() -> Iterator[None]:
    """Freeze all objects, and collect only by `collect` or after `MAX_YOUNG` containers. Existing garbage is
    frozen, too: collecting it would delay the start, and it does not grow.
    """
    given, was_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.freeze()
    gc.set_threshold(MAX_YOUNG, *given[1:])
    gc.callbacks.append(LATE_COLLECTIONS.note)
    try:
        yield
    finally:
        gc.callbacks.remove(LATE_COLLECTIONS.note)
        gc.set_threshold(*given)
        if not was_frozen:
            gc.unfreeze()


def is_due() -> bool:
    """True if an idle process should `collect`; always False outside of `collect_when_idle`."""
    return LATE_COLLECTIONS.note in gc.callbacks and gc.get_count()[0] >= MIN_YOUNG


def collect() -> None:
    """Collect young objects, and now and then all that are not frozen. For an idle process."""
    is_all_due = gc.get_count()[2] >= gc.get_threshold()[2]
    LATE_COLLECTIONS.is_chosen = True
    try:
        gc.collect(2 if is_all_due else 1)
    finally:
        LATE_COLLECTIONS.is_chosen = False


class _Postponements:
    def __init__(self) -> None:
        #: Reentrant: a request that is garbage ends wherever the collector runs, which may be in here.
        self._lock = threading.RLock()
        self._num_open = 0
        self._given: tuple[int, int, int] | None = None  #: the user's thresholds; None: they are in force

    def begin(self) -> None:
        with self._lock:
            self._num_open += 1
            given = gc.get_threshold()
            if self._num_open == 1 and 0 < given[0] < MAX_YOUNG:  # 0: the user wants no collections at all
                self._given = given
                gc.set_threshold(MAX_YOUNG, *given[1:])

    def end(self) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open or self._given is None:
                return
            given, self._given = self._given, None
            if gc.get_threshold() == (MAX_YOUNG, *given[1:]):  # else the user has changed them meanwhile
                gc.set_threshold(*given)


_postponements = _Postponements()


@contextmanager
def postponed() -> Iterator[None]:
    """Postpone collections in a user's process. Threads may overlap."""
    _postponements.begin()
    try:
        yield
    finally:
        _postponements.end()
