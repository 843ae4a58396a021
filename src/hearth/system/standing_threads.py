"""Threads that stand ready, so that nothing urgent waits for one to start. Knows nothing of what they do.

A thread that starts needs the interpreter twice before its first line runs, and so does whoever starts it:
beside a thread that computes, that is a millisecond or more. One that stands needs it once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

log = logging.getLogger(__name__)

#: A thread that had nothing to do for so long ends.
IDLE_S = 60.0

log = logging.getLogger(__name__)


class Errand:
    """Something that a thread does, once. Any thread may wait for its end."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act
        self._under_way = threading.Lock()  #: held until it has ended; an event takes longer to be made
        self._under_way.acquire()

    def run(self) -> None:
        act, self._act = self._act, None  # nothing of it is held once it has ended
        try:
            if act is not None:
                act()
        finally:
            self._under_way.release()

    def join(self) -> None:
        """Return when it has ended."""
        with self._under_way:
            pass


class StandingThreads:
    """As many threads as there were ever errands at once. Any thread may start one."""

    def __init__(self, name: str, idle_s: float = IDLE_S, begin: Callable[[], None] = lambda: None) -> None:
        """Every thread calls `begin` once, before its first errand; what that raises is logged.

        Its errands are done all the same: who waits for one is told by the errand what cannot be done.
        """
        self._name, self._idle_s, self._begin = name, idle_s, begin
        self._errands: SimpleQueue[Errand] = SimpleQueue()
        #: Threads that have nothing to do, less the errands that none of them has taken yet.
        self._num_idle = 0
        self._lock = threading.Lock()  #: guards it: threads end their errands by themselves

    def start(self, act: Callable[[], None]) -> Errand:
        """Have `act` done at once; what it raises ends it, and its thread, as that of any thread.

        Raises RuntimeError if there can be no more threads, and `act` is never done then.
        """
        errand = Errand(act)
        with self._lock:
            is_one_idle = self._num_idle > 0
            self._num_idle -= is_one_idle
        if not is_one_idle:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._errands.put(errand)
        return errand

    def _work(self) -> None:
        try:
            self._begin()
        except Exception:  # an errand that was never done would be waited for, and it meets the same itself
            log.exception("thread_begins_badly name=%s", self._name)
        while True:
            try:
                errand = self._errands.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    if self._num_idle:  # else an errand is on its way to a thread that is idle
                        self._num_idle -= 1
                        return
                continue
            errand.run()
            del errand
            with self._lock:
                self._num_idle += 1
