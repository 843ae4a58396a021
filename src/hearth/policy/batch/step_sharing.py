"""Which of a worker's busy models steps next. Pure: measures no time and steps nothing.

Busy models share the device by time, not by steps: next is the one that has had the least. A model that was
idle has saved up nothing: it starts where the least served of the others stands, so it neither waits for
them to catch up nor makes them wait. What it had beyond that it keeps, or going idle for a moment would pay.
"""

from __future__ import annotations

from collections.abc import Collection

from hearth.types import ModelId


class StepSharing:
    """Mutable; written by the step thread alone."""

    def __init__(self) -> None:
        #: Time on the device, on a common scale, of every model that was busy and is not forgotten.
        self._spent_s: dict[ModelId, float] = {}
        self._busy: set[ModelId] = set()  #: when `next` was last asked
        #: When each model last had its turn: of equals the one that waits for longer goes first.
        self._turn: dict[ModelId, int] = {}
        self._num_turns = 0

    def next(self, busy: Collection[ModelId]) -> ModelId:
        """One of `busy`, which must not be empty."""
        stayed = self._busy.intersection(busy)
        if not stayed:
            self._spent_s.clear()  # nobody to be compared with: a new beginning
        least_s = min((self._spent_s[model] for model in stayed), default=0.0)
        for model in busy:
            if model not in stayed:
                self._spent_s[model] = max(least_s, self._spent_s.get(model, 0.0))
        self._busy = set(busy)
        return min(busy, key=lambda model: (self._spent_s[model], self._turn.get(model, -1)))

    def ran(self, model: ModelId, seconds: float) -> None:
        """It has stepped for so long."""
        self._spent_s[model] += seconds
        self._num_turns += 1
        self._turn[model] = self._num_turns

    def forget(self, model: ModelId) -> None:
        """It is no longer hosted. One that never was busy is unknown, which is no mistake."""
        self._busy.discard(model)
        self._spent_s.pop(model, None)
        self._turn.pop(model, None)
