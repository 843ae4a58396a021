"""Errors as responses, with status and headers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from hearth.api.error_spelling import Fault, spell
from hearth.api.rate_limit_headers import retry_headers
from hearth.api.unread_fields import REFUSED_FIELD
from hearth.core.errors import HearthError, RateLimited


class ErrorDetail(BaseModel):
    message: str = Field(description="What is wrong, the limit, the value given, and what to do.")
    type: str = Field(description="The kind of error.")
    param: str | None = Field(description="The field of the request that is wrong.")
    code: str | None = Field(description="The error's code, for programs.")


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetail


def error_responses(model: type[BaseModel]) -> dict[int | str, dict[str, object]]:
    return {
        "4XX": {"model": model, "description": "The request is invalid or not allowed."},
        "5XX": {"model": model, "description": "The service cannot answer now."},
    }


#: Codes of OpenAI that differ from our labels.
_CODES = {"prompt_too_long": "context_length_exceeded", "unauthorized": "invalid_api_key"}
_CODE_BY_STATUS = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
    429: "overloaded",
    431: "headers_too_large",
}


class ErrorResponse(Response):
    def __init__(self, fault: Fault, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(spell(fault, ""), fault.status, headers, "application/json")
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.body = spell(self._fault, scope["path"])
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(
    status: int,
    message: str,
    code: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> ErrorResponse:
    return ErrorResponse(Fault(status, message, code or _CODE_BY_STATUS.get(status), param), headers)


def fault_of(error: HearthError) -> Fault:
    kind = error.what if isinstance(error, RateLimited) else None
    return Fault(error.http_status, str(error), _CODES.get(error.label, error.label), kind=kind)


async def on_hearth_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HearthError), type(error)
    headers: dict[str, str] = {}
    if isinstance(error, RateLimited):
        headers = retry_headers(error.retry_s)
    elif error.retry_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_s)))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return ErrorResponse(fault_of(error), headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException), type(error)
    path, method = request.url.path, request.method
    match error.status_code:
        case 404:
            meant = _meant(request)
            nearest = "" if meant is None else f"did you mean `{meant}`? "
            message = f"no route `{path}`; {nearest}`/docs` lists all routes"
        case 405:
            allowed = ", ".join(_allowed_methods(request))
            if method == "OPTIONS":
                return Response(status_code=204, headers={"allow": allowed})
            message = f"`{path}` takes {allowed}, given: {method}; `/docs` lists all routes"
            return error_response(405, message, headers={"allow": allowed})
        case _:
            message = str(error.detail)
    return error_response(error.status_code, message, headers=error.headers)


def _has_route(request: Request, path: str, method: str) -> bool:
    at = {"type": "http", "path": path, "root_path": "", "method": method}
    return any(route.matches(at)[0] is Match.FULL for route in request.app.routes)


def _meant(request: Request) -> str | None:
    """Return the route that clients miss with a base URL that lacks `/v1`, or has it twice or in vain."""
    path = request.scope["path"]
    others = (f"/v1{path}", path.removeprefix("/v1"), f"/api{path}")
    known = (one for one in others if one not in ("", "/") and _has_route(request, one, request.method))
    return next(known, None)


def _allowed_methods(request: Request) -> list[str]:
    path = request.scope["path"]
    methods = [method for method in ("GET", "POST", "PATCH", "DELETE") if _has_route(request, path, method)]
    return [*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"]


#: Messages in JSON's terms instead of pydantic's, by the type of the fault.
_WORDS = dict.fromkeys(("dict_type", "model_attributes_type", "model_type"), "input should be an object")


async def on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), type(error)
    faults = [(fault, _place(fault["loc"], error.body, fault["type"])) for fault in error.errors()]
    # Of the alternatives of a union, report one that failed by length only, else the deepest fault.
    fault, path = max(faults, key=lambda pair: (pair[0]["type"] in ("too_long", "too_short"), len(pair[1])))
    if fault["type"] == REFUSED_FIELD:
        param = _param([*path, fault["ctx"]["field"]])
        return error_response(400, f"`{param:.80}` {fault['msg']}", "unsupported_parameter", param[:80])
    what = _WORDS.get(fault["type"]) or str(fault["msg"]).removeprefix("Value error, ")
    what = what.partition(" after validation, not ")[0]
    if fault["type"] in ("too_long", "too_short") and isinstance(fault["input"], str):
        what = f"text {what.partition(' ')[2].replace(' item', ' character')}"
    param = _param(path)
    message = f"`{param or 'body'}`: {what[:1].lower()}{what[1:]}"
    if not path and error.body is None:
        message = "a JSON body is required, with `content-type: application/json`"
    elif fault["type"] not in ("missing", "value_error"):
        message += f", given: {_given(fault['input'], fault['type'])}"
    return error_response(400, message, "bad_request", param or None)


def _param(path: Sequence[int | str]) -> str:
    """Format the path to a field: `messages[0].content`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _given(value: object, fault: str) -> str:
    """Describe any value briefly; formatting a large body would take long."""
    match value:
        case str() if fault == "too_long":
            return f"{len(value)}, beginning with {value[:40]!r:.80}"
        case list():
            return f"a list of {len(value)}"
        case dict():
            return f"an object with {len(value)} fields"
        case str():
            return f"{value[:80]!r:.80}"
        case _:
            return f"{value!r:.80}"


def _place(location: Sequence[int | str], body: object, kind: str) -> list[int | str]:
    where, *inside = location
    return _path(inside, body, kind) if where == "body" else inside[:1]


def _path(location: Sequence[int | str], body: object, kind: str) -> list[int | str]:
    path: list[int | str] = []
    for part in location:
        try:
            body = body[part]  # type: ignore[index] # raises if it has no such part
        except (TypeError, LookupError):
            if kind != "missing" or part != location[-1]:
                continue
        path.append(part)
    return path


def body_too_large(limit_bytes: int) -> HTTPException:
    return HTTPException(
        413,
        f"the body exceeds the limit: {limit_bytes} bytes; send less, or raise `service.max_body_bytes`",
        # The rest of the body is not read, so nothing else can come over this connection.
        {"connection": "close"},
    )


def too_many_bodies(limit_bytes: int) -> HTTPException:
    return HTTPException(
        429,
        f"request bodies in transfer exceed the limit: {limit_bytes} bytes in total; try again",
        {"connection": "close", "retry-after": "1"},
    )
