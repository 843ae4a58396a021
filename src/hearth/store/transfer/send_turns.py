"""The order of the sends that a plan has for a node, and their speed. Sends nothing.

They go one at a time, so that each has the whole link. A receiver announces what it wants next while it still
receives from another node, and the link stays free for it for a moment: nodes that do their sends in another
order than the plan make each other wait.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hearth.core.types import NodeId

#: For so long, and four sends for each one that waits, a send waits for those before it.
MIN_TURN_S = 1.0
#: For this share of the last send the link stays free for a receiver that comes first in the plan.
MAX_FREE_SHARE = 0.5
#: Limit of a send's speed, over that of the fastest of the last sends to the same node. Without it, sends
#: fill the queue of the link and delay acknowledgements of what this node receives, which takes up to 1.5
#: times as long then.
PACE = 1.12
#: Which sends count for that: recent ones that are too long for the buffers of the kernel.
PACED_FOR_S, NUM_PACED_BY, MIN_PACED_BYTES = 10.0, 8, 4 << 20


@dataclass(frozen=True, slots=True)
class _Sent:
    receiver: NodeId
    bytes_per_s: float
    ended_s: float


class SendLimit:
    """How many bytes per second a machine sends, over all connections. Any thread may call it."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def book(self, num_bytes: int, now_s: float) -> float:
        """Count bytes; return after how many seconds they may be sent."""
        with self._lock:
            begin_s = max(now_s, self._free_at_s)
            self._free_at_s = begin_s + num_bytes / self.bytes_per_s
            return begin_s - now_s


class SendTurns:
    """Any thread may call it."""

    def __init__(self) -> None:
        #: Turns that a later one leaves the link free for, once.
        self._announced: list[int] = []
        self._waiting: list[int] = []  #: turns of sends whose receiver and chunk are ready
        self._num_sending, self._last_s, self._free_since_s = 0, 0.0, 0.0
        self._sends = deque[_Sent](maxlen=NUM_PACED_BY * 8)  #: the last ones
        self._changed = threading.Condition()

    @contextmanager
    def announced(self, turn: int) -> Iterator[None]:
        """Have later turns leave the link free for this one, for a while."""
        with self._changed:
            self._announced.append(turn)
        try:
            yield
        finally:
            with self._changed:
                if turn in self._announced:  # else it was waited for long enough
                    self._announced.remove(turn)
                self._changed.notify_all()

    @contextmanager
    def taken(self, turn: int, sign_s: float, tell: Callable[[], None]) -> Iterator[None]:
        """Wait until no other send is under way, or one takes far too long. Calls `tell` while it waits."""
        ready_s = time.monotonic()
        with self._changed:
            self._waiting.append(turn)
            until_s = ready_s + MIN_TURN_S + 4 * self._last_s * len(self._waiting)
        try:
            while not self._begin(turn, ready_s, sign_s, until_s):
                tell()
        finally:
            with self._changed:
                self._waiting.remove(turn)
                self._changed.notify_all()
        began_s = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._num_sending -= 1
                self._free_since_s = time.monotonic()
                self._last_s = self._free_since_s - began_s
                self._changed.notify_all()

    def max_bytes_per_s(self, receiver: NodeId) -> int | None:
        """Return how fast the next send to a node may go; None: nothing is known of its link."""
        since_s = time.monotonic() - PACED_FOR_S
        with self._changed:
            own = [one for one in self._sends if one.receiver == receiver and one.ended_s > since_s]
        return int(PACE * max(one.bytes_per_s for one in own[-NUM_PACED_BY:])) if own else None

    def sent(self, receiver: NodeId, num_bytes: int, seconds: float) -> None:
        if num_bytes >= MIN_PACED_BYTES:
            with self._changed:
                self._sends.append(_Sent(receiver, num_bytes / seconds, time.monotonic()))

    def _begin(self, turn: int, ready_s: float, sign_s: float, until_s: float) -> bool:
        """Wait for a while; True: the send may begin, and counts from now."""
        end_s = time.monotonic() + sign_s
        with self._changed:
            while (wait_s := self._wait_s(turn, ready_s)) > 0.0 and (now_s := time.monotonic()) < end_s:
                self._changed.wait(min(wait_s, end_s - now_s))
            may_begin = wait_s <= 0.0 or time.monotonic() > until_s
            self._num_sending += may_begin
            if may_begin:
                self._announced = [one for one in self._announced if one >= turn]
            return may_begin

    def _wait_s(self, turn: int, ready_s: float) -> float:
        """Return how long a send must wait unless something changes; 0: it may begin."""
        if self._num_sending or turn != min(self._waiting):
            return math.inf
        if turn <= min(self._announced, default=turn):
            return 0.0
        free_s = MAX_FREE_SHARE * self._last_s or MIN_TURN_S
        return max(0.0, max(self._free_since_s, ready_s) + free_s - time.monotonic())
