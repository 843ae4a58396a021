"""Assembles the HTTP API."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse

from hearth.api.admin import model_routes, node_routes, service_routes
from hearth.api.answers import Answers
from hearth.api.anthropic.routes import anthropic_routes
from hearth.api.cors import AllowedOrigins
from hearth.api.dashboard import dashboard_routes
from hearth.api.errors import ErrorBody, error_responses, on_hearth_error, on_http_error, on_invalid_body
from hearth.api.exchange import Exchanges
from hearth.api.guard import DOCS_PATH, Guard
from hearth.api.keys import key_routes
from hearth.api.ollama.routes import ollama_routes
from hearth.api.openai.adapters import adapter_routes
from hearth.api.openai.routes import openai_routes
from hearth.api.reference import api_page
from hearth.api.responses.routes import response_routes
from hearth.api.responses.store import ResponseStore
from hearth.api.sessions import Sessions
from hearth.api.tokenize import tokenize_routes
from hearth.core.errors import HearthError
from hearth.core.version import hearth_version

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway


#: The page of the API loads nothing and is in no frame.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
}


@dataclass(frozen=True, slots=True)
class ApiLimits:
    max_body_bytes: int
    stream_heartbeat_s: float  #: after this silence, a stream sends a comment
    response_store_bytes: int  #: for stored responses; 0: none are stored
    allowed_origins: tuple[str, ...] = ()  #: CORS


def create_app(gateway: Gateway, limits: ApiLimits) -> FastAPI:
    app = FastAPI(
        title="Hearth",
        version=hearth_version(),
        description="Many language models behind one endpoint that speaks OpenAI's, Anthropic's "
        "and Ollama's APIs.",
        # FastAPI's pages would load scripts from other sites, with the rights of this origin.
        docs_url=None,
        redoc_url=None,
        responses=error_responses(ErrorBody),
        exception_handlers={
            HearthError: on_hearth_error,
            HTTPException: on_http_error,
            RequestValidationError: on_invalid_body,
        },
        redirect_slashes=False,
    )
    page = cache(lambda: api_page(app.openapi()))
    app.add_api_route(
        DOCS_PATH,
        lambda: HTMLResponse(page(), headers=_PAGE_HEADERS),
        summary="The HTTP API as a page",
        include_in_schema=False,
    )
    answers = Answers(gateway, limits.stream_heartbeat_s)
    sessions = Sessions(lambda key_id: gateway.keys.find(key_id))
    routes = [*app.routes]
    for router in (
        openai_routes(gateway, answers),
        adapter_routes(gateway),
        response_routes(gateway, answers, ResponseStore(limits.response_store_bytes)),
        anthropic_routes(gateway, answers),
        ollama_routes(gateway, answers, limits.stream_heartbeat_s),
        tokenize_routes(gateway, answers),
        model_routes(gateway, limits.stream_heartbeat_s),
        key_routes(gateway),
        node_routes(gateway),
        service_routes(gateway),
        dashboard_routes(gateway, sessions),
    ):
        app.include_router(router)
        routes += router.routes
    origins = AllowedOrigins(frozenset(limits.allowed_origins))
    app.add_middleware(
        Guard,
        gateway=gateway,
        sessions=sessions,
        max_body_bytes=limits.max_body_bytes,
        origins=origins,
    )
    app.add_middleware(  # around the guard
        Exchanges, origins=origins, routes=routes, on_end=gateway.exchange_ended
    )
    return app
