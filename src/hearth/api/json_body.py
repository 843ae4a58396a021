"""JSON bodies that do not block the event loop.

A parser holds the GIL until it is done, and its result can be ten times as large as the body. The cost is in
the number of values, not in text. So the values of large bodies are counted first, piece by piece on a
thread, and limited; parsing and validation happen on that thread as well.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

#: Values in one body, token ids included: about 0.1 s of parsing and validation.
MAX_VALUES = 1 << 19
#: Lists and objects in one body; each costs as much as ten numbers.
MAX_CONTAINERS = 1 << 16
_JSON_TYPE = re.compile(r"(application/(\S+\+)?json)?", re.IGNORECASE)
#: Smaller bodies are parsed on the event loop, in a few milliseconds at most.
SMALL_BYTES = 64 << 10
#: Other threads get the GIL between two pieces.
PIECE_BYTES = 64 << 10

#: One thread for large bodies, which bounds the memory of their results.
_parser = ThreadPoolExecutor(1, "json-body")

T = TypeVar("T")


class TooManyValues(ValueError):
    pass


def parse_json(text: bytes) -> object:
    """Parse JSON in UTF-8. Raises TooManyValues, or ValueError for invalid JSON."""
    if not json.detect_encoding(text).startswith("utf-8"):  # `count_values` needs UTF-8
        raise json.JSONDecodeError("it must be in UTF-8", "", 0)
    if len(text) > SMALL_BYTES:
        count_values(text)
    try:
        parsed: object = json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("lists and objects are nested too deep", "", 0) from None
    except UnicodeDecodeError:
        raise json.JSONDecodeError("it must be in UTF-8", "", 0) from None
    return parsed


def count_values(text: bytes) -> None:
    num_values = num_containers = 0
    is_inside = False  # a string, at the start of a piece
    escape = b""  # a backslash at the end of the last piece
    for start in range(0, len(text), PIECE_BYTES):
        piece = (escape + text[start : start + PIECE_BYTES]).replace(b"\\\\", b"")
        escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.replace(b'\\"', b"").split(b'"')  # alternately outside and inside strings
        outside = b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
        num_containers += outside.count(b"[") + outside.count(b"{")
        num_values += outside.count(b",")
        if num_values > MAX_VALUES:
            raise TooManyValues(
                f"the body has more values (such as token ids) than the limit: {MAX_VALUES}; "
                "send text instead of token ids, or several requests"
            )
        if num_containers > MAX_CONTAINERS:
            raise TooManyValues(
                f"the body has more lists and objects than the limit: {MAX_CONTAINERS}; send fewer"
            )


class JsonRequest(Request):
    _checked: object = None

    async def check(self, check: Callable[[object], object]) -> None:
        """Parse and check the body, off the event loop if it is large. Raises HTTPException."""
        try:
            body = await self.body()
        except ClientDisconnect as error:
            raise HTTPException(400, "the body is incomplete") from error
        if len(body) > SMALL_BYTES:
            run = asyncio.get_running_loop().run_in_executor
            self._checked = await run(_parser, lambda: check(_parsed(body)))
        elif body:
            self._checked = check(_parsed(body))

    async def json(self) -> object:
        return self._checked


async def off_loop_if_large(request: Request, work: Callable[[], T], num_more_bytes: int = 0) -> T:
    """Run `work` off the event loop if the body and `num_more_bytes` of other data are large."""
    if len(await request.body()) + num_more_bytes <= SMALL_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_parser, work)


class JsonRoute(APIRoute):
    takes_curl = False  #: accept the content type of a form, which a bare `curl -d` sends

    def get_route_handler(self) -> Callable[[Request], Coroutine[None, None, Response]]:
        handle, field = super().get_route_handler(), self.body_field

        def check(parsed: object) -> object:
            assert field is not None, "only a body is checked"
            made: object
            made, faults = field.validate(parsed, {}, loc=("body",))
            if faults:
                raise RequestValidationError(faults, body=parsed)
            return made  # FastAPI accepts the instance without another check

        async def handle_json(request: Request) -> Response:
            if field is None:
                return await handle(request)
            if not (self.takes_curl and _is_of_no_page(request)):
                _refuse_other_types(request.headers.get("content-type", ""))
            _refuse_encodings(request.headers.get("content-encoding", ""))
            json_request = JsonRequest(_as_json(request.scope), request.receive)
            await json_request.check(check)
            return await handle(json_request)

        return handle_json


class CurlRoute(JsonRoute):
    """A route that reads JSON of any content type, as Ollama does: its examples are bare `curl -d`."""

    takes_curl = True


def _is_of_no_page(request: Request) -> bool:
    """True if the request was not sent by a web page; browsers always send one of these headers."""
    return "origin" not in request.headers and "sec-fetch-site" not in request.headers


def _parsed(body: bytes) -> object:
    try:
        return parse_json(body)
    except TooManyValues as error:
        raise HTTPException(400, str(error)) from error
    except ValueError as error:
        raise HTTPException(400, f"the body is not valid JSON: {_reason(error)}") from error


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        place = f" line {error.lineno} column {error.colno}"
        return f"{error.msg.removesuffix(' at')} at{place}" if error.doc else error.msg
    return str(error).partition(";")[0]  # a number with too many digits


def _refuse_other_types(content_type: str) -> None:
    kind = content_type.partition(";")[0].strip()
    if not _JSON_TYPE.fullmatch(kind):
        raise HTTPException(
            415, f"the body must be JSON; send `content-type: application/json`, given: {kind:.80}"
        )


def _refuse_encodings(encoding: str) -> None:
    """Raise HTTPException for compressed bodies, whose real size is unknown."""
    if encoding.strip().lower() not in ("", "identity"):
        raise HTTPException(
            415,
            f"compressed bodies are not supported, given: `content-encoding: {encoding:.80}`; send it plain",
        )


def _as_json(scope: Scope) -> Scope:
    """Return the scope with the content type of JSON, which FastAPI requires."""
    others = [header for header in scope["headers"] if header[0] != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}
