"""A worker and the head over real sockets and TLS, with its node between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hearth.core import wire
from hearth.core.messages import Fact, Ping, Pong, WorkerEnded, WorkerHello
from hearth.core.node_messages import NodeMessage, WorkerOpened
from hearth.core.types import NodeId, WorkerId
from hearth.node.channel import Channel, ClusterPort, Control
from hearth.node.link import MAX_UNREAD_BYTES, FrameLink, WorkerLink
from hearth.node.relay import WorkerRelay
from tests.node.test_link import SECRET, Peer, Record
from tests.node.tls_cluster import Cluster, Scene, to_head

WORKER = WorkerId("gpu-1/w0")


class Relayed:
    """The head's end of a worker's connection, and the worker's own. Mutable."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.head = Record()
        self.opened: WorkerOpened | None = None
        self.head_link: FrameLink | None = None
        self.worker_link: FrameLink | None = None
        self._relay: WorkerRelay | None = None
        self._port = 0

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Peer]:
        """A worker that has joined its node, which has opened its connection to the head."""
        head, is_member = self._cluster.head, self._cluster.authority.is_member
        control = Control(head.server_context(), self._on_channel, is_member)
        port = ClusterPort("127.0.0.1", 0, lambda *_: None, control)
        self._port = port.port
        server = await asyncio.get_running_loop().create_server(
            lambda: WorkerLink(SECRET, lambda worker: worker == WORKER, self), "127.0.0.1", 0
        )
        try:
            async with server:
                peer = Peer(*await asyncio.open_connection(*server.sockets[0].getsockname()))
                await peer.greet(worker=WORKER)
                await peer.body()  # the welcome
                await self.head.until(1, self.head.joined_links)
                yield peer
                peer.writer.close()
                await self.head.until(1, self.head.left_links)
        finally:
            await port.close()

    async def _on_channel(self, channel: Channel, message: NodeMessage) -> None:
        assert isinstance(message, WorkerOpened)
        self.opened, self.head_link = message, channel
        channel.become_link(message.hello.worker, self.head)
        self.head.joined(channel, message.hello)

    # What the worker's own link tells its node.

    def joined(self, link: FrameLink, hello: WorkerHello) -> None:
        self.worker_link, self._relay = link, WorkerRelay(link, hello, NodeId("gpu-1"))
        self._opening = asyncio.create_task(self._open())

    async def _open(self) -> None:
        assert self._relay is not None
        self._relay.open(await to_head(self._port, self._cluster.node))

    def received(self, link: FrameLink, body: bytes) -> None:
        assert self._relay is not None
        self._relay.worker_sent(body)

    def left(self, link: FrameLink) -> None:
        assert self._relay is not None
        self._relay.worker_left()


def pong(number: int) -> Pong:
    return Pong(number, 0, 0, 0, 0, 0, {}, ())


def facts(record: Record) -> list[Fact]:
    return [wire.fact_of(body) for body in record.bodies]


def test_frames_go_both_ways_in_order_between_pings_of_the_node(play: Scene, cluster: Cluster) -> None:
    async def scene() -> None:
        relayed = Relayed(cluster)
        async with relayed.worker() as peer:
            assert relayed.opened is not None
            assert relayed.opened.hello.worker == WORKER
            assert relayed.head_link is not None
            assert relayed.worker_link is not None
            for number in range(100):
                peer.say(pong(number))
                relayed.head_link.send(Ping(number))
                relayed.worker_link.send(Ping(1000 + number))  # the node's own, between frames of the head
            await relayed.head.until(100, relayed.head.bodies)
            assert facts(relayed.head) == [pong(number) for number in range(100)]
            orders = [wire.order_of(await peer.body()) for _ in range(200)]
            pings = [order.number for order in orders if isinstance(order, Ping)]
            assert [one for one in pings if one < 1000] == list(range(100))
            assert [one for one in pings if one >= 1000] == list(range(1000, 1100))

    play(scene)


def test_a_worker_is_held_back_while_the_head_takes_nothing(play: Scene, cluster: Cluster) -> None:
    async def scene() -> None:
        relayed = Relayed(cluster)
        async with relayed.worker() as peer:
            num_frames = 64
            frame = wire.frame(Pong(1, 0, 0, 0, 0, 0, {"x" * MAX_UNREAD_BYTES: 1}, ()))
            sending = asyncio.create_task(_send_all(peer, frame, num_frames))
            await relayed.head.until(1, relayed.head.bodies)
            link = relayed.head_link
            assert link is not None
            while not link.is_held_back:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # time to send what buffers take
            assert len(relayed.head.bodies) < num_frames
            assert not sending.done()
            num_taken = 0
            while num_taken < num_frames:
                relayed.head.changed.clear()
                link.consumed(sum(map(len, relayed.head.bodies[num_taken:])))
                num_taken = len(relayed.head.bodies)
                if num_taken < num_frames:
                    await relayed.head.changed.wait()
            await sending

    play(scene)


async def _send_all(peer: Peer, frame: bytes, num_frames: int) -> None:
    for _ in range(num_frames):
        peer.writer.write(frame)
        await peer.writer.drain()


def test_the_last_fact_about_a_worker_says_how_it_ended(play: Scene, cluster: Cluster) -> None:
    async def scene() -> None:
        relayed = Relayed(cluster)
        async with relayed.worker() as peer:
            assert relayed.worker_link is not None
            relayed.worker_link.why_killed = "did not advance for 30 s"
            peer.say(pong(1))
            peer.writer.close()
            await relayed.head.until(1, relayed.head.left_links)
        assert facts(relayed.head) == [pong(1), WorkerEnded("did not advance for 30 s")]

    play(scene)


def test_a_worker_loses_its_connection_with_that_to_the_head(play: Scene, cluster: Cluster) -> None:
    async def scene() -> None:
        relayed = Relayed(cluster)
        async with relayed.worker() as peer:
            assert relayed.head_link is not None
            relayed.head_link.abort()
            assert await peer.reader.read() == b""

    play(scene)
