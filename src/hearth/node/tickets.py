"""Tickets: each admits one data connection between nodes. The head issues them, the target checks them.

    | number, 8 bytes, little-endian | source, 64 bytes, padded | worker, 88 bytes, padded | HMAC-SHA256 |

A ticket with a worker admits to that worker, one without to the store of the target. The key belongs to one
life of the target. A ticket has no time, because clocks of nodes are never compared: the target accepts each
number once, within a window that follows the highest.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

from hearth.core.types import NodeId, WorkerId

_CLAIM, _WORKER, _MAC_BYTES = struct.Struct("<Q64s"), struct.Struct("88s"), 32
STORE_TICKET_BYTES = _CLAIM.size + _MAC_BYTES
WORKER_TICKET_BYTES = _CLAIM.size + _WORKER.size + _MAC_BYTES
KEY_BYTES = 32
#: How far behind the highest number a ticket may be: more than are in use at a time.
WINDOW = 4096


@dataclass(frozen=True, slots=True)
class TicketClaim:
    """The connection that a ticket admits."""

    source: NodeId  #: that the ticket was issued to
    worker: WorkerId | None = None  #: None: to the store


class TicketIssuer:
    """Issues tickets for connections to one life of a node, at the head. Mutable."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._num_issued = 0

    def issue(self, source: NodeId, worker: WorkerId | None = None) -> bytes:
        """`worker`: that the connection is for; None: the store."""
        self._num_issued += 1
        claim = _CLAIM.pack(self._num_issued, source.encode())
        if worker is not None:
            claim += _WORKER.pack(worker.encode())
        return claim + _mac(self.key, claim)


class TicketCheck:
    """Accepts the tickets for one life of a node, at that node. Mutable."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._highest = 0
        self._used = 0  #: bit i: number `_highest - i`
        self._lost: set[NodeId] = set()  #: nodes whose tickets are void

    def admit(self, ticket: bytes) -> TicketClaim | None:
        """Return what a ticket admits, once; None: it is forged, used, too old, or that of a lost node."""
        if len(ticket) not in (STORE_TICKET_BYTES, WORKER_TICKET_BYTES):
            return None
        claim, mac = ticket[:-_MAC_BYTES], ticket[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._key, claim)):
            return None
        number, padded = _CLAIM.unpack_from(claim)
        source, worker = NodeId(_text(padded)), WorkerId(_text(claim[_CLAIM.size :]))
        is_good = self._use(number) and source not in self._lost
        return TicketClaim(source, worker or None) if is_good else None

    def refuse(self, source: NodeId) -> None:
        """Admit no more of a node, which was lost or removed."""
        self._lost.add(source)

    def _use(self, number: int) -> bool:
        if number > self._highest:
            ahead = min(number - self._highest, WINDOW)
            self._used = self._used << ahead & (1 << WINDOW) - 1
            self._highest = number
        bit = 1 << self._highest - number
        if self._highest - number >= WINDOW or self._used & bit:
            return False
        self._used |= bit
        return True


def _mac(key: bytes, claim: bytes) -> bytes:
    return hmac.digest(key, claim, hashlib.sha256)


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode()
