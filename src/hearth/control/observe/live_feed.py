"""Server-sent events of what happens in the service, for dashboards. Changes nothing.

The feed is a sink beside the observer: it is told each event of the brain with its actions. While there are
subscribers, what has changed is encoded once for all that may see the same, at most four times a second; else
it only keeps the last decisions. A subscriber that does not read as fast is dropped, and may connect again.

The events: `hello` first; `state` with workers, models, nodes and notes; `requests` that have changed;
`decisions`, the brain's events with their actions as the journal has them; `sample`, whenever the history has
a new one. Keys below the role `monitor` get `hello` and the `requests` that they may see.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec

from hearth.control.journal import TAGS
from hearth.control.observe.explanation import phase_of, summarise
from hearth.control.observe.history import History
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.pool_reports import PoolReports
from hearth.control.observe.pool_views import fallbacks
from hearth.control.observe.service_views import ServiceViews
from hearth.control.observe.timeline import Timeline, Timelines
from hearth.control.requests.caller import Caller, KeyId
from hearth.core.errors import Overloaded
from hearth.core.types import RequestId
from hearth.policy.fleet import events

logger = logging.getLogger(__name__)

#: Between two messages to a subscriber, at least; longer after a long one, for so many bytes a second.
PAUSE_S = 0.25
BYTES_PER_S = 256 << 10
#: Between two reports of the memory of workers, at least, while anything happens.
LOOK_S = 1.0
#: How long it is looked after the last event: reports of workers follow it.
SETTLE_S = 2.0
MAX_SUBSCRIBERS = 64
#: Of one key, so that a leaked one does not keep the others out.
MAX_SUBSCRIBERS_OF_KEY = 16
#: After which a dashboard beyond the limit may try again.
RETRY_S = 10.0
#: Messages that a subscriber may be behind.
MAX_BEHIND = 32
MAX_DECISIONS = 500
#: In one message; the newest, if there were more.
MAX_NEW_DECISIONS, MAX_CHANGED_REQUESTS = 50, 500

#: Events that are shown even if nothing followed from them.
_NOTABLE = (
    events.ModelDeployed,
    events.ModelRemoved,
    events.ModelStopped,
    events.WorkerJoined,
    events.WorkerLost,
    events.NodeLost,
    events.NodeDraining,
    events.ModelReady,
    events.ModelFailed,
)
#: Events that change nothing that is shown, unless something follows.
_SILENT = (events.ResidencyReported, events.TimerFired, events.DeviceReported, events.LinkMeasured)


@dataclass(frozen=True, slots=True)
class _Decision:
    number: int
    at_s: float  #: since the epoch
    event: events.Event
    actions: tuple[events.Action, ...]

    def encoded(self) -> bytes:
        view = {
            "number": self.number,
            "at_s": self.at_s,
            "event": (TAGS[type(self.event)], self.event),
            "actions": [(TAGS[type(action)], action) for action in self.actions],
        }
        return msgspec.json.encode(view)


@dataclass(eq=False, slots=True)
class _Subscriber:
    """Mutable; written by the feed."""

    caller: Caller
    queue: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(MAX_BEHIND))
    is_dropped: asyncio.Event = field(default_factory=asyncio.Event)


class LiveFeed:
    """Mutable; used on the event loop alone."""

    def __init__(
        self,
        views: ServiceViews,
        timelines: Timelines,
        pools: PoolReports,
        history: History,
        metrics: Metrics,
        is_current: Callable[[Caller], bool],
    ) -> None:
        """`is_current`: whether a caller's key still exists, with the same rights."""
        self._views, self._timelines, self._pools = views, timelines, pools
        self.history, self._metrics, self._is_current = history, metrics, is_current
        self._subscribers: list[_Subscriber] = []
        self._numbers = itertools.count(1)
        self._decisions: deque[_Decision] = deque(maxlen=MAX_DECISIONS)
        self._num_told = 0  #: the number of the last decision that was sent
        #: Requests that had not ended when they were told last, and what was told then.
        self._running: dict[RequestId, tuple[int, str] | None] = {}
        self._happened = asyncio.Event()
        self._happened_s = 0.0
        self._looked_s = 0.0
        self._is_state_stale = self._has_sample = False
        self._task: asyncio.Task[None] | None = None

    def observe(self, event: events.Event, actions: Sequence[events.Action]) -> None:
        told = tuple(one for one in actions if not isinstance(one, events.SetTimer))
        if told or isinstance(event, _NOTABLE):
            if isinstance(event, events.RequestArrived) and event.prefixes:
                event = replace(event, prefixes=())  # there may be hundreds, and they say nothing
            self._decisions.append(_Decision(next(self._numbers), time.time(), event, told))
        if not self._subscribers or (not told and isinstance(event, _SILENT)):
            return
        if isinstance(event, events.RequestArrived):
            self._running[event.request_id] = None
        self._is_state_stale = True
        self._wake()

    def sampled(self) -> None:
        """Tell subscribers that the history has a new sample; end those whose key is gone or has changed."""
        for one in list(self._subscribers):
            if not self._is_current(one.caller):
                self._drop(one)
            elif not one.caller.has_role("monitor"):
                self._send(one, b":\n\n")  # a comment, for proxies end streams that are silent
        self._has_sample = self._is_state_stale = True
        if self._subscribers:
            self._wake()

    async def close(self) -> None:
        for one in list(self._subscribers):
            self._drop(one)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def subscribe(self, caller: Caller) -> AsyncGenerator[bytes, None]:
        """Yield messages until the subscriber is dropped. Raises Overloaded."""
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            raise Overloaded(f"{MAX_SUBSCRIBERS} dashboards are open, the limit; close one of them", RETRY_S)
        if caller.key_id is not None and self._num_of(caller.key_id) >= MAX_SUBSCRIBERS_OF_KEY:
            limit = f"{MAX_SUBSCRIBERS_OF_KEY} dashboards are open with the key {caller.name!r}, its limit"
            raise Overloaded(f"{limit}; close one of them", RETRY_S)
        one = _Subscriber(caller)
        if not self._subscribers:
            self._running = {found.request_id: None for found in self._timelines.all() if _runs(found)}
        self._subscribers.append(one)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        one.queue.put_nowait(self._first_message(caller))
        self._wake()
        try:
            while (message := await _next(one)) is not None:
                yield message
        finally:
            with suppress(ValueError):
                self._subscribers.remove(one)

    def _num_of(self, key_id: KeyId) -> int:
        return sum(one.caller.key_id == key_id for one in self._subscribers)

    def _wake(self) -> None:
        self._happened_s = time.monotonic()
        self._happened.set()

    def _drop(self, one: _Subscriber) -> None:
        self._subscribers.remove(one)
        one.is_dropped.set()
        one.queue = asyncio.Queue()  # a connection that is not read may last, but not what it was to send

    async def _run(self) -> None:
        """Send what has changed for as long as there are subscribers."""
        try:
            while self._subscribers:
                if not self._running and time.monotonic() > self._happened_s + SETTLE_S:
                    self._happened.clear()
                    await self._happened.wait()
                await self._look()
                num_bytes = self._tell()
                await asyncio.sleep(max(PAUSE_S, num_bytes / BYTES_PER_S))
        except Exception:
            logger.exception("dashboards are not told what happens; they connect again")
            for one in list(self._subscribers):
                self._drop(one)

    async def _look(self) -> None:
        """Ask workers for the state of their memory; they answer before the next message."""
        if time.monotonic() >= self._looked_s + LOOK_S:
            self._looked_s = time.monotonic()
            await self._pools.refresh(0.0)
            self._is_state_stale = True

    def _tell(self) -> int:
        """Return the bytes of the longest message."""
        changed, common, num_bytes = self._changed_requests(), b"", 0
        if any(one.caller.has_role("monitor") for one in self._subscribers):
            common = self._state() + _event("requests", map(_encoded_row, changed)) + self._new_decisions()
        for one in list(self._subscribers):
            message = common
            if not one.caller.has_role("monitor"):
                rows = filter(self._views.visible_to(one.caller), changed) if changed else ()
                message = _event("requests", map(_encoded_row, rows))
            if message:
                num_bytes = max(num_bytes, len(message))
                self._send(one, message)
        return num_bytes

    def _send(self, one: _Subscriber, message: bytes) -> None:
        try:
            one.queue.put_nowait(message)
        except asyncio.QueueFull:
            self._metrics.fallbacks.labels("dashboard_dropped").inc()
            self._drop(one)

    def _changed_requests(self) -> list[Timeline]:
        changed = list[Timeline]()
        for request_id, told in reversed(list(self._running.items())):
            timeline = self._timelines.get(request_id)
            if timeline is None:  # too long ago
                del self._running[request_id]
                continue
            now = timeline.num_output_tokens, phase_of(timeline)
            if now != told and len(changed) < MAX_CHANGED_REQUESTS:
                changed.append(timeline)
                self._running[request_id] = now
                if not _runs(timeline):
                    del self._running[request_id]
        return changed[::-1]

    def _state(self) -> bytes:
        if not self._is_state_stale:
            return b""
        state, self._is_state_stale = self._whole_state(), False
        if self._has_sample:
            self._has_sample = False
            state += _data("sample", msgspec.json.encode(self.history.last_sample))
        return state

    def _whole_state(self) -> bytes:
        views = self._views
        nodes = views.nodes() if views.cluster is not None else ()
        ps = views.ps()
        state = {
            "health": views.health(),
            "ps": ps,
            "fallbacks": [f"{one.worker}: {text}" for one in ps.workers for text in fallbacks(one)],
            "nodes": nodes,
            "host_bytes": views.host_bytes(),
        }
        return _data("state", msgspec.json.encode(state))

    def _new_decisions(self) -> bytes:
        fresh = itertools.takewhile(lambda one: one.number > self._num_told, reversed(self._decisions))
        newest = list(itertools.islice(fresh, MAX_NEW_DECISIONS))[::-1]
        if newest:
            self._num_told = newest[-1].number
        return _event("decisions", [one.encoded() for one in newest])

    def _first_message(self, caller: Caller) -> bytes:
        rows = filter(self._views.visible_to(caller), self._timelines.all())
        message = _data("hello", msgspec.json.encode({"health": self._views.health()}))
        message += _event("requests", map(_encoded_row, rows))
        if caller.has_role("monitor"):
            decisions = [one.encoded() for one in self._decisions]
            message += self._whole_state() + _event("decisions", decisions)
        return message


async def _next(one: _Subscriber) -> bytes | None:
    """Return the next message; None: the subscriber was dropped."""
    if one.is_dropped.is_set():
        return None
    coming, dropped = asyncio.ensure_future(one.queue.get()), asyncio.ensure_future(one.is_dropped.wait())
    try:
        await asyncio.wait((coming, dropped), return_when=asyncio.FIRST_COMPLETED)
        return coming.result() if coming.done() else None
    finally:
        coming.cancel()
        dropped.cancel()


def _runs(timeline: Timeline) -> bool:
    return timeline.ended_s is None


def _encoded_row(timeline: Timeline) -> bytes:
    return msgspec.json.encode(summarise(timeline))


def _event(name: str, rows: Iterable[bytes]) -> bytes:
    """Return an event with a list, or nothing if the list is empty."""
    found = b",".join(rows)
    return _data(name, b"[%b]" % found) if found else b""


def _data(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
