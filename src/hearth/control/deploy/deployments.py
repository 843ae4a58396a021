"""The models that the service offers, as they come and go. Keeps registry, catalog and brain in step."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from hearth.control.datadir import DataDir
from hearth.control.deploy.catalog import Catalog, CatalogEntry
from hearth.control.deploy.deploy import (
    DeployDone,
    DeployOrder,
    DeployProgress,
    Registered,
    clear_snapshots,
    deploying,
    remove_files,
    switch,
)
from hearth.control.deploy.deployed import Deployed, DeployedAdapter, ModelLocation
from hearth.control.deploy.preset import Preset
from hearth.control.deploy.registry import Registry
from hearth.control.deploy.upstream_view import upstream_view
from hearth.control.driver import Driver
from hearth.control.observe.exchange_record import current_exchange
from hearth.control.observe.views import ModelView, UpstreamView
from hearth.control.requests.caller import Caller
from hearth.core.errors import ConfigError, DataDirError, HearthError, ServiceError, StoreError, UnknownModel
from hearth.core.types import AdapterId, Digest, ModelId, RequestId
from hearth.policy.fleet import events
from hearth.policy.fleet.pipelines import share_layers
from hearth.policy.fleet.profile import ModelProfile
from hearth.policy.fleet.refusals import explain_misfit
from hearth.store.keeper_client import UPSTREAM_CACHE_S, KeeperClient
from hearth.store.tiers.upstream import note_version, read_upstream

#: Time for the keeper to forget a model, which takes it milliseconds.
FORGET_S = 10.0

log = logging.getLogger(__name__)


class Deployments:
    """Mutable; used on the event loop alone. Files are deleted on other threads."""

    def __init__(
        self,
        registry: Registry,
        catalog: Catalog,
        driver: Driver,
        keeper: KeeperClient,
        data_dir: DataDir,
        errors: int | None = None,
    ) -> None:
        self._errors = errors
        #: Called when `places` has changed.
        self.tell_nodes: Callable[[], None] = lambda: None
        #: Why models that the configuration declares are not deployed, by name.
        self.pending: dict[str, str] = {}
        self._registry, self._catalog, self._driver = registry, catalog, driver
        self._keeper, self._data_dir = keeper, data_dir
        #: Models and adapters that were removed or replaced, until the requests that use them have ended.
        self._leaving: list[Deployed | DeployedAdapter] = []
        #: Tasks that delete files: the event loop keeps only weak references.
        self._clearing: set[asyncio.Task[None]] = set()
        #: Held while files are deleted: another model may be registered from the same URL.
        self._files = asyncio.Lock()
        for entry in catalog.entries():
            driver.post(events.ModelDeployed(driver.now_s, entry.profile))

    def entries(self, allowed: Collection[str] | None = None) -> list[CatalogEntry]:
        self._follow()
        return self._catalog.entries(allowed)

    def adapters(self, allowed: Collection[str] | None = None) -> list[CatalogEntry]:
        self._follow()
        return self._catalog.adapters(allowed)

    def find(self, name: str, allowed: Collection[str] | None = None) -> CatalogEntry:
        self._follow()
        return self._catalog.find(name, allowed)

    def places(self) -> dict[Digest, str]:
        """Return where each model and adapter is that nodes may have to load, by its digest."""
        return {Digest(one.digest): one.where for one in (*self._leaving, *self._catalog.all_deployed())}

    # Models as callers see them: those that their keys may use.

    def find_for(self, name: str, caller: Caller) -> CatalogEntry:
        """Like `find`, for a caller; notes the model in the exchange's record.

        Raises UnknownModel, or ServiceError for a model that the configuration declares.
        """
        try:
            entry = self.find(name, caller.terms.models)
        except UnknownModel:
            if name not in self.pending or name not in (caller.terms.models or (name,)):
                raise
            raise ServiceError(f"`{name}` is not served yet: {self.pending[name]}") from None
        if (exchange := current_exchange()) is not None:
            exchange.model = entry.name
        return entry

    def models(self, caller: Caller) -> list[ModelView]:
        allowed = caller.terms.models
        entries = [*self.entries(allowed), *self.adapters(allowed), *self._catalog.presets(allowed)]
        return [self._catalog.view(entry) for entry in entries]

    def model(self, name: str, caller: Caller) -> ModelView:
        return self._catalog.view(self.find_for(name, caller))

    def may_use(self, model: str, caller: Caller) -> bool:
        allowed = caller.terms.models
        return allowed is None or model in {*allowed, *(view.name for view in self.models(caller))}

    async def show(self, name: str, caller: Caller, *, look: bool) -> ModelView:
        """`look`: ask upstream first. Others than admins may get a recent answer."""
        entry = self.find_for(name, caller)
        max_age_s = 0.0 if caller.has_role("admin") else UPSTREAM_CACHE_S
        deployed = entry.adapter or entry.deployed
        upstream = await self.upstream(deployed, look=look, max_age_s=max_age_s)
        return replace(
            self._catalog.view(entry),
            upstream=upstream,
            stages=share_layers(self._driver.fleet, entry.profile),
            warning=explain_misfit(self._driver.fleet, entry.profile),
        )

    # Changes.

    async def deploy(self, order: DeployOrder) -> AsyncGenerator[DeployProgress | ModelView, None]:
        """Yield progress, and last the model. Closing the generator cancels. Raises HearthError."""
        order = replace(order, kind=self._catalog.kind, aliases=self._catalog.aliases)
        async with aclosing(deploying(order, self._data_dir, self._errors)) as progress:
            async for event in progress:
                if not isinstance(event, DeployDone):
                    yield event
                    continue
                async with self._files:
                    before = self._catalog.all_deployed()
                    registered = self._register(event.deployed, order.overwrite)
                if registered.replaced not in (None, event.deployed.location):
                    try:
                        await self._clear(event.deployed.name, [registered.replaced], before)
                    except StoreError as error:  # the deployment is done all the same
                        log.warning("files_left reason=%s", error)
                entry = self._catalog.find(event.deployed.name)
                misfit = explain_misfit(self._driver.fleet, entry.profile)
                warnings = [one for one in (registered.warning, misfit) if one is not None]
                yield replace(self._catalog.view(entry), warning="; ".join(warnings) or None)

    def put_preset(self, name: str, base: str, preset: Preset) -> ModelView:
        """Make or replace a preset. Raises as `Registry.put_preset` does."""
        base = self.find(base).name
        self._registry.put_preset(name, base, preset, time.time())
        self._refresh()
        return self._catalog.view(self._catalog.find(name))

    async def remove(self, name: str, *, with_adapters: bool = False) -> None:
        """Remove a model or an adapter, with the files that were made for it, or a preset.

        While requests still use it, its files stay until the last of them has ended.

        Raises:
            UnknownModel: there is none.
            HasAdapters: it has adapters, and `with_adapters` is False.
            StoreError: files cannot be deleted. The model is removed all the same.
        """
        self._follow()
        if self._registry.location(name) is None:  # an unreadable row has a location, too
            name = self._catalog.find(name).name
        before = self._catalog.all_deployed()
        locations = self._registry.remove(name, with_adapters=with_adapters)
        self._refresh()
        await self._clear(name, locations, before)

    async def upstream(
        self, deployed: Deployed | DeployedAdapter, *, look: bool, max_age_s: float = 0.0
    ) -> UpstreamView | None:
        """None: the source is a path. `look`: ask the source, unless it answered in the last `max_age_s`."""
        directory = Path(deployed.directory)
        known = await asyncio.to_thread(read_upstream, directory)
        if known is None:
            return None
        if not look:
            return upstream_view(deployed, known, has_looked=False, failure=None)
        try:
            version = await self._keeper.upstream_version(deployed.source, max_age_s)
        except HearthError as error:
            return upstream_view(deployed, known, has_looked=False, failure=str(error))
        seen = await asyncio.to_thread(note_version, directory, version) or known
        return upstream_view(deployed, seen, has_looked=True, failure=None)

    def _register(self, deployed: Deployed | DeployedAdapter, overwrite: bool) -> Registered:
        """Raises NameTaken, ConfigError, and as `Registry.replace` does."""
        if not Path(deployed.directory).is_dir():
            raise StoreError(f"the files of `{deployed.name}` were removed meanwhile; deploy it again")
        known, adapters, bases = self._profiles(), self._catalog.adapter_ids(), self._catalog.bases()
        try:
            with self._registry.transaction():
                registered = switch(deployed, overwrite, self._registry)
                self._catalog.refresh()
        except BaseException:
            self._catalog.refresh()  # to what it was
            raise
        known.pop(ModelId(deployed.name), None)  # deploying the same again counts as a change
        self._post_changes(known, adapters, bases)
        if registered.warning is not None:
            log.warning("adapters_outdated base=%s reason=%s", deployed.name, registered.warning)
        return registered

    def _follow(self) -> None:
        """Apply changes that other processes made to the registry."""
        try:
            if self._registry.has_changed():
                self._refresh()
        except (ConfigError, DataDirError, StoreError) as error:  # known models are served on
            log.warning("registry_not_followed reason=%s", error)

    def _refresh(self) -> None:
        known, adapters, bases = self._profiles(), self._catalog.adapter_ids(), self._catalog.bases()
        self._catalog.refresh()
        self._post_changes(known, adapters, bases)

    def _profiles(self) -> dict[ModelId, ModelProfile]:
        return {entry.profile.model: entry.profile for entry in self._catalog.entries()}

    def _post_changes(
        self, known: dict[ModelId, ModelProfile], adapters: set[AdapterId], bases: set[ModelId]
    ) -> None:
        if self._catalog.bases() - bases:
            self._driver.adapters_deployed()
        for adapter in adapters - self._catalog.adapter_ids():
            self._driver.forget_adapter(adapter)
        profiles = self._profiles()
        for model in known.keys() - profiles.keys():
            self._driver.post(events.ModelRemoved(self._driver.now_s, model))
        for entry in self._catalog.entries():
            if known.get(entry.profile.model) != entry.profile:
                self._driver.post(events.ModelDeployed(self._driver.now_s, entry.profile))
                self._driver.prepare(entry.prepare_order)
        self.tell_nodes()

    async def _clear(
        self, name: str, locations: Sequence[ModelLocation], before: Sequence[Deployed | DeployedAdapter]
    ) -> None:
        """Delete files once no request uses them, in the background, even if the caller is cancelled.

        `before`: all that was deployed. Nodes may load what lies there until the requests have ended.
        """
        users = self._driver.requests.users_of(name, {location.where for location in locations})
        for location in locations:
            leaving = [one for one in before if one.location == location]
            self._leaving += leaving
            task = asyncio.create_task(self._clear_files(location, leaving, users))
            self._clearing.add(task)
            task.add_done_callback(self._clearing.discard)
            if users:
                task.add_done_callback(_log_files_left)
            else:
                await asyncio.shield(task)

    async def _clear_files(
        self, location: ModelLocation, leaving: Sequence[Deployed | DeployedAdapter], users: set[RequestId]
    ) -> None:
        await self._driver.requests.wait_ended(users)
        for one in leaving:
            self._leaving.remove(one)
        self.tell_nodes()
        async with self._files:
            await asyncio.to_thread(clear_snapshots, self._data_dir)
            if await asyncio.to_thread(_is_shared, location, self._registry.locations()):
                return
            try:
                await asyncio.wait_for(self._keeper.forget(location.where), FORGET_S)
            except (HearthError, TimeoutError) as error:  # it may be restarting, and then reads the disk
                log.warning("keeper_not_told where=%s reason=%r", location.where, error)
            await asyncio.to_thread(remove_files, location, self._data_dir)


def _log_files_left(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("files_left reason=%s", error)


def _is_shared(location: ModelLocation, others: list[ModelLocation]) -> bool:
    directory = Path(location.directory).resolve()
    return any(
        other.where == location.where or Path(other.directory).resolve() == directory for other in others
    )
