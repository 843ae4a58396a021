"""When background work gives way: to requests without a first token, and to launches of steps.

Making a graph executable holds the driver's lock for a millisecond or two, or until the device is idle, and a
capture takes the interpreter in pieces. During a launch either doubles its time; right behind one they cost
nothing, because the host then waits for the device.

    step thread    launch |  waits for the step before  | launch |  waits ...
    background            | behind -> graph  |           gives way
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class FirstTokens:
    """Requests without a first token. Mutable; the step thread alone writes, any thread gives way."""

    def __init__(self) -> None:
        self._runs: set[int] = set()
        self._are_all_served = threading.Event()
        self._are_all_served.set()

    def awaited(self, run: int) -> None:
        self._runs.add(run)
        self._are_all_served.clear()

    def served(self, run: int) -> None:
        if run in self._runs:
            self._runs.discard(run)
            if not self._runs:
                self._are_all_served.set()

    def give_way(self, most_s: float) -> Callable[[], None]:
        """Return a function that waits for all first tokens; its calls end by `most_s` from now."""
        until_s = time.monotonic() + most_s
        return lambda: self._wait(until_s - time.monotonic())

    def _wait(self, most_s: float) -> None:
        if most_s > 0.0:
            self._are_all_served.wait(min(most_s, threading.TIMEOUT_MAX))


#: The longest wait for one launch: longer than a launch without graphs takes.
MAX_LAUNCH_S = 0.02
#: For this long after a launch there is time for background work, even with the shortest steps.
BEHIND_S = 0.001
#: After this long without a launch none is awaited: the device is idle, or computes long steps.
RECENT_S = 0.01


class StepLaunches:
    """Launches of steps. Mutable; the step thread alone writes, any thread gives way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  #: guards all of these
        self._begun_s: float | None = None  #: when the current launch began; None: there is none
        self._ended_s = -RECENT_S  #: when the last launch ended
        self._num_ended = 0

    @property
    def is_launching(self) -> bool:
        return self._begun_s is not None

    def begun(self) -> None:
        with self._changed:
            self._begun_s = time.monotonic()

    def ended(self) -> None:
        with self._changed:
            self._begun_s, self._ended_s = None, time.monotonic()
            self._num_ended += 1
            self._changed.notify_all()

    def give_way(self) -> None:
        """Wait while a step is being launched, at most until `MAX_LAUNCH_S` after it began."""
        if self.is_launching:
            with self._changed:
                self._give_way()

    def get_behind(self) -> None:
        """Wait for the end of the next launch, if steps follow each other and none ended just now."""
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
