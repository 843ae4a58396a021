"""The dashboard: its page at `/`, the files of the page, its sessions and what it shows live.

The files are in `web/`, static ES modules. The page loads nothing from elsewhere: its policy forbids that.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from hearth.api.answer import SSE_TYPE, STREAM_HEADERS, unless_gone
from hearth.api.answers import PLAIN_TEXT
from hearth.api.guard import EVENTS_PATH, HISTORY_PATH, WEB_PATH, caller_of
from hearth.api.json_response import as_json
from hearth.api.sessions import Sessions
from hearth.control.requests.caller import ANYBODY, Caller

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway

#: The text at `/` for all but browsers, by which clients detect Ollama.
GREETING = "Ollama is running: this is Hearth, which speaks its API"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_SAFE = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Always ask, for the files of another version have the same names.
    "cache-control": "no-cache",
}


def dashboard_routes(gateway: Gateway, sessions: Sessions) -> APIRouter:
    routes = APIRouter(tags=["Dashboard"])

    @routes.get("/", summary="The dashboard", response_class=Response, responses=PLAIN_TEXT)
    async def page(request: Request) -> Response:
        """For browsers; others get a line of text, by which clients of Ollama know that it is running."""
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(GREETING, headers={"vary": "accept"})
        return _file_response("index.html", request)

    @routes.get(f"{WEB_PATH}{{name:path}}", include_in_schema=False)
    async def web_file(name: str, request: Request) -> Response:
        return _file_response(name, request)

    @routes.get("/hearth/session", summary="Whose key or session this is")
    async def session(request: Request) -> Response:
        return as_json(_described(caller_of(request)))

    @routes.post("/hearth/session", summary="Begin a session")
    async def begin_session(request: Request) -> Response:
        """Send a key as a header. Returns a cookie for browsers, which stands for it for 12 hours."""
        caller = caller_of(request)
        headers = {} if caller is ANYBODY else {"set-cookie": sessions.begin(caller, request.headers)}
        return as_json(_described(caller), headers=headers)

    @routes.delete("/hearth/session", summary="End a session")
    async def end_session(request: Request) -> Response:
        return as_json({"ended": True}, headers={"set-cookie": sessions.end(request.headers)})

    @routes.get(HISTORY_PATH, summary="The last hour: samples of ten seconds, and sums by model")
    async def history() -> Response:
        return as_json(gateway.live.history.view())

    @routes.get(
        EVENTS_PATH,
        summary="What happens in the service, as server-sent events",
        response_class=Response,
        responses={200: {"description": "Events.", "content": {"text/event-stream": {}}}},
    )
    async def live_events(request: Request) -> Response:
        """`hello`, `state`, `requests`, `decisions` and `sample`. Keys below the role `monitor` get the
        requests of their group alone.
        """
        return _LiveResponse(gateway.live.subscribe(caller_of(request)))

    return routes


class _LiveResponse(Response):
    def __init__(self, messages: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._messages = messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        async with aclosing(self._messages) as messages:
            first = await anext(messages)  # or there are too many
            headers = {"content-type": SSE_TYPE} | STREAM_HEADERS
            raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for message in messages:
                await send({"type": "http.response.body", "body": message, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _described(caller: Caller) -> dict[str, object]:
    return {"name": caller.name, "role": caller.role, "has_keys": caller is not ANYBODY}


@dataclass(frozen=True, slots=True)
class _WebFile:
    content: bytes
    headers: dict[str, str]


@cache
def _web_files() -> dict[str, _WebFile]:
    """Return all files of the page by their path, so that no other path means anything."""
    return {path: _web_file(path, one) for path, one in _walk("", files("hearth.api").joinpath("web"))}


def _walk(path: str, folder: Traversable) -> list[tuple[str, Traversable]]:
    found = []
    for one in folder.iterdir():
        if one.is_dir():
            found += _walk(f"{path}{one.name}/", one)
        elif one.name.rpartition(".")[2] in _TYPES:
            found.append((f"{path}{one.name}", one))
    return found


def _web_file(path: str, one: Traversable) -> _WebFile:
    content = one.read_bytes()
    tag = hashlib.blake2b(content, digest_size=12).hexdigest()
    return _WebFile(content, {"content-type": _TYPES[path.rpartition(".")[2]], "etag": f'"{tag}"'} | _SAFE)


def _file_response(path: str, request: Request) -> Response:
    found = _web_files().get(path)
    if found is None:
        raise HTTPException(404)
    headers = found.headers | ({"vary": "accept"} if path == "index.html" else {})
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers)
