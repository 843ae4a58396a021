"""Tells the keeper how many requests came for each model, so that host memory keeps what is asked for.

Prices nothing: the keeper does, by the same reload cost as the brain.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress

from hearth.core.errors import HearthError
from hearth.store.keeper_client import KeeperClient

#: Requests are told at once, but no more often than this: a demand is estimated over minutes.
INTERVAL_S = 5.0

log = logging.getLogger(__name__)


class DemandReports:
    """Counts requests until the keeper has been told of them. Mutable; used on the event loop alone."""

    def __init__(self, keeper: KeeperClient, interval_s: float = INTERVAL_S) -> None:
        self._keeper, self._interval_s = keeper, interval_s
        self._untold: Counter[str] = Counter()  #: requests by the digest of their model
        self._has_come = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def request_came(self, digest: str) -> None:
        """Count a request for the model of this digest."""
        self._untold[digest] += 1
        self._has_come.set()

    async def close(self) -> None:
        """Stop telling; what was not told yet is dropped with the keeper's other estimates."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        is_failing = False  # one line for a run of failures
        while True:
            await self._has_come.wait()
            self._has_come.clear()
            told, self._untold = self._untold, Counter()
            try:
                await self._keeper.count_requests(told)
                is_failing = False
            except (HearthError, OSError) as error:  # the keeper may be starting anew: told next time
                self._untold.update(told)
                if not is_failing:
                    log.warning("demand_not_told reason=%s", error)
                is_failing = True
            except Exception:  # the task's top: prices go by loads then, and the service goes on
                log.exception("demand_reports_broke")
            await asyncio.sleep(self._interval_s)
