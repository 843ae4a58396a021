"""Formats errors as each API does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_KINDS = {
    **_KINDS,
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class Fault:
    status: int
    message: str
    code: str | None = None  #: a short name for programs
    param: str | None = None  #: the field of the request that is wrong
    kind: str | None = None  #: OpenAI's `type`; None: by status


def spell(fault: Fault, path: str) -> bytes:
    spelling = next((one for start, one in _SPELLINGS.items() if f"{path}/".startswith(f"{start}/")), openai)
    # Not by msgspec: what was given may hold lone surrogates, which need escapes.
    return json.dumps(spelling(fault)).encode()


def openai(fault: Fault) -> object:
    kind = fault.kind or _KINDS.get(fault.status, _wrong_or_broken(fault, "server_error"))
    error = {"message": fault.message, "type": kind, "param": fault.param, "code": fault.code}
    return {"error": error}


def anthropic(fault: Fault) -> object:
    kind = _ANTHROPIC_KINDS.get(fault.status, _wrong_or_broken(fault, "api_error"))
    return {"type": "error", "error": {"type": kind, "message": fault.message}}


def ollama(fault: Fault) -> object:
    return {"error": fault.message}


def _wrong_or_broken(fault: Fault, broken: str) -> str:
    return "invalid_request_error" if fault.status < 500 else broken


#: By the prefix of an API's paths; all others are OpenAI's and Hearth's own.
_SPELLINGS: dict[str, Callable[[Fault], object]] = {"/v1/messages": anthropic, "/api": ollama}
