"""Who waits for a first token on this worker, so that work which can wait gives way. Serves nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class FirstTokens:
    """Requests that have no token yet. Mutable; the step thread alone writes, any thread gives way."""

    def __init__(self) -> None:
        self._runs: set[int] = set()
        self._are_all_served = threading.Event()
        self._are_all_served.set()

    def awaited(self, run: int) -> None:
        """Note a request that has come."""
        self._runs.add(run)
        self._are_all_served.clear()

    def served(self, run: int) -> None:
        """Note that a request has its first token, or has ended without."""
        if run in self._runs:
            self._runs.discard(run)
            if not self._runs:
                self._are_all_served.set()

    def give_way(self, most_s: float) -> Callable[[], None]:
        """Return what waits until nobody waits; all of its calls together for at most so long from now on.

        A worker whose requests never cease must get to its other work as well.
        """
        until_s = time.monotonic() + most_s
        return lambda: self._wait(until_s - time.monotonic())

    def _wait(self, most_s: float) -> None:
        if most_s > 0.0:
            self._are_all_served.wait(min(most_s, threading.TIMEOUT_MAX))
