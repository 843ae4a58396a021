"""The gateway's end of a worker's connection: a handshake, then frames. Decodes no fact."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, cast

from hearth.core import wire
from hearth.core.beacon import Beacon
from hearth.core.errors import ServiceError
from hearth.core.messages import VERSION, Challenge, Order, WorkerHello
from hearth.core.types import WorkerId

#: The most unconsumed bytes of a worker; beyond it, TCP holds the worker back.
MAX_UNREAD_BYTES = 256 << 10
#: The most unsent bytes to a worker. It always reads, so more means that it hangs.
MAX_UNSENT_BYTES = 256 << 20
GREETING_S = 10.0

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Takes what links bring. Called on the event loop."""

    def joined(self, link: WorkerLink, hello: WorkerHello) -> None: ...

    def received(self, link: WorkerLink, body: bytes) -> None:
        """Take a frame. Call `link.consumed(len(body))` when it was handled."""

    def left(self, link: WorkerLink) -> None:
        """Note the end of a link that joined; called once, after its last frame."""


class WorkerLink(asyncio.Protocol):
    """The connection of one worker. Mutable; used on the event loop alone."""

    def __init__(self, secret: bytes, expects: Callable[[WorkerId], bool], receiver: Receiver) -> None:
        self.worker: WorkerId | None = None  #: None until it has proven that it knows the secret
        self._secret, self._expects, self._receiver = secret, expects, receiver
        self._nonce = wire.new_nonce()
        self._buffer = bytearray()
        self._unread_bytes = 0
        self.num_received = 0  #: frames so far
        self.is_held_back = False  #: nothing is read until more was consumed
        self.beacon: Beacon | None = None  #: of the worker's process, once it has joined
        self.why_killed: str | None = None  #: what the worker did, for people; None: it was not killed
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def send(self, order: Order) -> None:
        """Queue an order. Orders to a worker that is gone are dropped; `Receiver.left` tells."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(wire.frame(order))
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.error("worker_dropped worker=%s reason=`takes no orders`", self.worker)
            transport.abort()

    def consumed(self, num_bytes: int) -> None:
        self._unread_bytes -= num_bytes
        if self.is_held_back and self._unread_bytes < MAX_UNREAD_BYTES // 2 and self._transport is not None:
            self.is_held_back = False
            self._transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport does not declare its type.
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.write(wire.frame(Challenge(VERSION, self._nonce)))
        self._deadline = asyncio.get_running_loop().call_later(GREETING_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            self._take_frames()
        except ServiceError as error:
            log.warning("peer_refused worker=%s reason=%s", self.worker, error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._deadline is not None:
            self._deadline.cancel()
        if self.worker is not None:
            self._receiver.left(self)

    def _take_frames(self) -> None:
        header_bytes = wire.HEADER.size
        at = 0
        while len(self._buffer) - at >= header_bytes:
            limit = wire.MAX_FRAME_BYTES if self.worker is not None else wire.MAX_GREETING_BYTES
            length = wire.length_of(bytes(self._buffer[at : at + header_bytes]), limit)
            if len(self._buffer) - at < header_bytes + length:
                break
            body = bytes(self._buffer[at + header_bytes : at + header_bytes + length])
            at += header_bytes + length
            if self.worker is None:
                self._greet(body)
            else:
                self._unread_bytes += length
                self.num_received += 1
                self._receiver.received(self, body)
        del self._buffer[:at]
        if self._unread_bytes > MAX_UNREAD_BYTES and not self.is_held_back and self._transport is not None:
            self.is_held_back = True
            self._transport.pause_reading()

    def _greet(self, body: bytes) -> None:
        hello = wire.fact_of(body)
        if not isinstance(hello, WorkerHello):
            raise ServiceError(f"a worker starts with WorkerHello, given: {type(hello).__name__}")
        welcome = wire.check_hello(hello, self._secret, self._nonce)
        if not self._expects(hello.worker):
            raise ServiceError(f"no worker `{hello.worker}` is expected")
        if self._deadline is not None:
            self._deadline.cancel()
        self.worker = hello.worker
        self.send(welcome)
        self._receiver.joined(self, hello)
