"""`hearth doctor` and `hearth config`: what this machine offers, which settings apply."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from hearth.cli import local_models
from hearth.cli.console import (
    DEFAULT_DATA_DIR,
    AsJson,
    ConfigFile,
    DataDirectory,
    Settings,
    app,
    data_dir_of,
    err,
    format_origins,
    out,
    print_table,
    resolved,
)
from hearth.cli.endpoint import recognised
from hearth.cli.figures import size
from hearth.cli.snapshot import look_at_snapshots
from hearth.control.datadir import is_held, running_service
from hearth.control.observe.pool_views import fallbacks
from hearth.core.config import HearthConfig, plain, to_toml
from hearth.core.errors import DataDirError, ServiceError
from hearth.core.types import LOCAL

if TYPE_CHECKING:
    from hearth.cli.doctor_checks import StoreReport


@app.command(rich_help_panel="This machine")
def doctor(
    context: typer.Context,
    data_dir: DataDirectory = DEFAULT_DATA_DIR,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Report devices, versions, memory, limits and the service.

    Notes list missing features, active fallbacks and how to fix them.

    [bold]Examples[/bold]

      hearth doctor

      hearth doctor --json
    """
    configuration = resolved(config, settings)
    applied = configuration.config
    with err.status("examining this machine"):
        from hearth.cli.doctor_checks import examine

        data_dir = data_dir_of(context, data_dir, applied)
        models = _models(data_dir, applied)
        report, service = examine(applied.store, data_dir), _service(data_dir, models.num_models)
        snapshots = look_at_snapshots(data_dir)
        notes = (*report.notes, *models.notes, *snapshots.notes, *configuration.notes)
        report = replace(report, notes=notes)
    origins = dict(configuration.origins)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    **asdict(report),
                    "settings": origins,
                    "snapshots": asdict(snapshots),
                    "service": asdict(service),
                }
            )
        )
        return
    facts = asdict(report)
    for name in ("devices", "notes", "store", "service_store", "kernel_caches"):
        del facts[name]
    facts["store"] = _disk(report.store)
    for number, device in enumerate(report.devices):
        facts[f"device {number}"] = (
            f"{device.name}, {device.free_bytes / 2**30:.1f} of {device.total_bytes / 2**30:.1f} GiB free"
        )
    facts["data directory"] = _disk(report.service_store)
    for number, cache in enumerate(report.kernel_caches if report.kernels == "triton" else ()):
        facts[f"kernel cache {number}"] = (
            f"{cache.path}, {cache.num_entries} kernels, {size(cache.num_bytes)}"
        )
    facts["settings"] = format_origins(origins) or "all defaults"
    facts["snapshots"] = f"{snapshots.number}, {size(snapshots.num_bytes)}"
    facts["models"] = "unknown" if models.num_models is None else f"{models.num_models} deployed"
    facts["service"] = service.status if service.url is None else f"{service.status}, {service.url}"
    for number, worker in enumerate(service.workers):
        facts[f"worker {number}"] = worker
    print_table("hearth doctor", facts)
    for note in (*report.notes, *service.notes):
        out.print(Text(f"note: {note}", style="yellow"))


def _disk(store: StoreReport) -> str:
    reads = "with" if store.has_direct_reads else "without"
    return f"{store.path}, {store.free_bytes / 2**30:.1f} GiB free, {reads} direct reads"


@dataclass(frozen=True, slots=True)
class _ServiceReport:
    data_dir: str
    num_models: int | None  #: None: the registry cannot be read
    status: str  #: not running, starting, ok, failing, draining, or why it does not respond
    url: str | None
    workers: list[str]
    notes: tuple[str, ...] = ()  #: missing features, and why


@dataclass(frozen=True, slots=True)
class _ModelsReport:
    num_models: int | None  #: None: the registry cannot be read, see the notes
    notes: list[str]


def _models(data_dir: Path, config: HearthConfig) -> _ModelsReport:
    try:
        unused = local_models.unused_settings(data_dir, config.models)
        return _ModelsReport(len(local_models.names(data_dir)), unused)
    except DataDirError as error:  # of an older Hearth, for example; the error says what to do
        return _ModelsReport(None, [str(error)])


def _service(data_dir: Path, num_models: int | None) -> _ServiceReport:
    found = None
    try:
        found = running_service(data_dir)
        if found is None:
            status = "starting or stopping" if is_held(data_dir) else "not running"
            return _ServiceReport(str(data_dir), num_models, status, None, [])
        with recognised(found, None, data_dir) as client:
            status, view = client.health().status, client.ps()
    except (DataDirError, ServiceError) as error:
        return _ServiceReport(str(data_dir), num_models, str(error), None if found is None else found.url, [])
    is_cluster = any(worker.node != LOCAL for worker in view.workers)
    workers = [
        (f"{worker.worker} on node {worker.node}" if is_cluster else worker.worker)
        + f": {worker.device or worker.kind}, {worker.state}, {size(worker.used_bytes)} of "
        f"{size(worker.budget_bytes)} in use, {worker.num_restarts} restarts"
        + "".join(f", {fallback}" for fallback in fallbacks(worker))
        + ("" if worker.reason is None else f", {worker.reason}")
        + "".join(
            f", {one.model} cannot be pinned yet"
            for one in view.models
            if one.worker == worker.worker and one.is_pin_refused
        )
        for worker in view.workers
    ]
    return _ServiceReport(str(data_dir), num_models, status, found.url, workers, view.notes)


@app.command("config", rich_help_panel="This machine")
def show_config(config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False) -> None:
    """Print all settings, and where each non-default value comes from.

    The output is TOML that can be saved and edited. Flags override environment variables, such as
    HEARTH_SERVICE_PORT for service.port, which override the file.

    [bold]Examples[/bold]

      hearth config > hearth.toml

      hearth config --config hearth.toml --set engine.max_seqs=64
    """
    configuration = resolved(config, settings)
    configuration.print_notes()
    applied = configuration.config
    text = json.dumps(plain(applied)) if as_json else to_toml(applied, configuration.origins)
    typer.echo(text, nl=as_json)
