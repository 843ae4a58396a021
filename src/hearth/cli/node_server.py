"""Runs the node of `hearth join` on this machine until it is told to end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import typer
import uvloop

from hearth.cli.server import log_file, raise_open_files, signals_to_end
from hearth.control.datadir import DataDir
from hearth.control.node_service import run_agent
from hearth.core.config import HearthConfig
from hearth.node.credentials import Credentials
from hearth.node.devices import check_host_memory, resolve
from hearth.node.template_process import TemplateProcess


def run_node(
    config: HearthConfig, path: Path, credentials: Credentials, template: TemplateProcess | None = None
) -> None:
    """Serve until SIGTERM or SIGINT. `path`: the data directory. `template`: as for `run_service`.

    Raises HearthError: the head has refused this node, the data directory is in use, or no worker can run.
    """
    devices = resolve(config.service)
    check_host_memory(config.store, devices)
    with (
        DataDir.hold(path) as data_dir,
        log_file(data_dir.log_path, config.log.format),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        raise_open_files()

        async def serve() -> None:
            agent = run_agent(config, devices, data_dir, credentials, template, typer.echo)
            async with signals_to_end() as signals:
                running, signalled = asyncio.create_task(agent), asyncio.create_task(signals.get())
                await asyncio.wait((running, signalled), return_when=asyncio.FIRST_COMPLETED)
                signalled.cancel()
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running

        runner.run(serve())
