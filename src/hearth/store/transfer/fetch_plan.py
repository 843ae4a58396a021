"""From which nodes the chunks of a model come, and in which order, while other nodes fetch the same model.

The head makes such plans (`policy/multicast/`). A plan is a hint: a node that fails or is late is left out of
it, and its chunks then come from any other node that has them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from hearth.core.errors import LoadCancelled
from hearth.core.node_messages import PlannedFetch
from hearth.core.types import NodeId

#: A node that is to send a chunk may not know of the model yet.
START_S = 3.0
#: A chunk is late when it takes longer than this, and than so many chunks have taken so far.
LATE_S, LATE_CHUNKS = 5.0, 12
#: The first one comes when the node before has it.
FIRST_LATE_S = 30.0
#: Nothing is received for so long because a chunk that comes first is not asked for: another load brings it.
MAX_IDLE_S = 1.0
#: How often a fetch that waits for those before it looks whether it is still wanted.
LOOK_S = 0.25


class FetchPlan:
    """Mutable; any thread may call it: the single operations of a dict are atomic."""

    def __init__(self, fetches: Sequence[PlannedFetch] = (), missing: Sequence[int] = ()) -> None:
        """`missing`: the chunks that this node lacks."""
        self._sources: dict[int, PlannedFetch] = {}  #: of the chunks that have not come, in order
        for fetch in fetches:
            for index in missing:
                if fetch.begin <= index < fetch.end:
                    self._sources.setdefault(index, fetch)
        self._began_s = time.monotonic()
        self._num_come = 0
        self._places = {index: place for place, index in enumerate(self._sources)}
        self._waiting: list[int] = []  #: places of chunks that wait until no other is received
        self._received: int | None = None  #: the chunk that is received now
        self._idle_since_s = self._began_s
        self._changed = threading.Condition()  #: guards these three

    @property
    def order(self) -> list[int]:
        return list(self._sources)

    def is_starting(self, asked_s: float) -> bool:
        """True if a node that was asked at this time may not know of the model yet."""
        return asked_s < self._began_s + START_S

    def source_of(self, index: int) -> PlannedFetch | None:
        """Return from where a chunk is to come; None: from any node."""
        return self._sources.get(index)

    def begin(self, index: int, is_wanted: Callable[[], bool]) -> None:
        """Wait until all chunks before this one have come, and no other is received. `end` has to follow.

        Chunks that another load brings are waited for as long as `MAX_IDLE_S`. Raises LoadCancelled if it is
        not wanted any more.
        """
        place = self._places.get(index, 0)  # 0: another plan has taken the place of its own
        with self._changed:
            if self._received == index:  # on a connection that was closed at the other end
                return
            self._waiting.append(place)
            try:
                while (wait_s := self._wait_s(place)) > 0.0:
                    if not is_wanted():
                        raise LoadCancelled(f"chunk {index} is not needed any more")
                    self._changed.wait(min(wait_s, LOOK_S))
                self._received = index
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()

    def end(self, index: int) -> None:
        """Note that a chunk has come, or will not; also if it did not begin."""
        with self._changed:
            if self._received == index:
                self._received, self._idle_since_s = None, time.monotonic()
            self._changed.notify_all()

    def _wait_s(self, place: int) -> float:
        """Return how long a chunk must wait unless something changes; 0: it may begin."""
        if self._received is not None or place != min(self._waiting):
            return math.inf
        first = next(iter(list(self._sources)), None)
        if first is None or self._places[first] >= place:
            return 0.0
        return max(0.0, self._idle_since_s + MAX_IDLE_S - time.monotonic())

    def came(self, index: int) -> None:
        if self._sources.pop(index, None) is not None:
            self._num_come += 1

    def leave_out(self, node: NodeId) -> None:
        for index, source in list(self._sources.items()):
            if source.node == node:
                self._sources.pop(index, None)

    def is_late(self, asked_s: float) -> bool:
        """True if a chunk that was asked for at this time should have come by now."""
        now_s = time.monotonic()
        if not self._num_come:
            return now_s > asked_s + FIRST_LATE_S
        return now_s > asked_s + LATE_S + LATE_CHUNKS * (now_s - self._began_s) / self._num_come
