"""The routes of OpenAI's responses: create, show, list and delete."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from hearth.api.answers import STREAM_OR_JSON, Answers
from hearth.api.guard import caller_of
from hearth.api.json_body import JsonRoute, off_loop_if_large
from hearth.api.json_response import as_json
from hearth.api.openai.chat import ChatBody
from hearth.api.responses.body import ResponseBody
from hearth.api.responses.dialect import ResponseDialect
from hearth.api.responses.items import as_stored
from hearth.api.responses.store import ResponseStore, StoredResponse
from hearth.control.requests.caller import Caller
from hearth.core.errors import BadPrompt

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway

MAX_LISTED = 100


def response_routes(gateway: Gateway, answers: Answers, store: ResponseStore) -> APIRouter:
    routes = APIRouter(prefix="/v1/responses", tags=["OpenAI"], route_class=JsonRoute)

    @routes.post("", summary="Answer a conversation; optionally store the answer", responses=STREAM_OR_JSON)
    async def create_response(body: ResponseBody, request: Request) -> Response:
        caller = caller_of(request)
        before: list[StoredResponse] = []
        if body.previous_response_id is not None:
            before = store.conversation(caller.group, body.previous_response_id)
            check_models(before, caller)
        num_bytes = sum(response.num_bytes for response in before)
        translate = partial(_translate, body, before, store, caller)
        asked = await off_loop_if_large(request, translate, num_bytes)
        return await answers.generation(
            asked.body, asked.dialect, request, ignored_fields=body.ignored_fields
        )

    @routes.get("/{response_id}", summary="Show a stored response")
    async def show_response(response_id: str, request: Request, stream: bool = False) -> Response:
        if stream:
            raise BadPrompt("`stream` is not supported for stored responses; leave it out")
        found = find(response_id, request)
        return Response(found.body, media_type="application/json")

    @routes.delete("/{response_id}", summary="Delete a stored response")
    async def delete_response(response_id: str, request: Request) -> Response:
        store.remove(caller_of(request).group, find(response_id, request).id)
        return as_json({"id": response_id, "object": "response", "deleted": True})

    @routes.get("/{response_id}/input_items", summary="List the input items of a stored response")
    async def list_input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        found = find(response_id, request)
        items = msgspec.json.decode(found.input_items, type=list[dict[str, object]])
        return as_json(_page(items if order == "asc" else items[::-1], limit, after))

    def find(response_id: str, request: Request) -> StoredResponse:
        caller = caller_of(request)
        found = store.find(caller.group, response_id)
        check_models([found], caller)
        return found

    def check_models(responses: Sequence[StoredResponse], caller: Caller) -> None:
        """Hide responses of models that the caller's key may not use, though its group has them."""
        if not all(gateway.deployments.may_use(one.model, caller) for one in responses):
            raise store.unknown(responses[-1].id)

    return routes


@dataclass(frozen=True, slots=True)
class _Translation:
    body: ChatBody
    dialect: ResponseDialect


def _translate(
    body: ResponseBody, before: Sequence[StoredResponse], store: ResponseStore, caller: Caller
) -> _Translation:
    if body.store and store.max_bytes == 0:
        raise BadPrompt(
            "`store` is true, but this service stores no responses (`service.response_store_bytes` is 0); "
            "leave it out, and send the whole conversation as `input`"
        )
    items = b""
    if body.store:
        items = msgspec.json.encode(as_stored(body.items, f"item_{secrets.token_hex(12)}"))

    def keep(response_id: str, model: str, response: bytes) -> bool:
        stored = StoredResponse(response_id, model, body.previous_response_id, response, items)
        return store.keep(caller.group, stored)

    chat = body.chat([item for response in before for item in response.items()])
    return _Translation(chat, ResponseDialect(body.echo(), time.time(), keep if body.store else None))


def _page(items: Sequence[dict[str, object]], limit: int, after: str | None) -> dict[str, object]:
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise BadPrompt(f"`after`: no item has the id `{after:.80}`; leave it out, or use a listed id")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }
