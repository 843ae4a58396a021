"""The routes of Anthropic's API; `openai/routes.py` lists models for both."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from hearth.api.answers import STREAM_OR_JSON, Answers
from hearth.api.anthropic.dialect import PATH, MessageDialect
from hearth.api.anthropic.messages import ConversationBody, MessagesBody
from hearth.api.errors import error_responses
from hearth.api.guard import caller_of
from hearth.api.json_body import JsonRoute, off_loop_if_large
from hearth.api.json_response import as_json
from hearth.control.requests.generation import ChatPrompt

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway


class AnthropicErrorDetail(BaseModel):
    type: str = Field(description="The kind of error.")
    message: str = Field(description="What is wrong, the limit, the value given, and what to do.")


class AnthropicError(BaseModel):
    """Anthropic's error object."""

    type: Literal["error"]
    error: AnthropicErrorDetail


def anthropic_routes(gateway: Gateway, answers: Answers) -> APIRouter:
    routes = APIRouter(
        prefix=PATH, tags=["Anthropic"], route_class=JsonRoute, responses=error_responses(AnthropicError)
    )

    @routes.post("", summary="Answer a conversation", responses=STREAM_OR_JSON)
    async def create_message(body: MessagesBody, request: Request) -> Response:
        chat = await off_loop_if_large(request, body.chat_body)
        return await answers.generation(chat, MessageDialect(), request, body.ignored_fields)

    @routes.post("/count_tokens", summary="Count the tokens of a conversation")
    async def count_tokens(body: ConversationBody, request: Request) -> Response:
        caller = caller_of(request)
        with gateway.admissions.admit(caller):
            chat = await off_loop_if_large(request, body.chat_body)
            tokenizer = await gateway.prompts.tokenizer(body.model, caller)
            specify = partial(chat.answer_spec, MessageDialect(), tokenizer)
            (asked,) = (await off_loop_if_large(request, specify)).requests
            assert isinstance(asked.prompt, ChatPrompt), f"{type(asked.prompt)=}"
            tokens = await gateway.prompts.tokenize(asked.model, asked.prompt, caller, None)
        ignored = answers.count_ignored(body.ignored_fields)
        return as_json({"input_tokens": len(tokens)}, headers=ignored)

    return routes
