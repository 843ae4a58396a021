"""What the gateway tells the keeper of the store and asks of it while it serves. Moves no bytes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from hearth.control.deploy.catalog import Catalog
from hearth.control.driver import Driver
from hearth.control.observe.views import HostMemoryView
from hearth.core.errors import HearthError
from hearth.core.types import ModelId
from hearth.policy.fleet import events
from hearth.policy.fleet.events import Action, Event
from hearth.store.keeper_client import KeeperClient

log = logging.getLogger(__name__)

#: Requests are told at once, but no more often than this: a demand is estimated over minutes.
INTERVAL_S = 5.0


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


class ResidencyReporter:
    """Mutable; used on the event loop alone. However often `ask` is called, one question is under way."""

    def __init__(self, keeper: KeeperClient, catalog: Catalog, driver: Driver) -> None:
        self._keeper, self._catalog, self._driver = keeper, catalog, driver
        self._wanted = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def ask(self) -> None:
        """Have the brain told anew; returns at once."""
        self._wanted.set()

    def observe(self, event: Event, actions: Sequence[Action]) -> None:
        """Ask anew when a model was loaded or has left a worker: a load brings bytes to host memory."""
        if isinstance(event, events.ModelReady) or any(isinstance(one, events.Evict) for one in actions):
            self.ask()

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            models: dict[str, list[ModelId]] = {}  # by digest: the same bytes may have several names
            for entry in self._catalog.entries():
                models.setdefault(entry.deployed.digest, []).append(entry.profile.model)
            try:
                counted = await self._keeper.count(list(models))
            except (HearthError, OSError) as error:  # it may be starting anew; the next load asks again
                log.warning("residency_unknown reason=%s", error)
                continue
            for digest, bytes_by_rung in counted.items():
                for model in models.get(digest, ()):
                    self._driver.post(events.ResidencyReported(self._driver.now_s, model, bytes_by_rung))


class HostReports:
    """Mutable; used on the event loop alone."""

    def __init__(self, keeper: KeeperClient) -> None:
        self._keeper = keeper
        self.view: HostMemoryView | None = None  #: None: no keeper has answered

    async def refresh(self, patience_s: float) -> None:
        """Ask the keeper anew. One that is only slow has what it had; one that is gone holds nothing."""
        try:
            async with asyncio.timeout(patience_s):
                measured = await self._keeper.host_memory()
        except TimeoutError:
            log.debug("host_memory_late patience_s=%g", patience_s)
        except (HearthError, OSError) as error:
            log.debug("host_memory_unknown reason=%s", error)
            self.view = None
        else:
            self.view = HostMemoryView(measured.used_bytes, measured.capacity_bytes)
