"""Hearth's own routes: what is deployed and running, deploying and removing, health and metrics.

They lie under `/hearth`, away from `/api`, where clients of Ollama expect Ollama's format; probes
and `/metrics` lie where scrapers look for them. Answers no prompts, as dialects do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import Field
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hearth.api.answer import SSE_TYPE, STREAM_HEADERS, WAITING, unless_gone
from hearth.api.answers import PLAIN_TEXT
from hearth.api.anthropic.message_format import MESSAGE_PREFIX
from hearth.api.body import OwnBody, Text
from hearth.api.error_spelling import spell
from hearth.api.errors import fault_of
from hearth.api.guard import MODELS_PATH, caller_of
from hearth.api.json_body import JsonRoute
from hearth.api.json_response import as_json
from hearth.api.openai.answer_format import CHAT, COMPLETION
from hearth.api.responses.dialect import ID_PREFIX
from hearth.core.errors import ConfigError, HearthError, RequestError, UnknownRequest
from hearth.core.version import hearth_version

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway

_EVENTS: dict[int | str, dict[str, object]] = {
    200: {"description": "Progress.", "content": {"text/event-stream": {}, "application/json": {}}}
}


class DeployBody(OwnBody):
    source: Text = Field(
        min_length=1, max_length=4096, description="A directory, a GGUF file, hf:ORG/NAME, or a URL."
    )
    name: Text | None = Field(None, max_length=128, description="Without one, it is derived from the source.")
    dtype: Text = Field("auto", max_length=32)
    quant: Text = Field("none", max_length=32)
    overwrite: bool = Field(False, description="Replace a model of that name.")
    base: Text | None = Field(
        None, max_length=128, description="The deployed model that the source is a LoRA adapter of."
    )


class UnloadBody(OwnBody):
    free: bool = Field(False, description="Drop it from memory, instead of merely allowing that.")


def model_routes(gateway: Gateway, heartbeat_s: float) -> APIRouter:
    routes = APIRouter(prefix=MODELS_PATH, tags=["Models"], route_class=JsonRoute)

    @routes.get("", summary="List the deployed models")
    async def list_models(request: Request) -> Response:
        return as_json(gateway.deployments.models(caller_of(request)))

    @routes.get("/{name:path}", summary="Show a deployed model")
    async def show_model(name: str, request: Request, look: bool = False) -> Response:
        """With `look`, what it was deployed from is asked whether it has changed; that may take seconds.

        An answer that is less than 30 s old is used again, unless the caller's key is an admin's.
        """
        return as_json(await gateway.deployments.show(name, caller_of(request), look=look))

    @routes.post("", summary="Deploy a model or a LoRA adapter", responses=_EVENTS)
    async def deploy(body: DeployBody, request: Request) -> Response:
        """Answers with progress as events; with `Accept: application/json` it waits and shows the model."""
        events = gateway.deploy(body.source, body.name, body.dtype, body.quant, body.overwrite, body.base)
        return ProgressResponse(events, "model", request, heartbeat_s)

    @routes.delete("/{name:path}", summary="Remove a model or an adapter")
    async def remove(name: str, with_adapters: bool = False) -> Response:
        """A model that has adapters is removed only `with_adapters`; else the answer, 409, names them."""
        await gateway.deployments.remove(name, with_adapters=with_adapters)
        return as_json({"removed": name})

    @routes.post("/{name:path}/snapshot", summary="Make a snapshot of a model", responses=_EVENTS)
    async def make_snapshot(name: str, request: Request) -> Response:
        """Asks the model for a token, so that it is loaded, and measures it when nobody has requests.

        Answers with progress as events; with `Accept: application/json` it waits and shows the snapshot.
        """
        events = gateway.make_snapshot(name, caller_of(request))
        return ProgressResponse(events, "snapshot", request, heartbeat_s)

    @routes.post("/{name:path}/unload", summary="Let a model go from device memory")
    async def unload(name: str, body: UnloadBody) -> Response:
        """Answers with the memory that the model has, and what of it stays in host memory."""
        return as_json(await gateway.unload(name, body.free))

    return routes


def service_routes(gateway: Gateway) -> APIRouter:
    routes = APIRouter(tags=["Service"])

    @routes.get(
        "/health",
        summary="Whether requests are taken",
        responses={503: {"description": "No: it is starting, failing (no worker comes up) or draining."}},
    )
    async def health() -> Response:
        view = gateway.views.health()
        return as_json(view, 200 if view.status == "ok" else 503)

    @routes.get("/metrics", summary="Prometheus metrics", response_class=Response, responses=PLAIN_TEXT)
    async def metrics() -> Response:
        return Response(await gateway.views.measure(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    @routes.get("/livez", summary="Whether the process answers")
    async def live() -> Response:
        """For a probe that restarts the process; of workers, which the service restarts, see `/readyz`."""
        return as_json({"status": "ok"})

    @routes.get(
        "/readyz",
        summary="Whether requests should be sent here",
        responses={503: {"description": "No: it is starting, failing (no worker comes up) or draining."}},
    )
    async def ready() -> Response:
        status = gateway.views.health().status
        return as_json({"status": status}, 200 if status == "ok" else 503)

    @routes.get("/version", summary="The version of the service")
    @routes.get("/hearth/version", summary="The same, for commands")
    async def version() -> Response:
        return as_json({"version": hearth_version()})

    @routes.get("/hearth/ps", summary="What is resident and running where")
    async def ps() -> Response:
        return as_json(await gateway.views.look())

    @routes.get("/hearth/requests/{request_id:path}", summary="What happened to a request, and why")
    async def explain(request_id: str, request: Request) -> Response:
        """Explain a request by its id, by that of its answer, or by the `x-request-id` that its client sent.

        Of several that were sent with one id it is the last. One that a key of another group has sent is
        unknown, unless the caller's key is a monitor's.
        """
        caller = caller_of(request)
        plain = request_id
        for prefix in (CHAT.id_prefix, COMPLETION.id_prefix, ID_PREFIX, MESSAGE_PREFIX):
            plain = plain.removeprefix(prefix)
        explanation = gateway.views.explain(plain, caller)
        if explanation is None and plain != request_id:  # a client's own id may begin like that, too
            explanation = gateway.views.explain(request_id, caller)
        if explanation is None:
            raise UnknownRequest(
                f"no request has the id `{request_id:.80}`, or it is too long ago; "
                "an answer has its own in the header `x-hearth-request-id`"
            )
        return as_json(explanation)

    return routes


class ProgressResponse(Response):
    """The HTTP response to an order that takes its time: progress as events, or the result at the end."""

    def __init__(
        self, events: AsyncIterator[dict[str, object]], result: str, request: Request, heartbeat_s: float
    ) -> None:
        """`result`: the field of the last event that a client gets who asks for plain JSON."""
        super().__init__()
        assert isinstance(events, AsyncGenerator), f"it must be possible to call it off: {type(events)}"
        self._events, self._result, self._heartbeat_s = events, result, heartbeat_s
        self._is_whole = request.headers.get("accept", "").startswith("application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._wait(scope, receive, send) if self._is_whole else self._stream(send)
        try:
            await unless_gone(receive, work)
        except ConfigError as error:  # the service's own settings are right; this model does not go with them
            raise RequestError(str(error)) from error

    async def _wait(self, scope: Scope, receive: Receive, send: Send) -> None:
        result: object = None
        async with aclosing(self._events) as events:
            async for event in events:
                result = event.get(self._result)
        await as_json(result)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """Send progress as events; what fails before the first has its own status, as in `Answer`."""
        is_started = False

        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async with (
                aclosing(self._events) as events,
                aclosing(_paused(events, self._heartbeat_s)) as paced,
            ):
                async for event in paced:
                    if not is_started:
                        is_started = True
                        headers = {"content-type": SSE_TYPE} | STREAM_HEADERS
                        raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
                        await send({"type": "http.response.start", "status": 200, "headers": raw_headers})
                    await write(WAITING if event is None else _event(msgspec.json.encode(event)))
        except HearthError as error:
            if not is_started:
                raise
            await write(_event(spell(fault_of(error), MODELS_PATH)))
        await write(b"", more=False)


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _paused(
    events: AsyncIterator[dict[str, object]], pause_s: float
) -> AsyncGenerator[dict[str, object] | None, None]:
    """Yield the events, and None whenever there was none for `pause_s`."""
    while True:
        coming = asyncio.ensure_future(anext(events, None))
        try:
            while not (await asyncio.wait((coming,), timeout=pause_s))[0]:
                yield None
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
        if (event := coming.result()) is None:
            return
        yield event
