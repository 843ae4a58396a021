"""One HTTP request and its response: the ids of both, and the headers that every response has.

Around the guard, so that whatever refuses a request, the response has an id and a page's browser may show it.
Looks into no body and lets nobody in.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hearth.api.cors import AllowedOrigins
from hearth.api.rate_limit_headers import rate_limit_headers
from hearth.control.correlation import Correlation
from hearth.types import RateStatus, RequestId

log = logging.getLogger(__name__)

#: More ids in a header would be too long for many clients.
MAX_TOLD_IDS = 16
_EXCHANGE = "hearth.exchange"  #: in the scope of every request


@dataclass(slots=True)
class Exchange:
    """A request and its response. Mutable; written by the guard and by whoever generates."""

    correlation: Correlation = field(default_factory=Correlation)
    cors_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    #: The requests of the gateway that came of it, each of which can be explained.
    request_ids: list[RequestId] = field(default_factory=list)
    #: Returns what is left of the limits of the caller's key; None: there are none, or no caller yet.
    rate_status: Callable[[], RateStatus | None] = lambda: None
    #: Of one that none came of.
    http_id: str = field(default_factory=lambda: f"req-{secrets.token_hex(12)}")

    @property
    def own_id(self) -> str:
        """The service's own id, whatever the client calls the request."""
        return ",".join(self.request_ids[:MAX_TOLD_IDS]) or self.http_id

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return what every response has: the client's id if it has sent one, ours, and what limits leave."""
        own_id, limits = self.own_id, rate_limit_headers(self.rate_status())
        return [
            (b"x-request-id", (self.correlation.client_id or own_id).encode()),
            (b"x-hearth-request-id", own_id.encode()),
            *((name.encode(), value.encode()) for name, value in limits.items()),
            *self.cors_headers,
        ]


class Exchanges:
    """ASGI middleware around the whole API, the guard included."""

    def __init__(self, app: ASGIApp, origins: AllowedOrigins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, method = Headers(scope=scope), scope["method"]
        exchange = Exchange(
            Correlation.read(headers.getlist("x-request-id"), headers.getlist("traceparent")),
            self._origins.headers(headers.get("origin")),
        )
        scope[_EXCHANGE] = exchange

        def answer(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *exchange.headers()]
                # As Python spells it: a path may hold line breaks, and what looks like lines of this log.
                log.debug(
                    "answered id=%s method=%s path=%r status=%d%s",
                    *(exchange.own_id, method, scope["path"], message["status"]),
                    exchange.correlation.log_fields,
                )
            return send(message)

        if (response := self._origins.preflight(method, headers)) is not None:
            await response(scope, receive, answer)
            return
        scope["path"] = scope["path"].rstrip("/") or "/"
        if method == "HEAD":  # as GET; the server leaves out the body
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, answer)


def exchange_of(scope: Mapping[str, object]) -> Exchange:
    """Return the exchange that a request belongs to; a new one if it has not come as far as that."""
    exchange = scope.get(_EXCHANGE) or Exchange()
    assert isinstance(exchange, Exchange), f"{type(exchange)=}"
    return exchange
