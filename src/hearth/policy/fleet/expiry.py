"""When warm replicas become retained. Changes no hold: that is for the books of the fleet."""

from __future__ import annotations

import heapq
import math

from hearth.policy.fleet.replica import Replica
from hearth.types import Hold


class Expiries:
    """Mutable; written only by the fleet.

    A replica that is used again expires later, and one that is evicted never. Their entries are put right
    when their time comes, which costs less than to find them before.
    """

    def __init__(self) -> None:
        #: (time, number, replica). At least one entry, not later than its expiry, for each warm replica.
        self._heap: list[tuple[float, int, Replica]] = []
        self._num_entries = 0

    def note(self, replica: Replica) -> None:
        """To be called whenever a replica may have become warm, or expires sooner than before."""
        if replica.hold is Hold.WARM and replica.expires_s < replica.timed_s:
            replica.timed_s = replica.expires_s
            self._num_entries += 1
            heapq.heappush(self._heap, (replica.timed_s, self._num_entries, replica))

    def pop_due(self, now_s: float) -> Replica | None:
        """A warm replica that may have expired, and whose expiry has to be noted anew if not."""
        while self._heap and self._heap[0][0] <= now_s:
            replica = self._pop()
            if replica.hold is Hold.WARM:
                return replica
        return None

    def next_s(self) -> float:
        """When the next replica expires; infinite if none is warm."""
        while self._heap:
            at_s, _, replica = self._heap[0]
            if replica.hold is Hold.WARM and replica.expires_s <= at_s:
                return at_s
            self.note(self._pop())
        return math.inf

    def _pop(self) -> Replica:
        _, _, replica = heapq.heappop(self._heap)
        replica.timed_s = math.inf
        return replica
