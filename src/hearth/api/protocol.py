"""A connection with limits: bytes of headers, time for headers, bodies and reading, room among others.

Parses nothing. uvicorn keeps headers until they are complete, however many they are. It waits for headers and
bodies however slowly they come, also for the rest of a body that was refused, waits for clients that do not
read their answers, and opens any number of connections.
`guard.py` sees only headers that are complete. Where clients rely on it, this mends what uvicorn makes of
HTTP/1.0 and of offers to upgrade, and refuses as the API does.
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
#: Time for connections to close when everything has been answered.
HANG_UP_S = 2
#: A body has so long to come, and longer the more of it has come: slow lines may send large bodies.
BODY_S = 30.0
MIN_BODY_BYTES_PER_S = 16 << 10
#: A client that has taken nothing for so long of what waits for it loses the connection.
READ_S = 120.0
#: Java's client offers HTTP/2 by this header. A parser that sees it takes the body for another protocol's.
_UPGRADE = re.compile(rb"(?<=\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
_NO_UPGRADE = b"x-offer"  #: as long


class LimitedConfig(Config):
    """The configuration of a uvicorn server that serves `LimitedProtocol` and nothing else."""

    def __init__(
        self,
        app: ASGIApp,
        connections: Connections,
        idle_s: int,
        on_refused: Callable[[ExchangeRecord], None] = lambda record: None,
    ) -> None:
        """`on_refused` is told of each answer to what never reached the application."""
        super().__init__(
            app,
            http=LimitedProtocol,
            ws="none",  # nothing here speaks it, and such connections would know no limits
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,  # else strangers have it write two lines for each request that is none
            access_log=False,
            server_header=False,
            # As many as have room, if they all are accepted before the first can be closed.
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
        #: The next bytes belong to the request line or headers of a request.
        self._is_in_head = True
        self._num_head_bytes = 0
        #: When the body that is coming is late; means nothing in a head.
        self._body_deadline_s = 0.0
        #: The timer of a head, from its first byte to its end, of the first one from the connection on; or
        #: that of a body that did not come with its head.
        self._timer: asyncio.TimerHandle | None = None
        #: The timer of a client that is behind with reading, and what waited for it when the timer began.
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
        """Close the connection without waiting for its client."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            if self._timer is None:
                self._start_timer(HEAD_S)
            self._num_head_bytes += len(data)  # if the head ends in there, this is forgotten
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(_NO_UPGRADE, head) + end + rest
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._num_head_bytes > MAX_HEAD_BYTES:
            message = f"the headers are larger than the limit: {MAX_HEAD_BYTES} bytes; send fewer"
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
        super().on_headers_complete()  # first: it raises for an address that is none
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _unchunked(self.cycle)  # type: ignore[method-assign, assignment] # before anything is sent
        self._is_in_head = False
        self._num_head_bytes = 0
        self._stop_timer()
        self._body_deadline_s = self.loop.time() + BODY_S

    def on_body(self, body: bytes) -> None:
        if not self.cycle.response_complete:  # what is thrown away gets no more time
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
        """Refuse what the parser does not understand."""
        self._refuse(400, "this is no valid HTTP request; send HTTP/1.1, without TLS", "bad_request")

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _let_in(self) -> bool:
        """Note that a caller was let in; False: there is no room for another one."""
        if not self._open_connections.let_in(self):
            return False
        if self._is_in_head:  # the whole request had come before the guard looked at it
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
        """Return what waits for the client here and in the system, which takes more by the megabyte only."""
        num_bytes = self.transport.get_write_buffer_size()
        with suppress(OSError):  # a socket that is closing, or a system that does not tell
            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            num_bytes += int.from_bytes(queued, sys.byteorder)
        return num_bytes

    def _time_out(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if not self._is_in_head:
            self._time_out_body()
        elif self._is_answering:  # a few bytes after a request do not end the stream that answers it
            self._start_timer(HEAD_S)
        else:
            self.transport.close()

    def _time_out_body(self) -> None:
        left_s = self._body_deadline_s - self.loop.time()
        if self.pipeline or self.flow.read_paused:  # it is not the client who lets us wait
            self._body_deadline_s += BODY_S
            self._start_timer(BODY_S)
        elif left_s > 0:
            self._start_timer(left_s)
        else:
            message = (
                f"the body came too slowly; the limit: {BODY_S:g} s, and 1 s more for every "
                f"{MIN_BODY_BYTES_PER_S} bytes; send less, or over a faster line"
            )
            self._refuse(408, message, "body_too_slow")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer and close, or only close where the client would take this for a part of another answer."""
        is_expected = not self._is_answering if self._is_in_head else not self.cycle.response_started
        if is_expected:
            exchange = Exchange() if self._is_in_head else exchange_of(self.cycle.scope)
            log.debug("refused id=%s status=%d%s", exchange.own_id, status, exchange.correlation.log_fields)
            path = "" if self._is_in_head else self.cycle.scope["path"]
            body = spell(Fault(status, message, code), path)
            record = exchange.record
            record.status, record.num_sent_bytes, record.is_whole = status, len(body), True
            if self._is_in_head:  # else the application ends the exchange when it finds the client gone
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
    """Have an answer of unknown length end with its connection: HTTP/1.0 knows no chunks."""
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
