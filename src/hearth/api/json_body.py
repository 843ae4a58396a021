"""Bodies of JSON that cost the event loop little: in large ones values are counted before they are parsed.

A parser holds the interpreter until it is done, on whichever thread it runs, and what it makes can be ten
times as large as the body. Text costs next to nothing; values do, so their number has a limit, which is
checked on a thread and piece by piece. Fields are checked on that thread, too, where others get the
interpreter between those that take Python to check. Knows no fields.
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

#: The most values in one body, token ids included: about 0.1 s of parsing and checking.
MAX_VALUES = 1 << 19
#: The most lists and objects among them, each of which costs as much as ten numbers.
MAX_CONTAINERS = 1 << 16
_JSON_TYPE = re.compile(r"(application/(\S+\+)?json)?", re.IGNORECASE)
#: A body up to this size is parsed where it is, in a few milliseconds at most.
SMALL_BYTES = 64 << 10
#: Counted at a time; between two pieces other threads get the interpreter.
PIECE_BYTES = 64 << 10

#: Parses, checks and translates large bodies, one after the other: what is made of them at once stays
#: bounded, too.
_parser = ThreadPoolExecutor(1, "json-body")

T = TypeVar("T")


class TooManyValues(ValueError):
    """A JSON text holds more values than a request may have."""


def parse_json(text: bytes) -> object:
    """Parse a JSON text in UTF-8.

    Raises:
        TooManyValues: more values, or more lists and objects, than a request may have.
        ValueError: anything else than JSON.
    """
    if not json.detect_encoding(text).startswith("utf-8"):  # `count_values` would not find its way in others
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
    """Raise TooManyValues for a JSON text with too many of them, without parsing it."""
    num_values = num_containers = 0
    is_inside = False  # of a string, at the beginning of a piece
    escape = b""  # a backslash at the end of the last piece that belongs to the beginning of this one
    for start in range(0, len(text), PIECE_BYTES):
        piece = (escape + text[start : start + PIECE_BYTES]).replace(b"\\\\", b"")
        escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.replace(b'\\"', b"").split(b'"')  # in and out of strings by turns
        outside = b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
        num_containers += outside.count(b"[") + outside.count(b"{")
        num_values += outside.count(b",")
        if num_values > MAX_VALUES:
            raise TooManyValues(
                f"the body has more values, such as token ids, than the limit: {MAX_VALUES}; "
                "send text instead of token ids, or several requests"
            )
        if num_containers > MAX_CONTAINERS:
            raise TooManyValues(
                f"the body has more lists and objects than the limit: {MAX_CONTAINERS}; send fewer"
            )


class JsonRequest(Request):
    """A request whose body was parsed and checked by `check`, which is what `json` returns then."""

    _checked: object = None

    async def check(self, check: Callable[[object], object]) -> None:
        """Parse the body and have it checked, off the event loop if it is large; none at all is left alone.

        Raises:
            HTTPException: it is not JSON, or has too many values.
            Exception: as `check` raises.
        """
        try:
            body = await self.body()
        except ClientDisconnect as error:
            raise HTTPException(400, "the body is not complete") from error  # there is nobody to tell
        if len(body) > SMALL_BYTES:
            run = asyncio.get_running_loop().run_in_executor
            self._checked = await run(_parser, lambda: check(_parsed(body)))
        elif body:
            self._checked = check(_parsed(body))

    async def json(self) -> object:
        return self._checked


async def off_loop_if_large(request: Request, work: Callable[[], T], num_more_bytes: int = 0) -> T:
    """Carry out what takes the longer the larger the body is: if that is large, off the event loop.

    `num_more_bytes`: of what is worked on besides.
    """
    if len(await request.body()) + num_more_bytes <= SMALL_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_parser, work)


class JsonRoute(APIRoute):
    """A route that reads its body by `JsonRequest`."""

    takes_curl = False  #: whether a body may claim to be a form, as that of a bare `curl -d` does

    def get_route_handler(self) -> Callable[[Request], Coroutine[None, None, Response]]:
        handle, field = super().get_route_handler(), self.body_field

        def check(parsed: object) -> object:
            assert field is not None, "only a body is checked"
            made: object
            made, faults = field.validate(parsed, {}, loc=("body",))
            if faults:
                raise RequestValidationError(faults, body=parsed)
            return made  # which counts as checked when FastAPI looks at it again

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
    """A route that reads JSON whatever it claims to be: Ollama does, and its examples are bare `curl -d`."""

    takes_curl = True


def _is_of_no_page(request: Request) -> bool:
    """True if no browser sent a request for a page: it would have said so by one of these."""
    return "origin" not in request.headers and "sec-fetch-site" not in request.headers


def _parsed(body: bytes) -> object:
    try:
        return parse_json(body)
    except TooManyValues as error:
        raise HTTPException(400, str(error)) from error
    except ValueError as error:
        raise HTTPException(400, f"the body is not valid JSON: {_reason(error)}") from error


def _reason(error: ValueError) -> str:
    """Say why a text is no JSON, and where, without the advice that Python has for its programmers."""
    if isinstance(error, json.JSONDecodeError):
        place = f" line {error.lineno} column {error.colno}"
        return f"{error.msg.removesuffix(' at')} at{place}" if error.doc else error.msg
    return str(error).partition(";")[0]  # a number of too many digits


def _refuse_other_types(content_type: str) -> None:
    """Raise HTTPException for a body that says to be something else than JSON, as `curl -d` and forms do.

    One that says nothing is read: programs mean JSON, and pages that are not allowed do not come this far.
    """
    kind = content_type.partition(";")[0].strip()
    if not _JSON_TYPE.fullmatch(kind):
        raise HTTPException(
            415, f"the body must be JSON and say so; send `content-type: application/json`, given: {kind:.80}"
        )


def _refuse_encodings(encoding: str) -> None:
    """Raise HTTPException for a body that is compressed: what comes of it would know no limit."""
    if encoding.strip().lower() not in ("", "identity"):
        raise HTTPException(
            415, f"a body is read as it is, given: `content-encoding: {encoding:.80}`; send it without one"
        )


def _as_json(scope: Scope) -> Scope:
    """Return the scope of a request that says to be JSON: FastAPI reads no other."""
    others = [header for header in scope["headers"] if header[0] != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}
