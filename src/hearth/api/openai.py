"""The routes of OpenAI's API: models, completions, chat. Understands no body: each brings its own type."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from hearth.api.answer import Answer
from hearth.api.answer_spec import AnswerSpec
from hearth.api.body import Body
from hearth.api.chat import ChatBody
from hearth.api.completion import CompletionBody
from hearth.api.guard import caller_of
from hearth.api.json_body import JsonRoute
from hearth.api.unread_fields import metric_labels
from hearth.control.views import ModelView
from hearth.errors import Forbidden

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway

#: For the API's description: an answer is JSON, or with `stream` a row of events.
_ANSWER: dict[int | str, dict[str, object]] = {
    200: {"description": "The answer.", "content": {"application/json": {}, "text/event-stream": {}}}
}


def openai_routes(gateway: Gateway, heartbeat_s: float) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)

    @routes.get("/models", summary="List the deployed models")
    async def list_models(request: Request) -> Response:
        models = gateway.models(caller_of(request))
        return as_json({"object": "list", "data": [_model(view) for view in models]})

    @routes.get("/models/{name:path}", summary="Show a deployed model")
    async def show_model(name: str, request: Request) -> Response:
        return as_json(_model(gateway.model(name, caller_of(request))))

    @routes.post("/completions", summary="Continue a text", responses=_ANSWER)
    async def complete(body: CompletionBody, request: Request) -> Response:
        _check_pin(body, request)
        spec = body.answer_spec(_fingerprint(gateway, body.model, request))
        return _answer(gateway, spec, request, heartbeat_s)

    @routes.post("/chat/completions", summary="Answer a conversation", responses=_ANSWER)
    async def chat(body: ChatBody, request: Request) -> Response:
        _check_pin(body, request)
        fingerprint = _fingerprint(gateway, body.model, request)
        tokenizer = await gateway.tokenizer(body.model, caller_of(request)) if body.uses_tools else None
        return _answer(gateway, body.answer_spec(fingerprint, tokenizer), request, heartbeat_s)

    return routes


def as_json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _answer(gateway: Gateway, spec: AnswerSpec, request: Request, heartbeat_s: float) -> Answer:
    gateway.count_ignored_fields(metric_labels(spec.ignored_fields))
    return Answer(gateway, spec, caller_of(request), heartbeat_s)


def _check_pin(body: Body, request: Request) -> None:
    """Refuse a pin by anybody but an admin: a pinned model takes its room from everybody."""
    if body.keep_alive_s() == math.inf and not caller_of(request).has_role("admin"):
        raise Forbidden(
            "`keep_alive` below 0 pins the model, which needs a key with the role `admin`; give a duration "
            'like "30m", or have the model pinned in the configuration: `models.NAME.pinned`'
        )


def _fingerprint(gateway: Gateway, name: str, request: Request) -> str:
    return f"fp_{gateway.model(name, caller_of(request)).digest[:12]}"


def _model(view: ModelView) -> dict[str, object]:
    return {
        "id": view.name,
        "object": "model",
        "created": int(view.created_at_s),
        "owned_by": "hearth",
        "aliases": view.aliases,
        "max_model_len": view.max_context,
    }
