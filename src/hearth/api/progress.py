"""Responses that tell how far a deployment or a snapshot is, as a stream or only the result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hearth.api.answer import NDJSON_TYPE, SSE_TYPE, STREAM_HEADERS, WAITING, unless_gone
from hearth.api.error_spelling import spell
from hearth.api.errors import fault_of
from hearth.api.json_response import as_json
from hearth.core.errors import ConfigError, HearthError, RequestError


class ProgressResponse(Response):
    def __init__(
        self,
        events: AsyncIterator[dict[str, object]],
        heartbeat_s: float,
        *,
        result: str | None,
        is_whole: bool,
        has_lines: bool = False,
    ) -> None:
        """`is_whole`: return the last event as JSON, or its field `result`; else stream events, or lines."""
        super().__init__()
        assert isinstance(events, AsyncGenerator), f"must be closable: {type(events)}"
        self._events, self._result, self._heartbeat_s = events, result, heartbeat_s
        self._is_whole, self._has_lines = is_whole, has_lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._wait(scope, receive, send) if self._is_whole else self._stream(scope["path"], send)
        try:
            await unless_gone(receive, work)
        except ConfigError as error:  # the service's own settings are valid; this model conflicts with them
            raise RequestError(str(error)) from error

    async def _wait(self, scope: Scope, receive: Receive, send: Send) -> None:
        result: object = None
        async with aclosing(self._events) as events:
            async for event in events:
                result = event if self._result is None else event.get(self._result)
        await as_json(result)(scope, receive, send)

    async def _stream(self, path: str, send: Send) -> None:
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
                        headers = {
                            "content-type": NDJSON_TYPE if self._has_lines else SSE_TYPE
                        } | STREAM_HEADERS
                        raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
                        await send({"type": "http.response.start", "status": 200, "headers": raw_headers})
                    await write(self._waiting if event is None else self._event(msgspec.json.encode(event)))
        except HearthError as error:
            if not is_started:
                raise
            await write(self._event(spell(fault_of(error), path)))
        await write(b"", more=False)

    @property
    def _waiting(self) -> bytes:
        """Ollama's clients take each line for progress, so an idle stream repeats the first."""
        return b'{"status":"pulling manifest"}\n' if self._has_lines else WAITING

    def _event(self, data: bytes) -> bytes:
        return data + b"\n" if self._has_lines else b"data: " + data + b"\n\n"


async def _paused(
    events: AsyncIterator[dict[str, object]], pause_s: float
) -> AsyncGenerator[dict[str, object] | None, None]:
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
