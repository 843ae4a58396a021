"""The head's side of a cluster: admits nodes, watches them, and links their workers to the gateway.

A node is one control connection. It is lost when that ends, or is silent for 3 s; its links end then, the
brain is told, and requests go on elsewhere. A node that returns gets another id, so that nothing of an
earlier life is taken for its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from hearth.control.driver import Driver
from hearth.control.nodes import Nodes
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.views import LinkView, NodeView
from hearth.core import node_messages as messages
from hearth.core.config import HearthConfig, parse_address
from hearth.core.errors import HearthError, RequestError
from hearth.core.messages import WorkerEnded, WorkerHello
from hearth.core.types import LOCAL, Digest, NodeId, WorkerId
from hearth.node.agent import MAX_SILENT_PULSES, PULSE_S
from hearth.node.channel import Channel, ClusterPort
from hearth.node.credentials import Authority, Credentials
from hearth.node.join import answer_stranger
from hearth.node.link import FrameLink, Receiver
from hearth.node.processes import run_vital
from hearth.node.relay import link_over
from hearth.node.tickets import TicketIssuer
from hearth.node.worker_seat import WorkerStatus
from hearth.policy.fleet import events

#: Of a node's report of a model: 2 TiB in chunks of 16 MiB.
MAX_MASK_BYTES = 16 << 10

log = logging.getLogger(__name__)


class RemoteNode:
    """One life of another machine in the cluster. Mutable; used on the event loop alone."""

    def __init__(self, node_id: NodeId, hello: messages.NodeHello, channel: Channel) -> None:
        self.node_id, self.hello, self.channel = node_id, hello, channel
        self.tickets = TicketIssuer(node_id)
        self.num_silent_pulses = 0
        self.links: dict[WorkerId, FrameLink] = {}
        self.hellos: dict[WorkerId, WorkerHello] = {}
        self.past_workers: set[WorkerId] = set()  #: linked in this life, each once
        self.held: dict[Digest, messages.HeldChunks] = {}
        self.speeds: dict[NodeId, messages.LinkSpeed] = {}
        self.pulse = messages.NodePulse(0, (), 0)

    @property
    def name(self) -> str:
        return self.hello.name

    def workers(self) -> list[WorkerStatus]:
        return [
            WorkerStatus(
                worker=one.worker,
                # A worker that is ready counts when it is linked to the gateway.
                state="ready" if one.worker in self.links else _not_ready(one.state),
                pid=one.pid,
                num_restarts=one.num_restarts,
                hello=self.hellos.get(one.worker),
                reason=one.reason,
            )
            for one in self.pulse.workers
        ]

    def device_share(self, seat: int) -> float:
        return 1.0 / max(1, self.hello.num_sharing)

    def trouble(self) -> str | None:
        return None if self.pulse.trouble is None else f"on node {self.node_id}: {self.pulse.trouble}"

    def end_links(self, reason: str) -> None:
        """End the links of all workers, for the sake of the node: no model is to blame."""
        for link in list(self.links.values()):
            link.ended = link.ended or WorkerEnded(reason, is_with_node=True)
            link.abort()


class Cluster:
    """Mutable; used on the event loop alone."""

    def __init__(
        self,
        authority: Authority,
        nodes: Nodes,
        driver: Driver,
        receiver: Receiver,
        config: HearthConfig,
        places: Callable[[], Mapping[Digest, str]],
        residency_changed: Callable[[NodeId, Sequence[messages.HeldChunks]], None],
        metrics: Metrics,
    ) -> None:
        """`receiver` takes what links bring. `places` returns where each deployed model is.

        `residency_changed` is told what nodes have.
        """
        self._authority, self._nodes = authority, nodes
        self._driver, self._receiver = driver, receiver
        self._config, self._places = config, places
        self._residency_changed, self._metrics = residency_changed, metrics
        self._joined: dict[NodeId, RemoteNode] = {}
        self._lives: Counter[str] = Counter()  #: by name
        self._drained: set[str] = set()  #: names of nodes
        self._reasons: dict[str, str] = {}  #: why nodes were lost last, by name
        self._own_tickets = TicketIssuer(LOCAL)
        self._own_held: dict[Digest, messages.HeldChunks] = {}
        self._known: dict[Digest, str] = {}  #: what the keeper of this machine was told
        self._num_starts_told = 0  #: the life of the keeper that was told last
        self._are_places_stale = asyncio.Event()
        self._port: ClusterPort | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, path: Path) -> None:
        """Listen, with the credentials in `path`. Call it when the keeper is ready. Raises ConfigError."""
        credentials, cluster = Credentials.open(path), self._config.cluster
        assert credentials is not None, "made with the authority"
        self._nodes.local.admit_data(LOCAL, self._own_tickets.key, is_encrypted=cluster.encrypt_weights)
        self._port = await ClusterPort.listen(
            *parse_address(cluster.listen),
            credentials.server_context(needs_certificate=False),
            self._serve,
            self._nodes.local.take_data,
            self._authority.is_member,
        )
        self.models_changed()
        works = (self._watch(), self._report(), self._tell_places())
        self._tasks = [run_vital(work) for work in works]
        log.info("cluster listening=%s port=%d", cluster.listen, self._port.port)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in list(self._joined.values()):
            self._lose(node, "the service ends")
        if self._port is not None:
            await self._port.close()

    # What connections bring.

    async def _serve(self, channel: Channel) -> None:
        """Serve a connection to its end, or until a link has taken it over."""
        message = await channel.receive()
        match message:
            case messages.AskAuthority() | messages.Join():
                channel.put_back(message)
                await answer_stranger(channel, self._authority)
            case messages.NodeHello():
                await self._serve_node(channel, message)
            case messages.WorkerOpened():
                self._open_worker(channel, message)

    async def _serve_node(self, channel: Channel, hello: messages.NodeHello) -> None:
        if (refused := self._refusal(channel, hello)) is not None:
            log.warning("node_refused name=%s reason=%s", hello.name, refused.reason)
            channel.send(refused)
            return
        life = self._lives[hello.name]
        self._lives[hello.name] += 1
        node_id = NodeId(hello.name if not life else f"{hello.name}.{life}")
        node = RemoteNode(node_id, hello, channel)
        self._joined[node_id] = self._nodes.others[node_id] = node
        channel.send(
            messages.NodeWelcome(
                node=node_id,
                ticket_key=node.tickets.key,
                engine=self._config.engine.plain(),
                turns=self._config.service.turns,
                is_encrypted=self._config.cluster.encrypt_weights,
            )
        )
        if hello.name in self._drained:
            self._driver.post(events.NodeDraining(self._driver.now_s, node_id, True))
        self._metrics.node_up.labels(hello.name).set(1)
        log.info("node_joined node=%s host=%s devices=`%s`", node_id, channel.host, ", ".join(hello.devices))
        try:
            while (message := await channel.receive()) is not None and node_id in self._joined:
                node.num_silent_pulses = 0
                self._take(node, message)
        finally:
            self._lose(node, channel.why_ended or "it closed the connection")

    def _refusal(self, channel: Channel, hello: messages.NodeHello) -> messages.NodeRefused | None:
        if hello.name != channel.peer:
            return messages.NodeRefused(
                f"the certificate is that of `{channel.peer}`, the node calls itself `{hello.name}`"
            )
        if not messages.VERSION - 1 <= hello.version <= messages.VERSION:
            return messages.NodeRefused(
                f"the node speaks version {hello.version}, the head {messages.VERSION} and the one before; "
                "install the same Hearth on both"
            )
        for node in [node for node in self._joined.values() if node.name == hello.name]:
            if node.num_silent_pulses > 1:  # it noticed before the head that its connection was cut
                self._lose(node, "it joins again")
                continue
            return messages.NodeRefused(
                f"a node called `{hello.name}` is up; if its machine was copied, give this one credentials "
                "of its own with `hearth join --name`",
                is_final=False,
            )
        return None

    def _take(self, node: RemoteNode, message: object) -> None:
        match message:
            case messages.NodePulse(number):
                node.pulse = message
                node.channel.send(messages.HeadPulse(number))
            case messages.ChunksHeld(models):
                self._chunks_held(node, models)
            case messages.LinksMeasured(links):
                for link in links:
                    is_known = link.source == LOCAL or link.source in self._joined
                    if is_known and 0 < link.bytes_per_s < math.inf:
                        node.speeds[link.source] = link
                        self._link_measured(link, node.node_id)
            case messages.AskSources(number, model):
                node.channel.send(messages.Sources(number, self._sources(model, node.node_id)))
            case messages.AskTicket(number, target):
                node.channel.send(self._ticket(number, target, node.node_id))
            case _:
                node.channel.abort(f"a node does not send {type(message).__name__}")

    def _chunks_held(self, node: RemoteNode, models: Sequence[messages.HeldChunks]) -> None:
        """Note what a node has, and have it forget what was removed while it was away."""
        known = self._places()
        for held in models:
            if held.model not in known and any(held.host + held.disk):
                node.channel.send(messages.ForgetChunks(held.model))
        kept = [
            held
            for held in models
            if held.model in known and max(len(held.host), len(held.disk)) <= MAX_MASK_BYTES
        ]
        node.held |= {held.model: held for held in kept}
        self._residency_changed(node.node_id, kept)

    def _link_measured(self, link: messages.LinkSpeed, target: NodeId) -> None:
        self._driver.post(
            events.LinkMeasured(self._driver.now_s, link.source, target, link.bytes_per_s, link.latency_s)
        )

    def _open_worker(self, channel: Channel, opened: messages.WorkerOpened) -> None:
        node, worker = self._joined.get(opened.node), opened.hello.worker
        if node is None or node.name != channel.peer or worker in node.links:
            self._metrics.cluster_stale.inc()  # of an earlier life
            log.info("worker_refused worker=%s reason=`its node has another life`", worker)
            return
        is_well_named = (
            re.fullmatch(rf"{re.escape(opened.node)}/w\d{{1,6}}(\.\d{{1,9}})?", worker) is not None
        )
        is_full = len(node.links) >= 2 * len(node.hello.devices)  # a successor may be early
        if not is_well_named or worker in node.past_workers or is_full or opened.hello.budget_bytes <= 0:
            log.warning("worker_refused worker=%s reason=`not a new one of node %s`", worker, opened.node)
            return
        node.past_workers.add(worker)
        link = FrameLink(worker, self)
        try:
            link_over(channel, link)
        except ConnectionResetError:
            return
        node.links[worker], node.hellos[worker] = link, opened.hello
        log.info("worker_linked worker=%s device=%s", worker, opened.hello.device)
        self._receiver.joined(link, opened.hello)

    def _lose(self, node: RemoteNode, reason: str) -> None:
        if self._joined.pop(node.node_id, None) is None:
            return
        del self._nodes.others[node.node_id]
        self._metrics.node_up.labels(node.name).set(0)
        self._reasons[node.name] = reason
        log.warning("node_lost node=%s reason=%s", node.node_id, reason)
        node.end_links(f"was lost with its node ({reason})")
        node.channel.close()
        for other in self._joined.values():
            other.speeds.pop(node.node_id, None)
        self._driver.node_lost(node.node_id)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            for node in list(self._joined.values()):
                node.num_silent_pulses += 1  # time in which this process did not run counts once
                if node.num_silent_pulses > MAX_SILENT_PULSES:
                    self._lose(node, f"it was silent for {MAX_SILENT_PULSES * PULSE_S:g} s")

    async def _report(self) -> None:
        while True:
            if self._num_starts_told != self._nodes.local.supervisor.keeper.num_starts:
                self.models_changed()
            held, _ = await self._nodes.local.changes()  # the head fetches from no node
            self._own_held |= {one.model: one for one in held}

    async def _tell_places(self) -> None:
        """Tell the keeper of this machine what others may ask of it, and all others what was removed."""
        local = self._nodes.local
        while True:
            await self._are_places_stale.wait()
            self._are_places_stale.clear()
            known, self._known = self._known, dict(self._places())
            for digest in known.keys() - self._known.keys():
                self._tell_all(messages.ForgetChunks(digest))
            num_starts = local.supervisor.keeper.num_starts
            try:
                await local.keeper.know(self._known)
                self._num_starts_told = num_starts
            except (HearthError, OSError) as error:  # it is being replaced, and told again then
                log.warning("keeper_not_told reason=%s", error)

    # What links tell.

    def joined(self, link: FrameLink, hello: WorkerHello) -> None:
        raise AssertionError("a link of another node has joined when it is made")

    def received(self, link: FrameLink, body: bytes) -> None:
        self._receiver.received(link, body)

    def left(self, link: FrameLink) -> None:
        # Its node tells how a worker ends, before the connection does.
        link.ended = link.ended or WorkerEnded("was lost with its connection", is_with_node=True)
        for node in self._joined.values():
            if link.worker is not None and node.links.get(link.worker) is link:
                del node.links[link.worker], node.hellos[link.worker]
        self._receiver.left(link)

    # What nodes ask.

    def _sources(self, model: Digest, asking: NodeId) -> tuple[messages.Source, ...]:
        held_by = {LOCAL: self._own_held} | {one.node_id: one.held for one in self._joined.values()}
        return tuple(
            messages.Source(node, held[model])
            for node, held in held_by.items()
            if node != asking and model in held and any(held[model].host + held[model].disk)
        )

    def _ticket(
        self, number: int, target: NodeId, asking: NodeId
    ) -> messages.TicketGranted | messages.TicketRefused:
        is_encrypted = self._nodes.local.is_encrypted
        if target == LOCAL:  # a node knows how it reaches the head
            ticket = self._own_tickets.issue(asking)
            assert self._port is not None, "nodes come by it"
            return messages.TicketGranted(number, "", self._port.port, ticket, is_encrypted)
        node = self._joined.get(target)
        if node is None:
            return messages.TicketRefused(number, f"node `{target}` is not up")
        ticket = node.tickets.issue(asking)
        return messages.TicketGranted(
            number, node.hello.host or node.channel.host, node.hello.port, ticket, is_encrypted
        )

    # What the service tells all nodes.

    def models_changed(self) -> None:
        """Note that models or adapters were deployed or removed."""
        self._are_places_stale.set()

    def count_requests(self, num_by_model: Mapping[Digest, int]) -> None:
        self._tell_all(messages.RequestsCame(dict(num_by_model)))

    def _tell_all(self, message: messages.FromHead) -> None:
        for node in self._joined.values():
            node.channel.send(message)

    # What users ask.

    def drain(self, name: str, *, is_draining: bool) -> None:
        """Send no more requests to a node, or have it back. Raises RequestError if it is not up."""
        node_id = LOCAL if name == LOCAL else self._find(name).node_id
        (self._drained.add if is_draining else self._drained.discard)(name)
        self._driver.post(events.NodeDraining(self._driver.now_s, node_id, is_draining))

    def remove(self, name: str) -> None:
        """Remove a node from the cluster, for good. Raises ConfigError if there is none."""
        self._authority.remove(name)
        self._drained.discard(name)
        for node in list(self._joined.values()):
            if node.name == name:
                node.channel.send(messages.NodeRefused(f"`{name}` was removed from the cluster"))
                self._lose(node, "it was removed")

    def _find(self, name: str) -> RemoteNode:
        for node in self._joined.values():
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self._joined.values()) or "none"
        raise RequestError(f"no node called `{name:.80}` is up; nodes: {known}")

    def views(self) -> tuple[NodeView, ...]:
        down = (
            NodeView(
                name=name,
                node="",
                state="down",
                host="",
                devices=(),
                num_ready_workers=0,
                budget_bytes=0,
                host_used_bytes=0,
                host_bytes=0,
                reason=reason,
            )
            for name, reason in self._absences().items()
        )
        return (*map(self._view, self._joined.values()), *down)

    def notes(self) -> tuple[str, ...]:
        """Return what is wrong, for people."""
        remedy = "start `hearth join` there, or remove it"
        absent = self._absences()
        return tuple(
            f"node `{name}` is down: {reason}; {remedy} with `hearth nodes rm {name}`"
            for name, reason in absent.items()
        )

    def _absences(self) -> dict[str, str]:
        """Return why members are not up, by name."""
        up = {node.name for node in self._joined.values()}
        since = "it has not joined since the service started"
        return {name: self._reasons.get(name, since) for name in self._authority.names() if name not in up}

    def _view(self, node: RemoteNode) -> NodeView:
        hello, workers = node.hello, node.workers()
        return NodeView(
            name=node.name,
            node=node.node_id,
            state="draining" if node.name in self._drained else "up",
            host=node.channel.host,
            devices=hello.devices,
            num_ready_workers=sum(one.state == "ready" for one in workers),
            budget_bytes=sum(one.hello.budget_bytes for one in workers if one.hello is not None),
            host_used_bytes=node.pulse.host_used_bytes,
            host_bytes=hello.host_bytes,
            links=tuple(LinkView(one.source, one.bytes_per_s) for one in node.speeds.values()),
            labels=hello.labels,
            reason=node.pulse.trouble,
        )


def _not_ready(state: str) -> Literal["starting", "failing"]:
    return "failing" if state == "failing" else "starting"
