"""Frames between gateway, workers and nodes, and the proof of a worker's secret. No sockets.

    | length, 4 bytes, little-endian | one message in msgpack |

The secret is never sent: each side proves that it knows it by a keyed hash of the other's nonce.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import TypeVar

import msgspec

from hearth.core.errors import ServiceError
from hearth.core.messages import VERSION, Challenge, Fact, Order, Welcome, WorkerHello
from hearth.core.node_messages import NodeMessage
from hearth.core.types import WorkerId

T = TypeVar("T")

HEADER = struct.Struct("<I")
#: The longest frame. A longer one is a fault of the peer, or another protocol.
MAX_FRAME_BYTES = 64 << 20
#: The longest frame that is read before the secret is proven.
MAX_GREETING_BYTES = 4096

_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_facts: msgspec.msgpack.Decoder[Fact] = msgspec.msgpack.Decoder(Fact)
_node_messages: msgspec.msgpack.Decoder[NodeMessage] = msgspec.msgpack.Decoder(NodeMessage)
_challenges = msgspec.msgpack.Decoder(Challenge)


def frame(message: Challenge | Order | Fact | NodeMessage) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def length_of(header: bytes, limit_bytes: int = MAX_FRAME_BYTES) -> int:
    (length,) = HEADER.unpack(header)
    if length > limit_bytes:
        raise ServiceError(
            f"the peer announced a frame of {length} bytes, limit: {limit_bytes}; it is no Hearth process"
        )
    assert isinstance(length, int)
    return length


def order_of(body: bytes) -> Order:
    return _decoded(_orders, body)


def fact_of(body: bytes) -> Fact:
    return _decoded(_facts, body)


def node_message_of(body: bytes) -> NodeMessage:
    return _decoded(_node_messages, body)


def challenge_of(body: bytes) -> Challenge:
    return _decoded(_challenges, body)


def new_nonce() -> bytes:
    return secrets.token_bytes(32)


def proof(secret: bytes, nonce: bytes, worker: WorkerId) -> bytes:
    return hmac.digest(secret, nonce + worker.encode(), hashlib.sha256)


def check_hello(hello: WorkerHello, secret: bytes, nonce: bytes) -> Welcome:
    _check_version(hello.version)
    if not hmac.compare_digest(hello.proof, proof(secret, nonce, hello.worker)):
        raise ServiceError(f"`{hello.worker}` does not know the secret of this gateway")
    return Welcome(_answer(secret, hello.nonce, hello.worker))


def check_challenge(challenge: Challenge) -> None:
    _check_version(challenge.version)


def check_welcome(welcome: Welcome, secret: bytes, nonce: bytes, worker: WorkerId) -> None:
    if not hmac.compare_digest(welcome.proof, _answer(secret, nonce, worker)):
        raise ServiceError("the gateway does not know the secret of this worker")


def _answer(secret: bytes, nonce: bytes, worker: WorkerId) -> bytes:
    """Return the gateway's proof. It differs from a worker's, so neither can be replayed as the other."""
    return proof(secret, b"gateway" + nonce, worker)


def _check_version(version: int) -> None:
    if version != VERSION:
        raise ServiceError(
            f"the peer speaks version {version}, this side {VERSION}; install the same Hearth on both"
        )


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServiceError(f"a frame of {len(body)} bytes holds no message: {error}") from error
