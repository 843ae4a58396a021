"""Authentication, authorisation and size limits. Plain ASGI, so that it costs streams nothing."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hearth.api.cors import AllowedOrigins
from hearth.api.errors import body_too_large, error_response, on_hearth_error, too_many_bodies
from hearth.api.exchange import exchange_of
from hearth.api.sessions import Sessions, is_own_page
from hearth.control.keys.keys import is_loopback
from hearth.control.requests.caller import ANYBODY, OPERATOR, Caller, Role
from hearth.core.errors import ConfigError, Forbidden, HearthError, Overloaded, ServiceError, Unauthorized
from hearth.system.crash import frames_of

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 32 << 10
#: Bodies in transfer may take this many times `max_body_bytes` in total.
MAX_INCOMING_BODIES = 16
#: Paths of probes, which need no key and are answered however many connections are open.
OPEN_PATHS = frozenset(["/", "/health", "/livez", "/readyz", "/version"])
DOCS_PATH = "/docs"  #: the same for all, so it needs no key, which a browser does not send
#: Paths that show the whole service, including the load of other callers.
NODES_PATH = "/hearth/nodes"  #: changes are for admins
HISTORY_PATH = "/hearth/history"
FORECASTS_PATH = "/hearth/forecasts"
EVENTS_PATH = "/hearth/events"  #: each caller gets what it may see
MONITOR_PATHS = frozenset(["/metrics", "/hearth/ps", "/api/ps", NODES_PATH, HISTORY_PATH])
WEB_PATH = "/web/"  #: the files of the dashboard, which hold nothing secret
KEYS_PATH = "/hearth/keys"  #: for admins alone
MODELS_PATH = "/hearth/models"  #: listed for all; changes are for admins
LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
CREATE_PATH = "/api/create"
#: Scope key of a function to call once the caller is authenticated; it returns False if there is no capacity.
LET_IN = "hearth.let_in"
COPY_PATH, DELETE_PATH = "/api/copy", "/api/delete"
_CALLER = "hearth.caller"  #: scope key, set once the caller is authenticated


class Guard:
    def __init__(
        self,
        app: ASGIApp,
        gateway: Gateway,
        sessions: Sessions,
        max_body_bytes: int,
        origins: AllowedOrigins,
    ) -> None:
        self._app = app
        self._gateway, self._sessions = gateway, sessions
        self._origins = origins
        self._max_body_bytes = max_body_bytes
        self._incoming = _IncomingBodies(max_body_bytes)
        self._keys_fault: str | None = None  #: the logged reason why the keys cannot be read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        let_in = scope.pop(LET_IN, _always)  # pop: it refers to the connection, and so to the scope
        is_started = False

        def noted(message: Message) -> Awaitable[None]:
            nonlocal is_started
            is_started = True
            return send(message)

        headers = Headers(scope=scope)
        try:
            if refusal := self._refusal(scope, headers):
                response = await on_hearth_error(Request(scope), refusal)
            elif _header_bytes(scope) > MAX_HEADER_BYTES:
                response = error_response(
                    431, f"the headers exceed the limit: {MAX_HEADER_BYTES} bytes; send fewer"
                )
            elif _announced_bytes(headers) > self._max_body_bytes:
                too_large = body_too_large(self._max_body_bytes)
                response = error_response(413, str(too_large.detail), headers=too_large.headers)
            elif not _is_open(scope) and not let_in():
                response = await on_hearth_error(Request(scope), _NO_ROOM)
            else:
                body = _Body(receive, self._incoming)
                try:
                    await self._app(scope, body.receive, noted)
                finally:
                    body.release()
                return
        except Exception as error:  # the one broad handler of the API
            exchange = exchange_of(scope)
            # %r: a path may contain line breaks and forge lines of the log.
            log.error(
                "request_failed id=%s method=%r path=%r error=%s%s\n%s",
                exchange.own_id,
                scope["method"],
                scope["path"],
                type(error).__name__,
                exchange.correlation.log_fields,
                frames_of(error),
            )
            if is_started:
                return  # the server closes the connection, so the client sees a truncated response
            message = f"internal error; see `{exchange.own_id}` in the log of the service"
            response = error_response(500, message, "internal")
        await response(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> HearthError | None:
        """Return why a request is refused, or None. Stores the caller in the scope."""
        if _is_open(scope):
            return None
        keys = _given_keys(headers)
        key = keys[0] if keys else ""
        is_operator = hmac.compare_digest(key.encode(), self._gateway.admin_token.encode())
        try:
            are_required, self._keys_fault = self._gateway.keys.are_required, None
            if not are_required:
                _note_caller(scope, ANYBODY)
                return (
                    None if is_operator else _foreign_host(headers) or _foreign_page(headers, self._origins)
                )
            if is_operator:
                caller: Caller | None = OPERATOR
            else:
                caller = self._gateway.keys.check(key) if key else self._sessions.caller(headers)
        except ConfigError as error:  # the file was changed and is broken
            if self._keys_fault != str(error):  # log once, not per request
                self._keys_fault = str(error)
                log.error("keys_unreadable reason=%s", error)
            if not is_operator:
                return ServiceError("the API keys of the service cannot be read; see its log")
            caller = OPERATOR
        if len(keys) > 1:
            return Unauthorized("`Authorization` and `x-api-key` have different keys; send one of them")
        if caller is None:
            return Unauthorized(
                f"the API key is {'wrong' if key else 'missing'}; send `Authorization: Bearer KEY` or "
                "`x-api-key: KEY` with a key of `hearth keys add`"
            )
        if not key and scope["method"] not in ("GET", "HEAD") and not is_own_page(headers):
            return Forbidden(
                "a session may change things only from the dashboard's own page, by the header `Origin`; "
                "send `Authorization: Bearer KEY` instead"
            )
        _note_caller(scope, caller)
        exchange_of(scope).rate_status = partial(self._gateway.admissions.status, caller)
        needed = _needed_role(scope)
        if not caller.has_role(needed):
            return Forbidden(
                f"key `{caller.name}` has the role `{caller.role}`, but this needs `{needed}`; "
                f"create a key with `hearth keys add NAME --{needed}`"
            )
        return None


@dataclass(slots=True)
class _IncomingBodies:
    """The bytes of all bodies in transfer. Mutable; shared by all requests, written by `_Body`."""

    max_body_bytes: int  #: per body
    num_bytes: int = 0


class _Body:
    def __init__(self, receive: Receive, incoming: _IncomingBodies) -> None:
        self._receive = receive
        self._incoming = incoming
        self._num_bytes = 0

    async def receive(self) -> Message:
        message = await self._receive()
        num_bytes = len(message.get("body", b""))
        self._num_bytes += num_bytes
        self._incoming.num_bytes += num_bytes
        if self._num_bytes > self._incoming.max_body_bytes:
            raise body_too_large(self._incoming.max_body_bytes)
        if self._incoming.num_bytes > MAX_INCOMING_BODIES * self._incoming.max_body_bytes:
            raise too_many_bodies(MAX_INCOMING_BODIES * self._incoming.max_body_bytes)
        if not message.get("more_body", False):
            self.release()
        return message

    def release(self) -> None:
        self._incoming.num_bytes -= self._num_bytes
        self._num_bytes = 0


_NO_ROOM = Overloaded(
    "too many active connections; try again, or raise the open file limit (`ulimit -n`)", 1.0
)


def _is_open(scope: Scope) -> bool:
    path = str(scope["path"])
    return path in OPEN_PATHS or path == DOCS_PATH or path.startswith(WEB_PATH)


def _given_keys(headers: Headers) -> list[str]:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    bearer = given.strip() if scheme.lower() == "bearer" else ""
    other = headers.get("x-api-key", "").strip()
    if bearer and other and hmac.compare_digest(bearer.encode(), other.encode()):
        return [bearer]
    return [key for key in (bearer, other) if key]


def _always() -> bool:
    return True


def caller_of(request: Request) -> Caller:
    caller = request.scope[_CALLER]
    assert isinstance(caller, Caller), f"{type(caller)=}"
    return caller


def _note_caller(scope: Scope, caller: Caller) -> None:
    scope[_CALLER] = caller
    exchange_of(scope).record.caller = caller.name


def _needed_role(scope: Scope) -> Role:
    if scope["path"].startswith((MODELS_PATH, NODES_PATH)) and scope["method"] not in ("GET", "HEAD"):
        return "admin"
    if scope["path"] in (LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH, CREATE_PATH, COPY_PATH, DELETE_PATH):
        return "admin"
    if scope["path"].startswith(KEYS_PATH):
        return "admin"
    if scope["path"] in MONITOR_PATHS or scope["path"].startswith(FORECASTS_PATH):
        return "monitor"
    return "user"


def _header_bytes(scope: Scope) -> int:
    address = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    return address + sum(len(name) + len(value) for name, value in scope["headers"])


def _announced_bytes(headers: Headers) -> int:
    announced = headers.get("content-length", "0")
    return int(announced) if announced.isdecimal() else 0


def _foreign_host(headers: Headers) -> Forbidden | None:
    """Without keys, refuse hosts other than localhost: DNS rebinding can point other names here."""
    host = headers.get("host")
    if host is None or _is_own(host):
        return None
    return Forbidden(
        f"without API keys, requests must be sent to localhost or 127.0.0.1, given: {host:.80}; "
        "use that, or create keys with `hearth keys add NAME`"
    )


def _is_own(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and is_loopback(name)


def _foreign_page(headers: Headers, origins: AllowedOrigins) -> Forbidden | None:
    """Without keys, refuse pages of other sites (CSRF), except origins that are listed by name."""
    origin = headers.get("origin")
    if origin is None or origins.names(origin):
        return None
    if is_own_page(headers) and _is_own(headers["host"]):
        return None
    return Forbidden(
        f"without API keys, requests from pages of other sites are refused, given: {origin:.80}; create keys "
        "with `hearth keys add NAME`, or list that origin, not `*`, in `service.allowed_origins`"
    )
