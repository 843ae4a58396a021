"""KV of a model in stages: every member has memory for all blocks that the first one uses. Pure.

    first   wants more          ->  each later member takes as much as it can get
    last    tells what all got  ->  the first uses as many blocks, and tells how many are kept
    first   gives blocks back   ->  behind the last step that uses them, each later member frees its own
    later   needs memory        ->  the first gives blocks back, and tells how many are kept

The floor is promised on every member, and never asked for or given back. Steps go on meanwhile. A member has
one question open at a time, and after a refusal it asks for nothing that it is not promised for a while.
"""

from __future__ import annotations

import math

#: Between a refusal and the next question.
PAUSE_S = 1.0


class FirstKv:
    """KV as the first member counts it. Mutable; its worker calls it."""

    def __init__(self, floor_blocks: int) -> None:
        self.floor_blocks = floor_blocks
        self.max_blocks = floor_blocks  #: that all members have memory for, and it may use
        self._asked_blocks: int | None = None  #: of the open question
        self._is_void = False  #: a member has needed memory since the question
        self._told_blocks: int | None = floor_blocks  #: that later members keep; None: they wait to be told
        self._quiet_until_s = -math.inf

    def ask(self, num_blocks: int, now_s: float) -> bool:
        """Ask for `num_blocks` in all; False: not now."""
        if self._asked_blocks is not None or now_s < self._quiet_until_s:
            return False
        self._asked_blocks = num_blocks
        return True

    def granted(self, num_blocks: int, now_s: float) -> None:
        """Take what all members have memory for. Repeating it is harmless. `keep` has to follow."""
        if self._asked_blocks is None:
            return
        is_refused = self._is_void or num_blocks < self._asked_blocks
        if is_refused:
            self.pause(now_s)
        if not self._is_void:
            self.max_blocks = max(self.max_blocks, num_blocks)
        self._told_blocks = None if is_refused else self._asked_blocks
        self._asked_blocks, self._is_void = None, False

    def return_asked(self, now_s: float) -> None:
        """Note that a member needs memory. `keep` has to follow."""
        self._is_void = self._asked_blocks is not None
        self._told_blocks = None
        self.pause(now_s)

    def pause(self, now_s: float) -> None:
        """Ask for no more for a while, as after a refusal."""
        self._quiet_until_s = now_s + PAUSE_S

    def keep(self, num_blocks: int) -> int | None:
        """Return how many blocks later members are told to keep, if it has `num_blocks` now.

        None: they know, or will be told after the answer to the open question.
        """
        kept_blocks = max(self.floor_blocks, num_blocks)
        if self._asked_blocks is None or self._is_void:  # what it gives to another member it may not retake
            self.max_blocks = kept_blocks
        if self._asked_blocks is not None or kept_blocks == self._told_blocks:
            return None
        self._told_blocks = kept_blocks
        return kept_blocks


class LaterKv:
    """KV as a later member counts it. Mutable; its worker calls it."""

    def __init__(self, floor_blocks: int) -> None:
        self.max_blocks = floor_blocks  #: that the first member may use, or was told that it may
        self._needed_blocks: int | None = None  #: that the first member was asked to go down to
        self._is_promised = False  #: the memory of the others, to another model
        self._quiet_until_s = -math.inf

    @property
    def is_waiting(self) -> bool:
        """True if memory that another model needs may be about to come back."""
        return self._needed_blocks is not None

    def num_returning(self, num_blocks: int) -> int:
        """Return how many of `num_blocks` should come back without a preempted request."""
        if self._needed_blocks is None or self._is_promised:
            return 0
        return max(0, num_blocks - self._needed_blocks)

    def wanted(self, num_blocks: int) -> int:
        """Return how many blocks to have in all, now that the first member wants `num_blocks`."""
        if self._needed_blocks is None:
            self.max_blocks = max(self.max_blocks, num_blocks)
        return self.max_blocks

    def need(self, num_blocks: int, now_s: float, *, is_promised: bool) -> bool:
        """Ask for all blocks beyond `num_blocks`; False: not now, or it was asked already.

        `is_promised`: to another model, so requests of this one have to give way.
        """
        if self._needed_blocks is None:
            may_ask = is_promised or now_s >= self._quiet_until_s
        else:
            is_more = num_blocks < self._needed_blocks or not self._is_promised
            may_ask = is_promised and is_more
        if may_ask:
            self._needed_blocks, self._is_promised = num_blocks, is_promised
        return may_ask

    def kept(self, num_blocks: int, now_s: float) -> None:
        """Take how many blocks to keep."""
        self.max_blocks = num_blocks
        needed_blocks, self._needed_blocks = self._needed_blocks, None
        if needed_blocks is not None and num_blocks > needed_blocks:
            self._quiet_until_s = now_s + PAUSE_S
