"""Tells whether books that threads share can still be looked at, from a thread that never waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class BooksProbe:
    """One thread of its own looks whenever it is asked for. One other thread asks."""

    def __init__(self, look: Callable[[], None]) -> None:
        """`look` takes every lock of the books once, and returns."""
        self._look = look
        self._asked = threading.Event()
        #: When the look under way began; None: the last one is over.
        self._began_s: float | None = None
        threading.Thread(target=self._work, name="hearth-probe", daemon=True).start()

    def held_s(self) -> float:
        """Return for how long the look under way has been waiting, and begin one if none is; at once."""
        began_s, now_s = self._began_s, time.monotonic()
        if began_s is not None:
            return now_s - began_s
        self._began_s = now_s
        self._asked.set()
        return 0.0

    def _work(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            self._look()
            self._began_s = None
