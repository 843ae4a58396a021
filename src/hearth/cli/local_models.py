"""The models of a data directory, for commands without a running service."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hearth.control.datadir import DataDir
from hearth.control.deploy.catalog import Catalog
from hearth.control.deploy.deployed import Deployed, DeployedAdapter
from hearth.control.deploy.names import Names
from hearth.control.deploy.preset import DeployedPreset, Preset
from hearth.control.deploy.registry import Registry
from hearth.control.observe.views import ModelView, UpstreamView
from hearth.core.config import HearthConfig, ModelConfig, ServiceConfig
from hearth.core.errors import HearthError

if TYPE_CHECKING:
    from hearth.control.deploy.deploy import DeployOrder, DeployProgress


def names(data_dir: Path) -> list[str]:
    return [view.name for view in views(data_dir)]


def views(data_dir: Path) -> list[ModelView]:
    if not DataDir(data_dir).has_registry:
        return []
    with Registry(DataDir.open(data_dir)) as registry:
        catalog = _catalog(registry)
        entries = [*catalog.entries(), *catalog.adapters(), *catalog.presets()]
        return [catalog.view(entry) for entry in entries]


def find(data_dir: Path, name: str, *, look: bool = False) -> ModelView:
    if not DataDir(data_dir).has_registry:
        Names([], {}).resolve(name)
    with Registry(DataDir.open(data_dir)) as registry:
        catalog = _catalog(registry)
        entry = catalog.find(name)
        view = catalog.view(entry)
    return replace(view, upstream=_looked(entry.adapter or entry.deployed)) if look else view


def base_of(data_dir: Path, view: ModelView) -> ModelView:
    assert view.base is not None, f"a model: {view.name}"
    return find(data_dir, view.base)


def _looked(deployed: Deployed | DeployedAdapter) -> UpstreamView | None:
    from hearth.control.deploy.upstream_view import upstream_view
    from hearth.store.tiers.upstream import note_version, read_upstream, version_now

    directory = Path(deployed.directory)
    known = read_upstream(directory)
    if known is None:
        return None
    try:
        known = note_version(directory, version_now(deployed.source)) or known
    except HearthError as error:
        return upstream_view(deployed, known, has_looked=False, failure=str(error))
    return upstream_view(deployed, known, has_looked=True, failure=None)


def unused_settings(data_dir: Path, configs: Mapping[str, ModelConfig]) -> list[str]:
    deployed: list[Deployed | DeployedAdapter | DeployedPreset] = []
    if DataDir(data_dir).has_registry:
        with Registry(DataDir.open(data_dir)) as registry:
            deployed = [*registry.all(), *registry.adapters(), *registry.presets()]
    return [
        f"the settings in [models.{name}] are unused, no model of that name is deployed: {hint}"
        for name, hint in Names(deployed, configs).waiting().items()
    ]


def remove(data_dir: Path, name: str, *, with_adapters: bool = False) -> None:
    from hearth.control.deploy.deploy import collect_snapshots, remove_files

    if not DataDir(data_dir).has_registry:
        raise Names([], {}).unknown(name)
    opened = DataDir.open(data_dir)
    with Registry(opened) as registry:
        for location in registry.remove(name, with_adapters=with_adapters):
            remove_files(location, opened)
        collect_snapshots(opened, registry)


def deploy(order: DeployOrder, data_dir: Path) -> Iterator[DeployProgress | ModelView]:
    """Yield progress, and last the model. Closing the generator early cancels the deployment."""
    from hearth.control.deploy.deploy import DeployDone, deploying_here, register
    from hearth.node.devices import resolve

    opened = DataDir.open(data_dir)
    order = replace(order, kind=resolve(ServiceConfig()).kind)
    with Registry(opened) as registry, closing(deploying_here(order, opened)) as events:
        for event in events:
            if isinstance(event, DeployDone):
                registered = register(event.deployed, order.overwrite, registry, opened)
                catalog = _catalog(registry)
                view = catalog.view(catalog.find(event.deployed.name))
                yield replace(view, warning=registered.warning)
            else:
                yield event


def put_preset(data_dir: Path, name: str, base: str, preset: Preset) -> None:
    base = find(data_dir, base).name
    with Registry(DataDir.open(data_dir)) as registry:
        registry.put_preset(name, base, preset, time.time())


def _catalog(registry: Registry) -> Catalog:
    defaults = HearthConfig()
    return Catalog(registry, {}, defaults.engine, defaults.service.keep_alive)
