"""The node of this machine: its keeper, its workers, and the port of this machine that workers connect to.

All that belongs to one machine stays behind it: process ids, Unix sockets, shared memory, local paths. On the
head it is part of the service, on another machine of its agent (`agent.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from socket import socket

from hearth.core.config import HearthConfig
from hearth.core.errors import HearthError, NoWorkers
from hearth.core.messages import KeeperSetup, WorkerHello, WorkerSetup
from hearth.core.node_messages import HeldChunks, LinkSpeed
from hearth.core.types import LOCAL, Digest, NodeId, WorkerId
from hearth.node.devices import Devices
from hearth.node.link import FrameLink, Receiver
from hearth.node.processes import ErrorFile, Vigilance
from hearth.node.supervisor import Supervisor
from hearth.node.tickets import TicketCheck
from hearth.node.worker_link import WorkerLink
from hearth.node.worker_seat import WorkerStatus
from hearth.node.worker_template import WorkerTemplate
from hearth.store.keeper_client import KeeperClient
from hearth.store.transfer.peer_server import hand_over

#: Longer paths do not fit the address of a Unix socket.
MAX_SOCKET_PATH_BYTES = 100
#: Between two questions to the keeper what it has, and the most of its time that they may take.
REPORT_S, REPORT_SHARE = 1.0, 0.05

log = logging.getLogger(__name__)


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

        `agent_socket`, `credentials`: as in `KeeperSetup`; None outside of a cluster. Others as in
        `Supervisor`.
        """
        self.config, self.devices = config, devices
        self._path, self._receiver = path, receiver
        self._secret, self._port = secrets.token_bytes(32), 0
        self._stack = ExitStack()
        self._socket = new_socket_path(path, "keeper", self._stack)
        self._peers_socket = None if credentials is None else new_socket_path(path, "peers", self._stack)
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
                peers_socket=None if self._peers_socket is None else str(self._peers_socket),
            ),
            num_workers=devices.num_workers,
            vigilance=Vigilance(service.start_s, service.heartbeat_s, service.max_missed),
            errors=errors,
            on_outage=on_outage,
            template=template,
        )
        self.keeper = KeeperClient(self._socket)
        self.tickets: TicketCheck | None = None  #: of the present life; None: no data connection is admitted
        self.is_encrypted = True
        self.host_used_bytes = 0  #: as reported last
        self._asking_s = 0.0  #: how long the keeper took to answer what it has
        self._reported: dict[Digest, HeldChunks] = {}
        self._links: dict[NodeId, LinkSpeed] = {}

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

    def device_share(self, seat: int) -> float:
        return self.devices.share_of(seat)

    def trouble(self) -> str | None:
        return self.supervisor.trouble()

    # What other nodes get.

    def admit_data(self, node: NodeId, ticket_key: bytes, *, is_encrypted: bool) -> None:
        """Begin a life as `node`: admit data connections, and report all chunks anew."""
        self.tickets, self.is_encrypted = TicketCheck(node, ticket_key), is_encrypted
        self._reported, self._links = {}, {}

    def take_data(self, connection: socket, ticket: bytes) -> None:
        """Give a data connection to the keeper, if its ticket is good. Closes the caller's copy."""
        with connection:
            source = None if self.tickets is None else self.tickets.admit(ticket)
            if source is None or self._peers_socket is None:
                log.warning("data_refused reason=`the ticket is forged, used or of an earlier life`")
                return
            try:
                hand_over(self._peers_socket, connection, is_encrypted=self.is_encrypted)
            except OSError as error:  # the keeper is being replaced, and the peer asks again
                log.warning("data_refused source=%s reason=%s", source, error)

    async def changes(self) -> tuple[tuple[HeldChunks, ...], tuple[LinkSpeed, ...]]:
        """Return which chunks the keeper has and how fast links are, for what changed since the last call.

        Waits before it asks the keeper again, longer if that took long: many models have many chunks.
        """
        await asyncio.sleep(max(REPORT_S, self._asking_s / REPORT_SHARE))
        began_s = time.monotonic()
        try:
            held = {one.model: one for one in await self.keeper.held()}
            links = {one.source: one for one in await self.keeper.links()}
            self.host_used_bytes = (await self.keeper.host_memory()).used_bytes
        except (HearthError, OSError) as error:  # it is being replaced
            log.debug("chunks_unknown reason=%s", error)
            return (), ()
        self._asking_s = time.monotonic() - began_s
        gone = [HeldChunks(model, b"", b"") for model in self._reported.keys() - held.keys()]
        changed = [one for one in held.values() if self._reported.get(one.model) != one]
        measured = tuple(one for one in links.values() if self._links.get(one.source) != one)
        self._reported, self._links = held, links
        return (*changed, *gone), measured

    # What links tell.

    def joined(self, link: FrameLink, hello: WorkerHello) -> None:
        self.supervisor.joined(link, hello)
        self._receiver.joined(link, hello)

    def received(self, link: FrameLink, body: bytes) -> None:
        self._receiver.received(link, body)

    def left(self, link: FrameLink) -> None:
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


def new_socket_path(path: Path, name: str, stack: ExitStack | AsyncExitStack) -> Path:
    """Return a socket path of this process, whose predecessor may have left processes behind.

    `path`: the data directory. The socket ends with the stack. A path too long for one is replaced.
    """
    for stale in (path / "run").glob(f"{name}-*.sock"):
        stale.unlink(missing_ok=True)
    socket = path / "run" / f"{name}-{os.getpid()}.sock"
    if len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES:
        stack.callback(socket.unlink, missing_ok=True)
        return socket
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hearth-"))) / f"{name}.sock"
