"""The HTTP response that answers a prompt, as a stream or whole.

Everything happens in `__call__`, so that streams are closed in one place, also when the client disconnects.
Nothing is sent before the first token, so that earlier failures have their own status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hearth.api.dialect import AnswerSpec, Choice, ChoiceReader, TokenUsage
from hearth.api.exchange import Exchange, exchange_of
from hearth.api.unread_fields import ignored_fields_header
from hearth.control.keys.key_admission import KeyAdmission
from hearth.control.requests.caller import Caller
from hearth.control.requests.generation import AnswerStream
from hearth.core.errors import BadPrompt, HearthError, PromptTooLong
from hearth.text.detokenizer import prompt_text
from hearth.text.reasoning import Thought
from hearth.text.tool_calls import ToolCall

if TYPE_CHECKING:
    from hearth.control.gateway import Gateway, PreparedRequest

#: A comment among server-sent events, and their content type.
WAITING = b": waiting\n\n"
SSE_TYPE = "text/event-stream; charset=utf-8"
NDJSON_TYPE = "application/x-ndjson"  #: lines of JSON
#: Longer prompts are decoded off the event loop.
MANY_TOKENS = 256
#: Larger prompt logprobs and embeddings are formatted off the event loop.
MANY_BYTES = 64 << 10
#: Concurrent requests of one answer; the others wait here and do not fill the queue.
MAX_STARTED = 256
#: Proxies must neither cache nor buffer a stream.
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Answer(Response):
    def __init__(self, gateway: Gateway, spec: AnswerSpec, caller: Caller, heartbeat_s: float) -> None:
        super().__init__()
        self._gateway = gateway
        self._spec = spec
        self._caller = caller
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._gateway.admissions.admit(self._caller) as admission:
            await self._answer_admitted(admission, scope, receive, send)

    async def _answer_admitted(
        self, admission: KeyAdmission, scope: Scope, receive: Receive, send: Send
    ) -> None:
        streams: list[AnswerStream] = []
        try:
            prepared = await self._prepare(admission)
            if self._spec.is_stream:
                self._start(prepared, streams, exchange_of(scope))
                await self._stream(streams, send)
            else:
                body = await self._whole(prepared, streams, exchange_of(scope))
                headers = ignored_fields_header(self._spec.ignored_fields)
                answer = Response(body, 200, headers, "application/json")
                await answer(scope, receive, send)
        finally:
            for stream in streams:
                stream.close()

    async def _prepare(self, admission: KeyAdmission) -> list[PreparedRequest]:
        """Return all requests, admitted. A prompt is tokenised and scored once for all its answers."""
        num_answers = self._spec.num_answers
        prompt: list[int] | None = None
        prepared = []
        for index, request in enumerate(self._spec.requests):
            with self._located(index // num_answers):
                if num_answers > 1 and index % num_answers == 0:
                    model, max_tokens = request.model, request.sampling.max_tokens
                    prompt = await self._gateway.prompts.encode(
                        model, request.prompt, self._caller, max_tokens
                    )
                if prompt is not None:
                    request = replace(request, prompt=prompt, counts_prompt=index % num_answers == 0)
                if index % num_answers:
                    request = replace(request, sampling=replace(request.sampling, prompt_logprobs=None))
                prepared.append(await self._gateway.prepare(request, admission))
        return prepared

    @contextmanager
    def _located(self, index: int) -> Iterator[None]:
        try:
            yield
        except (BadPrompt, PromptTooLong) as error:
            num_prompts = len(self._spec.requests) // self._spec.num_answers
            if num_prompts == 1:
                raise
            raise type(error)(f"prompt at index {index} of {num_prompts}: {error}") from error

    def _start(
        self, prepared: Sequence[PreparedRequest], streams: list[AnswerStream], exchange: Exchange
    ) -> None:
        """Start requests and append to `streams`, which the caller closes."""
        for one in prepared:
            stream = self._gateway.start(one, exchange.correlation)
            streams.append(stream)
            exchange.request_ids.append(stream.request_id)

    async def _stream(self, streams: Sequence[AnswerStream], send: Send) -> None:
        first_deltas = await streams[0].next(self._heartbeat_s)
        loop = asyncio.get_running_loop()
        written_s = loop.time()
        spec, dialect = self._spec, self._spec.dialect
        events = dialect.events(spec, streams)

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal written_s
            if data or not more:
                written_s = loop.time()
                await send({"type": "http.response.body", "body": data, "more_body": more})

        async def relay(index: int, stream: AnswerStream) -> bytes:
            deltas = first_deltas if stream is streams[0] else await stream.next(self._heartbeat_s)
            while True:
                pieces = events.write(index, deltas) if deltas else dialect.waiting
                if deltas and deltas[-1].finish_reason is not None:
                    return pieces
                # The tokens of a tool call are held back until it is complete.
                is_silent = loop.time() - written_s >= self._heartbeat_s
                await write(pieces or (dialect.waiting if is_silent else b""))
                deltas = await stream.next(self._heartbeat_s)

        headers = {"content-type": dialect.stream_type} | STREAM_HEADERS
        headers |= ignored_fields_header(spec.ignored_fields)
        raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw_headers})
        await write(events.first(await self._echoes(streams)))

        async def relay_one_of_many(index: int, stream: AnswerStream) -> None:
            await write(await relay(index, stream))

        failure: HearthError | None = None
        rest = b""
        try:
            if len(streams) == 1:
                rest = await relay(0, streams[0])
            else:
                async with asyncio.TaskGroup() as group:
                    for index, stream in enumerate(streams):
                        group.create_task(relay_one_of_many(index, stream))
        except* HearthError as failures:
            failure = _first(failures)
        usage = TokenUsage.of(streams, spec.num_answers)
        rest += events.last(usage) if failure is None else events.failed(failure)
        await write(rest, more=False)

    async def _whole(
        self, prepared: Sequence[PreparedRequest], streams: list[AnswerStream], exchange: Exchange
    ) -> bytes:
        self._start(prepared[:MAX_STARTED], streams, exchange)
        choices: list[Choice] = []
        echoes = await self._echoes(streams)
        for index, echo in enumerate(echoes):
            stream = streams[index]
            deltas = await stream.rest()
            self._start(prepared[len(streams) : len(streams) + 1], streams, exchange)
            parts = ChoiceReader(self._spec, stream).read(deltas)
            text = "".join(part for part in parts if isinstance(part, str))
            calls = [part for part in parts if isinstance(part, ToolCall)]
            reasoning = "".join(part.text for part in parts if isinstance(part, Thought))
            reading = streams[index - index % self._spec.num_answers].reading
            choices.append(Choice(stream, deltas, echo, text, calls, reasoning, reading))
        usage = TokenUsage.of(streams, self._spec.num_answers)
        spell = partial(_spell, self._spec.dialect.whole(self._spec, self._spec.best(choices), usage))
        num_bytes = sum(stream.reading.num_bytes for stream in streams if stream.reading is not None)
        return await asyncio.to_thread(spell) if num_bytes > MANY_BYTES else spell()

    async def _echoes(self, streams: Sequence[AnswerStream]) -> list[str]:
        if not self._spec.is_echo:
            return [""] * len(self._spec.requests)
        echoes: list[str] = []
        for request in self._spec.requests[:: self._spec.num_answers]:
            prompt = request.prompt
            if isinstance(prompt, list):
                skips_special = request.sampling.skip_special_tokens
                read = partial(prompt_text, streams[0].tokenizer, prompt, skips_special)
                prompt = await asyncio.to_thread(read) if len(prompt) > MANY_TOKENS else read()
            assert isinstance(prompt, str), "only texts and tokens are echoed"
            echoes += [prompt] * self._spec.num_answers
        return echoes


def _spell(whole: object) -> bytes:
    return msgspec.json.encode(whole, enc_hook=lambda later: later())


async def unless_gone(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Run `work`; cancel it when the client disconnects. The body must have been read."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _first(failures: BaseExceptionGroup[HearthError]) -> HearthError:
    error = failures.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
