"""Which data connections a node admits, and what it tells its store about them. No process runs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hearth.core.types import NodeId
from hearth.node.data_admission import PEERS_SOCKET, DataAdmission
from hearth.node.tickets import TicketIssuer

ONE, TWO = NodeId("gpu-1"), NodeId("gpu-2.1")


def told(store: socket.socket) -> tuple[bytes, int]:
    """Return what the store is told next, and how many descriptors come along."""
    store.settimeout(60.0)
    with store.accept()[0] as agent:
        message, descriptors, _, _ = socket.recv_fds(agent, 256, 1)
    for descriptor in descriptors:
        socket.close(descriptor)
    return message, len(descriptors)


def test_a_node_that_was_lost_has_no_connections_and_gets_no_more(tmp_path: Path) -> None:
    data, issuer = DataAdmission(tmp_path), TicketIssuer()
    data.begin(issuer.key, is_encrypted=True)
    with socket.socket(socket.AF_UNIX) as store:
        store.bind(str(tmp_path / PEERS_SOCKET))
        store.listen()
        spare = issuer.issue(ONE)
        for source in (ONE, TWO):
            near, far = socket.socketpair()
            with near:
                data.take(far, issuer.issue(source))
                assert told(store) == (b"T" + source.encode(), 1)
        data.drop_peer(ONE)
        assert told(store) == (b"D" + ONE.encode(), 0)
        for ticket, source in ((spare, ONE), (issuer.issue(ONE), ONE), (issuer.issue(TWO), TWO)):
            near, far = socket.socketpair()
            with near:
                data.take(far, ticket)
                if source == TWO:
                    assert told(store) == (b"T" + TWO.encode(), 1)
                assert near.recv(1) == b"", "closed here, and by the store"


def test_a_node_admits_nothing_between_two_lives(tmp_path: Path) -> None:
    data, issuer = DataAdmission(tmp_path), TicketIssuer()
    with socket.socket(socket.AF_UNIX) as store:
        store.bind(str(tmp_path / PEERS_SOCKET))
        store.listen()
        store.setblocking(False)
        for is_ended in (False, True):
            if is_ended:
                data.begin(issuer.key, is_encrypted=True)
                data.end()
            near, far = socket.socketpair()
            with near:
                data.take(far, issuer.issue(ONE))
                assert near.recv(1) == b""
        with pytest.raises(BlockingIOError):  # it was told nothing
            store.accept()
