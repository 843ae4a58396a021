"""Whom the sender of chunks serves: connections of one node, with its ticket and its certificate."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from hearth.core.node_messages import TicketGranted
from hearth.core.types import NodeId
from hearth.store.transfer.data_connection import drop_peer
from hearth.store.transfer.peer_stream import PeerStream
from hearth.store.transfer.send_turns import SendLimit
from tests.store.stored import write_model
from tests.store.transfer.test_peers import a_cluster, a_store, weights

RECEIVER = NodeId("b")
TC_PRIO_BULK, LARGEST_NICENESS = 2, 19
SO_MAX_PACING_RATE = 47


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_dropped_node_loses_its_connections_and_others_keep_theirs(is_encrypted: bool) -> None:
    with (
        a_cluster(is_encrypted=is_encrypted) as cluster,
        a_store(cluster, "a") as sender,
        ExitStack() as opened,
    ):
        streams = []
        for name in ("b", "c"):
            receiver = cluster.add(name)
            granted = cluster.ticket(sender.node.name, receiver.name)
            assert isinstance(granted, TicketGranted)
            stream = PeerStream.open(sender.node.name, granted, receiver.folder, 30.0)
            streams.append(opened.enter_context(closing(stream)))
        dropped, kept = (stream._socket for stream in streams)
        for connection in (dropped, kept):
            assert asks(connection).startswith(b"\x00\x00\x00\x00\xff"), "a refusal, so it is being served"
        drop_peer(sender.node.peers_socket, RECEIVER)
        with pytest.raises(OSError):  # noqa: PT011 # closed or reset, with TLS in several ways
            asks_until_closed(dropped)
        assert asks(kept).startswith(b"\x00\x00\x00\x00\xff")


def asks_until_closed(connection: socket.socket) -> None:
    """The keeper is told to hang up and does not answer: a request sent at once may still be served."""
    while True:
        asks(connection)


def asks(connection: socket.socket) -> bytes:
    connection.settimeout(30.0)
    connection.sendall(b'{"file": ["unknown", "x"]}\n')
    answer = connection.recv(4096)
    if not answer:
        raise ConnectionResetError("closed")
    return answer


def test_a_ticket_of_another_node_is_of_no_use() -> None:
    with a_cluster(is_encrypted=True) as cluster, a_store(cluster, "a") as sender:
        thief = cluster.add("c")
        granted = cluster.ticket(sender.node.name, RECEIVER)
        assert isinstance(granted, TicketGranted)
        stream = PeerStream.open(sender.node.name, granted, thief.folder, 30.0)
        with pytest.raises((ConnectionError, ssl.SSLError)):
            asks(stream._socket)
        stream.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_sends_leave_cores_and_the_link_to_other_work(is_encrypted: bool) -> None:
    with a_cluster(is_encrypted=is_encrypted) as cluster, a_store(cluster, "a") as sender:
        receiver = cluster.add("b")
        granted = cluster.ticket(sender.node.name, receiver.name)
        assert isinstance(granted, TicketGranted)
        with closing(PeerStream.open(sender.node.name, granted, receiver.folder, 30.0)) as stream:
            assert asks(stream._socket), "a refusal, so it is being served"
            (session,) = sender.server._server.sessions
            assert session._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == TC_PRIO_BULK
            niceness = {}
            for thread in threading.enumerate():
                with suppress(ProcessLookupError):  # one of an earlier test, which has just ended
                    niceness[thread.name] = os.getpriority(os.PRIO_PROCESS, thread.native_id or 0)
            assert niceness.pop("hearth-peer") == LARGEST_NICENESS
            assert "hearth-read-far-0" in niceness, "started later, by a send, it would be as nice"
            assert set(niceness.values()) == {os.getpriority(os.PRIO_PROCESS, 0)}


@pytest.mark.parametrize("turn", [None, 1])
def test_a_limited_sender_paces_its_connections_and_counts_what_it_sends(
    tmp_path: Path, turn: int | None
) -> None:
    limit = SendLimit(32 << 20)
    with a_cluster(is_encrypted=False) as cluster, a_store(cluster, "a", limit=limit) as sender:
        write_model(tmp_path / "tiny")
        model = sender.tiers.open(tmp_path / "tiny")
        receiver = cluster.add("b")
        granted = cluster.ticket(sender.node.name, receiver.name)
        assert isinstance(granted, TicketGranted)
        with closing(PeerStream.open(sender.node.name, granted, receiver.folder, 30.0)) as stream:
            buffer = bytearray(model.manifest.chunks[0].num_bytes)
            stream.read_chunk(model.manifest.digest, 0, memoryview(buffer), lambda: True, turn=turn)
            (session,) = sender.server._server.sessions
            assert session._socket.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == limit.bytes_per_s
        assert buffer == weights(tmp_path / "tiny")[: len(buffer)]
        assert limit._free_at_s > 0.0
