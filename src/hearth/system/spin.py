"""Spins for a while before a thread sleeps, where a device waits for what the thread will be told.

A thread that sleeps runs some 50 us late and slowly at first. It spins in C, so that other threads have the
interpreter.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Generic, TypeVar

from hearth.system.cpus import num_usable_cores
from hearth.system.native_code import native_library, remedy_for

#: For how long a thread spins, at most: some steps of a small model. Nothing else may need the core.
SPIN_S = 0.01
#: On fewer cores, threads that spin would take them from those that work.
MIN_CORES = 8

T = TypeVar("T")

log = logging.getLogger(__name__)


class Spin:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._until_changed = library.hearth_spin_until_changed
        self._until_changed.argtypes = (ctypes.POINTER(ctypes.c_int64), ctypes.c_int64, ctypes.c_int64)
        self._until_readable = library.hearth_spin_until_readable
        self._until_readable.argtypes = (ctypes.c_int, ctypes.c_int64)
        self._until_changed.restype = self._until_readable.restype = None

    def until_changed(self, word: ctypes.c_int64, seen: int, most_s: float) -> None:
        """Spin while a word has the value `seen`."""
        self._until_changed(word, seen, int(most_s * 1e9))

    def until_readable(self, descriptor: int) -> None:
        """Spin while a read of a descriptor would block, at most for SPIN_S."""
        self._until_readable(descriptor, int(SPIN_S * 1e9))


@cache
def native_spin() -> Spin | None:
    """Return what spins in C; None: threads have to sleep. The first call compiles it."""
    num_cores = num_usable_cores()
    if num_cores < MIN_CORES:
        log.info("fallback stages=sleep reason=`%d cores, at least %d`", num_cores, MIN_CORES)
        return None
    try:
        return Spin(native_library(Path(__file__).with_suffix(".c")))
    except OSError as error:
        log.warning("fallback stages=sleep reason=`%s` remedy=`%s`", error, remedy_for(error))
        return None


class SpinningQueue(Generic[T]):
    """A queue whose reader may spin before it sleeps. Any thread puts, one gets."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[T] = SimpleQueue()
        #: Changed behind each `put`. Threads may overwrite each other's change, but put first, so no item is
        #: missed.
        self._word = ctypes.c_int64(0)
        self._spin: Spin | None = None
        self._until_s = 0.0

    def put(self, item: T) -> None:
        self._queue.put(item)
        self._word.value += 1

    def empty(self) -> bool:
        return self._queue.empty()

    def expect_more(self, spin: Spin | None) -> None:
        """Let `get` spin until SPIN_S from now: another item should come soon."""
        self._spin, self._until_s = spin, perf_counter() + SPIN_S

    def get(self, timeout: float | None = None) -> T:
        """Return the next item. Raises Empty after `timeout` seconds."""
        began_s = perf_counter()
        if self._spin is not None and began_s < self._until_s:
            seen, most_s = self._word.value, self._until_s - began_s
            if self._queue.empty():
                self._spin.until_changed(
                    self._word, seen, most_s if timeout is None else min(most_s, timeout)
                )
            if timeout is not None:
                timeout = max(0.0, timeout - (perf_counter() - began_s))
        return self._queue.get(timeout=timeout)
