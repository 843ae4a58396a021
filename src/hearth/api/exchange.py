"""One HTTP request and its response: ids and headers. Wraps the guard, so that refusals have them, too."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hearth.api.cors import AllowedOrigins
from hearth.api.rate_limit_headers import rate_limit_headers
from hearth.control.observe.exchange_record import ExchangeRecord, set_current_exchange
from hearth.control.requests.correlation import Correlation
from hearth.core.types import RateStatus, RequestId

log = logging.getLogger(__name__)

#: More ids would make the header too long for many clients.
MAX_TOLD_IDS = 16
_EXCHANGE = "hearth.exchange"  #: in the scope of every request


@dataclass(slots=True)
class Exchange:
    """A request and its response. Mutable; written by the guard and by `Answer`."""

    record: ExchangeRecord = field(default_factory=ExchangeRecord)
    cors_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    #: of the gateway, for `hearth explain`
    request_ids: list[RequestId] = field(default_factory=list)
    #: returns the remaining limits of the caller's key; None: no limits, or no caller yet
    rate_status: Callable[[], RateStatus | None] = lambda: None
    #: the id of an exchange without such requests
    http_id: str = field(default_factory=lambda: f"req-{secrets.token_hex(12)}")

    @property
    def correlation(self) -> Correlation:
        return self.record.correlation

    @property
    def own_id(self) -> str:
        return ",".join(self.request_ids[:MAX_TOLD_IDS]) or self.http_id

    def headers(self) -> list[tuple[bytes, bytes]]:
        own_id, limits = self.own_id, rate_limit_headers(self.rate_status())
        return [
            (b"x-request-id", (self.correlation.client_id or own_id).encode()),
            (b"x-hearth-request-id", own_id.encode()),
            *((name.encode(), value.encode()) for name, value in limits.items()),
            *self.cors_headers,
        ]


class Exchanges:
    def __init__(
        self,
        app: ASGIApp,
        origins: AllowedOrigins,
        routes: Sequence[BaseRoute],
        on_end: Callable[[ExchangeRecord], None],
    ) -> None:
        """`on_end` is called for each exchange when nothing more will be sent."""
        self._app = app
        self._origins = origins
        self._routes = routes
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, method = Headers(scope=scope), scope["method"]
        peer = scope.get("client")
        record = ExchangeRecord(
            method,
            scope["path"],
            Correlation.read(headers.getlist("x-request-id"), headers.getlist("traceparent")),
            None if peer is None else peer[0],
        )
        exchange = Exchange(record, self._origins.headers(headers.get("origin")))
        scope[_EXCHANGE] = exchange
        set_current_exchange(record)
        is_gone = False

        def answer(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                if not is_gone:  # a slow body may have been refused meanwhile
                    record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *exchange.headers()]
                # %r: a path may contain line breaks and forge lines of the log.
                log.debug(
                    "answered id=%s method=%s path=%r status=%d%s",
                    exchange.own_id,
                    method,
                    scope["path"],
                    message["status"],
                    exchange.correlation.log_fields,
                )
            elif not is_gone:
                record.num_sent_bytes += len(message.get("body", b""))
                record.is_whole = not message.get("more_body", False)
            return send(message)

        async def hear() -> Message:
            nonlocal is_gone
            message = await receive()
            is_gone = is_gone or message["type"] == "http.disconnect"
            record.num_received_bytes += len(message.get("body", b""))
            return message

        try:
            if (response := self._origins.preflight(method, headers)) is not None:
                await response(scope, hear, answer)
                return
            scope["path"] = scope["path"].rstrip("/") or "/"
            if method == "HEAD":  # as GET; the server leaves out the body
                scope = {**scope, "method": "GET"}
            await self._app(scope, hear, answer)
        finally:
            self._end(exchange, scope)

    def _end(self, exchange: Exchange, scope: Scope) -> None:
        record = exchange.record
        record.request_id, record.ended_s = exchange.own_id, time.monotonic()
        if record.method == "HEAD":
            record.num_sent_bytes = 0
        record.route, parameters = self._route_of(scope)
        record.model = record.model or parameters.get("name")
        self._on_end(record)

    def _route_of(self, scope: Scope) -> tuple[str | None, Mapping[str, str]]:
        if (route := scope.get("route")) is not None:
            return route.path_format, scope["path_params"]
        for route in self._routes:
            match, found = route.matches(scope)
            if match is not Match.NONE:
                return getattr(route, "path_format", None), found.get("path_params", {})
        return None, {}


def exchange_of(scope: Mapping[str, object]) -> Exchange:
    """Return the exchange of a request; a new one if the request did not reach the middleware."""
    exchange = scope.get(_EXCHANGE) or Exchange()
    assert isinstance(exchange, Exchange), f"{type(exchange)=}"
    return exchange
