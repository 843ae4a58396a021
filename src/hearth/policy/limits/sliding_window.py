"""How much was taken in the last minute. Knows no key and no limit's meaning.

What was taken counts for a minute, so that no minute, wherever it begins, has more than the limit; and it
comes back as it was taken, little by little. A bucket that refills would let twice the limit pass in one
minute, and a count that starts anew with every minute twice the limit around its turn.

What is taken within one second is kept as one slot, which counts until its youngest part is a minute old:
however much is taken, there are no more than 61 slots.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

WINDOW_S = 60.0
SLOT_S = 1.0


@dataclass(slots=True, eq=False)
class WindowSlot:
    """The amount that was taken within one second. Mutable; written by the `SlidingWindow` that made it."""

    number: int  #: of its second
    last_s: float  #: when something was taken last
    amount: int
    is_gone: bool = False  #: it counts no more


class SlidingWindow:
    """Mutable; written by the limiter that owns it. Time never goes back: who says so is not believed."""

    __slots__ = ("_now_s", "_slots", "used")

    def __init__(self) -> None:
        self.used = 0  #: what counts of the last minute, by the time that was told last
        self._slots: deque[WindowSlot] = deque()  #: those that count, oldest first
        self._now_s = -math.inf

    def advance(self, now_s: float) -> None:
        """Let go of what is a minute old."""
        self._now_s = max(self._now_s, now_s)
        while self._slots and self._slots[0].last_s + WINDOW_S <= self._now_s:
            oldest = self._slots.popleft()
            oldest.is_gone = True
            self.used -= oldest.amount

    def take(self, amount: int, now_s: float) -> WindowSlot:
        """Have more taken, whether it fits or not; return where it is counted."""
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
        """Have less taken than was counted in a slot; nothing, if that counts no more."""
        assert 0 <= amount <= slot.amount, f"{amount=} {slot=}"
        slot.amount -= amount
        if not slot.is_gone:
            self.used -= amount

    def wait_s(self, amount: int, limit: int, now_s: float) -> float:
        """Return how long until so much more fits under a limit, if nobody else takes any; 0: it does now.

        Infinite where it is more than the limit itself.
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
        """Return how long until nothing counts any more, if nobody takes any."""
        self.advance(now_s)
        taken = [slot.last_s for slot in self._slots if slot.amount]
        return taken[-1] + WINDOW_S - self._now_s if taken else 0.0
