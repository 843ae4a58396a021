"""The routes of OpenAI's API: models, completions, chat and embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.responses import Response

from hearth.api.answers import STREAM_OR_JSON, Answers
from hearth.api.anthropic import models as anthropic
from hearth.api.body import Body
from hearth.api.guard import caller_of
from hearth.api.json_body import JsonRoute
from hearth.api.json_response import as_json
from hearth.api.openai.answer_format import CHAT, COMPLETION, AnswerFormat
from hearth.api.openai.chat import ChatBody
from hearth.api.openai.completion import CompletionBody
from hearth.api.openai.dialect import CompletionDialect
from hearth.api.openai.embedding import EmbeddingBody, EmbeddingDialect
from hearth.control.observe.views import ModelView

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway


def openai_routes(gateway: Gateway, answers: Answers) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)

    @routes.get("/models", summary="List the deployed models")
    async def list_models(request: Request) -> Response:
        """Aliases are listed as models. With the header `anthropic-version`, in Anthropic's format."""
        named = [
            (name, view) for view in gateway.deployments.models(caller_of(request)) for name in view.names
        ]
        if anthropic.speaks_anthropic(request):
            return as_json(anthropic.model_list(anthropic.model_object(*one) for one in named))
        return as_json({"object": "list", "data": [_model(*one) for one in named]})

    @routes.get("/models/{name:path}", summary="Show a deployed model")
    async def show_model(name: str, request: Request) -> Response:
        view = gateway.deployments.model(name, caller_of(request))
        shown = name if name in view.aliases else view.name
        made = anthropic.model_object if anthropic.speaks_anthropic(request) else _model
        return as_json(made(shown, view))

    @routes.post("/completions", summary="Continue a text", responses=STREAM_OR_JSON)
    async def complete(body: CompletionBody, request: Request) -> Response:
        return await answers.generation(body, dialect_of(body, COMPLETION, request), request)

    @routes.post("/chat/completions", summary="Answer a conversation", responses=STREAM_OR_JSON)
    async def chat(body: ChatBody, request: Request) -> Response:
        return await answers.generation(body, dialect_of(body, CHAT, request), request)

    @routes.post("/embeddings", summary="Embed texts")
    async def embed(body: EmbeddingBody, request: Request) -> Response:
        return await answers.embedding(body, EmbeddingDialect(body.encoding_format == "base64"), request)

    def dialect_of(body: Body, format: AnswerFormat, request: Request) -> CompletionDialect:
        fingerprint = f"fp_{gateway.deployments.model(body.model, caller_of(request)).digest[:12]}"
        return CompletionDialect(
            format,
            fingerprint,
            includes_usage=body.includes_usage,
            has_service_tier=body.service_tier is not None,
            prompt_logprobs=body.prompt_logprobs,
        )

    return routes


def _model(name: str, view: ModelView) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": int(view.created_at_s),
        "owned_by": "hearth",
        "root": view.name if view.base is None else view.source,
        "parent": view.base,
        "aliases": view.aliases,
        "max_model_len": view.max_context,
    }
