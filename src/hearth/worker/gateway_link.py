"""The worker's end of its connection to the gateway: a handshake, then orders in and facts out.

Sending blocks while the gateway does not read.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Literal

from hearth.core import wire
from hearth.core.errors import ServiceError
from hearth.core.messages import VERSION, Challenge, Fact, Order, Welcome, WorkerHello
from hearth.core.types import WorkerId

GREETING_S = 30.0


@dataclass(frozen=True, slots=True)
class Introduction:
    worker: WorkerId
    pid: int
    kind: Literal["cpu", "cuda"]
    device: str
    budget_bytes: int
    shares_workspace: bool
    gpu: int | None = None


class GatewayLink:
    """A connection to the gateway. One thread receives, one sends, both only after `greet`."""

    def __init__(self, connection: socket.socket) -> None:
        """`connection` has a timeout of `GREETING_S` until the handshake is done."""
        self._connection = connection
        self._incoming = connection.makefile("rb", buffering=1 << 16)

    def may_wait(self) -> None:
        self._connection.settimeout(None)

    def send(self, fact: Fact) -> None:
        """Send a fact. Raises OSError when the gateway is gone."""
        self._connection.sendall(wire.frame(fact))

    def receive(self) -> Order | None:
        """Return the next order; None at the end. Raises ServiceError for anything else."""
        body = self.receive_body()
        return None if body is None else wire.order_of(body)

    def receive_body(self, limit_bytes: int = wire.MAX_FRAME_BYTES) -> bytes | None:
        header = self._incoming.read(wire.HEADER.size)
        if len(header) < wire.HEADER.size:
            return None
        length = wire.length_of(header, limit_bytes)
        body = self._incoming.read(length)
        return body if len(body) == length else None


def connect(host: str, port: int) -> GatewayLink:
    try:
        connection = socket.create_connection((host, port), timeout=GREETING_S)
    except OSError as error:
        raise ServiceError(f"no gateway answers at {host}:{port}: {error}") from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return GatewayLink(connection)


def greet(link: GatewayLink, introduction: Introduction, secret: bytes) -> None:
    """Prove to the gateway that this worker knows the secret, and verify that the gateway does.

    Raises ServiceError if versions or secrets differ, or the gateway refuses the worker.
    """
    nonce = wire.new_nonce()
    try:
        challenge = _challenge(link)
        link.send(
            WorkerHello(
                version=VERSION,
                worker=introduction.worker,
                nonce=nonce,
                proof=wire.proof(secret, challenge.nonce, introduction.worker),
                pid=introduction.pid,
                kind=introduction.kind,
                device=introduction.device,
                budget_bytes=introduction.budget_bytes,
                shares_workspace=introduction.shares_workspace,
                gpu=introduction.gpu,
            )
        )
        welcome = link.receive()
    except OSError as error:
        raise ServiceError(f"the gateway does not answer: {error}") from error
    if not isinstance(welcome, Welcome):
        raise ServiceError(f"the gateway refused the worker `{introduction.worker}`; its log says why")
    wire.check_welcome(welcome, secret, nonce, introduction.worker)
    link.may_wait()


def _challenge(link: GatewayLink) -> Challenge:
    body = link.receive_body(wire.MAX_GREETING_BYTES)
    if body is None:
        raise ServiceError("the gateway closed the connection without a greeting")
    challenge = wire.challenge_of(body)
    wire.check_challenge(challenge)
    return challenge
