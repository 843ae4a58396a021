"""Collects garbage in the gateway when it has been idle for a while, see `system/garbage.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hearth.control.observe.exchange_record import ExchangeRecord
from hearth.system import garbage


class IdleCollection:
    """Mutable; used on the event loop alone."""

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self._is_idle = is_idle
        self._ended_s = 0.0  #: when the last exchange did, on the loop's clock
        self._timer: asyncio.TimerHandle | None = None

    def exchange_ended(self, _record: ExchangeRecord) -> None:
        loop = asyncio.get_running_loop()
        self._ended_s = loop.time()
        if self._timer is None:  # one for all that end meanwhile
            self._timer = loop.call_later(garbage.QUIET_S, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        if not self._is_idle():  # the end of the next exchange has it looked again
            return
        if loop.time() < (quiet_s := self._ended_s + garbage.QUIET_S):
            self._timer = loop.call_at(quiet_s, self._look)
        elif garbage.is_due():
            garbage.collect()
