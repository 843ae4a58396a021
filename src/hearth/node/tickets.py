"""Tickets: each admits one data connection between nodes. The head issues them, the target checks them.

    | number, 8 bytes, little-endian | source, 64 bytes, padded | HMAC-SHA256 of both and the target |

The key belongs to one life of the target. A ticket has no time, because clocks of nodes are never compared:
the target accepts each number once, within a window that follows the highest.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

from hearth.core.types import NodeId

_CLAIM, _MAC_BYTES = struct.Struct("<Q64s"), 32
TICKET_BYTES = _CLAIM.size + _MAC_BYTES
KEY_BYTES = 32
#: How far behind the highest number a ticket may be: more than are in use at a time.
WINDOW = 4096


class TicketIssuer:
    """Issues tickets for connections to one life of a node, at the head. Mutable."""

    def __init__(self, target: NodeId) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._target = target
        self._num_issued = 0

    def issue(self, source: NodeId) -> bytes:
        self._num_issued += 1
        claim = _CLAIM.pack(self._num_issued, source.encode())
        return claim + _mac(self.key, claim, self._target)


class TicketCheck:
    """Accepts the tickets for one life of a node, at that node. Mutable."""

    def __init__(self, target: NodeId, key: bytes) -> None:
        self._target, self._key = target, key
        self._highest = 0
        self._used = 0  #: bit i: number `_highest - i`

    def admit(self, ticket: bytes) -> NodeId | None:
        """Return the node that the ticket was issued to, once; None: it is forged, used or too old."""
        claim, mac = ticket[: _CLAIM.size], ticket[_CLAIM.size :]
        if not hmac.compare_digest(mac, _mac(self._key, claim, self._target)) or len(claim) < _CLAIM.size:
            return None
        number, source = _CLAIM.unpack(claim)
        return NodeId(source.rstrip(b"\0").decode()) if self._use(number) else None

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


def _mac(key: bytes, claim: bytes, target: NodeId) -> bytes:
    return hmac.digest(key, claim + target.encode(), hashlib.sha256)
