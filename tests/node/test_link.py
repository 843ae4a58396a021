"""Links over real sockets: the handshake, frames in pieces, back-pressure, the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hearth.core import wire
from hearth.core.messages import VERSION, Fact, Ping, Pong, WorkerHello
from hearth.core.types import WorkerId
from hearth.node import link as link_module
from hearth.node.link import FrameLink, WorkerLink

SECRET = b"s" * 32
WORKER = WorkerId("w0")


class Record:
    """A receiver that keeps what it is told."""

    def __init__(self) -> None:
        self.joined_links: list[FrameLink] = []
        self.bodies: list[bytes] = []
        self.left_links: list[FrameLink] = []
        self.changed = asyncio.Event()

    def joined(self, link: FrameLink, hello: WorkerHello) -> None:
        self.joined_links.append(link)
        self.changed.set()

    def received(self, link: FrameLink, body: bytes) -> None:
        self.bodies.append(body)
        self.changed.set()

    def left(self, link: FrameLink) -> None:
        self.left_links.append(link)
        self.changed.set()

    async def until(self, count: int, of: list[FrameLink] | list[bytes]) -> None:
        while len(of) < count:
            self.changed.clear()
            await self.changed.wait()


class Peer:
    """A worker's end, emit by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def body(self) -> bytes:
        return await self.reader.readexactly(wire.length_of(await self.reader.readexactly(wire.HEADER.size)))

    async def greet(self, secret: bytes = SECRET, worker: WorkerId = WORKER, version: int = VERSION) -> None:
        challenge = wire.challenge_of(await self.body())
        proof = wire.proof(secret, challenge.nonce, worker)
        self.say(WorkerHello(version, worker, b"n" * 32, proof, 1, "cpu", "a CPU", 1 << 30, False))

    def say(self, fact: Fact) -> None:
        self.writer.write(wire.frame(fact))


@asynccontextmanager
async def connected(record: Record) -> AsyncIterator[Peer]:
    server = await asyncio.get_running_loop().create_server(
        lambda: WorkerLink(SECRET, lambda worker: worker == WORKER, record), "127.0.0.1", 0
    )
    async with server:
        peer = Peer(*await asyncio.open_connection(*server.sockets[0].getsockname()))
        yield peer
        peer.writer.close()


def pong(number: int) -> Pong:
    return Pong(number, 0, 0, 0, 0, 0, {}, ())


def test_a_worker_that_knows_the_secret_joins_and_its_frames_arrive_in_order() -> None:
    async def scene() -> list[bytes]:
        record = Record()
        async with connected(record) as peer:
            await peer.greet()
            wire.check_welcome(wire.order_of(await peer.body()), SECRET, b"n" * 32, WORKER)  # type: ignore[arg-type] # refused if it is another order
            stream = b"".join(wire.frame(pong(number)) for number in range(50))
            for at in range(0, len(stream), 7):  # frames come apart on their way
                peer.writer.write(stream[at : at + 7])
                await asyncio.sleep(0)
            await record.until(50, record.bodies)
        return record.bodies

    bodies = asyncio.run(scene())
    assert [wire.fact_of(body) for body in bodies] == [pong(number) for number in range(50)]


async def _refused(secret: bytes = SECRET, worker: WorkerId = WORKER, version: int = VERSION) -> Record:
    record = Record()
    async with connected(record) as peer:
        await peer.greet(secret, worker, version)
        assert await peer.reader.read() == b""
    return record


def test_a_wrong_secret_an_unknown_worker_and_another_version_end_the_connection() -> None:
    for record in (
        asyncio.run(_refused(secret=b"x" * 32)),
        asyncio.run(_refused(worker=WorkerId("w9"))),
        asyncio.run(_refused(version=VERSION + 1)),
    ):
        assert record.joined_links == []
        assert record.left_links == []


def test_before_the_secret_is_proven_little_is_read() -> None:
    async def scene() -> Record:
        record = Record()
        async with connected(record) as peer:
            await peer.body()
            peer.writer.write(wire.HEADER.pack(wire.MAX_GREETING_BYTES + 1))
            assert await peer.reader.read() == b""
        return record

    assert asyncio.run(scene()).joined_links == []


def test_the_end_of_a_connection_is_told_once_after_its_last_frame() -> None:
    async def scene() -> Record:
        record = Record()
        async with connected(record) as peer:
            await peer.greet()
            await peer.body()
            peer.say(pong(1))
            peer.writer.close()
            await record.until(1, record.left_links)
        return record

    record = asyncio.run(scene())
    assert len(record.bodies) == 1
    assert record.left_links == record.joined_links


def test_a_worker_is_held_back_while_nobody_takes_what_it_said() -> None:
    async def scene() -> tuple[int, int]:
        record = Record()
        async with connected(record) as peer:
            await peer.greet()
            await peer.body()
            frame = wire.frame(pong(1))
            num_frames = 4 * link_module.MAX_UNREAD_BYTES // len(frame)
            peer.writer.write(frame * num_frames)
            waiting = asyncio.create_task(peer.writer.drain())
            link = (await _first(record)).joined_links[0]
            num_held = await _steady(record)
            num_taken = 0
            while True:
                record.changed.clear()
                link.consumed(sum(map(len, record.bodies[num_taken:])))
                num_taken = len(record.bodies)
                if num_taken == num_frames:
                    break
                await record.changed.wait()
            await waiting
            return num_held, num_frames

    num_held, num_frames = asyncio.run(scene())
    assert num_held < num_frames


async def _first(record: Record) -> Record:
    await record.until(1, record.joined_links)
    return record


async def _steady(record: Record) -> int:
    """Return how many frames arrive until no more do."""
    count = -1
    while count != len(record.bodies):
        count = len(record.bodies)
        for _ in range(200):
            await asyncio.sleep(0)
    return count


def test_an_order_to_a_worker_that_is_gone_is_nobodys() -> None:
    async def scene() -> None:
        record = Record()
        async with connected(record) as peer:
            await peer.greet()
            await peer.body()
            peer.writer.close()
            await record.until(1, record.left_links)
            record.joined_links[0].send(Ping(1))

    asyncio.run(scene())
