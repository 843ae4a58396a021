"""Tokenizers that speak in calls and some that do not, and ways to talk to the API."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from tokenizers import AddedToken

from hearth.api.app import ApiLimits, create_app
from hearth.control.observe.exchange_record import ExchangeRecord
from hearth.text.tokenizer import Tokenizer
from tests.api.fake import FakeGateway
from tests.text.conftest import byte_level

TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "hermes": "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}{{ messages[0].content }}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{{ messages[0].content }}",
    "llama3": "{{ '<|python_tag|>' if tools }}{{ messages[0].content }}",
}


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Tokenizers by the format of calls in their template."""
    made = {}
    for name, template in TEMPLATES.items():
        directory = tmp_path_factory.mktemp(name)
        backend = byte_level()
        if name == "hermes":
            backend.add_tokens([AddedToken(tag, special=True) for tag in ("<tool_call>", "</tool_call>")])
        backend.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(template)
        made[name] = Tokenizer.load(directory)
    return made


@pytest.fixture
def gateway(tokenizers: dict[str, Tokenizer]) -> FakeGateway:
    return FakeGateway(tokenizers["plain"])


def app_of(
    gateway: FakeGateway,
    max_body_bytes: int = 100_000,
    heartbeat_s: float = 30.0,
    allowed_origins: tuple[str, ...] = (),
    response_store_bytes: int = 1 << 20,
) -> FastAPI:
    limits = ApiLimits(max_body_bytes, heartbeat_s, response_store_bytes, allowed_origins)
    return create_app(gateway, limits)  # type: ignore[arg-type] # it plays one


@contextmanager
def serving(config: uvicorn.Config) -> Iterator[tuple[str, int]]:
    """Yield the address of a real server."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def served_app(gateway: FakeGateway) -> Iterator[str]:
    """Yield the URL of an application on a real server."""
    config = uvicorn.Config(
        app_of(gateway), http="httptools", lifespan="off", log_config=None, access_log=False
    )
    with serving(config) as (host, port):
        yield f"http://{host}:{port}"


class CurrentGateway:
    """Stands for the gateway of the test that asks now, in an app that many tests share. Mutable."""

    gateway: FakeGateway | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.gateway, name)

    def exchange_ended(self, record: ExchangeRecord) -> None:
        """Tell the gateway of the moment, for an app looks this method up only once."""
        self.gateway.exchange_ended(record)


@cache
def shared_app(max_body_bytes: int, allowed_origins: tuple[str, ...]) -> tuple[FastAPI, CurrentGateway]:
    """One app for all requests of all tests, since to build one takes five times as long as to ask it."""
    current = CurrentGateway()
    return app_of(current, max_body_bytes, allowed_origins=allowed_origins), current  # type: ignore[arg-type]


def request(
    gateway: FakeGateway,
    method: str,
    path: str,
    body: object = None,
    *,
    headers: dict[str, str] | None = None,
    content: str | AsyncIterator[bytes] | None = None,
    max_body_bytes: int = 100_000,
    allowed_origins: tuple[str, ...] = (),
) -> httpx.Response:
    async def answered() -> httpx.Response:
        app, current = shared_app(max_body_bytes, allowed_origins)
        current.gateway = gateway
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            if body is None:
                return await client.request(method, path, headers=headers, content=content)
            kind = {"content-type": "application/json"}
            # By hand, because httpx cannot send half characters.
            return await client.request(
                method, path, headers=kind | (headers or {}), content=json.dumps(body)
            )

    return asyncio.run(answered())


def chat(gateway: FakeGateway, **fields: object) -> httpx.Response:
    messages = [{"role": "user", "content": "Hi"}]
    return request(gateway, "POST", "/v1/chat/completions", {"model": "tiny", "messages": messages} | fields)


def complete(gateway: FakeGateway, **fields: object) -> httpx.Response:
    return request(gateway, "POST", "/v1/completions", {"model": "tiny", "prompt": "Hi"} | fields)


def events(response: httpx.Response) -> list[dict[str, object]]:
    """The data of a stream; it must be well framed and end as it should."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert all(frame.startswith("data: ") for frame in frames[:-1])
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


@dataclass
class Connection:
    """A client of an ASGI application that reacts to what it is sent, and may leave."""

    body: bytes
    on_data: Callable[[bytes], None] = lambda data: None
    received: list[bytes] = field(default_factory=list)
    status: int | None = None
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    async def run(self, app: Callable[..., Awaitable[None]], path: str) -> None:
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), *self.headers],
        }
        await app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, object]:
        if self.body:
            body, self.body = self.body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            assert isinstance(message["status"], int)
            self.status = message["status"]
        else:
            data = message["body"]
            assert isinstance(data, bytes)
            self.received.append(data)
            self.on_data(data)
