"""The answers of a simulation: when each of their tokens was sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hearth.core.types import ModelId, RequestId


@dataclass(slots=True)
class SimulatedAnswer:
    """One request and its tokens so far. Mutable; written by its simulation."""

    request_id: RequestId
    model: ModelId
    arrived_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    token_s: list[float] = field(default_factory=list)  #: when each token was sent
    started_s: float | None = None  #: when the step began that first had tokens of it; None: none had yet
    num_pauses: int = 0  #: turns of its model that ended meanwhile
    ended_s: float | None = None  #: None: it has not ended
    why_not: str | None = None  #: why it was refused or cancelled; None: it was not

    @property
    def is_whole(self) -> bool:
        return len(self.token_s) == self.num_output_tokens

    @property
    def first_token_s(self) -> float:
        """Seconds from the arrival to the first token, which must exist."""
        return self.token_s[0] - self.arrived_s

    @property
    def completion_s(self) -> float:
        """Seconds from the arrival to the end, which must exist."""
        assert self.ended_s is not None, f"not ended: {self}"
        return self.ended_s - self.arrived_s

    @property
    def longest_pause_s(self) -> float:
        return max((after - before for before, after in pairwise(self.token_s)), default=0.0)

    def count_on_time(self, first_token_s: float, tokens_per_s: float) -> int:
        """Return how many tokens were on time: token i is due i / rate after the first."""
        due_s = self.arrived_s + first_token_s
        return sum(at_s <= due_s + index / tokens_per_s for index, at_s in enumerate(self.token_s))
