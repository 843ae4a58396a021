"""The service of a node put together: its agent, and the log of its processes. Asks for no credentials."""

from __future__ import annotations

from collections.abc import Callable

from hearth.control.datadir import DataDir
from hearth.control.observe.log_rotation import LogRotation
from hearth.core.config import HearthConfig
from hearth.node.agent import Agent
from hearth.node.credentials import Credentials
from hearth.node.devices import Devices
from hearth.node.process_log import ProcessLog, logs_to_stderr
from hearth.node.template_process import TemplateProcess
from hearth.node.worker_template import WorkerTemplate


async def run_agent(
    config: HearthConfig,
    devices: Devices,
    data_dir: DataDir,
    credentials: Credentials,
    template: TemplateProcess | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Run until cancelled. `template`: a process that was started before; it ends with the agent.

    Raises HearthError: the head has refused this node, or no worker can run.
    """
    process_log = ProcessLog(
        data_dir.log_path, to_stderr=logs_to_stderr(), is_json=config.log.format == "json"
    )
    rotation = LogRotation(data_dir.log_path)
    try:
        workers = WorkerTemplate(process_log.fd, config.service.start_s, lambda: None, template)
        agent = Agent(config, devices, data_dir.path, credentials, process_log.fd, workers, tell)
        await agent.run()
    finally:
        await rotation.close()
        process_log.close()
