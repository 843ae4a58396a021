"""How replicas are held: when warm ones become retained, and whose workers have to be told so.

Changes no hold: that is for `Fleet.reindex`.
"""

from __future__ import annotations

import heapq
import math

from hearth.core.types import Hold
from hearth.policy.fleet.records import Replica


class Expiries:
    """The times at which warm replicas become retained. Mutable; written only by the fleet.

    A replica that is used again expires later, and one that is evicted never. Their entries are put right
    when their time comes, which costs less than to find them before.
    """

    def __init__(self) -> None:
        #: (time, number of the replica, number of the entry, replica). At least one entry, not later than its
        #: expiry, for each warm replica.
        self._heap: list[tuple[float, int, int, Replica]] = []
        self._num_entries = 0

    def put(self, replica: Replica) -> None:
        """Enter a replica that may have become warm, or expires sooner than before; others are left out."""
        if replica.hold is Hold.WARM and replica.expires_s < replica.expiry_entry_s:
            at_s = replica.expiry_entry_s = replica.expires_s
            self._num_entries += 1
            heapq.heappush(self._heap, (at_s, replica.number, self._num_entries, replica))

    def pop_due(self, now_s: float) -> Replica | None:
        """Return the warm replica that expires next, if it has expired by then."""
        return self._pop() if self.next_s() <= now_s else None

    def next_s(self) -> float:
        """Return when the next replica expires; infinite if none is warm."""
        while self._heap:
            at_s, *_, replica = self._heap[0]
            if replica.hold is Hold.WARM and replica.expires_s <= at_s:
                return at_s
            self.put(self._pop())
        return math.inf

    def _pop(self) -> Replica:
        *_, replica = heapq.heappop(self._heap)
        replica.expiry_entry_s = math.inf
        return replica


class HoldNotices:
    """Replicas whose workers may have to be told how they are held. Mutable; written only by the fleet."""

    def __init__(self) -> None:
        self._pending: dict[Replica, None] = {}

    def put(self, replica: Replica) -> None:
        """Enter a replica whose worker has it otherwise; others are left out."""
        if _must_notify(replica):
            self._pending[replica] = None

    def take(self) -> list[Replica]:
        """Return the replicas whose workers have to be told, which counts as done from now on."""
        taken = [replica for replica in self._pending if _must_notify(replica)]
        self._pending.clear()
        for replica in taken:
            replica.notified_hold = replica.booked_hold
        return taken


def _must_notify(replica: Replica) -> bool:
    """True if the worker does not see a replica as the books do; who is busy it sees for itself."""
    return replica.hold not in (None, Hold.PAUSED, Hold.BUSY, replica.notified_hold)
