"""A head's port and a node for tests, over real sockets and TLS, and a check that nothing is left open."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hearth.core.node_messages import (
    AskAuthority,
    AskTicket,
    HeadPulse,
    Join,
    NodeHello,
    NodeMessage,
    QuestionRefused,
)
from hearth.core.types import HEAD
from hearth.node.channel import Channel, ClusterPort, Control, connect
from hearth.node.credentials import (
    Authority,
    Credentials,
    Token,
    keep_certificate,
    own_key,
    signing_request,
)
from hearth.node.join import answer_stranger

Scene = Callable[[Callable[[], Awaitable[None]]], None]
#: Of the head, for other machines.
ADDRESS = "127.0.0.1:7610"
PATIENCE_S = 120.0
HELLO = NodeHello(1, "gpu-1", "cpu", ("a CPU",), 1 << 30, 7610)


def token_of(authority: Authority, ttl_s: float = 60.0) -> Token:
    return Token.parse(authority.new_token(ttl_s))


def member(authority: Authority, path: Path, name: str) -> Credentials:
    token, request = token_of(authority), signing_request(name, own_key(path))
    certificate = authority.admit(token.token_id, token.secret, name, request)
    return keep_certificate(path, authority.certificate_pem, certificate, ADDRESS)


def play_on(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], scene: Callable[[], Awaitable[None]]
) -> None:
    """Run a scene on an event loop, and check that it leaves no task and no socket behind."""

    async def checked() -> None:
        before = open_sockets()
        await asyncio.wait_for(scene(), PATIENCE_S)
        deadline_s = time.monotonic() + PATIENCE_S
        while (left := open_sockets() - before) and time.monotonic() < deadline_s:  # others may end meanwhile
            await asyncio.sleep(0.01)
        assert not left
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(checked())


def open_sockets() -> set[str]:
    files = {os.path.realpath(f"/proc/self/fd/{file}") for file in os.listdir("/proc/self/fd")}
    return {file for file in files if "socket:" in file}


@dataclass
class Cluster:
    """A head's port, and what came to it."""

    path: Path
    authority: Authority
    head: Credentials
    node: Credentials
    joins: bool = False
    port: ClusterPort | None = None
    came: asyncio.Queue[tuple[str | None, NodeMessage]] = field(default_factory=asyncio.Queue)
    data: list[tuple[bytes, bytes]] = field(default_factory=list)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        control = Control(self.head.server_context(), self.on_channel, self.authority.is_member)
        self.port = ClusterPort("127.0.0.1", 0, self.on_data, control)
        try:
            yield self.port.port
        finally:
            await self.port.close()

    async def on_channel(self, channel: Channel, first: NodeMessage) -> None:
        """Answer each message of a peer until it leaves; requests to join as a head does, if it `joins`."""
        if self.joins and isinstance(first, AskAuthority | Join):
            self.came.put_nowait((channel.peer, first))
            return await answer_stranger(channel, first, self.authority)
        message: NodeMessage | None = first
        while message is not None:
            self.came.put_nowait((channel.peer, message))
            if isinstance(message, AskTicket):
                channel.send(QuestionRefused(message.number, "x" * (message.number % 100_000)))
            else:
                channel.send(HeadPulse())
            message = await channel.receive()

    def on_data(self, connection: socket.socket, ticket: bytes) -> None:
        with connection:
            assert connection.getblocking()
            self.data.append((ticket, connection.recv(100)))

    async def no_strangers(self) -> None:
        assert self.port is not None
        while self.port._strangers:
            await asyncio.sleep(0.005)


async def to_head(port: int, credentials: Credentials) -> Channel:
    return await connect("127.0.0.1", port, credentials.client_context(), HEAD)


async def nameless(port: int) -> Channel:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return await connect("127.0.0.1", port, context, None)


def new_cluster(path: Path) -> Cluster:
    authority = Authority.create(path / "head", ADDRESS)
    head, node = Credentials.open(path / "head"), member(authority, path / "a", "gpu-1")
    assert head is not None
    return Cluster(path, authority, head, node)
