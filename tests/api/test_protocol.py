"""Connections of clients that never come to the point, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn

from hearth.api import protocol
from hearth.api.protocol import MAX_HEAD_BYTES, LimitedProtocol
from tests.api.conftest import app_of
from tests.api.fake import FakeGateway, tokens_of

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.1)


@pytest.fixture
def connection(gateway: FakeGateway) -> Iterator[socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app_of(gateway, heartbeat_s=0.02),
        http=LimitedProtocol,
        lifespan="off",
        log_config=None,
        timeout_keep_alive=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        with socket.create_connection(listener.getsockname(), timeout=30) as connection:
            yield connection
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def read_some(connection: socket.socket) -> bytes:
    received = connection.recv(65536)
    assert received, "the connection has ended"
    return received


def read_answer(connection: socket.socket) -> bytes:
    """Headers and body of one answer that says how long it is."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += read_some(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")
    )
    while len(body) < length:
        body += read_some(connection)
    return head + b"\r\n\r\n" + body


@pytest.mark.parametrize("beginning", [b"GET / HTTP/1.1\r\nx: ", b"GET /", b"GET / HTTP/1.1\r\n"])
def test_headers_without_end_are_refused(connection: socket.socket, beginning: bytes) -> None:
    rest = MAX_HEAD_BYTES - len(beginning)
    filling = (
        b"a" * rest if not beginning.endswith(b"\n") else (b"x: " + b"a" * 95 + b"\r\n") * (rest // 100 + 1)
    )
    connection.sendall(beginning + filling[:rest])
    connection.sendall(b"a")

    answer = read_answer(connection)

    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    assert connection.recv(1) == b""


def test_every_request_of_a_connection_has_the_limit_for_itself(connection: socket.socket) -> None:
    padded = GET[:-2] + b"x: " + b"a" * (MAX_HEAD_BYTES // 3) + b"\r\n\r\n"
    for _ in range(6):
        connection.sendall(padded[:100])
        connection.sendall(padded[100:])
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_a_body_does_not_count(connection: socket.socket) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a" * (MAX_HEAD_BYTES + 1000)}).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body)
    )
    connection.sendall(body)

    assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"\r\n", GET + b"GET"])
def test_headers_that_do_not_come_end_the_connection(
    hurry: None, connection: socket.socket, sent: bytes
) -> None:
    connection.sendall(sent)
    if sent.startswith(GET):
        read_answer(connection)

    assert connection.recv(1) == b""


def test_a_stream_outlives_stray_bytes_after_its_request(
    hurry: None, connection: socket.socket, gateway: FakeGateway
) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    gateway.script = lambda stream: loops.append(asyncio.get_running_loop())
    body = json.dumps({"model": "tiny", "prompt": "a", "stream": True}).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b\r\n" % (len(body), body)
    )
    received = b""
    while received.count(b": waiting") < 10:  # for longer than headers may take
        received += read_some(connection)
    loops[0].call_soon_threadsafe(gateway.streams[0].put, tokens_of("end"))
    while b"[DONE]" not in received:
        received += read_some(connection)
