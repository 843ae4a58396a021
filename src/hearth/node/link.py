"""A connection of frames between two processes, bounded in both directions. Decodes no message.

The gateway has a link to each worker: to one of its machine directly, to another by way of the worker's
node (`relay.py`). Machines of a cluster exchange messages over the same frames (`channel.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, cast

from hearth.core import wire
from hearth.core.beacon import Beacon
from hearth.core.errors import ServiceError
from hearth.core.messages import VERSION, Challenge, Order, WorkerEnded, WorkerHello
from hearth.core.node_messages import NodeMessage
from hearth.core.types import WorkerId

#: The most unconsumed bytes of a peer; beyond it, TCP holds the peer back.
MAX_UNREAD_BYTES = 256 << 10
#: The most unsent bytes to a peer. It always reads, so more means that it hangs.
MAX_UNSENT_BYTES = 256 << 20
#: Time for a worker to prove that it knows the secret.
GREETING_S = 10.0

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Takes what links bring. Called on the event loop."""

    def received(self, link: FrameLink, body: bytes) -> None:
        """Take a frame. Call `link.consumed(len(body))` when it was handled."""

    def left(self, link: FrameLink) -> None:
        """Note the end of a link; called once, after its last frame."""


class WorkerReceiver(Receiver, Protocol):
    def joined(self, link: FrameLink, hello: WorkerHello) -> None: ...


class FrameLink(asyncio.Protocol):
    """A connection about one worker. Mutable; used on the event loop alone."""

    def __init__(self) -> None:
        self.worker: WorkerId | None = None  #: that it is about; None: not known yet
        self.host = ""  #: address of a peer on another machine
        self._receiver: Receiver | None = None  #: None as long as the worker
        self._buffer = bytearray()
        self._unread_bytes = 0
        self.num_received = 0  #: frames so far
        self.is_held_back = False  #: nothing is read until more was consumed
        self.is_slow = False  #: the peer takes less than is sent
        self.on_drained: Callable[[], None] = lambda: None  #: called when it is not slow any more
        self.beacon: Beacon | None = None  #: of the worker's process, once it has joined
        self.why_killed: str | None = None  #: what the worker did, for people; None: it was not killed
        self.ended: WorkerEnded | None = None  #: what its node has said of its end; None: nothing
        self.unexplained: WorkerEnded | None = None  #: how it ended if nobody says more
        self.why_ended: str | None = None  #: the connection; None: it has not, or the peer has closed it
        self._transport: asyncio.Transport | None = None  #: None before the connection, and after

    def send(self, message: Order | WorkerEnded | NodeMessage) -> None:
        """Queue a message. Messages to a peer that is gone are dropped; `Receiver.left` tells."""
        self._write(wire.frame(message))

    def forward(self, body: bytes) -> None:
        """Queue a message as it was received elsewhere."""
        self._write(wire.HEADER.pack(len(body)) + body)

    def consumed(self, num_bytes: int) -> None:
        self._unread_bytes -= num_bytes
        if self.is_held_back and self._unread_bytes < MAX_UNREAD_BYTES // 2 and self._transport is not None:
            self.is_held_back = False
            self._transport.resume_reading()

    def abort(self, reason: str | None = None) -> None:
        if self._transport is not None:
            self.why_ended = self.why_ended or reason
            self._transport.abort()

    def close(self) -> None:
        """End the connection when all was sent."""
        if self._transport is not None:
            self._transport.close()

    def ending(self) -> WorkerEnded:
        """Return how the worker ended, whose connection is over."""
        if (known := self.ended or self.unexplained) is not None:
            return known
        signs = None if self.beacon is None else self.beacon.read()
        reason = self.why_killed or "died"
        return WorkerEnded(reason) if signs is None else WorkerEnded(reason, signs.model, signs.runs)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not declare its type

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            self._take_frames()
        except ServiceError as error:
            log.warning("peer_refused worker=%s address=%s reason=%s", self.worker, self.host or "-", error)
            self.abort(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.why_ended = self.why_ended or (None if exc is None else str(exc) or type(exc).__name__)
        if self._receiver is not None:
            self._receiver.left(self)

    def pause_writing(self) -> None:
        self.is_slow = True

    def resume_writing(self) -> None:
        self.is_slow = False
        self.on_drained()

    def _write(self, frame: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(frame)
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.error("peer_dropped worker=%s reason=`takes no messages`", self.worker)
            self.abort("the peer takes no messages")

    def _limit_bytes(self) -> int:
        """Return the length of the longest frame that the peer may send."""
        return wire.MAX_FRAME_BYTES if self.worker is not None else wire.MAX_GREETING_BYTES

    def _take(self, body: bytes) -> None:
        assert self._receiver is not None, "a link takes frames when it has a receiver"
        self._unread_bytes += len(body)
        self.num_received += 1
        self._receiver.received(self, body)

    def _take_frames(self) -> None:
        header_bytes = wire.HEADER.size
        at = 0
        while len(self._buffer) - at >= header_bytes:
            length = wire.length_of(bytes(self._buffer[at : at + header_bytes]), self._limit_bytes())
            if len(self._buffer) - at < header_bytes + length:
                break
            body = bytes(self._buffer[at + header_bytes : at + header_bytes + length])
            at += header_bytes + length
            self._take(body)
        del self._buffer[:at]
        if self._unread_bytes > MAX_UNREAD_BYTES and not self.is_held_back and self._transport is not None:
            self.is_held_back = True
            self._transport.pause_reading()


class WorkerLink(FrameLink):
    """The end of a connection that a worker of this machine opens: a handshake comes first."""

    def __init__(self, secret: bytes, expects: Callable[[WorkerId], bool], receiver: WorkerReceiver) -> None:
        super().__init__()
        self._secret, self._expects, self._joins = secret, expects, receiver
        self._nonce = wire.new_nonce()
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._write(wire.frame(Challenge(VERSION, self._nonce)))
        self._deadline = asyncio.get_running_loop().call_later(GREETING_S, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _take(self, body: bytes) -> None:
        if self.worker is not None:
            super()._take(body)
            return
        hello = wire.fact_of(body)
        if not isinstance(hello, WorkerHello):
            raise ServiceError(f"a worker starts with WorkerHello, given: {type(hello).__name__}")
        welcome = wire.check_hello(hello, self._secret, self._nonce)
        if not self._expects(hello.worker):
            raise ServiceError(f"no worker `{hello.worker}` is expected")
        if self._deadline is not None:
            self._deadline.cancel()
        self.worker, self._receiver = hello.worker, self._joins
        self.send(welcome)
        self._joins.joined(self, hello)
