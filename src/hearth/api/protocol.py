"""A connection with limits on what comes before a body: bytes of headers, and time for them. Parses nothing.

uvicorn keeps headers until they are complete, however many they are and however slowly they come, and
`guard.py` sees only what is complete.
"""

from __future__ import annotations

import asyncio

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from hearth.api.errors import error_object

MAX_HEAD_BYTES = 64 << 10
HEAD_S = 30.0


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
        #: The next bytes belong to the request line or headers of a request.
        self._is_in_head = True
        self._num_head_bytes = 0
        #: The timer of a head, from its first byte to its end; of the first request from the connection on.
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            if self._timer is None:
                self._start_timer()
            self._num_head_bytes += len(data)  # if the head ends in there, this is forgotten
        super().data_received(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        self._timer = None
        if self._is_answering:  # a few bytes after a request do not end the stream that answers it
            self._start_timer()
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse(self) -> None:
        if not self._is_answering:  # else the client would take this for a part of the answer
            message = f"the headers are larger than the limit: {MAX_HEAD_BYTES} bytes; send fewer"
            body = error_object(431, message, "headers_too_large")
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
        self.transport.close()
