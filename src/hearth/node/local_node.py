"""The node of this machine: its keeper, its workers, and the port of this machine that workers connect to.

All that belongs to one machine stays behind it: process ids, Unix sockets, shared memory, local paths. On the
head it is part of the service, on another machine of its agent (`agent.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hearth.core.config import HearthConfig
from hearth.core.errors import HearthError
from hearth.core.messages import KeeperSetup, WorkerHello, WorkerSetup
from hearth.core.node_messages import HeldChunks, LinkSpeed, WorkerStatus
from hearth.core.types import LOCAL, Digest, NodeId, WorkerId, stage_socket
from hearth.node.data_admission import PEERS_SOCKET
from hearth.node.devices import Devices
from hearth.node.link import FrameLink, WorkerLink, WorkerReceiver
from hearth.node.processes import ErrorFile, Vigilance
from hearth.node.supervisor import Supervisor
from hearth.node.worker_template import WorkerTemplate
from hearth.store.keeper_client import KeeperClient

#: Where the agent of this machine answers, in the directory of its sockets.
AGENT_SOCKET = "agent.sock"
#: Longer paths do not fit the address of a Unix socket.
MAX_SOCKET_PATH_BYTES = 100
LONGEST_WORKER = WorkerId("w999999.999999999")
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
        sockets: Path,
        errors: ErrorFile,
        receiver: WorkerReceiver,
        on_failed_start: Callable[[], None] = lambda: None,
        template: WorkerTemplate | None = None,
        *,
        credentials: Path | None = None,
    ) -> None:
        """`path`: the data directory. `receiver` takes what workers send, after this node itself.

        `sockets`: a `socket_directory`, where the agent or the head answers at `AGENT_SOCKET`.
        `credentials`: as in `KeeperSetup`; None outside of a cluster. Others as in `Supervisor`.
        """
        self.config, self.devices = config, devices
        self._path, self._sockets, self._receiver = path, sockets, receiver
        self._secret, self._port = secrets.token_bytes(32), 0
        self._server: asyncio.Server | None = None  #: that workers connect to
        self._keeper_socket = sockets / "keeper.sock"
        self._credentials = None if credentials is None else str(credentials)
        self._agent_socket = None if credentials is None else str(sockets / AGENT_SOCKET)
        service, store = config.service, config.store
        self.supervisor = Supervisor(
            setup_of=self._setup_of,
            keeper=KeeperSetup(
                socket=str(self._keeper_socket),
                kind=devices.kind,
                path=str(path),
                disk_bytes=store.disk_bytes,
                host_bytes=store.host_bytes,
                log_level=config.log.level,
                agent_socket=self._agent_socket,
                credentials=self._credentials,
                peers_socket=None if credentials is None else str(sockets / PEERS_SOCKET),
                max_send_bytes=config.cluster.max_send_bytes,
            ),
            num_workers=devices.num_workers,
            vigilance=Vigilance(service.start_s, service.heartbeat_s, service.max_missed),
            errors=errors,
            on_failed_start=on_failed_start,
            template=template,
        )
        self.keeper = KeeperClient(self._keeper_socket)
        self.host_used_bytes = self.num_not_kept = 0  #: as reported last
        self._asking_s = 0.0  #: how long the keeper took to answer what it has
        self._reported: dict[Digest, HeldChunks] = {}
        self._links: dict[NodeId, LinkSpeed] = {}

    async def start(self) -> None:
        """Returns when the keeper is ready and workers can be started. Raises HearthError."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: WorkerLink(self._secret, self.supervisor.expects, self), "127.0.0.1", 0
        )
        self._port = self._server.sockets[0].getsockname()[1]
        await self.supervisor.start_keeper()

    def start_workers(self, node: NodeId) -> None:
        """Begin a life of this node: `changes` reports everything anew."""
        self._reported, self._links = {}, {}
        self.supervisor.start_workers("" if node == LOCAL else f"{node}/")

    async def close(self) -> None:
        await self.supervisor.close()
        if self._server is not None:
            self._server.close()

    # What the head asks.

    def workers(self) -> list[WorkerStatus]:
        return self.supervisor.workers()

    def trouble(self) -> str | None:
        return self.supervisor.trouble()

    async def changes(self) -> tuple[tuple[HeldChunks, ...], tuple[LinkSpeed, ...]]:
        """Return which chunks the keeper has and how fast links are, for what changed since the last call.

        Waits before it asks the keeper again, longer if that took long: many models have many chunks.
        """
        await asyncio.sleep(max(REPORT_S, self._asking_s / REPORT_SHARE))
        began_s = time.monotonic()
        try:
            report = await self.keeper.report()
        except (HearthError, OSError) as error:  # it is being replaced
            log.debug("chunks_unknown reason=%s", error)
            return (), ()
        self._asking_s = time.monotonic() - began_s
        self.host_used_bytes, self.num_not_kept = report.used_bytes, report.num_not_kept
        held = {one.model: one for one in report.models}
        links = {one.source: one for one in report.links}
        gone = [HeldChunks(model, b"", b"") for model in self._reported.keys() - held.keys()]
        changed = [one for one in held.values() if self._reported.get(one.model) != one]
        measured = tuple(one for one in links.values() if self._links.get(one.source) != one)
        self._reported, self._links = held, links
        return (*changed, *gone), measured

    @property
    def labels(self) -> dict[str, str]:
        return self.config.cluster.values_by_label

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
        for stale in self._sockets.glob(f"w{index}.*"):  # a worker that was killed leaves its socket
            stale.unlink(missing_ok=True)
        return WorkerSetup(
            worker=worker,
            host="127.0.0.1",
            port=self._port,
            secret=self._secret.hex(),
            kind=devices.kind,
            device_index=devices.indices[index % len(devices.indices)],
            num_sharing=devices.num_sharing,
            budget_bytes=config.service.memory_bytes,
            keeper_socket=str(self._keeper_socket),
            kernels_path=str(self._path / "kernels"),
            engine=config.engine.plain(),
            num_threads=devices.threads_per_worker,
            log_level=config.log.level,
            stages_path=str(self._sockets),
            agent_socket=self._agent_socket,
            credentials=self._credentials,
            turns=config.service.turns,
            snapshots_path=str(self._path / "snapshots") if config.store.snapshot_bytes else None,
            snapshot_bytes=config.store.snapshot_bytes,
        )


@contextmanager
def socket_directory(path: Path) -> Iterator[Path]:
    """Make a directory for the Unix sockets of this process and its workers, for the owner alone.

    `path`: the data directory. A predecessor may have left its own, and processes that use it. A path too
    long for sockets is replaced.
    """
    for stale in (path / "run").glob("sockets-*"):
        shutil.rmtree(stale, ignore_errors=True)
    directory = path / "run" / f"sockets-{os.getpid()}"
    if len(os.fsencode(stage_socket(directory, LONGEST_WORKER))) > MAX_SOCKET_PATH_BYTES:
        with tempfile.TemporaryDirectory(prefix="hearth-") as short:
            yield Path(short)
        return
    directory.mkdir(mode=0o700, parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
