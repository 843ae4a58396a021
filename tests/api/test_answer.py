"""Connections that wait, and clients that leave."""

from __future__ import annotations

import asyncio
import json

import pytest

from hearth.core.errors import EngineFailed
from hearth.text.tokenizer import Tokenizer
from tests.api.conftest import Connection, app_of
from tests.api.fake import FakeGateway, tokens_of

CHAT = "/v1/chat/completions"


def body(**fields: object) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} | fields).encode()


def test_a_stream_that_waits_says_so(gateway: FakeGateway) -> None:
    async def talk() -> Connection:
        def answer(data: bytes) -> None:
            if data == b": waiting\n\n" and connection.received.count(data) == 2:
                gateway.streams[0].put(tokens_of("Hi"))

        connection = Connection(body(stream=True), answer)
        gateway.script = lambda stream: None
        await connection.run(app_of(gateway, heartbeat_s=0.01), CHAT)
        return connection

    connection = asyncio.run(talk())

    assert connection.status == 200
    assert connection.received.count(b": waiting\n\n") == 2
    assert connection.received[-1].endswith(b"data: [DONE]\n\n")
    assert gateway.cancelled == []


def test_a_stream_that_is_paused_between_two_tokens_says_so_and_goes_on(gateway: FakeGateway) -> None:
    async def talk() -> Connection:
        def answer(data: bytes) -> None:
            if data == b": waiting\n\n" and connection.received.count(data) == 3:
                gateway.streams[0].put(tokens_of(" again"))

        connection = Connection(body(stream=True), answer)
        gateway.script = lambda stream: stream.put(tokens_of("Hi", finish=None))
        await connection.run(app_of(gateway, heartbeat_s=0.01), CHAT)
        return connection

    received = asyncio.run(talk()).received

    assert received.count(b": waiting\n\n") == 3
    first, last = (next(at for at, data in enumerate(received) if word in data) for word in (b"Hi", b"again"))
    assert first < received.index(b": waiting\n\n") < last
    assert received[-1].endswith(b"data: [DONE]\n\n")


def test_each_token_is_an_event_while_the_client_keeps_up(gateway: FakeGateway) -> None:
    async def talk() -> Connection:
        words = iter(["b", "c", "d"])

        def answer(data: bytes) -> None:
            if b'"content":"' in data and b'"role"' not in data:
                word = next(words, None)
                gateway.streams[0].put(tokens_of(word, finish=None) if word else tokens_of(""))

        connection = Connection(body(stream=True), answer)
        gateway.script = lambda stream: stream.put(tokens_of("a", finish=None))
        await connection.run(app_of(gateway), CHAT)
        return connection

    received = asyncio.run(talk()).received

    assert [data.count(b"data: ") for data in received] == [1] * 5 + [2]  # role, a, b, c, d, reason and end


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": True, "n": 3}, {}, {"n": 3}])
def test_a_client_that_leaves_cancels_what_it_asked_for(
    gateway: FakeGateway, fields: dict[str, object]
) -> None:
    async def talk() -> None:
        connection = Connection(body(**fields))
        gateway.script = lambda stream: stream.put(tokens_of("a", finish=None))
        running = asyncio.create_task(connection.run(app_of(gateway), CHAT))
        while len(gateway.streams) < fields.get("n", 1):  # type: ignore[operator]
            await asyncio.sleep(0)
        connection.is_gone.set()
        await running
        leftover = asyncio.all_tasks() - {asyncio.current_task()}
        assert leftover == set()

    asyncio.run(talk())

    assert sorted(gateway.cancelled) == sorted(stream.request_id for stream in gateway.streams)


MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
        ("/api/chat", {"messages": MESSAGES}),
        ("/api/generate", {"prompt": "Hi"}),
    ],
)
def test_a_client_that_leaves_amid_an_answer_cancels_it_in_every_dialect(
    gateway: FakeGateway, path: str, fields: dict[str, object], is_stream: bool
) -> None:
    async def talk() -> Connection:
        asked = json.dumps({"model": "tiny", "stream": is_stream} | fields).encode()
        connection = Connection(asked)
        gateway.script = lambda stream: stream.put(tokens_of("a", finish=None))
        running = asyncio.create_task(connection.run(app_of(gateway), path))
        while not (connection.received if is_stream else gateway.streams):
            await asyncio.sleep(0)
        connection.is_gone.set()
        await running
        return connection

    received = asyncio.run(talk()).received

    assert gateway.cancelled == ["r0"]
    assert bool(received) is is_stream
    assert b'"done":true' not in b"".join(received)


def test_when_one_choice_fails_the_others_are_cancelled(gateway: FakeGateway) -> None:
    def script(stream: object) -> None:
        if len(gateway.streams) == 2:
            gateway.streams[1].fail(EngineFailed("broken"))
        else:
            gateway.streams[-1].put(tokens_of("a", finish=None))

    async def talk() -> Connection:
        connection = Connection(body(stream=True, n=3))
        gateway.script = script
        await connection.run(app_of(gateway), CHAT)
        return connection

    received = asyncio.run(talk()).received

    assert b'"message": "broken"' in received[-1]
    assert gateway.cancelled == ["r0", "r2"]


def test_a_call_that_is_held_back_does_not_silence_the_stream(tokenizers: dict[str, Tokenizer]) -> None:
    gateway = FakeGateway(tokenizers["hermes"])
    tool = {"type": "function", "function": {"name": "f"}}

    async def talk() -> Connection:
        def answer(data: bytes) -> None:
            if data == b": waiting\n\n":
                gateway.streams[0].put(tokens_of('"f"}</tool_call>'))

        connection = Connection(body(stream=True, tools=[tool]), answer)
        gateway.script = lambda stream: stream.put(tokens_of('<tool_call>{"name": ', finish=None))
        running = asyncio.create_task(connection.run(app_of(gateway, heartbeat_s=0.05), CHAT))
        while not running.done() and not any(b"waiting" in data for data in connection.received):
            if gateway.streams and not gateway.streams[0].is_ended:
                gateway.streams[0].put(tokens_of(" ", finish=None))  # something comes all the time
            await asyncio.sleep(0.001)
        await running
        return connection

    received = asyncio.run(talk()).received

    assert b": waiting\n\n" in received
    assert received[-1].endswith(b"data: [DONE]\n\n")


def test_a_deployment_that_takes_long_says_so(gateway: FakeGateway) -> None:
    async def talk() -> list[bytes]:
        goes_on = asyncio.Event()

        async def deploy(*order: object, **settings: object) -> object:
            yield {"event": "progress"}
            await goes_on.wait()
            yield {"event": "done", "model": None}

        gateway.deploy = deploy  # type: ignore[assignment, method-assign] # one that waits
        connection = Connection(
            json.dumps({"source": "/models/x"}).encode(),
            lambda data: goes_on.set() if b"waiting" in data else None,
        )
        await connection.run(app_of(gateway, heartbeat_s=0.01), "/hearth/models")
        return connection.received

    received = asyncio.run(talk())

    assert received[0] == b'data: {"event":"progress"}\n\n'
    assert b": waiting\n\n" in received
    assert received[-2:] == [b'data: {"event":"done","model":null}\n\n', b""]


def test_a_deployment_whose_client_leaves_is_called_off(gateway: FakeGateway) -> None:
    async def talk() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def deploy(*order: object, **settings: object) -> object:
            try:
                begun.set()
                yield {"event": "progress"}
                await asyncio.Event().wait()
            finally:
                ended.set()

        gateway.deploy = deploy  # type: ignore[assignment, method-assign] # one that takes for ever
        connection = Connection(json.dumps({"source": "/models/x"}).encode())
        running = asyncio.create_task(connection.run(app_of(gateway), "/hearth/models"))
        await begun.wait()
        connection.is_gone.set()
        await running
        assert ended.is_set()

    asyncio.run(talk())
