"""Turns the bodies of all dialects into responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from fastapi import Request

from hearth.api.answer import Answer
from hearth.api.body import Body, ModelBody
from hearth.api.dialect import AnswerSpec, Dialect
from hearth.api.guard import caller_of
from hearth.api.json_body import off_loop_if_large
from hearth.api.openai.chat import ChatBody
from hearth.api.openai.completion import CompletionBody
from hearth.api.openai.embedding import EmbeddingBody
from hearth.api.unread_fields import ignored_fields_header, metric_labels
from hearth.core.errors import Forbidden

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway

AnyBody = TypeVar("AnyBody", bound=Body)

#: For the OpenAPI document.
STREAM_OR_JSON: dict[int | str, dict[str, object]] = {
    200: {"description": "The answer.", "content": {"application/json": {}, "text/event-stream": {}}}
}
#: For routes with `response_class=Response`; FastAPI would document any other class as well.
PLAIN_TEXT: dict[int | str, dict[str, object]] = {
    200: {"description": "The answer.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


class Answers:
    def __init__(self, gateway: Gateway, heartbeat_s: float) -> None:
        self._gateway = gateway
        self._heartbeat_s = heartbeat_s

    async def generation(
        self,
        body: ChatBody | CompletionBody,
        dialect: Dialect,
        request: Request,
        ignored_fields: tuple[str, ...] | None = None,
        follows: Sequence[int] = (),
    ) -> Answer:
        """`ignored_fields`: those of the client's own body. `follows`: tokens of an earlier conversation."""
        _check_pin(body, request)
        body = self._preset(body, request)
        tokenizer = await self._gateway.prompts.tokenizer(body.model, caller_of(request))
        specify = partial(body.answer_spec, dialect, tokenizer)
        return await self._answer(specify, request, ignored_fields, follows)

    async def embedding(
        self,
        body: EmbeddingBody,
        dialect: Dialect,
        request: Request,
        ignored_fields: tuple[str, ...] | None = None,
    ) -> Answer:
        _check_pin(body, request)
        return await self._answer(partial(body.answer_spec, dialect), request, ignored_fields)

    def _preset(self, body: AnyBody, request: Request) -> AnyBody:
        """Return a body with the sampling parameters of a preset where it has none. Raises UnknownModel."""
        found = self._gateway.deployments.find_for(body.model, caller_of(request)).preset
        return body if found is None else body.model_copy(update=body.lacking(found.preset.sampling))

    def count_ignored(self, names: tuple[str, ...]) -> dict[str, str]:
        """Count ignored fields of a request; returns the header that lists them."""
        self._gateway.count_ignored_fields(metric_labels(names))
        return ignored_fields_header(names)

    async def _answer(
        self,
        specify: Callable[[], AnswerSpec],
        request: Request,
        ignored_fields: tuple[str, ...] | None,
        follows: Sequence[int] = (),
    ) -> Answer:
        spec = await off_loop_if_large(request, specify)
        if follows:
            spec = replace(spec, requests=[replace(one, follows=tuple(follows)) for one in spec.requests])
        if ignored_fields is not None:
            spec = replace(spec, ignored_fields=ignored_fields)
        self.count_ignored(spec.ignored_fields)
        return Answer(self._gateway, spec, caller_of(request), self._heartbeat_s)


def _check_pin(body: ModelBody, request: Request) -> None:
    """Only admins may pin: a pinned model takes memory from all others."""
    if body.keep_alive_s() == math.inf and not caller_of(request).has_role("admin"):
        raise Forbidden(
            "`keep_alive` below 0 pins the model, which needs a key with the role `admin`; send a duration "
            'like "30m", or pin the model in the configuration: `models.NAME.pinned`'
        )
