"""Connections between the machines of a cluster: one port for all, and messages over TLS. Knows no member.

The first byte of a connection tells what it is:

    0x16, a ClientHello of TLS           control: a `Channel`
    `HEARTH1 ` and a ticket in hex, `\\n`  data: the socket and the ticket are passed on
    anything else                        closed
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import TypeAlias, cast

from hearth.core import wire
from hearth.core.errors import ConfigError, HearthError, JoinRefused, ServiceError, Unreachable
from hearth.core.node_messages import AskAuthority, FromHead, FromNode, Join, NodeRefused
from hearth.node.credentials import not_a_member, peer_of, server_name
from hearth.node.tickets import TICKET_BYTES

NodeMessage: TypeAlias = FromNode | FromHead

#: Begins a data connection.
DATA_MAGIC = b"HEARTH1 "
#: Connections whose peer is not yet known to be a member; beyond, the oldest is closed.
MAX_STRANGERS = 64
#: How long such a connection may take until its first message or ticket, or until a stranger is answered.
STRANGER_S = 5.0
MAX_FIRST_BYTES = 16 << 10
MAX_MESSAGE_BYTES = 16 << 20
#: The most unread bytes of a peer; beyond, TCP holds it back.
MAX_UNREAD_BYTES = 256 << 10
#: The most unsent bytes to a peer. It always reads, so more means that it hangs.
MAX_UNSENT_BYTES = 64 << 20
CONNECT_S = 5.0
#: How long the end of a connection waits for the peer.
CLOSE_S = 1.0
#: How long sent bytes may stay unacknowledged. Heartbeats notice a lost machine sooner.
_USER_TIMEOUT_MS = 10_000
_ACCEPT_RETRY_S = 0.1

log = logging.getLogger(__name__)


class Channel(asyncio.Protocol):
    """A connection over which machines exchange messages. Mutable; used on the event loop alone."""

    def __init__(self) -> None:
        self.peer: str | None = None  #: verified name; None: the peer has shown no certificate
        self.serial: int | None = None  #: of the peer's certificate
        self.host = ""  #: address of the peer
        self.why_ended: str | None = None  #: None: it has not, or the peer has closed it
        self._transport: asyncio.Transport | None = None  #: None once it was lost or detached
        self._buffer = bytearray()
        self._is_paused = False
        self._put_back: NodeMessage | None = None
        self._changed = asyncio.Event()

    def send(self, message: NodeMessage) -> None:
        """Queue a message. Messages to a peer that is gone are dropped; `receive` tells."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(wire.frame(message))
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.abort("the peer takes no messages")

    async def receive(self, limit_bytes: int = MAX_MESSAGE_BYTES) -> NodeMessage | None:
        """Return the next message; None: the connection has ended. Loses nothing when it is cancelled."""
        if self._put_back is not None:
            message, self._put_back = self._put_back, None
            return message
        try:
            while (body := self._next_frame(limit_bytes)) is None:
                if self._transport is None:
                    return None
                self._changed.clear()
                if self._is_paused:
                    self._is_paused = False
                    self._transport.resume_reading()
                await self._changed.wait()
            return wire.node_message_of(body)
        except ServiceError as error:
            self.abort(str(error))
            return None

    def put_back(self, message: NodeMessage) -> None:
        """Let the next `receive` return a message again."""
        self._put_back = message

    def detach(self) -> tuple[asyncio.Transport, bytes]:
        """Return the transport, whose reading is paused, and bytes read already; the channel has ended.

        Set another protocol before anything is awaited. Raises ConnectionResetError if the peer is gone.
        """
        transport, self._transport = self._transport, None
        if transport is None or transport.is_closing():
            raise ConnectionResetError(self.why_ended or "the peer has closed the connection")
        transport.pause_reading()
        return transport, bytes(self._buffer)

    def close(self) -> None:
        """End the connection when all messages are sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        if self._transport is not None:
            self.why_ended = self.why_ended or reason
            self._transport.abort()

    def _next_frame(self, limit_bytes: int) -> bytes | None:
        start = wire.HEADER.size
        if len(self._buffer) < start:
            return None
        end = start + wire.length_of(bytes(self._buffer[:start]), limit_bytes)
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[start:end])
        del self._buffer[:end]
        return body

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport does not declare its type.
        self._transport = transport = cast(asyncio.Transport, transport)
        _set_options(transport.get_extra_info("socket"))
        self.host = str(transport.get_extra_info("peername")[0])
        self.peer, self.serial = peer_of(transport.get_extra_info("ssl_object")) or (None, None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._changed.set()
        if len(self._buffer) > MAX_UNREAD_BYTES and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.why_ended = self.why_ended or (None if exc is None else str(exc) or type(exc).__name__)
        self._changed.set()


async def connect(host: str, port: int, context: ssl.SSLContext, expects: str | None) -> Channel:
    """Connect to the node `expects`, whose name is verified. Raises Unreachable and JoinRefused.

    None: the context verifies nothing. A server that rejects this machine's certificate closes the channel.
    """
    channel = Channel()
    name = "" if expects is None else server_name(expects)
    try:
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().create_connection(
                lambda: channel, host, port, ssl=context, server_hostname=name, ssl_shutdown_timeout=CLOSE_S
            )
    except ssl.SSLCertVerificationError as error:
        raise JoinRefused(
            f"`{host}:{port}` is not `{expects}` of this cluster: {error.verify_message}; check the address "
            "and this machine's clock"
        ) from error
    except OSError as error:
        reason = f"no answer within {CONNECT_S:g} s" if isinstance(error, TimeoutError) else str(error)
        raise Unreachable(
            f"`{host}:{port}` cannot be reached: {reason}; check the address, that `hearth serve` runs there "
            "and that no firewall blocks the port"
        ) from error
    return channel


class ClusterPort:
    """The one port of a machine for the others of its cluster. Mutable; used on the event loop alone."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        on_channel: Callable[[Channel], Awaitable[None]],
        on_data: Callable[[socket.socket, bytes], None],
        is_member: Callable[[str, int], bool],
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener, self._context = listener, context
        self._on_channel, self._on_data, self._is_member = on_channel, on_data, is_member
        self._strangers: dict[asyncio.Task[None], None] = {}  #: the oldest first
        self._tasks: set[asyncio.Task[None]] = set()  #: one per connection, those of strangers included
        self._accepting = asyncio.create_task(self._accept())

    @staticmethod
    async def listen(
        host: str,
        port: int,
        context: ssl.SSLContext,
        on_channel: Callable[[Channel], Awaitable[None]],
        on_data: Callable[[socket.socket, bytes], None],
        is_member: Callable[[str, int], bool] = lambda name, serial: False,
    ) -> ClusterPort:
        """Listen until `close`. Raises ConfigError.

        `on_channel` gets each member, and strangers that ask to join, with their first message still to be
        received; when it returns, the channel is closed. `on_data` owns its socket, which blocks, and has to
        check the ticket. Without `is_member`, all are strangers.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on `{host}:{port}` for the cluster: {error.strerror}; choose another address "
                "by `cluster.listen`"
            ) from error
        listener.setblocking(False)
        return ClusterPort(listener, context, on_channel, on_data, is_member)

    async def close(self) -> None:
        """Stop listening and end all channels that were not detached."""
        for tasks in ({self._accepting}, self._tasks):  # in this order: each task that was created has begun
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("cluster_port_failed reason=%s", error)
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.cancel()
            task = loop.create_task(self._serve(connection, str(address[0])))
            self._strangers[task] = None
            self._tasks.add(task)
            task.add_done_callback(self._forget)
            await asyncio.sleep(0)  # an accepted connection gets its turn before the next one is accepted

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._tasks.discard(task)

    async def _serve(self, connection: socket.socket, address: str) -> None:
        """Serve a connection to its end. A stranger has `STRANGER_S` for everything."""
        channel = Channel()
        try:
            async with asyncio.timeout(STRANGER_S):
                is_member = await self._meet(connection, channel)
            if is_member:
                task = asyncio.current_task()
                assert task is not None, "a coroutine that runs has a task"
                self._strangers.pop(task, None)
                await self._on_channel(channel)
            channel.close()
        except BaseException as error:
            reason = str(error) or type(error).__name__
            channel.abort(reason)
            if not isinstance(error, OSError | HearthError):  # TimeoutError and those of TLS are OSErrors
                raise
            level = logging.DEBUG if isinstance(error, OSError) else logging.WARNING
            log.log(level, "connection_refused address=%s reason=%s", address, reason)

    async def _meet(self, connection: socket.socket, channel: Channel) -> bool:
        """Take a new connection up to its first message. True: it is a member's; else it was dealt with."""
        with ExitStack() as held:
            held.enter_context(connection)
            connection.setblocking(False)
            match await _first_byte(connection):
                case b"H":
                    ticket = await _read_ticket(connection)
                    _set_options(connection)
                    connection.setblocking(True)
                    held.pop_all()
                    self._on_data(connection, ticket)
                    return False
                case b"\x16":
                    held.pop_all()
                case _:
                    raise ConnectionError("the peer speaks another protocol")
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: channel, connection, ssl=self._context, ssl_shutdown_timeout=CLOSE_S
        )
        message = await channel.receive(MAX_FIRST_BYTES)
        if message is None:
            raise ConnectionError(channel.why_ended or "the peer has closed the connection")
        channel.put_back(message)
        name, serial = channel.peer, channel.serial
        if name is not None and serial is not None and self._is_member(name, serial):
            return True
        if isinstance(message, AskAuthority | Join):
            await self._on_channel(channel)
        else:
            channel.send(NodeRefused(not_a_member(name)))
        return False


async def _first_byte(connection: socket.socket) -> bytes:
    """Return the first byte and leave it to be read; empty: the peer has closed."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    return connection.recv(1, socket.MSG_PEEK)


async def _read_ticket(connection: socket.socket) -> bytes:
    """Read the line that begins a data connection, and no byte of what follows."""
    line, num_bytes = b"", len(DATA_MAGIC) + 2 * TICKET_BYTES + 1
    while len(line) < num_bytes:
        part = await asyncio.get_running_loop().sock_recv(connection, num_bytes - len(line))
        if not part:
            raise ConnectionError("the peer has closed the connection")
        line += part
    if not line.startswith(DATA_MAGIC) or not line.endswith(b"\n"):
        raise ConnectionError("the peer speaks another protocol")
    try:
        return bytes.fromhex(line[len(DATA_MAGIC) : -1].decode("ascii"))
    except ValueError:
        raise ConnectionError("the ticket is not in hexadecimal") from None


def _set_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
