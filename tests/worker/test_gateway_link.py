"""The handshake from the worker's side, over a pair of sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from hearth.core import wire
from hearth.core.config import StoreConfig
from hearth.core.errors import DeviceError, ServiceError
from hearth.core.messages import VERSION, Challenge, Ping, Pong, Welcome, WorkerHello
from hearth.core.types import WorkerId
from hearth.memory.arena import ArenaPool
from hearth.store.format.manifest import CHUNK_BYTES
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.lease_server import LeaseServer
from hearth.worker import runtime
from hearth.worker.__main__ import _start
from hearth.worker.gateway_link import GatewayLink, Introduction, connect, greet
from tests.node.test_supervisor import setup_of
from tests.worker.harness import SECRET, Gateway, folder

ME = Introduction(WorkerId("w7"), 12, "cpu", "a processor", budget_bytes=1000, shares_workspace=False)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def greeted(
    ends: tuple[socket.socket, socket.socket], gateway: Callable[[socket.socket], object]
) -> tuple[GatewayLink, object]:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(gateway, ends[1])
        link = GatewayLink(ends[0])
        greet(link, ME, SECRET)
        return link, other.result()


def test_both_sides_know_each_other_and_then_talk(ends: tuple[socket.socket, socket.socket]) -> None:
    link, gateway = greeted(ends, Gateway)
    assert isinstance(gateway, Gateway)

    gateway.send(Ping(3))
    assert link.receive() == Ping(3)
    pong = Pong(3, 0, 0, 0, 0, 0, {}, ())
    link.send(pong)
    assert gateway.hear() == pong
    assert gateway.hello is not None
    assert gateway.hello.budget_bytes == 1000
    gateway.close()
    assert link.receive() is None


def test_a_gateway_that_does_not_know_the_secret_is_refused(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    def impostor(connection: socket.socket) -> None:
        connection.sendall(wire.frame(Challenge(VERSION, wire.new_nonce())))
        length = wire.length_of(connection.recv(wire.HEADER.size, socket.MSG_WAITALL))
        assert isinstance(wire.fact_of(connection.recv(length, socket.MSG_WAITALL)), WorkerHello)
        connection.sendall(wire.frame(Welcome(b"guessed")))

    with pytest.raises(ServiceError, match="does not know the secret"):
        greeted(ends, impostor)


def test_a_worker_that_does_not_know_the_secret_is_told_so(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    def strict(connection: socket.socket) -> None:
        with connection, pytest.raises(ServiceError, match="`w7` does not know the secret"):
            Gateway(connection, secret=b"another")

    with pytest.raises(ServiceError, match="refused the worker `w7`"):
        greeted(ends, strict)


def test_another_version_is_refused_with_both_numbers(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].sendall(wire.frame(Challenge(VERSION + 1, b"nonce")))

    with pytest.raises(ServiceError, match=f"version {VERSION + 1}, this side {VERSION}"):
        greet(GatewayLink(ends[0]), ME, SECRET)


def test_a_peer_that_is_no_gateway_is_not_read_to_its_end(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].sendall(b"HTTP/1.1 400 Bad Request\r\n")

    with pytest.raises(ServiceError, match="no Hearth process"):
        greet(GatewayLink(ends[0]), ME, SECRET)


def test_a_port_where_nobody_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    with pytest.raises(ServiceError, match=f"127.0.0.1:{port}"):
        connect("127.0.0.1", port)


def test_a_worker_connects_only_when_it_has_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have to wait for that, and the gateway hangs up on whoever says nothing."""

    def no_pool(*_: object) -> ArenaPool:
        raise DeviceError("another process has the memory")

    monkeypatch.setattr(runtime, "ArenaPool", no_pool)
    store = StoreConfig(path=str(tmp_path), host_bytes=CHUNK_BYTES)
    with (
        folder() as place,
        closing(Tiers(store, is_pinned=False)) as tiers,
        closing(LeaseServer(tiers, place / "s")),
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        listener.setblocking(False)
        setup = msgspec.structs.replace(
            setup_of(0, WorkerId("w0")),
            keeper_socket=str(place / "s"),
            stages_path=str(place),
            port=listener.getsockname()[1],
            engine={},
            num_threads=None,
        )
        with pytest.raises(DeviceError, match="another process has the memory"):
            _start(setup)
        with pytest.raises(BlockingIOError):
            listener.accept()
