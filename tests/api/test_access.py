"""What is noted of every HTTP exchange, whatever becomes of it."""

from __future__ import annotations

import asyncio

import pytest

from hearth.core.errors import Overloaded
from tests.api.conftest import Connection, app_of, complete, request
from tests.api.fake import FakeGateway, FakeKeys, tokens_of

ASK = {"model": "tiny", "prompt": "Hi"}
USER = {"authorization": "Bearer user-key"}


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "noted"),
    [
        ("GET", "/health", None, {}, (200, "/health", None)),
        ("HEAD", "/livez", None, {}, (200, "/livez", None)),
        ("POST", "/v1/completions", ASK, USER, (200, "/v1/completions", "ann")),
        ("POST", "/v1/completions/", ASK | {"n": 0}, USER, (400, "/v1/completions", "ann")),
        ("GET", "/v1/models", None, {}, (401, "/v1/models", None)),
        ("DELETE", "/hearth/models/tiny", None, USER, (403, "/hearth/models/{name}", "ann")),
        ("GET", "/v1/models/none", None, USER, (404, "/v1/models/{name}", "ann")),
        ("GET", "/no/where", None, USER, (404, None, "ann")),
        ("GET", "/v1/completions", None, USER, (405, "/v1/completions", "ann")),
        ("POST", "/v1/completions", ASK | {"prompt": "x" * 200_000}, USER, (413, "/v1/completions", "ann")),
        ("GET", "/v1/models", None, USER | {"x-long": "x" * 40_000}, (431, "/v1/models", "ann")),
        ("OPTIONS", "/v1/models", None, USER, (204, "/v1/models", "ann")),
        ("GET", "/openapi.json", None, USER, (200, "/openapi.json", "ann")),
    ],
)
def test_each_exchange_is_noted_once_with_its_route_status_and_key(
    gateway: FakeGateway,
    method: str,
    path: str,
    body: dict[str, object] | None,
    headers: dict[str, str],
    noted: tuple[int, str | None, str | None],
) -> None:
    gateway.keys = FakeKeys()
    response = request(gateway, method, path, body, headers=headers)

    (record,) = gateway.ended
    assert (record.status_code, record.route, record.caller) == noted
    assert response.status_code == record.status
    assert record.request_id == response.headers["x-hearth-request-id"]
    assert record.is_whole
    assert record.num_sent_bytes == len(response.content)
    assert record.ended_s >= record.began_s


def test_what_fails_inside_is_noted_as_a_500_and_what_is_refused_by_its_status(gateway: FakeGateway) -> None:
    for failure in (Overloaded("full", 1), ZeroDivisionError()):
        gateway.refusal = failure  # type: ignore[assignment] # the last one is none that anybody expects
        complete(gateway)

    assert [record.status for record in gateway.ended] == [429, 500]


def test_bytes_are_counted_both_ways(gateway: FakeGateway) -> None:
    async def body() -> object:
        yield b'{"model": "tiny", '
        yield b'"prompt": "Hi", "stream": true}'

    headers = {"content-type": "application/json"}
    response = request(gateway, "POST", "/v1/completions", headers=headers, content=body())  # type: ignore[arg-type] # it is one

    (record,) = gateway.ended
    assert (record.num_received_bytes, record.num_sent_bytes) == (49, len(response.content))


def test_a_client_that_leaves_before_an_answer_is_noted_without_a_status(gateway: FakeGateway) -> None:
    async def scene() -> None:
        connection = Connection(b'{"model": "tiny", "prompt": "Hi"}')
        gateway.script = lambda stream: connection.is_gone.set()
        await connection.run(app_of(gateway), "/v1/completions")

    asyncio.run(scene())

    (record,) = gateway.ended
    assert (record.status, record.status_code, record.is_whole) == (None, 499, False)


def test_a_client_that_leaves_a_stream_has_not_got_all_of_it(gateway: FakeGateway) -> None:
    async def scene() -> None:
        connection = Connection(b'{"model": "tiny", "prompt": "Hi", "stream": true}')
        connection.on_data = lambda data: connection.is_gone.set()
        gateway.script = lambda stream: stream.put(tokens_of("Hel", "lo", finish=None))
        await connection.run(app_of(gateway), "/v1/completions")

    asyncio.run(scene())

    (record,) = gateway.ended
    assert (record.status, record.is_whole) == (200, False)
    assert record.num_sent_bytes > 0
