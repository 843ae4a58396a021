"""Hands the records of ended exchanges to those who write them down, a few at a time.

What is done once per request finds the processor's caches full of other things, and then takes two to
three times as long as when it is done again and again. Nobody waits for a span or for a line of a log, so
these can wait for others. Writes nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from hearth.control.exchange_record import ExchangeRecord
from hearth.control.metrics import Metrics

log = logging.getLogger(__name__)

#: So many are handed on at once: enough to tell, and over in two milliseconds.
MAX_WAITING = 16
#: The longest that a record waits for others.
DELAY_S = 0.1


class ExchangeBatches:
    """Records that wait to be handed on. Mutable; used on the event loop alone."""

    def __init__(self, sinks: Sequence[Callable[[ExchangeRecord], None]], metrics: Metrics) -> None:
        """Hand records to `sinks`; each gets a record after the sinks before it have had it."""
        self._sinks = sinks
        self._unwritten = metrics.fallbacks.labels("exchange_unwritten")
        self._waiting: list[ExchangeRecord] = []
        self._timer: asyncio.TimerHandle | None = None  #: None: nothing waits
        self._is_closed = False
        self.note: str | None = None  #: why something is missing, for `hearth doctor`; None: nothing is

    def add(self, record: ExchangeRecord) -> None:
        self._waiting.append(record)
        if len(self._waiting) >= MAX_WAITING or self._is_closed:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self.flush)

    def flush(self) -> None:
        """Hand on what waits. What a sink makes of one record keeps no other from being written down."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for sink in self._sinks:
            for record in waiting:
                try:
                    sink(record)
                except (
                    Exception
                ) as error:  # such as that of a sampler which is a plugin: no request ends by it
                    self._note_fault(record, error)

    def close(self) -> None:
        """Hand on what waits, and whatever still comes at once: an exchange may end after the service."""
        self._is_closed = True
        self.flush()

    def _note_fault(self, record: ExchangeRecord, error: Exception) -> None:
        self._unwritten.inc()
        if self.note is None:  # once, not with every request
            log.error("exchange_unwritten id=%s", record.request_id, exc_info=error)
        self.note = f"spans or lines of the access log are missing for some requests: {error!r}"
