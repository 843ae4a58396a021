"""How much KV a model will need in a second, against what it can have, reported as it changes. Pure.

    demand = KV of running requests, of the tokens that they are to make by then, and of waiting requests
    room   = KV that it has, and what free and idle memory would hold

The gateway hears of an edge: the demand passes the room, falls below it again, or has moved by a step of the
room since the last report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hearth.policy.batch.batcher import Batcher

#: How far ahead the demand is extrapolated.
AHEAD_S = 1.0
#: A model is looked at so often.
INTERVAL_S = 0.25
#: A report is due when the demand has moved by this share of the room, or by the second one past the edge.
STEP, EDGE = 1 / 8, 1 / 32


@dataclass(frozen=True, slots=True)
class KvPressure:
    demand_tokens: int
    room_tokens: int

    @property
    def ratio(self) -> float:
        return self.demand_tokens / max(1, self.room_tokens)


class PressureWatch:
    """Watches one hosted model. Mutable; its worker calls it."""

    def __init__(self) -> None:
        self._reported: float | None = None  #: ratio
        self._looked_s: float | None = None
        self._num_steps = 0

    @property
    def has_reported_demand(self) -> bool:
        return bool(self._reported)

    def look(self, batcher: Batcher, room_blocks: Callable[[], int], now_s: float) -> KvPressure | None:
        """Return what to report of a model now, which is then assumed to be sent; None: nothing."""
        has_work = batcher.has_work
        if not self.is_due(now_s, has_work=has_work):
            return None
        num_ahead = self.tokens_ahead(batcher.num_steps, batcher.num_flights or 1, now_s)
        num_blocks = batcher.kv.expected_blocks(num_ahead) if has_work else 0
        block_tokens = batcher.blocks.block_tokens
        pressure = KvPressure(num_blocks * block_tokens, room_blocks() * block_tokens)
        return pressure if self.is_edge(pressure) else None

    def is_due(self, now_s: float, *, has_work: bool) -> bool:
        if not has_work:
            return self.has_reported_demand
        return self._looked_s is None or now_s >= self._looked_s + INTERVAL_S

    def tokens_ahead(self, num_steps: int, num_flights: int, now_s: float) -> int:
        """Return how many tokens a request will make in `AHEAD_S`, given how many steps there were so far.

        A request is in one of `num_flights` steps.
        """
        before_s, before = self._looked_s, self._num_steps
        self._looked_s, self._num_steps = now_s, num_steps
        if before_s is None or now_s <= before_s:
            return 0
        return round((num_steps - before) * AHEAD_S / (now_s - before_s) / num_flights)

    def is_edge(self, pressure: KvPressure) -> bool:
        """True if a report is due, which is then assumed to be sent."""
        ratio, reported = pressure.ratio, self._reported
        if reported and ratio:
            moved = abs(ratio - reported)
            has_crossed = (ratio > 1.0) is not (reported > 1.0)
            if moved < STEP and not (has_crossed and moved >= EDGE):
                return False
        self._reported = ratio
        return ratio != reported
