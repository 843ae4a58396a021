"""Threads that are kept ready, so that urgent work does not wait for a thread to start.

Starting a thread takes the interpreter's lock several times: beside a thread that computes, a millisecond or
more. Waking one takes it once. Unlike those of `ThreadPoolExecutor`, these threads are daemons, have no
limit, and end when idle.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

#: An idle thread ends after so long.
IDLE_S = 60.0

log = logging.getLogger(__name__)


class ThreadTask:
    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act
        self._running = threading.Lock()  #: held until the end; an event takes longer to create
        self._running.acquire()

    def run(self) -> None:
        act, self._act = self._act, None  # freed at the end
        try:
            if act is not None:
                act()
        finally:
            self._running.release()

    def join(self) -> None:
        with self._running:
            pass


class StandingThreads:
    """As many threads as there were tasks at once. Any thread may start a task."""

    def __init__(self, name: str, idle_s: float = IDLE_S, begin: Callable[[], None] = lambda: None) -> None:
        """Every thread calls `begin` once, before its first task. An exception is logged; tasks still run."""
        self._name, self._idle_s, self._begin = name, idle_s, begin
        self._tasks: SimpleQueue[ThreadTask] = SimpleQueue()
        #: Idle threads, minus the tasks that none of them has taken yet.
        self._num_idle = 0
        self._lock = threading.Lock()  #: guards `_num_idle`

    def start(self, act: Callable[[], None]) -> ThreadTask:
        """Run `act` on a thread at once; an exception ends that. Raises RuntimeError: none can be started."""
        task = ThreadTask(act)
        with self._lock:
            is_one_idle = self._num_idle > 0
            self._num_idle -= is_one_idle
        if not is_one_idle:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._tasks.put(task)
        return task

    def _work(self) -> None:
        try:
            self._begin()
        except Exception:  # other threads wait for the task, which fails by itself
            log.exception("thread_begins_badly name=%s", self._name)
        while True:
            try:
                task = self._tasks.get(timeout=self._idle_s)
            except Empty:
                with self._lock:
                    if self._num_idle:  # else a task was put for an idle thread
                        self._num_idle -= 1
                        return
                continue
            task.run()
            del task
            with self._lock:
                self._num_idle += 1
