"""The head's side of a cluster: admits nodes, watches them, and links their workers to the gateway.

A node is one control connection. It is lost when that ends, or is silent for 3 s; its links end then, the
brain is told, and requests go on elsewhere. A node that returns gets another id, so that nothing of an
earlier life is taken for its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import assert_never

from hearth.control.driver import Driver
from hearth.control.keeper_reports import KeeperReports
from hearth.control.multicasts import Multicasts
from hearth.control.nodes import NO_NODE_S, Nodes, RemoteNode
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.views import LinkView, NodeView
from hearth.core import node_messages as messages
from hearth.core.config import HearthConfig, parse_address
from hearth.core.errors import HearthError, RequestError
from hearth.core.messages import WorkerEnded
from hearth.core.types import LOCAL, Digest, NodeId, WorkerId, name_of, node_of
from hearth.node.agent_socket import AgentSocket
from hearth.node.channel import PULSE_S, Channel, ClusterPort, Control
from hearth.node.credentials import Authority, Credentials
from hearth.node.data_admission import DataAdmission
from hearth.node.join import answer_stranger
from hearth.node.link import FrameLink, WorkerReceiver
from hearth.node.local_node import AGENT_SOCKET
from hearth.node.processes import run_vital
from hearth.node.tickets import TicketIssuer
from hearth.policy.fleet import events

log = logging.getLogger(__name__)


class Cluster:
    """Mutable; used on the event loop alone."""

    def __init__(
        self,
        authority: Authority,
        nodes: Nodes,
        driver: Driver,
        receiver: WorkerReceiver,
        config: HearthConfig,
        sockets: Path,
        places: Callable[[], Mapping[Digest, str]],
        multicasts: Multicasts,
        reports: KeeperReports,
        metrics: Metrics,
    ) -> None:
        """`receiver` takes what links bring. `places` returns where models are that nodes may load.

        `sockets`: as in `LocalNode`.
        """
        self._authority, self._nodes = authority, nodes
        self._driver, self._receiver = driver, receiver
        self._config, self._places, self._multicasts = config, places, multicasts
        self._sockets, self._data = sockets, DataAdmission(sockets)
        self._reports, self._metrics = reports, metrics
        self._drained = authority.drained()  #: names of nodes
        self._num_lives: Counter[str] = Counter()  #: of nodes, by name: no id is given twice
        self._reasons: dict[str, str] = {}  #: why nodes were lost last, by name
        self._own_tickets = TicketIssuer()
        self._own_held: dict[Digest, messages.HeldChunks] = {}
        self._links: dict[tuple[NodeId, NodeId], messages.LinkSpeed] = {}  #: by source and target
        self._known: dict[Digest, str] = {}  #: what the keeper of this machine was told
        self._num_starts_told = 0  #: the life of the keeper that was told last; 0: it has to be told
        self._are_places_stale = asyncio.Event()
        self._port: ClusterPort | None = None
        self._questions = AgentSocket()  #: of the workers of this machine
        self._answering: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._awaited_until_s: dict[str, float] = {}  #: names of members that are away and may return

    async def start(self, path: Path) -> None:
        """Listen, with the credentials in `path`. Call it when the keeper is ready. Raises ConfigError."""
        credentials, cluster = Credentials.open(path), self._config.cluster
        assert credentials is not None, "made with the authority"
        self._data.begin(self._own_tickets.key, is_encrypted=cluster.encrypt_weights)
        self._port = ClusterPort(
            *parse_address(cluster.listen),
            self._data.take,
            Control(credentials.server_context(), self._serve, self._authority.is_member),
        )
        self._questions.head_found(self._answer_own)
        self._answering = await self._questions.listen(self._sockets / AGENT_SOCKET)
        self.models_changed()
        if LOCAL in self._drained:
            self._driver.post(events.NodeDraining(self._driver.now_s, LOCAL, True))
        for name in self._authority.names():
            self._await_member(name)
        works = (self._watch(), self._report(), self._tell_places())
        self._tasks = [run_vital(work) for work in works]
        log.info("cluster listening=%s port=%d", cluster.listen, self._port.port)

    def _await_member(self, name: str) -> None:
        """Have requests that lack room wait for a node that is away, unless the load adds machines."""
        if self._config.cluster.min_nodes is None:
            self._awaited_until_s[name] = time.monotonic() + NO_NODE_S
            self._driver.expect_workers(_next_life(name), 1)

    def _await_no_more(self, name: str) -> None:
        if self._awaited_until_s.pop(name, None) is not None:
            self._driver.expect_workers(_next_life(name), 0)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in list(self._nodes.others.values()):
            self._lose(node, "the service ends", logging.INFO)
        if self._answering is not None:
            self._answering.close()
        if self._port is not None:
            await self._port.close()

    # What connections bring.

    async def _serve(self, channel: Channel, first: object) -> None:
        """Serve a connection to its end, or until a link has taken it over."""
        match first:
            case messages.AskAuthority() | messages.Join():
                await answer_stranger(channel, first, self._authority)
            case messages.NodeHello():
                await self._serve_node(channel, first)
            case messages.WorkerOpened():
                self._open_worker(channel, first)

    async def _serve_node(self, channel: Channel, hello: messages.NodeHello) -> None:
        if (refused := self._refusal(channel, hello)) is not None:
            log.warning("node_refused name=%s reason=%s", hello.name, refused.reason)
            channel.send(refused)
            return
        life = self._num_lives[hello.name]
        self._num_lives[hello.name] += 1
        node_id = NodeId(f"{hello.name}.{life}" if life else hello.name)
        node = RemoteNode(node_id, hello, channel)
        self._nodes.others[node_id] = node
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
        self._driver.expect_workers(node_id, len(hello.devices))
        self._await_no_more(hello.name)
        self._metrics.node_up.labels(hello.name).set(1)
        log.info("node_joined node=%s host=%s devices=`%s`", node_id, channel.host, ", ".join(hello.devices))
        try:
            while (message := await channel.receive()) is not None and node_id in self._nodes.others:
                self._take(node, message)
        finally:
            self._lose(node, channel.why_ended or "it closed the connection")

    def _refusal(self, channel: Channel, hello: messages.NodeHello) -> messages.NodeRefused | None:
        if hello.name != channel.peer:
            return messages.NodeRefused(
                f"the certificate is that of `{channel.peer}`, the node calls itself `{hello.name}`"
            )
        version = messages.VERSION
        if not version - 1 <= hello.version <= version:
            remedy = "on the node" if hello.version < version else "on the head first"
            return messages.NodeRefused(
                f"the node's Hearth speaks version {hello.version} of the cluster's messages, the head's "
                f"{version - 1} and {version}; upgrade Hearth {remedy}"
            )
        for node in [node for node in self._nodes.others.values() if node.name == hello.name]:
            if node.channel.num_silent_pulses > 1:  # it noticed before the head that its connection was cut
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
            case messages.NodePulse():
                node.pulse = message
                self._reports.chunks_not_kept(node.node_id, message.num_not_kept)
                node.channel.send(messages.HeadPulse())
            case messages.ChunkReport(models):
                self._chunks_held(node, models)
            case messages.LinkReport(links):
                self._links_measured(links, node.node_id)
            case messages.AskSources() | messages.AskTicket():
                node.channel.send(self._answer(message, node.node_id))
            case _:
                node.channel.abort(f"a node does not send {type(message).__name__}")

    def _chunks_held(self, node: RemoteNode, models: Sequence[messages.HeldChunks]) -> None:
        """Note what a node has, and have it forget what was removed while it was away."""
        update_held(node.held, models)
        known = self._places()
        for held in models:
            if held.model in node.held and held.model not in known:
                node.channel.send(messages.ForgetChunks(held.model))
        self._reports.node_reported(node.node_id, models)

    def _links_measured(self, links: Sequence[messages.LinkSpeed], target: NodeId) -> None:
        now_s = self._driver.now_s
        for link in links:
            if link.source == LOCAL or link.source in self._nodes.others:
                self._links[link.source, target] = link
                self._metrics.link_speed.labels(name_of(link.source), name_of(target)).set(link.bytes_per_s)
                self._driver.post(
                    events.LinkMeasured(now_s, link.source, target, link.bytes_per_s, link.latency_s)
                )

    def _open_worker(self, channel: Channel, opened: messages.WorkerOpened) -> None:
        node, worker = self._nodes.others.get(opened.node), opened.hello.worker
        if node is None or node.name != channel.peer or node_of(worker) != opened.node:
            self._metrics.cluster_stale.inc()  # of an earlier life
            log.info("worker_refused worker=%s reason=`its node has another life`", worker)
            return
        try:
            channel.become_link(worker, self)
        except ConnectionResetError:
            return
        node.links[worker] = channel
        log.info("worker_linked worker=%s device=%s", worker, opened.hello.device)
        self._receiver.joined(channel, opened.hello)

    def _lose(self, node: RemoteNode, reason: str, level: int = logging.WARNING) -> None:
        if self._nodes.others.pop(node.node_id, None) is None:
            return
        self._metrics.node_up.labels(node.name).set(0)
        self._reasons[node.name] = reason
        log.log(level, "node_lost node=%s reason=%s", node.node_id, reason)
        self._await_member(node.name)
        node.expect_end(f"was lost with its node ({reason})")
        for link in list(node.links.values()):
            link.abort()
        node.channel.close()
        for ends in [ends for ends in self._links if node.node_id in ends]:
            del self._links[ends]
            self._metrics.link_speed.remove(*map(name_of, ends))
        self._tell_all(messages.DropPeer(node.node_id))
        self._data.drop_peer(node.node_id)
        self._driver.node_lost(node.node_id)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            for node in self._nodes.others.values():
                node.channel.count_pulse()
            if (outage := self._nodes.outage()) is not None:
                self._driver.fail_all(outage)
            for node_id in self._nodes.failing():
                self._driver.expect_workers(node_id, 0)
            for name, until_s in list(self._awaited_until_s.items()):
                if until_s <= time.monotonic():
                    self._await_no_more(name)

    async def _report(self) -> None:
        while True:
            if self._num_starts_told != self._nodes.local.supervisor.keeper.num_starts:
                self.models_changed()
            held, links = await self._nodes.local.changes()
            update_held(self._own_held, held)
            self._links_measured(links, LOCAL)

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
                await local.keeper.set_known_models(self._known)
                self._num_starts_told = num_starts
            except (HearthError, OSError) as error:
                log.warning("keeper_not_told reason=%s", error)
                self._num_starts_told = 0  # so that `_report` has it told again

    def observe(self, _: events.Event, actions: Sequence[events.Action]) -> None:
        """Expect the end of machines that are given back: their manager may end workers before the agent."""
        for action in actions:
            if isinstance(action, events.ReleaseWorkers) and action.node in self._nodes.others:
                self._nodes.others[action.node].expect_end("was released with its node")

    # What links tell.

    def received(self, link: FrameLink, body: bytes) -> None:
        self._receiver.received(link, body)

    def left(self, link: FrameLink) -> None:
        # Its node tells how a worker ends, before the connection does; that may not be decoded yet.
        link.unexplained = WorkerEnded("was lost with its connection", is_with_node=True)
        for node in self._nodes.others.values():
            if link.worker is not None and node.links.get(link.worker) is link:
                del node.links[link.worker]
        self._receiver.left(link)

    # What nodes ask.

    def _answer(self, question: messages.Question, asking: NodeId) -> messages.Answer:
        match question:
            case messages.AskSources(number, model):
                return self._sources(number, model, asking)
            case messages.AskTicket(number, target, worker):
                return self._ticket(number, target, worker, asking)
            case _:
                assert_never(question)

    def _answer_own(self, question: messages.Question) -> None:
        self._questions.answered(self._answer(question, LOCAL))

    def _sources(self, number: int, model: Digest, asking: NodeId) -> messages.Sources:
        all_held = {LOCAL: self._own_held} | {one.node_id: one.held for one in self._nodes.others.values()}
        held_by = {node: held[model] for node, held in all_held.items() if model in held}
        is_here = "://" not in self._places().get(model, "://")
        senders: dict[NodeId, messages.HeldChunks | None] = {
            node: held for node, held in held_by.items() if node == LOCAL or self._knows_plans(node)
        }
        if is_here:
            senders[LOCAL] = None
        links = list(self._links.values())
        plan = self._multicasts.plan_for(asking, model, self._loading(model), senders, links)
        sources = (messages.Source(node, held) for node, held in held_by.items() if node != asking)
        return messages.Sources(number, tuple(sources), plan)

    def _loading(self, model: Digest) -> dict[NodeId, int]:
        """Return the other nodes on which whole replicas of a model load, and their numbers."""
        found = {
            replica.worker.node: replica.number
            for one in self._driver.fleet.models.values()
            for replica in one.loading.values()
            if replica.digest == model and not replica.stages
        }
        return {node: number for node, number in found.items() if self._knows_plans(node)}

    def _knows_plans(self, name: NodeId) -> bool:
        """True if another node is up and of the version of this one: the one before has no plans."""
        node = self._nodes.others.get(name)
        return node is not None and node.hello.version >= messages.VERSION

    def _ticket(
        self, number: int, target: NodeId, worker: WorkerId | None, asking: NodeId
    ) -> messages.TicketGranted | messages.QuestionRefused:
        node = self._nodes.others.get(target)
        if node is None and target != LOCAL:
            return messages.QuestionRefused(number, f"node `{target}` is not up")
        is_up = worker is None or (worker in self._driver.fleet.workers and node_of(worker) == target)
        if not is_up:
            return messages.QuestionRefused(number, f"worker `{worker}` is not up on node `{target}`")
        is_encrypted = self._config.cluster.encrypt_weights or worker is not None
        if node is None:  # a node knows how it reaches the head
            own = self._own_tickets.issue(asking, worker)
            return messages.TicketGranted(number, "", 0, own, is_encrypted)
        host, port = node.hello.host or node.channel.host, node.hello.port
        return messages.TicketGranted(number, host, port, node.tickets.issue(asking, worker), is_encrypted)

    # What the service tells all nodes.

    def models_changed(self) -> None:
        """Note that models or adapters were deployed or removed."""
        self._are_places_stale.set()

    def count_requests(self, num_by_model: Mapping[Digest, int]) -> None:
        self._tell_all(messages.RequestCounts(dict(num_by_model)))

    def prefetch(self, name: NodeId, model: Digest, weight: float) -> None:
        """Have a node, if it is up, bring a model into its host memory. `weight`: as in `OpenModel`."""
        if (node := self._nodes.others.get(name)) is not None:
            node.channel.send(messages.RequestCounts({}, {model: weight}))

    def _tell_all(self, message: messages.FromHead) -> None:
        for node in self._nodes.others.values():
            node.channel.send(message)

    # What users ask.

    def drain(self, name: str, *, is_draining: bool) -> None:
        """Send no more requests to a node, or have it back. Raises RequestError if there is none."""
        known = [LOCAL, *self._authority.names()]
        if name not in known:
            raise RequestError(f"no node is called `{name:.80}`; nodes: {', '.join(known)}")
        drained = self._drained | {name} if is_draining else self._drained - {name}
        self._authority.keep_drained(drained)
        self._drained = drained
        lives = [node.node_id for node in self._nodes.others.values() if node.name == name]
        for node_id in [LOCAL] if name == LOCAL else lives:
            self._driver.post(events.NodeDraining(self._driver.now_s, node_id, is_draining))

    async def remove(self, name: str) -> None:
        """Remove a node from the cluster, for good. Raises ConfigError if there is none."""
        await asyncio.to_thread(self._authority.remove, name)
        self._reports.chunks_not_kept(NodeId(name), 0)
        for node in list(self._nodes.others.values()):
            if node.name == name:
                node.channel.send(messages.NodeRefused(f"`{name}` was removed from the cluster"))
                self._lose(node, "it was removed")
        self._await_no_more(name)
        if name in self._drained:  # last: it may fail, and the node must be out all the same
            self._drained.discard(name)
            self._authority.keep_drained(self._drained)

    def views(self) -> tuple[NodeView, ...]:
        down = (NodeView(name=name, state="down", reason=reason) for name, reason in self._absences().items())
        return (*map(self._view, self._nodes.others.values()), *down)

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
        up = {node.name for node in self._nodes.others.values()}
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
            links=self.links_to(node.node_id),
            receives=self._receives(node.node_id),
            labels=node.labels,
            reason=node.pulse.trouble,
        )

    def links_to(self, target: NodeId) -> tuple[LinkView, ...]:
        """Return how fast chunks have come to a node, by their source."""
        return tuple(
            LinkView(source, link.bytes_per_s) for (source, to), link in self._links.items() if to == target
        )

    def _receives(self, node: NodeId) -> dict[str, tuple[str, ...]]:
        loading = {
            str(model.name): tuple(map(name_of, self._multicasts.sources_of(node, Digest(replica.digest))))
            for model in self._driver.fleet.models.values()
            for replica in model.loading.values()
            if replica.worker.node == node
        }
        return {model: sources for model, sources in loading.items() if sources}


def _next_life(name: str) -> NodeId:
    """Return what the brain is told to expect of a node that is away: it has no id yet."""
    return NodeId(f"{name}.next")


def update_held(held: dict[Digest, messages.HeldChunks], changed: Sequence[messages.HeldChunks]) -> None:
    for one in changed:
        held[one.model] = one
        if not any(one.host + one.disk):
            del held[one.model]
