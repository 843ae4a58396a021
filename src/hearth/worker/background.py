"""Who waits for a first token on this worker, so that work which can wait gives way. Serves nobody.

When the step thread queues a step, so that work which can wait does not contend with it. Queues nothing.

Whoever makes a graph executable holds the driver's lock for a millisecond or two, or until the device is done
with all that it has, and who captures a step takes the interpreter by pieces. Beside a launch both cost the
step as much again; right behind it they cost nothing, for then the host waits for the device.

    step thread    launch |  waits for the step before  | launch |  waits ...
    others                | behind -> graph  |           gives way
"""

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


#: For so long whoever gives way does so for one launch: longer than that of a step without graphs takes.
MAX_LAUNCH_S = 0.02
#: So long behind a launch there is still time for a piece of work before the next one, by the shortest steps.
BEHIND_S = 0.001
#: If no step was launched for so long, none is awaited: the device has nothing to do, or computes long ones.
RECENT_S = 0.01


class StepLaunches:
    """Launches of one worker. Mutable; the step thread alone writes, any thread gives way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  #: guards all of these
        self._begun_s: float | None = None  #: since when a step is being launched; None: none is
        self._ended_s = -RECENT_S  #: when the last one was queued
        self._num_ended = 0

    @property
    def is_launching(self) -> bool:
        """True while a step is being launched."""
        return self._begun_s is not None

    def begun(self) -> None:
        """Note that a step is about to be launched."""
        with self._changed:
            self._begun_s = time.monotonic()

    def ended(self) -> None:
        """Note that the step is queued, or never will be."""
        with self._changed:
            self._begun_s, self._ended_s = None, time.monotonic()
            self._num_ended += 1
            self._changed.notify_all()

    def give_way(self) -> None:
        """Wait while a step is being launched, until `MAX_LAUNCH_S` after it has begun."""
        if self.is_launching:
            with self._changed:
                self._give_way()

    def get_behind(self) -> None:
        """Wait for the end of a launch, if steps follow each other and there was none just now."""
        with self._changed:
            self._give_way()
            since_s = time.monotonic() - self._ended_s
            if BEHIND_S < since_s < RECENT_S:
                num_ended, left_s = self._num_ended, RECENT_S - since_s
                self._changed.wait_for(lambda: self._num_ended != num_ended, left_s)
                self._give_way()

    def _give_way(self) -> None:
        if self._begun_s is not None:
            num_ended, left_s = self._num_ended, self._begun_s + MAX_LAUNCH_S - time.monotonic()
            if left_s > 0.0:
                self._changed.wait_for(lambda: self._num_ended != num_ended, left_s)
