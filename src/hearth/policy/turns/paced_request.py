"""When the next token of a request is due."""

from __future__ import annotations

import math

from hearth.core.types import BATCH_PATIENCE_S, Pace


class PacedRequest:
    """A request that has not ended. Mutable; written by the `TurnPolicy` that has it.

    A batch request is due `BATCH_PATIENCE_S` after its arrival, and after its last token. `due_s` is stored,
    because a worker may report a thousand tokens with every step.
    """

    __slots__ = ("_first_due_s", "_max_pause_s", "_token_s", "due_s", "num_tokens", "pace")

    def __init__(self, pace: Pace, arrived_s: float, num_tokens: int, now_s: float) -> None:
        """`num_tokens` were sent so far, also by lost workers; the last one now, if any."""
        self.pace = pace
        is_read = not pace.is_batch
        self._first_due_s = arrived_s + (pace.first_token_s if is_read else BATCH_PATIENCE_S)
        self._token_s = 1 / pace.tokens_per_s if is_read else math.inf  #: from one token to the next
        self._max_pause_s = pace.max_pause_s if is_read else BATCH_PATIENCE_S
        self.num_tokens = num_tokens
        self.due_s = self._first_due_s
        if num_tokens:
            self.num_tokens -= 1
            self.sent(now_s)

    def sent(self, now_s: float) -> None:
        self.num_tokens = num_tokens = self.num_tokens + 1
        due_s, latest_s = self._first_due_s + num_tokens * self._token_s, now_s + self._max_pause_s
        self.due_s = due_s if due_s < latest_s else latest_s
