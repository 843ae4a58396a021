"""The keeper's last report of host memory, for views and metrics. Keeps no books: those are the keeper's."""

from __future__ import annotations

import asyncio
import logging

from hearth.control.views import HostMemoryView
from hearth.errors import HearthError
from hearth.store.keeper_client import KeeperClient

log = logging.getLogger(__name__)


class HostReports:
    """Mutable; used on the event loop alone."""

    def __init__(self, keeper: KeeperClient) -> None:
        self._keeper = keeper
        self.view: HostMemoryView | None = None  #: None: no keeper has answered

    async def refresh(self, patience_s: float) -> None:
        """Ask the keeper anew; one that does not answer in time is starting again and holds nothing."""
        try:
            async with asyncio.timeout(patience_s):
                measured = await self._keeper.host_memory()
        except (HearthError, OSError, TimeoutError) as error:
            log.debug("host_memory_unknown reason=%s", error)
            self.view = None
        else:
            self.view = HostMemoryView(measured.used_bytes, measured.capacity_bytes)
