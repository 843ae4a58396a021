"""Runs the service of `hearth serve`: binds, serves and drains."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvloop

from hearth.api.connections import MAX_STRANGERS
from hearth.control.datadir import DataDir, ServiceFile
from hearth.control.gateway import Gateway
from hearth.control.service import keys_of, running
from hearth.core.config import HearthConfig, ServiceConfig, address_of
from hearth.core.errors import ConfigError
from hearth.core.log_format import LogFormat, formatter_of
from hearth.node.devices import Devices, check_host_memory, resolve
from hearth.node.process_log import STDERR, is_open_as
from hearth.node.template_process import TemplateProcess
from hearth.system.garbage import collect_when_idle

#: The soft limit of open files is raised to the hard limit, at most to this.
MAX_OPEN_FILES = 1 << 16
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = logging.getLogger(__name__)


def run_service(
    config: HearthConfig,
    on_ready: Callable[[str, Gateway], None] = lambda url, _: None,
    template: TemplateProcess | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends running requests. Signals are ignored afterwards.

    `on_ready` is called with the URL once the service answers. `template`: the process that workers are
    forked from, if it was started before. Raises HearthError: the port is taken, the data directory in use,
    the device missing, or no worker can start.
    """
    devices = resolve(config.service)
    check_host_memory(config.store, devices)
    service = config.service
    with (
        DataDir.hold(service.data_dir) as data_dir,
        _listening(service) as listener,
        log_file(data_dir.log_path, config.log.format),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        keys_of(service, data_dir)  # raises before anything is started
        runner.run(_serve(config, data_dir, devices, listener, on_ready, template))


async def _serve(
    config: HearthConfig,
    data_dir: DataDir,
    devices: Devices,
    listener: socket.socket,
    on_ready: Callable[[str, Gateway], None],
    template: TemplateProcess | None,
) -> None:
    service = config.service
    max_open_files = raise_open_files()
    # Until `running` has started, signals end the process at once.
    async with running(config, data_dir, devices, template) as gateway, signals_to_end() as signals:
        from hearth.cli.http_server import http_server  # while workers import torch

        server = http_server(gateway, service, max_open_files)
        url = _url_of(listener)
        announced = ServiceFile(
            os.getpid(), url, gateway.views.instance_id, str(gateway.keys.path.absolute())
        )
        data_dir.announce(announced, gateway.admin_token)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        log.info(
            "serving listening=%s url=%s workers=%d device=%s",
            address_of(*listener.getsockname()[:2]),
            url,
            devices.num_workers,
            devices.kind,
        )
        on_ready(url, gateway)
        signalled = asyncio.create_task(signals.get())
        refused = asyncio.create_task(gateway.refused())
        with collect_when_idle():
            await asyncio.wait((serving, signalled, refused), return_when=asyncio.FIRST_COMPLETED)
            if refused.done():
                gateway.end_all(refused.result())
            elif signalled.done():
                await _drain(gateway, signals, service.drain_s)
        data_dir.withdraw()  # commands now wait for the end, instead of finding the port closed
        server.should_exit = True
        await serving
        if refused.done():
            raise refused.result()
        refused.cancel()


@asynccontextmanager
async def signals_to_end() -> AsyncIterator[asyncio.Queue[int]]:
    """Yield a queue of SIGTERM and SIGINT. Both are ignored afterwards: a late one would kill the process."""
    loop, heard = asyncio.get_running_loop(), asyncio.Queue[int]()
    for number in END_SIGNALS:
        signal.signal(number, lambda number, _: loop.call_soon_threadsafe(heard.put_nowait, number))
    try:
        yield heard
    finally:
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def raise_open_files() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = max(soft, min(hard, MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


async def _drain(gateway: Gateway, signals: asyncio.Queue[int], drain_s: float) -> None:
    log.info("draining running=%d limit_s=%g", gateway.views.ps().num_running, drain_s)
    drained = asyncio.create_task(gateway.drain())
    again = asyncio.create_task(signals.get())
    await asyncio.wait((drained, again), timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not drained.done():
        gateway.end_all()
        await drained


@contextmanager
def _listening(service: ServiceConfig) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in service.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((service.host, service.port))
            listener.listen(MAX_STRANGERS)
        except OSError as error:
            is_of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
            remedy = "choose another with `--port`, or 0 for any free port"
            raise ConfigError(
                f"cannot listen on {service.host} port {service.port}: {error.strerror or error}; "
                f"{remedy if is_of_port else 'choose an address of this machine with `--host`'}"
            ) from error
        listener.setblocking(False)
        yield listener


@contextmanager
def log_file(path: Path, log_format: LogFormat) -> Iterator[None]:
    if is_open_as(path, STDERR):
        yield
        return
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(formatter_of(log_format))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{address_of({'0.0.0.0': '127.0.0.1', '::': '::1'}.get(host, host), port)}"
