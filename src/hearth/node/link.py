"""A connection of frames between two processes, bounded in both directions. Decodes no message.

The gateway has a link to each worker: to one of its machine directly (`worker_link.py`), to another by way of
the worker's node (`relay.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, cast

from hearth.core import wire
from hearth.core.beacon import Beacon
from hearth.core.errors import ServiceError
from hearth.core.messages import Order, WorkerEnded, WorkerHello
from hearth.core.types import WorkerId

#: The most unconsumed bytes of a peer; beyond it, TCP holds the peer back.
MAX_UNREAD_BYTES = 256 << 10
#: The most unsent bytes to a worker. It always reads, so more means that it hangs.
MAX_UNSENT_BYTES = 256 << 20

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Takes what links bring. Called on the event loop."""

    def joined(self, link: FrameLink, hello: WorkerHello) -> None: ...

    def received(self, link: FrameLink, body: bytes) -> None:
        """Take a frame. Call `link.consumed(len(body))` when it was handled."""

    def left(self, link: FrameLink) -> None:
        """Note the end of a link that joined; called once, after its last frame."""


class FrameLink(asyncio.Protocol):
    """A connection about one worker. Mutable; used on the event loop alone."""

    def __init__(self, worker: WorkerId | None, receiver: Receiver) -> None:
        self.worker = worker  #: None until it has proven that it knows the secret
        self._receiver = receiver
        self._buffer = bytearray()
        self._unread_bytes = 0
        self.num_received = 0  #: frames so far
        self.is_held_back = False  #: nothing is read until more was consumed
        self.is_slow = False  #: the peer takes less than is sent
        self.on_drained: Callable[[], None] = lambda: None  #: called when it is not slow any more
        self.beacon: Beacon | None = None  #: of the worker's process, once it has joined
        self.why_killed: str | None = None  #: what the worker did, for people; None: it was not killed
        self.ended: WorkerEnded | None = None  #: what its node has said of its end; None: nothing
        self._transport: asyncio.Transport | None = None

    def send(self, message: Order | WorkerEnded) -> None:
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

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """End the connection when all was sent."""
        if self._transport is not None:
            self._transport.close()

    def ending(self) -> WorkerEnded:
        """Return how the worker ended, whose connection is over."""
        if self.ended is not None:
            return self.ended
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
            log.warning("peer_refused worker=%s reason=%s", self.worker, error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.worker is not None:
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
            log.error("worker_dropped worker=%s reason=`takes no orders`", self.worker)
            transport.abort()

    def _take(self, body: bytes) -> None:
        self._unread_bytes += len(body)
        self.num_received += 1
        self._receiver.received(self, body)

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
            self._take(body)
        del self._buffer[:at]
        if self._unread_bytes > MAX_UNREAD_BYTES and not self.is_held_back and self._transport is not None:
            self.is_held_back = True
            self._transport.pause_reading()
