"""How long the parts of a worker's start took, for the log. Starts nothing."""

from __future__ import annotations

import time


class StartTimes:
    """The parts of a start that is under way, one after the other. Mutable."""

    def __init__(self) -> None:
        self._began_s = self._noted_s = time.perf_counter()
        self.seconds: dict[str, float] = {}  #: by part, in the order in which they ended

    @property
    def total_s(self) -> float:
        return self._noted_s - self._began_s

    def note(self, part: str) -> None:
        """Note the end of a part, which began with the end of the one before."""
        now_s = time.perf_counter()
        self.seconds[part], self._noted_s = now_s - self._noted_s, now_s

    def __str__(self) -> str:
        parts = (f"{part}_s={seconds:.3f}" for part, seconds in self.seconds.items())
        return " ".join((f"total_s={self.total_s:.3f}", *parts))
