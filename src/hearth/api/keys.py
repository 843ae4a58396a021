"""API keys over HTTP, for admins: the same file and checks as `hearth keys`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from hearth.api.body import OwnBody, Text
from hearth.api.guard import KEYS_PATH, caller_of
from hearth.api.json_body import JsonRoute
from hearth.api.json_response import as_json
from hearth.control.keys import keys
from hearth.control.keys.key_usage import KeyView, view_of
from hearth.control.keys.keys import KeyInfo
from hearth.control.requests.caller import ANYBODY, KeyTerms, Role, ServiceClass
from hearth.core.errors import Forbidden, RequestError
from hearth.policy.limits.key_limiter import KeyLimits

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway


class KeyTermsBody(OwnBody):
    requests_per_min: int | None = Field(None, description="This and the next two: null for no limit.")
    tokens_per_min: int | None = Field(None, description="Prompt and answer tokens.")
    concurrent: int | None = Field(None, description="Requests at once.")
    models: list[Text] | None = Field(None, description="Names or aliases of allowed models; null for all.")
    service_class: ServiceClass = Field("interactive", description="`batch`: no pace, lower priority.")

    def altered(self, terms: KeyTerms) -> KeyTerms:
        """Return `terms` with the fields that the body has."""
        given = self.model_dump(exclude_unset=True)
        limits = {one.name: given[one.name] for one in fields(KeyLimits) if one.name in given}
        if "models" in given:
            models = None if self.models is None else tuple(dict.fromkeys(self.models))
            terms = replace(terms, models=models)
        service_class = given.get("service_class", terms.service_class)
        return replace(terms, limits=replace(terms.limits, **limits), service_class=service_class)


class KeyBody(KeyTermsBody):
    name: Text = Field(description="1 to 64 letters, digits, `@`, `.`, `_` or `-`.")
    role: Role = Field("user", description="`monitor`: also see the whole service; `admin`: also change it.")
    group: Text | None = Field(None, description="Share cached prompts with the keys of this group.")


def key_routes(gateway: Gateway) -> APIRouter:
    routes = APIRouter(prefix=KEYS_PATH, tags=["Keys"], route_class=JsonRoute)

    def view(key: KeyInfo) -> KeyView:
        return view_of(key, gateway.admissions.usage.record)

    @routes.get("", summary="List the keys with their limits and usage")
    async def list_keys() -> Response:
        known = await asyncio.to_thread(keys.list_keys, gateway.keys.path)
        return as_json([view(key) for key in known])

    @routes.post("", summary="Make a key")
    async def add_key(body: KeyBody, request: Request) -> Response:
        """Returns it as `key`, once: only its hash is stored. `hearth keys add` makes the first one."""
        if caller_of(request) is ANYBODY:
            raise Forbidden(
                "the service has no API keys, so any user of this machine could make one; make the first "
                "with `hearth keys add NAME --admin`"
            )
        terms = body.altered(KeyTerms())
        made = await asyncio.to_thread(keys.add, gateway.keys.path, body.name, body.role, body.group, terms)
        return as_json({"key": made.key, **asdict(view(made.info))})

    @routes.patch("/{name}", summary="Change the limits of a key")
    async def change_key(name: str, body: KeyTermsBody) -> Response:
        """Fields that are left out stay the same. Applies from the next request on."""
        changed = await asyncio.to_thread(keys.change, gateway.keys.path, name, body.altered)
        return as_json(view(changed))

    @routes.delete("/{name}", summary="Remove a key, which is rejected from now on")
    async def remove_key(name: str, request: Request) -> Response:
        """A key cannot remove itself, so one admin is left."""
        caller = caller_of(request)
        if caller.key_id is not None and caller.name == name:
            raise RequestError(
                f"key `{name}` cannot remove itself; use another admin key, or `hearth keys rm`"
            )
        await asyncio.to_thread(keys.remove, gateway.keys.path, name)
        return as_json({"removed": name})

    return routes
