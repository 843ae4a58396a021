"""vLLM's routes /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, Tag
from starlette.responses import Response

from hearth.api import unread_fields
from hearth.api.answer import MANY_TOKENS
from hearth.api.answers import Answers
from hearth.api.body import Strict, Text, TokenId
from hearth.api.guard import caller_of
from hearth.api.json_body import MAX_VALUES, JsonRoute, off_loop_if_large
from hearth.api.json_response import as_json
from hearth.api.openai.answer_format import CHAT
from hearth.api.openai.chat import ChatBody
from hearth.api.openai.dialect import CompletionDialect
from hearth.api.unread_fields import UnsupportedField
from hearth.control.requests.generation import ChatPrompt

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway
    from hearth.text.tokenizer import Tokenizer

_MODEL = Field(description="Name or alias of a deployed model.", min_length=1, max_length=256)


class TokenizeTextBody(Strict):
    """A text, tokenised like a prompt of plain completions."""

    model: Text = _MODEL
    prompt: Text
    add_special_tokens: bool | None = Field(
        None, description="Add the special tokens of the tokenizer; default: true."
    )
    return_token_strs: bool | None = Field(None, description="Also return the vocabulary entries.")

    def asked(self, tokenizer: Tokenizer) -> str:
        return self.prompt


class TokenizeChatBody(ChatBody):
    """A conversation, tokenised like a chat request with the same fields."""

    unsupported: ClassVar[Mapping[str, UnsupportedField]] = {
        name: field for name, field in unread_fields.CHAT.items() if name != "add_special_tokens"
    }

    add_special_tokens: bool | None = Field(None, description="In addition to those of the chat template.")
    return_token_strs: bool | None = Field(None, description="Also return the vocabulary entries.")

    def asked(self, tokenizer: Tokenizer) -> ChatPrompt:
        dialect = CompletionDialect(CHAT, fingerprint="", includes_usage=False, has_service_tier=False)
        prompt = self.answer_spec(dialect, tokenizer).requests[0].prompt
        assert isinstance(prompt, ChatPrompt), f"{type(prompt)=}"
        return prompt


class DetokenizeBody(Strict):
    model: Text = _MODEL
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_VALUES)]


def _kind_of(body: object) -> str:
    return "chat" if isinstance(body, TokenizeChatBody) or "messages" in _keys(body) else "text"


def _keys(body: object) -> Mapping[object, object]:
    return body if isinstance(body, dict) else {}


TokenizeBody = Annotated[
    Annotated[TokenizeTextBody, Tag("text")] | Annotated[TokenizeChatBody, Tag("chat")],
    Discriminator(_kind_of),
]


def tokenize_routes(gateway: Gateway, answers: Answers) -> APIRouter:
    routes = APIRouter(tags=["vLLM"], route_class=JsonRoute)

    @routes.post("/tokenize", summary="Tokenise a text or a conversation")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        caller = caller_of(request)
        with gateway.admissions.admit(caller):
            tokenizer = await gateway.prompts.tokenizer(body.model, caller)
            asked: Callable[[], str | ChatPrompt] = partial(body.asked, tokenizer)
            prompt = await off_loop_if_large(request, asked)
            tokens = await gateway.prompts.tokenize(body.model, prompt, caller, body.add_special_tokens)
            names = await _names(tokenizer, tokens) if body.return_token_strs else None
            max_context = gateway.deployments.model(body.model, caller).max_context
        told = {"count": len(tokens), "max_model_len": max_context, "tokens": tokens, "token_strs": names}
        return as_json(told, headers=answers.count_ignored(body.ignored_fields))

    @routes.post("/detokenize", summary="Detokenise")
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        caller = caller_of(request)
        with gateway.admissions.admit(caller):
            text = await gateway.prompts.detokenize(body.model, body.tokens, caller)
        return as_json({"prompt": text}, headers=answers.count_ignored(body.ignored_fields))

    return routes


async def _names(tokenizer: Tokenizer, tokens: list[int]) -> list[str | None]:
    if len(tokens) <= MANY_TOKENS:
        return list(map(tokenizer.token, tokens))
    return await asyncio.to_thread(lambda: list(map(tokenizer.token, tokens)))
