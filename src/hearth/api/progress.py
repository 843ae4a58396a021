"""Responses that tell how far a deployment or a snapshot is, as a stream or only the result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hearth.api.answer import STREAM_HEADERS, unless_gone
from hearth.api.error_spelling import spell
from hearth.api.errors import fault_of
from hearth.api.json_response import as_json
from hearth.core.errors import ConfigError, HearthError, RequestError


@dataclass(frozen=True, slots=True)
class ProgressFormat:
    media_type: str
    before: bytes  #: each event
    after: bytes
    waiting: bytes  #: the keep-alive of a stream
    path: str  #: of the API whose error object is sent


class ProgressResponse(Response):
    def __init__(
        self,
        events: AsyncIterator[dict[str, object]],
        result: str | None,
        heartbeat_s: float,
        format: ProgressFormat,
        *,
        is_whole: bool,
    ) -> None:
        """`is_whole`: return the last event as plain JSON, or its field `result`."""
        super().__init__()
        assert isinstance(events, AsyncGenerator), f"must be closable: {type(events)}"
        self._events, self._result, self._heartbeat_s = events, result, heartbeat_s
        self._format, self._is_whole = format, is_whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._wait(scope, receive, send) if self._is_whole else self._stream(send)
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

    async def _stream(self, send: Send) -> None:
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
                        headers = {"content-type": self._format.media_type} | STREAM_HEADERS
                        raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
                        await send({"type": "http.response.start", "status": 200, "headers": raw_headers})
                    await write(
                        self._format.waiting if event is None else self._event(msgspec.json.encode(event))
                    )
        except HearthError as error:
            if not is_started:
                raise
            await write(self._event(spell(fault_of(error), self._format.path)))
        await write(b"", more=False)

    def _event(self, data: bytes) -> bytes:
        return self._format.before + data + self._format.after


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
