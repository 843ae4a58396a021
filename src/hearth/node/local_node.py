"""The node of this machine: its keeper, its workers, and the port of this machine that workers connect to.

All that belongs to one machine stays behind it: process ids, Unix sockets, shared memory, local paths. On the
head it is part of the service, on another machine of its agent (`agent.py`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from hearth.core.config import HearthConfig
from hearth.core.errors import NoWorkers
from hearth.core.messages import KeeperSetup, WorkerHello, WorkerSetup
from hearth.core.types import LOCAL, NodeId, WorkerId
from hearth.node.devices import Devices
from hearth.node.link import Link, Receiver
from hearth.node.processes import ErrorFile, Vigilance
from hearth.node.supervisor import Supervisor
from hearth.node.worker_link import WorkerLink
from hearth.node.worker_seat import WorkerStatus
from hearth.node.worker_template import WorkerTemplate
from hearth.store.keeper_client import KeeperClient

#: Longer paths do not fit the address of a Unix socket.
MAX_SOCKET_PATH_BYTES = 100


class LocalNode:
    """Mutable; used on the event loop alone."""

    def __init__(
        self,
        config: HearthConfig,
        devices: Devices,
        path: Path,
        errors: ErrorFile,
        receiver: Receiver,
        on_outage: Callable[[NoWorkers], None] = lambda error: None,
        template: WorkerTemplate | None = None,
        *,
        agent_socket: Path | None = None,
        credentials: Path | None = None,
    ) -> None:
        """`path`: the data directory. `receiver` takes what workers send, after this node itself.

        `agent_socket`, `credentials`: as in `KeeperSetup`. Others as in `Supervisor`.
        """
        self.config, self.devices = config, devices
        self._path, self._receiver = path, receiver
        self._secret, self._port = secrets.token_bytes(32), 0
        self._stack = ExitStack()
        self._socket = new_socket_path(path, "keeper", self._stack)
        service, store = config.service, config.store
        self.supervisor = Supervisor(
            setup_of=self._setup_of,
            keeper=KeeperSetup(
                socket=str(self._socket),
                kind=devices.kind,
                path=str(path),
                disk_bytes=store.disk_bytes,
                host_bytes=store.host_bytes,
                log_level=config.log.level,
                agent_socket=None if agent_socket is None else str(agent_socket),
                credentials=None if credentials is None else str(credentials),
            ),
            num_workers=devices.num_workers,
            vigilance=Vigilance(service.start_s, service.heartbeat_s, service.max_missed),
            errors=errors,
            on_outage=on_outage,
            template=template,
        )
        self.keeper = KeeperClient(self._socket)

    async def start(self) -> None:
        """Returns when the keeper is ready and workers can be started. Raises HearthError."""
        server = await asyncio.get_running_loop().create_server(
            lambda: WorkerLink(self._secret, self.supervisor.expects, self), "127.0.0.1", 0
        )
        self._stack.callback(server.close)
        self._port = server.sockets[0].getsockname()[1]
        await self.supervisor.start_keeper()

    def start_workers(self, node: NodeId) -> None:
        self.supervisor.start_workers("" if node == LOCAL else f"{node}/")

    async def close(self) -> None:
        await self.supervisor.close()
        self._stack.close()

    # What the head asks.

    @property
    def node_id(self) -> NodeId:
        return LOCAL

    def workers(self) -> list[WorkerStatus]:
        return self.supervisor.workers()

    def trouble(self) -> str | None:
        return self.supervisor.trouble()

    # What links tell.

    def joined(self, link: Link, hello: WorkerHello) -> None:
        self.supervisor.joined(link, hello)
        self._receiver.joined(link, hello)

    def received(self, link: Link, body: bytes) -> None:
        self._receiver.received(link, body)

    def left(self, link: Link) -> None:
        self.supervisor.left(link)
        self._receiver.left(link)

    def _setup_of(self, index: int, worker: WorkerId) -> WorkerSetup:
        config, devices = self.config, self.devices
        return WorkerSetup(
            worker=worker,
            host="127.0.0.1",
            port=self._port,
            secret=self._secret.hex(),
            kind=devices.kind,
            device_index=devices.indices[index % len(devices.indices)],
            num_sharing=devices.num_sharing,
            budget_bytes=config.service.memory_bytes,
            keeper_socket=str(self._socket),
            kernels_path=str(self._path / "kernels"),
            engine=config.engine.plain(),
            num_threads=devices.threads_per_worker,
            log_level=config.log.level,
            turns=config.service.turns,
            snapshots_path=str(self._path / "snapshots") if config.store.snapshot_bytes else None,
            snapshot_bytes=config.store.snapshot_bytes,
        )


def new_socket_path(path: Path, name: str, stack: ExitStack) -> Path:
    """Return a socket path of this process, whose predecessor may have left processes behind.

    `path`: the data directory. A path too long for a socket is replaced by one that ends with the stack.
    """
    for stale in (path / "run").glob(f"{name}-*.sock"):
        stale.unlink(missing_ok=True)
    socket = path / "run" / f"{name}-{os.getpid()}.sock"
    if len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES:
        return socket
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hearth-"))) / f"{name}.sock"
