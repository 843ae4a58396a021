"""Admits data connections of other nodes by their tickets, and hands them to the keeper or to a worker."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from socket import socket

from hearth.core.types import NodeId, stage_socket
from hearth.node.tickets import TicketCheck
from hearth.store.transfer.data_connection import drop_peer, hand_over

#: Where the keeper takes them, in the directory of this machine's sockets.
PEERS_SOCKET = "peers.sock"

log = logging.getLogger(__name__)


class DataAdmission:
    """Mutable; used on the event loop alone."""

    def __init__(self, sockets: Path) -> None:
        """`sockets`: the `socket_directory` of this machine."""
        self._sockets = sockets
        self._tickets: TicketCheck | None = None  #: of the present life; None: nothing is admitted
        self._is_encrypted = True

    def begin(self, ticket_key: bytes, *, is_encrypted: bool) -> None:
        """Begin a life of this node: admit by the tickets of that key."""
        self._tickets, self._is_encrypted = TicketCheck(ticket_key), is_encrypted

    def end(self) -> None:
        self._tickets = None

    def take(self, connection: socket, ticket: bytes) -> None:
        """Hand a connection over, if its ticket admits it. Closes the caller's copy."""
        with connection:
            claim = None if self._tickets is None else self._tickets.admit(ticket)
            if claim is None:
                log.warning("data_refused reason=`the ticket is forged, used or of an earlier life`")
                return
            path, is_encrypted = self._sockets / PEERS_SOCKET, self._is_encrypted
            if claim.worker is not None:  # prompts can be guessed from what workers send
                path, is_encrypted = stage_socket(self._sockets, claim.worker), True
            try:
                hand_over(path, connection, claim.source, is_encrypted=is_encrypted)
            except OSError as error:  # it is being replaced, and the peer asks again
                log.warning("data_refused source=%s path=%s reason=%s", claim.source, path, error)

    def drop_peer(self, node: NodeId) -> None:
        """End the connections of a node that was lost or removed, and admit no more."""
        if self._tickets is not None:
            self._tickets.refuse(node)
        for path in (self._sockets / PEERS_SOCKET, *self._sockets.glob("w*.sock")):
            with suppress(OSError):  # that process has ended, and so have its connections
                drop_peer(path, node)
