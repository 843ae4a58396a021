"""Asks the keeper how much of each model is in host memory and on disk; tells the brain. Moves nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from hearth.control.deploy.catalog import Catalog
from hearth.control.driver import Driver
from hearth.core.errors import HearthError
from hearth.core.types import ModelId
from hearth.policy.fleet import events
from hearth.policy.fleet.events import Action, Event
from hearth.store.keeper_client import KeeperClient

log = logging.getLogger(__name__)


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
