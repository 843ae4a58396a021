"""The agent of a machine in a cluster: runs its keeper and workers, and connects them to the head.

Each life of the node is one control connection: the head answers its hello with a new id, and its workers
live as long. When the head is lost, they end; their requests go on elsewhere. The agent then tries to join
again, and its store keeps host memory for a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from pathlib import Path

import msgspec

from hearth.core import node_messages as messages
from hearth.core.config import CPU_HOST_BYTES, EngineConfig, HearthConfig, parse_address
from hearth.core.errors import HearthError, JoinRefused, Unreachable
from hearth.core.messages import WorkerEnded, WorkerHello
from hearth.core.types import HEAD, NodeId, where_on_nodes
from hearth.node.agent_socket import AgentSocket
from hearth.node.channel import PULSE_S, Channel, ClusterPort, connect
from hearth.node.credentials import Credentials
from hearth.node.data_admission import DataAdmission
from hearth.node.devices import Devices
from hearth.node.join import renew_if_due
from hearth.node.link import FrameLink
from hearth.node.local_node import AGENT_SOCKET, LocalNode, socket_directory
from hearth.node.processes import ErrorFile
from hearth.node.relay import WorkerRelay
from hearth.node.worker_template import WorkerTemplate

#: Before a head that is not reached is tried again.
RETRY_S = 2.0
#: Between two looks at the certificate's age, besides those before each connection.
RENEWAL_S = 86400.0

log = logging.getLogger(__name__)


class Agent:
    """Mutable; used on the event loop alone."""

    def __init__(
        self,
        config: HearthConfig,
        devices: Devices,
        path: Path,
        credentials: Credentials,
        errors: ErrorFile,
        template: WorkerTemplate | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`path`: the data directory. `errors`, `template`: as in `Supervisor`. `tell`: prints for people."""
        self._config, self._devices, self._path, self._errors = config, devices, path, errors
        self._credentials, self._template, self._tell = credentials, template, tell
        self._host, self._port = parse_address(credentials.head)
        self._local: LocalNode | None = None  #: None: no keeper runs
        self._node: NodeId | None = None  #: of the present or last life
        self._relays: dict[FrameLink, WorkerRelay] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._questions = AgentSocket()

    async def run(self) -> None:
        """Serve until cancelled. Raises HearthError: the head has refused the node, or workers cannot run."""
        async with AsyncExitStack() as stack:
            self._sockets = stack.enter_context(socket_directory(self._path))
            stack.push_async_callback(self._close_local)
            cluster = self._config.cluster
            self._data = DataAdmission(self._sockets)
            port = ClusterPort(*parse_address(cluster.listen), self._data.take)
            stack.push_async_callback(port.close)
            server = await self._questions.listen(self._sockets / AGENT_SOCKET)
            stack.callback(server.close)
            host_bytes = self._config.store.host_bytes
            seen_at = (None, port.port) if cluster.address is None else parse_address(cluster.address)
            hello = messages.NodeHello(
                version=messages.VERSION,
                name=self._credentials.name,
                kind=self._devices.kind,
                devices=self._devices.names(),
                host_bytes=host_bytes if self._devices.kind == "cuda" else min(host_bytes, CPU_HOST_BYTES),
                port=seen_at[1],
                host=seen_at[0],
                labels=cluster.values_by_label,
                num_sharing=self._devices.num_sharing,
            )
            await self._run_connections(hello)

    async def _run_connections(self, hello: messages.NodeHello) -> None:
        lost_s, told = time.monotonic(), ""
        while True:
            try:
                channel, welcome = await self._greet(hello)
            except Unreachable as error:
                if str(error) != told:
                    told = str(error)
                    self._tell(f"{told}; trying again until stopped")
                    log.warning("head_unreachable reason=%s", error)
            else:
                self._tell(f"joined {self._describe(welcome)}")
                reason = await self._live(channel, welcome)
                self._tell(
                    f"lost the head at {self._host}:{self._port}: {reason}; trying again until stopped"
                )
                log.warning("head_lost node=%s reason=%s", welcome.node, reason)
                lost_s, told = time.monotonic(), ""
            if time.monotonic() - lost_s > self._config.cluster.keep_host_s:
                await self._close_local()
            await asyncio.sleep(RETRY_S)

    def _describe(self, welcome: messages.NodeWelcome) -> str:
        names = self._devices.names()
        where = f"the cluster at {self._host}:{self._port} as {welcome.node}"
        workers = "1 worker" if len(names) == 1 else f"{len(names)} workers"
        return f"{where}: {workers} on {', '.join(dict.fromkeys(names))}"

    async def _greet(self, hello: messages.NodeHello) -> tuple[Channel, messages.NodeWelcome]:
        """Raises Unreachable, if it may be tried again, and JoinRefused."""
        channel = await self._connect()
        return channel, await channel.ask(hello, messages.NodeWelcome)

    async def _connect(self) -> Channel:
        self._credentials = await renew_if_due(self._credentials)
        return await connect(self._host, self._port, self._credentials.client_context(), HEAD)

    # One life of the node.

    async def _live(self, channel: Channel, welcome: messages.NodeWelcome) -> str:
        """Serve the head until it is lost; return why. Raises HearthError, which ends the agent."""
        self._node = welcome.node
        self._data.begin(welcome.ticket_key, is_encrypted=welcome.is_encrypted)
        self._questions.head_found(channel.send)
        tasks = [
            asyncio.create_task(work)
            for work in (
                self._receive(channel),
                self._pulse(channel),
                self._work(channel, welcome),
                self._renew(),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return channel.why_ended or "it closed the connection"
        finally:
            self._questions.head_lost()
            self._data.end()
            for task in (*tasks, *self._tasks):
                task.cancel()
            await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)
            await self._stop_workers()
            channel.close()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_S)
            self._credentials = await renew_if_due(self._credentials)

    async def _work(self, channel: Channel, welcome: messages.NodeWelcome) -> None:
        """Run keeper and workers; report what the keeper has. Raises HearthError if they cannot run."""
        service = replace(self._config.service, turns=welcome.turns)
        config = replace(self._config, engine=_engine_of(welcome), service=service)
        if self._local is None:
            local = LocalNode(
                config,
                self._devices,
                self._path,
                self._sockets,
                self._errors,
                self,
                template=self._template,
                credentials=self._credentials.path,
            )
            try:
                await local.start()
            except BaseException:
                await local.close()
                raise
            self._local = local
        self._local.config = config
        self._local.start_workers(welcome.node)
        reports = asyncio.create_task(self._report(self._local, channel))
        try:
            raise await asyncio.shield(self._local.supervisor.refusal)
        finally:
            reports.cancel()

    async def _stop_workers(self) -> None:
        """End all workers for the sake of the node: no model is to blame."""
        for link in self._relays:
            link.ended = WorkerEnded("was stopped with its node", is_with_node=True)
        if self._local is not None:
            await self._local.supervisor.stop_workers()

    async def _close_local(self) -> None:
        if (local := self._local) is not None:
            self._local = None
            await local.close()

    async def _pulse(self, channel: Channel) -> None:
        while True:
            channel.count_pulse()
            local = self._local
            channel.send(
                messages.NodePulse(
                    workers=() if local is None else tuple(local.workers()),
                    host_used_bytes=0 if local is None else local.host_used_bytes,
                    trouble=None if local is None else local.trouble(),
                    num_not_kept=0 if local is None else local.num_not_kept,
                )
            )
            await asyncio.sleep(PULSE_S)

    async def _report(self, local: LocalNode, channel: Channel) -> None:
        while True:
            held, links = await local.changes()
            if held:
                channel.send(messages.ChunkReport(held))
            if links:
                channel.send(messages.LinkReport(links))

    async def _receive(self, channel: Channel) -> None:
        while (message := await channel.receive()) is not None:
            local = self._local
            match message:
                case messages.RequestCounts(num_by_model, expected) if local is not None:
                    self._start(_told(local.keeper.count_requests(num_by_model)))
                    for model, weight in expected.items():
                        self._start(_told(local.keeper.prefetch(where_on_nodes(model), weight)))
                case messages.ForgetChunks(model) if local is not None:
                    self._start(_told(local.keeper.forget(where_on_nodes(model))))
                case messages.DropPeer(node):
                    self._data.drop_peer(node)
                case messages.TicketGranted(host=""):  # of the head, whose address this node knows
                    here = msgspec.structs.replace(message, host=self._host, port=self._port)
                    self._questions.answered(here)
                case messages.Sources() | messages.TicketGranted() | messages.QuestionRefused():
                    self._questions.answered(message)
                case messages.NodeRefused(reason):
                    raise JoinRefused(reason)
                case _:
                    pass  # a pulse

    # What workers tell.

    def joined(self, link: FrameLink, hello: WorkerHello) -> None:
        assert self._node is not None, "workers are started by a welcome"
        relay = self._relays[link] = WorkerRelay(link, hello, self._node)
        self._start(self._open(link, relay))

    def received(self, link: FrameLink, body: bytes) -> None:
        self._relays[link].worker_sent(body)

    def left(self, link: FrameLink) -> None:
        self._relays.pop(link).worker_left()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Start work that ends with this life of the node, at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, link: FrameLink, relay: WorkerRelay) -> None:
        try:
            channel = await self._connect()
            if link not in self._relays:  # the worker has left meanwhile
                channel.close()
                return
            relay.open(channel)
        except (HearthError, OSError) as error:
            log.warning("worker_not_connected worker=%s reason=%s", link.worker, error)
            link.abort()


def _engine_of(welcome: messages.NodeWelcome) -> EngineConfig:
    """Leave out settings that only the Hearth of a newer head knows."""
    known = {field.name for field in fields(EngineConfig)}
    if unknown := welcome.engine.keys() - known:
        log.warning("settings_ignored engine=%s reason=`the head is newer`", ",".join(sorted(unknown)))
    return EngineConfig(**{key: value for key, value in welcome.engine.items() if key in known})  # type: ignore[arg-type] # it checks


async def _told(telling: Awaitable[None]) -> None:
    try:
        await telling
    except (HearthError, OSError) as error:
        log.warning("keeper_not_told reason=%s", error)
