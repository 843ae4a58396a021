"""A web server on loopback that serves files, and for the next requests misbehaves as told. Knows no S3."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HALF = 0.5


class BadServer(ThreadingHTTPServer):
    """Answers one request per connection, so that closing it need not wait for clients that keep theirs."""

    daemon_threads = False  # so that closing waits for every answer under way

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.files = files  #: by path, with the leading slash
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.plan: deque[Behaviour] = deque()  #: one for each coming request; when it is empty, all is well
        self.asked: list[str] = []  #: the Range header of every request, "" where it had none
        self.is_closing = threading.Event()


class Exchange(BaseHTTPRequestHandler):
    """One request, its answer, and the pieces of which behaviours are made."""

    server: BadServer

    def do_GET(self) -> None:
        self.server.asked.append(self.headers.get("Range", ""))
        behave = self.server.plan.popleft() if self.server.plan else well
        try:
            behave(self)
        except ConnectionError:
            self.close_connection = True  # the client had heard enough, as it may

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: what was asked is in `asked`."""

    @property
    def whole(self) -> bytes:
        return self.server.files[self.path]

    @property
    def span(self) -> slice:
        """The bytes that were asked for."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return (
            slice(int(found[1]), min(int(found[2]) + 1, len(self.whole)))
            if found
            else slice(0, len(self.whole))
        )

    def begin(self, status: int, num_bytes: int, span: slice | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(num_bytes))
        if span:
            self.send_header("Content-Range", f"bytes {span.start}-{span.stop - 1}/{len(self.whole)}")
        self.end_headers()

    def answer(self, body: bytes, num_sent: int | None = None) -> None:
        """The right head for the body, of which only the first `num_sent` bytes follow."""
        is_part = "Range" in self.headers
        self.begin(206 if is_part else 200, len(body), self.span if is_part else None)
        self.wfile.write(body[:num_sent])


Behaviour = Callable[[Exchange], None]


def well(exchange: Exchange) -> None:
    if exchange.path not in exchange.server.files:
        exchange.begin(404, 0)
    elif exchange.span.start >= len(exchange.whole):
        exchange.begin(416, 0)
    else:
        exchange.answer(exchange.whole[exchange.span])


def says(status: int) -> Behaviour:
    return lambda exchange: exchange.begin(status, 0)


def hangs_up(exchange: Exchange) -> None:
    exchange.close_connection = True


def is_silent(exchange: Exchange) -> None:
    exchange.server.is_closing.wait()


def stalls_in_the_body(exchange: Exchange) -> None:
    body = exchange.whole[exchange.span]
    exchange.answer(body, num_sent=int(len(body) * HALF))
    exchange.server.is_closing.wait()


def trickles(exchange: Exchange) -> None:
    """Never silent for long, and never done."""
    body = exchange.whole[exchange.span]
    exchange.answer(body, num_sent=0)
    for byte in body:
        if exchange.server.is_closing.wait(timeout=0.05):
            return
        exchange.wfile.write(bytes([byte]))


def cuts_the_body(exchange: Exchange) -> None:
    body = exchange.whole[exchange.span]
    exchange.answer(body, num_sent=int(len(body) * HALF))


def promises_too_little(exchange: Exchange) -> None:
    """A head and a body that agree with each other, but are shorter than the range that the head confirms."""
    body = exchange.whole[exchange.span]
    exchange.answer(body[: int(len(body) * HALF)])


def ignores_ranges(exchange: Exchange) -> None:
    exchange.begin(200, len(exchange.whole))
    exchange.wfile.write(exchange.whole)


def serves_another_range(exchange: Exchange) -> None:
    span = exchange.span
    moved = slice(span.start + 1, span.stop + 1)
    exchange.begin(206, span.stop - span.start, moved)
    exchange.wfile.write(exchange.whole[moved])


def flips_a_bit(exchange: Exchange) -> None:
    """All is well but for the first byte of the body."""
    body = exchange.whole[exchange.span]
    exchange.answer(bytes([body[0] ^ 1]) + body[1:])


@contextmanager
def serve(files: Mapping[str, bytes]) -> Iterator[BadServer]:
    with BadServer(files) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.is_closing.set()
            server.shutdown()
            thread.join()
