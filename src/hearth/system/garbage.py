"""When Python looks for garbage in a process that others wait for: once nobody does. Decides nothing else.

The collector looks for objects that only refer to each other. By itself it does so whenever 700 containers
more were made than let go, on whichever thread made the last one, and no thread computes meanwhile. It visits
all young containers and every number in their lists: with long prompts that takes 3 to 10 ms. Now and then it
visits all that there is, torch included: 140 ms. And it finds next to nothing, for what Hearth makes for a
request goes with its last reference.

Hearth's own processes (`collect_when_idle`): what exists when one is ready is frozen, never to be looked at
again, and garbage is looked for when the process has nothing to do (`collect`), which then takes a moment.
One that is never idle collects only when it has grown by `MAX_YOUNG` containers, and that is counted. So does
the keeper, whose threads do not know when all of them rest.

A stranger's process (`postponed`), in which Hearth is a library: nothing is frozen, for what its owner has
may become garbage at any time, a model that nobody refers to included. Collections are put off while requests
are computed, likewise up to `MAX_YOUNG`, and what the owner had set holds again when the last one has ended.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: Containers by which a process may grow before the collector looks at them whoever waits, for up to 25 ms.
#: Five hundred streams that come to a gateway at once are that many; as garbage they would be ten megabytes.
MAX_YOUNG = 100_000
#: Containers that are not worth a look in an idle process.
MIN_YOUNG = 700
#: An idle process looks for garbage after so long without work, so that whoever asks next does not meet it.
QUIET_S = 0.2


@dataclass(slots=True)
class LateCollections:
    """Collections that a process did not choose. Mutable; written by the collector, one call at a time."""

    num: int = 0
    longest_s: float = 0.0
    is_chosen: bool = False  #: the collection that runs, which is then not counted
    began_s: float = 0.0  #: likewise

    def note(self, phase: str, _info: dict[str, int]) -> None:
        """Count a collection, as one of `gc.callbacks`. Takes no lock: whoever allocates may hold it."""
        if phase == "start":
            self.began_s = time.perf_counter()
        elif not self.is_chosen:
            self.num += 1
            self.longest_s = max(self.longest_s, time.perf_counter() - self.began_s)


#: Those of this process, since it was ready.
LATE_COLLECTIONS = LateCollections()


@contextmanager
def collect_when_idle() -> Iterator[None]:
    """Freeze all that exists, and look for garbage only when `collect` is called, or late.

    For a process of Hearth's own that is ready, until it ends. Garbage that exists is frozen, too: to look
    for it would make the process ready later, and it does not grow.
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
    """True if an idle process should `collect`; where Python does so by itself, never."""
    return LATE_COLLECTIONS.note in gc.callbacks and gc.get_count()[0] >= MIN_YOUNG


def collect() -> None:
    """Look for garbage in what has come lately, and now and then in all that is not frozen.

    For a process with nothing to do. As rarely as Python itself looks through all: with many models that
    takes a while, and whoever asks meanwhile has to wait.
    """
    is_all_due = gc.get_count()[2] >= gc.get_threshold()[2]
    LATE_COLLECTIONS.is_chosen = True
    try:
        gc.collect(2 if is_all_due else 1)
    finally:
        LATE_COLLECTIONS.is_chosen = False


class _Postponements:
    """Calls of `postponed` that have not ended, of all threads. Mutable; written under its lock."""

    def __init__(self) -> None:
        #: Requests of several threads overlap, and one that is garbage ends wherever the collector finds it,
        #: which may be in here.
        self._lock = threading.RLock()
        self._num_open = 0
        self._given: tuple[int, int, int] | None = None  #: the owner's thresholds; None: they hold

    def begin(self) -> None:
        with self._lock:
            self._num_open += 1
            given = gc.get_threshold()
            if self._num_open == 1 and 0 < given[0] < MAX_YOUNG:  # 0: the owner wants no collections at all
                self._given = given
                gc.set_threshold(MAX_YOUNG, *given[1:])

    def end(self) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open or self._given is None:
                return
            given, self._given = self._given, None
            if gc.get_threshold() == (MAX_YOUNG, *given[1:]):  # else the owner has set others meanwhile
                gc.set_threshold(*given)


_postponements = _Postponements()


@contextmanager
def postponed() -> Iterator[None]:
    """Put collections off in somebody else's process. Any thread may call it, also while another has."""
    _postponements.begin()
    try:
        yield
    finally:
        _postponements.end()
