"""The end of a connection that a worker of this machine opens: a handshake, then frames."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from hearth.core import wire
from hearth.core.errors import ServiceError
from hearth.core.messages import VERSION, Challenge, WorkerHello
from hearth.core.types import WorkerId
from hearth.node.link import FrameLink, Receiver

GREETING_S = 10.0


class WorkerLink(FrameLink):
    """Mutable; used on the event loop alone."""

    def __init__(self, secret: bytes, expects: Callable[[WorkerId], bool], receiver: Receiver) -> None:
        super().__init__(None, receiver)
        self._secret, self._expects = secret, expects
        self._nonce = wire.new_nonce()
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        transport = cast(asyncio.Transport, transport)
        transport.write(wire.frame(Challenge(VERSION, self._nonce)))
        self._deadline = asyncio.get_running_loop().call_later(GREETING_S, transport.abort)

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
        self.worker = hello.worker
        self.send(welcome)
        self._receiver.joined(self, hello)
