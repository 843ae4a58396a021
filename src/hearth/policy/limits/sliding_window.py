"""How much was taken in the last minute, so that no minute, wherever it begins, exceeds the limit.

Amounts of the same second share a slot, which counts until its latest part is a minute old: at most 61 slots.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

WINDOW_S = 60.0
SLOT_S = 1.0


@dataclass(slots=True, eq=False)
class WindowSlot:
    number: int  #: of its second
    last_s: float  #: when something was taken last
    amount: int
    is_gone: bool = False  #: it counts no more


class SlidingWindow:
    """Mutable; written by the limiter that owns it. Time never goes back."""

    __slots__ = ("_now_s", "_slots", "used")

    def __init__(self) -> None:
        self.used = 0  #: what counts of the last minute, by the time that was told last
        self._slots: deque[WindowSlot] = deque()  #: those that count, oldest first
        self._now_s = -math.inf

    def advance(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        while self._slots and self._slots[0].last_s + WINDOW_S <= self._now_s:
            oldest = self._slots.popleft()
            oldest.is_gone = True
            self.used -= oldest.amount

    def take(self, amount: int, now_s: float) -> WindowSlot:
        """Take more, whether it fits or not; return where it is counted."""
        self.advance(now_s)
        number = math.floor(self._now_s / SLOT_S)
        if not self._slots or self._slots[-1].number != number:
            self._slots.append(WindowSlot(number, self._now_s, 0))
        slot = self._slots[-1]
        slot.last_s = self._now_s
        slot.amount += amount
        self.used += amount
        return slot

    def give_back(self, slot: WindowSlot, amount: int) -> None:
        """Return an amount of a slot; no effect once the slot is a minute old."""
        assert 0 <= amount <= slot.amount, f"{amount=} {slot=}"
        slot.amount -= amount
        if not slot.is_gone:
            self.used -= amount

    def wait_s(self, amount: int, limit: int, now_s: float) -> float:
        """Return how long until `amount` more fits under a limit, if nothing else is taken; 0: now.

        Infinite if it exceeds the limit itself.
        """
        self.advance(now_s)
        if amount > limit:
            return math.inf
        left = self.used
        if left + amount <= limit:
            return 0.0
        for slot in self._slots:
            left -= slot.amount
            if left + amount <= limit:
                return min(WINDOW_S, slot.last_s + WINDOW_S - self._now_s)  # a sum may be rounded up
        raise AssertionError(f"slots hold less than is used: {left=} {amount=} {limit=}")

    def reset_s(self, now_s: float) -> float:
        self.advance(now_s)
        taken = [slot.last_s for slot in self._slots if slot.amount]
        return taken[-1] + WINDOW_S - self._now_s if taken else 0.0
