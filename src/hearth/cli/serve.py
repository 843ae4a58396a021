"""The flags of `hearth serve`. What runs then is put together in `cli/server.py`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from hearth.cli.console import ConfigFile, Device, Settings, app, log_to_terminal, resolved, told_origins

log = logging.getLogger(__name__)


@app.command(rich_help_panel="Service")
def serve(
    context: typer.Context,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; any but this machine's own needs API keys.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="0 takes any free one.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that run models; one per GPU.")] = None,
    device: Annotated[Device | None, typer.Option(help="auto takes GPUs where there are any.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Device memory of each worker, like 8GiB.")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory that keeps models ready for GPUs.")
    ] = None,
    keep_alive: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long an idle model stays: 5m, 0, -1 for ever.")
    ] = None,
    max_queue: Annotated[int | None, typer.Option(help="Waiting requests; more are answered 429.")] = None,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Keys that are asked for; by default keys.json in the data directory."
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            metavar="ORIGIN",
            help="Web pages that may ask from a browser, like https://chat.example; may be repeated.",
        ),
    ] = None,
    data_dir: Annotated[
        str | None,  # an empty path would be that of the current directory
        typer.Option(
            "--data-dir",
            metavar="DIR",
            help="Where models, keys and logs are kept; HEARTH_DATA_DIR or ~/.hearth if not given.",
        ),
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Serve all deployed models behind one endpoint, by the APIs of OpenAI, Anthropic and Ollama.

    Models are loaded when somebody asks for them and make room when they are idle. Ctrl-C or SIGTERM ends it:
    running requests are finished first. Settings that have no flag of their own are given by --set or in the
    file: `hearth config` lists them. All of them are read from the environment, too: service.port is
    HEARTH_SERVICE_PORT there.

    [bold]Examples[/bold]

      hearth serve

      hearth serve --device cpu --workers 2 --memory 1GiB

      hearth serve --keep-alive 30m --host-memory 64GiB --config hearth.toml

      hearth serve --host 0.0.0.0 --set models.qwen-7b.pinned=true
    """
    flags = {
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
    }
    configuration = resolved(config, settings, flags)
    configuration.print_notes()
    log_to_terminal(configuration.config)
    if configuration.origins:
        log.info("settings %s", told_origins(configuration.origins))
    from hearth.cli.server import run_service

    run_service(configuration.config, template=context.obj)
