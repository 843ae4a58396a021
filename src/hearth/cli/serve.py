"""The flags of `hearth serve`; `server.py` runs the service."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from hearth.cli.console import ConfigFile, Device, Settings, app, format_origins, log_to_terminal, resolved
from hearth.core.config import HearthConfig, ModelConfig
from hearth.core.errors import UnknownModel

log = logging.getLogger(__name__)


@app.command(rich_help_panel="Service")
def serve(
    context: typer.Context,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="Models to deploy first, as by `hearth deploy SOURCE`, unless they are.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; beyond localhost, API keys are required.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0: any free port.")] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes; by default one per GPU.")] = None,
    device: Annotated[Device | None, typer.Option(help="auto: GPUs if there are any.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Device memory per worker, like 8GiB.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory that caches models for GPUs.")
    ] = None,
    keep_alive: Annotated[
        str | None, typer.Option(metavar="TIME", help="Idle time before eviction: 5m, 0, or -1 for never.")
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Maximum queued requests; more get status 429.")
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of API keys; by default keys.json in the data directory."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            metavar="ORIGIN",
            help="CORS origin that may send requests, like https://chat.example; may be repeated.",
        ),
    ] = None,
    data_dir: Annotated[
        str | None,  # an empty path would be that of the current directory
        typer.Option(
            "--data-dir",
            metavar="DIR",
            help="Directory for models, keys and logs; by default HEARTH_DATA_DIR or ~/.hearth.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="ray[:HOST:PORT]",
            help="Add the machines of a Ray cluster that this machine belongs to.",
        ),
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Serve the deployed models over HTTP.

    One endpoint speaks the APIs of OpenAI, Anthropic and Ollama. Models are loaded on request and evicted
    when they are idle and others need the memory. Ctrl-C or SIGTERM stops the service after running requests
    have finished. Each SOURCE is deployed while the service starts, unless it is already, like the
    setting models.NAME.source. Every setting can be given by --set, in the --config file or as an environment
    variable: service.port is HEARTH_SERVICE_PORT. `hearth config` lists them.

    [bold]Examples[/bold]

      hearth serve

      hearth serve hf:Qwen/Qwen3-0.6B --set models.qwen3-0.6b.context=4096

      hearth serve --device cpu --workers 2 --memory 1GiB

      hearth serve --keep-alive 30m --host-memory 64GiB --config hearth.toml

      hearth serve --host 0.0.0.0 --set models.qwen-7b.pinned=true

      hearth serve --cluster ray
    """
    flags: dict[str, object | None] = {
        "service.host": host,
        "service.port": port,
        "service.workers": workers,
        "service.device": None if device is None else device.value,
        "service.memory_bytes": memory,
        "store.host_bytes": host_memory,
        "service.keep_alive": keep_alive,
        "service.max_queue": max_queue,
        "service.api_keys_file": None if api_keys_file is None else str(api_keys_file),
        "service.allowed_origins": allow_origin or None,
        "service.data_dir": data_dir,
        "cluster.manager": cluster,
    }
    configuration = resolved(config, settings, flags)
    for source in sources or ():
        flags |= _declared(source, configuration.config)
    configuration = resolved(config, settings, flags)
    configuration.print_notes()
    log_to_terminal(configuration.config)
    if configuration.origins:
        log.info("settings %s", format_origins(configuration.origins))
    from hearth.cli.server import run_service

    def tell(url: str, _: object) -> None:
        if configuration.config.log.format != "json":  # there, `serving` has the address
            typer.echo(f"dashboard: {url}/")

    run_service(configuration.config, on_ready=tell, template=context.obj)


def _declared(source: str, config: HearthConfig) -> dict[str, object]:
    """Return the settings that deploy a source, none for the name of a deployed model.

    A repository of the Hub can be asked for by its whole name, too, as users of vLLM do.
    """
    from hearth.cli import local_models
    from hearth.cli.deploy import absolute_source
    from hearth.control.deploy.sources import HubSource, default_name, parse_source

    with suppress(UnknownModel):
        local_models.find(Path(config.service.data_dir).expanduser(), source)
        return {}
    parsed = parse_source(absolute_source(source, is_elsewhere=False))
    name = default_name(parsed)
    known = config.models.get(name, ModelConfig())
    aliases = {*known.aliases, *([parsed.repo_id] if isinstance(parsed, HubSource) else [])}
    return {f"models.{name}.source": parsed.text, f"models.{name}.aliases": sorted(aliases)}
