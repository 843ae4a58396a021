"""The routes of Ollama's API."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from hearth.api.answer import NDJSON_TYPE
from hearth.api.answers import Answers
from hearth.api.errors import error_responses
from hearth.api.guard import COPY_PATH, CREATE_PATH, DELETE_PATH, caller_of
from hearth.api.json_body import CurlRoute, off_loop_if_large
from hearth.api.json_response import as_json
from hearth.api.ollama.chat import OllamaChatBody
from hearth.api.ollama.dialect import (
    CHAT,
    GENERATE,
    LoadDialect,
    OllamaDialect,
    OllamaFormat,
    nothing_done,
)
from hearth.api.ollama.embed import EmbedBody, EmbedDialect, LegacyEmbedBody, LegacyEmbedDialect
from hearth.api.ollama.generate import GenerateBody
from hearth.api.ollama.models import resident_object, show_object, tag_object
from hearth.api.ollama.store import (
    CopyBody,
    CreateBody,
    NamedModelBody,
    PullBody,
    pulled_source,
    pulling,
)
from hearth.api.openai.completion import CompletionBody
from hearth.api.progress import ProgressResponse
from hearth.control.deploy.names import LATEST
from hearth.control.deploy.preset import Preset
from hearth.control.observe.views import Explanation
from hearth.core.errors import BadSampling, Forbidden, UnknownModel
from hearth.core.version import hearth_version
from hearth.text.reasoning import marks_of

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway

#: The version of Ollama whose API this is; clients refuse older ones.
OLLAMA_VERSION = "0.12.6"
_STREAM_OR_JSON: dict[int | str, dict[str, object]] = {
    200: {"description": "The answer.", "content": {"application/json": {}, NDJSON_TYPE: {}}}
}


class OllamaError(BaseModel):
    """Ollama's error object."""

    error: str = Field(description="What is wrong, the limit, the value given, and what to do.")


def ollama_routes(gateway: Gateway, answers: Answers, heartbeat_s: float) -> APIRouter:
    routes = APIRouter(tags=["Ollama"], route_class=CurlRoute, responses=error_responses(OllamaError))

    @routes.get("/api/version", summary="The version of Ollama whose API this is")
    async def version() -> Response:
        return as_json({"version": OLLAMA_VERSION, "hearth": hearth_version()})

    @routes.get("/api/tags", summary="List the deployed models")
    async def list_models(request: Request) -> Response:
        """Aliases are listed as models."""
        models = gateway.deployments.models(caller_of(request))
        return as_json({"models": [tag_object(name, view) for view in models for name in view.names]})

    @routes.post("/api/show", summary="Show a deployed model")
    async def show_model(body: NamedModelBody, request: Request) -> Response:
        caller = caller_of(request)
        view = gateway.deployments.model(body.meant, caller)
        return as_json(show_object(view, await gateway.prompts.tokenizer(view.name, caller)))

    @routes.get("/api/ps", summary="List the loaded models")
    async def list_residents(request: Request) -> Response:
        shown = await gateway.views.fresh_ps()
        views = {view.name: view for view in gateway.deployments.models(caller_of(request))}
        kinds = {worker.worker: worker.kind for worker in shown.workers}
        residents = (one for one in shown.models if one.is_hosted and one.model in views)
        return as_json(
            {
                "models": [
                    resident_object(one, views[one.model], kinds.get(one.worker) != "cpu")
                    for one in residents
                ]
            }
        )

    @routes.post("/api/chat", summary="Answer a conversation", responses=_STREAM_OR_JSON)
    async def chat(body: OllamaChatBody, request: Request) -> Response:
        """Without messages, the model is loaded, or unloaded if `keep_alive` is 0."""
        if body.is_empty:
            return await load_or_unload(body, CHAT, request)
        await check_thinking(body, request)
        chat = await off_loop_if_large(request, body.chat_body)
        return await answers.generation(
            chat, dialect_of(body.model, CHAT, request), request, body.ignored_fields
        )

    @routes.post("/api/generate", summary="Answer a prompt", responses=_STREAM_OR_JSON)
    async def generate(body: GenerateBody, request: Request) -> Response:
        """Without a prompt, the model is loaded, or unloaded if `keep_alive` is 0."""
        if body.is_empty:
            return await load_or_unload(body, GENERATE, request)
        await check_thinking(body, request)
        caller, ignored, context = caller_of(request), body.ignored_fields, body.context or ()
        dialect = dialect_of(body.model, GENERATE, request, has_context=not body.is_whole)
        if body.is_whole or not gateway.deployments.model(body.model, caller).has_chat_template:
            return await answers.generation(body.raw_body(), dialect, request, ignored, context)
        return await answers.generation(body.chat_body(), dialect, request, ignored, context)

    @routes.post("/api/embed", summary="Embed texts")
    async def embed(body: EmbedBody, request: Request) -> Response:
        if not body.input:
            gateway.deployments.model(body.model, caller_of(request))
            return as_json({"model": body.model, "embeddings": []})
        dialect = EmbedDialect(body.model, explain_for(request))
        return await answers.embedding(body.embedding_body(), dialect, request, body.ignored_fields)

    @routes.post("/api/embeddings", summary="Embed a text (older clients)")
    async def embed_one(body: LegacyEmbedBody, request: Request) -> Response:
        return await answers.embedding(
            body.embedding_body(), LegacyEmbedDialect(), request, body.ignored_fields
        )

    @routes.post("/api/pull", summary="Deploy a model of the Hugging Face Hub", responses=_STREAM_OR_JSON)
    async def pull(body: PullBody, request: Request) -> Response:
        """A deployed model is not downloaded again. Others need the role `admin`: `hf.co/ORG/NAME`."""
        caller, source = caller_of(request), None
        try:
            gateway.deployments.model(body.meant, caller)
        except UnknownModel:
            source = pulled_source(body.meant)
            if not caller.has_role("admin"):
                raise Forbidden(
                    f"`{body.meant:.80}` is not deployed, and to deploy `{source:.80}` needs a key with the "
                    "role `admin`"
                ) from None
        events, is_whole = pulling(gateway, body.meant, source), body.stream is False
        return ProgressResponse(events, heartbeat_s, result=None, is_whole=is_whole, has_lines=True)

    @routes.post(COPY_PATH, summary="Give a deployed model another name, too", response_class=Response)
    async def copy(body: CopyBody) -> Response:
        """Requires the role `admin`. The copy is a preset: it shares the weights of its source."""
        await gateway.put_preset(body.destination.removesuffix(LATEST), body.source, Preset())
        return Response()

    @routes.delete(DELETE_PATH, summary="Remove a model, an adapter or a preset", response_class=Response)
    async def delete_model(body: NamedModelBody, request: Request) -> Response:
        """Requires the role `admin`."""
        await gateway.deployments.remove(gateway.deployments.model(body.meant, caller_of(request)).name)
        return Response()

    @routes.post(CREATE_PATH, summary="Make a preset of a deployed model")
    async def create(body: CreateBody) -> Response:
        """Requires the role `admin`. `FROM`, `SYSTEM`, `TEMPLATE` and `PARAMETER` of a Modelfile."""
        await gateway.put_preset(body.meant.removesuffix(LATEST), body.base, body.preset())
        return as_json({"status": "success"})

    def refuse(path: str, method: str, instead: str) -> None:
        async def refused() -> Response:
            raise Forbidden(f"`{path}` is not supported; use {instead}")

        routes.add_api_route(path, refused, methods=[method], summary=f"Refused: use {instead}")

    refuse("/api/push", "POST", "`hearth convert`, and upload its output")
    refuse("/api/blobs/{digest}", "POST", "`hearth deploy FILE --name NAME`, and that name in `from`")

    async def check_thinking(body: OllamaChatBody | GenerateBody, request: Request) -> None:
        """Refuse as Ollama does: its clients then ask without."""
        if not body.think:
            return
        if marks_of(await gateway.prompts.tokenizer(body.model, caller_of(request))) is None:
            raise BadSampling(f"`{body.model}` does not support thinking; leave `think` out")

    async def load_or_unload(
        body: OllamaChatBody | GenerateBody, format: OllamaFormat, request: Request
    ) -> Response:
        caller = caller_of(request)
        if not body.has_no_keep_alive:
            least = {"model": body.model, "prompt": [0], "max_tokens": 1, "keep_alive": body.keep_alive}
            dialect = LoadDialect(format, body.model)
            return await answers.generation(CompletionBody.model_validate(least), dialect, request)
        view = gateway.deployments.model(body.model, caller)
        if not caller.has_role("admin"):
            raise Forbidden(
                "`keep_alive` of 0 without a prompt unloads the model for all callers, which needs a key "
                "with the role `admin`"
            )
        await gateway.unload(view.name, free=True)
        return as_json(nothing_done(format, body.model, "unload"))

    def dialect_of(
        model: str, format: OllamaFormat, request: Request, *, has_context: bool = False
    ) -> OllamaDialect:
        return OllamaDialect(format, model, explain_for(request), has_context)

    def explain_for(request: Request) -> partial[Explanation | None]:
        return partial(gateway.views.explain, caller=caller_of(request))

    return routes
