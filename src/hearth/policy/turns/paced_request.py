"""When the next token of a request is due. Knows no model and no turn."""

from __future__ import annotations

from dataclasses import dataclass

from hearth.types import Pace

#: A request that nobody reads along with is due so long after its arrival, and after its last token.
BATCH_PATIENCE_S = 30.0


@dataclass(slots=True)
class PacedRequest:
    """A request that has not ended, and how far it is. Mutable; written by the `TurnPolicy` that has it."""

    pace: Pace
    arrived_s: float
    num_tokens: int  #: sent so far, also by workers that are gone
    last_token_s: float  #: meaningless before the first token

    @property
    def due_s(self) -> float:
        """The time by which the next token should be sent."""
        pace = self.pace
        if not pace.tokens_per_s:
            return (self.last_token_s if self.num_tokens else self.arrived_s) + BATCH_PATIENCE_S
        due_s = self.arrived_s + pace.first_token_s
        if not self.num_tokens:
            return due_s
        return min(due_s + self.num_tokens / pace.tokens_per_s, self.last_token_s + pace.max_pause_s)
