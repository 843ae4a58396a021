"""The keeper's last report of host memory, for views and metrics. Keeps no books: those are the keeper's."""

from __future__ import annotations

import asyncio
import logging

from hearth.control.observe.views import HostMemoryView
from hearth.core.errors import HearthError
from hearth.store.keeper_client import KeeperClient

log = logging.getLogger(__name__)


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
