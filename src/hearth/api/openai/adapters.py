"""vLLM's routes for loading and unloading LoRA adapters, which deploy and remove them."""

from __future__ import annotations

from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from hearth.api.answers import PLAIN_TEXT
from hearth.api.body import OwnBody, Text
from hearth.api.guard import LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH, caller_of
from hearth.api.json_body import JsonRoute
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.registry import name_of_model
from hearth.control.requests.caller import OPERATOR
from hearth.core.errors import ConfigError, ModelError, NameTaken, RequestError, SourceMissing, UnknownModel

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway


class LoadAdapterBody(OwnBody):
    lora_name: Text = Field(min_length=1, max_length=128, description="Name of the adapter.")
    lora_path: Text = Field(
        min_length=1,
        max_length=4096,
        description="PEFT directory, ORG/NAME on the Hugging Face Hub, or URL of a converted adapter.",
    )
    base_model_name: Text | None = Field(
        None, max_length=128, description="Its base model, if its config does not name it."
    )
    load_inplace: bool = Field(False, description="Replace the adapter of that name.")


class UnloadAdapterBody(OwnBody):
    lora_name: Text = Field(min_length=1, max_length=128)
    lora_int_id: int | None = Field(None, description="Ignored.")


def adapter_routes(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @routes.post(
        LOAD_ADAPTER_PATH,
        summary="Deploy a LoRA adapter (vLLM)",
        response_class=Response,
        responses=PLAIN_TEXT,
    )
    async def load(body: LoadAdapterBody) -> Response:
        """Requires the role `admin`. The adapter stays deployed after a restart.

        400: the name is taken, or the adapter cannot be served. 404: nothing at `lora_path`.
        """
        # The registry checks again later. OPERATOR: the caller's key may not know all models.
        with suppress(UnknownModel):
            if gateway.deployments.model(body.lora_name, OPERATOR).base is None:
                raise name_of_model(body.lora_name)
        try:
            order = DeployOrder(
                body.lora_path,
                body.lora_name,
                overwrite=body.load_inplace,
                base=body.base_model_name,
                is_adapter=True,
            )
            async with aclosing(gateway.deploy(order)) as events:
                async for _ in events:
                    pass
        except NameTaken:
            raise RequestError(
                f"The lora adapter '{body.lora_name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            ) from None
        except SourceMissing as error:
            raise UnknownModel(str(error)) from error
        except (ModelError, ConfigError) as error:
            raise RequestError(str(error)) from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post(
        UNLOAD_ADAPTER_PATH,
        summary="Remove a LoRA adapter (vLLM)",
        response_class=Response,
        responses=PLAIN_TEXT,
    )
    async def unload(body: UnloadAdapterBody, request: Request) -> Response:
        """Requires the role `admin`. Running requests are finished."""
        try:
            view = gateway.deployments.model(body.lora_name, caller_of(request))
        except UnknownModel as error:
            raise UnknownModel(f"{_not_found(body.lora_name)}: {error}") from error
        if not view.is_adapter:
            what = "model" if view.base is None else "preset"
            raise UnknownModel(f"{_not_found(body.lora_name)}: that is a {what}; remove it with `hearth rm`")
        await gateway.deployments.remove(view.name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return routes


def _not_found(name: str) -> str:
    return f"The lora adapter '{name}' cannot be found"
