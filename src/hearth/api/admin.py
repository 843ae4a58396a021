"""Hearth's own routes under `/hearth`, and the probes and `/metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import Field
from starlette.responses import Response

from hearth.api.answers import PLAIN_TEXT
from hearth.api.anthropic.message_format import MESSAGE_PREFIX
from hearth.api.body import OwnBody, Text
from hearth.api.guard import FORECASTS_PATH, MODELS_PATH, NODES_PATH, caller_of
from hearth.api.json_body import JsonRoute
from hearth.api.json_response import as_json
from hearth.api.openai.answer_format import CHAT, COMPLETION
from hearth.api.progress import ProgressResponse
from hearth.api.responses.dialect import ID_PREFIX
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.preset import Preset
from hearth.core.errors import RequestError, UnknownRequest
from hearth.core.version import hearth_version

if TYPE_CHECKING:
    from hearth.control.cluster import Cluster
    from hearth.control.gateway import Gateway

_EVENTS: dict[int | str, dict[str, object]] = {
    200: {"description": "Progress.", "content": {"text/event-stream": {}, "application/json": {}}}
}


class DeployBody(OwnBody):
    source: Text = Field(
        min_length=1, max_length=4096, description="Directory, GGUF file, hf:ORG/NAME, or URL."
    )
    name: Text | None = Field(None, max_length=128, description="Default: derived from the source.")
    dtype: Text = Field("auto", max_length=32)
    quant: Text = Field(
        "auto", max_length=32, description="int8, fp8, int4 or none; by default weights stay as they are."
    )
    overwrite: bool = Field(False, description="Replace the model of that name.")
    base: Text | None = Field(
        None, max_length=128, description="Deploy the source as a LoRA adapter of this model."
    )
    labels: list[Text] = Field(
        [], max_length=32, description="Run the model only on machines with all these labels, like `zone=a`."
    )


class PresetBody(OwnBody):
    name: Text = Field(min_length=1, max_length=128, description="Of the preset; replaces one of that name.")
    system: Text | None = Field(None, description="System prompt of conversations that have none.")
    template: Text | None = Field(None, description="Chat template in Jinja.")
    temperature: float | None = Field(None, description="This and the next: what a request does not set.")
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: list[Text] | None = None

    def preset(self) -> Preset:
        return msgspec.convert(self.model_dump(exclude={"name"}), Preset)


class UnloadBody(OwnBody):
    free: bool = Field(False, description="Free its memory now, not when needed.")


class DrainBody(OwnBody):
    undo: bool = Field(False, description="Have the node back.")


def model_routes(gateway: Gateway, heartbeat_s: float) -> APIRouter:
    routes = APIRouter(prefix=MODELS_PATH, tags=["Models"], route_class=JsonRoute)

    @routes.get("", summary="List the deployed models")
    async def list_models(request: Request) -> Response:
        return as_json(gateway.deployments.models(caller_of(request)))

    @routes.get("/{name:path}", summary="Show a deployed model")
    async def show_model(name: str, request: Request, look: bool = False) -> Response:
        """With `look`, its source is checked for changes, which may take seconds.

        The result is cached for 30 s, except for admin keys.
        """
        return as_json(await gateway.deployments.show(name, caller_of(request), look=look))

    @routes.post("", summary="Deploy a model or a LoRA adapter", responses=_EVENTS)
    async def deploy(body: DeployBody, request: Request) -> Response:
        """Streams progress as events; with `Accept: application/json` it waits and returns the model."""
        order = msgspec.convert(body.model_dump(), DeployOrder)
        events = gateway.deploy(order)
        return ProgressResponse(events, heartbeat_s, result="model", is_whole=_wants_json(request))

    @routes.delete("/{name:path}", summary="Remove a model or an adapter")
    async def remove(name: str, with_adapters: bool = False) -> Response:
        """A model with adapters is removed only `with_adapters`; otherwise the status is 409."""
        await gateway.deployments.remove(name, with_adapters=with_adapters)
        return as_json({"removed": name})

    @routes.post("/{name:path}/snapshot", summary="Make a snapshot of a model", responses=_EVENTS)
    async def make_snapshot(name: str, request: Request) -> Response:
        """Loads the model and measures it once its worker is idle.

        Streams progress as events; with `Accept: application/json` it waits and returns the snapshot.
        """
        events = gateway.make_snapshot(name, caller_of(request))
        return ProgressResponse(events, heartbeat_s, result="snapshot", is_whole=_wants_json(request))

    @routes.post("/{name:path}/presets", summary="Make a preset of a model, an adapter or a preset")
    async def put_preset(name: str, body: PresetBody) -> Response:
        """A preset is a name with defaults of its own that shares the weights of its base. Returns it."""
        return as_json(await gateway.put_preset(body.name, name, body.preset()))

    @routes.post("/{name:path}/unload", summary="Let a model be evicted")
    async def unload(name: str, body: UnloadBody) -> Response:
        """Returns the memory of the model, and what stays in host memory."""
        return as_json(await gateway.unload(name, body.free))

    return routes


def service_routes(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["Service"])

    @routes.get(
        "/health",
        summary="Whether requests are accepted",
        responses={503: {"description": "Starting, failing (no worker starts) or draining."}},
    )
    async def health() -> Response:
        view = gateway.views.health()
        return as_json(view, 200 if view.status == "ok" else 503)

    @routes.get("/metrics", summary="Prometheus metrics", response_class=Response, responses=PLAIN_TEXT)
    async def metrics() -> Response:
        return Response(await gateway.views.fresh_metrics(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @routes.get("/livez", summary="Whether the process responds")
    async def live() -> Response:
        """For liveness probes; it does not depend on workers, which the service restarts itself."""
        return as_json({"status": "ok"})

    @routes.get(
        "/readyz",
        summary="Whether requests should be sent here",
        responses={503: {"description": "Starting, failing (no worker starts) or draining."}},
    )
    async def ready() -> Response:
        status = gateway.views.health().status
        return as_json({"status": status}, 200 if status == "ok" else 503)

    @routes.get("/version", summary="The version of the service")
    async def version() -> Response:
        return as_json({"version": hearth_version()})

    @routes.get("/hearth/ps", summary="Workers, their memory and loaded models")
    async def ps() -> Response:
        return as_json(await gateway.views.fresh_ps())

    @routes.get(FORECASTS_PATH + "/{name:path}", summary="Recorded and expected requests for a model")
    async def forecast(name: str, request: Request) -> Response:
        """Needs the setting `service.prewarm`. Rates are requests per second."""
        return as_json(gateway.views.forecast(name, caller_of(request)))

    @routes.get("/hearth/requests/{request_id:path}", summary="Explain where the time of a request went")
    async def explain(request_id: str, request: Request) -> Response:
        """Takes the id of a request or answer, the `x-request-id` that the client sent (the last such
        request), or `last`. Requests of other groups are unknown, except for monitor keys.
        """
        caller = caller_of(request)
        plain = request_id
        for prefix in (CHAT.id_prefix, COMPLETION.id_prefix, ID_PREFIX, MESSAGE_PREFIX):
            plain = plain.removeprefix(prefix)
        explanation = gateway.views.explain(plain, caller)
        if explanation is None and plain != request_id:  # a client's own id may have such a prefix
            explanation = gateway.views.explain(request_id, caller)
        if explanation is None:
            raise UnknownRequest(
                f"no request has the id `{request_id:.80}`, or it was too long ago; "
                "the header `x-hearth-request-id` of a response has its id"
            )
        return as_json(explanation)

    return routes


def node_routes(gateway: Gateway) -> APIRouter:
    routes = APIRouter(prefix=NODES_PATH, tags=["Service"], route_class=JsonRoute)

    def cluster() -> Cluster:
        if (found := gateway.views.cluster) is None:
            raise RequestError(
                "this service runs on one machine; make it the head of a cluster with `hearth cluster init`, "
                "and restart it"
            )
        return found

    @routes.get("", summary="Machines of the cluster")
    async def list_nodes() -> Response:
        return as_json(await gateway.views.fresh_nodes())

    @routes.post("/{name}/drain", summary="Place nothing more on a node; running requests finish")
    async def drain(name: str, body: DrainBody) -> Response:
        cluster().drain(name, is_draining=not body.undo)
        return as_json({"drained" if not body.undo else "undrained": name})

    @routes.delete("/{name}", summary="Remove a node from the cluster, for good")
    async def remove(name: str) -> Response:
        await cluster().remove(name)
        return as_json({"removed": name})

    return routes


def _wants_json(request: Request) -> bool:
    return request.headers.get("accept", "").startswith("application/json")
