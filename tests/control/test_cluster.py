"""The head's side of a cluster, asked by nodes over TLS. No process runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest

from hearth.control.cluster import Cluster
from hearth.control.datadir import DataDir
from hearth.control.deploy.deployed import Deployed
from hearth.control.link_receiver import LinkReceiver
from hearth.control.requests.fact_decoder import FactDecoder
from hearth.core import messages, wire
from hearth.core.config import ClusterConfig, HearthConfig
from hearth.core.errors import RequestError
from hearth.core.node_messages import (
    VERSION,
    AskSources,
    AskTicket,
    ChunksHeld,
    ForgetChunks,
    HeadPulse,
    HeldChunks,
    NodeHello,
    NodePulse,
    NodeRefused,
    NodeWelcome,
    RequestsCame,
    Source,
    Sources,
    TicketGranted,
    TicketRefused,
    WorkerOpened,
)
from hearth.core.types import LOCAL, Digest, NodeId, WorkerId
from hearth.node.channel import Channel
from hearth.node.credentials import Authority, Credentials
from hearth.node.tickets import TicketCheck
from tests.control.gateway_rig import GatewayRig, with_rig
from tests.node.tls_cluster import member, to_head

HELLO = NodeHello(VERSION, "gpu-1", "cpu", ("a CPU",), 1 << 30, 7610)
MODEL = Digest("d" * 64)


@dataclass
class HeadRig:
    """A head that listens, and a node's credentials."""

    rig: GatewayRig
    cluster: Cluster
    port: int
    nodes: dict[str, Credentials]

    async def connect(self, name: str = "gpu-1") -> Channel:
        return await to_head(self.port, self.nodes[name])

    async def join(self, name: str = "gpu-1") -> tuple[Channel, NodeWelcome]:
        channel = await self.connect(name)
        channel.send(msgspec.structs.replace(HELLO, name=name))
        welcome = await channel.receive()
        assert isinstance(welcome, NodeWelcome), welcome
        return channel, welcome

    async def leave(self, channel: Channel, node: NodeId) -> None:
        channel.close()
        while node in self.rig.nodes.others:
            await asyncio.sleep(0.005)

    async def open_worker(self, node: NodeId, seat: str = "w0", name: str = "gpu-1") -> Channel:
        channel = await self.connect(name)
        worker = WorkerId(f"{node}/{seat}")
        hello = messages.WorkerHello(messages.VERSION, worker, b"", b"", 1, "cpu", "a CPU", 1 << 30, False)
        channel.send(WorkerOpened(node, hello))
        return channel

    def stale(self) -> float | None:
        return self.rig.metrics.registry.get_sample_value("hearth_cluster_stale_total")


@asynccontextmanager
async def heading(rig: GatewayRig, data_dir: DataDir) -> AsyncIterator[HeadRig]:
    authority = Authority.create(data_dir.path / "cluster")
    nodes = {name: member(authority, data_dir.path / name, name) for name in ("gpu-1", "gpu-2")}
    decoder = FactDecoder(asyncio.get_running_loop(), rig.driver.requests.by_run, rig.driver.receive)
    cluster = Cluster(
        authority,
        rig.nodes,
        rig.driver,
        LinkReceiver(rig.catalog, rig.driver, decoder),
        HearthConfig(cluster=ClusterConfig(listen="127.0.0.1:0")),
        lambda: {MODEL: "/models/it", **rig.catalog.places()},
        rig.keeper.node_reported,
        rig.metrics,
    )
    try:
        await cluster.start(data_dir.path / "cluster")
        assert cluster._port is not None
        yield HeadRig(rig, cluster, cluster._port.port, nodes)
    finally:
        await cluster.close()
        await asyncio.sleep(0.05)
        decoder.close()


def play(data_dir: DataDir, scene: Callable[[HeadRig], Awaitable[None]]) -> None:
    async def whole(rig: GatewayRig) -> None:
        async with asyncio.timeout(60), heading(rig, data_dir) as head:
            await scene(head)

    with_rig(data_dir, whole)


def test_each_life_of_a_node_has_an_id_of_its_own(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        channel, welcome = await head.join()
        assert welcome.node == "gpu-1"
        channel.send(NodePulse(7, (), 0))
        assert await channel.receive() == HeadPulse(7)
        await head.leave(channel, welcome.node)
        _, again = await head.join()
        assert again.node == "gpu-1.1"
        assert again.ticket_key != welcome.ticket_key

    play(data_dir, scene)


@pytest.mark.parametrize(
    ("hello", "reason", "is_final"),
    [
        (msgspec.structs.replace(HELLO, version=VERSION + 1), "speaks version", True),
        (msgspec.structs.replace(HELLO, name="gpu-2"), "the certificate is that of `gpu-1`", True),
        (HELLO, "a node called `gpu-1` is up", False),
    ],
)
def test_a_node_is_refused(data_dir: DataDir, hello: NodeHello, reason: str, is_final: bool) -> None:
    async def scene(head: HeadRig) -> None:
        await head.join()
        channel = await head.connect()
        channel.send(hello)
        answer = await channel.receive()
        assert isinstance(answer, NodeRefused)
        assert reason in answer.reason
        assert answer.is_final is is_final

    play(data_dir, scene)


def test_a_worker_of_an_earlier_life_is_refused_and_counted(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        channel, first = await head.join()
        await head.leave(channel, first.node)
        _, second = await head.join()
        for node, name in ((first.node, "gpu-1"), (second.node, "gpu-2")):  # gpu-2 is not that node
            opened = await head.open_worker(node, name=name)
            assert await opened.receive() is None
        assert head.stale() == 2
        assert not head.rig.driver.fleet.workers

    play(data_dir, scene)


def test_a_worker_takes_part_until_its_node_is_lost(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        channel, welcome = await head.join()
        await head.open_worker(welcome.node)
        fleet = head.rig.driver.fleet
        while not fleet.workers:
            await asyncio.sleep(0.005)
        assert fleet.workers[WorkerId("gpu-1/w0")].node == "gpu-1"
        await head.leave(channel, welcome.node)
        while fleet.workers or fleet.most_by_node:
            await asyncio.sleep(0.005)

    play(data_dir, scene)


def test_sources_and_tickets_are_told(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        one, welcome = await head.join("gpu-1")
        two, _ = await head.join("gpu-2")
        held = HeldChunks(MODEL, b"\x01", b"\x03")
        one.send(ChunksHeld((held,)))
        one.send(NodePulse(1, (), 0))
        assert await one.receive() == HeadPulse(1)  # so it was taken
        two.send(AskSources(5, MODEL))
        assert await two.receive() == Sources(5, (Source(NodeId("gpu-1"), held),))
        one.send(AskSources(6, MODEL))
        assert await one.receive() == Sources(6, ()), "without the node that asks"
        two.send(AskTicket(7, NodeId("gpu-1")))
        granted = await two.receive()
        assert isinstance(granted, TicketGranted)
        assert (granted.host, granted.port) == ("127.0.0.1", 7610)
        assert TicketCheck(NodeId("gpu-1"), welcome.ticket_key).admit(granted.ticket) == "gpu-2"
        two.send(AskTicket(8, NodeId("gpu-9")))
        assert isinstance(await two.receive(), TicketRefused)
        two.send(AskTicket(9, LOCAL))
        own = await two.receive()
        assert isinstance(own, TicketGranted)
        assert (own.host, own.port) == ("", head.port), "a node knows how it reaches the head"

    play(data_dir, scene)


def test_a_node_forgets_what_was_removed_and_reports_no_endless_masks(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        one, _ = await head.join("gpu-1")
        removed = Digest("e" * 64)
        one.send(ChunksHeld((HeldChunks(removed, b"\x01", b""), HeldChunks(MODEL, b"\xff" * (1 << 20), b""))))
        assert await one.receive() == ForgetChunks(removed)
        two, _ = await head.join("gpu-2")
        for digest in (removed, MODEL):
            two.send(AskSources(1, digest))
            assert await two.receive() == Sources(1, ())

    play(data_dir, scene)


@pytest.mark.parametrize("seat", ["wfoo", "w0/../w1", "w1234567", "w0.x", ""])
def test_a_worker_of_another_name_is_refused(data_dir: DataDir, seat: str) -> None:
    async def scene(head: HeadRig) -> None:
        _, welcome = await head.join()
        assert await (await head.open_worker(welcome.node, seat)).receive() is None
        assert not head.rig.driver.fleet.workers

    play(data_dir, scene)


def test_a_worker_that_has_left_is_not_linked_again(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        _, welcome = await head.join()
        first = await head.open_worker(welcome.node)
        while not head.rig.driver.fleet.workers:
            await asyncio.sleep(0.005)
        first.close()
        while head.rig.driver.fleet.workers:
            await asyncio.sleep(0.005)
        assert await (await head.open_worker(welcome.node)).receive() is None
        assert not head.rig.driver.fleet.workers

    play(data_dir, scene)


def test_a_drained_node_stays_drained_in_its_next_life(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        channel, welcome = await head.join()
        head.cluster.drain("gpu-1", is_draining=True)
        await head.leave(channel, welcome.node)
        _, again = await head.join()
        assert list(head.rig.driver.fleet.draining) == [again.node]
        head.cluster.drain("gpu-1", is_draining=False)
        assert not head.rig.driver.fleet.draining
        with pytest.raises(RequestError, match="no node called `gpu-9` is up; nodes: gpu-1"):
            head.cluster.drain("gpu-9", is_draining=True)

    play(data_dir, scene)


def test_a_removed_node_is_told_and_stays_out(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        channel, _ = await head.join()
        head.cluster.remove("gpu-1")
        assert isinstance(await channel.receive(), NodeRefused)
        assert await channel.receive() is None
        again = await head.connect()
        again.send(HELLO)
        assert isinstance(await again.receive(), NodeRefused)
        assert [view.name for view in head.cluster.views()] == ["gpu-2"]

    play(data_dir, scene)


def test_nodes_forget_what_was_removed(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(head: HeadRig) -> None:
        deployments = head.rig.gateway.deployments
        deployments.tell_nodes = head.cluster.models_changed
        channel, _ = await head.join()
        channel.send(NodePulse(1, (), 0))
        assert await channel.receive() == HeadPulse(1)
        await deployments.remove("tiny")
        assert await channel.receive() == ForgetChunks(Digest(deployed.digest))

    play(data_dir, scene)


def test_demand_is_told_to_nodes(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(head: HeadRig) -> None:
        channel, _ = await head.join()
        head.cluster.count_requests({MODEL: 3})
        assert await channel.receive() == RequestsCame({MODEL: 3})

    play(data_dir, scene)


def test_frames_of_a_worker_reach_the_driver(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        _, welcome = await head.join()
        opened = await head.open_worker(welcome.node)
        transport, _ = opened.detach()
        transport.write(wire.frame(messages.Pong(1, 100, 40, 0, 0, 0, {}, ())))
        sample = head.rig.metrics.registry.get_sample_value
        while sample("hearth_device_used_bytes") != 60:
            await asyncio.sleep(0.005)
        transport.abort()

    play(data_dir, scene)
