"""When the step thread queues a step, so that work which can wait does not contend with it. Queues nothing.

Whoever makes a graph executable holds the driver's lock for a millisecond or two, and who captures a step
takes the interpreter by pieces. Beside a launch both cost the step as much again; right behind it they cost
nothing, for then the host waits for the device.
"""

from __future__ import annotations

import threading

#: For so long one piece of work gives way at most: longer than the launch of a step without graphs.
MAX_LAUNCH_S = 0.02


class StepLaunches:
    """Launches of one worker. Mutable; the step thread alone writes, any thread gives way."""

    def __init__(self) -> None:
        self._is_none = threading.Event()
        self._is_none.set()

    def begun(self) -> None:
        """Note that a step is about to be launched."""
        self._is_none.clear()

    def ended(self) -> None:
        """Note that the step is queued, or never will be."""
        self._is_none.set()

    def give_way(self) -> None:
        """Wait while a step is being launched, for at most `MAX_LAUNCH_S`."""
        self._is_none.wait(MAX_LAUNCH_S)
