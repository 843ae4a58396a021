"""Runs the node of `hearth join` on this machine until it is told to end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import typer
import uvloop

from hearth.cli.server import log_file, raise_open_files, signals_to_end
from hearth.control.datadir import DataDir
from hearth.control.observe.log_rotation import LogRotation
from hearth.control.service import log_unused_memory
from hearth.core.config import HearthConfig
from hearth.node.agent import Agent
from hearth.node.credentials import Credentials
from hearth.node.devices import check_host_memory, resolve
from hearth.node.process_log import ProcessLog, logs_to_stderr
from hearth.node.template_process import TemplateProcess
from hearth.node.worker_template import WorkerTemplate


def run_node(
    config: HearthConfig, path: Path, credentials: Credentials, template: TemplateProcess | None = None
) -> None:
    """Serve until SIGTERM or SIGINT. `path`: the data directory. `template`: as for `run_service`.

    Raises HearthError: the head has refused this node, the data directory is in use, or no worker can run.
    """
    devices = resolve(config.service)
    check_host_memory(config.store, devices)
    log_unused_memory(config, devices)
    with (
        DataDir.hold(path) as data_dir,
        log_file(data_dir.log_path),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        raise_open_files()
        process_log = ProcessLog(data_dir.log_path, to_stderr=logs_to_stderr())

        async def serve() -> None:
            rotation = LogRotation(data_dir.log_path)
            worker_template = WorkerTemplate(process_log.fd, config.service.start_s, lambda: None, template)
            agent = Agent(
                config, devices, data_dir.path, credentials, process_log.fd, worker_template, typer.echo
            )
            async with signals_to_end() as signals:
                running, signalled = asyncio.create_task(agent.run()), asyncio.create_task(signals.get())
                await asyncio.wait((running, signalled), return_when=asyncio.FIRST_COMPLETED)
                signalled.cancel()
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running
                await rotation.close()

        try:
            runner.run(serve())
        finally:
            process_log.close()
