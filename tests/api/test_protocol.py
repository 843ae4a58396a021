"""Connections of clients that never come to the point, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from hearth.api import protocol
from hearth.api.connections import ConnectionLimits, Connections
from hearth.api.guard import OPEN_PATHS
from hearth.api.protocol import MAX_HEAD_BYTES, LimitedConfig, LimitedProtocol
from tests.api.conftest import app_of, serving
from tests.api.fake import FakeGateway, FakeKeys, tokens_of

pytestmark = pytest.mark.slow

POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
KEY = b"authorization: Bearer user-key\r\n"
HEARTBEAT_S = 0.02
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


#: What does not come has so long; far longer than what comes takes, also where others use the machine.
HURRY_S = 1.0


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", HURRY_S)
    monkeypatch.setattr(protocol, "BODY_S", HURRY_S)


@contextmanager
def served(gateway: FakeGateway, limits: ConnectionLimits) -> Iterator[tuple[str, int]]:
    """Yield the address of a server with that many connections."""
    app = app_of(gateway, heartbeat_s=HEARTBEAT_S, allowed_origins=("https://chat.example",))
    config = LimitedConfig(app, Connections(limits), 1, gateway.exchange_ended)
    with serving(config) as address:
        yield address


def connect(address: tuple[str, int]) -> socket.socket:
    """Connect with a timeout that is shorter than the time that heads and bodies have."""
    return socket.create_connection(address, timeout=15)


def probe(address: tuple[str, int], path: str = "/health") -> None:
    """Ask for the health of the service, which has accepted all earlier connections when it answers."""
    with connect(address) as prober:
        prober.sendall(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path.encode())
        assert read_answer(prober).startswith(b"HTTP/1.1 200 ")


@pytest.fixture
def connection(gateway: FakeGateway) -> Iterator[socket.socket]:
    with served(gateway, ConnectionLimits(100, 100)) as address, connect(address) as connection:
        yield connection


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


def headers_of(answer: bytes) -> dict[str, str]:
    lines = answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
    return dict(line.split(": ", 1) for line in lines)


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
    assert headers_of(answer)["x-request-id"].startswith("req-")
    assert connection.recv(1) == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"NONSENSE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nno chunk\r\n",
    ],
)
def test_what_is_no_http_gets_the_error_object_and_an_id(connection: socket.socket, sent: bytes) -> None:
    connection.sendall(sent)

    answer = read_answer(connection)

    assert answer.startswith(b"HTTP/1.1 400 ")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "bad_request")
    assert headers_of(answer)["x-request-id"].startswith("req-")
    assert connection.recv(1) == b""


@pytest.mark.parametrize(("sent", "status"), [(b"NONSENSE\r\n\r\n", 400), (b"GET /" + b"a" * 70_000, 431)])
def test_what_never_reaches_the_application_is_noted_all_the_same(
    gateway: FakeGateway, connection: socket.socket, sent: bytes, status: int
) -> None:
    connection.sendall(sent)
    answer = read_answer(connection)

    (record,) = gateway.ended
    assert (record.status, record.route, record.peer) == (status, None, "127.0.0.1")
    assert record.request_id == headers_of(answer)["x-request-id"]


def test_strangers_write_nothing_into_the_log(
    connection: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    connection.sendall(b"NONSENSE\r\n\r\n")
    read_answer(connection)

    assert caplog.text == ""


def test_nonsense_after_a_request_does_not_speak_within_its_answer(
    connection: socket.socket, gateway: FakeGateway
) -> None:
    gateway.script = lambda stream: None
    body = json.dumps({"model": "tiny", "prompt": "a", "stream": True}).encode()
    connection.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
    received = read_some(connection)
    connection.sendall(b"NONSENSE\r\n\r\n")
    with suppress(ConnectionResetError):
        while some := connection.recv(65536):
            received += some

    assert received.count(b"HTTP/1.1 ") == 1


def test_a_stream_over_http_1_0_comes_without_chunks(connection: socket.socket) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a", "stream": True}).encode()
    old = POST.replace(b"HTTP/1.1", b"HTTP/1.0")
    connection.sendall(old + b"content-length: %d\r\n\r\n" % len(body) + body)
    received = b""
    while some := connection.recv(65536):
        received += some

    head, _, events = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


def test_an_answer_over_http_1_0_says_how_long_it_is(connection: socket.socket) -> None:
    connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
    answer = read_answer(connection)

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert headers_of(answer)["connection"] == "close"


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade"])
def test_an_offer_of_http_2_does_not_cost_the_body(connection: socket.socket, name: bytes) -> None:
    """As Java's client makes one with its first request."""
    body = json.dumps({"model": "tiny", "prompt": "a"}).encode()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\n%b: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n" % name
    for _ in range(2):
        connection.sendall(POST + offer + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_waits_for_permission_gets_it_only_if_its_body_is_wanted(
    connection: socket.socket, gateway: FakeGateway
) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a"}).encode()
    head = POST + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body)
    connection.sendall(head)
    assert read_some(connection) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(body)
    assert read_answer(connection).startswith(b"HTTP/1.1 200 ")

    gateway.keys = FakeKeys()
    connection.sendall(head)
    assert read_answer(connection).startswith(b"HTTP/1.1 401 ")


def test_the_head_of_an_answer_comes_without_its_body(connection: socket.socket) -> None:
    connection.sendall(GET.replace(b"GET", b"HEAD") + GET)
    received = b""
    while received.count(b"life-1") < 1:
        received += read_some(connection)

    head, get = received.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert head.endswith(b"\r\n\r\n")
    assert headers_of(head)["content-length"] == headers_of(get)["content-length"]


def test_idle_connections_are_kept_as_long_as_is_configured(gateway: FakeGateway) -> None:
    config = LimitedConfig(app_of(gateway), Connections(ConnectionLimits(1, 1)), idle_s=620)
    assert config.timeout_keep_alive == 620


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
    while received.count(b": waiting") < 2 * HURRY_S / HEARTBEAT_S:  # for longer than headers may take
        received += read_some(connection)
    loops[0].call_soon_threadsafe(gateway.streams[0].put, tokens_of("end"))
    while b"[DONE]" not in received:
        received += read_some(connection)


BODIES = {
    "/v1/completions": {"model": "tiny", "prompt": "a", "stream": True},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stream": True},
    "/v1/responses": {"model": "tiny", "input": "a"},
    "/v1/messages": {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
    "/api/generate": {"model": "tiny", "prompt": "a"},
}


def ask_for_much(connection: socket.socket, gateway: FakeGateway, path: str) -> None:
    """Ask for more than sockets hold; the answer has no end unless its stream is closed."""
    gateway.script = lambda stream: stream.put(tokens_of(*["x" * (4 << 20)] * 4, finish=None))
    body = json.dumps(BODIES[path] | {"stream": True}).encode()
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % path.encode()
    connection.sendall(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_that_nobody_reads_is_called_off(
    monkeypatch: pytest.MonkeyPatch, connection: socket.socket, gateway: FakeGateway, path: str
) -> None:
    monkeypatch.setattr(protocol, "READ_S", 0.1)
    ask_for_much(connection, gateway, path)

    while not gateway.ended:
        time.sleep(0.01)

    assert gateway.cancelled == ["r0"]
    assert [(record.status, record.is_whole) for record in gateway.ended] == [(200, False)]


def test_a_client_who_reads_slowly_gets_all(
    monkeypatch: pytest.MonkeyPatch, connection: socket.socket, gateway: FakeGateway
) -> None:
    monkeypatch.setattr(protocol, "READ_S", 2 * HURRY_S)
    ask_for_much(connection, gateway, "/v1/completions")
    num_bytes = 0
    while num_bytes < 16 << 20:  # which takes longer than that in all
        part = connection.recv(1 << 20)
        assert part, "the connection has ended"
        num_bytes += len(part)
        time.sleep(4 * HURRY_S * len(part) / (16 << 20))

    assert not gateway.cancelled


def test_a_client_who_reads_less_than_the_system_asks_for_at_a_time_is_not_cut_off(
    monkeypatch: pytest.MonkeyPatch, connection: socket.socket, gateway: FakeGateway
) -> None:
    monkeypatch.setattr(protocol, "READ_S", 2 * HURRY_S)
    ask_for_much(connection, gateway, "/v1/completions")
    until_s = time.monotonic() + 5 * HURRY_S
    while time.monotonic() < until_s:  # what is written to a socket waits until 1.4 MB of it are free
        assert connection.recv(32 << 10), "the connection has ended"
        time.sleep(0.1)

    assert not gateway.cancelled


def drip(connection: socket.socket) -> None:
    """Send a byte now and then until the other side has had enough."""
    with suppress(OSError):
        while True:
            connection.sendall(b" ")
            time.sleep(0.02)


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the connection ends, while a body drips on."""
    received = b""
    dripping = threading.Thread(target=drip, args=[connection])
    dripping.start()
    with suppress(ConnectionResetError):
        while some := connection.recv(65536):
            received += some
    connection.close()
    dripping.join()
    return received


def test_a_body_that_drips_in_is_refused(
    hurry: None, gateway: FakeGateway, connection: socket.socket
) -> None:
    page = b"x-request-id: mine\r\norigin: https://chat.example\r\n"
    connection.sendall(POST + page + b"content-length: 50000\r\n\r\n{")

    answer = rest_of(connection)

    assert answer.startswith(b"HTTP/1.1 408 ")
    headers = headers_of(answer)
    assert (headers["x-request-id"], headers["access-control-allow-origin"]) == (
        "mine",
        "https://chat.example",
    )
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["code"], "limit: 1 s" in error["message"]) == ("body_too_slow", True)
    while not gateway.ended:  # its task finds the connection closed
        time.sleep(0.01)
    assert [(record.status, record.is_whole) for record in gateway.ended] == [(408, True)]


def test_a_body_that_drips_in_is_refused_in_the_words_of_its_api(
    hurry: None, connection: socket.socket
) -> None:
    head = POST.replace(b"/v1/completions", b"/v1/messages")
    connection.sendall(head + b"content-length: 50000\r\n\r\n{")

    told = json.loads(rest_of(connection).partition(b"\r\n\r\n")[2])

    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")


def test_a_client_that_leaves_amid_its_body_is_noted_as_gone(
    gateway: FakeGateway, connection: socket.socket
) -> None:
    connection.sendall(POST + b"content-length: 50000\r\n\r\n{")
    connection.close()

    while not gateway.ended:
        time.sleep(0.01)
    assert [record.status_code for record in gateway.ended] == [499]


@pytest.mark.parametrize("head", [POST, b"GET /health HTTP/1.1\r\nhost: localhost\r\n"])
def test_an_answered_request_does_not_hold_its_connection_by_its_body(
    hurry: None, connection: socket.socket, gateway: FakeGateway, head: bytes
) -> None:
    gateway.keys = FakeKeys()
    connection.sendall(head + b"content-length: 50000\r\n\r\n{")

    answers = rest_of(connection)

    assert answers.startswith(b"HTTP/1.1 401 " if head == POST else b"HTTP/1.1 200 ")
    assert answers.count(b"HTTP/1.1 ") == 1


def test_a_body_has_longer_the_more_of_it_has_come(
    hurry: None, connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MIN_BODY_BYTES_PER_S", 10)
    body = json.dumps({"model": "tiny", "prompt": "a" * 1000}).encode()
    connection.sendall(POST + b"content-length: %d\r\n\r\n" % len(body) + body[:-1])
    time.sleep(1.5 * HURRY_S)  # longer than a body has that does not come
    connection.sendall(body[-1:])

    assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("sent", [b"", b"GET /", POST + b"content-length: 50000\r\n\r\n{"])
def test_health_answers_however_many_never_come_to_the_point(
    gateway: FakeGateway, sent: bytes, has_keys: bool
) -> None:
    if has_keys:
        gateway.keys = FakeKeys()
    with served(gateway, ConnectionLimits(16, 16)) as address, ExitStack() as stack:
        slow = []
        for _ in range(50):
            slow.append(stack.enter_context(connect(address)))
            slow[-1].sendall(sent)
            probe(address)

        for connection in slow[: 50 - 2 * 16]:  # to the end; those who came later may stay
            with suppress(ConnectionResetError):
                while connection.recv(65536):
                    pass


def test_strangers_do_not_push_out_a_caller_with_a_key(gateway: FakeGateway) -> None:
    gateway.keys = FakeKeys()
    body = json.dumps({"model": "tiny", "prompt": "a"}).encode()
    head = POST + KEY + b"content-length: %d\r\n\r\n" % len(body)
    with served(gateway, ConnectionLimits(16, 16)) as address, ExitStack() as stack:
        caller = stack.enter_context(connect(address))
        caller.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n" + KEY + b"\r\n")
        assert read_answer(caller).startswith(b"HTTP/1.1 200 ")
        caller.sendall(head + body[:1])
        for _ in range(40):
            stack.enter_context(connect(address)).sendall(b"GET /")
            probe(address)
        caller.sendall(body[1:])

        assert read_answer(caller).startswith(b"HTTP/1.1 200 ")


def test_beyond_what_can_be_answered_at_once_requests_are_refused_and_health_answers(
    gateway: FakeGateway,
) -> None:
    gateway.script = lambda stream: None  # never ends
    body = json.dumps({"model": "tiny", "prompt": "a", "stream": True}).encode()
    request = POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    with served(gateway, ConnectionLimits(16, 2)) as address, ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(connect(address))
            connection.sendall(request)
            read_some(connection)
        late = stack.enter_context(connect(address))
        late.sendall(request)
        refused = read_answer(late)
        for path in sorted(OPEN_PATHS):
            probe(address, path)

    assert refused.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 1" in refused


def test_a_connection_that_has_ended_leaves_no_garbage(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cycle the gateway would have dozens of objects for each connection until it is idle."""
    opened: list[weakref.ref[LimitedProtocol]] = []
    connection_made = LimitedProtocol.connection_made

    def noted(self: LimitedProtocol, transport: asyncio.Transport) -> None:
        opened.append(weakref.ref(self))
        connection_made(self, transport)

    monkeypatch.setattr(LimitedProtocol, "connection_made", noted)
    gc.disable()
    try:
        with served(gateway, ConnectionLimits(100, 100)) as address:
            probe(address)
            with connect(address) as asker:
                body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2}).encode()
                asker.sendall(POST + KEY + b"content-length: %d\r\n\r\n" % len(body) + body)
                assert read_answer(asker).startswith(b"HTTP/1.1 200 ")
        assert [one() for one in opened] == [None, None]
    finally:
        gc.enable()
