"""Connections between the machines of a cluster: one port for all, and messages over TLS. Knows no member.

The first byte of a connection tells what it is:

    0x16, a ClientHello of TLS           control: a `Channel`
    `HEARTH1 ` and a ticket in hex, `\\n`  data: the socket and the ticket are passed on
    anything else                        closed
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from hearth.core import wire
from hearth.core.errors import ConfigError, HearthError, JoinRefused, ServiceError, Unreachable
from hearth.core.node_messages import DATA_MAGIC, AskAuthority, Join, NodeMessage, NodeRefused
from hearth.core.types import WorkerId, server_name
from hearth.node.credentials import not_a_member, peer_of
from hearth.node.link import FrameLink, Receiver
from hearth.node.tickets import STORE_TICKET_BYTES, WORKER_TICKET_BYTES

#: Connections whose peer is not yet known to be a member; beyond, the oldest is closed.
MAX_STRANGERS = 64
#: The same for one address.
MAX_OF_ADDRESS = 32
#: How long such a connection may take until its first message or ticket, or until a stranger is answered.
STRANGER_S = 5.0
#: The longest message of a peer without a certificate.
MAX_STRANGER_BYTES = 16 << 10
CONNECT_S, ANSWER_S = 5.0, 10.0
#: Between two pulses of a member. One that sends nothing for `MAX_SILENT_PULSES` of them is lost.
PULSE_S, MAX_SILENT_PULSES = 0.5, 6
#: How long the end of a connection waits for the peer.
CLOSE_S = 1.0
#: How long sent bytes may stay unacknowledged. Heartbeats notice a lost machine sooner.
_USER_TIMEOUT_MS = 10_000
_ACCEPT_RETRY_S = 0.1

T = TypeVar("T")

log = logging.getLogger(__name__)


class Channel(FrameLink):
    """A connection over which machines exchange messages. It may become the link of a worker."""

    def __init__(self) -> None:
        super().__init__()
        self.peer: str | None = None  #: verified name; None: the peer has shown no certificate
        self.key = ""  #: hash of the key in the peer's certificate
        self.num_silent_pulses = 0
        self._frames: deque[bytes] = deque()  #: not received yet
        self._changed = asyncio.Event()

    async def receive(self) -> NodeMessage | None:
        """Return the next message; None: the connection has ended. Loses nothing when it is cancelled."""
        while not self._frames:
            if self._transport is None:
                return None
            self._changed.clear()
            await self._changed.wait()
        body = self._frames.popleft()
        self.consumed(len(body))
        try:
            return wire.node_message_of(body)
        except ServiceError as error:
            self.abort(str(error))
            return None

    async def ask(self, question: NodeMessage, kind: type[T]) -> T:
        """Return the head's answer to the first message; any other than `kind` ends the connection.

        Raises Unreachable, if it may be tried again, and JoinRefused.
        """
        self.send(question)
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await self.receive()
        except TimeoutError:
            reason = f"the head has not answered within {ANSWER_S:g} s; look into its log"
            self.abort(reason)
            raise Unreachable(reason) from None
        if isinstance(answer, kind):
            return answer
        self.close()
        match answer:
            case None:
                raise Unreachable(
                    "the head has closed the connection without an answer; if the certificate of this "
                    "machine has expired, join again with a new token"
                )
            case NodeRefused(reason, is_final):
                raise JoinRefused(reason) if is_final else Unreachable(reason)
        raise JoinRefused(f"the head has answered {type(answer).__name__}; install the same Hearth on both")

    def count_pulse(self) -> None:
        """End a connection that is silent for too long. Call it every `PULSE_S`.

        Pulses are counted and not time: while this process is stopped, peers are not silent.
        """
        self.num_silent_pulses += 1
        if self.num_silent_pulses > MAX_SILENT_PULSES:
            self.abort(f"it was silent for {MAX_SILENT_PULSES * PULSE_S:g} s")

    def become_link(self, worker: WorkerId, receiver: Receiver) -> None:
        """Pass further frames, which are those of a worker, to `receiver`. Raises ConnectionResetError."""
        if self._transport is None:
            raise ConnectionResetError(self.why_ended or "the peer has closed the connection")
        self.worker, self._receiver = worker, receiver
        while self._frames:
            receiver.received(self, self._frames.popleft())

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _set_options(transport.get_extra_info("socket"))
        self.host = str(transport.get_extra_info("peername")[0])
        self.peer, self.key = peer_of(transport.get_extra_info("ssl_object")) or (None, "")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._changed.set()

    def _limit_bytes(self) -> int:
        return MAX_STRANGER_BYTES if self.peer is None else wire.MAX_FRAME_BYTES

    def _take(self, body: bytes) -> None:
        self.num_silent_pulses = 0
        if self.worker is not None:
            super()._take(body)
            return
        self._unread_bytes += len(body)
        self._frames.append(body)
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
        raise Unreachable(
            f"`{host}:{port}` cannot be reached: {_reason_of(error)}; check the address, that `hearth serve` "
            "runs there and that no firewall blocks the port"
        ) from error
    return channel


def _reason_of(error: OSError) -> str:
    """Say why a connection failed; asyncio's own text for it has a number and the address again."""
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_S:g} s"
    if isinstance(error, ssl.SSLError | socket.gaierror) or error.errno is None:
        return str(error.strerror or error)
    return os.strerror(error.errno)


@dataclass(frozen=True, slots=True)
class Control:
    """How the head serves control connections."""

    context: ssl.SSLContext
    #: Gets each member, and strangers that ask to join, with their first message. Then the channel is closed.
    serve: Callable[[Channel, NodeMessage], Awaitable[None]]
    is_member: Callable[[str, str], bool]  #: by the name and the key in a certificate


class ClusterPort:
    """The one port of a machine for the others of its cluster. Mutable; used on the event loop alone."""

    def __init__(
        self,
        host: str,
        port: int,
        on_data: Callable[[socket.socket, bytes], None],
        control: Control | None = None,
    ) -> None:
        """Listen until `close`. Raises ConfigError.

        `on_data` owns its socket, which blocks, and has to check the ticket. Without `control`, connections
        other than those for data are closed.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on `{host}:{port}` for the cluster: {error.strerror}; choose another address "
                "by `cluster.listen`"
            ) from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._on_data, self._control = on_data, control
        self._strangers: dict[asyncio.Task[None], str] = {}  #: their addresses; the oldest first
        self._tasks: set[asyncio.Task[None]] = set()  #: one per connection, those of strangers included
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Stop listening and end all channels, except those that are links of workers."""
        for tasks in ({self._accepting}, self._tasks):  # in this order: each task that was created has begun
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("cluster_port_failed reason=%s", error)
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            address = str(peer[0])
            self._make_room(address)
            task = loop.create_task(self._serve(connection, address))
            self._strangers[task] = address
            self._tasks.add(task)
            task.add_done_callback(self._forget)
            await asyncio.sleep(0)  # an accepted connection gets its turn before the next one is accepted

    def _make_room(self, address: str) -> None:
        """Close the oldest stranger, of this address if that has many: it must not crowd out others."""
        same = [task for task, other in self._strangers.items() if other == address]
        crowd = same if len(same) >= MAX_OF_ADDRESS else list(self._strangers)[: -MAX_STRANGERS + 1]
        for oldest in crowd[:1]:
            del self._strangers[oldest]
            oldest.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._tasks.discard(task)

    async def _serve(self, connection: socket.socket, address: str) -> None:
        """Serve a connection to its end. A stranger has `STRANGER_S` for everything."""
        channel = Channel()
        try:
            async with asyncio.timeout(STRANGER_S):
                control = await self._begin(connection)
                if control is None:
                    return
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: channel, connection, ssl=control.context, ssl_shutdown_timeout=CLOSE_S
                )
                first = await channel.receive()
                if first is None:
                    raise ConnectionError(channel.why_ended or "the peer has closed the connection")
                is_member = channel.peer is not None and control.is_member(channel.peer, channel.key)
                if not is_member and isinstance(first, AskAuthority | Join):
                    await control.serve(channel, first)
                elif not is_member:
                    channel.send(NodeRefused(not_a_member(channel.peer)))
            if is_member:
                task = asyncio.current_task()
                assert task is not None, "a coroutine that runs has a task"
                self._strangers.pop(task, None)
                await control.serve(channel, first)
            if channel.worker is None:
                channel.close()
        except BaseException as error:
            reason = str(error) or type(error).__name__
            channel.abort(reason)
            if not isinstance(error, OSError | HearthError):  # TimeoutError and those of TLS are OSErrors
                raise
            level = logging.DEBUG if isinstance(error, OSError) else logging.WARNING
            log.log(level, "connection_refused address=%s reason=%s", address, reason)

    async def _begin(self, connection: socket.socket) -> Control | None:
        """Return how to serve a control connection; None: it was one for data, and was passed on."""
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
                    return None
                case b"\x16" if self._control is not None:
                    held.pop_all()
                    return self._control
        raise ConnectionError("the peer speaks another protocol")


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
    line = b""
    for ticket_bytes in (STORE_TICKET_BYTES, WORKER_TICKET_BYTES):
        num_bytes = len(DATA_MAGIC) + 2 * ticket_bytes + 1
        while len(line) < num_bytes:
            part = await asyncio.get_running_loop().sock_recv(connection, num_bytes - len(line))
            if not part:
                raise ConnectionError("the peer has closed the connection")
            line += part
        if line.endswith(b"\n"):
            break
    if not line.startswith(DATA_MAGIC) or not line.endswith(b"\n"):
        raise ConnectionError("the peer speaks another protocol")
    try:
        return bytes.fromhex(line[len(DATA_MAGIC) : -1].decode("ascii"))
    except ValueError:
        raise ConnectionError("the ticket is not in hexadecimal") from None


def _set_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
