"""When warm replicas become retained, and which workers must be told."""

from __future__ import annotations

import heapq
import math

from hearth.policy.fleet.capacity import BUSY, PAUSED, WARM
from hearth.policy.fleet.records import Replica


class Expiries:
    """When warm replicas become retained. Mutable; written only by the fleet."""

    def __init__(self) -> None:
        #: (time, replica number, entry number, replica). Each warm replica has one no later than its expiry.
        self._heap: list[tuple[float, int, int, Replica]] = []
        self._num_entries = 0

    def put(self, replica: Replica) -> None:
        """Enter a replica that became warm or expires sooner; ignores others."""
        if replica.hold is WARM and replica.expires_s < replica.expiry_entry_s:
            at_s = replica.expiry_entry_s = replica.expires_s
            self._num_entries += 1
            heapq.heappush(self._heap, (at_s, replica.number, self._num_entries, replica))

    def pop_due(self, now_s: float) -> Replica | None:
        return None if self.next_s(now_s) is None else self._pop()

    def next_s(self, until_s: float) -> float | None:
        """Return when the next replica expires; None: later than `until_s`."""
        while self._heap and self._heap[0][0] <= until_s:
            at_s, _, _, replica = self._heap[0]
            if replica.hold is WARM and replica.expires_s <= at_s:
                return at_s
            self.put(self._pop())
        return None

    def _pop(self) -> Replica:
        replica = heapq.heappop(self._heap)[3]
        replica.expiry_entry_s = math.inf
        return replica


class HoldNotices:
    """Replicas whose workers may have to be told their hold. Mutable; written only by the fleet."""

    def __init__(self) -> None:
        self._pending: dict[Replica, None] = {}

    def put(self, replica: Replica) -> None:
        if _must_notify(replica):
            self._pending[replica] = None

    def take(self) -> list[Replica]:
        """Return the replicas whose workers must be told, and count them as told."""
        if not self._pending:
            return []
        taken = [replica for replica in self._pending if _must_notify(replica)]
        self._pending.clear()
        for replica in taken:
            replica.notified_hold = replica.booked_hold
        return taken


def _must_notify(replica: Replica) -> bool:
    """Return False for pipelines: they keep their memory until they leave, whatever their hold."""
    return not replica.stages and replica.hold not in (None, PAUSED, BUSY, replica.notified_hold)
