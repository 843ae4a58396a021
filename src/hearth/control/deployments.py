"""The models that the service offers, as they come and go: registry, catalog and brain are kept in step.

It converts nothing, and where models run is the brain's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from hearth.control.catalog import Catalog, Entry
from hearth.control.datadir import DataDir
from hearth.control.deploy import DeployDone, DeployOrder, DeployProgress, deploying, remove_files, switch
from hearth.control.driver import Driver
from hearth.control.registry import Deployed, Place, Registry
from hearth.errors import ConfigError, DataDirError, HearthError, StoreError
from hearth.policy.fleet import events
from hearth.policy.fleet.events import ModelProfile
from hearth.store.keeper_client import KeeperClient
from hearth.types import ModelId

#: For the keeper to forget a model, which takes it milliseconds.
FORGET_S = 10.0

log = logging.getLogger(__name__)


class Deployments:
    """Mutable; used on the event loop alone. Files are deleted on other threads."""

    def __init__(
        self, registry: Registry, catalog: Catalog, driver: Driver, keeper: KeeperClient, data_dir: DataDir
    ) -> None:
        self._registry, self._catalog, self._driver = registry, catalog, driver
        self._keeper, self._data_dir = keeper, data_dir
        #: Files that are being deleted; the event loop itself holds no task.
        self._clearing: set[asyncio.Task[None]] = set()
        #: Two models may be loaded from one URL: while the files of one are deleted, no other is registered.
        self._files = asyncio.Lock()
        for entry in catalog.entries():
            driver.post(events.ModelDeployed(driver.now_s, entry.profile))

    def entries(self) -> list[Entry]:
        self._follow()
        return self._catalog.entries()

    def find(self, name: str) -> Entry:
        """Raises UnknownModel. `name` may be an alias."""
        self._follow()
        return self._catalog.find(name)

    async def deploy(self, order: DeployOrder) -> AsyncGenerator[DeployProgress | Entry, None]:
        """Progress as it is made, and last the model, which is offered then. Leaving early calls it off.

        Raises:
            HearthError: it cannot be done; whatever had the name before is offered as before.
        """
        async with aclosing(deploying(order, self._data_dir)) as progress:
            async for event in progress:
                if not isinstance(event, DeployDone):
                    yield event
                    continue
                async with self._files:
                    before = self._register(event.deployed, order.overwrite)
                if before is not None and before != event.deployed.place:
                    try:
                        await self._clear(before)
                    except StoreError as error:  # what was ordered is done all the same
                        log.warning("files_left reason=%s", error)
                yield self._catalog.find(event.deployed.name)

    async def remove(self, name: str) -> None:
        """Its files go too, those that were made for it.

        Raises:
            UnknownModel: there is none.
            StoreError: files cannot be deleted. The model is gone all the same.
        """
        self._follow()
        if self._registry.place(name) is None:  # what the catalog could not read has a row, too
            name = self._catalog.find(name).deployed.name
        place = self._registry.remove(name)
        self._refresh()
        await self._clear(place)

    def _register(self, deployed: Deployed, overwrite: bool) -> Place | None:
        """What had the name before. Raises NameTaken; ConfigError where the configuration forbids it."""
        if not Path(deployed.directory).is_dir():
            raise StoreError(f"the files of `{deployed.name}` were removed meanwhile; deploy it again")
        known = self._profiles()
        try:
            with self._registry.transaction():
                before = switch(deployed, overwrite, self._registry)
                self._catalog.refresh()
        except BaseException:
            self._catalog.refresh()  # to what it was
            raise
        known.pop(ModelId(deployed.name), None)  # the same once more is news, too
        self._tell(known)
        return before

    def _follow(self) -> None:
        """Models may come and go without the service: it may have been starting when they did."""
        try:
            if self._registry.has_changed():
                self._refresh()
        except (ConfigError, DataDirError) as error:  # what is offered already is offered on
            log.warning("registry_not_followed reason=%s", error)

    def _refresh(self) -> None:
        known = self._profiles()
        self._catalog.refresh()
        self._tell(known)

    def _profiles(self) -> dict[ModelId, ModelProfile]:
        return {entry.profile.model: entry.profile for entry in self._catalog.entries()}

    def _tell(self, known: dict[ModelId, ModelProfile]) -> None:
        """The brain, of what differs."""
        profiles = self._profiles()
        for model in known.keys() - profiles.keys():
            self._driver.post(events.ModelRemoved(self._driver.now_s, model))
        for model, profile in profiles.items():
            if known.get(model) != profile:
                self._driver.post(events.ModelDeployed(self._driver.now_s, profile))

    async def _clear(self, place: Place) -> None:
        """Whoever asked may leave; it is finished without them."""
        task = asyncio.create_task(self._clear_files(place))
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)
        await asyncio.shield(task)

    async def _clear_files(self, place: Place) -> None:
        async with self._files:
            if await asyncio.to_thread(_is_shared, place, self._registry.places()):
                return
            try:
                await asyncio.wait_for(self._keeper.forget(place.where), FORGET_S)
            except (HearthError, TimeoutError) as error:  # it may be starting anew, and reads the disk then
                log.warning("keeper_not_told where=%s reason=%r", place.where, error)
            await asyncio.to_thread(remove_files, place, self._data_dir)


def _is_shared(place: Place, others: list[Place]) -> bool:
    directory = Path(place.directory).resolve()
    return any(other.where == place.where or Path(other.directory).resolve() == directory for other in others)
