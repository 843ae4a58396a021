"""uvicorn's protocol with limits: size of headers, time for headers, bodies and reading, open connections.

uvicorn has none of these: it buffers any headers, waits for slow clients forever and accepts any number of
connections; `guard.py` only sees complete headers. This also fixes HTTP/1.0 and upgrade offers, and formats
errors as the API does.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import re
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from hearth.api.connections import Connections
from hearth.api.error_spelling import Fault, spell
from hearth.api.exchange import Exchange, exchange_of
from hearth.api.guard import LET_IN
from hearth.control.observe.exchange_record import ExchangeRecord

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
HEAD_S = 30.0
#: Time for connections to close at shutdown.
HANG_UP_S = 2
#: Time for a body, extended by what has arrived, so that slow clients can send large bodies.
BODY_S = 30.0
MIN_BODY_BYTES_PER_S = 16 << 10
#: A client that reads nothing for this long is disconnected.
READ_S = 120.0
#: Java's client offers HTTP/2 by this header, and the parser then takes the body for another protocol.
_UPGRADE = re.compile(rb"(?<=\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
_NO_UPGRADE = b"x-offer"  #: of the same length


class LimitedConfig(Config):
    def __init__(
        self,
        app: ASGIApp,
        connections: Connections,
        idle_s: int,
        on_refused: Callable[[ExchangeRecord], None] = lambda record: None,
    ) -> None:
        """`on_refused` is called for each response to a request that never reached the application."""
        super().__init__(
            app,
            http=LimitedProtocol,
            ws="none",  # websockets would have no limits
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,  # else every invalid request writes two lines
            access_log=False,
            server_header=False,
            backlog=connections.limits.max_strangers,
            timeout_keep_alive=idle_s,
            timeout_graceful_shutdown=HANG_UP_S,
        )
        self.open_connections, self.on_refused = connections, on_refused


class LimitedProtocol(HttpToolsProtocol):
    """Mutable; one per connection, used by its event loop."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, LimitedConfig), f"{type(config)=}"
        self._open_connections, self._on_refused = config.open_connections, config.on_refused
        #: the next bytes belong to the request line or headers
        self._is_in_head = True
        self._num_head_bytes = 0
        #: deadline of the body; unused in a head
        self._body_deadline_s = 0.0
        #: of a head, from its first byte on (or from the connection on), or of a body
        self._timer: asyncio.TimerHandle | None = None
        #: of a client that is slow to read, and the unread bytes when the timer started
        self._reading_timer: asyncio.TimerHandle | None = None
        self._num_unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        super().connection_made(transport)
        self._open_connections.add(self)
        self._start_timer(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_reading_timer()
        self._open_connections.remove(self)
        super().connection_lost(exc)

    def abort(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            if self._timer is None:
                self._start_timer(HEAD_S)
            self._num_head_bytes += len(data)  # reset if the head ends in `data`
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(_NO_UPGRADE, head) + end + rest
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._num_head_bytes > MAX_HEAD_BYTES:
            message = f"the headers exceed the limit: {MAX_HEAD_BYTES} bytes; send fewer"
            self._refuse(431, message, "headers_too_large")
        elif not self._is_in_head and self._timer is None:
            self._start_timer(BODY_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_reading_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_reading_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[LET_IN] = self._let_in  # type: ignore[literal-required] # for the guard

    def on_headers_complete(self) -> None:
        super().on_headers_complete()  # first: it raises for invalid addresses
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _unchunked(self.cycle)  # type: ignore[method-assign, assignment] # before anything is sent
        self._is_in_head = False
        self._num_head_bytes = 0
        self._stop_timer()
        self._body_deadline_s = self.loop.time() + BODY_S

    def on_body(self, body: bytes) -> None:
        if not self.cycle.response_complete:  # a discarded body gets no more time
            self._body_deadline_s += len(body) / MIN_BODY_BYTES_PER_S
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head = True
        self._stop_timer()
        if self._is_answering:
            self._open_connections.answer(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self._open_connections.wait(self)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "not a valid HTTP request; send HTTP/1.1, without TLS", "bad_request")

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _let_in(self) -> bool:
        if not self._open_connections.let_in(self):
            return False
        if self._is_in_head:  # the whole request arrived before the guard saw it
            self._open_connections.answer(self)
        return True

    def _start_timer(self, after_s: float) -> None:
        self._timer = self.loop.call_later(after_s, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_reading_timer(self) -> None:
        self._num_unread_bytes = self._count_unread()
        self._reading_timer = self.loop.call_later(READ_S, self._time_out_reading)

    def _stop_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def _time_out_reading(self) -> None:
        if self._count_unread() < self._num_unread_bytes:  # slow, but it reads
            self._start_reading_timer()
        else:
            log.debug("reader_gone unread_bytes=%d", self._num_unread_bytes)
            self.abort()

    def _count_unread(self) -> int:
        """Return the unsent bytes here and in the kernel, whose buffer holds megabytes."""
        num_bytes = self.transport.get_write_buffer_size()
        with suppress(OSError):  # closing, or not supported
            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            num_bytes += int.from_bytes(queued, sys.byteorder)
        return num_bytes

    def _time_out(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if not self._is_in_head:
            self._time_out_body()
        elif self._is_answering:  # a few extra bytes do not end a running stream
            self._start_timer(HEAD_S)
        else:
            self.transport.close()

    def _time_out_body(self) -> None:
        left_s = self._body_deadline_s - self.loop.time()
        if self.pipeline or self.flow.read_paused:  # we are not waiting for the client
            self._body_deadline_s += BODY_S
            self._start_timer(BODY_S)
        elif left_s > 0:
            self._start_timer(left_s)
        else:
            message = (
                f"the body arrived too slowly, limit: {BODY_S:g} s and 1 s for every {MIN_BODY_BYTES_PER_S} "
                "bytes; send less, or over a faster connection"
            )
            self._refuse(408, message, "body_too_slow")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Respond and close; only close if the client would take this for part of another response."""
        is_expected = not self._is_answering if self._is_in_head else not self.cycle.response_started
        if is_expected:
            exchange = Exchange() if self._is_in_head else exchange_of(self.cycle.scope)
            log.debug("refused id=%s status=%d%s", exchange.own_id, status, exchange.correlation.log_fields)
            path = "" if self._is_in_head else self.cycle.scope["path"]
            body = spell(Fault(status, message, code), path)
            record = exchange.record
            record.status, record.num_sent_bytes, record.is_whole = status, len(body), True
            if self._is_in_head:  # else the application ends the exchange
                record.request_id, record.ended_s = exchange.own_id, time.monotonic()
                record.peer = None if self.client is None else self.client[0]
                self._on_refused(record)
            headers = b"".join(b"%b: %b\r\n" % header for header in exchange.headers())
            self.transport.write(
                b"HTTP/1.1 %d %b\r\nconnection: close\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n%b\r\n%b"
                % (status, HTTPStatus(status).phrase.encode(), len(body), headers, body)
            )
        self.transport.close()


def _unchunked(cycle: RequestResponseCycle) -> Send:
    """End a response of unknown length by closing the connection: HTTP/1.0 has no chunks."""
    send: Send = cycle.send  # type: ignore[assignment] # the same by starlette's name
    has_length = True

    async def send_plain(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plain
